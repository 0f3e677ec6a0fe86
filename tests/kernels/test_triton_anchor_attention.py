"""Anchor attention's Triton kernels in Triton's interpreter, against float64.

Triton decides at import whether it interprets, so in an ordinary run this file has one test, which
runs the others in a process of their own. ``TRITON_INTERPRET=1 pytest`` with this file runs them
directly.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_kernels_in_the_interpreter() -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout and "skipped" not in done.stdout

    def test_imports_and_explains_itself_without_triton() -> None:
        program = (
            "import sys; sys.modules['triton'] = None\n"
            "from radar_kernels.anchor_attention import triton\n"
            "print(triton.absent())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert 'pip install "radar-kernels[triton]"' in done.stdout

else:
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    import radar_kernels
    from radar_kernels.anchor_attention import triton as backend
    from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments

    @pytest.fixture(scope="module", autouse=True)
    def _quick_device_functions() -> Iterator[None]:
        """The interpreter patches all of Triton's language in each call of a device function.

        Once is enough; the patches of the first kernel stay.
        """
        backend.run(make(batch=1, keys=1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                InterpretedFunction,
                "__call__",
                lambda function, *values, **named: function.rewrite()(*values, **named),
            )
            yield

    def oracle(call: AnchorAttentionArguments) -> tuple[Tensor, Tensor, Tensor]:
        """Output, mass and ``weights @ |value|`` in float64, one row, head and key at a time."""
        query, key, value = (t.double() for t in (call.query, call.key, call.value))
        batch, heads, _, _ = query.shape
        keys, group = key.shape[2], heads // key.shape[1]
        out = torch.zeros(batch, heads, 1, value.shape[3], dtype=torch.float64)
        size = torch.zeros_like(out)
        mass = torch.zeros(batch, heads, 1, dtype=torch.float64)
        for b in range(batch):
            length = keys if call.key_lengths is None else int(call.key_lengths[b])
            first = 0 if call.window is None else max(0, length - call.window)
            for h in range(heads):
                seen = torch.zeros(keys, dtype=torch.bool)
                seen[first:length] = True
                if call.mask is not None:
                    seen &= call.mask.expand(batch, heads, 1, keys)[b, h, 0]
                if not seen.any():
                    continue
                logits = call.scale * (key[b, h // group, seen] @ query[b, h, 0])
                if call.softcap is not None:
                    logits = call.softcap * torch.tanh(logits / call.softcap)
                factor = torch.zeros(len(logits), dtype=torch.float64)
                if call.anchors is not None:
                    factor = call.anchors.expand(batch, keys)[b, seen].double()
                anchored = factor != 0
                sink = torch.empty(0, dtype=torch.float64)
                if call.sinks is not None:
                    sink = call.sinks[h : h + 1].double()
                share = torch.softmax(torch.cat([logits, sink]), 0)[: len(logits)]
                mass[b, h, 0] = share[anchored].sum()
                if call.bias is not None:
                    bias = call.bias.double().expand(batch, heads)[b, h]
                    logits = logits + bias * factor
                if call.target_mass is not None:
                    target = call.target_mass.double().expand(batch, heads)[b, h]
                    inside = torch.logsumexp(logits[anchored], 0)
                    outside = torch.logsumexp(torch.cat([logits[~anchored], sink]), 0)
                    if inside.isfinite() and outside.isfinite():
                        bias = torch.logit(target) - (inside - outside)
                        if not call.target_exact:
                            bias = bias.clamp_min(0)
                        logits = logits + bias * anchored
                weights = torch.softmax(torch.cat([logits, sink]), 0)[: len(logits)]
                rows = value[b, h // group, seen]
                out[b, h, 0] = weights @ rows
                size[b, h, 0] = weights @ rows.abs()
        return out, mass, size

    def make(
        *,
        batch: int = 2,
        heads: int = 4,
        key_heads: int = 2,
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
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        layout: str = "contiguous",
        seed: int = 0,
    ) -> AnchorAttentionArguments:
        draw = torch.Generator().manual_seed(seed)
        value_size = head_size if value_size is None else value_size

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        def coin(*shape: int) -> Tensor:
            return torch.rand(shape, generator=draw) < 0.5

        query = normal(batch, heads, 1, head_size).to(dtype)
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
            if anchors == "factors":
                chosen = chosen * normal(batch, keys + 3)
            chosen = chosen[:, :keys]  # a row stride of its own
            if anchors == "shared":
                chosen = chosen[:1].expand(batch, keys)
        per_head = 0.25 * torch.arange(heads, dtype=torch.float32)
        spread = per_head - per_head.mean()
        masks = {
            None: None,
            "keys": coin(batch, 1, 1, keys),
            "one": coin(1, 1, 1, keys),
            "heads": coin(batch, heads, 1, keys),
            "strided": coin(batch, 1, 1, 2 * keys)[..., ::2],
        }
        return AnchorAttentionArguments(
            query,
            key,
            value,
            chosen,
            bias=None if bias is None else (bias + spread)[None].expand(batch, -1).contiguous(),
            target_mass=None if target is None else torch.full((1, heads), target),
            target_exact=exact,
            mask=masks[mask],
            key_lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
            causal=window is not None,
            scale=1.7 * head_size**-0.5,
            window=window,
            softcap=softcap,
            sinks=spread if sinks else None,
            return_mass=True,
        )

    def check(
        call: AnchorAttentionArguments, splits: int | None = None, rounding: float = 3e-6
    ) -> None:
        """Within the rounding of the weights and of the result to the call's dtype."""
        assert backend.unsupported(call) is None
        out, mass = backend.run(call, splits=splits)
        assert out.dtype == call.query.dtype and mass.dtype == torch.float32
        wanted, wanted_mass, size = oracle(call)
        eps = 0.0 if call.query.dtype == torch.float32 else torch.finfo(call.query.dtype).eps
        if call.query.dtype == torch.bfloat16:
            eps *= 2  # the interpreter cuts float32 off to bfloat16 where a GPU rounds
        excess = (out.double() - wanted).abs() - eps * size - rounding * (1 + size)
        assert not excess.isnan().any() and excess.max() <= 0, excess.max()
        torch.testing.assert_close(mass.double(), wanted_mass, rtol=0, atol=rounding)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("heads, key_heads", [(2, 2), (3, 1), (8, 2), (7, 1), (8, 1), (20, 1)])
    def test_groups(dtype: torch.dtype, heads: int, key_heads: int) -> None:
        check(
            make(
                batch=1,
                dtype=dtype,
                heads=heads,
                key_heads=key_heads,
                keys=67,
                anchors="bool",
                bias=1.5,
            )
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "head_size, value_size",
        [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (8, 8), (41, 17), (192, 128)],
    )
    def test_head_sizes(dtype: torch.dtype, head_size: int, value_size: int) -> None:
        check(
            make(
                batch=1,
                dtype=dtype,
                head_size=head_size,
                value_size=value_size,
                keys=67,
                anchors="bool",
                target=0.6,
            )
        )

    FEATURES = {
        "plain": {},
        "mass alone": {"anchors": "bool"},
        "bias": {"anchors": "bool", "bias": 2.0},
        "negative bias": {"anchors": "shared", "bias": -3.0},
        "factors": {"anchors": "factors", "bias": 1.5},
        "factors without bias": {"anchors": "factors"},
        "at least": {"anchors": "bool", "target": 0.08},
        "exact": {"anchors": "bool", "target": 0.08, "exact": True},
        "softcap": {"anchors": "bool", "bias": 1.0, "softcap": 2.0},
        "sinks": {"anchors": "bool", "bias": 1.0, "sinks": True},
        "sinks and target": {"anchors": "bool", "target": 0.5, "sinks": True},
        "window": {"anchors": "bool", "bias": 1.0, "window": 77},
        "lengths": {"anchors": "bool", "bias": 1.0, "lengths": [201, 33]},
        "everything": {
            "anchors": "factors",
            "bias": 1.0,
            "softcap": 3.0,
            "sinks": True,
            "window": 150,
            "lengths": [190, 171],
        },
    }

    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_features(features: dict) -> None:
        check(make(**features))

    @pytest.mark.parametrize("mask", ["keys", "heads"])
    @pytest.mark.parametrize("name", ["plain", "factors", "exact", "sinks", "everything"])
    def test_features_with_a_mask(name: str, mask: str) -> None:
        check(make(mask=mask, **FEATURES[name]))

    @pytest.mark.parametrize(
        "layout, mask, dtype",
        [
            ("tokens", "one", torch.float32),
            ("tokens", "strided", torch.float16),
            ("unaligned", "strided", torch.float32),
            ("unaligned", "one", torch.float16),
        ],
    )
    def test_strides(layout: str, mask: str, dtype: torch.dtype) -> None:
        check(make(layout=layout, mask=mask, dtype=dtype, anchors="bool", bias=1.0))

    @pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 127, 128, 129, 515])
    def test_key_counts(keys: int) -> None:
        check(make(keys=keys, batch=1, key_heads=1, anchors="bool", bias=1.0))

    @pytest.mark.parametrize("splits", [1, 2, 3, 7])
    @pytest.mark.parametrize("window", [None, 391])
    def test_splits(splits: int, window: int | None) -> None:
        call = make(
            heads=2,
            key_heads=1,
            keys=517,
            lengths=[517, 409],
            anchors="bool",
            target=0.3,
            window=window,
        )
        check(call, splits)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mask", [None, "keys"])
    @pytest.mark.parametrize("steering", ["none", "bias", "factors", "target"])
    def test_what_may_not_be_read_may_be_nan(
        dtype: torch.dtype, mask: str | None, steering: str
    ) -> None:
        features: dict = {
            "none": {},
            "bias": {"anchors": "bool", "bias": 1.0},
            "factors": {"anchors": "factors", "bias": 1.0},
            "target": {"anchors": "bool", "target": 0.4},
        }[steering]
        call = make(key_heads=1, dtype=dtype, mask=mask, lengths=[190, 41], **features)
        for row, length in enumerate([190, 41]):
            call.key[row, :, length:] = math.nan
            call.value[row, :, length:] = math.inf
            if call.mask is not None:
                hidden = ~call.mask[row, 0, 0]
                call.key[row, :, hidden] = math.inf
                call.value[row, :, hidden] = math.nan
        check(call)

    def test_what_no_head_of_a_group_may_read_may_be_nan() -> None:
        call = make(mask="heads", anchors="bool", bias=1.0)
        hidden = torch.arange(0, 201, 3)
        call.mask[0, :2, 0, hidden] = False
        call.key[0, 0, hidden] = math.nan
        call.value[0, 0, hidden] = math.inf
        check(call)

    def test_a_nan_that_one_head_may_not_read_stays_out_of_its_scores() -> None:
        call = make(mask="heads", anchors="bool", bias=1.0)
        call.mask[0, :2, 0, 77] = torch.tensor([False, True])
        call.key[0, 0, 77, 3] = math.nan
        out, mass = backend.run(call)
        wanted, wanted_mass, _ = oracle(call)
        assert not wanted[0, 0].isnan().any() and wanted[0, 1].isnan().all()
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(mass.double(), wanted_mass, rtol=0, atol=1e-6, equal_nan=True)

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("anchors", [None, "bool", "factors"])
    def test_rows_that_attend_to_nothing_are_zero(sinks: bool, anchors: str | None) -> None:
        bias = None if anchors is None else 1.0
        call = make(
            batch=3,
            key_heads=1,
            dtype=torch.float16,
            mask="keys",
            lengths=[0, 201, 201],
            sinks=sinks,
            anchors=anchors,
            bias=bias,
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
    @pytest.mark.parametrize("anchors", ["bool", "factors"])
    def test_extreme_biases(bias: float, anchors: str) -> None:
        check(
            make(key_heads=1, anchors=anchors, bias=bias),
            rounding=5e-5 if abs(bias) > 1e3 else 3e-6,
        )

    def test_extreme_logits() -> None:
        call = make(anchors="bool", target=0.2, softcap=None)
        # Logits reach about 1,000, where float32 steps by 6e-5.
        check(replace(call, scale=40.0), rounding=2e-4)
        check(replace(call, scale=40.0, softcap=30.0), rounding=2e-5)

    @pytest.mark.parametrize("mask, dtype", [(None, torch.float32), ("keys", torch.bfloat16)])
    def test_a_row_has_the_same_bits_in_every_batch(mask: str | None, dtype: torch.dtype) -> None:
        # Alone the row needs a grid of 2 stretches, in the batch of 17: two blocks of the merge.
        call = make(heads=2, key_heads=1, keys=2100, lengths=[2100, 150], mask=mask, dtype=dtype)
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
        assert torch.equal(one[0], out[1]) and torch.equal(one_mass[0], mass[1])

    def test_scratch_memory_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
        empty = torch.empty

        def poisoned(*shape: object, **options: object) -> Tensor:
            return empty(*shape, **options).fill_(math.nan)  # type: ignore[call-overload]

        monkeypatch.setattr(torch, "empty", poisoned)
        # The second row leaves most of the grid without keys, and most stretches without anchors.
        check(make(keys=700, lengths=[700, 5], anchors="bool", bias=1.0))
        check(make(keys=700, lengths=[0, 690], anchors="factors", bias=1.0, window=300))

    def test_a_tile_without_anchors_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
        products = 0
        product = InterpreterBuilder.create_dot

        def counted(*arguments: object) -> object:
            nonlocal products
            products += 1
            return product(*arguments)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
        call = make(batch=1, heads=2, key_heads=1, keys=256, dtype=torch.float16, anchors="bool")
        call = replace(call, anchors=torch.zeros(1, 256, dtype=torch.bool))
        backend.run(call)
        without = products
        call.anchors[0, 70] = True
        backend.run(call)
        assert without == 8  # four tiles, keys and values
        assert products - without == 9

    def test_no_keys_and_no_rows() -> None:
        out, mass = backend.run(make(keys=0))
        assert (out == 0).all() and (mass == 0).all()
        out, mass = backend.run(make(batch=0))
        assert out.shape == (0, 4, 1, 64) and mass.shape == (0, 4, 1)

    def test_mass_only_if_asked_for() -> None:
        call = make(anchors="bool", bias=1.0)
        out, mass = backend.run(replace(call, return_mass=False))
        assert mass is None and torch.equal(out, backend.run(call)[0])

    def test_refusals_name_their_reason() -> None:
        call = make(keys=16)
        double = replace(call, query=call.query.double())
        assert "float64" in backend.unsupported(double)
        longer = replace(call, query=call.query.expand(-1, -1, 2, -1))
        assert "2 tokens" in backend.unsupported(longer)
        wide = make(keys=16, head_size=300)
        assert "300" in backend.unsupported(wide)
        elsewhere = replace(call, query=call.query.to("meta"))
        assert "meta" in backend.unsupported(elsewhere)

    def test_by_name_it_serves_cpu_tensors_and_by_itself_not() -> None:
        call = make(anchors="bool")
        arguments = (call.query, call.key, call.value, call.anchors)
        out = radar_kernels.anchor_attention(*arguments, bias=1.0, backend="triton")
        other = radar_kernels.anchor_attention(*arguments, bias=1.0, backend="reference")
        torch.testing.assert_close(out, other, rtol=0, atol=1e-5)
        assert radar_kernels.available_backends("anchor_attention")["triton"] is None
        assert radar_kernels.explain("anchor_attention", *arguments).chosen != "triton"
