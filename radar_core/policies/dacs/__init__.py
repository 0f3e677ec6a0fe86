"""Dynamic Attentional Context Scoping: one orchestrator that steers many agents, one in focus.

Source: DACS, arXiv 2604.07911.
"""

from radar_core.policies.dacs.context import BuiltContext, ContextBuilder
from radar_core.policies.dacs.log import EventLog, read_events
from radar_core.policies.dacs.orchestrator import Orchestrator, State
from radar_core.policies.dacs.registry import Registry, RegistryEntry, Status, Urgency
from radar_core.policies.dacs.requests import (
    Exchange,
    FocusContext,
    SteeringRequest,
    SteeringResponse,
)
from radar_core.policies.dacs.tokens import EstimatedTokenizer

__all__ = [
    "BuiltContext",
    "ContextBuilder",
    "EstimatedTokenizer",
    "EventLog",
    "Exchange",
    "FocusContext",
    "Orchestrator",
    "Registry",
    "RegistryEntry",
    "State",
    "Status",
    "SteeringRequest",
    "SteeringResponse",
    "Urgency",
    "read_events",
]
