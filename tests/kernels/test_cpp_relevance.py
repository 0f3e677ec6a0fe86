"""The C++ relevance operators, on every instruction set of this machine, against float64."""

import math
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_kernels import explain, native, relevance_scores, select_relevant
from radar_kernels.relevance import cpp
from tests.kernels.instruction_sets import SETS, instruction_set
from tests.kernels.relevance_cases import DTYPES, calls, check_scores, check_selection, make_call
from tests.kernels.test_cpp_linear_rows import before_unreadable_memory

assert native.absent() is None, native.absent()
ALL_SETS = [*(["amx"] if torch.ops.radar_cpp.has_instruction_set("amx") else []), *SETS]


@pytest.fixture(params=ALL_SETS, autouse=False)
def each_set(request):
    with instruction_set(request.param):
        yield request.param


@settings(max_examples=300, deadline=None)
@given(calls(), st.sampled_from(ALL_SETS))
def test_any_call(case, name):
    call, named, chosen = case
    with instruction_set(name):
        scores = check_scores(call, named, "cpp")
        check_selection(call, named, chosen, scores, "cpp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 31, 32, 64, 100, 384])
def test_sizes(each_set, size, dtype):
    for queries in (1, 2, 4, 8, 64):
        call, named = make_call(37, queries, size, dtype=dtype)
        scores = check_scores(call, named, "cpp")
        check_selection(call, named, {"threshold": 0.0, "top_k": 4}, scores, "cpp")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_depends_on_no_threads_and_no_other_queries(each_set, dtype):
    call, named = make_call(5003, 21, 70, rounds=900, dtype=dtype)
    chosen = [{"threshold": 0.1}, {"threshold": None, "top_k": 30}]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results = [relevance_scores(*call, **named, backend="cpp")]
            for one in chosen:
                results += select_relevant(*call, **named, **one, backend="cpp")
            found.append(results)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    for query in (0, 8, 20):
        alone = [one[query : query + 1] if place in (1, 4, 5) else one
                 for place, one in enumerate(call)]  # fmt: skip
        scores = relevance_scores(*alone, **named, backend="cpp")
        assert torch.equal(scores[0], found[0][0][query])
    part = [one[1000:1777] if place in (0, 2, 3) else one for place, one in enumerate(call)]
    few = {name: one[1000:1777] for name, one in named.items()}
    assert torch.equal(relevance_scores(*part, **few, backend="cpp"), found[0][0][:, 1000:1777])


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("where", ["sentence", "query"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_embeddings_that_are_not_finite_or_zero(each_set, dtype, where, value):
    call, named = make_call(70, 5, 40, dtype=dtype)
    if where == "sentence":
        call[0][7, 3] = value
        call[0][69] = value
    else:
        call[1][2, 39] = value
        call[1][4] = value
    expected = relevance_scores(*call, **named, backend="reference")
    scores = relevance_scores(*call, **named, backend="cpp")
    torch.testing.assert_close(scores, expected, atol=4e-6, rtol=0, equal_nan=True)
    for chosen in ({"threshold": None, "top_k": 69}, {"threshold": 0.1, "top_k": None}):
        check_selection(call, named, chosen, scores, "cpp")


@pytest.mark.parametrize("size", [1e-30, 1e-13, 1e13, 1e25])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_embeddings_of_extreme_lengths_score_as_in_the_reference(each_set, dtype, size):
    call, named = make_call(20, 3, 40, dtype=dtype)
    for place in (0, 1):
        scaled = list(call)
        scaled[place] = scaled[place] * size
        expected = relevance_scores(*scaled, **named, backend="reference")
        scores = relevance_scores(*scaled, **named, backend="cpp")
        torch.testing.assert_close(scores, expected, atol=4e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [-2.0, 0.0, math.nan, math.inf])
def test_scales_of_any_kind(each_set, scale):
    call, named = make_call(40, 3, 20, dtype=torch.int8)
    named["scales"][11] = scale
    expected = relevance_scores(*call, **named, backend="reference")
    scores = relevance_scores(*call, **named, backend="cpp")
    torch.testing.assert_close(scores, expected, atol=4e-6, rtol=0, equal_nan=True)


def test_rounds_far_apart_and_more_of_them_than_are_remembered(each_set):
    call, named = make_call(600, 3, 8)
    call = list(call)
    # Each tile holds rounds that share a slot of the memory.
    call[3] = torch.arange(600) % 7 * 256 + torch.arange(600) // 7
    call[5] = torch.tensor([2000, 100, 2**40])
    features = {**named, "temporal_decay": 0.9995}
    check_scores(call, features, "cpp")
    call[3] = 1_800_000_000_000 + torch.arange(600) * 977
    call[5] = torch.tensor([1_800_000_600_000, 1_800_000_000_000, 0])
    check_scores(call, {**named, "temporal_decay": 0.999995}, "cpp")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_tensors_is_read(each_set, dtype):
    for sentences, queries, size in ((33, 3, 37), (5, 9, 64)):
        call, named = make_call(sentences, queries, size, dtype=dtype)
        guarded = [before_unreadable_memory(one) for one in call]
        scales = {name: before_unreadable_memory(one) for name, one in named.items()}
        assert torch.equal(
            relevance_scores(*guarded, **scales, backend="cpp"),
            relevance_scores(*call, **named, backend="cpp"),
        )


def test_rows_with_a_gap_between_them(each_set):
    call, named = make_call(50, 3, 24)
    wide = torch.full((50, 40), math.nan)
    wide[:, 3:27] = call[0]
    assert torch.equal(
        relevance_scores(wide[:, 3:27], *call[1:], **named, backend="cpp"),
        relevance_scores(*call, **named, backend="cpp"),
    )


def test_an_unknown_sender_raises_where_nothing_validates():
    call, _ = make_call()
    call = [*call, 0.9, 0.9, "clamp"]
    call[2] = call[2] + 5
    call.insert(1, None)
    with pytest.raises(ValueError, match=r"sender holds \d+; expected 0 to 4"):
        cpp._scores(*call)


def test_what_cpp_leaves_to_the_reference():
    call, named = make_call(12, 2, 6, dtype=torch.float64)
    assert explain("relevance_scores", *call, **named).chosen == "reference"
    with pytest.raises(ValueError, match="float64"):
        select_relevant(*call, **named, backend="cpp")
    call, named = make_call(12, 2, 6)
    strided = (call[0].t().contiguous().t(), *call[1:])
    assert explain("select_relevant", *strided).chosen == "reference"
    assert explain("select_relevant", *call).chosen == "cpp"
    call[1].requires_grad_(True)
    assert explain("relevance_scores", *call).chosen == "reference"
    with pytest.raises(RuntimeError, match="computes no gradients"):
        cpp._scores(call[0], None, *call[1:], 0.9, 0.9, "clamp")


def test_a_selection_holds_no_scores_of_all_pairs():
    call, named = make_call(200_000, 64, 4)
    select_relevant(*call, **named, threshold=0.9, top_k=5, backend="cpp")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    select_relevant(*call, **named, threshold=None, top_k=5, backend="cpp")
    # All scores would be 50,000 KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000


def test_opcheck():
    call, named = make_call(30, 3, 8, dtype=torch.int8)
    arguments = (call[0], named["scales"], *call[1:], 0.9, 0.8, "clamp")
    torch.library.opcheck(cpp._scores, arguments)
    torch.library.opcheck(cpp._select, (*arguments, 0.1, None))
