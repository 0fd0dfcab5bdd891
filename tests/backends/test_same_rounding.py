"""Kernels for packed sequences round the same sums as kernels for batches, so that results have the same bits.

The compiler fuses a sum and one of its products to an fma, which does not round the product. If both terms of a sum
are products, it chooses one, and it sees only products in the block of instructions of the sum. Kernels for packed
sequences have more branches, so it may choose another product there. The test compiles both kernels for GPUs that are
not here, and compares which terms of each fma are products.

K, V key and value width
"""

import itertools
import re
from collections import Counter

import pytest

from tests.backends.prepared_calls import launches_on
from tests.backends.test_offsets import backward, forward
from tests.backends.test_targets import FLOAT16, FLOAT32, TARGETS, compiled_by, device_of

GPUS = ("H100", "A100")
CALLS = {
    "K = V = 64": {"K": 64, "V": 64},
    "K = V = 128": {},
    "V = 256": {"V": 256},
    "K = 256, V = 512": {"K": 256, "V": 512},
    "per head": {"form": "head"},
    "constant": {"form": "constant"},
    "no gates": {"form": "none"},
    "Mamba-2": {"form": "head", "H": 1, "R": 16, "V": 64},
    "grouped": {"G": 4},
    "float16": FLOAT16,
    "TF32": FLOAT32,
    "float32": FLOAT32,
}
SAMPLE = {("backward", "K = V = 64", "H100")}
"""The calls that `make test` compiles; `make targets` compiles all."""


def cases():
    for describe, call, gpu in itertools.product((forward, backward), CALLS, GPUS):
        marks = [] if (describe.__name__, call, gpu) in SAMPLE else [pytest.mark.thorough]
        yield pytest.param(describe, call, gpu, marks=marks, id=f"{describe.__name__}, {call}, {gpu}")


@pytest.mark.parametrize(("describe", "call", "gpu"), list(cases()))
def test_packed_and_batch(describe, call, gpu, monkeypatch):
    device, precision = device_of(TARGETS[gpu]), "high" if call == "TF32" else "highest"

    def fmas_of(**sizes):
        args = describe(**{"B": 1, "T": 4096, "H": 4} | CALLS[call] | sizes)
        launches = launches_on(device, "parallel_scan", precision, *args, monkeypatch=monkeypatch, batch_invariant=64)
        return {launch.kernel.fn.__name__: fmas(compiled_by(launch).asm["ptx"]) for launch in launches}

    batch, packed = fmas_of(packed=False), fmas_of(packed=True)
    assert batch == {name: packed[name] for name in batch}  # more kernels lay out packed sequences


def test_blocks_of_gradients_of_states(monkeypatch):
    """Checks that results do not depend on the size of blocks, which depends on the number of heads."""

    def fmas_of(**sizes):
        args = backward(K=128, T=4096, **sizes)
        launches = launches_on(device_of(TARGETS["H100"]), "triton_fused", "highest", *args, monkeypatch=monkeypatch)
        launch = next(launch for launch in launches if launch.kernel.fn.__name__ == "_state_kernel")
        counts = fmas(compiled_by(launch).asm["ptx"])
        per_gate_warpgroup = {kind: number / launch.arguments["TURNS"] for kind, number in counts.items()}
        return launch.arguments["TILES"], per_gate_warpgroup

    counts = [fmas_of(B=1, H=2, V=256), fmas_of(B=16, H=16, V=256), fmas_of(B=16, H=16, V=192)]
    assert [tiles for tiles, _ in counts] == [1, 2, 3]
    assert counts[0][1] == counts[1][1] == counts[2][1]


def fmas(ptx):
    """Counts the fmas of a kernel by the instructions that compute their terms."""
    lines = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z0-9_.]+)\s+(%\w+), (.*);", ptx, re.MULTILINE)
    instructions = {result: operation.split(".")[0] for operation, result, _ in lines}

    def kind(term):
        return kind_of_instruction if (kind_of_instruction := instructions.get(term)) in ("mul", "neg") else "other"

    counts = Counter()
    for operation, _, operands in lines:
        if operation.startswith("fma.rn.f"):
            *factors, added = map(kind, operands.split(", "))
            counts[*sorted(factors), added] += 1
    return counts
