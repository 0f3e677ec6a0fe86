"""Key edits in C++, on every instruction set of this machine, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_kernels import edit_keys, explain, native
from radar_kernels.key_edit import cpp
from tests.kernels.edit_cases import DTYPES, check_edit, edits, make_edit
from tests.kernels.instruction_sets import SETS, instruction_set
from tests.kernels.test_cpp_linear_rows import before_unreadable_memory

assert native.absent() is None, native.absent()


@settings(max_examples=300, deadline=None)
@given(edits(), st.sampled_from(SETS))
def test_any_call(call, name):
    with instruction_set(name):
        check_edit(call, "cpp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 31, 32, 64, 80, 128])
def test_sizes(every_set, size, dtype):
    for rank in (None, 1, 5, 40):
        check_edit(make_edit(size=size, rank=rank, dtype=dtype, keys=75), "cpp")


def test_a_row_does_not_depend_on_the_threads(every_set):
    call = make_edit(keys=300, size=64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(check_edit(call, "cpp").nan_to_num(7))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_tensors_is_read(every_set, dtype):
    key, anchors, (left, singular, right), gain = make_edit(size=37, rank=5, dtype=dtype, share=1)
    guarded = [before_unreadable_memory(one) for one in (key, anchors, left, singular, right)]
    call = (guarded[0], guarded[1], tuple(guarded[2:]), before_unreadable_memory(gain))
    expected = edit_keys(key, anchors, (left, singular, right), gain, backend="cpp")
    assert torch.equal(edit_keys(*call, backend="cpp"), expected)
    dense = (key, anchors, torch.randn(3, 37, 37), gain)
    guarded = [before_unreadable_memory(one) for one in dense]
    assert torch.equal(edit_keys(*guarded, backend="cpp"), edit_keys(*dense, backend="cpp"))


def test_what_cpp_leaves_to_the_reference():
    key, anchors, projection, gain = make_edit()
    assert explain("edit_keys", key, anchors, projection, gain).chosen == "cpp"
    with pytest.raises(ValueError, match="float64"):
        edit_keys(key.double(), anchors, projection, gain, backend="cpp")
    strided = key.mT.contiguous().mT
    assert explain("edit_keys", strided, anchors, projection, gain).chosen == "reference"
    key.requires_grad_(True)
    assert explain("edit_keys", key, anchors, projection, gain).chosen == "reference"
    with pytest.raises(RuntimeError, match="computes no gradients"):
        cpp._edit(key, anchors, projection, None, gain)


def test_opcheck():
    key, anchors, projection, gain = make_edit(share=1)
    torch.library.opcheck(cpp._edit, (key, anchors, projection, None, gain))
    torch.library.opcheck(
        cpp._edit, (key, anchors, torch.randn(3, 8, 2), torch.randn(3, 2, 8), gain)
    )
