"""Anchor attention's Triton kernels, compiled ahead of time for every target; needs no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from radar_kernels.anchor_attention import triton as backend
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments

# Shared memory a program may use. sm_80's settings also run on the 8.6, 8.9 and 12.0 parts.
SHARED_BYTES = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
LARGEST = {(2, 256), (4, 128)}  # gfx942 compiles slowly: those that need most registers
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def call(
    dtype: torch.dtype,
    head_size: int,
    value_size: int | None = None,
    *,
    keys: int = 5000,
    batch: int = 2,
    features: str = "none",
    layout: str = "heads",
    device: str = "meta",
) -> AnchorAttentionArguments:
    """A call of 8 heads on 2 key heads; on the meta device it takes no memory."""
    value_size = head_size if value_size is None else value_size

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    key, value = tensor(batch, 2, keys, head_size), tensor(batch, 2, keys, value_size)
    if layout == "tokens":
        key = tensor(batch, keys, 2, head_size).transpose(1, 2)
        value = tensor(batch, keys, 2, value_size).transpose(1, 2)
    common = {"query": tensor(batch, 8, 1, head_size), "key": key, "value": value, "scale": 0.1}
    if features == "none":
        return AnchorAttentionArguments(**common)
    per_head = tensor(batch, 8, dtype=torch.float32)
    if features == "target":
        return AnchorAttentionArguments(
            **common,
            anchors=tensor(batch, keys, dtype=torch.bool),
            target_mass=per_head,
            return_mass=True,
        )
    heads = 8 if features == "head mask" else 1
    return AnchorAttentionArguments(
        **common,
        anchors=tensor(batch, keys, dtype=torch.float32),
        bias=per_head,
        mask=tensor(batch, heads, 1, keys, dtype=torch.bool),
        key_lengths=tensor(batch, dtype=torch.int32),
        causal=True,
        window=4000,
        softcap=50.0,
        sinks=tensor(8, dtype=torch.float32),
        return_mass=True,
    )


def cubin_usage(cubin: bytes, path: Path) -> dict[str, int]:
    """What the assembler says a kernel takes; STACK and LOCAL are where it spills."""
    from triton.backends import nvidia

    path.write_bytes(cubin)
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    done = subprocess.run(
        [cuobjdump, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    )
    usage = {name: int(size) for name, size in re.findall(r"\b([A-Z]+):(\d+)", done.stdout)}
    assert {"REG", "STACK", "LOCAL"} <= usage.keys(), done.stdout
    return usage


def assert_fits(target: str, kernels: list[Any], path: Path) -> None:
    assert [kernel.metadata.name for kernel in kernels] == ["split_kernel", "merge_kernel"]
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES[target]
        if target == "gfx942":
            usage = dict(re.findall(r"\.(\w+): +(\d+)\n", kernel.asm["amdgcn"]))
            assert usage["vgpr_spill_count"] == usage["private_segment_fixed_size"] == "0", usage
        else:
            usage = cubin_usage(kernel.asm["cubin"], path)
            assert usage["STACK"] == usage["LOCAL"] == 0, usage


def cases() -> list[Any]:
    """Every setting of sm_90; of the others those without a head mask, gfx942's two largest."""
    found = []
    for one in backend.configurations():
        shape = (one.element_size, one.width)
        if one.target == "sm_90":
            wanted = ["head mask"] if one.head_mask else ["all", "none"]
        elif one.head_mask or (one.target == "gfx942" and shape not in LARGEST):
            wanted = []
        else:
            wanted = ["all"]
        name = f"{one.target}-{8 * one.element_size}bit-{one.width}"
        found += [pytest.param(one, features, id=f"{name}-{features}") for features in wanted]
    return found


@pytest.mark.parametrize("setting, features", cases())
def test_every_setting_compiles_without_spills(
    setting: backend.Configuration, features: str, tmp_path: Path
) -> None:
    arguments = call(DTYPES[setting.element_size], setting.width, features=features)
    kernels = backend.compile_for(setting.target, arguments)
    split, _ = launches(arguments, setting.target)
    assert split.values["BLOCK_KEYS"] == setting.block_keys
    assert kernels[0].metadata.num_warps == setting.warps
    assert kernels[0].metadata.num_stages == setting.stages
    assert_fits(setting.target, kernels, tmp_path / "kernel.cubin")


@pytest.mark.parametrize(
    "dtype, sizes, features",
    [
        (torch.bfloat16, (128, 128), "target"),
        (torch.float16, (80, 80), "target"),
        (torch.float32, (192, 128), "head mask"),
    ],
)
def test_other_calls_compile_without_spills(
    dtype: torch.dtype, sizes: tuple[int, int], features: str, tmp_path: Path
) -> None:
    kernels = backend.compile_for("sm_90", call(dtype, *sizes, features=features))
    assert_fits("sm_90", kernels, tmp_path / "kernel.cubin")


@pytest.mark.parametrize(
    "target, keys, layout", [("sm_80", 5000, "heads"), ("sm_90", 5001, "tokens")]
)
def test_keys_and_values_are_copied_16_bytes_at_a_time(target: str, keys: int, layout: str) -> None:
    arguments = call(torch.bfloat16, 128, keys=keys, layout=layout, features="target")
    split, _ = backend.compile_for(target, arguments)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+|\d+)", split.asm["ptx"])
    assert copies and {int(size, 0) for size in copies} == {16}
    assert "mma.sync" in split.asm["ptx"]


def test_unaligned_strides_still_compile() -> None:
    arguments = call(torch.bfloat16, 81)
    split, _ = backend.compile_for("sm_90", arguments)
    assert "cp.async.cg" not in split.asm["ptx"]  # those need 16 aligned bytes


def specialized(launch: Any) -> list[Any]:
    """What Triton would look a launch's compiled kernel up by, on an sm_90 device."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    machine = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, machine)
    return bind(**launch.values)[1]


def launches(arguments: AnchorAttentionArguments, target: str = "sm_90") -> Any:
    out = arguments.query.new_empty((*arguments.query.shape[:3], arguments.value.shape[3]))
    mass = out.new_empty(out.shape[:3], dtype=torch.float32) if arguments.return_mass else None
    return backend._launches(arguments, target, out, mass, None)


@pytest.mark.parametrize("features", ["none", "target", "all"])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_a_growing_cache_never_recompiles(features: str, layout: str) -> None:
    first: list[Any] = []
    for keys in (1, 2, 7, 15, 16, 17, 128, 1000, 1001, 8192, 9001):
        for batch in (1, 3):
            arguments = call(
                torch.bfloat16, 80, keys=keys, batch=batch, features=features, layout=layout
            )
            if features != "none":
                # A view into a longer buffer, at an address of its own each step.
                anchors = torch.zeros(batch, 9 + keys, dtype=arguments.anchors.dtype)
                object.__setattr__(arguments, "anchors", anchors[:, keys % 7 :][:, :keys])
            found = [specialized(launch) for launch in launches(arguments)]
            first = first or found
            assert found == first, f"{keys} keys, batch {batch}"


@pytest.mark.parametrize("features", ["none", "target", "all"])
def test_what_is_compiled_ahead_is_what_a_launch_looks_up(features: str) -> None:
    for launch in launches(call(torch.bfloat16, 128, features=features)):
        signature, constants, attributes = backend._signature(launch)
        for index, (parameter, (kind, key)) in enumerate(
            zip(launch.kernel.params, specialized(launch), strict=True)
        ):
            assert signature[parameter.name] == kind, parameter.name
            aligned = attributes.get((index,)) == [["tt.divisibility", 16]]
            assert aligned == (kind != "constexpr" and key == "D"), parameter.name
            if kind == "constexpr":
                assert constants[parameter.name] == launch.values[parameter.name]


def test_many_rows_go_on_the_one_unbounded_axis_of_the_grid() -> None:
    split, merge = launches(call(torch.bfloat16, 64, batch=100_000, keys=1 << 20))
    assert split.grid == (200_000, backend.MAX_SPLITS)
    assert merge.grid == (800_000,)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(ValueError, match="'sm_70', expected one of sm_80, sm_90, sm_100, gfx942"):
        backend.compile_for("sm_70", call(torch.bfloat16, 64))


def test_the_interpreter_compiles_nothing() -> None:
    program = (
        "import torch\n"
        "from tests.kernels.test_triton_compile import backend, call\n"
        "try:\n"
        "    backend.compile_for('sm_90', call(torch.bfloat16, 64))\n"
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


def test_every_setting_of_the_table_is_listed_once() -> None:
    settings = backend.configurations()
    assert len(settings) == len(set(settings)) == 48
    assert {(one.target, one.element_size, one.width, one.head_mask) for one in settings} == {
        (target, size, width, head_mask)
        for target in SHARED_BYTES
        for size in (2, 4)
        for width in (64, 128, 256)
        for head_mask in (False, True)
    }
