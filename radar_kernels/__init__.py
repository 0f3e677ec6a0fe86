"""Small, exact, fast operators that steer attention and decoding."""

from radar_kernels.anchor_attention.api import anchor_attention
from radar_kernels.backends import available_backends, explain
from radar_kernels.partition_attention.api import (
    Partition,
    merge_partition,
    partition_attention,
)
from radar_kernels.segment_mass.api import segment_mass

__all__ = [
    "Partition",
    "anchor_attention",
    "available_backends",
    "explain",
    "merge_partition",
    "partition_attention",
    "segment_mass",
]
__version__ = "0.1.0"
