"""Models that also see: their text decoder is steered, and nothing else."""

from __future__ import annotations

import pytest
import torch

from radar_core import SPA, AttentionBias, NoSteering
from tests.models.tiny import prompts, tiny_vision_language_model

FAMILIES = ["Llava", "Qwen2VL", "Qwen3VL"]
GREEDY = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)


def with_an_image(family):
    inputs = prompts([20], [[10, 11, 12]])
    inputs["input_ids"].clamp_(max=89)
    inputs["input_ids"][0, 2:8] = torch.tensor([92, 90, 90, 90, 90, 93])
    torch.manual_seed(1)
    if family == "Llava":
        return inputs | {"pixel_values": torch.randn(1, 3, 16, 16)}
    return inputs | {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (inputs["input_ids"] == 90).int(),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bias_steers_the_text_and_leaves_the_vision_tower_alone(family):
    model, inputs = tiny_vision_language_model(family), with_an_image(family)
    anchors = inputs.pop("anchors")
    plain = model.generate(**inputs, **GREEDY)
    with NoSteering().applied_to(model):
        same = model.generate(**inputs, **GREEDY)
    torch.testing.assert_close(same.logits[-1], plain.logits[-1], atol=1e-4, rtol=0)
    with AttentionBias(2.0).applied_to(model, anchors) as steering:
        steered = model.generate(**inputs, **GREEDY)
        cached = model.generate(**inputs, **GREEDY, use_cache=False)
    assert set(steering.calls) == {0, 1, 2}
    assert (steered.logits[0] - plain.logits[0]).abs().max() > 1e-3
    torch.testing.assert_close(steered.logits[-1], cached.logits[-1], atol=1e-4, rtol=0)
    again = model.generate(**inputs, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, again.logits, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_spa_refuses_images(family):
    model, inputs = tiny_vision_language_model(family), with_an_image(family)
    with (
        SPA(2.0).applied_to(model, inputs.pop("anchors")),
        pytest.raises(ValueError, match="AttentionBias"),
    ):
        model.generate(**inputs, **GREEDY)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_spa_over_text_alone_equals_two_uncached_passes(family, batch):
    """Positions may come as [axes, batch, tokens]; three rows are no three axes."""
    model = tiny_vision_language_model(family)
    inputs = prompts([20, 17, 14][:batch], [[8, 9, 10]] * batch)
    inputs["input_ids"].clamp_(max=89)
    anchors = inputs.pop("anchors")
    with SPA(1.7).applied_to(model, anchors):
        out = model.generate(**inputs, **GREEDY)
    for step, logits in enumerate(out.logits):
        ids = out.sequences[:, : 20 + step]
        seen = torch.cat([inputs["attention_mask"], torch.ones(batch, step, dtype=torch.long)], 1)
        hidden = seen.clone()
        hidden[:, :20] *= ~anchors
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        if family != "Llava":
            positions = positions.expand(3, -1, -1)
        full, without = (
            model(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            for mask in (seen, hidden)
        )
        expected = 1.7 * full - 0.7 * without
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
