"""Key edits in plain PyTorch; differentiable."""

import torch
from torch import Tensor

from radar_kernels.key_edit.arguments import KeyEditArguments


def run(arguments: KeyEditArguments) -> Tensor:
    """Edits the anchored keys, accumulating in float32 (float64 for float64 keys).

    Args:
        arguments: the validated call.

    Returns:
        New keys, shape and dtype of the old ones.
    """
    key, anchors = arguments.key, arguments.anchors
    if key.device.type != "cpu":
        return torch.where(anchors[:, None, :, None], _edited(key, arguments), key)
    # Anchors are few: edit the columns that hold any, and leave the rest unread.
    some = anchors.any(0).nonzero().squeeze(1)
    columns = key[:, :, some]
    edited = torch.where(anchors[:, None, some, None], _edited(columns, arguments), columns)
    return key.index_copy(2, some, edited)


def _edited(key: Tensor, arguments: KeyEditArguments) -> Tensor:
    accumulator = torch.float64 if key.dtype == torch.float64 else torch.float32
    exact = key.to(accumulator)
    moved = exact @ arguments.left.to(accumulator)
    if arguments.right is not None:
        moved = moved @ arguments.right.to(accumulator)
    return (exact + arguments.gain.to(accumulator).view(-1, 1, 1) * moved).to(key.dtype)
