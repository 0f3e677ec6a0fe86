"""The ways of steering that the experiment `evidence` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radar_core.methods import SPA, AttentionBias, Method, NoSteering, TargetMass

__all__ = ["APPENDED", "SETS", "UNSTEERED", "Arm", "arms"]

UNSTEERED = "unsteered"
APPENDED = "appended"
SETS = ("answer", "quick", "all")


@dataclass(frozen=True)
class Arm:
    """A way of steering.

    Args:
        label: what it is called.
        method: its method.
        question: whether the question is anchored beside the sentences.
        appended: whether the sentences are repeated at the prompt's end instead of anchored.
        others: whether the other sentences of the conversation are anchored instead.
    """

    label: str
    method: Method
    question: bool = False
    appended: bool = False
    others: bool = False


def check_set(chosen: str) -> None:
    """Check that there is such a set of arms.

    Args:
        chosen: its name; see `arms`.

    Raises:
        ValueError: there is none.
    """
    if chosen not in SETS:
        raise ValueError(f"--set: arms is {chosen!r}; expected one of {', '.join(SETS)}")


def arms(model: Any, chosen: str, question: bool) -> list[Arm]:
    """Return the arms for one set of anchors; those that share a cache follow each other.

    Args:
        model: the model, for its number of layers.
        chosen: "answer" for what steers the answer alone and shares one reading of the prompt,
            "quick" for SPA and appended sentences too, "all" also for biases of all tokens.
        question: whether there is a question that can be anchored, and a conversation that
            sentences can be appended to and other sentences are in.

    Returns:
        The arms. A bias or target mass steers the answer's queries alone unless its label says "all
        tokens"; "last third" and "first third" are of the layers, rounded down in number.

    Raises:
        ValueError: there is no such set.
    """
    check_set(chosen)
    parts = _parts(model.config.get_text_config(decoder=True).num_hidden_layers)
    answer = _answer_arms(parts, everything=chosen == "all")
    if chosen == "answer":
        return [*answer, *(_others_arms(parts) if question else ())]
    steered = [_spa(strength) for strength in (1.2, 1.4, 2.0)]
    if question:
        steered = [Arm(APPENDED, NoSteering(), appended=True), *steered]
        answer += [*map(_with_question, answer), *_others_arms(parts)]
    if chosen == "all":
        if question:
            steered += [_with_question(_spa(strength)) for strength in (1.2, 1.4, 2.0)]
        steered += [
            _bias(bias, part, layers, "all")
            for part, layers in parts.items()
            for bias in (1.0, 2.0, 3.0)
        ]
    return [*answer, *steered]


def _answer_arms(parts: dict[str, list[int] | None], everything: bool) -> list[Arm]:
    """The arms that leave the prompt's own keys alone, so that they cost next to nothing."""
    found = [Arm("direct SPA 1.5", SPA(1.5, branch="direct"))]
    biases: dict[str, Sequence[float]] = {
        "all layers": (1.0, 2.0, 3.0),
        "last third": (1.0, 2.0, 3.0, 4.0),
        "first third": (1.0, 2.0, 3.0) if everything else (2.0,),
    }
    for part, strengths in biases.items():
        found += [_bias(bias, part, parts[part], "generated") for bias in strengths]
    found += [
        Arm(
            f"target mass {mass:g}, last third",
            TargetMass(mass, layers=parts["last third"], queries="generated"),
        )
        for mass in (0.1, 0.2, 0.35, 0.5)
    ]
    return found


def _others_arms(parts: dict[str, list[int] | None]) -> list[Arm]:
    """The arms that turn the answer away from the sentences that were not chosen."""
    return [
        Arm(
            f"others -{bias:g}, {part}",
            AttentionBias(-bias, layers=parts[part], queries="generated"),
            others=True,
        )
        for part in ("all layers", "last third")
        for bias in (1.0, 2.0)
    ]


def _spa(strength: float) -> Arm:
    return Arm(f"SPA {strength:g}", SPA(strength))


def _bias(bias: float, part: str, layers: list[int] | None, queries: Any) -> Arm:
    everywhere = ", all tokens" * (queries == "all")
    method = AttentionBias(bias, layers=layers, queries=queries)
    return Arm(f"bias {bias:g}, {part}{everywhere}", method)


def _with_question(arm: Arm) -> Arm:
    return Arm(f"{arm.label} + question", arm.method, question=True)


def _parts(layers: int) -> dict[str, list[int] | None]:
    third = max(1, layers // 3)
    return {
        "all layers": None,
        "last third": list(range(layers - third, layers)),
        "first third": list(range(third)),
    }
