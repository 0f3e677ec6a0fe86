"""What entering and leaving a steered block does, and what it refuses."""

from __future__ import annotations

import json
import threading

import pytest
import torch
import transformers

from radar_core import SPA, AttentionBias, NoSteering, TargetMass
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
    return [
        (
            id(m.config) if hasattr(m, "config") else None,
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
        )
        for m in model.modules()
    ]


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
    return [bloom, falcon, mamba, t5, headless, torch.nn.Linear(2, 2)]


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
    ],
)
def test_anchors_that_cannot_be_are_refused(model, anchors, message):
    with pytest.raises(ValueError, match=message), SPA(2.0).applied_to(model, anchors):
        pass


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
        cache = transformers.DynamicCache()
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
        lambda: AttentionBias(float("inf")),
        lambda: AttentionBias(1.0, queries="some"),
        lambda: AttentionBias(1.0, layers=[]),
        lambda: AttentionBias(1.0, heads=[1, 1]),
        lambda: TargetMass(0.0),
        lambda: TargetMass(0.5, mode="most"),
    ],
)
def test_parameters_are_checked_when_a_method_is_made(make):
    with pytest.raises(ValueError, match=r"expected|names one twice|pass None"):
        make()


def test_layers_and_heads_that_the_model_lacks_are_refused_before_anything_is_hooked(model, inputs):
    before = snapshot(model)
    for method in (AttentionBias(1.0, layers=[3]), AttentionBias(1.0, heads={0: [6]})):
        with (
            pytest.raises(ValueError, match="this model has"),
            method.applied_to(model, inputs["anchors"]),
        ):
            pass
        assert snapshot(model) == before
