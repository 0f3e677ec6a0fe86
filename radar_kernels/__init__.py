"""Small, exact, fast operators that steer attention and decoding."""

from radar_kernels.anchor_attention.api import anchor_attention

__all__ = ["anchor_attention"]
__version__ = "0.1.0"
