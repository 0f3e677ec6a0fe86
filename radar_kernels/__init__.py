"""Small, exact, fast operators that steer attention and decoding."""

from radar_kernels.anchor_attention.api import anchor_attention
from radar_kernels.backends import available_backends, explain
from radar_kernels.key_edit.api import edit_keys
from radar_kernels.logit_blend.api import blend_logits, sample_logits
from radar_kernels.partition_attention.api import (
    Partition,
    merge_partition,
    partition_attention,
)
from radar_kernels.relevance.api import Selection, relevance_scores, select_relevant
from radar_kernels.segment_mass.api import segment_mass

__all__ = [
    "Partition",
    "Selection",
    "anchor_attention",
    "available_backends",
    "blend_logits",
    "edit_keys",
    "explain",
    "merge_partition",
    "partition_attention",
    "relevance_scores",
    "sample_logits",
    "segment_mass",
    "select_relevant",
]
__version__ = "0.1.0"
