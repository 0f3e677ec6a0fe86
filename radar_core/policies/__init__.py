"""What an agent is shown, and what of it is anchored: one file a policy."""

from radar_core.policies.policy import Ask, Context, Policy, Turn

__all__ = ["Ask", "Context", "Policy", "Turn"]
