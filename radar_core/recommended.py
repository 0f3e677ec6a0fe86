"""Radar's own default settings, as far as the experiments support them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radar_core.agent_radar import AgentRadar
from radar_core.methods import AttentionBias
from radar_core.policies.agent_radar import AgentRadarPolicy
from radar_core.relevance import Attention, Combined, Dense, Mentions
from radar_core.topology import Topology

__all__ = [
    "recommended_method",
    "recommended_policy",
    "recommended_radar",
    "recommended_selector",
]

BIAS = 1.0
# How many sentences are anchored, and whether the query is one of them.
CHOICE: Mapping[str, Any] = {"top_k": 5, "anchor_query": False}


def recommended_method() -> AttentionBias:
    """Return the steering method that did best with chosen anchors.

    A gentle bias in all layers, for the answer's tokens alone, so that the prompt's own keys stay
    as they are. A stronger one helps more where all evidence was chosen, and harms elsewhere.

    Returns:
        `AttentionBias(1.0, queries="generated")`.
    """
    return AttentionBias(BIAS, queries="generated")


def recommended_selector(attention: Attention, dense: Dense) -> Mentions:
    """Combine the model's own attention and an encoder evenly, and follow what the best mention.

    Args:
        attention: compares by the model's attention.
        dense: compares by the encoder's cosines, with titles.

    Returns:
        The selector.
    """
    return Mentions(Combined([attention, dense]))


def recommended_radar(
    topology: Topology, model: Any, tokenizer: Any, encoder: Any = None
) -> AgentRadar:
    """Build the selection that found most evidence: the model's own attention and the encoder.

    Args:
        topology: who talks to whom.
        model: the model that will answer; what it reads to choose it need not read again.
        tokenizer: its tokenizer.
        encoder: as in `AgentRadar`.

    Returns:
        The selector: the five best sentences by attention and titled cosines together, the decays
        of the paper, the query not anchored.
    """
    return AgentRadar(topology, selector=_selector(model, tokenizer, encoder), **CHOICE)


def recommended_policy(model: Any, tokenizer: Any, encoder: Any = None) -> AgentRadarPolicy:
    """Build the policy of a discussion that chooses and steers as did best.

    Args:
        model: the model of the discussion's `SteeredModel`.
        tokenizer: its tokenizer.
        encoder: as in `AgentRadar`.

    Returns:
        `recommended_radar`'s selection with `recommended_method`, as a policy.
    """
    selector = _selector(model, tokenizer, encoder)
    return AgentRadarPolicy(selector=selector, method=recommended_method(), **CHOICE)


def _selector(model: Any, tokenizer: Any, encoder: Any) -> Mentions:
    return recommended_selector(Attention(model, tokenizer), Dense(encoder, title=True))
