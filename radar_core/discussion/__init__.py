"""Discussions of several agents: who speaks when, with what model, and a log to go on from.

Names are imported when first used: `SteeredModel` needs transformers, the others do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radar_core.discussion.agent import Agent
    from radar_core.discussion.baselines import (
        DebatePolicy,
        chain,
        debate,
        self_consistency,
        single_agent,
    )
    from radar_core.discussion.decision import ByLast, ByMajority, ByReference, Decision
    from radar_core.discussion.dropout import DroppedOut, agent_dropout
    from radar_core.discussion.model import Answer, Model, Request
    from radar_core.discussion.models import CallableModel, ClientModel, PipelineModel
    from radar_core.discussion.outcome import Outcome, Spoken, Verdict
    from radar_core.discussion.pruning import Pruned, agent_prune
    from radar_core.discussion.rounds import Rounds
    from radar_core.discussion.runner import Discussion, DiscussionError
    from radar_core.discussion.steered_model import SteeredModel
    from radar_core.discussion.task import Task

_HOMES = {
    "agent": ("Agent",),
    "baselines": ("DebatePolicy", "chain", "debate", "self_consistency", "single_agent"),
    "decision": ("ByLast", "ByMajority", "ByReference", "Decision"),
    "dropout": ("DroppedOut", "agent_dropout"),
    "model": ("Answer", "Model", "Request"),
    "models": ("CallableModel", "ClientModel", "PipelineModel"),
    "outcome": ("Outcome", "Spoken", "Verdict"),
    "pruning": ("Pruned", "agent_prune"),
    "rounds": ("Rounds",),
    "runner": ("Discussion", "DiscussionError"),
    "steered_model": ("SteeredModel",),
    "task": ("Task",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "Answer",
    "ByLast",
    "ByMajority",
    "ByReference",
    "CallableModel",
    "ClientModel",
    "DebatePolicy",
    "Decision",
    "Discussion",
    "DiscussionError",
    "DroppedOut",
    "Model",
    "Outcome",
    "PipelineModel",
    "Pruned",
    "Request",
    "Rounds",
    "Spoken",
    "SteeredModel",
    "Task",
    "Verdict",
    "agent_dropout",
    "agent_prune",
    "chain",
    "debate",
    "self_consistency",
    "single_agent",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'radar_core.discussion' has no attribute {name!r}")
    return getattr(importlib.import_module(f"radar_core.discussion.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
