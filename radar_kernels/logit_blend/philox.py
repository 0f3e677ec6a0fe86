"""Random numbers that depend on a counter only, in torch integer arithmetic.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Token
``t`` of a row takes word ``t % 4`` of the block with counter
``(t // 4, offset & 0xffffffff, offset >> 32, 0)`` and key ``(seed & 0xffffffff, seed >> 32)``;
so its number depends on nothing but (seed, offset, t).
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Computes one block of Philox4x32-10 per element.

    Args:
        counter: four int64 tensors of values below 2^32, broadcastable.
        key: two such tensors.

    Returns:
        Int64 ``[..., 4]``, values below 2^32.
    """
    one, two, three, four = counter
    low, high = key
    for _ in range(10):
        # The products wrap around in 64 bits, which keeps both of their 32-bit halves.
        first, second = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, two, three, four = (
            (second >> 32) & _WORD ^ two ^ low,
            second & _WORD,
            (first >> 32) & _WORD ^ four ^ high,
            first & _WORD,
        )
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return torch.stack(torch.broadcast_tensors(one, two, three, four), -1)


def gumbel(seed: Tensor, offset: Tensor, token: Tensor) -> Tensor:
    """Draws standard Gumbel noise for tokens.

    Args:
        seed: int64, broadcastable with the others.
        offset: int64.
        token: int64, at least 0.

    Returns:
        Float32 noise ``-log(-log1p(-u))`` with ``u = (word + 0.5) / 2^32``, at most
        ``1 - 2^-24``: exact in the tail that decides, where ``u`` is small.
    """
    zero = torch.zeros_like(token)
    words = philox(
        (token >> 2, offset & _WORD, (offset >> 32) & _WORD, zero),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    word = words.gather(-1, (token & 3).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return _gumbel_of(word)


def gumbel_rows(seed: Tensor, offset: Tensor, vocabulary: int) -> Tensor:
    """Draws standard Gumbel noise for every token of every row, four a block.

    Args:
        seed: int64 ``[B]``.
        offset: int64 ``[B]``.
        vocabulary: number of tokens.

    Returns:
        Float32 ``[B, vocabulary]``, equal to ``gumbel`` token by token.
    """
    block = torch.arange((vocabulary + 3) // 4, device=seed.device)
    seed, offset = seed[:, None], offset[:, None]
    words = philox(
        (block, offset & _WORD, (offset >> 32) & _WORD, torch.zeros_like(block)),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    return _gumbel_of(words.flatten(1)[:, :vocabulary])


def _gumbel_of(word: Tensor) -> Tensor:
    uniform = ((word.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32)
    return -torch.log(-torch.log1p(-uniform.clamp_max(1 - 2.0**-24)))
