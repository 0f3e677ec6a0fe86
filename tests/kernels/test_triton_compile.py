"""Every Triton kernel, compiled ahead of time for every target; needs no GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compile_report
from benchmarks.compile_report import Usage, compile_all, modules
from radar_kernels.anchor_attention import triton as backend
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.partition_attention.triton import Results
from radar_kernels.segment_mass import triton as segment_backend
from radar_kernels.segment_mass.arguments import SegmentMassArguments
from radar_kernels.triton_launch import SHARED_BYTES, TARGETS, Launch, compile_launch, signature


def call(
    dtype: torch.dtype,
    head_size: int,
    value_size: int | None = None,
    *,
    tokens: int = 1,
    keys: int = 5000,
    batch: int = 2,
    features: str = "none",
    layout: str = "heads",
) -> AnchorAttentionArguments:
    """A call of 8 heads on 2 key heads on the meta device: no value of it can be read."""
    value_size = head_size if value_size is None else value_size

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    key, value = tensor(batch, 2, keys, head_size), tensor(batch, 2, keys, value_size)
    query = tensor(batch, 8, tokens, head_size)
    if layout == "tokens":
        query = tensor(batch, tokens, 8, head_size).transpose(1, 2)
        key = tensor(batch, keys, 2, head_size).transpose(1, 2)
        value = tensor(batch, keys, 2, value_size).transpose(1, 2)
    common: dict[str, Any] = {"query": query, "key": key, "value": value, "scale": 0.1}
    common["causal"] = tokens > 1
    per_head = tensor(batch, 8, dtype=torch.float32)
    anchors = tensor(batch, keys, dtype=torch.bool)
    if features == "none":
        return AnchorAttentionArguments(**common)
    if features == "bias":
        return AnchorAttentionArguments(**common, anchors=anchors, bias=per_head)
    if features == "target":
        return AnchorAttentionArguments(
            **common, anchors=anchors, target_mass=per_head, return_mass=True
        )
    everything = backend.demanding_call(
        dtype, head_size, tokens=tokens, keys=keys, parts=2, full_mask=features == "full mask"
    )
    assert batch == 2 or features == "all"
    return everything


def test_every_setting_of_every_launcher_fits_every_target() -> None:
    """No spills, no stack, shared memory within the limit; as the report prints it."""
    usages = list(compile_all(modules()))
    assert [one for one in usages if not one.fits] == []
    for operator, module in modules().items():
        compiled = {(one.target, one.setting) for one in usages if one.operator == operator}
        assert len(compiled) == len(module.configurations())
        assert {target for target, _ in compiled} == set(TARGETS)
    kernels = {(one.operator, one.kernel) for one in usages}
    assert kernels >= {
        ("anchor_attention", "attention_kernel"),
        ("anchor_attention", "merge_kernel"),
        ("anchor_attention", "pack_kernel"),
        *(
            ("segment_mass", f"{name}_kernel")
            for name in ("sum", "total", "mass", "span", "segment", "piece")
        ),
    }


def test_a_kernel_that_spills_or_takes_too_much_does_not_fit() -> None:
    good = Usage("a", "k", "sm_90", "", 4, 128, 0, 0, 1000, SHARED_BYTES["sm_90"])
    assert good.fits
    for change in ({"spills": 1}, {"stack": 8}, {"shared": SHARED_BYTES["sm_90"] + 1}):
        assert not Usage(**{**_dict(good), **change}).fits


def test_spills_are_counted() -> None:
    setting = backend.Configuration("sm_80", 2, 128, 128, 2, True, 64, 4, 2, "ieee")
    attend = next(
        one
        for one in backend.launches(
            backend.demanding_call(
                torch.bfloat16, 128, tokens=4096, keys=4096, parts=2, full_mask=True
            ),
            "sm_80",
            setting=setting,
        )
        if one.kernel.__name__ == "attention_kernel"
    )
    _, _, spills, stack, _, _ = compile_report.resources(compile_launch(attend, "sm_80"), "sm_80")
    assert spills > 0 and stack > 0


def _dict(usage: Usage) -> dict[str, Any]:
    return {name: getattr(usage, name) for name in usage.__dataclass_fields__}


def resources(launch: Launch, target: str) -> tuple[int, int, int, int, int, int]:
    return compile_report.resources(compile_launch(launch, target), target)


@pytest.mark.parametrize(
    "dtype, sizes, tokens, features",
    [
        (torch.bfloat16, (128, 128), 1, "none"),
        (torch.bfloat16, (128, 128), 4096, "none"),
        (torch.bfloat16, (128, 128), 4096, "bias"),
        (torch.bfloat16, (128, 128), 4096, "target"),
        (torch.float16, (80, 80), 8, "target"),
        (torch.float32, (192, 128), 8, "full mask"),
    ],
)
def test_other_calls_compile_without_spills(
    dtype: torch.dtype, sizes: tuple[int, int], tokens: int, features: str
) -> None:
    for launch in backend.launches(call(dtype, *sizes, tokens=tokens, features=features), "sm_90"):
        _, _, spills, stack, shared, limit = resources(launch, "sm_90")
        assert spills == stack == 0 and shared <= limit


def test_a_partition_compiles_without_spills() -> None:
    arguments = call(torch.bfloat16, 128, tokens=4096, features="target")
    results = Results.empty(arguments, partition=True)
    (launch,) = backend.launches(arguments, "sm_90", results)
    _, _, spills, stack, _, _ = resources(launch, "sm_90")
    assert spills == stack == 0


@pytest.mark.parametrize(
    "target, keys, layout", [("sm_80", 5000, "heads"), ("sm_90", 5001, "tokens")]
)
def test_keys_and_values_are_copied_16_bytes_at_a_time(target: str, keys: int, layout: str) -> None:
    arguments = call(torch.bfloat16, 128, keys=keys, layout=layout, features="target")
    attend, _ = backend.launches(arguments, target)
    ptx = compile_launch(attend, target).asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+|\d+)", ptx)
    assert copies and {int(size, 0) for size in copies} == {16}
    assert "mma.sync" in ptx


def test_long_queries_use_the_matrix_unit_of_a_warp_group() -> None:
    arguments = call(torch.bfloat16, 128, tokens=4096, features="bias")
    (attend,) = backend.launches(arguments, "sm_90")
    assert "wgmma.mma_async" in compile_launch(attend, "sm_90").asm["ptx"]


def test_unaligned_strides_still_compile() -> None:
    attend, _ = backend.launches(call(torch.bfloat16, 81), "sm_90")
    # Those need 16 aligned bytes.
    assert "cp.async.cg" not in compile_launch(attend, "sm_90").asm["ptx"]


def specialized(launch: Launch) -> list[Any]:
    """What Triton would look a launch's compiled kernel up by, on an sm_90 device."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    machine = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, machine)
    return bind(**launch.values)[1]


@pytest.mark.parametrize("features", ["none", "bias", "target", "all"])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_a_growing_cache_never_recompiles(features: str, layout: str) -> None:
    first: list[Any] = []
    for keys in (1, 2, 7, 15, 16, 17, 128, 1000, 1001, 8192, 9001):
        for batch in (1, 2):
            arguments = call(
                torch.bfloat16, 80, keys=keys, batch=batch, features=features, layout=layout
            )
            if arguments.anchors is not None:
                # A view into a longer buffer, at an address of its own each step.
                anchors = torch.zeros(batch, 9 + keys, dtype=arguments.anchors.dtype)
                object.__setattr__(arguments, "anchors", anchors[:, keys % 7 :][:, :keys])
            found = [specialized(launch) for launch in backend.launches(arguments, "sm_90")]
            first = first or found
            assert found == first, f"{keys} keys, batch {batch}"


def segment_call(keys: int) -> SegmentMassArguments:
    attention = call(torch.bfloat16, 80, keys=keys, tokens=8)
    return SegmentMassArguments(attention, torch.empty(2, keys, dtype=torch.int64), 300)


def test_growing_keys_never_recompile_segment_mass() -> None:
    first: list[Any] = []
    for keys in (1000, 1001, 1024, 8192):
        work, _ = segment_backend.launches(segment_call(keys), "sm_90")
        found = [specialized(launch) for launch in work]
        first = first or found
        assert found == first, f"{keys} keys"


@pytest.mark.parametrize("features", ["none", "bias", "target", "all", "full mask"])
def test_what_is_compiled_ahead_is_what_a_launch_looks_up(features: str) -> None:
    work = backend.launches(call(torch.bfloat16, 128, features=features), "sm_90")
    work += segment_backend.launches(segment_call(1000), "sm_90")[0]
    for launch in work:
        types, constants, attributes = signature(launch)
        for index, (parameter, (kind, key)) in enumerate(
            zip(launch.kernel.params, specialized(launch), strict=True)
        ):
            assert types[parameter.name] == kind, parameter.name
            aligned = attributes.get((index,)) == [["tt.divisibility", 16]]
            assert aligned == (kind != "constexpr" and key == "D"), parameter.name
            if kind == "constexpr":
                assert constants[parameter.name] == launch.values[parameter.name]


def test_many_rows_go_on_the_one_unbounded_axis_of_the_grid() -> None:
    arguments = call(torch.bfloat16, 64, batch=100_000, keys=1 << 20)
    split, merge = backend.launches(arguments, "sm_90")
    assert split.grid == (200_000, backend.MAX_SPLITS)
    assert merge.grid == (800_000,)


def test_the_setting_is_the_smallest_tile_that_serves_the_call() -> None:
    def rows(wanted: int, parts: int = 1, full_mask: bool = False) -> int:
        return backend.chosen("sm_90", 2, 128, wanted, parts, full_mask).block_rows

    assert [rows(wanted) for wanted in (1, 16, 17, 64, 65, 9999)] == [16, 16, 64, 64, 128, 128]
    assert rows(9999, parts=2) == rows(9999, full_mask=True) == 64
    for target in TARGETS:
        for size in (2, 4):
            for width in (64, 128, 256):
                one = backend.chosen(target, size, width, 1, 2, True)
                assert one in backend.configurations()


def test_an_unknown_target_is_named() -> None:
    (attend, _) = backend.launches(call(torch.bfloat16, 64), "sm_90")
    with pytest.raises(ValueError, match="'sm_70', expected one of sm_80, sm_90, sm_100, gfx942"):
        compile_launch(attend, "sm_70")


def test_the_interpreter_compiles_nothing() -> None:
    program = (
        "from radar_kernels.segment_mass import triton\n"
        "try:\n"
        "    triton.compile_configuration(triton.configurations()[0])\n"
        "except RuntimeError as error:\n"
        "    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert "TRITON_INTERPRET=1 is set: unset it" in done.stdout, done.stderr


def test_the_report_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    wanted = ["--targets", "sm_90", "--operators", "segment_mass", "--json", str(file)]
    assert compile_report.main(wanted) == 0
    rows = json.loads(file.read_text())
    assert len(rows) >= len(segment_backend.configurations()) // len(TARGETS)
    assert all(row["fits"] and row["registers"] > 0 and row["target"] == "sm_90" for row in rows)
    assert "mass_kernel" in capsys.readouterr().out
