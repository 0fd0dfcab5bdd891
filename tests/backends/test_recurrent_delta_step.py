"""The kernels of one and of several tokens of a delta rule, and of prompts in a pool, against the float64 oracle."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import check, expected, projected, run
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import arguments
from gla_core.workloads.named import Workload
from tests.grid import grid
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

STEP, STEPS, REPLAY, POOL = (
    "recurrent_delta_step",
    "recurrent_delta_steps",
    "recurrent_delta_replay",
    "chunk_delta_pool",
)
TOKEN = {"B": 3, "H": 1, "R": 2, "K": 20, "V": 12, "pool": 5, "gate_dtype": torch.float32}
SIZES = {
    STEP: {**TOKEN, "rows": (4, -1, 1)},
    STEPS: {**TOKEN, "T": 2, "slots": ((4, 1), (-1, 2), (3, -1))},
    REPLAY: {**TOKEN, "T": 2, "L": 4, "slots": (4, -1, 1), "ring_start": (3, 0, 1), "num_accepted": (2, 1, 0)},
    POOL: {**TOKEN, "lengths": (66, 0, 130), "leading": 2, "padding": 3, "pool": 9, "read_slots": (3, 4, -1)},
}
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def inputs(op, device, **sizes):
    """Returns the arguments of a call by their public names. A row whose slot is -1 is skipped."""
    return arguments(Workload("", op, frozenset(), {**SIZES[op], **sizes}), device=device)


def projections(op, device, gate, **sizes):
    """Returns the arguments of a call with what a layer projects, and those that the oracle takes."""
    return projected(sizes["dtype"], gate, inputs(op, device, **sizes))


@pytest.mark.parametrize("op", [STEP, STEPS, REPLAY])
@pytest.mark.parametrize(
    ("gate", "sizes"),
    [
        ("softplus", {"dtype": HALF, "gate_dtype": HALF}),
        ("bounded", {"dtype": torch.float32}),
        ("bounded", {"dtype": HALF, "gate_form": "head"}),
        ("softplus", {"dtype": torch.float32, "gate_form": "constant"}),
        (None, {"dtype": HALF, "gates": "none", "R": 1, "K": 32}),
        *[
            pytest.param(gate, sizes, marks=pytest.mark.thorough)
            for gate in ("softplus", "bounded")
            for sizes in grid(dtype=DTYPES, gate_form=["key", "head", "constant"], R=[1, 3], K=7, V=40)
        ],
    ],
    ids=str,
)
def test_what_layers_project(device, op, gate, sizes):
    x, wanted = projections(op, device, gate, **sizes)
    ref, out = expected(op, wanted), run(op, x, "triton_fused")
    assert out["o"].dtype == x["q"].dtype
    for name, y in ref.results.items():
        at = ref.written.get(name, ...)
        assert relative_error((x if name in ref.written else out)[name][at], y[at]) <= 2 * FORWARD[x["q"].dtype], name


def test_parameters_of_gates_may_be_left_out_or_belong_to_heads(device):
    x, _ = projections(STEP, device, "softplus", dtype=HALF)
    _, A_log, dt_bias = x["gate"]
    bias, zeros = dt_bias[:, 0].contiguous(), torch.zeros_like(A_log)
    for pair in (((None, None), (zeros, zeros)), ((A_log, bias), (A_log, bias[:, None].expand_as(dt_bias)))):
        calls = [{**x, "gate": ("softplus", *each)} for each in pair]
        for a, b in zip(*(gla.recurrent_delta_step(**y, backend="triton_fused") for y in calls), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_infinite_logits_open_and_close_gates(device, gate):
    """They do even if exp(A_log) is 0; and NaN is not hidden."""
    x, _ = projections(STEP, device, gate, dtype=torch.float32)
    x["gate"][1][1] = -torch.inf
    x["g"][0, : 2 if gate == "softplus" else 1, 0], x["g"][0, :, 1] = torch.inf, -torch.inf
    results = [gla.recurrent_delta_step(**x, backend=backend) for backend in ("triton_fused", "reference")]
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) <= FORWARD[torch.float32]
    x["g"][0, 0, 5] = torch.nan
    assert gla.recurrent_delta_step(**x, backend="triton_fused").o[0, 0].isnan().all()


@pytest.mark.parametrize("op", [STEP, STEPS, REPLAY])
def test_an_empty_batch(device, op):
    x, _ = projections(op, device, "softplus", dtype=HALF)
    per_row = ("q", "k", "v", "g", "beta", "slots", "ring_start", "num_accepted")
    x |= {name: x[name][:0] for name in per_row if x.get(name) is not None}
    assert len(run(op, x, "triton_fused")["o"]) == 0


SNAPSHOTS = {"has_state": (1, 1, 0), "checkpoint_offsets": (64, 0, 128), "checkpoint_slots": (0, 1, 2)}


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("triton_fused", {"write_slots": (3, 7, 6), **SNAPSHOTS}),
        ("triton_fused", {"pool_dtype": torch.bfloat16, "gate_form": "head"}),
        ("parallel_scan", {"write_slots": (5, 7, 6), "gates": "none"}),  # sequences are cut into segments
        *[
            pytest.param("triton_fused", sizes, marks=pytest.mark.thorough)
            for sizes in grid(gate_form=["key", "constant"], dtype=DTYPES, R=[1, 3], write_slots=[None, (5, 7, 6)])
        ],
    ],
    ids=str,
)
@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_prompts_whose_states_are_in_a_pool(device, backend, sizes, swapped):
    x = inputs(POOL, device, **{"dtype": HALF, **sizes})
    x["has_state"] = None if x["has_state"] is None else x["has_state"].bool()
    x["pool"] = x["pool"].mT.contiguous().mT if swapped else x["pool"]
    errors = []

    def measure(actual, reference, budget):
        errors.extend((relative_error(actual[name], y), budget) for name, y in reference.items())

    check(POOL, x, backend, measure)
    assert len(errors) == 2
    assert all(error <= budget for error, budget in errors), errors
