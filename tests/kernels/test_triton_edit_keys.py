"""The Triton kernel of key edits in Triton's interpreter and compiled ahead of time.

In an ordinary run one test runs those of the interpreter in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from radar_kernels.key_edit import triton as backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:
    from radar_kernels.triton_launch import SHARED_BYTES
    from tests.kernels.test_triton_compile import cubin_usage

    def test_kernel_in_the_interpreter() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[100%]" in done.stdout and "skipped" not in done.stdout

    @pytest.mark.parametrize(
        "one",
        backend.configurations(),
        ids=lambda one: f"{one.target}-{8 * one.element_size}bit-rank{one.block_rank}",
    )
    def test_every_setting_compiles_without_spills(
        one: backend.Configuration, tmp_path: Path
    ) -> None:
        (kernel,) = backend.compile_configuration(one)
        assert kernel.metadata.name == "edit_kernel"
        assert kernel.metadata.shared <= SHARED_BYTES[one.target]
        if one.target == "gfx942":
            usage = dict(re.findall(r"\.(\w+): +(\d+)\n", kernel.asm["amdgcn"]))
            assert usage["vgpr_spill_count"] == usage["private_segment_fixed_size"] == "0", usage
        else:
            found = cubin_usage(kernel.asm["cubin"], tmp_path / "kernel.cubin")
            assert found["STACK"] == found["LOCAL"] == 0, found

else:
    from hypothesis import given, settings

    from radar_kernels import edit_keys
    from tests.kernels.edit_cases import check_edit, edits, make_edit

    @settings(max_examples=60, deadline=None)
    @given(edits())
    def test_any_call(call) -> None:
        check_edit(call, "triton")

    def test_large_heads_and_ranks() -> None:
        check_edit(make_edit(keys=20, size=256), "triton")
        check_edit(make_edit(keys=20, size=200, rank=128), "triton")
        with pytest.raises(ValueError, match="rank 129"):
            edit_keys(*make_edit(size=140, rank=129), backend="triton")
