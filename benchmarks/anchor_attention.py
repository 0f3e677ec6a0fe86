"""One decode step's attention: a bias on the anchored keys against what users write today.

    python -m benchmarks.anchor_attention --json results/anchor_attention.json

One query token, 5 % of the keys anchored in four runs. "per-head bias" is what steering needs:
Radar's backends against PyTorch's attention with repeated keys and a [B, H, 1, k] mask. "plain" is
the same shape with nothing anchored: Radar against PyTorch's attention as transformers calls it
(grouped heads) and with the heads of a group packed into one call. As in a model, every call reads
another layer's keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import machine
from benchmarks.report import console, plot_ratios, print_rows, progress
from benchmarks.rows import Label, Row, timed, untimed, write_json
from benchmarks.timing import Measurement, interleave, summarise, time_call
from radar_kernels import anchor_attention, available_backends

BENCHMARK = "anchor_attention"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Largest error allowed, over the largest output: bfloat16 keeps 8 bits of the output alone.
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}
BASELINE = {"bias": "sdpa-mask", "plain": "sdpa"}
# The layers' keys and values together, so that no core's own cache holds them from call to call.
LAYERS_BYTES = 128 << 20


@dataclass(frozen=True)
class Shape:
    """The shape of one decode step.

    Args:
        query_heads: query heads.
        kv_heads: key and value heads.
        size: of a head.
        keys: how many.
    """

    query_heads: int
    kv_heads: int
    size: int
    keys: int

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}x{self.size} keys={self.keys}"


SHAPES = (
    Shape(32, 8, 128, 8192),
    Shape(9, 3, 64, 512),
    Shape(9, 3, 64, 1024),
    Shape(9, 3, 64, 2048),
)


@dataclass(frozen=True)
class Step:
    """The tensors of one decode step.

    Args:
        query: [1, Hq, 1, D].
        layers: one (key, value) a layer, each [1, Hkv, k, D].
        anchors: bool [1, k].
        bias: float32 [Hq].
    """

    query: Tensor
    layers: Sequence[tuple[Tensor, Tensor]]
    anchors: Tensor
    bias: Tensor

    @property
    def bytes_to_read(self) -> int:
        """Bytes of one layer's keys and values."""
        return sum(t.numel() * t.element_size() for t in self.layers[0])


# (query, key, value) -> [1, Hq, 1, D]
Contender = Callable[..., Any]


def build_step(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Step:
    """Draw the tensors of a decode step.

    Args:
        shape: its shape.
        dtype: of query, keys and values.
        seed: the same seed draws the same numbers.

    Returns:
        The step, with enough layers to leave a core's own caches.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, shape.size, generator=draw).to(dtype)

    one = 2 * shape.kv_heads * shape.keys * shape.size * dtype.itemsize
    layers = [
        (normal(shape.kv_heads, shape.keys), normal(shape.kv_heads, shape.keys))
        for _ in range(min(32, max(2, LAYERS_BYTES // one)))
    ]
    anchors = torch.zeros(1, shape.keys, dtype=torch.bool)
    for start in range(shape.keys // 2, shape.keys, shape.keys // 8):
        anchors[0, start : start + max(1, shape.keys // 80)] = True
    bias = 1.0 + torch.rand(shape.query_heads, generator=draw) * 2.0
    return Step(normal(shape.query_heads, 1), layers, anchors, bias)


def contenders(step: Step, kind: str) -> dict[str, Contender]:
    """Return who can do a step.

    Args:
        step: its tensors.
        kind: "bias" or "plain".

    Returns:
        Provider to (query, key, value) -> [1, Hq, 1, D].
    """
    present = [name for name, why in available_backends(BENCHMARK).items() if why is None]
    steering: dict[str, Any] = (
        {"anchors": step.anchors, "bias": step.bias} if kind == "bias" else {}
    )
    wanted = ("cpp", "sdpa", "reference") if kind == "bias" else ("cpp",)
    found: dict[str, Contender] = {
        f"radar-{name}": partial(anchor_attention, **steering, backend=name)
        for name in wanted
        if name in present
    }
    if kind == "bias":
        additive = step.bias[None, :, None, None] * step.anchors[:, None, None]
        found["sdpa-mask"] = partial(_repeated_and_masked, mask=additive.to(step.query.dtype))
    else:
        found["sdpa"] = partial(scaled_dot_product_attention, enable_gqa=True)
        found["sdpa-packed"] = _packed
    return found


def exact(step: Step, kind: str) -> Tensor:
    """Compute a step on the first layer in float64, by the formula.

    Args:
        step: its tensors.
        kind: "bias" or "plain".

    Returns:
        float64 [1, Hq, 1, D].
    """
    query = step.query.double()
    key, value = (t.double().repeat_interleave(_group(step), dim=1) for t in step.layers[0])
    logits = query @ key.mT / query.shape[-1] ** 0.5
    if kind == "bias":
        logits = logits + step.bias.double()[None, :, None, None] * step.anchors[:, None, None]
    return logits.softmax(-1) @ value


def run(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    repeats: int,
    read_gb_s: float,
    providers: Callable[[Step, str], Mapping[str, Contender]] = contenders,
    announce: Callable[[str], None] = lambda text: None,
    advance: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Check every contender on every shape, then time those that were right.

    Args:
        shapes: the shapes.
        dtypes: "bf16", "fp32".
        repeats: rounds; a round reads every layer once.
        read_gb_s: measured read bandwidth, for the floors.
        providers: (step, kind) -> contenders.
        announce: told what is being done.
        advance: called after every shape, dtype and kind.

    Returns:
        The rows.
    """
    rows: list[Row] = []
    for shape in shapes:
        for dtype in dtypes:
            step = build_step(shape, DTYPES[dtype])
            for kind in BASELINE:
                work = f"{shape} {'per-head bias' if kind == 'bias' else kind}"
                announce(f"{work} {dtype}")
                rows += _rows(step, kind, work, dtype, repeats, read_gb_s, providers(step, kind))
                advance()
    return rows


def _rows(
    step: Step,
    kind: str,
    work: str,
    dtype: str,
    repeats: int,
    read_gb_s: float,
    providers: Mapping[str, Contender],
) -> list[Row]:
    expected = exact(step, kind)
    errors = {name: _error(run_one, step, expected) for name, run_one in providers.items()}
    right = [name for name, error in errors.items() if error <= TOLERANCE[dtype]]
    measurements = {name: _measurement(providers[name], step) for name in right}
    samples = interleave(measurements, repeats, warm_up=1)
    rows = []
    for name, error in errors.items():
        label = Label(BENCHMARK, work, dtype, name)
        checked = f"within {error:.1e} of float64, of the largest output"
        if name not in right:
            rows.append(untimed(label, f"{checked}, at most {TOLERANCE[dtype]:.0e}"))
            continue
        floor = step.bytes_to_read / read_gb_s / 1e6
        rows.append(timed(label, summarise(samples[name][""]), floor, checked))
    return rows


def _error(contender: Contender, step: Step, expected: Tensor) -> float:
    found = contender(step.query, *step.layers[0]).double()
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def _measurement(contender: Contender, step: Step) -> Measurement:
    def measure() -> Mapping[str, list[float]]:
        return {
            "": [
                time_call(partial(contender, step.query, key, value)) for key, value in step.layers
            ]
        }

    return measure


def _repeated_and_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    packed = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
    return scaled_dot_product_attention(packed, key, value).view(query.shape)


def _group(step: Step) -> int:
    return step.query.shape[1] // step.layers[0][0].shape[1]


def _absent() -> Iterator[str]:
    for name, why in available_backends(BENCHMARK).items():
        if why is not None and name in ("cpp", "sdpa", "reference"):
            yield f"radar-{name} is skipped: {why}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, or 1 when a contender's result was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.anchor_attention", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=sorted(DTYPES))
    parser.add_argument("--repeats", type=int, default=20, help="rounds")
    parser.add_argument("--quick", action="store_true", help="three rounds of the small shapes")
    parsed = parser.parse_args(arguments)
    shapes = SHAPES[1:] if parsed.quick else SHAPES
    repeats = min(3, parsed.repeats) if parsed.quick else parsed.repeats
    out = console()
    for line in _absent():
        out.print(line, markup=False, highlight=False)
    described = machine.describe()
    total = len(shapes) * len(parsed.dtypes) * len(BASELINE)
    with torch.inference_mode(), progress(total) as (announce, advance):
        rows = run(
            shapes,
            parsed.dtypes,
            repeats,
            described["read_gb_s"],
            announce=announce,
            advance=advance,
        )

    def baseline(work: str) -> str:
        return BASELINE["bias" if work.endswith("bias") else "plain"]

    out.print(", ".join(f"{name} {value}" for name, value in described.items()), highlight=False)
    print_rows(out, rows, baseline)
    if parsed.json:
        write_json(parsed.json, described, rows)
    if parsed.plot:
        plot_ratios(parsed.plot, rows, baseline)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
