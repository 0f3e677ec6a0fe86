"""The C++ library: loads it once, and says why it cannot be used."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent


@lru_cache(maxsize=1)
def absent() -> str | None:
    """Loads the library.

    Returns:
        None if its operators can be called under ``torch.ops.radar_cpp``, otherwise the reason why
        not: what stopped the build, or what stopped the loading.
    """
    found = sorted(_FOLDER.glob("_C*.so"))
    if not found:
        try:
            return (_FOLDER / "_cpp_build_error.txt").read_text(encoding="utf-8").strip()
        except OSError:
            return "the C++ operators were not built; install radar-kernels from its sources"
    try:
        torch.ops.load_library(str(found[0]))
        torch.ops.radar_cpp.instruction_set()
    except (OSError, RuntimeError) as error:
        return f"the C++ operators do not load ({error}); install radar-kernels again"
    torch.library.register_fake("radar_cpp::anchor_attention", _fake_anchor_attention)
    torch.library.register_fake("radar_cpp::partition_attention", _fake_partition_attention)
    torch.library.register_fake("radar_cpp::segment_mass", _fake_segment_mass)
    torch.library.register_fake("radar_cpp::linear_rows", _fake_linear_rows)
    torch.library.register_fake("radar_cpp::merge_parts", _fake_merge_parts)
    torch.library.register_fake("radar_cpp::blend_logits", _fake_blend_logits)
    torch.library.register_fake("radar_cpp::sample_logits", _fake_sample_logits)
    torch.library.register_fake("radar_cpp::edit_keys", _fake_edit_keys)
    torch.library.register_fake("radar_cpp::relevance_scores", _fake_relevance_scores)
    torch.library.register_fake("radar_cpp::select_relevant", _fake_select_relevant)
    return None


def _fake_anchor_attention(
    query: Tensor, key: Tensor, value: Tensor, *arguments: object
) -> tuple[Tensor, Tensor]:
    size = query.shape[:3] if arguments[-1] else (0,)
    return _token_major(query, value), query.new_empty(size, dtype=torch.float32)


def _fake_partition_attention(
    query: Tensor, key: Tensor, value: Tensor, *arguments: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    anchored, rest = _token_major(query, value), _token_major(query, value)
    anchored_lse, rest_lse = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in "ar")
    return anchored, anchored_lse, rest, rest_lse


def _fake_segment_mass(
    query: Tensor, key: Tensor, segments: Tensor, num_segments: int, *arguments: object
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], num_segments, dtype=torch.float32)


def _token_major(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)


def _fake_linear_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _fake_merge_parts(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, size = first.shape
    out = first.new_empty(batch, queries, heads, size).transpose(1, 2)
    return out, torch.empty(first_lse.shape, dtype=torch.float32, device=first_lse.device)


def _fake_blend_logits(full: Tensor, *arguments: object) -> Tensor:
    return full.new_empty(full.shape, dtype=torch.float32)


def _fake_sample_logits(full: Tensor, *arguments: object) -> Tensor:
    return full.new_empty(full.shape[:1], dtype=torch.int64)


def _fake_edit_keys(key: Tensor, *arguments: object) -> Tensor:
    return key.new_empty(key.shape)


def _fake_relevance_scores(
    sentences: Tensor, scales: Tensor | None, queries: Tensor, *arguments: object
) -> Tensor:
    return sentences.new_empty(queries.shape[0], sentences.shape[0], dtype=torch.float32)


def _fake_select_relevant(
    sentences: Tensor, scales: Tensor | None, queries: Tensor, *arguments: object
) -> tuple[Tensor, Tensor, Tensor]:
    selected = torch.library.get_ctx().new_dynamic_size()
    return (
        sentences.new_empty(queries.shape[0] + 1, dtype=torch.int64),
        sentences.new_empty(selected, dtype=torch.int64),
        sentences.new_empty(selected, dtype=torch.float32),
    )
