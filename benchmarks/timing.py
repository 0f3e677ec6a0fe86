"""Clocks and interleaving: every contender is timed in every round, so drift hits all alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)
Measurement = Callable[[], Mapping[str, list[float]]]


class Summary(NamedTuple):
    """Median and 20th and 80th percentile, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float


class TokenClock:
    """A streamer for `generate` that notes when the prompt and each new token arrived."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._seen: list[float] = []

    def put(self, value: Any) -> None:
        """Note the time; `generate` hands over the prompt first, then every token."""
        self._seen.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; the last token has its time already."""

    @property
    def phases(self) -> dict[str, list[float]]:
        """Seconds to the first token ("prefill") and between later tokens ("step")."""
        tokens = self._seen[1:]
        if len(tokens) < 2:
            raise ValueError(
                f"{len(tokens)} tokens were generated, at least 2 are needed to time a step"
            )
        steps = [later - earlier for earlier, later in pairwise(tokens)]
        return {"prefill": [tokens[0] - self.start], "step": steps}


def time_call(call: Callable[[], Any]) -> float:
    """Time one call.

    Args:
        call: what to run.

    Returns:
        Seconds.
    """
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summarise(seconds: list[float]) -> Summary:
    """Reduce samples to their median and 20th and 80th percentile.

    Args:
        seconds: at least one duration in seconds.

    Returns:
        The three numbers in milliseconds, interpolated linearly between samples.

    Raises:
        ValueError: there is no sample.
    """
    if not seconds:
        raise ValueError("seconds is empty, at least one sample is needed")
    p20, median, p80 = np.percentile(np.asarray(seconds) * 1e3, [20, 50, 80])
    return Summary(float(median), float(p20), float(p80))


def interleave(
    measurements: Mapping[Key, Measurement],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    warm_up: int = 0,
    together: Sequence[Sequence[Key]] = (),
) -> dict[Key, dict[str, list[float]]]:
    """Run every measurement once a round and pool each one's samples.

    Every round has its own order, drawn from a fixed seed, so that nobody always runs after the
    same neighbour, whose memory traffic it would pay for.

    Args:
        measurements: key to a callable that runs once and returns phase -> durations in seconds.
        rounds: how often each is run.
        advance: called after every measurement (a progress bar).
        warm_up: rounds before these, whose samples are thrown away.
        together: keys that run one right after another, in this order, for comparisons that are
            narrower than the machine's drift within a round.

    Returns:
        key -> phase -> all durations in seconds.
    """
    keys = list(measurements)
    grouped = {key for group in together for key in group}
    groups = [*together, *([key] for key in keys if key not in grouped)]
    order = random.Random(0)
    samples: dict[Key, dict[str, list[float]]] = {key: {} for key in keys}
    # What lives already is put out of the collector's sight: collecting then costs next to nothing.
    gc.collect()
    gc.freeze()
    try:
        for turn in range(-warm_up, rounds):
            for key in chain.from_iterable(order.sample(groups, len(groups))):
                gc.collect()
                for phase, seconds in measurements[key]().items():
                    if turn >= 0:
                        samples[key].setdefault(phase, []).extend(seconds)
                advance()
    finally:
        gc.unfreeze()
    return samples


def paired_ratios(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], runs: int
) -> list[float]:
    """Compare two measurements pair by pair, which the machine's drift leaves alone.

    Args:
        numerators: the samples of measurements that ran `runs` times each.
        denominators: the samples of those that ran right beside them.
        runs: how often each ran; a run's samples are as many as every other's.

    Returns:
        For each pair of runs, the ratio of their medians.
    """

    def medians(samples: Sequence[Sequence[float]]) -> np.ndarray:
        return np.concatenate([np.median(np.reshape(one, (runs, -1)), axis=1) for one in samples])

    return (medians(numerators) / medians(denominators)).tolist()


def median_interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """Compute a median and its bootstrap 95 % interval.

    Args:
        values: at least one.
        draws: resamples, from a fixed seed.

    Returns:
        The median, the 2.5th and the 97.5th percentile of the resamples' medians.
    """
    drawn = np.random.default_rng(0).choice(values, (draws, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
