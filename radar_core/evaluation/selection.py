"""Experiment: does the selector find the evidence, and what do decays and thresholds do to it?

A question's paragraphs, gold and distracting, are reported by agents; the selector compares their
sentences with the question. Decays need distances, which the data sets do not have: every agent is
put at a random distance and every message into a random round, gold or not. So what decays do here
is what they cost where distance says nothing about relevance.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from radar_core.agent_radar import AgentRadar
from radar_core.checks import check_whole
from radar_core.evaluation.conversation import SOLVER, Reported, report
from radar_core.evaluation.datasets import load_questions
from radar_core.evaluation.experiment import Plot, Row, Summary, Table
from radar_core.evaluation.items import Question
from radar_core.evaluation.options import names, number, whole_number
from radar_core.evaluation.selectors import available_selectors
from radar_core.evaluation.statistics import (
    area_under_curve,
    mean_interval,
    paired,
    precision_at,
    recall_at,
)
from radar_core.relevance.score import Decay, ScoredSentence
from radar_core.relevance.selector import Selector
from radar_core.topology import Topology
from radar_core.transcript import LAST_ROUND

if TYPE_CHECKING:
    from radar_core.evaluation.command import Arguments

__all__ = ["Placement", "Selection", "build", "summarise"]

RANKING, THRESHOLD = "ranking", "threshold"
SPATIAL, TEMPORAL = "spatial_decay", "temporal_decay"
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 19))
DECAYS = (0.6, 0.7, 0.8, 0.84, 0.88, 0.92, 0.96, 1.0)
TOP = (1, 3, 5, 10)
OPTIONS = {
    "selectors": "dense,dense-title,lexical,attention,combined,recommended",
    "farthest": "3",
    "rounds": "4",
    "spatial_decay": "0.92",
    "temporal_decay": "0.92",
}


@dataclass(frozen=True)
class Placement:
    """Where every agent of a conversation is and when its messages were written, at random.

    Args:
        farthest: the largest distance of an agent from the receiver, in hops.
        rounds: number of rounds before the receiver's.
        seed: of the draw, with the question's own name.
    """

    farthest: int = 3
    rounds: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("farthest", 1), ("rounds", 1)):
            check_whole(name, getattr(self, name), least)
        if self.rounds > LAST_ROUND:
            raise ValueError(f"rounds must be at most {LAST_ROUND}, got {self.rounds}")

    def place(self, reported: Reported, name: str) -> tuple[Topology, list[int]]:
        """Draw distances and rounds.

        Args:
            reported: the conversation.
            name: of the question, so that each has a draw of its own.

        Returns:
            A topology with silent agents between the senders and the solver, and the round of each
            message.
        """
        draw = random.Random(f"{self.seed}/{name}")
        senders = reported.transcript.senders
        relays = [_unused(f"relay {hops}", senders) for hops in range(1, self.farthest)]
        line = [SOLVER, *relays]
        edges = [(farther, nearer) for nearer, farther in pairwise(line)]
        edges += [(sender, draw.choice(line)) for sender in senders]
        rounds = [draw.randrange(self.rounds) for _ in reported.transcript.messages]
        return Topology(edges, [*senders, *reversed(line)]), rounds


@dataclass(frozen=True)
class Selection:
    """Compares selectors by how well they find the sentences that an answer rests on.

    Args:
        selectors: what compares sentences with the question, by name.
        questions: questions with their paragraphs, which mark the sentences.
        placement: distances and rounds, for the decays.
        spatial_decay: factor per hop beyond the first, where decays are on.
        temporal_decay: factor per round beyond the last one, where decays are on.
        seed: of intervals and tests.
    """

    selectors: Mapping[str, Selector]
    questions: Sequence[Question]
    placement: Placement = field(default_factory=Placement)
    spatial_decay: float = 0.92
    temporal_decay: float = 0.92
    seed: int = 0
    name: ClassVar[str] = "selection"

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        return {
            "selectors": list(self.selectors),
            "farthest": self.placement.farthest,
            "rounds": self.placement.rounds,
            "spatial_decay": self.spatial_decay,
            "temporal_decay": self.temporal_decay,
            "thresholds": list(THRESHOLDS),
            "decays": list(DECAYS),
        }

    def items(self) -> list[tuple[str, Question]]:
        """Return every question with its name."""
        return [(f"{item.dataset}/{item.id}", item) for item in self.questions]

    def measure(self, item: Question) -> Iterator[dict[str, Any]]:
        """Compare the selectors on one question.

        Args:
            item: the question.

        Yields:
            For each selector: rows of the kind "ranking", without and with decays (area under the
            curve, and recall and precision of the best); of the kind "threshold", with decays
            (precision, which is None where nothing is chosen, recall, and the number chosen); and
            of the kinds "spatial_decay" and "temporal_decay", each varied alone.

        Raises:
            ValueError: the question marks no evidence, or nothing but evidence.
        """
        reported = report(item)
        topology, rounds = self.placement.place(reported, f"{item.dataset}/{item.id}")
        for name, selector in self.selectors.items():
            radar = AgentRadar(topology, selector=selector, top_k=1)
            for message, when in zip(reported.transcript, rounds, strict=True):
                radar.observe(sender=message.sender, text=message.text, round=when)
            chosen = radar.select(receiver=SOLVER, query=item.question, round=self.placement.rounds)
            compared = _Compared(chosen.candidates, reported, topology, self.placement.rounds)
            if not 0 < compared.gold.sum() < len(compared.gold):
                raise ValueError(
                    f"{item.dataset} marks {compared.gold.sum()} of {len(compared.gold)} sentences "
                    f"of the question {item.id} as evidence; expected some, but not all"
                )
            shared = {"arm": name, "dataset": item.dataset}
            yield from (shared | row for row in self._rows(compared))

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Summarise rows; see `radar_core.evaluation.selection.summarise`."""
        return summarise(rows, seed=self.seed)

    def _rows(self, compared: _Compared) -> list[dict[str, Any]]:
        plain = compared.scores(1.0, 1.0)
        decayed = compared.scores(self.spatial_decay, self.temporal_decay)
        rows = [
            {"kind": RANKING, "decays": "off", **_ranking(plain, compared.gold)},
            {"kind": RANKING, "decays": "on", **_ranking(decayed, compared.gold)},
        ]
        rows += [
            {"kind": THRESHOLD, "value": threshold, **_chosen(decayed >= threshold, compared.gold)}
            for threshold in THRESHOLDS
        ]
        for decay in DECAYS:
            for kind, factors in (
                (SPATIAL, (decay, self.temporal_decay)),
                (TEMPORAL, (self.spatial_decay, decay)),
            ):
                scores = compared.scores(*factors)
                rows.append({"kind": kind, "value": decay, **_ranking(scores, compared.gold)})
        return rows


class _Compared:
    """Sentences with their similarity, distance and truth."""

    def __init__(
        self,
        candidates: Sequence[ScoredSentence],
        reported: Reported,
        topology: Topology,
        now: int,
    ) -> None:
        hops = topology.hops_to(SOLVER)
        self.similarity = np.array([item.similarity for item in candidates])
        self.distance = [(hops[item.sender], item.round) for item in candidates]
        self.now = now
        self.gold = np.array(
            [reported.is_gold(item.message_index, item.start, item.end) for item in candidates],
            dtype=bool,
        )

    def scores(self, spatial: float, temporal: float) -> np.ndarray:
        """Return similarity times decay."""
        decay = Decay(spatial, temporal)
        factors = [decay.factors(hops, when, self.now) for hops, when in self.distance]
        return self.similarity * np.array([float(np.prod(pair or (0, 0))) for pair in factors])


def build(arguments: Arguments) -> Selection:
    """Build the experiment that the command line asks for.

    Args:
        arguments: with the options `selectors` (names, by commas), `farthest` (hops), `rounds`,
            `spatial_decay` and `temporal_decay`.

    Returns:
        The experiment.

    Raises:
        ValueError: no data is given, or an option is unknown or malformed.
    """
    options = arguments.options_over(OPTIONS)
    if not arguments.data:
        raise ValueError("--data: expected at least one file of questions")
    questions = [
        question for path in arguments.data for question in load_questions(path)[: arguments.limit]
    ]
    known = available_selectors(arguments)
    wanted = names("selectors", options["selectors"], known)
    placement = Placement(
        whole_number("farthest", options["farthest"]),
        whole_number("rounds", options["rounds"]),
        arguments.seed,
    )
    spatial, temporal = (number(name, options[name]) for name in (SPATIAL, TEMPORAL))
    Decay(spatial, temporal)  # refuses what is no decay before anything is loaded
    selectors = {name: known[name]() for name in wanted}
    return Selection(selectors, questions, placement, spatial, temporal, arguments.seed)


def _unused(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "'"
    return name


# -- measures --------------------------------------------------------------------------------------


def _ranking(scores: np.ndarray, gold: np.ndarray) -> dict[str, float]:
    compared = scores.tolist(), gold.tolist()
    found = {"auc": area_under_curve(*compared)}
    for k in TOP:
        found[f"recall@{k}"] = recall_at(*compared, k)
        found[f"precision@{k}"] = precision_at(*compared, k)
    return found


def _chosen(chosen: np.ndarray, gold: np.ndarray) -> dict[str, float | int | None]:
    right = int((chosen & gold).sum())
    count = int(chosen.sum())
    return {
        "precision": right / count if count else None,
        "recall": right / int(gold.sum()),
        "chosen": count,
    }


# -- summary ---------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row], seed: int = 0) -> Summary:
    """Compare selectors, and show what thresholds and decays do.

    Args:
        rows: of `Selection.measure`, each with its "item".
        seed: of intervals and tests.

    Returns:
        For each data set a table of rankings and one of thresholds, and pictures of how threshold
        and decays matter, as in Agent-Radar's figure 3 (arXiv 2605.30136), which shows the scores
        of answers there and of selection here.
    """
    tables: list[Table] = []
    plots: list[Plot] = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        of_set = [row for row in rows if row["dataset"] == dataset]
        tables.append(_rankings(dataset, of_set, seed))
        tables.append(_thresholds(dataset, of_set))
        tables.append(_decays(dataset, of_set))
        plots += _plots(dataset, of_set)
    return Summary(tables, plots)


def _rankings(dataset: str, rows: Sequence[Row], seed: int) -> Table:
    groups = _grouped([row for row in rows if row["kind"] == RANKING], "arm", "decays")
    first = groups[next(iter(groups))[0], "off"]
    cells: list[list[str | float | int | None]] = []
    for (arm, decays), found in groups.items():
        auc, recall, precision = (
            mean_interval([row[name] for row in found], seed=seed)
            for name in ("auc", "recall@5", "precision@5")
        )
        line: list[str | float | int | None] = [arm, decays]
        for interval in (auc, recall, precision):
            line += [round(interval.mean, 3), f"{interval.low:.3f} to {interval.high:.3f}"]
        compared: list[str | float | None] = [None, None]
        if found is not first:
            test = paired(
                [row["recall@5"] for row in found], [row["recall@5"] for row in first], seed=seed
            )
            compared = [round(test.difference.mean, 3), round(test.p_value, 4)]
        cells.append([*line, *compared])
    name, _ = next(iter(groups))
    return Table(
        f"{dataset}: which sentences are evidence, {len(first)} questions",
        [
            "selector",
            "decays",
            "AUC",
            "95 %",
            "recall@5",
            "95 %",
            "precision@5",
            "95 %",
            f"recall@5 over {name}, off",
            "p",
        ],
        cells,
        "Means over questions with bootstrap intervals; p is of a paired permutation test. "
        "Distances and rounds are drawn at random, for evidence and distractors alike: decays can "
        "only cost here.",
    )


def _thresholds(dataset: str, rows: Sequence[Row]) -> Table:
    groups = _grouped([row for row in rows if row["kind"] == THRESHOLD], "arm", "value")
    cells: list[list[str | float | int | None]] = []
    for (arm, threshold), found in groups.items():
        cells.append(
            [
                arm,
                threshold,
                _mean([row["precision"] for row in found]),
                _mean([row["recall"] for row in found]),
                _mean([row["chosen"] for row in found]),
                _mean([float(row["chosen"] == 0) for row in found]),
            ]
        )
    return Table(
        f"{dataset}: what a threshold chooses, decays on",
        ["selector", "threshold", "precision", "recall", "sentences", "questions with none"],
        cells,
        "Precision is the mean over the questions for which something is chosen. Selectors have "
        "scales of their own: a threshold of one says nothing about another.",
        detail=True,
    )


def _decays(dataset: str, rows: Sequence[Row]) -> Table:
    kept = [row for row in rows if row["kind"] in (SPATIAL, TEMPORAL)]
    groups = _grouped(kept, "arm", "kind", "value")
    return Table(
        f"{dataset}: each decay varied alone",
        ["selector", "decay", "factor", "AUC", "recall@5"],
        [
            [
                arm,
                kind,
                value,
                *(_mean([row[name] for row in found]) for name in ("auc", "recall@5")),
            ]
            for (arm, kind, value), found in groups.items()
        ],
        "The other decay is that of the run. Distances and rounds are drawn at random.",
        detail=True,
    )


def _plots(dataset: str, rows: Sequence[Row]) -> list[Plot]:
    def thresholds(axes: Any) -> None:
        kept = [row for row in rows if row["kind"] == THRESHOLD]
        for place, arm in enumerate(dict.fromkeys(row["arm"] for row in kept)):
            groups = _grouped([row for row in kept if row["arm"] == arm], "value")
            values = [value for (value,) in groups]
            for name, style in (("recall", "-"), ("precision", "--")):
                means = [_mean([row[name] for row in found]) for found in groups.values()]
                axes.plot(
                    values,
                    [float("nan") if mean is None else mean for mean in means],
                    style,
                    color=f"C{place}",
                    label=f"{arm}: {name}",
                )
        axes.set(xlabel="threshold", ylabel="mean over questions", ylim=(0, 1), title=dataset)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))

    def decays(kind: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            kept = [row for row in rows if row["kind"] == kind]
            for arm in dict.fromkeys(row["arm"] for row in kept):
                groups = _grouped([row for row in kept if row["arm"] == arm], "value")
                means = [_mean([row["recall@5"] for row in found]) for found in groups.values()]
                axes.plot([value for (value,) in groups], means, marker="o", label=arm)
            axes.set(xlabel=kind.replace("_", " "), ylabel="recall@5", title=dataset)
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))

        return draw

    return [
        Plot(f"{dataset}-threshold", thresholds),
        *(
            Plot(f"{dataset}-{kind.replace('_', '-')}", decays(kind))
            for kind in (SPATIAL, TEMPORAL)
        ),
    ]


def _grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 3) if known else None
