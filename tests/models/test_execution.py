"""How a steered model may be run: precisions, devices, weights of other kinds, adapters."""

from __future__ import annotations

import contextlib
import copy

import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from optimum import quanto
from transformers import AutoModelForCausalLM

import radar_core.hooks.attention as attention
from radar_core import SPA, AttentionBias, NoSteering, Steered, TargetMass, attention_mass
from tests.models.oracle import ANCHORS, INPUTS, METHODS
from tests.models.tiny import biased_logits, tiny_model


def run(model, method, **options):
    """Return the logits of a few greedy steps; None runs the model as it is."""
    block = contextlib.nullcontext() if method is None else method.applied_to(model, ANCHORS)
    with block:
        out = model.generate(
            **INPUTS,
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return torch.stack(out.logits).float()


def implementation(family):
    return "eager" if family == "Gemma2" else "sdpa"


def agree(model, reference, atol=1e-4):
    """Assert that two models give the same, unsteered and under every method."""
    for method in (None, *METHODS):
        torch.testing.assert_close(
            run(model, method), run(reference, method), atol=atol, rtol=0, msg=str(method)
        )


# -- precisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_half_precision_is_as_near_as_the_unsteered_model(method, family):
    """First token's logits: the error against float32 is about that of the model itself."""
    reference = tiny_model(family, implementation(family))
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(reference).to(dtype)
        errors = []
        for steering in (None, method):
            near, exact = (run(one, steering)[0] for one in (model, reference))
            errors.append(float((near - exact).norm() / exact.norm()))
        assert errors[1] < 4 * errors[0] + 1e-3, (dtype, errors)
        with method.applied_to(model, ANCHORS), torch.no_grad():
            assert model(**INPUTS).logits.dtype == dtype


# -- where weights are kept ------------------------------------------------------------------------


def test_weights_offloaded_to_memory():
    model = tiny_model("Llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    agree(model, tiny_model("Llama"))


def test_weights_offloaded_to_disk_by_a_device_map(tmp_path):
    reference = tiny_model("Llama")
    reference.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    for output in ("cpu", "disk"):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            device_map=places | {"lm_head": output},
            offload_folder=tmp_path / output,
        ).eval()
        model.generation_config = reference.generation_config
        agree(model, reference)


def test_dispatched_with_hooks_on_every_module():
    model = tiny_model("Llama")
    dispatch_model(model, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)
    forward = model.forward
    agree(model, tiny_model("Llama"))
    assert model.forward == forward


# -- weights of other kinds ------------------------------------------------------------------------


def exact_twin(model, weights):
    """Return a plain model whose linear layers hold the given weights, by name."""
    twin = tiny_model("Llama")
    with torch.no_grad():
        for name, module in twin.named_modules():
            if name in weights:
                module.weight.copy_(weights[name])
    return twin


def test_weights_quantised_by_quanto():
    model = tiny_model("Llama")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    weights = {
        name: module.weight.dequantize()
        for name, module in model.named_modules()
        if isinstance(module, quanto.QLinear)
    }
    assert len(weights) == 22
    agree(model, exact_twin(model, weights))


class Rounded(torch.nn.Linear):
    """A linear layer of another class, as bitsandbytes and others put in: it rounds its input."""

    def forward(self, input):
        return torch.nn.functional.linear((input * 64).round() / 64, self.weight, self.bias)


class Packed(torch.Tensor):
    """A weight of a tensor class of its own, as torchao's are: it rounds where it is used."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            input, weight, *bias = args
            weight = (weight.as_subclass(torch.Tensor) * 16).round() / 16
            return function(input, weight, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})


def with_own_layers(kind):
    model = tiny_model("Llama")
    for module in model.model.modules():
        if type(module) is not torch.nn.Linear:
            continue
        if kind == "module":
            module.__class__ = Rounded
        else:
            packed = module.weight.detach().as_subclass(Packed)
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
    return model


@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_linear_layers_that_compute_in_their_own_way(kind):
    """They are left to it: the few-row operator would read their weights as plain numbers."""
    model, plain = with_own_layers(kind), run(with_own_layers(kind), None)
    assert float((plain - run(tiny_model("Llama"), None))[0].abs().max()) > 1e-3
    with NoSteering().applied_to(model):
        torch.testing.assert_close(run(model, None), plain, atol=1e-4, rtol=0)
    twin = with_own_layers(kind)
    twin.set_attn_implementation("eager")
    bias = {layer: torch.full((6,), 2.0) for layer in range(3)}
    expected = biased_logits(twin, *INPUTS.values(), ANCHORS, bias)
    torch.testing.assert_close(run(model, AttentionBias(2.0))[0], expected, atol=1e-4, rtol=0)


# -- adapters --------------------------------------------------------------------------------------


def adapted():
    """Return a model with two LoRA adapters, "first" and "second"."""
    options = dict(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("Llama"), peft.LoraConfig(**options), "first")
    model.add_adapter("second", peft.LoraConfig(**options))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def merged(model, adapter):
    model = copy.deepcopy(model)
    model.set_adapter(adapter)
    return model.merge_and_unload().eval()


@pytest.mark.parametrize("method", METHODS)
def test_lora_adapters_switched_merged_and_turned_off_inside_a_block(method):
    model = adapted()
    expected = [run(merged(model, name), method) for name in ("first", "second")]
    unadapted = run(tiny_model("Llama"), method)
    results = []
    with method.applied_to(model, ANCHORS):
        for name in ("first", "second"):
            model.set_adapter(name)
            results.append(run(model, None))
        model.merge_adapter()
        results.append(run(model, None))
        model.unmerge_adapter()
        with model.disable_adapter():
            results.append(run(model, None))
    for result, right in zip(results, [*expected, expected[1], unadapted], strict=True):
        torch.testing.assert_close(result, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_peft_wrapper_is_steered_however_it_is_called(method):
    """By the wrapper or by the model inside, but not past the hooks."""
    model = adapted()
    inner = model.get_base_model()
    plain = model(**INPUTS).logits
    twin = merged(model, "first")
    with torch.no_grad():
        with method.applied_to(twin, ANCHORS):
            expected = twin(**INPUTS).logits
        for steered in (model, inner):
            with method.applied_to(steered, ANCHORS):
                for call in (model, inner):
                    torch.testing.assert_close(call(**INPUTS).logits, expected, atol=1e-4, rtol=0)
                with (
                    pytest.raises(RuntimeError, match="already steered"),
                    SPA(2.0).applied_to(model, ANCHORS),
                ):
                    pass
            assert torch.equal(model(**INPUTS).logits, plain)
        with (
            method.applied_to(inner, ANCHORS),
            pytest.raises(RuntimeError, match="past the hooks"),
        ):
            inner.forward(**INPUTS)
    out = Steered(model, method=method).generate(
        **INPUTS, anchors=ANCHORS, max_new_tokens=3, do_sample=False
    )
    assert torch.equal(
        out,
        Steered(twin, method=method).generate(
            **INPUTS, anchors=ANCHORS, max_new_tokens=3, do_sample=False
        ),
    )
    mass = attention_mass(model, INPUTS["input_ids"], ANCHORS, method, INPUTS["attention_mask"])
    assert mass.shape == (2, 3, 6)


def test_adapters_that_add_tokens_are_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny_model("Llama"), config).eval()
    with (
        pytest.raises(ValueError, match="learned tokens before the prompt"),
        SPA(2.0).applied_to(model, ANCHORS),
    ):
        pass


# -- layers and heads left out ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda **o: AttentionBias(2.0, **o), TargetMass])
def test_layers_left_out_do_no_anchored_work(make, monkeypatch):
    """Not even where the layers below them are steered."""
    model, calls = tiny_model("Llama"), []

    def counted(*arguments, **keywords):
        calls.append(arguments[3] is not None)
        return own(*arguments, **keywords)

    own = attention.anchor_attention
    monkeypatch.setattr(attention, "anchor_attention", counted)
    steps = len(run(model, make(layers=[2])))
    assert calls == [True] * steps
    calls.clear()
    run(model, make(queries="generated"))
    assert calls == [True] * 3 * steps


@pytest.mark.parametrize("make", [lambda **o: AttentionBias(2.0, **o), TargetMass])
def test_what_is_left_out_is_bit_identical(make):
    """Layers below the first steered one; the other heads of that one are so to rounding."""
    model, seen = tiny_model("Llama"), {}
    for layer, block in enumerate(model.model.layers):
        block.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, layer=layer: seen.setdefault(layer, []).append(args[0])
        )

    def outputs(method):
        seen.clear()
        block = contextlib.nullcontext() if method is None else method.applied_to(model, ANCHORS)
        with torch.no_grad(), block:
            model(**INPUTS)
        return {layer: out[0].unflatten(-1, (6, 16)) for layer, out in seen.items()}

    plain, radar = outputs(None), outputs(NoSteering())
    for options in (dict(layers=[1], heads=[2]), dict(heads={1: [2]}), dict(layers=[-2])):
        assert torch.equal(outputs(make(**options))[0], plain[0])
    everything = outputs(make(heads=[2]))
    seen_rows = INPUTS["attention_mask"].bool()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        everything[0][:, :, others], radar[0][:, :, others], atol=1e-5, rtol=0
    )
    assert not torch.allclose(everything[0][seen_rows][:, 2], radar[0][seen_rows][:, 2], atol=1e-3)
