"""Every operator on one CUDA GPU: checked, then timed, in under six minutes, as one table.

    python -m benchmarks.gpu --json results/gpu.json

Each contender's result is checked first; a wrong one is never timed. Times are medians with a cold
L2 cache (a buffer larger than it is written before every call), and, in the phase "graph", of
replaying the call as a CUDA graph, which also shows that it reads nothing back to the host. "of
copy" is the rate at which the bytes that must move do move, over this GPU's measured copy
bandwidth. Without a GPU it says so and exits 2.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

import radar_kernels
from benchmarks import machine
from benchmarks.report import console, print_machine, print_table
from benchmarks.rows import Label, Row, ratio, timed, untimed, write_json
from benchmarks.timing import summarise

BENCHMARK = "gpu"
SECONDS = 330.0  # after this nothing new is started
Call = Callable[[], Any]
# Largest error allowed, over the largest value of the expected result.
TOLERANCE = {"bf16": 2e-2, "fp32": 2e-4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Sizes:
    """How large the work is.

    Args:
        heads: query heads and key heads.
        head_size: of key and value.
        keys: of a decoding step.
        prompt: tokens of a prompt.
        chunk: query tokens that come at once over the cached keys.
        vocabulary: logits of a row.
        sentences: to score.
        encoding: size of a sentence's vector.
        segments: of segment mass.
    """

    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    keys: int = 32768
    prompt: int = 4096
    chunk: int = 64
    vocabulary: int = 151_936
    sentences: int = 200_000
    encoding: int = 384
    segments: int = 1000


TINY = Sizes((4, 2), 16, 70, 20, 5, 300, 50, 8, 7)


@dataclass(frozen=True)
class Case:
    """One piece of work and everyone who can do it.

    Args:
        work: operator and shapes.
        dtype: "bf16" or "fp32".
        contenders: provider to a call without arguments.
        expected: provider to what it should return; "" for all others.
        bytes: that must be read and written.
        baseline: the provider whose ratio is 1.
        exact: results must be equal (token ids).
        slow: providers that are called once before timing because they compile for long.
    """

    work: str
    dtype: str
    contenders: dict[str, Call]
    expected: dict[str, Call]
    bytes: int
    baseline: str
    exact: bool = False
    slow: frozenset[str] = field(default_factory=frozenset)


class Timer(Protocol):
    """Times calls on a device."""

    def cold(self, call: Call) -> list[float]:
        """Seconds of each of several calls with cold caches."""

    def graph(self, call: Call) -> tuple[Any, list[float]] | None:
        """What a replayed CUDA graph of the call returns, and its times; None where none exist."""


class HostTimer:
    """The clock of the CPU; it knows no graphs."""

    def cold(self, call: Call) -> list[float]:
        """Times three calls.

        Args:
            call: what to time.

        Returns:
            Seconds.
        """
        found = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        return found

    def graph(self, call: Call) -> tuple[Any, list[float]] | None:
        """Says that there are no graphs.

        Args:
            call: ignored.

        Returns:
            None.
        """
        return None


class CudaTimer:
    """CUDA events around each call, after a write that empties the L2 cache.

    Args:
        repeats: most calls; fewer where a call takes long.
        budget: seconds that the calls of one measurement may take together.
    """

    def __init__(self, repeats: int = 50, budget: float = 0.5) -> None:
        self._repeats, self._budget = repeats, budget
        size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(max(size, 128 << 20), dtype=torch.int8, device="cuda")

    def cold(self, call: Call) -> list[float]:
        """Times calls.

        Args:
            call: what to time.

        Returns:
            Seconds of each.
        """
        call()
        torch.cuda.synchronize()
        found: list[float] = []
        while len(found) < self._repeats and (len(found) < 5 or sum(found) < self._budget):
            self._flush.zero_()
            # Keeps the device busy while the host enqueues: launches do not count twice.
            torch.cuda._sleep(200_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return found

    def graph(self, call: Call) -> tuple[Any, list[float]] | None:
        """Captures a call and times its replays.

        Args:
            call: what to capture.

        Returns:
            What the last replay left in the results, and the seconds of each.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return result, self.cold(graph.replay)


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Measures how fast this GPU copies.

    Args:
        size: bytes of the buffer.

    Returns:
        GB/s, reads and writes together.
    """
    source = torch.ones(size // 4, device="cuda")
    target = torch.empty_like(source)
    timer = CudaTimer(repeats=20)
    return 2 * size / summarise(timer.cold(lambda: target.copy_(source))).median_ms / 1e6


def cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Builds the work, one piece at a time.

    Args:
        sizes: how large.
        device: where.

    Yields:
        The pieces.
    """
    for dtype in DTYPES:
        for tokens in (1, 8):
            yield from _attention_cases(sizes, device, dtype, tokens, sizes.keys, "decode")
    yield from _attention_cases(sizes, device, "bf16", sizes.chunk, sizes.keys, "chunk")
    yield from _attention_cases(sizes, device, "bf16", sizes.prompt, sizes.prompt, "prefill")
    yield _partition_case(sizes, device)
    yield _segment_case(sizes, device)
    yield from _logit_cases(sizes, device)
    yield from _relevance_cases(sizes, device)
    yield _edit_case(sizes, device)


def run(
    work: Iterator[Case],
    timer: Timer,
    bandwidth: float,
    seconds: float = SECONDS,
    announce: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Checks every contender of every case, then times those that were right.

    Args:
        work: the cases.
        timer: the clock.
        bandwidth: GB/s, for the floors.
        seconds: after these no contender is started.
        announce: told what is being done.

    Returns:
        The rows: phase "" with cold caches, and "graph".
    """
    rows: list[Row] = []
    end = time.perf_counter() + seconds
    for case in work:
        announce(f"{case.work} {case.dtype}")
        floor = case.bytes / bandwidth / 1e6
        wanted = {name: call() for name, call in case.expected.items()}
        for provider, call in case.contenders.items():
            label = Label(BENCHMARK, case.work, case.dtype, provider)
            if time.perf_counter() > end:
                rows.append(untimed(label, f"no time left of {seconds:.0f} s"))
                continue
            expected = wanted.get(provider, wanted[""])
            wrong, checked = _judge(case, call, expected)
            if wrong:
                rows.append(untimed(label, checked))
                continue
            rows.append(timed(label, summarise(timer.cold(call)), floor, checked))
            if provider.startswith(("radar", "sdpa")):
                rows += _graph_rows(case, label, timer, call, expected, floor)
        del wanted
    return rows


def _graph_rows(
    case: Case, label: Label, timer: Timer, call: Call, expected: Any, floor: float
) -> list[Row]:
    label = label._replace(phase="graph")
    try:
        replayed = timer.graph(call)
    except RuntimeError as error:
        return [untimed(label, f"no CUDA graph: {str(error).splitlines()[0]}")]
    if replayed is None:
        return []
    result, seconds = replayed
    wrong, checked = _judge(case, lambda: result, expected)
    if wrong:
        return [untimed(label, checked)]
    return [timed(label, summarise(seconds), floor, checked)]


def _judge(case: Case, call: Call, expected: Any) -> tuple[bool, str]:
    """Whether a result is wrong, and what was found."""
    try:
        found = call()
    except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        return True, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if case.exact:
        same = len(found) == len(expected) and all(
            torch.equal(one, other) for one, other in zip(found, expected, strict=True)
        )
        return not same, "equal to the reference" if same else "differs from the reference"
    error = max(map(_error, _tensors(found), _tensors(expected)))
    limit = TOLERANCE[case.dtype]
    text = f"within {error:.1e} of the reference, of its largest value"
    return not error <= limit, text if error <= limit else f"{text}, at most {limit:.0e}"


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    found, expected = found.float(), expected.float()
    both = found.isfinite() & expected.isfinite()
    if not torch.equal(found[~both].nan_to_num(), expected[~both].nan_to_num()):
        return math.inf
    largest = expected[both].abs().max().clamp_min(1e-30) if both.any() else torch.ones(())
    off = (found[both] - expected[both]).abs().max() if both.any() else torch.zeros(())
    return float(off / largest)


def _present(
    operator: str, call: Callable[..., Any], *, without: Sequence[str] = ()
) -> dict[str, Call]:
    """The backends of an operator that can serve a call on this machine."""
    found: dict[str, Call] = {}
    for name, why in radar_kernels.available_backends(operator).items():
        if why is None and name not in without:
            found[f"radar-{name}"] = partial(call, backend=name)
    return found


def _bytes(*tensors: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


@dataclass(frozen=True)
class _Step:
    query: Tensor
    key: Tensor
    value: Tensor
    anchors: Tensor
    bias: Tensor
    causal: bool

    def upcast(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query.float(), self.key.float(), self.value.float()


def _step(sizes: Sizes, device: str, dtype: str, tokens: int, keys: int) -> _Step:
    draw = torch.Generator().manual_seed(0)
    heads, key_heads = sizes.heads

    def normal(count: int, length: int) -> Tensor:
        made = torch.randn(1, count, length, sizes.head_size, generator=draw)
        return made.to(device, DTYPES[dtype])

    anchors = torch.zeros(1, keys, dtype=torch.bool)
    for start in range(keys // 2, keys, max(1, keys // 8)):
        anchors[0, start : start + max(1, keys // 80)] = True
    bias = 1.0 + 2.0 * torch.rand(heads, generator=draw)
    return _Step(
        normal(heads, tokens),
        normal(key_heads, keys),
        normal(key_heads, keys),
        anchors.to(device),
        bias.to(device),
        tokens > 1,
    )


def _attention_cases(
    sizes: Sizes, device: str, dtype: str, tokens: int, keys: int, kind: str
) -> Iterator[Case]:
    step = _step(sizes, device, dtype, tokens, keys)
    heads, key_heads = sizes.heads
    shape = f"{kind} {heads}/{key_heads}x{sizes.head_size} q={tokens} keys={keys}"
    qkv = (step.query, step.key, step.value)
    moved = _bytes(*qkv, step.query)
    attend = partial(radar_kernels.anchor_attention, *qkv, step.anchors, causal=step.causal)
    exactly = partial(
        radar_kernels.anchor_attention,
        *step.upcast(),
        step.anchors,
        causal=step.causal,
        backend="reference",
    )
    biased = step.bias[None, :, None, None] * step.anchors[:, None, None, :]
    visible = _lower_right(tokens, keys, device) if step.causal else None
    plain_mask: dict[str, Any] = {} if visible is None else {"attn_mask": visible}
    if step.causal and tokens == keys:
        plain_mask = {"is_causal": True}
    mask = biased.to(step.query.dtype)
    if visible is not None:
        mask = mask.masked_fill(~visible, -math.inf)
    grouped = heads != key_heads
    contenders = _present(
        "anchor_attention", partial(attend, bias=step.bias), without=("reference", "cpp")
    )
    contenders["sdpa"] = partial(
        scaled_dot_product_attention, *qkv, enable_gqa=grouped, **plain_mask
    )
    contenders["sdpa-mask"] = partial(
        scaled_dot_product_attention, *qkv, attn_mask=mask, enable_gqa=grouped
    )
    if device == "cuda":
        contenders["flex"] = _flex(step)
    if tokens <= 64:
        contenders["torch"] = partial(_eager, step, mask)
    yield Case(
        f"{shape} bias",
        dtype,
        contenders,
        {"": partial(exactly, bias=step.bias), "sdpa": exactly},
        moved,
        "sdpa",
        slow=frozenset({"flex"}),
    )
    if dtype == "bf16":
        features = {"target_mass": 0.4, "return_mass": True}
        yield Case(
            f"{shape} target mass",
            dtype,
            _present("anchor_attention", partial(attend, **features), without=("cpp", "sdpa")),
            {"": partial(exactly, **features)},
            moved,
            "radar-reference",
        )


def _lower_right(tokens: int, keys: int, device: str) -> Tensor:
    own = torch.arange(keys - tokens, keys, device=device)[:, None]
    return torch.arange(keys, device=device) <= own


def _eager(step: _Step, mask: Tensor) -> Tensor:
    group = step.query.shape[1] // step.key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (step.key, step.value))
    logits = step.query @ key.mT * step.query.shape[-1] ** -0.5 + mask
    return logits.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _flex(step: _Step) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, keys = step.query.shape[2], step.key.shape[2]

    def added(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + step.bias[h] * step.anchors[b, k]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + (keys - tokens)

    block = create_block_mask(visible, None, None, tokens, keys) if step.causal else None
    compiled = torch.compile(flex_attention)
    return partial(
        compiled,
        step.query,
        step.key,
        step.value,
        score_mod=added,
        block_mask=block,
        enable_gqa=step.query.shape[1] != step.key.shape[1],
    )


def _partition_case(sizes: Sizes, device: str) -> Case:
    step = _step(sizes, device, "bf16", 1, sizes.keys)
    qkv = (step.query, step.key, step.value)
    attend = partial(radar_kernels.partition_attention, *qkv, step.anchors)
    exactly = partial(
        radar_kernels.partition_attention, *step.upcast(), step.anchors, backend="reference"
    )
    heads, key_heads = sizes.heads
    return Case(
        f"partition {heads}/{key_heads}x{sizes.head_size} q=1 keys={sizes.keys}",
        "bf16",
        _present("partition_attention", attend, without=("cpp", "sdpa")),
        {"": exactly},
        _bytes(*qkv, step.query, step.query),
        "radar-reference",
    )


def _segment_case(sizes: Sizes, device: str) -> Case:
    step = _step(sizes, device, "bf16", sizes.chunk, sizes.keys)
    length = math.ceil(sizes.keys / sizes.segments)
    segments = (torch.arange(sizes.keys, device=device, dtype=torch.int32) // length)[None]
    arguments = (segments, sizes.segments)
    measure = partial(radar_kernels.segment_mass, causal=True)
    query, key, _ = step.upcast()
    heads, key_heads = sizes.heads
    return Case(
        f"segment mass {heads}/{key_heads}x{sizes.head_size} q={sizes.chunk} keys={sizes.keys}",
        "bf16",
        _present("segment_mass", partial(measure, step.query, step.key, *arguments)),
        {"": partial(measure, query, key, *arguments, backend="reference")},
        _bytes(step.query, step.key, step.key, segments),
        "radar-reference",
    )


def _logit_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(1)
    full, masked = (
        (3 * torch.randn(4, sizes.vocabulary, generator=draw)).to(device) for _ in range(2)
    )
    work = f"4x{sizes.vocabulary}"
    blend = partial(radar_kernels.blend_logits, full, masked, 1.4)
    yield Case(
        f"blend {work}",
        "fp32",
        {
            **_present("blend_logits", blend),
            "torch": lambda: torch.lerp(masked, full, 1.4),
        },
        {"": partial(blend, backend="reference")},
        _bytes(full, masked, full),
        "torch",
    )
    sample = partial(
        radar_kernels.sample_logits,
        full,
        masked,
        1.4,
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        seed=torch.arange(4, device=device),
    )
    yield Case(
        f"sample {work}",
        "fp32",
        {
            **_present("sample_logits", sample),
            "torch": lambda: _sampled(full, masked),
        },
        {"": partial(sample, backend="reference"), "torch": lambda: _sampled(full, masked)},
        _bytes(full, masked),
        "torch",
        exact=True,
    )


def _sampled(full: Tensor, masked: Tensor) -> Tensor:
    """What a chain of torch operators does; greedy, so that it can be checked."""
    logits = torch.lerp(masked, full, 1.4) / 0.7
    kept = logits.topk(min(50, logits.shape[1])).values[:, -1:]
    logits = logits.masked_fill(logits < kept, -math.inf)
    ordered, places = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    ordered = ordered.masked_fill(before > 0.9, -math.inf)
    return places.gather(1, ordered.softmax(-1).argmax(-1, keepdim=True)).squeeze(1)


def _relevance_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(2)
    count = sizes.sentences
    sentences = torch.randn(count, sizes.encoding, generator=draw).to(device)
    queries = torch.randn(8, sizes.encoding, generator=draw).to(device)
    sender = torch.randint(0, 16, (count,), generator=draw).to(device)
    said = torch.randint(0, 20, (count,), generator=draw).to(device)
    hops = torch.randint(1, 4, (8, 16), generator=draw).to(device)
    now = torch.full((8,), 20, device=device)
    given = (sentences, queries, sender, said, hops, now)

    def chain() -> Tensor:
        cosine = normalize(queries, dim=1) @ normalize(sentences, dim=1).mT
        spatial = 0.92 ** (hops[:, sender] - 1).clamp_min(0)
        return cosine * spatial * 0.92 ** (now[:, None] - said - 1).clamp_min(0)

    work = f"{count}x{sizes.encoding} queries=8"
    score = partial(radar_kernels.relevance_scores, *given)
    moved = _bytes(sentences, queries, sender, said)
    yield Case(
        f"relevance {work}",
        "fp32",
        {**_present("relevance_scores", score), "torch": chain},
        {"": partial(score, backend="reference")},
        moved + 8 * count * 4,
        "torch",
    )
    select = partial(radar_kernels.select_relevant, *given, threshold=None, top_k=20)
    yield Case(
        f"select top 20 of {work}",
        "fp32",
        {**_present("select_relevant", select), "torch": lambda: chain().topk(20)[:1]},
        {
            "": partial(select, backend="reference"),
            "torch": lambda: chain().topk(20)[:1],
        },
        moved,
        "torch",
    )


def _edit_case(sizes: Sizes, device: str) -> Case:
    step = _step(sizes, device, "bf16", 1, sizes.keys)
    heads, size = sizes.heads[1], sizes.head_size
    draw = torch.Generator().manual_seed(3)
    projection = (torch.randn(heads, size, size, generator=draw) / size).to(device)
    edit = partial(radar_kernels.edit_keys, step.key, step.anchors, projection, 0.5)
    return Case(
        f"edit keys {heads}x{size} keys={sizes.keys}",
        "bf16",
        _present("edit_keys", edit),
        {"": partial(radar_kernels.edit_keys, step.key.float(), step.anchors, projection, 0.5)},
        _bytes(step.key, step.key),
        "radar-reference",
    )


def print_times(out: Any, rows: Sequence[Row], bandwidth: float, baselines: dict[str, str]) -> None:
    """Prints one Markdown table, then what was wrong.

    Args:
        out: a `rich.console.Console`.
        rows: what to print.
        bandwidth: GB/s that "of copy" is relative to.
        baselines: work to the provider whose ratio is 1.
    """
    graphs = {(row.work, row.dtype, row.provider): row for row in rows if row.phase == "graph"}
    table = []
    for row in rows:
        if row.phase:
            continue
        to = baselines.get(row.work, "")
        key = (row.work, row.dtype, row.provider)
        table.append([*key, *_cells(row, graphs.get(key), rows, bandwidth, to)])
    numbers = ("cold ms", "p20-p80", "GB/s", "of copy", "graph ms", "ratio", "to")
    print_table(out, ("work", "dtype", "provider"), table, numbers)
    for row in rows:
        if row.failed:
            name = f"{row.work} {row.dtype} {row.provider} {row.phase}".strip()
            out.print(f"{name}: {row.checked}", markup=False, highlight=False)


def _cells(
    row: Row, graph: Row | None, rows: Sequence[Row], bandwidth: float, to: str
) -> list[str]:
    replayed = ""
    if graph is not None:
        replayed = "failed" if graph.median_ms is None else f"{graph.median_ms:.4f}"
    if row.median_ms is None or row.floor_ms is None:
        return ["failed", "", "", "", replayed, "", to]
    share = row.floor_ms / row.median_ms
    times = ratio(rows, row, to)
    return [
        f"{row.median_ms:.4f}",
        f"{row.p20_ms:.4f}-{row.p80_ms:.4f}",
        f"{share * bandwidth:.0f}",
        f"{share:.0%}",
        replayed,
        "" if times is None else f"{times:.2f}x",
        to,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, 1 when a result was wrong, 2 without a CUDA GPU.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start nothing after these")
    parsed = parser.parse_args(arguments)
    out = console()
    if not torch.cuda.is_available():
        out.print("torch sees no CUDA GPU here: there is nothing to measure", highlight=False)
        return 2
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        baselines: dict[str, str] = {}

        def noted() -> Iterator[Case]:
            for case in cases(Sizes(), "cuda"):
                baselines[case.work] = case.baseline
                yield case

        rows = run(noted(), CudaTimer(), bandwidth, parsed.seconds, lambda text: out.print(text))
    described = {
        **machine.describe(64 << 20),
        "gpu": torch.cuda.get_device_name(0),
        "read_gb_s": round(bandwidth, 1),
    }
    print_machine(out, described)
    print_times(out, rows, bandwidth, baselines)
    if parsed.json:
        write_json(parsed.json, described, rows)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
