"""Radar: steer a model's attention to what matters in a long multi-agent conversation.

Names are imported when first used, so that `import radar_core` costs nothing and needs no extras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radar_core.agent_radar import AgentRadar, Chosen, Prompt
    from radar_core.anchors import Anchor
    from radar_core.methods import (
        CAD,
        CFG,
        GUIDE,
        PASTA,
        PRISM,
        SEKA,
        SPA,
        AdaSEKA,
        AttentionBias,
        Contrast,
        Guard,
        InstABoost,
        Method,
        NoSteering,
        Projections,
        SecondPrompt,
        TargetMass,
    )
    from radar_core.recommended import recommended_method, recommended_policy, recommended_radar
    from radar_core.relevance import (
        Attention,
        Combined,
        Dense,
        Lexical,
        Mentions,
        Relevance,
        Selector,
    )
    from radar_core.report import LayerReport, Report
    from radar_core.schedule import Schedule
    from radar_core.steered import Reply, Steered, attention_mass
    from radar_core.topology import Topology
    from radar_core.transcript import Message, Transcript

_HOMES = {
    "radar_core.agent_radar": ("AgentRadar", "Chosen", "Prompt"),
    "radar_core.anchors": ("Anchor",),
    "radar_core.methods": (
        "CAD",
        "CFG",
        "GUIDE",
        "PASTA",
        "PRISM",
        "SEKA",
        "SPA",
        "AdaSEKA",
        "AttentionBias",
        "Contrast",
        "Guard",
        "InstABoost",
        "Method",
        "NoSteering",
        "Projections",
        "SecondPrompt",
        "TargetMass",
    ),
    "radar_core.recommended": ("recommended_method", "recommended_policy", "recommended_radar"),
    "radar_core.relevance": (
        "Attention",
        "Combined",
        "Dense",
        "Lexical",
        "Mentions",
        "Relevance",
        "Selector",
    ),
    "radar_core.report": ("LayerReport", "Report"),
    "radar_core.schedule": ("Schedule",),
    "radar_core.steered": ("Reply", "Steered", "attention_mass"),
    "radar_core.topology": ("Topology",),
    "radar_core.transcript": ("Message", "Transcript"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CAD",
    "CFG",
    "GUIDE",
    "PASTA",
    "PRISM",
    "SEKA",
    "SPA",
    "AdaSEKA",
    "AgentRadar",
    "Anchor",
    "Attention",
    "AttentionBias",
    "Chosen",
    "Combined",
    "Contrast",
    "Dense",
    "Guard",
    "InstABoost",
    "LayerReport",
    "Lexical",
    "Mentions",
    "Message",
    "Method",
    "NoSteering",
    "Projections",
    "Prompt",
    "Relevance",
    "Reply",
    "Report",
    "Schedule",
    "SecondPrompt",
    "Selector",
    "Steered",
    "TargetMass",
    "Topology",
    "Transcript",
    "attention_mass",
    "recommended_method",
    "recommended_policy",
    "recommended_radar",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'radar_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
