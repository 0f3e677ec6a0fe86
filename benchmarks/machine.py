"""What the numbers were measured on: versions, cores and the read bandwidth of this run."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import time_call

# A cloud machine may report a cache that it shares with strangers, so the buffer is at least this.
READ_BYTES = 2 << 30


def describe(read_bytes: int | None = None) -> dict[str, Any]:
    """Describe this machine, with the read bandwidth measured now.

    Args:
        read_bytes: size of the buffer to read; `read_bytes_beyond_cache()` when None.

    Returns:
        Names to values: versions, processor, cores, threads, load average and `read_gb_s`.
    """
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "triton", "radar-kernels")},
        "system": platform.system(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "read_gb_s": round(read_bandwidth(read_bytes or read_bytes_beyond_cache()), 2),
    }


class Reader:
    """Reads memory that no cache holds, with all threads.

    The buffer is written first: untouched pages would all be the one zero page.

    Args:
        size: bytes of the buffer; should be several times the last-level cache.
    """

    def __init__(self, size: int) -> None:
        columns = 4096
        self._matrix = torch.ones(max(1, size // (4 * columns)), columns)
        self._vector = torch.ones(columns)

    def gb_s(self) -> float:
        """Measure how fast it reads now: the faster of a sum and a matrix-vector product.

        Returns:
            GB/s (1e9 bytes per second).
        """
        ways = (self._matrix.sum, lambda: self._matrix @ self._vector)
        return self._matrix.nbytes / min(map(time_call, ways)) / 1e9


def read_bandwidth(size: int, repeats: int = 5) -> float:
    """Measure how fast all threads together read memory that no cache holds.

    The fastest pass counts, since anything else on the machine can only slow one down.

    Args:
        size: bytes of the buffer.
        repeats: passes of each of the two ways to read.

    Returns:
        GB/s (1e9 bytes per second).
    """
    reader = Reader(size)
    return max(reader.gb_s() for _ in range(repeats))


def read_bytes_beyond_cache() -> int:
    """Return the bytes to read so that caches do not matter: four times the largest cache.

    Returns:
        At least `READ_BYTES`, at most a quarter of the memory that is installed.
    """
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(READ_BYTES, 4 * _largest_cache_bytes()), installed // 4)


def _largest_cache_bytes() -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG])", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * units[match[2]])
    return max(sizes)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
