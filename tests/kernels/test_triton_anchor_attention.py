"""The Triton kernels of anchor and partitioned attention in Triton's interpreter."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.interpreted import (
    INTERPRETED,
    counted,
    explains_itself_without_triton,
    never_read,
    quick_device_functions,
    run_interpreted,
)

if not INTERPRETED:

    def test_kernels_in_the_interpreter() -> None:
        run_interpreted(__file__)

    @pytest.mark.parametrize("folder", ["anchor_attention", "partition_attention", "segment_mass"])
    def test_imports_and_explains_itself_without_triton(folder: str) -> None:
        explains_itself_without_triton(folder)

else:
    import radar_kernels
    from radar_kernels.anchor_attention import triton as backend
    from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
    from radar_kernels.partition_attention import reference as partition_reference
    from radar_kernels.partition_attention import triton as partition
    from radar_kernels.testing import AttentionOracle, assert_within, attention_oracle

    @pytest.fixture(scope="module", autouse=True)
    def _quick() -> Iterator[None]:
        backend.run(make(batch=1, keys=1))
        with quick_device_functions():
            yield

    def oracle(call: AnchorAttentionArguments) -> AttentionOracle:
        return attention_oracle(
            call.query,
            call.key,
            call.value,
            call.anchors,
            bias=call.bias,
            target_mass=call.target_mass,
            target_mode="exact" if call.target_exact else "at_least",
            mask=call.mask,
            key_lengths=call.key_lengths,
            causal=call.causal,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def make(
        *,
        batch: int = 2,
        heads: int = 4,
        key_heads: int = 2,
        tokens: int = 1,
        keys: int = 201,
        head_size: int = 64,
        value_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        anchors: str | None = None,
        bias: float | None = None,
        target: float | None = None,
        exact: bool = False,
        mask: str | None = None,
        lengths: list[int] | None = None,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        layout: str = "contiguous",
        mass: bool = True,
        seed: int = 0,
    ) -> AnchorAttentionArguments:
        draw = torch.Generator().manual_seed(seed)
        value_size = head_size if value_size is None else value_size

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        def coin(*shape: int) -> Tensor:
            return torch.rand(shape, generator=draw) < 0.6

        query = normal(batch, heads, tokens, head_size).to(dtype)
        key = normal(batch, key_heads, keys, head_size).to(dtype)
        value = normal(batch, key_heads, keys, value_size).to(dtype)
        if layout == "tokens":  # [batch, keys, heads, size] in memory
            key = key.transpose(1, 2).contiguous().transpose(1, 2)
            value = value.transpose(1, 2).contiguous().transpose(1, 2)
            query = query.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "unaligned":  # no stride is a multiple of 16 bytes
            key = torch.nn.functional.pad(key, (0, 1))[..., :head_size]
            value = torch.nn.functional.pad(value, (0, 3))[..., :value_size]
        chosen = None
        if anchors is not None:
            chosen = torch.zeros(batch, keys + 3, dtype=torch.bool)
            chosen[:, 20:29] = True
            chosen[-1, 150:163] = True
            chosen[:, keys // 2] = True
            if anchors == "factors":
                chosen = chosen * normal(batch, keys + 3)
            chosen = chosen[:, :keys]  # a row stride of its own
            if anchors == "shared":
                chosen = chosen[:1].expand(batch, keys)
        per_head = 0.25 * torch.arange(heads, dtype=torch.float32)
        spread = per_head - per_head.mean()
        masks = {
            None: lambda: None,
            "keys": lambda: coin(batch, 1, 1, keys),
            "one": lambda: coin(1, 1, 1, keys),
            "heads": lambda: coin(batch, heads, 1, keys),
            "queries": lambda: coin(batch, 1, tokens, keys),
            "full": lambda: coin(batch, heads, tokens, keys),
            "strided": lambda: coin(batch, 1, 1, 2 * keys)[..., ::2],
        }
        return AnchorAttentionArguments(
            query,
            key,
            value,
            chosen,
            bias=None if bias is None else (bias + spread)[None].expand(batch, -1).contiguous(),
            target_mass=None if target is None else torch.full((1, heads), target),
            target_exact=exact,
            mask=masks[mask](),
            key_lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
            causal=causal or window is not None,
            scale=1.7 * head_size**-0.5,
            window=window,
            softcap=softcap,
            sinks=spread if sinks else None,
            return_mass=mass,
        )

    def check(call: AnchorAttentionArguments, splits: int | None = None) -> None:
        assert backend.unsupported(call) is None
        out, mass = backend.run(call, splits=splits)
        assert out.dtype == call.query.dtype
        wanted = oracle(call)
        assert_within(out, wanted.out, wanted.out_budget)
        assert (mass is not None) == call.return_mass
        if mass is not None:
            assert mass.dtype == torch.float32
            assert_within(mass, wanted.mass, wanted.mass_budget)

    DTYPES = [torch.float32, torch.float16, torch.bfloat16]

    @st.composite
    def calls(draw: st.DrawFn, partitioned: bool = False) -> AnchorAttentionArguments:
        """Any call the operator has to serve, small enough for the interpreter."""
        heads, key_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 1), (6, 2)]))
        tokens = draw(st.one_of(st.integers(1, 8), st.integers(9, 40)))
        keys = draw(st.integers(0, 150))
        anchors = draw(st.sampled_from(["bool", "shared", "factors", None]))
        steering = draw(st.sampled_from(["bias", "target", "none"]))
        if partitioned or (steering == "target" and anchors == "factors"):
            anchors = "bool"
        if partitioned or anchors is None:
            steering = "none"
        head_size = draw(st.sampled_from([64, 64, 8, 80, 96, 128, 41]))
        causal = draw(st.booleans())
        return make(
            batch=2,
            heads=heads,
            key_heads=key_heads,
            tokens=tokens,
            keys=keys,
            head_size=head_size,
            value_size=draw(st.sampled_from([head_size, head_size, 24])),
            dtype=draw(st.sampled_from(DTYPES)),
            anchors=anchors,
            bias=draw(st.floats(-4, 4)) if steering == "bias" else None,
            target=draw(st.floats(0.02, 0.98)) if steering == "target" else None,
            exact=draw(st.booleans()),
            mask=draw(st.sampled_from([None, None, "keys", "one", "heads", "queries", "full"])),
            lengths=draw(st.none() | st.lists(st.integers(0, keys), min_size=2, max_size=2)),
            causal=causal,
            window=draw(st.none() | st.integers(1, 160)) if causal else None,
            softcap=draw(st.none() | st.floats(0.5, 50)),
            sinks=draw(st.booleans()),
            layout=draw(st.sampled_from(["contiguous", "tokens", "unaligned"])),
            mass=partitioned or draw(st.booleans()),
            seed=draw(st.integers(0, 2**16)),
        )

    @settings(max_examples=45, deadline=None, derandomize=True, database=None)
    @given(calls(), st.sampled_from([None, 1, 3]))
    def test_any_call(call: AnchorAttentionArguments, splits: int | None) -> None:
        check(call, splits)

    @settings(max_examples=18, deadline=None, derandomize=True, database=None)
    @given(calls(partitioned=True), st.sampled_from([None, 1]))
    def test_any_partition(call: AnchorAttentionArguments, splits: int | None) -> None:
        check_partition(call, splits)

    def check_partition(call: AnchorAttentionArguments, splits: int | None = None) -> None:
        """Each part is attention over its own keys."""
        assert partition.unsupported(call) is None and call.anchors is not None
        anchored, anchored_lse, rest, rest_lse = partition.run(call, splits=splits)
        hidden = call.anchors.expand(call.key.shape[0], -1)[:, None, None]
        everything = torch.ones(1, dtype=torch.bool) if call.mask is None else call.mask
        for out, lse, kept, sinks in (
            (anchored, anchored_lse, hidden, None),
            (rest, rest_lse, ~hidden, call.sinks),
        ):
            part = oracle(replace(call, mask=everything & kept, sinks=sinks))
            assert_within(out, part.out, part.out_budget)
            assert_within(lse, part.lse, part.lse_budget)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads, key_heads", [(8, 2), (7, 1), (20, 1)])
    def test_groups(dtype: torch.dtype, heads: int, key_heads: int) -> None:
        check(
            make(
                batch=1,
                dtype=dtype,
                heads=heads,
                key_heads=key_heads,
                tokens=3,
                keys=67,
                causal=True,
                anchors="bool",
                bias=1.5,
            )
        )

    @pytest.mark.parametrize("tokens", [1, 20])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("head_size, value_size", [(80, 80), (96, 96), (256, 256), (64, 200)])
    def test_head_sizes(dtype: torch.dtype, head_size: int, value_size: int, tokens: int) -> None:
        check(
            make(
                batch=1,
                key_heads=1,
                dtype=dtype,
                head_size=head_size,
                value_size=value_size,
                tokens=tokens,
                keys=67,
                causal=True,
                anchors="bool",
                target=0.6,
            )
        )

    FEATURES = {
        "plain": {"mass": False},
        "mass alone": {"anchors": "bool"},
        "bias": {"anchors": "bool", "bias": 2.0, "mass": False},
        "bias and mass": {"anchors": "shared", "bias": -3.0},
        "factors": {"anchors": "factors", "bias": 1.5, "mass": False},
        "factors and mass": {"anchors": "factors", "bias": 1.5},
        "factors without bias": {"anchors": "factors"},
        "at least": {"anchors": "bool", "target": 0.08},
        "exact": {"anchors": "bool", "target": 0.08, "exact": True, "mass": False},
        "sinks and target": {"anchors": "bool", "target": 0.5, "sinks": True},
        "window": {"anchors": "bool", "bias": 1.0, "window": 77},
        "lengths": {"anchors": "bool", "bias": 1.0, "lengths": [201, 33], "causal": True},
        "shorter than the query": {"lengths": [201, 3], "causal": True, "sinks": True},
        "everything": {
            "anchors": "factors",
            "bias": 1.0,
            "softcap": 3.0,
            "sinks": True,
            "window": 150,
            "lengths": [190, 171],
        },
    }

    @pytest.mark.parametrize("tokens, mask", [(1, None), (7, "full")])
    @pytest.mark.parametrize("name", FEATURES)
    def test_features(name: str, tokens: int, mask: str | None) -> None:
        check(make(key_heads=1, heads=2, tokens=tokens, mask=mask, **FEATURES[name]))

    @pytest.mark.parametrize(
        "name", ["bias", "factors and mass", "sinks and target", "lengths", "everything"]
    )
    def test_a_long_query_takes_the_one_pass_kernel(name: str) -> None:
        arguments = {"lengths": [201, 180], "causal": True, **FEATURES[name]}
        call = make(batch=2, heads=2, key_heads=1, tokens=130, **arguments)
        kernels = [one.kernel.__name__ for one in backend.launches(call, "sm_90", splits=1)]
        assert kernels == ["attention_kernel"]
        check(call, splits=1)

    def test_many_query_rows_need_no_splits() -> None:
        call = make(batch=1, heads=1, key_heads=1, tokens=1, keys=4)
        long = replace(call, query=torch.empty(1, 1, 10_000, 64, device="meta"))
        assert len(backend.launches(long, "sm_90")) == 1
        assert len(backend.launches(call, "sm_90")) == 2

    @pytest.mark.parametrize(
        "layout, mask, dtype",
        [
            ("tokens", "one", torch.float32),
            ("tokens", "strided", torch.float16),
            ("unaligned", "strided", torch.float32),
            ("unaligned", "queries", torch.float16),
        ],
    )
    def test_strides(layout: str, mask: str, dtype: torch.dtype) -> None:
        check(make(layout=layout, mask=mask, dtype=dtype, tokens=3, anchors="bool", bias=1.0))

    @pytest.mark.parametrize("keys", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 515])
    def test_key_counts(keys: int) -> None:
        check(
            make(keys=keys, batch=1, key_heads=1, tokens=2, mask="full", anchors="bool", bias=1.0)
        )

    @pytest.mark.parametrize("splits", [1, 2, 3, 7, 100])
    @pytest.mark.parametrize("window", [None, 391])
    def test_splits(splits: int, window: int | None) -> None:
        call = make(
            heads=2,
            key_heads=1,
            tokens=2,
            keys=1037,
            lengths=[1037, 809],
            causal=True,
            anchors="bool",
            target=0.3,
            window=window,
        )
        check(call, splits)

    @pytest.mark.parametrize("tokens, dtype", [(1, torch.float32), (5, torch.bfloat16)])
    @pytest.mark.parametrize("mask", ["keys", "queries"])
    @pytest.mark.parametrize("steering", ["none", "bias", "factors", "target"])
    def test_what_may_not_be_read_may_be_nan(
        tokens: int, dtype: torch.dtype, mask: str | None, steering: str
    ) -> None:
        features: dict = {
            "none": {},
            "bias": {"anchors": "bool", "bias": 1.0, "mass": False},
            "factors": {"anchors": "factors", "bias": 1.0},
            "target": {"anchors": "bool", "target": 0.4},
        }[steering]
        call = make(
            key_heads=1,
            tokens=tokens,
            dtype=dtype,
            mask=mask,
            lengths=[190, 41],
            window=100,
            **features,
        )
        for row, length in enumerate([190, 41]):
            for unseen in (slice(length, None), slice(0, max(0, length - tokens - 99))):
                call.key[row, :, unseen] = math.nan
                call.value[row, :, unseen] = math.inf
            if call.mask is not None:
                call.mask[row, :, :, 5:9] = False
                call.mask[row, :, :, 170:175] = False
                hidden = ~call.mask[row].any(0).any(0)
                call.key[row, :, hidden] = math.inf
                call.value[row, :, hidden] = math.nan
        check(call)
        check(call, splits=1)

    @pytest.mark.parametrize("tokens", [1, 3, 40])
    def test_the_tail_of_a_static_cache_is_never_read(tokens: int) -> None:
        call = make(
            key_heads=1, tokens=tokens, lengths=[130, 65], causal=True, anchors="bool", target=0.4
        )
        tails = [
            one[row, :, end:] for one in (call.key, call.value) for row, end in ((0, 130), (1, 65))
        ]
        with never_read(*tails):
            check(call)
            check_partition(call)
        with pytest.raises(Exception, match="read what may not be read"), never_read(*tails):
            backend.run(replace(call, key_lengths=None))

    def test_what_no_head_of_a_group_may_read_may_be_nan() -> None:
        call = make(mask="full", tokens=3, anchors="bool", bias=1.0)
        hidden = torch.arange(0, 201, 3)
        call.mask[0, :2, :, hidden] = False
        call.key[0, 0, hidden] = math.nan
        call.value[0, 0, hidden] = math.inf
        check(call)

    def test_a_nan_that_one_head_may_not_read_stays_out_of_its_scores() -> None:
        call = make(mask="heads", anchors="bool", bias=1.0)
        call.mask[0, :2, 0, 77] = torch.tensor([False, True])
        call.key[0, 0, 77, 3] = math.nan
        out, mass = backend.run(call)
        assert mass is not None
        assert out[0, 1].isnan().all() and mass[0, 1].isnan().all()
        clean = replace(call, key=call.key.nan_to_num())
        wanted = oracle(clean)
        others = torch.ones(2, 4, dtype=torch.bool)
        others[0, 1] = False
        assert_within(out[others], wanted.out[others], wanted.out_budget[others])
        assert_within(mass[others], wanted.mass[others], wanted.mass_budget[others])

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("anchors", [None, "bool", "factors"])
    def test_rows_that_attend_to_nothing_are_zero(sinks: bool, anchors: str | None) -> None:
        call = make(
            batch=3,
            key_heads=1,
            tokens=2,
            dtype=torch.float16,
            mask="keys",
            lengths=[0, 201, 201],
            sinks=sinks,
            anchors=anchors,
            bias=None if anchors is None else 1.0,
        )
        call.mask[1] = False
        out, mass = backend.run(call)
        assert (out[:2] == 0).all() and (mass[:2] == 0).all()
        check(call)

    @pytest.mark.parametrize("exact", [False, True])
    def test_a_target_needs_keys_on_both_sides(exact: bool) -> None:
        call = make(batch=3, key_heads=1, anchors="bool", target=0.7, exact=exact)
        call.anchors[0], call.anchors[1] = False, True
        out, mass = backend.run(call)
        assert (mass[0] == 0).all() and (mass[1] == 1).all()
        plain, _ = backend.run(replace(call, target_mass=None))
        torch.testing.assert_close(out[:2], plain[:2], rtol=0, atol=0)
        check(call)

    @pytest.mark.parametrize("bias", [-1e4, -60.0, 60.0, 1e4])
    @pytest.mark.parametrize("mass", [False, True])
    @pytest.mark.parametrize("anchors", ["bool", "factors"])
    def test_extreme_biases(bias: float, anchors: str, mass: bool) -> None:
        check(make(key_heads=1, anchors=anchors, bias=bias, mass=mass))

    def test_extreme_logits() -> None:
        call = make(anchors="bool", target=0.2, softcap=None)
        check(replace(call, scale=40.0))
        check(replace(call, scale=40.0, softcap=30.0))

    @pytest.mark.parametrize("tokens", [1, 6])
    @pytest.mark.parametrize("mask, dtype", [(None, torch.float32), ("full", torch.bfloat16)])
    def test_a_row_has_the_same_bits_in_every_batch(
        mask: str | None, dtype: torch.dtype, tokens: int
    ) -> None:
        # Alone the row needs a grid of 2 stretches, in the batch of 17: two blocks of the merge.
        call = make(
            heads=2,
            key_heads=1,
            tokens=tokens,
            keys=2100,
            lengths=[2100, 150],
            causal=True,
            mask=mask,
            dtype=dtype,
        )
        anchors = torch.zeros(2, 2100, dtype=torch.bool)
        anchors[:, 100:140] = True
        call = replace(call, anchors=anchors, target_mass=torch.full((1, 2), 0.4))
        out, mass = backend.run(call)
        alone = replace(
            call,
            query=call.query[1:],
            key=call.key[1:, :, :150],
            value=call.value[1:, :, :150],
            anchors=anchors[1:, :150],
            mask=None if call.mask is None else call.mask[1:, ..., :150],
            key_lengths=None,
        )
        one, one_mass = backend.run(alone)
        assert mass is not None and one_mass is not None
        assert torch.equal(one[0], out[1]) and torch.equal(one_mass[0], mass[1])

    def test_scratch_memory_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
        empty, new_empty = torch.empty, Tensor.new_empty

        def poisoned(*shape: object, **options: object) -> Tensor:
            made = empty(*shape, **options)  # type: ignore[call-overload]
            return made.fill_(math.nan if made.is_floating_point() else -1)

        monkeypatch.setattr(torch, "empty", poisoned)

        def new_poisoned(own: Tensor, *shape: object, **options: object) -> Tensor:
            made = new_empty(own, *shape, **options)  # type: ignore[call-overload]
            return made.fill_(math.nan) if made.is_floating_point() else made

        monkeypatch.setattr(Tensor, "new_empty", new_poisoned)
        # The second row leaves most of the grid without keys, and most stretches without anchors.
        check(make(keys=700, lengths=[700, 5], anchors="bool", bias=1.0))
        check(
            make(keys=700, lengths=[0, 690], anchors="factors", bias=1.0, window=300, mask="full")
        )
        check_partition(make(keys=700, lengths=[700, 5], anchors="bool", tokens=3, causal=True))

    @pytest.mark.parametrize("tokens", [1, 4])
    def test_a_tile_without_anchors_costs_no_product(tokens: int) -> None:
        call = make(
            batch=1,
            heads=2,
            key_heads=1,
            tokens=tokens,
            keys=256,
            dtype=torch.float16,
            anchors="bool",
        )
        call = replace(call, anchors=torch.zeros(1, 256, dtype=torch.bool))
        with counted("create_dot") as products:
            backend.run(call)
            without = products[0]
            call.anchors[0, 70] = True
            backend.run(call)
        assert without == 8  # four tiles, keys and values
        assert products[0] - without == 9
        with counted("create_dot") as products:
            backend.run(replace(call, bias=torch.ones(1, 2), return_mass=False))
        assert products[0] == 8  # a bias alone needs no second part

    def test_keys_that_no_query_sees_cost_no_product() -> None:
        call = make(batch=1, heads=1, key_heads=1, tokens=16, keys=512, dtype=torch.float16)
        with counted("create_dot") as products:
            backend.run(call, splits=1)
            assert products[0] == 16
            backend.run(replace(call, causal=True, window=32), splits=1)
        assert products[0] - 16 == 2

    def test_no_keys_and_no_rows() -> None:
        out, mass = backend.run(make(keys=0))
        assert (out == 0).all() and (mass == 0).all()
        out, mass = backend.run(make(batch=0))
        assert out.shape == (0, 4, 1, 64) and mass.shape == (0, 4, 1)
        out, mass = backend.run(make(tokens=0))
        assert out.shape == (2, 4, 0, 64) and mass.shape == (2, 4, 0)
        for parts, wanted in zip(
            partition.run(make(keys=0, anchors="bool", sinks=True)),
            partition_reference.run(make(keys=0, anchors="bool", sinks=True)),
            strict=True,
        ):
            torch.testing.assert_close(parts, wanted)

    def test_mass_only_if_asked_for() -> None:
        call = make(anchors="bool", target=0.3)
        out, mass = backend.run(replace(call, return_mass=False))
        assert mass is None and torch.equal(out, backend.run(call)[0])

    def test_results_lie_token_by_token() -> None:
        out, _ = backend.run(make(tokens=3))
        assert out.transpose(1, 2).is_contiguous()

    def test_refusals_name_their_reason() -> None:
        call = make(keys=16)
        double = replace(call, query=call.query.double())
        assert "float64" in backend.unsupported(double)
        wide = make(keys=16, head_size=300)
        assert "300" in backend.unsupported(wide)
        elsewhere = replace(call, query=call.query.to("meta"))
        assert "meta" in backend.unsupported(elsewhere)

    def test_by_name_it_serves_cpu_tensors_and_by_itself_not() -> None:
        call = make(anchors="bool", tokens=2)
        arguments = (call.query, call.key, call.value, call.anchors)
        out = radar_kernels.anchor_attention(*arguments, bias=1.0, backend="triton")
        other = radar_kernels.anchor_attention(*arguments, bias=1.0, backend="reference")
        torch.testing.assert_close(out, other, rtol=0, atol=1e-5)
        parts = radar_kernels.partition_attention(*arguments, backend="triton")
        merged = radar_kernels.merge_partition(parts, 1.0)
        torch.testing.assert_close(merged, other, rtol=0, atol=1e-5)
        for operator in ("anchor_attention", "partition_attention"):
            found = radar_kernels.available_backends(operator)
            assert next(iter(found)) == "triton" and found["triton"] is None
        assert radar_kernels.explain("anchor_attention", *arguments).chosen != "triton"
