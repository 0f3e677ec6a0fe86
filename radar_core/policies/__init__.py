"""What an agent is shown, and what of it is anchored: one file a policy."""

from radar_core.policies.agent_radar import AgentRadarPolicy
from radar_core.policies.compaction import Compaction
from radar_core.policies.full import FullContext
from radar_core.policies.policy import Ask, Context, Policy, Turn
from radar_core.policies.rcr import Importance, RCRRouter, RoleProfile, Routed

__all__ = [
    "AgentRadarPolicy",
    "Ask",
    "Compaction",
    "Context",
    "FullContext",
    "Importance",
    "Policy",
    "RCRRouter",
    "RoleProfile",
    "Routed",
    "Turn",
]
