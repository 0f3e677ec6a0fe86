"""Attention operators: a decode step, a prompt, and the mass of every sentence.

In a decode step every call reads another layer's keys and values, as in a model. 5 % of the keys
are anchored, in four runs in the second half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.tasks import DTYPES, FLOOR, Bar, Build, Contender, Growth, Task, close_to
from radar_kernels import anchor_attention, available_backends, segment_mass

# Largest error allowed, over the largest output: bfloat16 keeps 8 bits of the output alone.
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}
# The layers' keys and values together, so that no core's own cache holds them from call to call.
LAYERS_BYTES = 128 << 20
BIAS = 2.0
TARGET = 0.3
BOTH = ("fp32", "bf16")

BARS = (
    Bar("decode", "32/8x128 keys=8192", ("fp32",), "radar-cpp", "sdpa-packed", 0.60),
    Bar("decode", "32/8x128 keys=8192", ("bf16",), "radar-cpp", "sdpa-packed", 0.30),
    Bar("decode", "32/8x128 keys=8192", BOTH, "radar-cpp", "sdpa-mask", 1 / 30),
    Bar("decode", "32/8x128 keys=8192", BOTH, "radar-cpp", FLOOR, 1.5, 1.1),
    Bar("decode", "32/8x128 keys=8192", BOTH, "radar-cpp-target", "radar-cpp", 1.1),
    Bar("decode", "14/2x64", BOTH, "radar-cpp", "sdpa-packed", 0.8, 0.4),
    Bar("decode", "9/3x64", BOTH, "radar-cpp", "sdpa-packed", 0.8, 0.4),
    Bar("prefill", "9/3x64", BOTH, "radar-cpp", "sdpa", 1.15, 1.05),
    Bar("segment_mass", "14/2x64", BOTH, "radar-cpp", "torch", 0.7, 0.3),
)


@dataclass(frozen=True)
class Shape:
    """The shape of attention.

    Args:
        heads: query heads.
        kv_heads: key and value heads.
        size: of a head.
        keys: how many.
        queries: how many tokens.
    """

    heads: int
    kv_heads: int
    size: int
    keys: int
    queries: int = 1

    def __str__(self) -> str:
        tokens = f" queries={self.queries}" if self.queries > 1 else ""
        return f"{self.heads}/{self.kv_heads}x{self.size} keys={self.keys}{tokens}"


DECODE = (
    Shape(32, 8, 128, 8192),
    Shape(14, 2, 64, 2048),
    Shape(14, 2, 64, 32768),
    Shape(9, 3, 64, 2048),
    Shape(9, 3, 64, 32768),
)
PREFILL = (Shape(9, 3, 64, 512, 512), Shape(9, 3, 64, 2048, 2048))
SEGMENTS = (Shape(14, 2, 64, 8192, 16),)
QUICK = (Shape(9, 3, 64, 512), Shape(9, 3, 64, 128, 128), Shape(14, 2, 64, 512, 16))


@dataclass(frozen=True)
class Inputs:
    """The tensors of one shape.

    Args:
        query: [1, Hq, q, D].
        layers: one (key, value) a layer, each [1, Hkv, k, D].
        anchors: bool [1, k].
        bias: float32 [Hq].
    """

    query: Tensor
    layers: list[tuple[Tensor, Tensor]]
    anchors: Tensor
    bias: Tensor

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.query.shape[1] // self.layers[0][0].shape[1]

    def repeated(self, copy: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with a head for every query head."""
        key, value = (t.repeat_interleave(self.group, 1) for t in self.layers[copy])
        return key, value


def plan(dtypes: Sequence[str] = BOTH, quick: bool = False) -> list[Build]:
    """Plan the attention tasks.

    Args:
        dtypes: "fp32", "bf16".
        quick: small shapes only.

    Returns:
        Builders of the tasks.
    """
    works = [(decode, DECODE), (prefill, PREFILL), (segments, SEGMENTS)]
    if quick:
        works = [(build, (shape,)) for (build, _), shape in zip(works, QUICK, strict=True)]
    return [
        partial(build, shape, dtype)
        for build, shapes in works
        for shape in shapes
        for dtype in dtypes
    ]


def growth(dtype: str, quick: bool = False) -> list[Growth]:
    """Plan the same work at growing sizes.

    Args:
        dtype: "fp32" or "bf16".
        quick: few and small sizes.

    Returns:
        Decoding and prefill against key length.
    """
    keys = (64, 128) if quick else (512, 2048, 8192, 32768)
    prompts = (64, 128) if quick else (256, 512, 1024, 2048)
    return [
        Growth(
            "one decode step, 9/3 heads of 64",
            "keys",
            [(n, partial(decode, Shape(9, 3, 64, n), dtype)) for n in keys],
        ),
        Growth(
            "a prompt, 9/3 heads of 64",
            "tokens",
            [(n, partial(prefill, Shape(9, 3, 64, n, n), dtype)) for n in prompts],
        ),
    ]


def draw(shape: Shape, dtype: str, layers: int | None = None, seed: int = 0) -> Inputs:
    """Draw the tensors of a shape.

    Args:
        shape: the shape.
        dtype: "fp32" or "bf16".
        layers: how many; None for enough to leave a core's own caches.
        seed: the same seed draws the same numbers.

    Returns:
        The tensors, queries and keys stored token by token as models have them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, tokens: int) -> Tensor:
        drawn = torch.randn(1, tokens, heads, shape.size, generator=generator)
        return drawn.to(DTYPES[dtype]).transpose(1, 2)

    one = 2 * shape.kv_heads * shape.keys * shape.size * DTYPES[dtype].itemsize
    layers = layers or min(32, max(2, LAYERS_BYTES // one))
    keys = [
        # A cache is head by head.
        (normal(shape.kv_heads, shape.keys).contiguous(), normal(shape.kv_heads, shape.keys))
        for _ in range(layers)
    ]
    anchors = torch.zeros(1, shape.keys, dtype=torch.bool)
    for start in range(shape.keys // 2, shape.keys, shape.keys // 8):
        anchors[0, start : start + max(1, shape.keys // 80)] = True
    bias = BIAS - 1.0 + 2.0 * torch.rand(shape.heads, generator=generator)
    query = normal(shape.heads, shape.queries)
    return Inputs(query, [(k, v.contiguous()) for k, v in keys], anchors, bias)


def exact(inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the logits and values of the first layer in float64.

    Args:
        inputs: the tensors.
        causal: whether a query sees only keys up to its own.

    Returns:
        Logits [1, Hq, q, k], -inf where hidden, and values [1, Hq, k, D].
    """
    key, value = (t.double() for t in inputs.repeated(0))
    logits = inputs.query.double() @ key.mT / key.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits, value


def _contenders(inputs: Inputs, dtype: str, causal: bool) -> dict[str, Contender]:
    logits, value = exact(inputs, causal)
    added = inputs.bias.double()[:, None, None] * inputs.anchors[:, None, None]
    plain = logits.softmax(-1)
    steered = (logits + added).softmax(-1) @ value
    mass = plain.masked_fill(~inputs.anchors[:, None, None], 0).sum(-1, keepdim=True)
    wanted = torch.logit(torch.tensor(TARGET).double())
    raised = (wanted - torch.logit(mass)).clamp_min(0).masked_fill((mass <= 0) | (mass >= 1), 0)
    target = (logits + raised * inputs.anchors[:, None, None]).softmax(-1) @ value

    def contender(call: Callable[[Tensor, Tensor], Tensor], expected: Tensor) -> Contender:
        return Contender(
            lambda copy: call(*inputs.layers[copy]), close_to(expected, TOLERANCE[dtype])
        )

    def steer(backend: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda key, value: anchor_attention(  # type: ignore[return-value]
            inputs.query,
            key,
            value,
            inputs.anchors,
            bias=inputs.bias,
            causal=causal,
            backend=None if backend == "cpp" else backend,
        )

    def aim(key: Tensor, value: Tensor) -> Tensor:
        out, _ = anchor_attention(
            inputs.query,
            key,
            value,
            inputs.anchors,
            target_mass=TARGET,
            causal=causal,
            return_mass=True,
        )
        return out

    def alone(key: Tensor, value: Tensor) -> Tensor:
        out = anchor_attention(inputs.query, key, value, causal=causal)
        assert isinstance(out, Tensor)
        return out

    def sdpa(key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            inputs.query, key, value, is_causal=causal, enable_gqa=True
        )

    found: dict[str, Contender] = {}
    if available_backends("anchor_attention")["cpp"] is None:
        found["radar-cpp"] = contender(steer("cpp"), steered)
        found["radar-cpp-plain"] = contender(alone, plain @ value)
        found["radar-cpp-target"] = contender(aim, target)
    found["radar-sdpa"] = contender(steer("sdpa"), steered)
    found["sdpa"] = contender(sdpa, plain @ value)
    return found


def decode(shape: Shape, dtype: str) -> Task:
    """Build the task of one query token against what users write today.

    Args:
        shape: of the attention.
        dtype: "fp32" or "bf16".

    Returns:
        The task; "sdpa-packed" has no bias and the heads of a group in one product, "sdpa-mask"
        repeats the keys and adds a [1, Hq, 1, k] mask.
    """
    inputs = draw(shape, dtype)
    found = _contenders(inputs, dtype, causal=False)
    query = inputs.query
    mask = (inputs.bias[:, None, None] * inputs.anchors[:, None, None]).to(query.dtype)

    def packed(copy: int) -> Tensor:
        key, value = inputs.layers[copy]
        rows = query.reshape(1, shape.kv_heads, -1, shape.size)
        return scaled_dot_product_attention(rows, key, value).view(query.shape)

    def masked(copy: int) -> Tensor:
        key, value = inputs.repeated(copy)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    found["sdpa-packed"] = Contender(packed, found["sdpa"].check)
    found["sdpa-mask"] = Contender(masked, found["radar-sdpa"].check)
    key, value = inputs.layers[0]
    return Task("decode", str(shape), dtype, found, len(inputs.layers), key.nbytes + value.nbytes)


def prefill(shape: Shape, dtype: str) -> Task:
    """Build the task of a whole prompt.

    Args:
        shape: of the attention; causal.
        dtype: "fp32" or "bf16".

    Returns:
        The task; "sdpa" is torch's causal attention without any bias.
    """
    inputs = draw(shape, dtype, layers=2)
    return Task("prefill", str(shape), dtype, _contenders(inputs, dtype, causal=True), copies=2)


def segments(shape: Shape, dtype: str, count: int = 400) -> Task:
    """Build the task of measuring every sentence's attention mass.

    Args:
        shape: of the attention; the queries see all keys.
        dtype: "fp32" or "bf16".
        count: sentences of equal length.

    Returns:
        The task; "torch" makes all weights and sums them by sentence.
    """
    inputs = draw(shape, dtype, layers=2)
    place = (torch.arange(shape.keys) * count // shape.keys)[None]
    narrow = place.int()
    logits, _ = exact(inputs, causal=False)
    weights = logits.softmax(-1).mean(2)
    zeros = torch.zeros(1, shape.heads, count)
    expected = zeros.double().index_add_(2, place[0], weights)

    def radar(copy: int) -> Tensor:
        return segment_mass(inputs.query, inputs.layers[copy][0], narrow, count)

    def torch_chain(copy: int) -> Tensor:
        key = inputs.layers[copy][0]
        rows = inputs.query.reshape(1, shape.kv_heads, -1, shape.size)
        scores = (rows @ key.mT) * shape.size**-0.5
        weights = torch.softmax(scores.float(), -1).view(1, shape.heads, -1, shape.keys)
        return torch.zeros_like(zeros).index_add_(2, place[0], weights.mean(2))

    check = close_to(expected, TOLERANCE[dtype])
    found = {"torch": Contender(torch_chain, check)}
    if available_backends("segment_mass")["cpp"] is None:
        found["radar-cpp"] = Contender(radar, check)
    work = f"{shape} segments={count}"
    read = inputs.layers[0][0].nbytes
    return Task("segment_mass", work, dtype, found, copies=2, floor_bytes=read)
