"""What pastalib 0.1.3 computes on a small Llama, kept in data/pastalib.json to compare with.

The package cannot be a test dependency: it imports all of `datasets`, which it does not declare.
To make the numbers anew: `pip install --no-deps pastalib==0.1.3`, then
`python -m tests.models.pastalib_numbers`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import pasta_class
from tests.models.tiny import tiny_model

PATH = Path(__file__).parent / "data" / "pastalib.json"
PROMPT = [7, 31, 64, 12, 88, 23, 5, 71, 40, 9, 55, 18, 93, 27, 66, 2, 79, 34, 50, 13]
SPAN = (4, 9)
ALPHA = 0.01
# In the package's own format: text keys, layers and heads in any order.
HEADS = {"2": [5, 0], "0": [3, 1], "1": [2]}
STEPS = 6


def small_llama(implementation: str) -> Any:
    """Return a Llama whose weights do not depend on any random number generator."""
    model = tiny_model("Llama", implementation)
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                steps = torch.arange(parameter.numel(), dtype=torch.float64)
                values = torch.sin(steps * 12.9898 + place) * 43758.5453
                values = (values - values.floor() - 0.5) * 0.5
                parameter.copy_(values.view_as(parameter))
    return model


def main() -> None:
    """Write the numbers."""
    model = small_llama("eager")
    pasta = pasta_class()(model, None, HEADS, alpha=ALPHA, scale_position="exclude")
    ids = torch.tensor([PROMPT])
    words = [f"w{token}" for token in PROMPT]
    text = " ".join(words)
    starts = [sum(len(word) + 1 for word in words[:place]) for place in range(len(words))]
    offsets = [(start, start + len(word)) for start, word in zip(starts, words, strict=True)]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    span = [" ".join(words[SPAN[0] : SPAN[1]])]
    with pasta.apply_steering(model, [text], span, inputs, [offsets]) as steered:
        out = steered.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=STEPS,
            output_logits=True,
            return_dict_in_generate=True,
        )
    numbers = {
        "sequence": out.sequences[0].tolist(),
        "logits": [[round(float(x), 5) for x in logits[0]] for logits in out.logits],
    }
    PATH.write_text(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main()
