"""How steering methods reach into a transformers model."""

from radar_core.hooks.attachment import Steering, attach

__all__ = ["Steering", "attach"]
