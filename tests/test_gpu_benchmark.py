"""The GPU benchmark's checks and table, on the CPU and in Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.report import console

OPERATORS = ("decode", "chunk", "prefill", "partition", "segment", "blend", "sample", "relevance")


def found() -> dict[str, gpu.Case]:
    return {f"{case.work} {case.dtype}": case for case in gpu.cases(gpu.TINY, "cpu")}


def test_every_contender_of_every_operator_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    rows = gpu.run(gpu.cases(gpu.TINY, "cpu"), gpu.HostTimer(), 100.0)
    assert [row.checked for row in rows if row.failed] == []
    for name in (*OPERATORS, "select", "edit keys"):
        assert any(row.work.startswith(name) for row in rows), name
    providers = {row.provider for row in rows}
    assert providers >= {"radar-sdpa", "radar-reference", "sdpa", "sdpa-mask", "torch"}
    baselines = {case.work: case.baseline for case in gpu.cases(gpu.TINY, "cpu")}
    gpu.print_times(console(), rows, 100.0, baselines)
    table = capsys.readouterr().out
    assert "of copy" in table and table.count("1.00x") >= len(baselines)
    for case in gpu.cases(gpu.TINY, "cpu"):
        assert case.baseline in case.contenders


@pytest.mark.parametrize(
    "change", [lambda t: t * 1.05, lambda t: t * torch.nan, lambda t: t[:, :1]]
)
def test_a_wrong_result_is_never_timed(change) -> None:
    case = next(case for name, case in found().items() if name.startswith("decode"))
    right = case.contenders["sdpa-mask"]
    wrong = replace(case, contenders={"sdpa-mask": lambda: change(right())})
    (row,) = gpu.run(iter([wrong]), gpu.HostTimer(), 100.0)
    assert row.failed and row.median_ms is None


def test_a_contender_that_raises_is_reported() -> None:
    def refuse() -> None:
        raise ValueError("cannot")

    case = replace(next(gpu.cases(gpu.TINY, "cpu")), contenders={"radar-triton": refuse})
    (row,) = gpu.run(iter([case]), gpu.HostTimer(), 100.0)
    assert row.checked == "failed: ValueError: cannot"


def test_other_token_ids_are_wrong() -> None:
    case = next(case for name, case in found().items() if name.startswith("sample"))
    other = replace(case, contenders={"radar-reference": lambda: case.expected[""]() + 1})
    (row,) = gpu.run(iter([other]), gpu.HostTimer(), 100.0)
    assert row.failed


def test_nothing_starts_after_the_time_is_up() -> None:
    rows = gpu.run(gpu.cases(gpu.TINY, "cpu"), gpu.HostTimer(), 100.0, seconds=-1.0)
    assert rows and all("no time left" in row.checked for row in rows)


def test_a_graph_is_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Graphs(gpu.HostTimer):
        def graph(self, call):
            return self.result, [1e-3]

    case = next(gpu.cases(gpu.TINY, "cpu"))
    case = replace(case, contenders={"radar-sdpa": case.contenders["radar-sdpa"]})
    timer = Graphs()
    timer.result = case.contenders["radar-sdpa"]()
    good = gpu.run(iter([case]), timer, 100.0)
    assert [row.phase for row in good] == ["", "graph"] and not good[1].failed
    timer.result = timer.result * 0
    bad = gpu.run(iter([case]), timer, 100.0)
    assert bad[1].failed
    gpu.print_times(console(), bad, 100.0, {case.work: case.baseline})
    assert "failed" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        return
    assert gpu.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().out


def test_triton_contenders_are_right_in_the_interpreter() -> None:
    program = (
        "from benchmarks import gpu\n"
        "wanted = ('decode', 'chunk', 'prefill', 'partition', 'segment')\n"
        "work = (one for one in gpu.cases(gpu.TINY, 'cpu') if one.work.startswith(wanted))\n"
        "rows = gpu.run(work, gpu.HostTimer(), 100.0)\n"
        "mine = [row for row in rows if row.provider == 'radar-triton']\n"
        "print(len(mine), [row.checked for row in mine if row.failed])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    count, failed = done.stdout.strip().split(" ", 1)
    assert int(count) >= 10 and failed == "[]"
