"""Drawing a token from two rows of logits: blend, temperature, truncation and the draw.

Radar's backends against the chains of PyTorch calls that people write: "torch" masks the whole
vocabulary as transformers' processors do (top-k, then a sort for top-p) and ends in `multinomial`;
"torch-tuned" goes on with the k largest alone. "blend" is the blend by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from benchmarks.checks import Verdict
from benchmarks.tasks import DTYPES, FLOOR, Bar, Build, Contender, Growth, Task, close_to
from radar_kernels import available_backends, blend_logits, sample_logits

BOTH = ("fp32", "bf16")
VOCABULARY = 151_936
STRENGTH = 1.4
TEMPERATURE = 0.7
# Tokens drawn of every row to check a contender: few enough to be quick, enough for the mean of
# their log-probabilities to show a wrong distribution.
CHECKED_DRAWS = 150
# They are drawn from that many tokens; a few more from the whole vocabulary must not be cut off.
CHECKED_TOKENS = 8192
CHECKED_WHOLE = 5
# How far that mean may lie from the expected one, in standard errors.
DEVIATION = 4.0
# Probability that the larger tokens may lack or exceed top_p by, for a token to count as kept:
# float32 sums over a whole vocabulary are no better.
BORDER = 1e-3
# Relative to the largest logit.
BLEND_TOLERANCE = 1e-6
BUFFER_BYTES = 64 << 20
LARGEST_CHECKED_BATCH = 1
LARGEST_REFERENCE = 200_000

BARS = (
    Bar("sampling", f"V={VOCABULARY} B=1 top_k=50 top_p=0.95", BOTH, "radar-cpp", "torch", 1 / 20),
    Bar("sampling", f"V={VOCABULARY} B=1 top_k=50", BOTH, "radar-cpp", FLOOR, 15.0, 10.0),
)


@dataclass(frozen=True)
class Work:
    """What is drawn.

    Args:
        batch: rows.
        vocabulary: tokens.
        top_k: of every row; None for all.
        top_p: of every row; None for all.
        draws: False for the blend alone.
    """

    batch: int
    vocabulary: int = 151_936
    top_k: int | None = None
    top_p: float | None = None
    draws: bool = True

    def __str__(self) -> str:
        shape = f"V={self.vocabulary} B={self.batch}"
        if not self.draws:
            return f"{shape} blend"
        limits = {"top_k": self.top_k, "top_p": self.top_p}
        given = [f"{name}={limit}" for name, limit in limits.items() if limit is not None]
        return " ".join([shape, *(given or ["no truncation"])])


def plan(dtypes: Sequence[str] = BOTH, quick: bool = False) -> list[Build]:
    """Plan the tasks.

    Args:
        dtypes: "fp32", "bf16".
        quick: one row and a small vocabulary only.

    Returns:
        Builders of the tasks: top-k with top-p, top-p alone, no truncation, and the blend alone.
    """
    vocabulary = 4096 if quick else VOCABULARY
    works = [
        work
        for batch in ((1,) if quick else (1, 8, 32))
        for work in (
            Work(batch, vocabulary, 50, 0.95),
            Work(batch, vocabulary, None, 0.95),
            Work(batch, vocabulary),
            Work(batch, vocabulary, draws=False),
        )
    ]
    return [partial(task, work, dtype) for work in works for dtype in dtypes]


def growth(dtype: str, quick: bool = False) -> list[Growth]:
    """Plan the same work at growing sizes.

    Args:
        dtype: "fp32" or "bf16".
        quick: few and small sizes.

    Returns:
        A draw against the vocabulary and against the batch.
    """
    sizes = (512, 1024) if quick else (8192, 32768, 65536, VOCABULARY)
    batches = (1, 2) if quick else (1, 4, 16, 64)
    vocabulary = 512 if quick else 32768
    return [
        Growth(
            "drawing one token, top-k 50 and top-p 0.95",
            "vocabulary",
            [(size, partial(task, Work(1, size, 50, 0.95), dtype)) for size in sizes],
        ),
        Growth(
            f"drawing tokens of {vocabulary}, top-k 50 and top-p 0.95",
            "batch",
            [(rows, partial(task, Work(rows, vocabulary, 50, 0.95), dtype)) for rows in batches],
        ),
    ]


# (full, masked) -> int64 [B], or float32 [B, V] for the blend alone
Draw = Callable[[Tensor, Tensor], Tensor]


def task(work: Work, dtype: str) -> Task:
    """Build the task of some work.

    Args:
        work: the work.
        dtype: of the logits, "fp32" or "bf16".

    Returns:
        The task; every copy is another step's logits.
    """
    first = draw_logits(work, DTYPES[dtype])
    read = 2 * first[0].nbytes
    buffers = [first]
    while len(buffers) < max(1, min(8, BUFFER_BYTES // read)):
        buffers.append(draw_logits(work, DTYPES[dtype], len(buffers)))
    written = 0 if work.draws else 4 * first[0].numel()
    found = {
        name: Contender(
            partial(_draw, draw, buffers),
            partial(_judge, draw, work, buffers[0]) if work.draws else _blend_check(first),
        )
        for name, draw in draws(work).items()
    }
    return Task("sampling", str(work), dtype, found, len(buffers), read + written)


def _draw(draw: Draw, buffers: Sequence[tuple[Tensor, Tensor]], copy: int) -> Tensor:
    return draw(*buffers[copy])


def draw_logits(work: Work, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw the logits of both prompts.

    Args:
        work: the shape.
        dtype: of the logits.
        seed: the same seed draws the same numbers.

    Returns:
        Full and masked, [B, V]; normal with a standard deviation of 3, and alike.
    """
    draw = torch.Generator().manual_seed(seed)
    full = 3 * torch.randn(work.batch, work.vocabulary, generator=draw)
    masked = full + torch.randn(work.batch, work.vocabulary, generator=draw)
    return full.to(dtype), masked.to(dtype)


def draws(work: Work) -> dict[str, Draw]:
    """Return who can do some work.

    Args:
        work: the work.

    Returns:
        Provider to (full, masked) -> tokens or blended logits.
    """
    operator = "sample_logits" if work.draws else "blend_logits"
    present = [
        name
        for name, why in available_backends(operator).items()
        if why is None and name in ("cpp", "reference")
    ]
    if not work.draws:
        found: dict[str, Draw] = {
            f"radar-{name}": partial(blend_logits, strength=STRENGTH, backend=name)
            for name in present
        }
        return found | {"torch": lambda full, masked: _blended(full, masked)}
    # The reference draws a number for every token in plain PyTorch: minutes for many rows.
    wanted = present if work.batch * work.vocabulary <= LARGEST_REFERENCE else ["cpp"]
    found = {f"radar-{name}": _radar(work, name) for name in wanted if name in present}
    found["torch"] = partial(_chain, work=work)
    if work.top_k is not None:
        found["torch-tuned"] = partial(_tuned_chain, work=work)
    return found


def _radar(work: Work, backend: str) -> Draw:
    offsets = count()

    def draw(full: Tensor, masked: Tensor) -> Tensor:
        return sample_logits(
            full,
            masked,
            STRENGTH,
            temperature=TEMPERATURE,
            top_k=work.top_k,
            top_p=work.top_p,
            seed=1,
            offset=next(offsets),
            backend=backend,
        )

    return draw


def _blended(full: Tensor, masked: Tensor) -> Tensor:
    return STRENGTH * full.float() + (1 - STRENGTH) * masked.float()


def _chain(full: Tensor, masked: Tensor, work: Work) -> Tensor:
    scores = _blended(full, masked) / TEMPERATURE
    if work.top_k is not None:
        last = scores.topk(work.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < last, -torch.inf)
    if work.top_p is not None:
        order, places = scores.sort(descending=False)
        dropped = order.softmax(-1).cumsum(-1) <= 1 - work.top_p
        dropped[:, -1] = False
        scores = scores.masked_fill(dropped.scatter(1, places, dropped), -torch.inf)
    return scores.softmax(-1).multinomial(1)[:, 0]


def _tuned_chain(full: Tensor, masked: Tensor, work: Work) -> Tensor:
    largest, places = _blended(full, masked).topk(work.top_k or work.vocabulary)
    weights = (largest / TEMPERATURE).softmax(-1)
    if work.top_p is not None:
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= work.top_p, 0.0)
    return places.gather(1, weights.multinomial(1))[:, 0]


def log_probabilities(full: Tensor, masked: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """Compute what should be drawn, in float64.

    Args:
        full: [B, V].
        masked: [B, V].
        work: the truncation.

    Returns:
        float64 [B, V] log-probabilities, -inf where a token is cut off; and the same with a border
        token more or less (`BORDER`).
    """
    full, masked = full.double(), masked.double()
    scores = (STRENGTH * full + (1 - STRENGTH) * masked) / TEMPERATURE
    if work.top_k is not None:
        # What float32 makes equal to the last one is kept, as the contenders see it.
        last = scores.topk(work.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < last - 1e-5, -torch.inf)
    if work.top_p is None:
        return scores.log_softmax(-1), scores.log_softmax(-1)
    order, places = scores.sort(descending=True)
    weights = order.softmax(-1)
    larger = torch.empty_like(weights).scatter_(1, places, weights.cumsum(-1) - weights)
    kept, allowed = (
        scores.masked_fill(larger >= work.top_p + more, -torch.inf).log_softmax(-1)
        for more in (0.0, BORDER)
    )
    return kept, allowed


def _blend_check(logits: tuple[Tensor, Tensor]) -> Callable[[Tensor], Verdict]:
    full, masked = (one.double() for one in logits)
    return close_to(STRENGTH * full + (1 - STRENGTH) * masked, BLEND_TOLERANCE)


def _judge(draw: Draw, work: Work, logits: tuple[Tensor, Tensor], found: Tensor) -> Verdict:
    """Judge what a contender draws against float64; `found` is one draw of many."""
    full, masked = (one[:LARGEST_CHECKED_BATCH] for one in logits)
    if bool(_surprises(draw, work, full, masked, CHECKED_WHOLE)[0].isinf().any()):
        return Verdict(False, "a token of the whole vocabulary was drawn that float64 cuts off")
    full, masked = (one[:, :CHECKED_TOKENS].contiguous() for one in (full, masked))
    drawn, kept = _surprises(draw, work, full, masked, CHECKED_DRAWS)
    if bool(drawn.isinf().any()):
        return Verdict(False, "a token was drawn that float64 cuts off")
    weights, surprises = kept.exp(), kept.masked_fill(kept.isinf(), 0.0)
    mean = (weights * surprises).sum(-1)
    spread = (weights * (surprises - mean[:, None]).square()).sum(-1).sqrt()
    deviation = float(((drawn.mean(1) - mean) / spread * CHECKED_DRAWS**0.5).abs().max())
    text = (
        f"{CHECKED_DRAWS} draws, none cut off in float64, mean log-probability within "
        f"{deviation:.1f} standard errors"
    )
    return Verdict(deviation <= DEVIATION, text)


def _surprises(
    draw: Draw, work: Work, full: Tensor, masked: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Exact log-probabilities of some draws, [B, count], and of every token."""
    kept, allowed = log_probabilities(full, masked, work)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the verdict is the same in every run
        drawn = torch.stack([draw(full, masked) for _ in range(count)], 1)
    return torch.where(kept.isinf(), allowed, kept).gather(1, drawn), kept
