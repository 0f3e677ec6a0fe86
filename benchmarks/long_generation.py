"""How long a step takes as an answer grows: flat, apart from the cache that it reads.

    python -m benchmarks.long_generation --json results/long.json --plots results

A small random model answers a prompt with thousands of tokens, unsteered and under every method.
The time of each step is kept with its position, and the positions are pooled in ranges: whatever a
method keeps or copies for each generated token would show as a line that rises above the unsteered
one. Every contender's first tokens are compared with those of a run without any cache.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.report import console, plotting, print_machine, print_rows, progress, save
from benchmarks.rows import Label, Row, timed, untimed, write_json
from benchmarks.timing import Measurement, TokenClock, interleave, summarise

BENCHMARK = "long_generation"
PROMPT = 256
RANGES = 16
CHECKED_STEPS = 8
LAYERS = 4


def methods() -> dict[str, Any]:
    """Return what is measured, by provider; None is the model as it is."""
    from radar_core import SPA, AttentionBias, TargetMass

    return {
        "unsteered": None,
        "radar-spa": SPA(1.4),
        "radar-bias": AttentionBias(2.0),
        "radar-bias-generated": AttentionBias(2.0, queries="generated"),
        "radar-mass": TargetMass(0.2),
    }


def build_model(tokens: int) -> Any:
    """Return a random Llama with room for a prompt and `tokens` more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT + tokens,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    # Every answer has the same length: nothing may end it early.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model: Any, method: Any, tokens: int, **options: Any) -> Tensor:
    """Answer the prompt: [1, PROMPT + tokens]."""
    ids = torch.randint(1, 512, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    anchors = torch.zeros_like(ids, dtype=torch.bool)
    anchors[:, PROMPT // 2 : PROMPT // 2 + PROMPT // 20] = True
    block = contextlib.nullcontext() if method is None else method.applied_to(model, anchors)
    with torch.inference_mode(), block:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            **options,
        )


def ranges(tokens: int) -> list[tuple[int, int]]:
    """Return the ranges of steps that are pooled: first and one past the last of each."""
    edges = [1 + (tokens - 1) * index // RANGES for index in range(RANGES + 1)]
    return [(start, end) for start, end in pairwise(edges) if end > start]


def run(tokens: int, rounds: int, advance: Callable[[], None] = lambda: None) -> list[Row]:
    """Check and time every contender.

    Args:
        tokens: new tokens of an answer, at least 2.
        rounds: answers of each contender.
        advance: called after every answer.

    Returns:
        A row for each contender and range of positions.

    Raises:
        ValueError: `tokens` or `rounds` is too small.
    """
    if tokens < 2 or rounds < 1:
        raise ValueError(
            f"tokens is {tokens} and rounds {rounds}; expected at least 2 and 1, to time a step"
        )
    model, found, right = build_model(tokens), methods(), {}
    for name, method in found.items():
        steps = min(CHECKED_STEPS, tokens)
        cached = generate(model, method, steps)
        right[name] = torch.equal(cached, generate(model, method, steps, use_cache=False))

    def measurement(method: Any) -> Measurement:
        def measure() -> Mapping[str, list[float]]:
            clock = TokenClock()
            generate(model, method, tokens, streamer=clock)
            steps = clock.phases["step"]
            return {work(start, end): steps[start - 1 : end - 1] for start, end in ranges(tokens)}

        return measure

    samples = interleave(
        {name: measurement(method) for name, method in found.items() if right[name]},
        rounds,
        advance,
    )
    rows = []
    for start, end in ranges(tokens):
        for name in found:
            label = Label(BENCHMARK, work(start, end), "fp32", name, "step")
            if not right[name]:
                rows.append(untimed(label, "other tokens than without a cache"))
                continue
            checked = f"{min(CHECKED_STEPS, tokens)} tokens as without a cache"
            summary = summarise(samples[name][work(start, end)])
            rows.append(timed(label, summary, None, checked))
    return rows


def work(start: int, end: int) -> str:
    """Name a range of steps by the position of its tokens."""
    return f"llama-{LAYERS}x256 tokens={PROMPT + start}..{PROMPT + end - 1}"


def draw(folder: Path, rows: Sequence[Row]) -> Path:
    """Draw the time of a step against its position.

    Args:
        folder: where the image goes; made when missing.
        rows: what `run` returned.

    Returns:
        The image file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = plotting("--plots")

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(row.provider for row in rows if not row.failed):
        own = [row for row in rows if row.provider == name]
        ends = [int(row.work.rpartition("..")[2]) for row in own]
        axis.plot(ends, [row.median_ms for row in own], "o-", markersize=3, label=name)
        low, high = ([getattr(row, p) for row in own] for p in ("p20_ms", "p80_ms"))
        axis.fill_between(ends, low, high, alpha=0.2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens in the cache")
    axis.set_ylabel("ms a step")
    axis.set_title("A step of a long answer, fp32")
    axis.legend(fontsize="small")
    path = folder / "long-generation.png"
    save(pyplot, figure, path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, or 1 when a contender's result was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_generation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw time against position")
    parser.add_argument("--tokens", type=int, default=4096, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each contender")
    parsed = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    out, described = console(), machine.describe()
    with progress(parsed.rounds * len(methods())) as (announce, advance):
        announce(f"answers of {parsed.tokens} tokens")
        rows = run(parsed.tokens, parsed.rounds, advance)
    print_machine(out, described)
    print_rows(out, rows, "unsteered")
    if parsed.json:
        write_json(parsed.json, described, rows)
    if parsed.plots:
        draw(parsed.plots, rows)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
