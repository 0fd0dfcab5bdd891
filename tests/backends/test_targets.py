"""Compiles calls for GPUs that are not here, with the launch parameters that plans choose, and checks what they need.

Each GPU has limits of shared memory, of tensor memory and of registers. A kernel that exceeds the first two cannot be
launched. One that keeps many values on the stack is slow. `make targets` runs these tests, which take minutes;
`make test` runs a sample.

B batch   T tokens   H heads   N sequences   K, V key and value width
"""

import itertools
import random
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gla_core.dispatch.backend import KnownDevice
from tests.backends.machine_code import wrong_descriptors
from tests.backends.prepared_calls import launches_on
from tests.backends.test_offsets import (
    attention,
    attention_backward,
    backward,
    delta_backward,
    delta_forward,
    delta_pool,
    delta_step,
    forward,
    layer_step,
    pool,
    softmax,
    softmax_backward,
    ssd_step,
    step,
    steps,
    summary,
)

triton = pytest.importorskip("triton")


class Target(NamedTuple):
    """A GPU that need not be here.

    Attributes:
        capability: its compute capability.
        shared: bytes of shared memory that a block may have.
        columns: columns of tensor memory.
        multiprocessors: their number.
        vendor: as in `KnownDevice`.
    """

    capability: tuple[int, int]
    shared: int
    columns: int
    multiprocessors: int
    vendor: str = "NVIDIA"


TARGETS = {
    "A100": Target((8, 0), 166_912, 0, 108),
    "RTX 3090": Target((8, 6), 101_376, 0, 82),
    "RTX 4090": Target((8, 9), 101_376, 0, 128),
    "H100": Target((9, 0), 232_448, 0, 132),
    "B200": Target((10, 0), 232_448, 512, 148),
    "B300": Target((10, 3), 232_448, 512, 148),
    "RTX 5090": Target((12, 0), 101_376, 0, 170),
    "MI300X": Target((9, 4), 65_536, 0, 304, "AMD"),
    "MI350X": Target((9, 5), 163_840, 0, 256, "AMD"),
}
FLOAT16, FLOAT32 = {"dtype": torch.float16}, {"dtype": torch.float32}
TRAINING = {"B": 8, "T": 4096, "H": 16}
SERVING = {"B": 1, "T": 8192, "H": 16, "packed": True}
WIDE = {"B": 8, "T": 2048, "H": 4, "K": 256, "V": 512}
ATTENTION = {"B": 2, "Tq": 4096, "Tk": 4352, "H": 8}
"""Libraries compute gradients only of as many queries as keys."""
CALLS = {
    "forward": (forward, "triton_fused", TRAINING),
    "forward, K = V = 64": (forward, "triton_fused", TRAINING | {"K": 64, "V": 64}),
    "forward, wide": (forward, "triton_fused", WIDE),
    "forward, widest": (forward, "triton_fused", WIDE | {"K": 512}),
    "forward, odd": (forward, "triton_fused", TRAINING | {"K": 77, "V": 99}),
    "forward, float16": (forward, "triton_fused", TRAINING | FLOAT16),
    "forward, float32": (forward, "triton_fused", TRAINING | FLOAT32),
    "forward, TF32": (forward, "triton_fused", TRAINING | FLOAT32),
    "forward, per head": (forward, "triton_fused", TRAINING | {"form": "head"}),
    "forward, constant": (forward, "triton_fused", TRAINING | {"form": "constant"}),
    "forward, Mamba-2": (forward, "triton_fused", TRAINING | {"H": 1, "R": 128, "V": 64, "form": "head"}),
    "forward, grouped": (forward, "triton_fused", TRAINING | {"G": 4, "H": 4}),
    "forward, few blocks": (forward, "triton_fused", {"B": 1, "T": 2048, "H": 2}),
    "forward, in segments": (forward, "parallel_scan", {"B": 1, "T": 65536, "H": 8}),
    "forward, wide, in segments": (forward, "parallel_scan", WIDE | {"B": 1, "T": 65536}),
    "forward, packed": (forward, "triton_fused", SERVING),
    "pool": (pool, "triton_fused", SERVING),
    "pool, in segments": (pool, "parallel_scan", SERVING | {"H": 4, "form": "head"}),
    "backward": (backward, "triton_fused", TRAINING),
    "backward, K = V = 64": (backward, "triton_fused", TRAINING | {"K": 64, "V": 64}),
    "backward, K = V = 64, no gates": (backward, "triton_fused", TRAINING | {"K": 64, "V": 64, "form": "none"}),
    "backward, wide": (backward, "triton_fused", WIDE),
    "backward, K = 64, V = 256": (backward, "triton_fused", TRAINING | {"K": 64, "V": 256}),
    "backward, K = 128, V = 256": (backward, "triton_fused", TRAINING | {"V": 256}),
    "backward, K = 128, V = 256, packed": (backward, "triton_fused", SERVING | {"V": 256}),
    "backward, K = 128, V = 256, from logits": (backward, "triton_fused", TRAINING | {"V": 256, "normalizer": 16}),
    "backward, K = 128, V = 192": (backward, "triton_fused", TRAINING | {"V": 192}),
    "backward, few wide heads": (backward, "triton_fused", {"B": 2, "T": 8192, "H": 8, "V": 256}),
    "backward, float16": (backward, "triton_fused", TRAINING | FLOAT16),
    "backward, float32": (backward, "triton_fused", TRAINING | FLOAT32),
    "backward, TF32": (backward, "triton_fused", TRAINING | FLOAT32),
    "backward, per head": (backward, "triton_fused", TRAINING | {"form": "head"}),
    "backward, Mamba-2": (backward, "triton_fused", TRAINING | {"H": 1, "R": 128, "V": 64, "form": "head"}),
    "backward, grouped": (backward, "triton_fused", TRAINING | {"G": 4, "H": 4}),
    "backward, in segments": (backward, "parallel_scan", {"B": 1, "T": 65536, "H": 8}),
    "summary": (summary, "parallel_scan", TRAINING),
    "step": (step, "triton_fused", {"B": 64, "P": 100, "G": 1}),
    "step with a bonus": (
        step,
        "triton_fused",
        {"B": 64, "P": 100, "H": 64, "G": 1, "K": 64, "V": 64, "has_bonus": True},
    ),
    "layer step": (layer_step, "triton_fused", {"B": 64, "P": 100, "H": 4, "G": 1}),
    "layer step, one row": (layer_step, "triton_fused", {"B": 1, "P": 100, "H": 4, "G": 1, "K": 256, "V": 512}),
    "Mamba-2 step": (ssd_step, "triton_fused", {"B": 64, "P": 100, "H": 1, "R": 128, "V": 64}),
    "steps": (steps, "triton_fused", {"N": 64, "T": 4, "P": 500}),
    "delta rule": (delta_forward, "triton_fused", TRAINING),
    "delta rule, per head": (delta_forward, "triton_fused", TRAINING | {"R": 2, "form": "head"}),
    "delta rule, few heads": (delta_forward, "triton_fused", {"B": 1, "T": 2048, "H": 4}),
    "delta rule, few heads, per head": (delta_forward, "triton_fused", {"B": 1, "T": 2048, "H": 4, "form": "head"}),
    "delta rule, pool": (delta_pool, "triton_fused", SERVING | {"form": "head"}),
    "delta rule, K = 96, V = 192": (delta_forward, "triton_fused", TRAINING | {"K": 96, "V": 192, "form": "head"}),
    "delta rule, wide": (delta_forward, "triton_fused", WIDE | {"V": 256}),
    "delta rule, wide keys": (delta_forward, "triton_fused", TRAINING | {"K": 256, "V": 512, "form": "head"}),
    "delta rule, in segments": (delta_forward, "parallel_scan", {"B": 1, "T": 65536, "H": 2}),
    "delta rule backward": (delta_backward, "triton_fused", TRAINING),
    "delta rule backward, per head": (delta_backward, "triton_fused", TRAINING | {"R": 2, "form": "head"}),
    "delta rule backward, packed": (delta_backward, "triton_fused", TRAINING | {"packed": True, "B": 1}),
    "delta rule backward, wide keys": (delta_backward, "triton_fused", TRAINING | {"K": 256, "V": 512, "form": "head"}),
    "delta rule backward, in segments": (delta_backward, "parallel_scan", {"B": 1, "T": 65536, "H": 2}),
    "delta rule, float32": (delta_forward, "triton_fused", TRAINING | {"dtype": torch.float32}),
    "delta rule backward, float32": (delta_backward, "triton_fused", TRAINING | {"dtype": torch.float32}),
    "delta rule step": (delta_step, "triton_fused", {"B": 64, "P": 100}),
    "attention": (attention, "triton_fused", {"B": 2, "Tq": 4096, "Tk": 4096, "H": 8}),
    "attention, wide": (attention, "triton_fused", {"B": 2, "Tq": 4096, "Tk": 4096, "H": 8, "K": 256}),
    "attention in splits": (attention, "parallel_scan", {"B": 1, "Tq": 1, "Tk": 2**17, "H": 8}),
    "attention backward": (attention_backward, "triton_fused", ATTENTION),
    "attention backward, K = 64": (attention_backward, "triton_fused", ATTENTION | {"K": 64}),
    "attention backward, wide": (attention_backward, "triton_fused", ATTENTION | {"K": 256}),
    "attention backward, widest": (attention_backward, "triton_fused", ATTENTION | {"K": 512}),
    "attention backward, float32": (attention_backward, "triton_fused", ATTENTION | FLOAT32),
    "attention backward, TF32": (attention_backward, "triton_fused", ATTENTION | FLOAT32),
    "softmax": (softmax, "triton_fused", {"shape": (8192, 4096)}),
    "softmax of long rows": (softmax, "triton_fused", {"shape": (64, 2**17)}),
    "softmax backward": (softmax_backward, "triton_fused", {"shape": (8192, 4096)}),
    "softmax backward of long rows": (softmax_backward, "triton_fused", {"shape": (64, 2**17)}),
    "softmax backward of unaligned rows": (softmax_backward, "triton_fused", {"shape": (4096, 50257)}),
    "softmax backward in splits": (softmax_backward, "parallel_scan", {"shape": (4, 2**24)}),
    "softmax in splits": (softmax, "parallel_scan", {"shape": (4, 2**24)}),
}
STACK = 512
"""The most bytes of stack of a thread. The gate warps of kernels for Hopper have up to 300, which they seldom read."""

DO_NOT_FIT = {
    "H100": {
        "backward, float32",
        "delta rule, float32",
        "delta rule backward",
        "delta rule backward, packed",
        "delta rule backward, in segments",
        "delta rule backward, float32",
    },
    **{target: {"delta rule backward, float32"} for target in ("B200", "B300")},
    "A100": {"delta rule backward, wide keys"},
    "RTX 5090": {"delta rule, float32", "delta rule backward, float32", "delta rule backward, wide keys"},
    "MI300X": {"delta rule, wide keys", "delta rule backward, float32"},
}
"""Calls that do not fit a GPU.

On an H100, the backward of float32 at full precision has a stack of 4.7 KB. With a gate for each key, the general
kernels of the delta rule have up to 2 KB, because tiles have at least 64 keys there, and so has the launch of the
kernels for Hopper that computes the pairs of strong chunks. Float32 at full precision, whose operands are three tiles,
has up to 1.4 KB on RTX 5090 and MI300X, and needs 576 columns of tensor memory on B200 and B300. 256 keys have up to
900 bytes on three GPUs.
"""


SAMPLE = {
    ("backward, K = V = 64", "B200"),
    ("forward", "A100"),
    ("layer step", "H100"),
    ("delta rule, few heads, per head", "H100"),
    ("attention, wide", "RTX 4090"),
    ("forward", "MI300X"),
}
"""The calls that `make test` compiles as well."""


def launches_of(call, target, monkeypatch):
    """Returns the launches that preparing the call compiles on the target."""
    describe, backend, sizes = CALLS[call]
    precision = "high" if "TF32" in call else "highest"
    return launches_on(device_of(target), backend, precision, *describe(**sizes), monkeypatch=monkeypatch)


def device_of(target):
    """Returns a target as backends know it."""
    return KnownDevice("absent", target.multiprocessors, target.capability, target.vendor)


def compiled_by(launch):
    """Returns the compiled kernel of a launch."""
    return launch.kernel.warmup(*launch.arguments.values(), grid=launch.grid, **launch.options)


def faults(launch, target, folder):
    """Compiles the kernel of a launch, and returns in words which of its needs exceed the target."""
    compiled = compiled_by(launch)
    registers, stack = usage(compiled.asm, folder)
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    needs = {
        f"{compiled.metadata.shared} bytes of shared memory of {target.shared}": compiled.metadata.shared
        > target.shared,
        f"{columns} columns of tensor memory of {target.columns}": columns > target.columns,
        f"{stack} bytes of stack and {registers} registers": stack > STACK,
        "products that the assembler drops": has_dropped_products(compiled.asm, folder),
        "descriptors that the assembler leaves out": has_wrong_descriptors(compiled.asm, folder),
    }
    return [f"{launch.kernel.fn.__name__} needs {words}" for words, too_much in needs.items() if too_much]


def has_dropped_products(asm, folder):
    """Returns whether the machine code has fewer products of warpgroups than the PTX.

    The assembler drops a product, although its result is read, if the next product clears the same registers.
    """
    written = asm.get("ptx", "").count("wgmma.mma_async")
    return written > 0 and machine_code(asm, folder, "-sass").count("HGMMA") < written


def has_wrong_descriptors(asm, folder):
    """Returns whether products of the machine code for Hopper may read wrong descriptors of tiles."""
    return "wgmma" in asm.get("ptx", "") and bool(wrong_descriptors(machine_code(asm, folder, "-sass")))


def machine_code(asm, folder, what):
    """Returns what cuobjdump says of a compiled kernel."""
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(asm["cubin"])
    return subprocess.run([tool("cuobjdump"), what, path], capture_output=True, text=True, check=True).stdout


def tool(name):
    """Returns the path of a program of CUDA that Triton brings."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def usage(asm, folder):
    """Returns the registers and the bytes of stack of a thread of a compiled kernel."""
    if "amdgcn" in asm:
        names = ("vgpr_count", "private_segment_fixed_size")
        usages = [re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"]) for name in names]
        return tuple(int(each[1]) for each in usages)
    said = machine_code(asm, folder, "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert usage is not None, said
    return int(usage[1]), int(usage[2])


def cases():
    for target in TARGETS:
        for call in CALLS:
            marks = [] if (call, target) in SAMPLE else [pytest.mark.thorough]
            if call in DO_NOT_FIT.get(target, ()):
                marks.append(pytest.mark.xfail(strict=True))
            yield pytest.param(call, target, marks=marks)


@pytest.mark.parametrize(("call", "target"), list(cases()))
def test_kernels_fit(call, target, monkeypatch, tmp_path):
    launches = launches_of(call, TARGETS[target], monkeypatch)
    assert launches
    assert not [fault for launch in launches for fault in faults(launch, TARGETS[target], tmp_path)]


@pytest.mark.parametrize(
    "call",
    [
        "backward, K = V = 64",
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("backward", "backward, K = 128, V = 256", "backward, few wide heads")
        ),
    ],
)
def test_gradients_are_written_eight_bytes_at_a_time(call, monkeypatch):
    """Checks stores: a compiler that does not know that K is a multiple of 16 writes each element of dg by itself."""
    for launch in launches_of(call, TARGETS["H100"], monkeypatch):
        narrow = re.findall(r"st\.global\.b\d+", compiled_by(launch).asm["ptx"])
        marks = launch.arguments.get("TURNS", 1)  # each gate warpgroup stores the marks of its chunks
        assert len(narrow) <= marks, launch.kernel.fn.__name__


@pytest.mark.parametrize("kept", [True, False], ids=["checkpoints", "no checkpoints"])
@pytest.mark.parametrize("form", ["none", "head", "key"])
def test_gradients_of_delta_rules_take_hoppers_kernels(form, kept, monkeypatch):
    """Without checkpoints, as in training with FLA's layers, the forward computes the states of chunks again."""
    call = delta_backward(**TRAINING, form=form, kept=kept)
    launches = launches_on(device_of(TARGETS["H100"]), "triton_fused", "highest", *call, monkeypatch=monkeypatch)
    names = [launch.kernel.fn.__name__ for launch in launches]
    modules = {launch.kernel.fn.__module__ for launch in launches}
    assert not any("general" in module for module in modules), names
    assert ("_chunk_delta_fwd_kernel" in names) != kept


@pytest.mark.parametrize(
    "sizes",
    [
        {"form": "head", "V": 192},
        {"form": "none", "K": 256, "V": 512},
        {"form": "constant"},
    ],
    ids=str,
)
def test_gradients_of_states_of_delta_rules_take_hoppers_kernels(sizes, monkeypatch):
    """The general kernels compute the other gradients alone."""
    call = delta_backward(**{**TRAINING, **sizes}, kept=False)
    launches = launches_on(device_of(TARGETS["H100"]), "triton_fused", "highest", *call, monkeypatch=monkeypatch)
    general = {x.kernel.fn.__name__ for x in launches if ".general." in x.kernel.fn.__module__}
    assert general == {"_values_kernel", "_keys_kernel"}


@pytest.mark.parametrize("backend", ["triton_fused", "parallel_scan"])
@pytest.mark.parametrize("form", ["none", "head", "key"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_of_delta_rules_have_64_keys_on_hopper(backend, form, dtype, monkeypatch):
    """Checks launch parameters: the assembler of Triton 3.6 and 3.7 leaves descriptors of narrower tiles out."""
    for describe, K in itertools.product((delta_forward, delta_backward), (1, 19, 32, 40, 128, 256)):
        call = describe(B=1, T=2048, H=1, K=K, V=40, form=form, dtype=dtype)
        launches = launches_on(device_of(TARGETS["H100"]), backend, "highest", *call, monkeypatch=monkeypatch)
        general = [
            each for each in launches if each.kernel.fn.__module__.startswith("gla_triton_kernels.delta.general")
        ]
        assert all(each.arguments["BK"] >= 64 for each in general)
        assert all(each.arguments["BV"] >= 64 for each in general if each.kernel.fn.__name__ == "_values_kernel")
        assert general or (dtype == torch.bfloat16 and 32 < K <= (128 if form == "key" else 256))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12))
def test_machine_code_of_random_calls_is_whole(seed, monkeypatch, tmp_path):
    """Draws widths, dtypes and gates, as an assembler may be wrong for shapes that no list names."""
    draw = random.Random(seed)
    describe = draw.choice([forward, backward, delta_forward, delta_backward])
    K, V = draw.choice([8, 24, 40, 64, 96, 128, 200, 256]), draw.choice([8, 24, 64, 112, 128, 200, 256, 320])
    places = [{"B": 1, "T": 2048, "H": 2}, TRAINING, {"B": 1, "T": 65536, "H": 2}, SERVING]
    sizes = {**draw.choice(places), "K": K, "V": V, "R": draw.choice([1, 1, 3])}
    sizes |= {"form": draw.choice(["key", "key", "head", "constant", "none"])}
    sizes |= {"dtype": draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])}
    backend = draw.choice(["triton_fused", "parallel_scan"])
    place = device_of(TARGETS["H100"])
    for launch in launches_on(place, backend, "highest", *describe(**sizes), monkeypatch=monkeypatch):
        asm = compiled_by(launch).asm
        named = (launch.kernel.fn.__name__, backend, sizes)
        assert not has_dropped_products(asm, tmp_path), named
        assert not has_wrong_descriptors(asm, tmp_path), named


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("target", ["A100", "H100"])
def test_states_of_mamba2_are_read_and_written_16_bytes_at_a_time(target, v_first, monkeypatch, tmp_path):
    """A thread holds 32 numbers of a state. With 72 registers, a multiprocessor has 112 KiB of states on their way."""
    op, *arguments = ssd_step(B=64, P=100, H=1, R=128, V=64)
    arguments[3] = arguments[3] if v_first else arguments[3].contiguous()
    place = device_of(TARGETS[target])
    (launch,) = launches_on(place, "triton_fused", "highest", op, *arguments, monkeypatch=monkeypatch)
    compiled = compiled_by(launch)
    for access in ("ld", "st"):
        assert len(re.findall(rf"{access}\.global\.v4\.b32", compiled.asm["ptx"])) == 8
    assert usage(compiled.asm, tmp_path)[0] <= 72


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("backward, in segments", 64),
        ("backward, wide", 48),
        ("backward, K = 128, V = 256", 48),
        ("backward, K = 128, V = 256, packed", 96),
        ("backward, K = 128, V = 192", 48),
        ("backward, per head", 80),
    ],
)
def test_gradients_spill_little(call, most, monkeypatch, tmp_path):
    """Checks the bytes of stack: spilled descriptors of tiles took 8 to 14 % of the time of these kernels."""
    stacks = {
        launch.kernel.fn.__name__: usage(compiled_by(launch).asm, tmp_path)[1]
        for launch in launches_of(call, TARGETS["H100"], monkeypatch)
    }
    stacks.pop("_pairs_kernel", None)  # nearly all chunks are mild, so it has little to do
    assert max(stacks.values()) <= most, stacks


@pytest.mark.thorough
@pytest.mark.parametrize(
    "call",
    [
        *("delta rule", "delta rule, per head", "delta rule, K = 96, V = 192", "delta rule, wide keys"),
        *("delta rule, few heads, per head", "delta rule, pool"),
        *("delta rule backward", "delta rule backward, per head", "delta rule backward, packed"),
        "delta rule backward, wide keys",
    ],
)
def test_products_are_under_way_together(call, monkeypatch, tmp_path):
    """Checks notes of the assembler: with too few registers it waits after each product of a warpgroup."""
    launches = launches_of(call, TARGETS["H100"], monkeypatch)
    assert any(launch.kernel.fn.__module__.startswith("gla_triton_kernels.delta.sm90") for launch in launches)
    for launch in launches:
        path = tmp_path / "kernel.ptx"
        path.write_text(compiled_by(launch).asm["ptx"])
        command = [tool("ptxas"), "-v", "--gpu-name=sm_90a", path, "-o", tmp_path / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "registers" in said
        assert not re.search(r"C75(11|12)", said), said
