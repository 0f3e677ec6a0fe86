"""The Triton kernel of key edits in Triton's interpreter and compiled ahead of time.

In an ordinary run one test runs those of the interpreter in a process of their own.
"""

import pytest

from tests.kernels.interpreted import INTERPRETED, run_interpreted

if not INTERPRETED:

    def test_kernel_in_the_interpreter() -> None:
        run_interpreted(__file__)

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
