"""Run by every rank of test_tensor_parallel.py: a model split over processes, steered."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed
from transformers import AutoModelForCausalLM

from radar_core import SPA, AttentionBias, TargetMass, attention_mass
from tests.models.tiny import FAMILIES, prompts, tiny_model

# Also a vocabulary that splits in two.
SPLIT = FAMILIES["Llama"] | {"vocab_size": 98}
METHODS = [
    SPA(1.4),
    AttentionBias(2.0),
    AttentionBias(2.0, layers=[1], heads=[1, 5], queries="generated"),
    AttentionBias(2.0, heads={0: [4], 2: [0, 3]}),
    TargetMass(0.3, heads=[5]),
    TargetMass(0.3, mode="exact", heads=[0, 4]),
]


def main(folder: str) -> None:
    """Compare a split model with the whole one, which is saved in `folder`."""
    whole = tiny_model("Llama", shape=SPLIT)
    inputs = prompts([20, 13], [[5, 6, 11], [2, 3]])
    anchors = inputs.pop("anchors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    split.generation_config = whole.generation_config
    assert split.model.layers[0].self_attn.q_proj.weight.to_local().shape == (48, 96)

    def steered(model: Any, method: Any) -> Any:
        with torch.no_grad(), method.applied_to(model, anchors):
            out = model.generate(
                **inputs,
                max_new_tokens=4,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        return torch.stack(out.logits)

    for method in METHODS:
        results, expected = steered(split, method), steered(whole, method)
        torch.testing.assert_close(results, expected, atol=1e-4, rtol=0, msg=str(method))
        masses = [
            attention_mass(model, inputs["input_ids"], anchors, method, inputs["attention_mask"])
            for model in (split, whole)
        ]
        torch.testing.assert_close(*masses, atol=1e-5, rtol=0, msg=str(method))
    try:
        steered(split, AttentionBias(2.0, heads=[6]))
    except ValueError as error:
        assert "this model has 6" in str(error)
    else:
        raise AssertionError("a head that the model lacks was taken")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
