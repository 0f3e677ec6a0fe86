"""Which of 200,000 sentences matter to eight queries: Radar against matmul and cos_sim chains.

Embeddings of 384 numbers (all-MiniLM-L6-v2's) from agents of a layered topology over twenty
rounds; every contender returns the sentences whose decayed cosine reaches a threshold that about
one in a thousand does. "torch" is what one writes by hand and tunes: norms known beforehand, one
matmul, one table of decays. "cos-sim" is sentence_transformers' `util.cos_sim` and the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.checks import Verdict
from benchmarks.tasks import DTYPES, FLOOR, Bar, Build, Contender, Growth, Task
from radar_kernels import available_backends, select_relevant

BOTH = ("fp32", "bf16")
# Largest error of a score. The chains multiply bfloat16 into bfloat16, which keeps 8 bits.
TOLERANCE = {"bf16": 5e-3, "fp32": 1e-5}
DECAY = 0.92
AGENTS, ROUNDS = 6, 20
SHARE = 1e-3

BARS = (
    Bar("relevance", "200000x384 queries=8", ("fp32",), "radar-cpp", FLOOR, 1.5, 1.2),
    Bar("relevance", "200000x384 queries=8", ("bf16",), "radar-cpp", FLOOR, 2.0, 1.2),
    Bar("relevance", "200000x384 queries=8", BOTH, "radar-cpp", "torch", 1 / 2),
    Bar("relevance", "200000x384 queries=8", BOTH, "radar-cpp", "cos-sim", 1 / 5),
)

# (query, place, score) of everything selected, as parallel tensors.
Selected = tuple[Tensor, Tensor, Tensor]
Select = Callable[[], Selected]


@dataclass(frozen=True)
class Shape:
    """How much there is to score.

    Args:
        sentences: how many.
        size: of an embedding.
        queries: how many.
    """

    sentences: int
    size: int
    queries: int

    def __str__(self) -> str:
        return f"{self.sentences}x{self.size} queries={self.queries}"


SHAPES = (Shape(200_000, 384, 8), Shape(200_000, 384, 1), Shape(20_000, 384, 8))


@dataclass(frozen=True)
class Discussion:
    """What was said, and what is asked.

    Args:
        sentences: [S, d].
        queries: [Q, d].
        sender: int64 [S].
        round: int64 [S].
        hops: int64 [Q, A].
        now: int64 [Q].
        exact: float64 [Q, S], the scores by the formula.
        threshold: the score that must be reached.
    """

    sentences: Tensor
    queries: Tensor
    sender: Tensor
    round: Tensor
    hops: Tensor
    now: Tensor
    exact: Tensor
    threshold: float

    @property
    def bytes_to_read(self) -> int:
        """Bytes of the embeddings, and of who said them when."""
        return sum(t.numel() * t.element_size() for t in (self.sentences, self.sender, self.round))


def plan(dtypes: Sequence[str] = BOTH, quick: bool = False) -> list[Build]:
    """Plan the tasks.

    Args:
        dtypes: "fp32", "bf16".
        quick: a small shape only.

    Returns:
        Builders of the tasks.
    """
    shapes = (Shape(3000, 24, 3),) if quick else SHAPES
    return [partial(task, shape, dtype) for shape in shapes for dtype in dtypes]


def growth(dtype: str, quick: bool = False) -> list[Growth]:
    """Plan the same work at growing sizes.

    Args:
        dtype: "fp32" or "bf16".
        quick: few and small sizes.

    Returns:
        A selection against the number of sentences.
    """
    sizes = (500, 1000) if quick else (2000, 20_000, 200_000)
    points = [(size, partial(task, Shape(size, 384, 8), dtype)) for size in sizes]
    return [Growth("choosing among sentences of 384 numbers, 8 queries", "sentences", points)]


def task(shape: Shape, dtype: str) -> Task:
    """Build the task of one shape.

    Args:
        shape: how much there is to score.
        dtype: of the embeddings, "fp32" or "bf16".

    Returns:
        The task.
    """
    work = build(shape, DTYPES[dtype])
    found = {
        name: Contender(partial(_select, select), partial(judge, work, tolerance=TOLERANCE[dtype]))
        for name, select in contenders(work).items()
    }
    return Task("relevance", str(shape), dtype, found, floor_bytes=work.bytes_to_read)


def _select(select: Select, copy: int) -> Selected:
    return select()


def build(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Discussion:
    """Draw a discussion.

    Args:
        shape: how large.
        dtype: of the embeddings.
        seed: the same seed draws the same numbers.

    Returns:
        The discussion; a few of its embeddings resemble the queries, most do not.
    """
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(shape.queries, shape.size, generator=draw).to(dtype)
    sentences = torch.randn(shape.sentences, shape.size, generator=draw)
    like = torch.rand(shape.sentences, generator=draw) < 0.01
    which = torch.randint(shape.queries, (shape.sentences,), generator=draw)
    sentences[like] += queries.float()[which[like]]
    sentences = sentences.to(dtype)
    sender = torch.randint(AGENTS, (shape.sentences,), generator=draw)
    round = torch.arange(shape.sentences) * ROUNDS // max(1, shape.sentences)
    hops = torch.randint(-1, 4, (shape.queries, AGENTS), generator=draw)
    hops[:, 0] = 1
    now = torch.full((shape.queries,), ROUNDS)
    exact = _exact(sentences, queries, sender, round, hops, now)
    passing = max(1, int(SHARE * exact.numel()))
    threshold = float(exact.flatten().kthvalue(exact.numel() - passing).values)
    return Discussion(sentences, queries, sender, round, hops, now, exact, threshold)


def contenders(work: Discussion) -> dict[str, Select]:
    """Return who can select sentences here.

    Args:
        work: what to select from.

    Returns:
        Provider to a call that selects.
    """
    present = [name for name, why in available_backends("select_relevant").items() if why is None]
    found: dict[str, Select] = {
        f"radar-{name}": partial(_radar, work, name)
        for name in ("cpp", "reference")
        if name in present
    }
    found["torch"] = _tuned(work)
    try:
        from sentence_transformers.util import cos_sim
    except ImportError:
        return found
    found["cos-sim"] = partial(_cos_sim, work, cos_sim)
    return found


def judge(work: Discussion, selected: Selected, tolerance: float) -> Verdict:
    """Judge a selection by the formula.

    Args:
        work: what was selected from.
        selected: what a contender returned.
        tolerance: largest error of a score; sentences this near the threshold may or may not be
            selected.

    Returns:
        The verdict.
    """
    query, place, score = selected
    chosen = torch.zeros(work.exact.shape, dtype=torch.bool)
    chosen[query, place] = True
    surely = work.exact >= work.threshold + tolerance
    never = work.exact < work.threshold - tolerance
    if bool((surely & ~chosen).any() or (never & chosen).any()):
        return Verdict(False, "sentences are missing or too many")
    if len(score) == 0 or int(chosen.sum()) != len(score):
        return Verdict(False, "nothing was selected, or something twice")
    worst = float((score.double() - work.exact[query, place]).abs().max())
    return Verdict(worst <= tolerance, f"sentences and scores within {worst:.1e} of float64")


def _radar(work: Discussion, backend: str) -> Selected:
    found = select_relevant(
        work.sentences,
        work.queries,
        work.sender,
        work.round,
        work.hops,
        work.now,
        spatial_decay=DECAY,
        temporal_decay=DECAY,
        threshold=work.threshold,
        backend=backend,
    )
    query = torch.repeat_interleave(torch.arange(len(work.queries)), found.offsets.diff())
    return query, found.indices, found.scores


def _tuned(work: Discussion) -> Select:
    """Normalised embeddings known beforehand, as a vector store has them, and a decay per sender
    and round looked up for each sentence."""
    sentences = torch.nn.functional.normalize(work.sentences.float(), dim=1).to(
        work.sentences.dtype
    )
    cell = work.sender * ROUNDS + work.round

    def select() -> Selected:
        queries = torch.nn.functional.normalize(work.queries.float(), dim=1)
        cosine = (sentences @ queries.to(sentences.dtype).mT).float()
        spatial = DECAY ** (work.hops - 1).clamp_min(0).float()
        spatial = spatial.masked_fill(work.hops < 0, 0.0)
        ages = work.now[:, None] - torch.arange(ROUNDS) - 1
        temporal = DECAY ** ages.clamp_min(0).float()
        table = (spatial[:, :, None] * temporal[:, None]).flatten(1).mT.contiguous()
        score = cosine.mul_(table[cell])
        place, query = (score >= work.threshold).nonzero(as_tuple=True)
        return query, place, score[place, query]

    return select


def _cos_sim(work: Discussion, cos_sim: Callable[[Tensor, Tensor], Tensor]) -> Selected:
    cosine = cos_sim(work.queries, work.sentences).float()
    score = cosine * _decays(work.sender, work.round, work.hops, work.now)
    query, place = (score >= work.threshold).nonzero(as_tuple=True)
    return query, place, score[query, place]


def _decays(sender: Tensor, round: Tensor, hops: Tensor, now: Tensor) -> Tensor:
    distance = hops[:, sender]
    age = (now[:, None] - round - 1).clamp_min(0)
    decay = DECAY ** (distance - 1).clamp_min(0) * DECAY**age
    return decay.masked_fill(distance < 0, 0.0)


def _exact(
    sentences: Tensor, queries: Tensor, sender: Tensor, round: Tensor, hops: Tensor, now: Tensor
) -> Tensor:
    said, asked = sentences.double(), queries.double()
    lengths = asked.norm(dim=1)[:, None] * said.norm(dim=1)
    distance = hops[:, sender]
    exponent = (distance - 1).clamp_min(0) + (now[:, None] - round - 1).clamp_min(0)
    decay = torch.exp(exponent.double() * torch.tensor(DECAY, dtype=torch.float64).log())
    return (asked @ said.mT / lengths * decay).masked_fill(distance < 0, -torch.inf)
