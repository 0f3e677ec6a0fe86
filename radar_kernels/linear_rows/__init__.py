"""A linear layer on at most eight rows: what decoding runs between its attentions."""

from radar_kernels.linear_rows.api import linear_rows

__all__ = ["linear_rows"]
