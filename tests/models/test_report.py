"""What a run's report says, against attention weights and logits computed by eager models."""

from __future__ import annotations

import io
import json

import pytest
import torch

from radar_core import SEKA, SPA, AttentionBias, Steered, TargetMass
from tests.models.oracle import BATCH, Oracle, made_up
from tests.models.tiny import (
    eager_twin,
    full_logits,
    prompts,
    tiny_model,
)

STEPS = 5
GREEDY = dict(do_sample=False, max_new_tokens=STEPS)


def divergence(steered, plain):
    p, q = steered.double().softmax(-1), plain.double().softmax(-1)
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("name", ["AttentionBias", "SEKA", "SPA"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_numbers_are_those_of_eager_models(name, sequences):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    method = {
        "AttentionBias": AttentionBias(2.0, layers=[1]),
        "SEKA": SEKA(made_up(model), 1.5),
        "SPA": SPA(1.7),
    }[name]
    steered = Steered(model, method=method)
    beams = dict(num_beams=sequences, num_return_sequences=sequences)
    out = steered.generate(**inputs, **GREEDY, **beams)
    report = steered.report()
    assert len(report.divergence) == 2 * sequences
    oracle = Oracle(model, method, inputs["anchors"], inputs["attention_mask"])
    seen = inputs["attention_mask"].repeat_interleave(sequences, dim=0)
    for step in range(STEPS):
        ids = out[:, : 23 + step]
        plain = full_logits(model, ids, seen)
        expected = divergence(oracle(ids), plain)
        found = torch.tensor([row[step] for row in report.divergence], dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert report.mean_divergence > 1e-4
    layers = [1] if name == "AttentionBias" else [0, 1, 2]
    assert [one.layer for one in report.layers] == layers
    calls = {one.calls for one in report.layers}
    assert calls == {1 if name == "SEKA" else STEPS}
    assert (report.prompts, report.prompt_tokens, report.anchor_tokens) == (2, 40, 8)
    assert report.model == "LlamaForCausalLM" and report.method == repr(method)
    assert report.seconds > 0


def test_masses_before_and_after():
    model, inputs = tiny_model("Llama"), prompts([23], [[3, 4, 12]])
    anchors = inputs["anchors"][0]
    twin = eager_twin(model)
    with torch.no_grad():
        weights = twin(inputs["input_ids"], output_attentions=True).attentions
    before = [float(layer[0, :, -1, anchors].sum(-1).mean()) for layer in weights]
    steered = Steered(model, method=TargetMass(0.9, layers=[0, 2]))
    steered.generate(**inputs, **GREEDY)
    first, last = steered.report(reply_tokens=1).layers
    assert first.mass_before == pytest.approx(before[0], abs=1e-5)
    assert last.mass_before == pytest.approx(before[2], abs=1e-5)
    assert first.mass_after >= 0.9 - 1e-5 and last.mass_after >= 0.9 - 1e-5
    edited = Steered(model, method=SEKA(made_up(model), 3.0, layers=[1]))
    edited.generate(**inputs, **GREEDY)
    (layer,) = edited.report().layers
    assert layer.mass_before == pytest.approx(before[1], abs=1e-5)
    assert abs(layer.mass_after - layer.mass_before) > 1e-3


def test_rows_without_anchors_do_not_count():
    model, inputs = tiny_model("Llama"), prompts(lengths=[23, 17], anchored=[[3, 4, 12], []])
    both, alone = (Steered(model, method=AttentionBias(2.0)) for _ in range(2))
    both.generate(**inputs, **GREEDY)
    alone.generate(**{name: value[:1] for name, value in inputs.items()}, **GREEDY)
    pair, single = both.report(), alone.report()
    for one, other in zip(pair.layers, single.layers, strict=True):
        assert one.mass_before == pytest.approx(other.mass_before, abs=1e-5)
        assert one.mass_after == pytest.approx(other.mass_after, abs=1e-5)
    assert max(pair.divergence[1]) < 1e-8 < max(pair.divergence[0])


def test_what_follows_the_end_of_a_reply_is_left_out():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    steered = Steered(model, method=AttentionBias(2.0))
    free = steered.generate(**inputs, **GREEDY)
    end = int(free[0, 24])
    assert end not in free[1, 23:]
    steered.generate(**inputs, **GREEDY, eos_token_id=end)
    report = steered.report()
    assert len(report.divergence[0]) <= 2 and len(report.divergence[1]) == STEPS
    assert [len(row) for row in steered.report(reply_tokens=3).divergence][1] == 3


def test_prompts_given_as_embeddings():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    steered = Steered(model, method=AttentionBias(2.0))
    steered.generate(**inputs, **GREEDY)
    by_ids = steered.report()
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    steered.generate(inputs_embeds=embeddings, **inputs, **GREEDY)
    for one, other in zip(steered.report().divergence, by_ids.divergence, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_it_prints_and_is_json():
    from rich.console import Console

    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    steered = Steered(model, method=AttentionBias(2.0))
    steered.generate(**inputs, **GREEDY)
    report = steered.report()
    console = Console(file=io.StringIO(), width=120)
    console.print(report)
    share = f"{report.layers[2].mass_after:.1%}"
    for text in (str(report), console.file.getvalue()):
        assert share in text and "8 of 40 prompt tokens anchored" in text and "KL" in text
    again = json.loads(json.dumps(report.as_dict()))
    assert again["layers"][2]["mass_after"] == report.layers[2].mass_after
    assert again["mean_divergence"] == report.mean_divergence


def test_a_layer_that_was_never_called_is_an_error():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    steered = Steered(model, method=AttentionBias(2.0))
    steered.generate(**inputs, **GREEDY)
    del steered._run.calls[1]
    with pytest.raises(RuntimeError, match=r"layers \[1\] .* never called"):
        steered.report()


def test_keys_that_are_never_reached_are_an_error():
    """Here a layer makes its keys without calling its k_proj."""
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    attention = model.model.layers[1].self_attn
    attention.k_proj.__class__ = type("Bypassed", (torch.nn.Linear,), {"__call__": bypass})
    steered = Steered(model, method=SEKA(made_up(model), 2.0))
    with pytest.raises(RuntimeError, match=r"keys of layers \[1\] .* never reached"):
        steered.generate(**inputs, **GREEDY)
    with pytest.raises(ValueError, match="nothing to report on"):
        steered.report()


def bypass(module, states):
    return torch.nn.functional.linear(states, module.weight)


def test_there_must_be_something_to_report():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    steered = Steered(model, method=AttentionBias(2.0))
    with pytest.raises(ValueError, match="none has run yet"):
        steered.report()
    steered.generate(**inputs, **GREEDY)
    with pytest.raises(ValueError, match="reply_tokens is 0"):
        steered.report(reply_tokens=0)
    inputs["anchors"] = None
    steered.generate(**inputs, **GREEDY)
    with pytest.raises(ValueError, match="had no anchors"):
        steered.report()


def test_a_chat_with_a_real_model(smollm2):
    text = "Bob paints the fence. The train leaves at half past six. When does the train leave?"
    steered = Steered(smollm2.model, smollm2.tokenizer, AttentionBias(2.0, layers=range(20, 30)))
    reply = steered.chat(text, ["The train leaves at half past six."], 12, do_sample=False)
    report = steered.report()
    assert report.anchor_tokens == reply.usage.anchor_tokens
    assert len(report.layers) == 10 and len(report.divergence[0]) == reply.usage.completion_tokens
    assert all(one.mass_after > one.mass_before for one in report.layers)


def test_a_strength_for_each_prompt_serves_its_copies():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    steered = Steered(model, method=SPA([1.0, 2.0]))
    steered.generate(**inputs, **GREEDY, num_beams=2, num_return_sequences=2)
    rows = [sum(row) for row in steered.report().divergence]
    assert max(rows[:2]) < 1e-6 < 1e-4 < min(rows[2:])
