"""The public function of the linear layer on few rows."""

from torch import Tensor

from radar_kernels.linear_rows import cpp, reference

MOST_ROWS = cpp.MOST_ROWS
_BACKENDS = ("cpp", "reference")


def linear_rows(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Applies a linear layer to few rows, reading the weights once, at memory speed.

    Args:
        input: ``[..., in]``. The C++ kernel serves one to eight rows in all.
        weight: ``[out, in]``, dtype of ``input``; float32, bfloat16 or float16 and contiguous for
            the C++ kernel.
        bias: ``[out]`` or None.
        backend: "cpp", "reference" (``torch.nn.functional.linear``), or None: C++ where it can
            serve the call.

    Returns:
        ``[..., out]``: ``input @ weight.T + bias``, summed in float32 and rounded once.

    Raises:
        ValueError: ``backend`` is unknown or cannot serve the call; the text says why.
    """
    if backend is None:
        if cpp.unsupported(input, weight, bias) is None:
            return cpp.run(input, weight, bias)
        return reference.run(input, weight, bias)
    if backend == "reference":
        return reference.run(input, weight, bias)
    if backend != "cpp":
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(_BACKENDS)}, or None")
    reason = cpp.unsupported(input, weight, bias)
    if reason is not None:
        raise ValueError(
            f"backend='cpp' cannot serve this call of linear_rows: {reason}. "
            "Leave backend out to let another one serve it"
        )
    return cpp.run(input, weight, bias)
