"""Checks of single arguments that the attention operators share; none waits for a device."""

from functools import lru_cache

import torch
from torch import Tensor

from radar_kernels.checks import check_numbers, check_tensors

LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST_LENGTH = torch.iinfo(torch.int32).max
# From here on float32 rounds to 1.
_BELOW_ONE = 1 - 2.0**-25


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks that query, key and value fit each other.

    Args:
        query: ``[B, Hq, q, D]``.
        key: ``[B, Hkv, k, D]``.
        value: ``[B, Hkv, k, Dv]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or query.shape[3] == 0:
        raise ValueError(
            f"query, key and value are {described(query)}, {described(key)}, "
            f"{described(value)}; expected four dimensions "
            "[batch, heads, tokens, head size], the last at least 1"
        )
    batch, heads, _, size = query.shape
    key_batch, key_heads, keys, key_size = key.shape
    if key_batch != batch or key_size != size or value.shape[:3] != (batch, key_heads, keys):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do "
            "not fit; expected [B,Hq,q,D], [B,Hkv,k,D] and [B,Hkv,k,Dv]"
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"query has {heads} heads and key {key_heads}; expected a multiple of the key heads. "
            "Pass key and value as they are in the cache, not repeated"
        )
    dtype, device = query.dtype, query.device
    if not dtype.is_floating_point or key.dtype != dtype or value.dtype != dtype:
        raise ValueError(
            f"query, key and value are {dtype}, {key.dtype} and {value.dtype}; "
            "expected one floating point dtype"
        )
    if key.device != device or value.device != device:
        raise ValueError(
            f"query, key and value are on {device}, {key.device} and {value.device}; "
            "expected one device"
        )


def checked_anchors(anchors: Tensor, batch: int, keys: int, query: Tensor, checked: bool) -> Tensor:
    """Normalises anchors.

    Args:
        anchors: bool or floating ``[batch or 1, keys]``.
        batch: number of rows.
        keys: number of keys.
        query: says where they shall lie.
        checked: whether to check the shape.

    Returns:
        Bool or float32 ``[batch, keys]``, last stride 1.

    Raises:
        ValueError: shape or dtype does not fit.
    """
    if checked:
        check_tensors(anchors=anchors)
    if checked and (
        anchors.dim() != 2 or anchors.shape[1] != keys or anchors.shape[0] not in (1, batch)
    ):
        raise ValueError(
            f"anchors are {described(anchors)}; expected [{batch}, {keys}], one for each key. "
            "Keys made during generation are keys too: extend the anchors with False"
        )
    if anchors.dtype != torch.bool:
        if not anchors.is_floating_point():
            raise ValueError(
                f"anchors are {anchors.dtype}; expected bool, or floats as a factor of the bias. "
                "Pass anchors.bool() for a 0/1 mask"
            )
        anchors = anchors.to(torch.float32)
        if checked and anchors.device.type == "cpu" and not bool(anchors.isfinite().all()):
            raise ValueError("anchors hold NaN or infinity; expected finite factors of the bias")
    if anchors.device != query.device:
        anchors = anchors.to(query.device)
    if anchors.shape[0] != batch:
        anchors = anchors.expand(batch, keys)
    return unit_stride(anchors)


def per_head(
    name: str, given: float | Tensor, batch: int, heads: int, device: torch.device, checked: bool
) -> Tensor:
    """Normalises one value per head and row.

    Args:
        name: of the argument, for errors; "target_mass" must lie in (0, 1), others be finite.
        given: a float, 0-dim, ``[heads]``, ``[batch, heads]`` or ``[batch, 1]``.
        batch: number of rows.
        heads: number of query heads.
        device: where it shall lie.
        checked: whether to check values that are on this side of the device.

    Returns:
        Contiguous float32 ``[batch or 1, heads]``; may be shared, never write to it.

    Raises:
        ValueError: shape or values do not fit.
    """
    if checked:
        check_numbers(name, given)
    if not isinstance(given, Tensor):
        if checked:
            _check_values(name, [[given]])
            return constant(float(given), heads, device)
        return torch.full((1, heads), given, dtype=torch.float32, device=device)
    shape = given.shape
    if shape == (heads,) or given.dim() == 0:
        rows = given.expand(1, heads)
    elif given.dim() == 2 and shape[0] in (1, batch) and shape[1] in (1, heads):
        rows = given if shape[1] == heads else given.expand(shape[0], heads)
    else:
        raise ValueError(
            f"{name} is {described(given)}; expected a float, a 0-dim tensor, [{heads}] for one "
            f"value a head, [{batch}, {heads}], or [{batch}, 1] for one value a row"
        )
    if checked and given.device.type == "cpu":
        _check_values(name, rows.tolist())
    if rows.dtype != torch.float32 or rows.device != device:
        rows = rows.to(device, torch.float32)
    return rows.contiguous()


def _check_values(name: str, rows: list[list[float]]) -> None:
    if name == "target_mass":
        if not all(0 < one < _BELOW_ONE for row in rows for one in row):
            raise ValueError(
                f"target_mass is {rows}; expected shares of attention between 0 and 1, both "
                "excluded, in float32"
            )
    elif not all(abs(one) <= LARGEST for row in rows for one in row):
        raise ValueError(
            f"{name} is {rows}; expected finite numbers of float32. Use mask to hide keys "
            "altogether"
        )


@lru_cache(maxsize=256)
def constant(number: float, heads: int, device: torch.device) -> Tensor:
    """One number for every head, kept from call to call.

    Args:
        number: the number.
        heads: number of query heads.
        device: where it shall lie.

    Returns:
        Float32 ``[1, heads]``; shared, never write to it.
    """
    # A tensor made in inference mode could not be used where autograd records.
    with torch.inference_mode(False):
        return torch.full((1, heads), number, dtype=torch.float32, device=device)


def checked_mask(
    mask: Tensor, batch: int, heads: int, tokens: int, keys: int, query: Tensor, checked: bool
) -> Tensor:
    """Normalises a mask.

    Args:
        mask: bool, ``[B, k]`` or 4-D broadcastable to ``[batch, heads, tokens, keys]``.
        batch: number of rows.
        heads: number of query heads.
        tokens: number of queries.
        keys: number of keys.
        query: says where it shall lie.
        checked: whether to check, and to narrow expanded dimensions to size 1.

    Returns:
        Bool, four dimensions, each of size 1 or full, the last full with stride 1.

    Raises:
        ValueError: shape or dtype does not fit.
    """
    if checked:
        check_tensors(mask=mask)
    if checked and (mask.dtype != torch.bool or mask.dim() not in (2, 4)):
        raise ValueError(
            f"mask is {described(mask)}; expected bool, True where a query may attend, [B, k] or "
            "four dimensions. An additive mask becomes one with mask == 0"
        )
    if mask.dim() == 2:
        mask = mask.unsqueeze(1).unsqueeze(1)
    if checked:
        rows, mask_heads, queries, mask_keys = mask.shape
        if (
            rows not in (1, batch)
            or mask_heads not in (1, heads)
            or queries not in (1, tokens)
            or mask_keys != keys
        ):
            raise ValueError(
                f"mask is {described(mask)}; expected [{batch}, {keys}], or four dimensions "
                f"broadcastable to {[batch, heads, tokens, keys]} with all {keys} keys"
            )
        for dimension, size in enumerate((rows, mask_heads, queries)):
            if size > 1 and mask.stride(dimension) == 0:
                mask = mask.narrow(dimension, 0, 1)
    if mask.device != query.device:
        mask = mask.to(query.device)
    return unit_stride(mask)


def checked_key_lengths(
    key_lengths: Tensor, batch: int, keys: int, query: Tensor, checked: bool
) -> Tensor:
    """Normalises key lengths.

    Args:
        key_lengths: integers ``[batch]``.
        batch: number of rows.
        keys: number of keys there are.
        query: says where they shall lie.
        checked: whether to check the shape, and on CPUs the values.

    Returns:
        Int32 ``[batch]``.

    Raises:
        ValueError: shape, dtype or a value does not fit.
    """
    if checked:
        check_tensors(key_lengths=key_lengths)
        if key_lengths.shape != (batch,) or key_lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"key_lengths are {described(key_lengths)}; expected int32 [{batch}], the number "
                "of keys in use in each row"
            )
        if key_lengths.device.type == "cpu" and not all(
            0 <= one <= keys for one in key_lengths.tolist()
        ):
            raise ValueError(
                f"key_lengths are {key_lengths.tolist()}; expected 0 to {keys}, the keys there are"
            )
    if key_lengths.dtype != torch.int32:
        # Too many stay too many.
        key_lengths = key_lengths.clamp(max=_LARGEST_LENGTH)
    if key_lengths.dtype != torch.int32 or key_lengths.device != query.device:
        key_lengths = key_lengths.to(query.device, torch.int32)
    return key_lengths


def unit_stride(tensor: Tensor) -> Tensor:
    """Copies a tensor whose last stride is not 1.

    Args:
        tensor: any tensor.

    Returns:
        The tensor, or a contiguous copy.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def described(tensor: Tensor) -> str:
    """Names dtype and shape for an error.

    Args:
        tensor: any tensor.

    Returns:
        Such as "float32 [2, 3]".
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
