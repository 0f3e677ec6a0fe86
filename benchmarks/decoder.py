"""A step of whole decoding, steered and not, of a model of Qwen2.5-0.5B's shape.

The weights are random: what counts is how many bytes a step reads. 5 % of the prompt is anchored,
in four runs from its middle on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.checks import Oracle, Trace, Verdict, judge, trace
from benchmarks.contenders import Case, Contender, contenders
from benchmarks.discussion import place_anchors, random_prompt
from benchmarks.models import shaped
from benchmarks.tasks import DTYPES, Bar, Build, Growth, Task
from benchmarks.tasks import Contender as Timed
from benchmarks.timing import TokenClock

BOTH = ("fp32", "bf16")
CHECKED_STEPS = 3
TIMED_TOKENS = 16
MOST_ROUNDS = 3
PROVIDERS = ("unsteered", "radar-unsteered", "radar-bias", "transformers-cfg", "radar-spa")

BARS = (
    Bar("decoder", "Qwen2.5-0.5B", ("fp32",), "radar-spa", "unsteered", 0.75, 0.55),
    Bar("decoder", "Qwen2.5-0.5B", ("bf16",), "radar-spa", "unsteered", 0.70, 0.55),
)


def plan(dtypes: Sequence[str] = BOTH, quick: bool = False) -> list[Build]:
    """Plan the tasks.

    Args:
        dtypes: "fp32", "bf16".
        quick: a small model and a short prompt.

    Returns:
        Builders of the tasks.
    """
    layers, tokens = (2, 96) if quick else (24, 1024)
    return [partial(task, tokens, dtype, layers) for dtype in dtypes]


def growth(dtype: str, quick: bool = False) -> list[Growth]:
    """Plan the same work at growing sizes.

    Args:
        dtype: "fp32" or "bf16".
        quick: few and small sizes.

    Returns:
        A step against the length of the prompt.
    """
    layers, sizes = (2, (64, 96)) if quick else (24, (256, 1024, 4096))
    points = [(size, partial(task, size, dtype, layers)) for size in sizes]
    return [Growth("one step of a Qwen2.5-0.5B-shaped model", "tokens of the prompt", points)]


def task(tokens: int, dtype: str, layers: int) -> Task:
    """Build the task of one prompt.

    Args:
        tokens: of the prompt.
        dtype: "fp32" or "bf16".
        layers: 24 for the real shape.

    Returns:
        The task; its times are those of one step.
    """
    model = shaped(layers, DTYPES[dtype])
    prompt = random_prompt(model.config.vocab_size, tokens)
    work = f"Qwen2.5-0.5B {layers} layers prompt={tokens}"
    case = Case(model, None, prompt, place_anchors(prompt, 0.5), dtype, work)
    oracle = Oracle.of(model)
    known = contenders()
    right: dict[str, Trace] = {}
    plain = trace(known["unsteered"], case, CHECKED_STEPS)
    found = {name: _timed(known[name], name, case, oracle, right, plain) for name in PROVIDERS}
    return Task("decoder", work, dtype, found, most_rounds=MOST_ROUNDS)


def _timed(
    contender: Contender,
    name: str,
    case: Case,
    oracle: Oracle,
    right: dict[str, Trace],
    plain: Trace,
) -> Timed:
    def check(found: Trace) -> Verdict:
        verdict = judge(contender, case, found, oracle, right, plain)
        if verdict.right:
            right[name] = found
        return verdict

    def clock(copy: int) -> list[float]:
        streamer = TokenClock()
        contender.generate(case, max_new_tokens=TIMED_TOKENS, streamer=streamer)
        return streamer.phases["step"]

    call: Callable[[int], Any] = lambda copy: trace(contender, case, CHECKED_STEPS)  # noqa: E731
    return Timed(call, check, clock)
