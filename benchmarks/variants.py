"""What SPA's variants and guards change, and what they cost beside plain SPA.

    python -m benchmarks.variants --prompts 3 --tokens 32

Each writes greedy replies of SmolLM2-135M-Instruct (fp32) to the same discussions. "alone" is the
share of tokens whose logits are the unsteered model's own, "as unsteered" the share that the
unsteered model would have chosen at that place, "nats" what a token costs under it, "step" the
median time per token over plain SPA's, all timed in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contenders import Case, generate
from benchmarks.discussion import build_prompt, place_anchors
from benchmarks.report import console
from benchmarks.timing import TokenClock, interleave, summarise
from radar_core import CAD, SPA, Guard, Method


def methods(strength: float) -> dict[str, Method]:
    """Return what is compared, plain SPA first.

    Args:
        strength: of all but the modulated one, which wants more.
    """
    return {
        "SPA": SPA(strength),
        "SPA, guard 0.9": SPA(strength, guard=Guard(confidence=0.9)),
        "SPA, guard 0.5": SPA(strength, guard=Guard(confidence=0.5)),
        "SPA, plausibility 0.5": SPA(strength, guard=Guard(plausibility=0.5)),
        "SPA, plausibility 0.1": SPA(strength, guard=Guard(plausibility=0.1)),
        "SPA, embedding": SPA(strength, masking="embedding"),
        "SPA, direct": SPA(strength, branch="direct"),
        "SPA 20, modulated": SPA(20.0, modulated=True),
        "CAD": CAD(strength - 1),
    }


@dataclass
class Counts:
    """Sums over the tokens of a method's replies."""

    tokens: int = 0
    alone: int = 0
    as_unsteered: int = 0
    nats: float = 0.0


@torch.inference_mode()
def run(prompts: int, length: int, tokens: int, strength: float) -> dict[str, tuple[Counts, float]]:
    """Measure every method.

    Args:
        prompts: how many discussions.
        length: tokens of each.
        tokens: new tokens of a reply.
        strength: as in `methods`.

    Returns:
        For each method its counts and its median step in milliseconds.
    """
    from radar_core.embedded import load

    model, tokenizer = load(None, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    compared = methods(strength)
    cases = []
    for seed in range(prompts):
        prompt = build_prompt(tokenizer, length, seed)
        cases.append(Case(model, tokenizer, prompt, place_anchors(prompt, 0.3), "fp32", str(seed)))
    counts = {name: Counts() for name in compared}
    seconds = {name: list[float]() for name in compared}
    for case in cases:

        def measured(name: str, case: Case = case) -> Mapping[str, list[float]]:
            clock = TokenClock()
            with compared[name].applied_to(model, anchors=case.anchors):
                out = generate(
                    case,
                    max_new_tokens=tokens,
                    streamer=clock,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            count(counts[name], model, out, length)
            return clock.phases

        runs = {name: (lambda name=name: measured(name)) for name in compared}
        for name, phases in interleave(runs, rounds=1).items():
            seconds[name] += phases["step"]
    return {name: (counts[name], summarise(seconds[name]).median_ms) for name in compared}


def count(counts: Counts, model: Any, out: Any, length: int) -> None:
    """Add a reply's tokens to the counts, held against the unsteered model's own logits."""
    own = model(out.sequences).logits[0, length - 1 : -1].float()
    steered = torch.cat(out.logits).float()
    reply = out.sequences[0, length:]
    counts.tokens += len(reply)
    counts.alone += int(((steered - own).abs().amax(-1) < 1e-3).sum())
    counts.as_unsteered += int((own.argmax(-1) == reply).sum())
    counts.nats -= float(own.log_softmax(-1).gather(-1, reply[:, None]).sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each reply")
    parser.add_argument("--strength", type=float, default=3.0)
    asked = parser.parse_args(arguments)
    found = run(asked.prompts, asked.length, asked.tokens, asked.strength)
    plain = found["SPA"][1]
    out = console()
    out.print("| method | alone | as unsteered | nats | step |\n| --- | --- | --- | --- | --- |")
    for name, (counts, step) in found.items():
        alone, same = (value / counts.tokens for value in (counts.alone, counts.as_unsteered))
        nats = counts.nats / counts.tokens
        out.print(f"| {name} | {alone:.0%} | {same:.0%} | {nats:.2f} | {step / plain:.2f}x |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
