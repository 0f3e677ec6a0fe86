"""Choosing sentences again after one new message of a long conversation.

    python -m benchmarks.selection --json results/selection.json

130 messages of 300,000 characters, as long as the longest real discussions between agents. Timed
are `AgentRadar.observe` of the last message and then `select` (or `prompt`, which also writes the
receiver's whole prompt): cutting the message, looking its sentences up, scoring all sentences and
choosing twenty. The encoder is a stand-in that looks its vectors up, so embedding costs nothing.
"numpy" is what one writes by hand: embeddings remembered by sentence and stacked, one product, the
decays in a loop, and a sort. All are checked against float64 first.
"""

from __future__ import annotations

import argparse
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.checks import Verdict
from benchmarks.discussion import discussion
from benchmarks.report import console, print_machine, print_rows, progress
from benchmarks.rows import Row, write_json
from benchmarks.tasks import Build, Contender, Task, run
from benchmarks.timing import time_call
from radar_core.agent_radar import AgentRadar, Chosen
from radar_core.relevance import Lexical, Relevance, sentence_spans
from radar_core.topology import Topology
from radar_core.transcript import Message

LIMIT_MS = 50.0
AGENTS = ("moderator", "planner", "builder", "treasurer", "librarian", "critic")
RECEIVER = AGENTS[-1]
QUERY = "What does it cost to move the map collection to the station hall, and who pays for it?"
SIZE, DECAY, TOP_K = 384, 0.92, 20
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Shape:
    """How long the conversation is.

    Args:
        messages: how many.
        characters: of all of them together.
    """

    messages: int
    characters: int

    def __str__(self) -> str:
        return f"{self.messages} messages of {self.characters:,} characters"


FULL, QUICK = Shape(130, 300_000), Shape(12, 6_000)


class Vectors:
    """An encoder that looks up a fixed random vector for every text."""

    def __init__(self) -> None:
        self._vectors = np.random.default_rng(0).normal(size=(4096, SIZE)).astype(np.float32)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [number of texts, 384], the same for the same text."""
        return self._vectors[[zlib.crc32(text.encode()) % len(self._vectors) for text in texts]]


@dataclass(frozen=True)
class Work:
    """A conversation that has been read up to its last message, and many messages to be the last.

    Args:
        topology: a star around the moderator, so that hops differ.
        known: what was said before.
        following: messages to follow it, one for each repetition.
    """

    topology: Topology
    known: list[Message]
    following: list[str]

    def last(self, place: int) -> Message:
        """Return the last message of one repetition."""
        count = len(self.known)
        text = self.following[place % len(self.following)]
        return Message(AGENTS[count % len(AGENTS)], count // len(AGENTS), text)


def build(shape: Shape, repetitions: int) -> Work:
    """Write the conversation.

    Args:
        shape: how long.
        repetitions: how many last messages, each another.

    Returns:
        The work.
    """
    size = -(-shape.characters // shape.messages)
    count = shape.messages - 1 + repetitions
    lines = discussion(count * size // 60).split("\n")[1:]
    text = " ".join(line.split(": ", 1)[1] for line in lines)
    if len(text) < count * size:
        raise ValueError(f"{len(text)} characters were written, {count * size} are needed")
    texts = [text[place * size : (place + 1) * size] for place in range(count)]
    known = [
        Message(AGENTS[place % len(AGENTS)], place // len(AGENTS), text)
        for place, text in enumerate(texts[: shape.messages - 1])
    ]
    return Work(Topology.star(AGENTS), known, texts[shape.messages - 1 :])


def tasks(shape: Shape, repetitions: int) -> list[Build]:
    """Plan the tasks: choosing, and writing the prompt.

    Args:
        shape: how long the conversation is.
        repetitions: how many last messages to have.

    Returns:
        Builders of the tasks.
    """
    return [partial(_task, shape, repetitions, phase) for phase in ("select", "prompt")]


def _task(shape: Shape, repetitions: int, phase: str) -> Task:
    work = build(shape, repetitions)
    encoder = Vectors()
    found = {
        "numpy": _by_hand(work, encoder),
        "radar-dense": _radar(work, Relevance(encoder), phase, exact_dense),
        "radar-lexical": _radar(work, Lexical(), phase, exact_lexical),
    }
    if phase == "prompt":
        del found["numpy"]
    return Task("selection", f"{phase}: {shape}", "fp32", found)


def _radar(
    work: Work, how: Any, phase: str, exact: Callable[[list[Message]], np.ndarray]
) -> Contender:
    """Time one way to select; what was said before is known, the last message is new each time."""
    option = {"selector": how} if isinstance(how, Lexical) else {"encoder": how}
    place = 0

    def prepare() -> tuple[AgentRadar, Message]:
        nonlocal place
        radar = AgentRadar(work.topology, top_k=TOP_K, **option)
        for message in work.known:
            radar.observe(sender=message.sender, round=message.round, text=message.text)
        getattr(radar, phase)(receiver=RECEIVER, query=QUERY)
        place += 1
        return radar, work.last(place)

    def step(radar: AgentRadar, message: Message) -> Chosen:
        radar.observe(sender=message.sender, round=message.round, text=message.text)
        made = getattr(radar, phase)(receiver=RECEIVER, query=QUERY)
        return made if isinstance(made, Chosen) else made.chosen

    def call(copy: int) -> tuple[list[Message], list[float], list[int]]:
        radar, message = prepare()
        chosen = step(radar, message)
        scores = [item.score for item in chosen.candidates]
        selected = [index for index, item in enumerate(chosen.candidates) if item.selected]
        return [*work.known, message], scores, selected

    return Contender(
        call,
        partial(_judge, exact),
        lambda copy: [time_call(partial(step, *prepare()))],
    )


def _by_hand(work: Work, encoder: Vectors) -> Contender:
    remembered: dict[str, np.ndarray] = {}
    place = 0

    def embed(text: str) -> np.ndarray:
        if text not in remembered:
            vector = encoder.encode([text])[0]
            remembered[text] = vector / np.linalg.norm(vector)
        return remembered[text]

    def prepare() -> tuple[list[tuple[str, str, int]], Message]:
        nonlocal place
        place += 1
        known = [
            (text, message.sender, message.round)
            for message in work.known
            for text in _pieces(message.text)
        ]
        for text, _, _ in known:
            embed(text)
        return known, work.last(place)

    def step(known: list[tuple[str, str, int]], message: Message) -> tuple[list[float], list[int]]:
        found = [(text, message.sender, message.round) for text in _pieces(message.text)]
        everything = known + found
        hops, now = work.topology.hops_to(RECEIVER), message.round + 1
        cosines = np.stack([embed(text) for text, _, _ in everything]) @ embed(QUERY)
        scores = [
            cosine * DECAY ** max(0, hops[sender] - 1) * DECAY ** max(0, now - round - 1)
            for cosine, (_, sender, round) in zip(cosines.tolist(), everything, strict=True)
        ]
        return scores, sorted(range(len(scores)), key=lambda index: -scores[index])[:TOP_K]

    def call(copy: int) -> tuple[list[Message], list[float], list[int]]:
        known, message = prepare()
        return [*work.known, message], *step(known, message)

    return Contender(
        call,
        partial(_judge, exact_dense),
        lambda copy: [time_call(partial(step, *prepare()))],
    )


def _pieces(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_spans(text)]


def exact_dense(messages: list[Message]) -> np.ndarray:
    """Compute the cosines of all sentences with the query.

    Args:
        messages: the conversation.

    Returns:
        float64 [number of sentences].
    """
    texts = [text for message in messages for text in _pieces(message.text)]
    vectors = Vectors().encode([*texts, QUERY]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[:-1] @ vectors[-1]


def exact_lexical(messages: list[Message]) -> np.ndarray:
    """Compute BM25 (Lucene's, k1 1.5, b 0.75) over the query's own, at most 1.

    Args:
        messages: the conversation.

    Returns:
        float64 [number of sentences].
    """
    from bm25s.stopwords import STOPWORDS_EN_PLUS

    texts = [*(text for message in messages for text in _pieces(message.text)), QUERY]
    function_words = set(STOPWORDS_EN_PLUS)
    documents = [
        Counter(w for w in re.findall(r"\w\w+|\d", text.lower()) if w not in function_words)
        for text in texts
    ]
    lengths = np.array([words.total() for words in documents], np.float64)
    scores = np.zeros(len(documents))
    for word, times in documents[-1].items():
        count = np.array([words[word] for words in documents], np.float64)
        having = np.count_nonzero(count)
        rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        damped = count + 1.5 * (0.25 + 0.75 * lengths / lengths.mean())
        scores += times * rarity * count / damped
    return np.minimum(1, scores[:-1] / scores[-1])


def _judge(
    exact: Callable[[list[Message]], np.ndarray],
    found: tuple[list[Message], list[float], list[int]],
) -> Verdict:
    """Hold scores and selection against similarities in float64 and the formula of the decays."""
    messages, scores, selected = found
    hops = Topology.star(AGENTS).hops_to(RECEIVER)
    now = 1 + max(message.round for message in messages)
    decays = [
        DECAY ** max(0, hops[message.sender] - 1) * DECAY ** max(0, now - message.round - 1)
        for message in messages
        for _ in _pieces(message.text)
    ]
    expected = exact(messages) * np.array(decays)
    if len(scores) != len(expected) or len(selected) != min(TOP_K, len(expected)):
        return Verdict(False, "sentences are missing or too many")
    worst = float(np.abs(np.array(scores) - expected).max())
    beaten = np.delete(expected, selected).max(initial=-1.0)
    best = bool(expected[selected].min() >= beaten - TOLERANCE)
    text = f"{len(scores)} scores within {worst:.1e} of float64, the best {len(selected)} chosen"
    return Verdict(worst <= TOLERANCE and best, text if best else f"NOT {text}")


def bar(rows: Sequence[Row]) -> list[tuple[str, float | None, bool]]:
    """Hold Radar's default against the limit.

    Args:
        rows: the rows.

    Returns:
        For each of its rows the work, the median in milliseconds and whether it is within the
        limit.
    """
    return [
        (row.work, row.median_ms, row.median_ms is not None and row.median_ms <= LIMIT_MS)
        for row in rows
        if row.provider == "radar-dense"
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, or 1 when a contender's result was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.selection", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three rounds of a short conversation")
    parsed = parser.parse_args(arguments)
    rounds = min(3, parsed.rounds) if parsed.quick else parsed.rounds
    out = console()
    described = machine.describe()
    builds = tasks(QUICK if parsed.quick else FULL, rounds + 2)
    with torch.inference_mode(), progress(len(builds)) as (announce, advance):
        rows = run(builds, rounds, described["read_gb_s"], announce, advance)
    print_machine(out, described)
    print_rows(out, rows, "numpy")
    for work, median, passed in bar(rows):
        took = "not timed" if median is None else f"{median:.1f} ms"
        verdict = "pass" if passed else "FAIL"
        out.print(f"bar: {work}: radar-dense {took}, at most {LIMIT_MS:g} ms: {verdict}")
    if parsed.quick:
        out.print("--quick: too short for the bar, and for conclusions.")
    if parsed.json:
        write_json(parsed.json, described, rows)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
