"""The kernels of delta rules against the float64 oracle: values and gradients of any width, length, gate and layout."""

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import gradients, oracle_gradients, oracle_results
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.backend import CHUNK
from gla_core.workloads.inputs import delta_inputs
from gla_triton_kernels.delta import plan
from tests.grid import grid, thorough
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

OP = "chunk_delta_fwd"
NAMES = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
SIZES = {"B": 1, "T": CHUNK + 6, "H": 1, "K": 20, "V": 35}
SEGMENT = CHUNK
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def on_a_gpu(cases):
    """Returns the cases as parameters of tests that need a GPU, which has kernels for other widths and lengths."""
    return [pytest.param(x, marks=pytest.mark.gpu) for x in cases]


def arguments(device, gate_dtype=torch.float32, **sizes):
    """Returns the arguments of `chunk_delta` by name."""
    x = delta_inputs(device=device, gate_dtype=gate_dtype, **{**SIZES, **sizes})
    return {name: getattr(x, name) for name in NAMES}  # made for this call, so that tests may change them


def check_values(x, backend="triton_fused", budget=None):
    """Compares the outputs and the final state with those of the oracle, and returns them."""
    o, state = gla.chunk_delta(**x, output_final_state=True, backend=backend)
    ref = oracle_results(OP, x)
    for y, expected in ((o, ref["o"]), (state, ref["state"])):
        assert relative_error(y, expected) <= (budget or FORWARD[x["q"].dtype])
        assert y.is_contiguous()
    return o, state


def check_gradients(x, backend="triton_fused"):
    """Compares the gradients with those of the oracle, and returns them."""
    actual, expected = gradients(OP, x, backend), oracle_gradients(OP, x)
    assert actual.keys() == expected.keys()
    for name, y in actual.items():
        assert relative_error(y, expected[name]) <= GRADIENT[x["q"].dtype], name
    return actual


@pytest.mark.parametrize(
    "sizes",
    [
        *grid(gates=["none", "-inf"], dtype=HALF, R=2, initial_state=True),
        *grid(gates="-inf", gate_form=["head", "constant"], dtype=HALF, R=2),
        {"gates": "mild", "dtype": torch.float32, "R": 2},
        {"lengths": (66, 0, 1), "padding": 12, "gates": "-inf", "dtype": HALF, "initial_state": True},
        *thorough(grid(gates=["none", "mild", "-inf"], gate_form=["key", "head"], dtype=DTYPES, initial_state=True)),
        *thorough(grid(lengths=(66, 0, 1, 64), padding=12, gate_form=["key", "head", "constant"], dtype=DTYPES)),
        *thorough(grid(K=[1, 40, 256], V=[1, 136], dtype=DTYPES, gate_form=["key", "head"], gates="-inf")),
        *thorough(grid(T=[1, 63, 64, 65, 200], gates=["strong", "extreme"], dtype=DTYPES, initial_state=True)),
    ],
    ids=str,
)
def test_values_and_gradients(device, sizes):
    x = arguments(device, **sizes)
    check_values(x)
    check_gradients(x)


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 2 * SEGMENT + 3, "initial_state": True},
        {"lengths": (2 * SEGMENT + 3, 0, 10), "padding": 7, "gates": "-inf", "initial_state": True},
        *thorough(grid(T=5 * SEGMENT, gates=["none", "-inf"], gate_form=["key", "head"], R=2, dtype=DTYPES)),
        *thorough(grid(lengths=(3, SEGMENT, 2 * SEGMENT + 3, 0), gate_form=["key", "constant"], dtype=DTYPES)),
        *on_a_gpu(grid(T=20 * SEGMENT + 9, K=[64, 128], V=72, gates=["none", "-inf"], R=2, initial_state=True)),
        *on_a_gpu(grid(T=20 * SEGMENT, K=96, V=192, gate_form=["key", "head", "constant"], B=2)),
        *on_a_gpu(grid(lengths=(600, 0, 3, 900), padding=9, K=64, V=64, gate_form=["key", "head"], gates="strong")),
    ],
    ids=str,
)
def test_segments(device, sizes, change_plans):
    """A scan with dense transitions computes the states that enter segments, and their gradients."""
    change_plans("LEAST_CHUNKS", 1)
    change_plans("LEAST_SEGMENTS", 2)
    x = arguments(device, **{"dtype": HALF, **sizes})
    check_values(x, "parallel_scan")
    check_gradients(x, "parallel_scan")


@pytest.mark.parametrize("gate_form", ["key", "head"])
def test_closed_gates_have_the_gradient_0(device, gate_form):
    x = arguments(device, gates="-inf", gate_form=gate_form, dtype=HALF, initial_state=True)
    x["g"][:, 7] = -torch.inf
    closed = x["g"] == -torch.inf
    assert (check_gradients(x)["dg"][closed] == 0).all()


def test_a_backward_without_checkpoints_computes_the_states(device):
    x = arguments(device, dtype=HALF, initial_state=True)
    ones = [gradients(OP, x, "triton_fused", **options) for options in ({"checkpoint_every": CHUNK}, {})]
    for name, y in ones[0].items():
        assert torch.equal(y, ones[1][name]), name


def test_correlated_keys_keep_the_precision_of_float16(device):
    """A state explains most of each value, which is then subtracted: bfloat16 operands would exceed the budget."""
    x = arguments(device, T=2 * CHUNK, K=64, dtype=HALF)
    k = 0.7 * x["k"][:, :1].float() + 0.3 * x["k"].float()
    x["k"] = torch.nn.functional.normalize(k, dim=-1).to(HALF)
    check_values(x)
    check_gradients(x)


def test_values_of_any_size(device):
    """Operands are float16 in units, and the first tokens of a sequence may be smaller than later ones."""
    x = arguments(device, T=2 * CHUNK, dtype=torch.float16)
    x["v"] *= 2.0**12
    x["v"][:, :CHUNK] *= 2.0**-20
    o, _ = check_values(x)
    ref = oracle_results(OP, x)["o"]
    assert relative_error(o[:, :CHUNK], ref[:, :CHUNK]) <= FORWARD[torch.float16]


def test_queries_and_keys_of_any_size(device):
    x = arguments(device, dtype=HALF)
    x["k"] *= 2.0**-6
    x["q"] *= 2.0**-6
    x["beta"] *= 2.0**12
    check_values(x)


@pytest.mark.parametrize("gate_form", ["key", "head"])
def test_a_sequence_in_two_calls_has_the_same_bits(device, gate_form):
    x = arguments(device, T=2 * CHUNK + 9, dtype=HALF, gate_form=gate_form, initial_state=True)
    whole, state = gla.chunk_delta(**x, output_final_state=True, backend="triton_fused")
    parts, before = [], x["initial_state"]
    for rows in (slice(None, CHUNK), slice(CHUNK, None)):
        part = {name: None if y is None else y[:, rows] for name, y in x.items()}
        o, before = gla.chunk_delta(
            **{**part, "initial_state": before}, output_final_state=True, backend="triton_fused"
        )
        parts.append(o)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(before, state)


def test_no_more_keys_than_fit_on_chip(device):
    x = arguments(device, K=plan.MOST_KEYS + 1, T=3)
    with pytest.raises(gla.NoBackendError, match=f"K is {plan.MOST_KEYS + 1}"):
        gla.chunk_delta(**x, backend="triton_fused")
