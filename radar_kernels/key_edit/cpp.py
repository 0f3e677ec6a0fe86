"""Key edits on CPUs, in C++: only anchored rows are multiplied."""

import torch
from torch import Tensor

from radar_kernels import native
from radar_kernels.key_edit.arguments import KeyEditArguments

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

absent = native.absent

if absent() is None:
    _edit = torch.ops.radar_cpp.edit_keys.default


def unsupported(arguments: KeyEditArguments) -> str | None:
    """Says why a call cannot be served.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    key = arguments.key
    if (reason := absent()) is not None:
        return reason
    if not key.is_cpu:
        return f"it runs on the CPU only, this key is on {key.device}"
    if key.dtype not in _DTYPES:
        return f"it takes float32, bfloat16 and float16 keys, got {key.dtype}"
    if key.shape[3] > 1 and key.stride(3) != 1:
        return "the last dimension of key must be contiguous"
    return None


def run(arguments: KeyEditArguments) -> Tensor:
    """Edits the anchored keys, accumulating in float32.

    Args:
        arguments: a call that ``unsupported`` has let through.

    Returns:
        New keys, contiguous.
    """
    return _edit(arguments.key, arguments.anchors, arguments.left, arguments.right, arguments.gain)
