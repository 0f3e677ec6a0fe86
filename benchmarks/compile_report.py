"""What every Triton kernel takes on every target: registers, spills, stack, shared memory.

    python -m benchmarks.compile_report --json results/compile_report.json

Compiles each setting that a launcher can choose, in its most demanding form, for sm_80, sm_90,
sm_100 and gfx942; needs no GPU. Every ``radar_kernels.<operator>.triton`` that has
``configurations()`` and ``compile_configuration(one)`` is found by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.report import console, print_table
from radar_kernels.triton_launch import SHARED_BYTES, TARGETS

# Operators that live in the folder of another one.
FOLDERS = {
    "partition_attention": "anchor_attention",
    "blend_logits": "logit_blend",
    "sample_logits": "logit_blend",
    "relevance_scores": "relevance",
    "select_relevant": "relevance",
    "edit_keys": "key_edit",
}

Job = tuple[str, int]  # operator's folder, place in its configurations()


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes.

    Args:
        operator: folder of the operator.
        kernel: name of the kernel.
        target: what it was compiled for.
        setting: the configuration, without its target.
        warps: warps of a program.
        registers: of a thread (gfx942: vector registers).
        spills: instructions that spill to or fill from local memory (gfx942: vector registers
            that are spilled).
        stack: bytes of stack and local memory of a thread.
        shared: bytes of shared memory of a program.
        shared_limit: bytes it may use there.
    """

    operator: str
    kernel: str
    target: str
    setting: str
    warps: int
    registers: int
    spills: int
    stack: int
    shared: int
    shared_limit: int

    @property
    def fits(self) -> bool:
        """Whether nothing spills and the shared memory is within the limit."""
        return self.spills == 0 and self.stack == 0 and self.shared <= self.shared_limit


def modules() -> dict[str, Any]:
    """Finds the Triton backends that list their settings.

    Returns:
        Folder of the operator to its ``triton`` module.
    """
    package = import_module("radar_kernels")
    found = {}
    for _, name, is_package in pkgutil.iter_modules(package.__path__):
        if not is_package or find_spec(f"radar_kernels.{name}.triton") is None:
            continue
        module = import_module(f"radar_kernels.{name}.triton")
        if hasattr(module, "configurations") and hasattr(module, "compile_configuration"):
            found[name] = module
    return found


def jobs(operators: Iterable[str], targets: Sequence[str] = TARGETS) -> list[Job]:
    """Lists what there is to compile.

    Args:
        operators: folders.
        targets: which targets.

    Returns:
        One job for each configuration.
    """
    found = modules()
    return [
        (name, place)
        for name in operators
        for place, one in enumerate(found[name].configurations())
        if one.target in targets
    ]


def compile_job(job: Job) -> list[Usage]:
    """Compiles one configuration.

    Args:
        job: which.

    Returns:
        What its kernels take.
    """
    operator, place = job
    module = modules()[operator]
    one = module.configurations()[place]
    values = {key: value for key, value in _fields(one) if key != "target"}
    setting = " ".join(f"{key}={value}" for key, value in values.items())
    return [
        Usage(operator, kernel.metadata.name, one.target, setting, *resources(kernel, one.target))
        for kernel in module.compile_configuration(one)
    ]


def compile_all(operators: Iterable[str], targets: Sequence[str] = TARGETS) -> Iterator[Usage]:
    """Compiles every configuration, on all cores.

    Args:
        operators: folders.
        targets: which targets.

    Yields:
        What each kernel takes, one kernel compiled in the same way once.
    """
    work = jobs(operators, targets)
    workers = max(1, min(len(os.sched_getaffinity(0)), len(work)))
    seen = set()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for usages in pool.map(compile_job, work, chunksize=4):
            for usage in usages:
                if usage not in seen:
                    seen.add(usage)
                    yield usage


def resources(kernel: Any, target: str) -> tuple[int, int, int, int, int, int]:
    """Reads what a compiled kernel takes.

    Args:
        kernel: Triton's compiled kernel.
        target: what it was compiled for.

    Returns:
        Warps, registers, spills, stack, shared memory and its limit.
    """
    if target == "gfx942":
        usage = {
            name: int(number)
            for name, number in re.findall(r"\.(\w+): +(\d+)\n", kernel.asm["amdgcn"])
        }
        registers = usage["vgpr_count"]
        # Scalar registers spill into vector registers, not into memory.
        spills = usage["vgpr_spill_count"]
        stack = usage["private_segment_fixed_size"]
    else:
        registers, spills, stack = _cubin_usage(kernel.asm["cubin"])
    metadata = kernel.metadata
    return metadata.num_warps, registers, spills, stack, metadata.shared, SHARED_BYTES[target]


def _cubin_usage(cubin: bytes) -> tuple[int, int, int]:
    from triton.backends import nvidia

    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        found = _output(tools / "cuobjdump", "--dump-resource-usage", path)
        usage = {name: int(size) for name, size in re.findall(r"\b([A-Z]+):(\d+)", found)}
        stack = usage["STACK"] + usage["LOCAL"]
        # Without a stack there is nowhere to spill to.
        code = _output(tools / "nvdisasm", "-c", path) if stack else ""
    return usage["REG"], len(re.findall(r"\b(?:LDL|STL)\b", code)), stack


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _fields(configuration: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(configuration):
        names = [field.name for field in dataclasses.fields(configuration)]
        return [(name, getattr(configuration, name)) for name in names]
    return list(configuration._asdict().items())


def print_usages(out: Any, usages: Sequence[Usage]) -> None:
    """Prints one Markdown table.

    Args:
        out: a `rich.console.Console`.
        usages: its rows.
    """
    rows = []
    for one in usages:
        counts = (one.warps, one.registers, one.spills, one.stack, one.shared, one.shared_limit)
        names = (one.operator, one.kernel, one.target, one.setting)
        rows.append([*names, *map(str, counts), "" if one.fits else "does not fit"])
    numbers = ("warps", "registers", "spills", "stack B", "shared B", "limit B", "")
    print_table(out, ("operator", "kernel", "target", "setting"), rows, numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and reports from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, 1 when a kernel spills or takes too much shared memory, 2 without Triton.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(
        "--operators", nargs="+", metavar="NAME", help="operators; all when not given"
    )
    parsed = parser.parse_args(arguments)
    out = console()
    if find_spec("triton") is None:
        out.print('triton is not installed: pip install "radar-kernels[triton]"', markup=False)
        return 2
    known = modules()
    asked = [FOLDERS.get(name, name) for name in parsed.operators or known]
    if unknown := sorted(set(asked) - set(known)):
        parser.error(f"--operators {' '.join(unknown)}: expected {', '.join([*known, *FOLDERS])}")
    usages = list(compile_all(dict.fromkeys(asked), parsed.targets))
    print_usages(out, usages)
    if parsed.json:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**dataclasses.asdict(one), "fits": one.fits} for one in usages]
        parsed.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(one.fits for one in usages))


if __name__ == "__main__":
    raise SystemExit(main())
