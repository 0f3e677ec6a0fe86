"""What entering and leaving a steered block does, and what it refuses."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import signal
import sys
import threading

import numpy
import pytest
import torch
import transformers
from transformers import DynamicCache

from radar_core import (
    CAD,
    CFG,
    GUIDE,
    PASTA,
    SPA,
    AttentionBias,
    Guard,
    InstABoost,
    NoSteering,
    TargetMass,
    attention_mass,
)
from tests.models.tiny import SHAPE, prompts, tiny_model

METHODS = [SPA(1.7), AttentionBias(2.0), AttentionBias(2.0, queries="generated"), TargetMass(0.3)]
OFF = [SPA(1.0), SPA([1.0, 1.0]), AttentionBias(0.0)]


@pytest.fixture
def model():
    return tiny_model("Llama")


@pytest.fixture
def inputs():
    return prompts([20, 13], [[5, 6, 11], [2, 3]])


def snapshot(model):
    registered = transformers.AttentionInterface._global_mapping
    masks = transformers.AttentionMaskInterface._global_mapping
    return (
        set(registered),
        set(masks),
        [
            (
                id(m.config) if hasattr(m, "config") else None,
                len(m._forward_hooks),
                len(m._forward_pre_hooks),
                "forward" in vars(m),
            )
            for m in model.modules()
        ],
    )


def interrupted_at(step, act):
    """Press Ctrl-C at one step of this package's Python; return whether it came to that step."""
    left = step

    def trace(frame, event, argument):
        nonlocal left
        if "radar_core" not in frame.f_code.co_filename or left < 0:
            return None
        left -= 1
        if left < 0:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        act()
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(None)
    assert interrupted == (left < 0), "Ctrl-C was lost"
    return interrupted


def test_ctrl_c_at_any_moment_leaves_nothing_behind(model, inputs):
    """At every step of entering and leaving, spread over the runs."""
    anchors = inputs.pop("anchors")
    plain, before = model(**inputs).logits, snapshot(model)
    handler = signal.getsignal(signal.SIGINT)

    def enter_and_leave():
        with SPA(2.0).applied_to(model, anchors):
            pass

    steps = 0
    while interrupted_at(steps, enter_and_leave):
        restored = snapshot(model) == before and signal.getsignal(signal.SIGINT) is handler
        assert restored, steps
        steps += 1 if steps < 60 else 13
    assert steps > 500 and torch.equal(model(**inputs).logits, plain)
    with SPA(2.0).applied_to(model, anchors):
        pass


def test_a_block_that_is_never_left_ends_with_its_last_reference(model, inputs):
    before = snapshot(model)
    block = SPA(2.0).applied_to(model, inputs["anchors"])
    block.__enter__()
    assert snapshot(model) != before
    del block
    gc.collect()
    assert snapshot(model) == before


def test_a_block_that_is_entered_again_and_never_left_ends_with_its_last_reference(model, inputs):
    before = snapshot(model)
    block = SPA(2.0).applied_to(model, inputs["anchors"])
    for _ in range(2):
        with block:
            pass
    block.__enter__()
    assert snapshot(model) != before
    del block
    gc.collect()
    assert snapshot(model) == before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["the same thread", "another thread"])
def test_entering_a_block_that_is_at_work_leaves_it_at_work(model, inputs, method, where):
    anchors, refused = inputs.pop("anchors"), []
    plain = model(**inputs).logits
    block = method.applied_to(model, anchors)

    def enter():
        try:
            with block:
                pass
        except RuntimeError as error:
            refused.append(str(error))

    with torch.no_grad(), block:
        steered, hooked = model(**inputs).logits, snapshot(model)
        if where == "another thread":
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        else:
            enter()
        assert len(refused) == 1 and "already steered" in refused[0]
        assert snapshot(model) == hooked
        assert torch.equal(model(**inputs).logits, steered)
    assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize("shared", ["the decoder", "the layers", "the output layer"])
def test_models_that_share_parts_are_steered_one_at_a_time(model, inputs, shared):
    """Left in another order than entered, each would put back what the other had changed."""
    anchors, other = inputs.pop("anchors"), tiny_model("Llama", seed=1)
    if shared == "the decoder":
        other.model = model.model
    elif shared == "the layers":
        other.model.layers = model.model.layers
    else:
        other.lm_head = model.lm_head
    plain, before = [one(**inputs).logits for one in (model, other)], snapshot(other)
    with (
        AttentionBias(2.0).applied_to(model, anchors),
        pytest.raises(RuntimeError, match="shares parts with a model that is already steered"),
        SPA(2.0).applied_to(other, anchors),
    ):
        pass
    assert snapshot(other) == before
    with SPA(2.0).applied_to(other, anchors):
        pass
    for one, logits in zip((model, other), plain, strict=True):
        assert torch.equal(one(**inputs).logits, logits)


@pytest.mark.parametrize("method", METHODS)
def test_a_steered_model_and_its_parts_cannot_be_copied(model, inputs, method):
    with method.applied_to(model, inputs.pop("anchors")):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            for part in (model, model.model, model.model.layers[0].self_attn):
                with pytest.raises(RuntimeError, match="leave the steered block"):
                    make(part)
    for make in (copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        assert torch.equal(make(model)(**inputs).logits, model(**inputs).logits)


def test_a_changed_implementation_is_noticed(model, inputs):
    with AttentionBias(2.0).applied_to(model, inputs.pop("anchors")):
        model(**inputs)
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="'eager'"):
            model(**inputs)
    assert model.config._attn_implementation == "sdpa"
    model(**inputs)


@pytest.mark.parametrize("method", METHODS)
def test_attention_weights_are_refused(inputs, method):
    model = tiny_model("Llama", "eager")
    anchors = inputs.pop("anchors")
    with method.applied_to(model, anchors):
        with pytest.raises(ValueError, match="attention_mass"):
            model(**inputs, output_attentions=True)
        model(**inputs)
    assert model(**inputs, output_attentions=True).attentions[0].shape[0] == 2


@pytest.mark.parametrize("method", METHODS)
def test_only_one_thread_at_a_time_is_served(model, inputs, method):
    """One that was started in the block is as good as its own; a second one meanwhile is not."""
    anchors, caught, results = inputs.pop("anchors"), [], []
    options = dict(max_new_tokens=4, do_sample=False)

    def generate():
        try:
            results.append(model.generate(**inputs, **options))
        except RuntimeError as error:
            caught.append(str(error))

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=generate)
            thread.start()
            thread.join()

    with method.applied_to(model, anchors):
        generate()
        meanwhile()
        generate()
        assert len(results) == 3 and not caught
        handle = model.model.layers[1].register_forward_hook(meanwhile)
        generate()
        handle.remove()
    assert len(caught) == 4 and "one thread at a time" in caught[0]
    assert len(results) == 4 and all(torch.equal(results[0], other) for other in results)


def test_a_model_that_another_thread_is_running_is_refused(model, inputs):
    anchors, caught = inputs.pop("anchors"), []

    def enter():
        try:
            with SPA(2.0).applied_to(model, anchors):
                pass
        except RuntimeError as error:
            caught.append(str(error))

    def meanwhile(*_):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    model.model.layers[1].register_forward_hook(meanwhile)
    model(**inputs)
    assert "another thread is running" in caught[0]


def test_leaving_while_another_thread_is_running_the_model_is_told(model, inputs):
    """As with a streamer whose thread was not joined: the rest of its reply is not steered."""
    anchors, inside, go = inputs.pop("anchors"), threading.Event(), threading.Event()

    def hold(*_):
        inside.set()
        go.wait(10)

    before = snapshot(model)
    handle = model.model.layers[2].mlp.register_forward_hook(hold)
    thread = threading.Thread(target=model, kwargs=inputs)
    with (
        pytest.raises(RuntimeError, match="join it"),
        AttentionBias(2.0).applied_to(model, anchors),
    ):
        thread.start()
        inside.wait(10)
    go.set()
    thread.join()
    handle.remove()
    restored = snapshot(model) == before
    assert restored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(model, inputs, dtype):
    anchors = inputs.pop("anchors")
    options = dict(max_new_tokens=4, do_sample=False)
    with torch.autocast("cpu", dtype):
        plain = model(**inputs).logits
        with NoSteering().applied_to(model):
            assert model.generate(**inputs, **options).shape == (2, 24)
            torch.testing.assert_close(model(**inputs).logits, plain, atol=0.5, rtol=0.05)
        for method in METHODS:
            with method.applied_to(model, anchors):
                assert model.generate(**inputs, **options).shape == (2, 24)


@pytest.mark.parametrize("method", OFF)
def test_off_is_bit_identical_and_hooks_nothing(model, inputs, method):
    anchors = inputs.pop("anchors")
    plain = model(**inputs).logits
    before = snapshot(model)
    with method.applied_to(model, anchors=anchors) as steering:
        assert not steering.active and snapshot(model) == before
        assert torch.equal(model(**inputs).logits, plain)


def test_no_anchors_is_off(model, inputs):
    anchors = inputs.pop("anchors")
    plain = model(**inputs).logits
    for none in (None, torch.zeros_like(anchors)):
        for method in METHODS:
            with method.applied_to(model, anchors=none):
                assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.smoke
@pytest.mark.parametrize("method", [*METHODS, NoSteering()])
def test_leaving_restores_the_model_bit_for_bit(model, inputs, method):
    anchors = inputs.pop("anchors")
    plain = model(**inputs).logits
    before, config = snapshot(model), model.config
    names = set(transformers.AttentionInterface._global_mapping)
    with method.applied_to(model, anchors=anchors):
        steered = model(**inputs).logits
    assert snapshot(model) == before and model.config is config
    assert set(transformers.AttentionInterface._global_mapping) == names
    assert torch.equal(model(**inputs).logits, plain)
    if not isinstance(method, NoSteering):
        assert not torch.allclose(steered, plain, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_inside_leaves_nothing_behind(model, inputs, method):
    anchors = inputs.pop("anchors")
    plain, before = model(**inputs).logits, snapshot(model)

    class Interrupt(Exception):
        pass

    def fail(*_):
        raise Interrupt

    with method.applied_to(model, anchors=anchors):
        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(Interrupt):
            model(**inputs)
        handle.remove()
        again = model(**inputs).logits
    with pytest.raises(KeyboardInterrupt), method.applied_to(model, anchors=anchors):
        raise KeyboardInterrupt
    assert snapshot(model) == before and torch.equal(model(**inputs).logits, plain)
    with method.applied_to(model, anchors=anchors):
        assert torch.equal(model(**inputs).logits, again)


def test_two_models_that_share_a_config_do_not_see_each_other(model, inputs):
    anchors = inputs.pop("anchors")
    torch.manual_seed(3)
    other = type(model)(model.config).eval()
    assert other.config is model.config
    plain = other(**inputs).logits
    with AttentionBias(3.0).applied_to(model, anchors=anchors):
        assert torch.equal(other(**inputs).logits, plain)
        first = model(**inputs).logits
        with SPA(2.0).applied_to(other, anchors=anchors):
            assert not torch.equal(other(**inputs).logits, plain)
            assert torch.equal(model(**inputs).logits, first)


def test_steering_twice_is_refused(model, inputs):
    anchors = inputs.pop("anchors")
    with (
        AttentionBias(3.0).applied_to(model, anchors=anchors),
        pytest.raises(RuntimeError, match="already steered by AttentionBias in this thread"),
        SPA(2.0).applied_to(model, anchors=anchors),
    ):
        pass
    with SPA(2.0).applied_to(model, anchors=anchors):
        pass


def test_another_thread_is_refused(model, inputs):
    anchors = inputs.pop("anchors")
    caught = []

    def enter():
        try:
            with SPA(2.0).applied_to(model, anchors=anchors):
                pass
        except RuntimeError as error:
            caught.append(str(error))

    with AttentionBias(3.0).applied_to(model, anchors=anchors):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert "another thread" in caught[0]


def test_two_models_in_two_threads(inputs):
    anchors = inputs.pop("anchors")
    models = [tiny_model("Llama", seed=seed) for seed in (0, 1)]
    methods = [SPA(2.0), AttentionBias(3.0)]
    options = dict(do_sample=False, max_new_tokens=10)

    def run(which):
        with methods[which].applied_to(models[which], anchors=anchors):
            return model_generate(models[which])

    def model_generate(model):
        return model.generate(**inputs, **options)

    alone = [run(0), run(1)]
    results = [None, None]

    def work(which):
        for _ in range(5):
            results[which] = run(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results[0], alone[0]) and torch.equal(results[1], alone[1])


def test_saving_while_steered_saves_the_unsteered_model(model, inputs, tmp_path):
    model.save_pretrained(tmp_path / "before")
    with AttentionBias(3.0).applied_to(model, anchors=inputs["anchors"]):
        model.save_pretrained(tmp_path / "during")
    before, during = (
        json.loads((tmp_path / which / "config.json").read_text()) for which in ("before", "during")
    )
    assert before == during
    again = type(model).from_pretrained(tmp_path / "during").eval()
    inputs.pop("anchors")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("method", METHODS)
def test_training_is_refused(model, inputs, method):
    anchors = inputs.pop("anchors")
    with (
        pytest.raises(RuntimeError, match=r"model\.eval"),
        method.applied_to(model.train(), anchors),
    ):
        pass
    model.eval()
    with method.applied_to(model, anchors):
        model.train()
        with pytest.raises(RuntimeError, match=r"model\.eval"):
            model(**inputs)
        model.eval()


def test_gradient_checkpointing_is_refused(model, inputs):
    model.gradient_checkpointing_enable()
    with (
        pytest.raises(RuntimeError, match="gradient_checkpointing_disable"),
        SPA(2.0).applied_to(model, inputs["anchors"]),
    ):
        pass


def test_gradients_flow_in_evaluation_mode(model, inputs):
    """Outside no_grad the kernels step aside for a differentiable implementation."""
    anchors = inputs.pop("anchors")
    with AttentionBias(2.0).applied_to(model, anchors):
        model(**inputs).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def unhookable():
    config = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=2)
    )
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**config))
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    )
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=16, num_layers=2, num_heads=2, d_ff=32
        )
    )
    headless = transformers.LlamaModel(transformers.LlamaConfig(**SHAPE))
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE))
    as_encoder = transformers.BertLMHeadModel(transformers.BertConfig(**SHAPE, is_decoder=False))
    linear = transformers.MiniMaxForCausalLM(
        transformers.MiniMaxConfig(
            **SHAPE,
            head_dim=16,
            num_local_experts=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    )
    refused = [bloom, falcon, mamba, t5, headless, encoder, as_encoder, linear]
    return [*refused, torch.nn.Linear(2, 2)]


def test_a_model_that_cannot_be_hooked_is_named_and_left_alone():
    anchors = torch.tensor([[False, True, False]])
    for model in unhookable():
        model.eval()
        before = snapshot(model)
        for method in METHODS:
            with (
                pytest.raises(ValueError, match=type(model).__name__),
                method.applied_to(model, anchors),
            ):
                pass
        assert snapshot(model) == before


@pytest.mark.parametrize("family", ["Lfm2", "Lfm2Moe"])
def test_spa_refuses_layers_that_pass_on_what_is_hidden(family, inputs):
    kinds = {"layer_types": ["conv", "full_attention", "conv"]}
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    shape = SHAPE | kinds | (experts if family == "Lfm2Moe" else {})
    model = tiny_model(family, shape=shape)
    anchors, before = inputs.pop("anchors"), snapshot(model)
    with pytest.raises(ValueError, match="'conv'"), SPA(2.0).applied_to(model, anchors):
        pass
    assert snapshot(model) == before
    with AttentionBias(2.0).applied_to(model, anchors) as steering:
        model(**inputs)
    assert set(steering.calls) == {1}


def test_an_unknown_attention_implementation_is_refused(model, inputs):
    model.set_attn_implementation("flex_attention")
    with (
        pytest.raises(ValueError, match="flex_attention"),
        SPA(2.0).applied_to(model, inputs["anchors"]),
    ):
        pass


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        (torch.zeros(20), "expected \\[batch, prompt tokens\\]"),
        (torch.ones(1, 20, dtype=torch.bool), "anchors every token"),
        (torch.full((1, 20), 2), "besides 0 and 1"),
        (torch.full((1, 20), 0.5), "SPA can only anchor"),
        (torch.full((1, 20), float("nan")), "not finite"),
        (torch.zeros(1, 20, device="meta"), "on the meta device"),
        (torch.zeros(1, 20).to_sparse(), "a sparse_coo tensor"),
        (torch.zeros(1, 20).to(torch.float8_e4m3fn), "a tensor of torch.float8_e4m3fn"),
        (torch.nested.nested_tensor([torch.zeros(20)]), "a nested tensor"),
        ({"mask": [[1, 0]]}, "a dict that makes no tensor"),
    ],
)
def test_anchors_that_cannot_be_are_refused(model, anchors, message):
    with pytest.raises(ValueError, match=message), SPA(2.0).applied_to(model, anchors):
        pass


def test_strengths_that_do_not_fit_are_refused(model):
    inputs = prompts([20, 13, 9, 8], [[5, 6]] * 4)
    anchors = inputs.pop("anchors")
    with (
        pytest.raises(ValueError, match="2 values, but anchors has 4 rows"),
        SPA([1.0, 3.0]).applied_to(model, anchors),
    ):
        pass
    with SPA([1.0, 3.0, 2.0, 0.5]).applied_to(model, anchors):
        model.generate(**inputs, max_new_tokens=2, num_beams=2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", ["rows", "longer", "shorter"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_refuses_anchors_of_another_shape(model, inputs, method, change, cache):
    anchors = inputs.pop("anchors")
    wrong = {
        "rows": torch.cat([anchors, anchors[:1]]),
        "longer": torch.cat([anchors, anchors[:, :4]], dim=1),
        "shorter": anchors[:, :13],
    }[change]
    options = dict(max_new_tokens=1, cache_implementation=cache, disable_compile=True)
    with (
        method.applied_to(model, wrong),
        pytest.raises(ValueError, match=r"anchors has shape .*expected \[2, 20\]"),
    ):
        model.generate(**inputs, **options)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [[0], [0, 1, 0, 1]])
def test_a_pass_over_other_rows_than_the_anchors_have_is_refused(model, inputs, method, rows):
    """Repeated in silence, a row of anchors would steer another prompt than its own."""
    anchors = inputs.pop("anchors")
    with (
        method.applied_to(model, anchors),
        pytest.raises(ValueError, match=f"anchors has 2 rows, but the model is given {len(rows)}"),
    ):
        model(**{name: value[rows] for name, value in inputs.items()})


def marked(prompts_mask, kind):
    """Return what a pass may be given as a mask: of two or four dimensions, or one for a kind."""
    if kind == "2-D":
        return prompts_mask
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    whole = prompts_mask.bool()[:, None, None] & causal
    return whole if kind == "4-D" else {"full_attention": whole}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["2-D", "4-D", "in chunks", "after another"])
@pytest.mark.parametrize(
    ("places", "message"),
    [([1, 8], "tokens that attention_mask pads out"), (range(7, 20), "row 1 .* every token")],
)
def test_a_pass_whose_padding_the_anchors_do_not_fit_is_refused(
    model, inputs, method, kind, places, message
):
    """Row 1 is padded by 7 tokens: it would go unsteered, or be steered against nothing."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    anchors = torch.zeros(2, 20, dtype=torch.bool)
    anchors[0, 8:10] = True
    anchors[1, list(places)] = True
    cache = DynamicCache()
    with torch.no_grad(), method.applied_to(model, anchors):
        if kind == "after another":
            model(ids, attention_mask=torch.ones_like(mask))
        if kind == "in chunks" and places != [1, 8]:
            model(ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            if kind == "in chunks":
                start = cache.get_seq_length()
                end = 20 if start else 12
                model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            else:
                model(ids, attention_mask=marked(mask, kind))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("given", ["a tensor", "an array"])
def test_anchors_may_be_written_to_inside_the_block(model, inputs, method, given):
    anchors = inputs.pop("anchors")
    own = anchors.clone() if given == "a tensor" else anchors.numpy().copy()
    with torch.no_grad():
        with method.applied_to(model, anchors):
            expected = model(**inputs).logits
        with method.applied_to(model, own):
            own[:] = False
            assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunks", [(20,), (8, 12), (8, 8, 4)])
def test_a_pass_that_reaches_beyond_the_anchors_is_refused(model, inputs, method, chunks):
    anchors, ids = inputs["anchors"][:1, :15], inputs["input_ids"][:1]
    cache, begin = transformers.DynamicCache(), 0
    with (
        torch.no_grad(),
        method.applied_to(model, anchors),
        pytest.raises(ValueError, match=r"a prompt of 15 tokens, but the model is given (16|20);"),
    ):
        for length in chunks:
            model(ids[:, begin : begin + length], past_key_values=cache)
            begin += length


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_ends_before_the_anchors_do_is_refused_when_generation_begins(
    model, inputs, method
):
    anchors, ids = inputs["anchors"][:1], inputs["input_ids"][:1]
    cache = transformers.DynamicCache()
    with torch.no_grad(), method.applied_to(model, anchors):
        model(ids[:, :12], past_key_values=cache)
        with pytest.raises(ValueError, match=r"prompt of 20 tokens, .*generating after 13;"):
            model(ids[:, 12:13], past_key_values=cache)


@pytest.mark.parametrize("method", METHODS)
def test_prompts_in_chunks_and_further_turns_are_steered(model, inputs, method):
    """Chunks end where the anchors end; a growing prompt without a cache runs again and again."""
    anchors, ids = inputs["anchors"][:1], inputs["input_ids"][:1]
    with torch.no_grad(), method.applied_to(model, anchors):
        whole = model(ids).logits
        longer = torch.cat([ids, ids[:, :3]], dim=1)
        uncached = model(longer, use_cache=False).logits
    with torch.no_grad(), method.applied_to(model, anchors):
        cache = DynamicCache()
        for begin, end in [(0, 4), (4, 16), (16, 20)]:
            part = model(ids[:, begin:end], past_key_values=cache, logits_to_keep=1).logits
        rest = model(longer[:, 20:], past_key_values=cache).logits
        torch.testing.assert_close(part[:, -1], whole[:, -1], atol=1e-4, rtol=0)
        torch.testing.assert_close(rest[:, -1], uncached[:, -1], atol=1e-4, rtol=0)
    with method.applied_to(model, anchors):
        options = dict(do_sample=False, return_dict_in_generate=True)
        first = model.generate(ids, max_new_tokens=3, **options)
        turn = torch.cat([first.sequences, ids[:, :4]], dim=1)
        cache = "cache" if "cache" in first else "past_key_values"
        kept = model.generate(turn, max_new_tokens=3, **{cache: first[cache]}, **options)
    assert kept.sequences.shape[1] == 30


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", ["call", "chunks", "generate"])
def test_every_prompt_of_a_block_is_held_against_the_anchors(model, inputs, method, first):
    """A second one is no continuation of the first, unless it repeats its tokens."""
    anchors, ids = inputs["anchors"][:1], inputs["input_ids"][:1]
    other = ids.roll(1)
    longer = torch.cat([ids, ids[:, :3]], dim=1)
    with method.applied_to(model, anchors):
        expected = model(other).logits[:, -1]
    with method.applied_to(model, anchors):
        if first == "generate":
            model.generate(ids, max_new_tokens=2)
        elif first == "call":
            model(ids)
        else:
            cache = DynamicCache()
            model(ids[:, :8], past_key_values=cache)
            model(ids[:, 8:], past_key_values=cache)
        again = model(longer, use_cache=False).logits
        twice = model(longer.repeat(2, 1), use_cache=False).logits
        torch.testing.assert_close(twice[:1], again, atol=1e-4, rtol=0)
        for prompt in (ids[:, :12], ids[:, :1]):
            with pytest.raises(
                ValueError, match=rf"given {prompt.shape[1]} without a cache; .*Dyn"
            ):
                model(prompt)
        cache = DynamicCache()
        model(other[:, :12], past_key_values=cache)
        with pytest.raises(ValueError, match="generating after 13"):
            model(ids[:, :1], past_key_values=cache)
        cache = DynamicCache()
        with pytest.raises(ValueError, match=r"a prompt of 20 tokens, .* given 23;"):
            model(torch.cat([other, ids[:, :3]], dim=1), past_key_values=cache)
        torch.testing.assert_close(model(other).logits[:, -1], expected, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match=r"given 23;"):
            model(longer)


@torch.no_grad()
def test_a_prompt_begun_without_a_cache_is_refused(model, inputs):
    """Nobody knows whether more will follow on the cache that the model makes itself."""
    with AttentionBias(2.0).applied_to(model, inputs["anchors"]):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"given 8 without a cache; .*empty DynamicCache"):
                model(inputs["input_ids"][:, :8])


@pytest.mark.parametrize("method", METHODS)
def test_prompt_lookup_runs_candidates_behind_the_prompt(model, inputs, method):
    ids = inputs["input_ids"][:1, :10].repeat(1, 2)
    with method.applied_to(model, inputs["anchors"][:1]):
        own = model.generate(ids, max_new_tokens=6, do_sample=False)
        ahead = model.generate(ids, max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(own, ahead)


@pytest.mark.parametrize("method", METHODS)
def test_guidance_is_refused_under_steering_only(model, inputs, method):
    anchors = inputs.pop("anchors")
    config = transformers.GenerationConfig(guidance_scale=1.5, max_new_tokens=2, pad_token_id=0)
    processor = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
    calls = [
        dict(guidance_scale=1.5, max_new_tokens=2),
        dict(generation_config=config),
        dict(logits_processor=[processor], max_new_tokens=2),
    ]
    for call in calls:
        with (
            method.applied_to(model, anchors),
            pytest.raises(ValueError, match=r"guidance_scale .* use SPA.*strength=1\.5"),
        ):
            model.generate(**inputs, **call)
        with method.applied_to(model, None):
            model.generate(**inputs, **call)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SPA(float("nan")),
        lambda: SPA([]),
        lambda: SPA(None),
        lambda: SPA("1.4"),
        lambda: SPA([[1.0]]),
        lambda: SPA(torch.ones(2, 2)),
        lambda: SPA(3e38),
        lambda: SPA([1.0, 1e300]),
        lambda: SPA(1j),
        lambda: AttentionBias(1e300),
        lambda: AttentionBias(2.0, keep_generated="no"),
        lambda: AttentionBias(2.0, keep_generated=None),
        lambda: AttentionBias(torch.tensor(2.0)),
        lambda: AttentionBias(-(10**400)),
        lambda: PASTA("0.1"),
        lambda: InstABoost(float("inf")),
        lambda: GUIDE(1e5),
        lambda: AttentionBias(float("inf")),
        lambda: AttentionBias(True),
        lambda: PASTA(True),
        lambda: InstABoost(True),
        lambda: GUIDE(False),
        lambda: TargetMass(True),
        lambda: SPA(True),
        lambda: SPA([1.4, False]),
        lambda: SPA(torch.tensor(True)),
        lambda: SPA(guard=Guard(plausibility=True)),
        lambda: SPA(guard=True),
        lambda: CFG(True),
        lambda: CAD(True),
        lambda: AttentionBias(1.0, queries="some"),
        lambda: AttentionBias(1.0, layers=[]),
        lambda: AttentionBias(1.0, heads=[1, 1]),
        lambda: AttentionBias(1.0, layers=3),
        lambda: AttentionBias(1.0, layers=iter([1])),
        lambda: AttentionBias(1.0, heads={0: 1}),
        lambda: TargetMass(0.5, heads=(head for head in [1])),
        lambda: TargetMass(0.0),
        lambda: TargetMass(1e-60),
        lambda: TargetMass(1 - 1e-12),
        lambda: TargetMass(0.5, mode="most"),
    ],
)
def test_parameters_are_checked_when_a_method_is_made(make):
    with pytest.raises(ValueError, match=r"expected|names one twice|pass None"):
        make()


def test_strengths_may_be_tensors_and_arrays():
    assert SPA(torch.tensor(1.5)).strength == 1.5 == SPA(numpy.float32(1.5)).strength
    assert SPA(torch.tensor([1.0, 2.5])) == SPA([1.0, 2.5]) == SPA(numpy.array([1.0, 2.5]))


@pytest.mark.parametrize("method", [AttentionBias(1000.0), AttentionBias(-1000.0), SPA(-1000.0)])
def test_the_largest_parameters_give_finite_results(model, inputs, method):
    anchors = inputs.pop("anchors")
    with method.applied_to(model, anchors):
        assert bool(model(**inputs).logits[:, -1].isfinite().all())
    mass = attention_mass(model, inputs["input_ids"], anchors, method, inputs["attention_mask"])
    assert bool(mass.isfinite().all())


def test_factors_that_make_a_bias_too_large_are_refused(model, inputs):
    anchors = inputs["anchors"] * 600.0
    with (
        pytest.raises(ValueError, match=r"1\.2e\+03"),
        AttentionBias(2.0).applied_to(model, anchors),
    ):
        pass


@pytest.mark.parametrize(
    "options",
    [
        dict(layers=[0, -3]),
        dict(heads=[0, -6]),
        dict(heads={0: [1], -3: [2]}),
        dict(heads={1: [5, -1]}),
        dict(layers=[0, 1], heads={0: [1], 2: [5, -1]}),
    ],
)
@pytest.mark.parametrize("make", [lambda **o: AttentionBias(1.0, **o), TargetMass])
def test_layers_and_heads_that_are_named_twice_are_refused(model, inputs, options, make):
    before = snapshot(model)
    with (
        pytest.raises(ValueError, match="are the same one"),
        make(**options).applied_to(model, inputs["anchors"]),
    ):
        pass
    restored = snapshot(model) == before
    assert restored


def test_heads_outside_the_chosen_layers_are_refused(model, inputs):
    method = AttentionBias(1.0, layers=[0], heads={1: [5]})
    with (
        pytest.raises(ValueError, match="none is in both"),
        method.applied_to(model, inputs["anchors"]),
    ):
        pass


def test_layers_and_heads_that_the_model_lacks_are_refused_before_anything_is_hooked(model, inputs):
    before = snapshot(model)
    for method in (AttentionBias(1.0, layers=[3]), AttentionBias(1.0, heads={0: [6]})):
        with (
            pytest.raises(ValueError, match="this model has"),
            method.applied_to(model, inputs["anchors"]),
        ):
            pass
        assert snapshot(model) == before
