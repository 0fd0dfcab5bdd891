"""Hopper's kernels of chunk_gla, emulated on a CPU, against the oracle: see tests/gluon_on_cpu.py."""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.tensors import ceil_div, checkpoint_dtype, log_gates
from gla_core.workloads.inputs import gla_inputs

pytest.importorskip("triton")
from gla_triton_kernels.chunks.entering import launch_entering
from gla_triton_kernels.chunks.kernel import ForwardPlan, GradientParameters, Parameters, SegmentPlan
from gla_triton_kernels.chunks.scan import launch_scan
from gla_triton_kernels.chunks.segments import Recurrence, cut, whole
from gla_triton_kernels.gla.shared.skip import launch_skip_gradients
from gla_triton_kernels.gla.sm90 import half, warpgroup_columns
from gla_triton_kernels.gla.tensors import BackwardTensors, Tensors
from tests import gluon_on_cpu
from tests.backends.pools import PROMPTS, check_slots, pooled
from tests.backends.test_random_cases import has_few_bits

BFLOAT16 = torch.bfloat16
GROUPS = (
    {"R": 2, "H": 2, "B": 2, "initial_state": True},
    {"R": 3, "H": 2, "K": 128, "V": 128, "gates": "-inf"},
    {"R": 2, "H": 2, "normalizer": 16, "gate_dtype": BFLOAT16},
    {"R": 3, "K": 72, "V": 40, "gates": "-inf", "dtype": torch.float16, "initial_state": True},
    {"R": 2, "H": 2, "B": 2, "K": 40, "V": 128, "dtype": torch.float32},
    {"R": 2, "H": 2, "lengths": (0, 65, 1, 0, 130, 3), "padding": 10, "initial_state": True, "gates": "-inf"},
    {"R": 3, "lengths": (65, 0, 70), "dtype": torch.float16},
    {"R": 2, "H": 2, "lengths": (65, 0, 70), "gates": "strong", "dtype": torch.float32},
)
"""Sizes of calls whose value heads share heads of q and k."""
WIDE_HALF = tuple(
    {"gate_form": "key", "dtype": dtype, **sizes}
    for dtype in (torch.float16, torch.float32)
    for sizes in (
        {"K": 256, "V": 200, "T": 100, "initial_state": True},  # two slices
        {"K": 136, "V": 136, "gates": "-inf", "G": 2},  # the last part of a slice beyond the keys
        {"K": 64, "V": 200, "gates": "strong", "R": 2, "H": 2, "initial_state": True},  # one part
        {"K": 40, "V": 136, "gates": "none", "initial_state": True},
        {"K": 320, "V": 40, "gates": "extreme", "mild": slice(64, 200), "T": 100, "dstate": False},
        {"K": 72, "V": 200, "normalizer": 16, "gate_dtype": torch.float32, "B": 2, "T": 70, "blocks": (64, 192)},
        {"lengths": (0, 65, 1, 0, 130, 3), "padding": 10, "K": 200, "V": 72, "initial_state": True},
        {"lengths": (65, 0, 70), "K": 64, "V": 256, "R": 3, "gates": "-inf", "blocks": (64, 192)},
        {"K": 64, "V": 136, "T": 500, "blocks": (64, 64)},  # more chunks than pipeline stages
    )
)
"""Sizes of calls whose gradients backward_wide.py computes in float16."""
PACKED = {"lengths": (0, 65, 1, 0, 130, 3), "padding": 10, "initial_state": True}
pytestmark = pytest.mark.kernels  # Triton's kernels that sort packed segments are interpreted


thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


def every_other_thorough(cases):
    """Returns the cases as parameters of tests of which every second one is thorough."""
    return [thorough(x) if i % 2 else pytest.param(x) for i, x in enumerate(cases)]


def other_dtypes_thinned(cases):
    """Returns the cases as parameters of tests; of those that are not in bfloat16 two of three are thorough."""
    others = itertools.count()
    return [thorough(x) if isinstance(x, dict) and "dtype" in x and next(others) % 3 else x for x in cases]


def chequered(*values):
    """Returns all combinations of values as parameters of tests; as on a chessboard, every second one is thorough."""
    return [
        pytest.param(*(x for _, x in chosen), marks=pytest.mark.thorough if sum(i for i, _ in chosen) % 2 else ())
        for chosen in itertools.product(*map(enumerate, values))
    ]


class AllAtOnce(NamedTuple):
    """Stands for a kernel that would be interpreted: a function that computes all of its programs."""

    fn: Callable[..., None]
    arg_names: list[str]

    def __getitem__(self, grid):
        return lambda *arguments, num_warps: self.fn(*arguments)


def to_half(x, y, units, cu_seqlens, _b, _t, _h, T, _N, _H, _W, least, C, _D):
    """Computes `_to_half_kernel` of half.py, bit for bit, in less time than its interpretation."""
    if cu_seqlens is None:
        sequences = [(b, 0, T, b * ceil_div(T, C)) for b in range(len(x))]
    else:
        sequences = [(0, a, b, n + a // C) for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))]
    for b, start, end, row in sequences:
        for i, t in enumerate(range(start, end, C)):
            tile = x[b, t : min(t + C, end)]
            most = tile.abs().amax((0, 2))  # [Hx]
            exponents = (torch.frexp(most).exponent - 7).clamp(min=least - 127)
            unit = torch.where(most == 0, 1.0, torch.exp2(exponents.float()))
            y[b, t : min(t + C, end)], units[row + i] = tile / unit[:, None], unit


@pytest.fixture(scope="module")
def kernels():
    forward = "half states shares forward forward_head forward_wide"
    backward = (
        "common_backward pairs operands backward backward_head backward_group log_gates state_gradients backward_wide"
    )
    modules = gluon_on_cpu.load(*forward.split(), *backward.split())
    modules.half._to_half_kernel = AllAtOnce(to_half, half._to_half_kernel.arg_names)
    return modules


FAR_LOGITS = -math.inf, -3000.0, -100.0, 100.0, math.inf


def inputs(normalizer=None, **sizes):
    """Returns random inputs; with a normalizer g holds logits. Rows that belong to no sequence hold NaN.

    With extreme gates, one logit in a hundred is far from 0.
    """
    sizes = {"B": 1, "T": 130, "H": 1, "K": 64, "V": 64, "gate_form": "head", **sizes}
    x = gla_inputs(**{"dtype": BFLOAT16, "gate_dtype": torch.float32, **sizes})
    if normalizer is not None:
        logits = 2 * torch.randn(x.g.shape) + 1
        if sizes.get("gates") == "extreme":
            far = torch.tensor(FAR_LOGITS)[torch.randint(len(FAR_LOGITS), logits.shape)]
            logits = torch.where(torch.rand(logits.shape) < 0.01, far, logits)
        x = dataclasses.replace(x, g=logits.to(x.g.dtype))
    if x.cu_seqlens is not None:
        for y in (x.q, x.k, x.v, x.g):
            if y is not None and y.ndim > 1:
                y[:, int(x.cu_seqlens[-1]) :] = torch.nan
    return x


def with_log_gates(x, normalizer):
    """Returns the inputs with log gates in place of logits, in float64."""
    return x if x.g is None else dataclasses.replace(x, g=log_gates(x.g, normalizer, torch.float64))


def unwritten(*shape, dtype=BFLOAT16):
    return torch.full(shape, torch.nan, dtype=dtype)


def states_of(x, dtype=torch.float32):
    N = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    return unwritten(N, x.v.shape[2], x.k.shape[3], x.v.shape[3], dtype=dtype)


def expected_results(x):
    """Returns the oracle's outputs, final states and checkpoints."""
    return oracle.chunk_gla_with_checkpoints(x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens, 64)


TF32 = 1e-3
"""The allowed error of float32 under the matmul precision "high"."""


def budget(dtype):
    return TF32 if dtype == torch.float32 else FORWARD[dtype]


def gradient_budget(dtype):
    return TF32 if dtype == torch.float32 else GRADIENT[dtype]


def forward_kernel(kernels, x, gate_form="head"):
    """Returns the module that computes the outputs of these inputs."""
    K = x.k.shape[3]
    if gate_form != "key" or (x.g is None and K > 128):
        return kernels.forward_head
    return kernels.forward if K <= 128 else kernels.forward_wide


def check_forward(
    kernels, BV=None, stages=2, programs=None, normalizer=None, factors=None, skips=False, gated=False, **sizes
):
    """Checks outputs; `factors` multiplies q, k and v, which are then not negative, by three numbers.

    With `skips`, v has a factor for each token, and o a term of v without it. With `gated`, o has an output gate.
    """
    x = inputs(normalizer, **sizes)
    if factors is not None:
        x = dataclasses.replace(x, **{n: getattr(x, n).abs() * f for n, f in zip("qkv", factors, strict=True)})
    y = with_log_gates(x, normalizer)
    (B, T, Hq, K), (Hv, V) = x.q.shape, x.v.shape[2:]
    dtype, o, final = x.q.dtype, unwritten(B, T, max(Hq, Hv), V, dtype=x.q.dtype), states_of(x)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens, o, final)
    skip, gate = 0.0, 1.0
    if gated:
        z = 3 * torch.randn(B, T, Hv, 2 * V).to(dtype)[..., :V]
        tensors, gate = tensors._replace(z=z), torch.nn.functional.silu(z.double())
    if skips:
        factor = torch.nn.functional.dropout(torch.rand(B, T, Hv), 0.1)  # 0 for some tokens
        D = torch.randn(Hv, V) if Hv % 2 else torch.randn(Hv)
        tensors = tensors._replace(v_factor=factor, skip=D)
        skip, v = x.v.double() * (D if D.ndim == 2 else D[:, None]), x.v.double() * factor[..., None]
        y = dataclasses.replace(y, v=v)
    expected_o, *expected_states = expected_results(y)
    checkpoints = torch.zeros_like(expected_states[1], dtype=checkpoint_dtype(dtype))
    tensors = tensors._replace(checkpoints=checkpoints)
    segments = whole(B, T, x.cu_seqlens, o)
    columns = warpgroup_columns(K)
    BV = BV or (columns if columns >= V else 2 * columns)
    parameters = Parameters(C=64, BK=64 if K <= 64 else 128, BV=BV, stages=stages, programs=programs)
    gluon_on_cpu.run(segments.launches)
    plan = ForwardPlan(None, parameters)  # pyright: ignore[reportArgumentType]
    kernel = forward_kernel(kernels, x, sizes.get("gate_form"))
    gluon_on_cpu.run(kernel.launch_outputs(plan, tensors, segments, K**-0.5, 64, normalizer))
    if kernel is not kernels.forward_wide:  # a backward leaves out the outputs, and gets the same states
        kept_alone = torch.zeros_like(checkpoints)
        alone = tensors._replace(o=None, skip=None, z=None, final_state=None, checkpoints=kept_alone)
        gluon_on_cpu.run(kernel.launch_outputs(plan, alone, segments, K**-0.5, 64, normalizer))
        assert relative_error(alone.checkpoints, checkpoints) <= (1e-6 if dtype == BFLOAT16 else budget(dtype))
    if skips and x.cu_seqlens is not None:
        skip[:, int(x.cu_seqlens[-1]) :] = 0.0
    expected_o = (expected_o + skip) * gate
    for actual, truth in zip((o, final, checkpoints), (expected_o, *expected_states), strict=True):
        assert relative_error(actual, truth) <= budget(dtype)


@pytest.mark.parametrize("sizes", [{"B": 2, "H": 3}, PACKED | {"K": 200}], ids=str)
def test_conversions_to_float16(sizes):
    x = inputs(dtype=torch.float32, **sizes)
    x.q[:, 64:] *= 1e-30
    x.q[:, :64, 0] = 0
    _, units, (launch,) = half.in_half(Recurrence(x.q, x.v, x.g, None, None), ("left",), x.cu_seqlens)
    converted = launch.arguments["y_ptr"].fill_(torch.nan), units["left_units"].fill_(torch.nan)
    gluon_on_cpu.run([launch])
    expected = [y.clone() for y in converted]
    to_half(*launch.arguments.values())
    assert all(torch.equal(y.view(torch.uint8), z.view(torch.uint8)) for y, z in zip(converted, expected, strict=True))


def test_gates_from_logits_are_accurate(kernels):
    x = torch.linspace(-100, 100, 200_001)
    wanted = torch.nn.functional.logsigmoid(x.double()) / math.log(2)
    error = (kernels.common.log2_sigmoid(x) - wanted).abs()
    assert (error <= torch.maximum(2e-7 * wanted.abs(), torch.tensor(2e-7))).all()


@pytest.mark.parametrize("D", [8, 64, 128])
def test_row_sums(kernels, D):
    """The other tests here add the columns in one operation."""
    x = torch.randn(64, D).as_subclass(gluon_on_cpu.Value)
    assert relative_error(kernels.common.replaced["row_sums"](x), x.double().sum(1)) <= 1e-6


@pytest.mark.parametrize(
    ("sizes", "normalizer", "dtype"),
    chequered([{"gate_form": "key"}, {"gate_dtype": BFLOAT16}, PACKED], [1, 16], [BFLOAT16, torch.float16]),
    ids=str,
)
def test_logits_far_from_zero(kernels, sizes, normalizer, dtype):
    sizes = {"gate_form": "key", "gates": "extreme", "normalizer": normalizer, "dtype": dtype} | sizes
    check_forward(kernels, **sizes)
    check_gradients(kernels, **sizes)
    if dtype == BFLOAT16:
        check_states(kernels, inputs(**sizes), False, normalizer)
        check_states(kernels, inputs(**sizes), True, normalizer)


@pytest.mark.parametrize(
    ("form", "gates", "dtype"),
    chequered(
        ["head", "constant", "key"], ["mild", "strong", "extreme", "-inf"], [BFLOAT16, torch.float16, torch.float32]
    ),
    ids=str,
)
def test_outputs_of_every_gate(kernels, form, gates, dtype):
    check_forward(kernels, gate_form=form, gates=gates, initial_state=True, dtype=dtype)


OUTPUTS = (
    {"gates": "none", "initial_state": True},
    {"K": 128, "V": 128, "B": 2, "H": 2},
    {"K": 40, "V": 200, "stages": 3},
    {"V": 128, "BV": 64},
    {"R": 3},
    {"R": 4, "BV": 128, "K": 128, "V": 40, "gates": "-inf"},  # two value heads in a block
    {"K": 256, "V": 128, "B": 2, "R": 3, "initial_state": True},  # two slices of keys
    thorough({"K": 200, "V": 40, "R": 2, "BV": 128, "gates": "-inf"}),
    PACKED | {"K": 136, "V": 200},
    PACKED | {"K": 256, "V": 64, "R": 2, "BV": 128, "dtype": torch.float16},
    PACKED | {"K": 320, "V": 72, "dtype": torch.float32},  # three slices
    {"K": 512, "V": 64, "gates": "none", "T": 300},
    {"K": 1024, "V": 40, "gate_form": "constant", "normalizer": 2},
    {"G": 3, "H": 2, "B": 2, "initial_state": True},  # query heads that share a state
    {"gate_form": "constant", "G": 2, "H": 2, "K": 200, "V": 72, "dtype": torch.float32, "initial_state": True},
    thorough({"gates": "none", "G": 2, "K": 128, "V": 128}),
    PACKED | {"G": 2, "H": 2, "gates": "-inf", "dtype": torch.float16},
    thorough(PACKED | {"G": 2, "normalizer": 16, "K": 136, "BV": 64}),
    {"skips": True, "R": 2, "BV": 128, "B": 2},
    {"programs": 3, "B": 4, "T": 300, "initial_state": True},  # four jobs of five chunks, by three blocks
    {"programs": 2, "B": 3, "R": 4, "BV": 128, "skips": True, "gated": True, "T": 200},
    {"programs": 4, "B": 5, "K": 256, "V": 128, "dtype": torch.float16},
    {"programs": 3, "B": 4, "T": 200, "gate_form": "key", "initial_state": True, "gates": "strong"},
    {"programs": 2, "B": 3, "K": 128, "V": 72, "gate_form": "key", "dtype": torch.float32},
    thorough({"skips": True, "R": 3, "K": 128, "V": 128, "initial_state": True}),
    PACKED | {"skips": True, "R": 2, "K": 256, "V": 72},
    PACKED | {"skips": True, "dtype": torch.float16, "K": 128},
    {"gated": True, "skips": True, "R": 2, "BV": 128, "B": 2},
    thorough({"gated": True, "R": 3, "K": 128, "V": 72, "initial_state": True}),
    thorough(PACKED | {"gated": True, "skips": True, "R": 2, "K": 256, "V": 72}),
    PACKED | {"gated": True, "dtype": torch.float16, "K": 320, "V": 64},
    {"K": 256, "V": 128, "B": 2, "H": 2, "gate_form": "key", "initial_state": True},
    PACKED | {"K": 200, "V": 40, "gate_form": "key", "gates": "-inf"},
    PACKED | {"K": 256, "V": 64, "gate_form": "key", "dtype": torch.float16, "gates": "strong"},
    thorough({"K": 320, "V": 72, "gate_form": "key", "normalizer": 16, "T": 300}),
    {"K": 320, "V": 72, "gate_form": "key", "dtype": torch.float32, "initial_state": True},
    {"K": 640, "V": 40, "gate_form": "key", "gates": "-inf"},
    PACKED,
    thorough(PACKED | {"R": 2, "BV": 128, "gates": "-inf"}),
    PACKED | {"gate_form": "constant", "K": 128, "V": 72, "padding": 0},
    PACKED | {"gate_form": "key", "K": 128, "V": 128, "gates": "-inf"},
    {"gate_form": "key", "K": 40, "V": 200, "gate_dtype": BFLOAT16},
    {"normalizer": 16, "gate_dtype": BFLOAT16, "initial_state": True},
    {"normalizer": 1, "gate_form": "constant"},
    {"normalizer": 16, "gate_form": "key", "gate_dtype": BFLOAT16, "K": 40, "V": 200},
    thorough(PACKED | {"normalizer": 1, "gate_form": "key"}),
    PACKED | {"normalizer": 2, "R": 2, "BV": 128},
    PACKED | {"gate_form": "key", "K": 128, "V": 128, "dtype": torch.float16},
    PACKED | {"R": 2, "BV": 128, "dtype": torch.float16},
    {"gates": "none", "dtype": torch.float16, "gate_form": "key"},
    {"gates": "none", "dtype": torch.float16},
    PACKED | {"gate_form": "key", "K": 128, "V": 128, "dtype": torch.float32},
    PACKED | {"R": 2, "BV": 128, "dtype": torch.float32},
    {"gates": "none", "dtype": torch.float32, "gate_form": "key", "initial_state": True},
    {"gates": "none", "dtype": torch.float32, "initial_state": True, "B": 2},
    {"dtype": torch.float32, "B": 2, "H": 2, "R": 2, "K": 40, "V": 200, "BV": 128},
    {"dtype": torch.float32, "B": 2, "H": 2, "K": 40, "V": 200, "gate_form": "key"},
    *every_other_thorough([{"gate_form": "key"} | sizes for sizes in GROUPS]),
    thorough({"gate_form": "key", "R": 3, "K": 40, "V": 200}),
    {"gate_form": "key", "G": 2, "H": 2, "B": 2, "initial_state": True},
    {"gate_form": "key", "G": 2, "gates": "none", "initial_state": True},
    {"gate_form": "key", "G": 2, "H": 2, "K": 40, "V": 200, "dtype": torch.float32, "initial_state": True},
    PACKED | {"gate_form": "key", "G": 3, "gates": "-inf"},
    PACKED | {"gate_form": "key", "G": 2, "H": 2, "dtype": torch.float16},
    thorough({"gate_form": "key", "K": 200, "V": 72, "initial_state": True}),
    {"gate_form": "key", "R": 2, "H": 2, "K": 256, "V": 40, "gates": "-inf", "initial_state": True},
    thorough({"gate_form": "key", "G": 2, "H": 2, "K": 136, "V": 72, "initial_state": True}),
    PACKED | {"gate_form": "key", "R": 3, "H": 2, "K": 136, "gates": "strong"},
    thorough(PACKED | {"gate_form": "key", "G": 2, "K": 136, "normalizer": 16}),
)


@pytest.mark.parametrize("sizes", other_dtypes_thinned(OUTPUTS), ids=str)
def test_outputs(kernels, sizes):
    check_forward(kernels, **sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"R": 4, "heads": 2, "T": 200, "B": 2, "initial_state": True},  # four jobs of two heads, by two blocks
        {"R": 3, "heads": 3, "T": 300, "K": 128, "V": 128, "gates": "strong"},
    ],
    ids=str,
)
def test_gradients_of_shared_chunks(kernels, sizes, monkeypatch):
    monkeypatch.setattr("gla_triton_kernels.gla.sm90.SHARES_START", -100)
    check_gradients(kernels, **sizes)


@pytest.mark.parametrize("form", ["head", "key"])
@pytest.mark.parametrize("factors", [(1e-6, 1e4, 1e4), (1e6, 1e-6, 1e9), (1e-4, 1e-4, 1e-6)], ids=str)
def test_outputs_of_float32_in_range(kernels, form, factors):
    check_forward(kernels, dtype=torch.float32, gate_form=form, factors=factors, T=300)


@pytest.mark.parametrize("form", ["head", "key"])
@pytest.mark.parametrize(
    ("factors", "sizes"),
    [
        ((1e-3, 100, 100), {}),  # states above 65504
        ((300, 300, 1e-3), {"gates": "strong"}),  # scores above 65504
        ((300, 300, 1e-3), {"normalizer": 5}),  # and keys decayed from the middle of a chunk
        ((1, 3e-3, 3e-4), {}),  # states below the normal numbers of float16
    ],
    ids=str,
)
def test_outputs_of_float16_in_range(kernels, form, factors, sizes):
    check_forward(kernels, dtype=torch.float16, gate_form=form, factors=factors, T=300, **sizes)


def check_pool(kernels, length=None, pool_dtype=torch.float32, v_first=False, **sizes):
    """Checks outputs and a pool; with a length, sequences are cut."""
    x = inputs(**{**PROMPTS, **sizes})
    (B, T, Hv, V), K = x.v.shape, x.k.shape[3]
    pool, slots, (o, states) = pooled(oracle.chunk_gla_pool, x, pool_dtype, v_first)
    actual, before = unwritten(B, T, max(x.q.shape[2], Hv), V, dtype=x.q.dtype), pool.clone()
    parameters = Parameters(C=64, BK=64 if K <= 64 else 128, BV=64 if V <= 64 else 128, stages=2)
    tensors = Tensors(x.q, x.k, x.v, x.g, None, x.cu_seqlens, actual, None, pool, pool=pool)
    plan = ForwardPlan(None, parameters)  # pyright: ignore[reportArgumentType]
    if length is None:
        segments = whole(B, T, x.cu_seqlens, actual, slots)
        gluon_on_cpu.run(segments.launches)
    else:
        segments, S, D = built_states(kernels, x, False, None, length, actual, slots)
        plan = ForwardPlan(None, parameters, SegmentPlan(length, length, None, parameters, False))  # pyright: ignore
        recurrence = Recurrence(x.k, x.v, x.g, pool, pool, in_slots=True)
        gluon_on_cpu.run(launch_scan(plan.segments.overlap, recurrence, segments, S, D, S))
        tensors = tensors._replace(entering=S)
    kernel = forward_kernel(kernels, x, sizes.get("gate_form"))
    gluon_on_cpu.run(kernel.launch_outputs(plan, tensors, segments, K**-0.5, None))
    assert relative_error(actual, o) <= budget(x.q.dtype)
    check_slots(pool, before, states, max(budget(x.q.dtype), budget(pool_dtype)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (None, {}),
        (None, {"gate_form": "key", "K": 128, "V": 128, "pool_dtype": torch.float16, "v_first": True}),
        (None, {"R": 2, "K": 128, "V": 40, "pool_dtype": BFLOAT16, "v_first": True, "gates": "-inf"}),
        (None, {"dtype": torch.float32, "gate_form": "key"}),
        (64, {"gate_form": "key", "H": 2, "K": 72, "V": 40, "pool_dtype": BFLOAT16}),
        (None, {"gate_form": "key", "H": 2, "R": 2, "v_first": True}),
        (None, {"gate_form": "key", "H": 2, "R": 2, "K": 136}),
        (64, {"gate_form": "key", "H": 2, "R": 3, "gates": "-inf"}),
        (64, {"gate_form": "key", "H": 2, "R": 2, "K": 136, "v_first": True}),
        (64, {"gates": "none", "v_first": True}),
        (64, {"G": 2, "K": 72}),  # the scan writes the states that query heads share
        (64, {"gate_form": "key", "H": 2, "G": 3}),
        (64, {"gate_form": "key", "G": 2, "K": 136, "dtype": torch.float16}),
        (64, {"dtype": torch.float16, "gate_form": "constant"}),
    ],
    ids=str,
)
def test_states_in_a_pool(kernels, sizes, length):
    check_pool(kernels, length, **sizes)


def check_gradients(
    kernels,
    dstate=True,
    normalizer=None,
    factors=None,
    scale=None,
    blocks=None,
    mild=None,
    heads=None,
    skips=False,
    length=None,
    **sizes,
):
    """Checks gradients; with `skips`, v has a factor for each token, and o a term of v without it.

    Args:
        skips: "channel" means that this term has a number for each channel, which a further kernel adds.
        heads: value heads of a block of backward_group.py; None stands for the other kernels.
        length: tokens of a segment; None leaves sequences whole.
        factors: four numbers that multiply q, k, v and do, which are then not negative.
        blocks: keys and values of a block.
        mild: slice of the keys whose gates are divided by 1,000.
    """
    x = inputs(normalizer, **sizes)
    if mild is not None:
        x.g[..., mild] /= 1000
    if factors is not None:
        x = dataclasses.replace(x, **{n: getattr(x, n).abs() * f for n, f in zip("qkv", factors[:3], strict=True)})
    (B, T, Hq, K), (H, (Hv, V)) = x.q.shape, (x.k.shape[2], x.v.shape[2:])
    Ho, blocks = max(Hq, Hv), blocks or tuple(64 if width <= 64 else 128 for width in (K, V))
    dtype = x.q.dtype
    do = torch.randn(B, T, Ho, V).to(dtype)
    if factors is not None:
        do = do.abs() * factors[3]
    end = T if x.cu_seqlens is None else int(x.cu_seqlens[-1])
    do[:, end:] = torch.nan
    leaving = torch.randn_like(states_of(x)) if dstate else None
    gate_shape = {"constant": (Ho,), "head": (B, T, Ho), "key": (B, T, Ho, K)}[sizes.get("gate_form", "head")]
    dg = None if x.g is None else unwritten(*gate_shape, dtype=torch.float32)
    dinitial = None if x.initial_state is None else unwritten(len(x.initial_state), Ho, K, V, dtype=torch.float32)
    keys = Ho if heads is None else H
    results = *(unwritten(B, T, *size, dtype=dtype) for size in ((keys, K), (keys, K), (Ho, V))), dg, dinitial
    per_channel = skips == "channel"
    factor, skip = (torch.rand(B, T, Hv), torch.randn((Hv, V) if per_channel else Hv)) if skips else (None, None)
    y = x if factor is None else dataclasses.replace(x, v=x.v * factor[..., None])
    *_, checkpoints = expected_results(with_log_gates(y, normalizer))
    checkpoints = checkpoints.to(checkpoint_dtype(dtype))
    if factor is not None:
        factor[:, end:] = torch.nan
    terms = (B, T, Hv), (Hv, V) if per_channel else (B, T, Hv)  # of dfactor and dskip
    more = (factor, skip, *(unwritten(*shape, dtype=torch.float32) if skips else None for shape in terms))
    tensors = (x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens, checkpoints, do, leaving, *results)
    tensors = BackwardTensors(*tensors, *more)
    tensors = tensors._replace(skip=None, dskip=None) if per_channel else tensors
    parameters = GradientParameters(BK=blocks[0], BV=blocks[1], warps=4, programs=2, heads=heads or 1)
    scale = K**-0.5 if scale is None else scale
    if length is None:
        segments = whole(B, T, x.cu_seqlens)
        leaving_segments, launches, filled = leaving, segments.launches, tensors
    else:
        states = SimpleNamespace(load=lambda: kernels.states.launch_states)
        columns = Parameters(C=64, BK=64, BV=64 if V <= 64 else 128, stages=2)
        plan = SegmentPlan(length, length, states, columns, False)  # pyright: ignore[reportArgumentType]
        recurrence = Recurrence(x.q, do, x.g, leaving, dinitial, scale, True, normalizer)
        skip_first = tensors.last_leave_none
        leaving_segments, segments, launches = launch_entering(
            plan, recurrence, Hv, x.cu_seqlens, skip_first=skip_first
        )
        filled = tensors._replace(dinitial_state=None)  # the scan fills it
    gluon_on_cpu.run(launches)
    if heads is not None:
        kernel = kernels.backward_group
    elif sizes.get("gate_form") != "key":
        kernel = kernels.backward_head
    elif V > 128 or (K > 128 and dtype != BFLOAT16):
        kernel = kernels.backward_wide
    else:
        kernel = kernels.backward
    launches = kernel.launch_gradients(parameters, filled, checkpoints, leaving_segments, segments, scale, normalizer)
    gluon_on_cpu.run(launches)
    if per_channel:
        gluon_on_cpu.run(launch_skip_gradients(x.v, skip, x.cu_seqlens, do, results[2], more[3]))

    names = [name for name in ("q", "k", "v", "g", "initial_state") if getattr(x, name) is not None]
    leaves = {name: getattr(x, name).double().requires_grad_() for name in names}
    if x.g is not None and x.g.ndim == 1:  # its gradient is a sum over tokens, and errors are relative to the terms
        leaves["g"] = x.g.double().expand(x.v.shape[:3]).clone().requires_grad_()
    y = [leaves.get(name) for name in ("q", "k", "v", "g", "initial_state")]
    g = None if y[3] is None else log_gates(y[3], normalizer, torch.float64)
    do[:, end:] = 0
    if factor is not None and skip is not None:
        factor[:, end:] = 0
        leaves["factor"] = factor.double().requires_grad_()
        skip = skip.double() if per_channel else skip.double().expand(B, T, Hv).clone()
        leaves["skip"] = skip.requires_grad_()
        names += ["factor", "skip"]
        added = torch.where(leaves["v"].isfinite(), leaves["v"], 0) * (skip if per_channel else skip[..., None])
        y[2] = leaves["v"] * leaves["factor"][..., None]
    outs = oracle.chunk_gla(*y[:3], g, scale, y[4], x.cu_seqlens)
    if skips:
        outs = (outs[0] + added, outs[1])
    seeds = do.double(), torch.zeros_like(outs[1]) if leaving is None else leaving.double()
    expected = dict(zip(names, torch.autograd.grad(outs, list(leaves.values()), seeds), strict=True))
    heads_of = {
        "q": (Hq, 2),
        "k": (H, 2),
        "v": (Hv, 2),
        "g": (Hv, min(2, x.g.ndim - 1) if x.g is not None else 0),
        "initial_state": (Hv, 1),
        "factor": (Hv, 2),
        "skip": (Hv, 0 if per_channel else 2),
    }
    for name, d in zip(heads_of, (*results, *more[2:]), strict=True):
        if name == "g" and d is not None and d.ndim == 1:
            error = (summed_over_groups(d, *heads_of[name]) - expected[name].sum((0, 1))).norm()
            assert error <= gradient_budget(dtype) * 8 * expected[name].norm()  # the errors of 64 tokens may be alike
        elif d is not None:
            actual = summed_over_groups(d, *heads_of[name])
            has_tokens = d.shape[:2] == (B, T) and name != "initial_state"
            rows = (slice(None), slice(end)) if has_tokens else ()
            x, ref = actual[rows], expected[name][rows]
            assert has_few_bits(x, ref) or relative_error(x, ref) <= gradient_budget(dtype), name


def summed_over_groups(d, heads, dim):
    """Returns the sums of gradients over the heads of groups: a further kernel computes them."""
    dim %= d.ndim
    return d.double().unflatten(dim, (heads, -1)).sum(dim + 1)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["head", "constant"])
def test_gradients_of_gates_that_leave_almost_nothing(kernels, monkeypatch, form, dtype):
    """The gradient of a last gate is far below the product of the last key and its gradient, which is no part of it."""
    monkeypatch.setattr("gla_core.workloads.inputs.random_gate", lambda shape, *_: torch.full(shape, -42.0))
    check_gradients(kernels, gate_form=form, T=70, dtype=dtype, initial_state=True)
    if dtype == BFLOAT16:
        check_gradients(kernels, gate_form=form, T=70, R=2, heads=2, initial_state=True, skips=form == "head")


@pytest.mark.parametrize(
    ("form", "gates", "dtype"),
    chequered(
        ["head", "constant", "key"], ["mild", "strong", "extreme", "-inf"], [BFLOAT16, torch.float16, torch.float32]
    ),
    ids=str,
)
def test_gradients_of_every_gate(kernels, form, gates, dtype):
    check_gradients(kernels, gate_form=form, gates=gates, initial_state=True, T=80, dtype=dtype)


GRADIENTS = (
    {"gates": "none", "initial_state": True},
    {"T": 64, "dstate": False},
    {"K": 128, "V": 128, "B": 2, "T": 100},
    thorough({"K": 128, "V": 40, "R": 3}),
    {"K": 24, "V": 128, "G": 2},
    {"gate_form": "constant", "G": 2, "initial_state": True},
    {"K": 136, "V": 136},  # several blocks of keys and of values
    thorough({"gate_form": "constant", "K": 136, "V": 40, "initial_state": True}),  # and blocks of 64 values
    thorough({"K": 40, "V": 136, "R": 2}),
    thorough({"gate_form": "constant", "K": 136, "V": 136}),
    {"gate_form": "key", "K": 136, "V": 40, "initial_state": True},
    thorough(PACKED | {"gate_form": "key", "K": 264, "V": 128, "R": 2}),
    thorough(PACKED | {"gates": "none", "K": 136, "V": 128, "G": 2}),
    PACKED,
    PACKED | {"R": 2, "gates": "-inf", "dstate": False},
    PACKED | {"gate_form": "constant"},
    thorough(PACKED | {"gate_form": "constant", "K": 128, "V": 128}),
    PACKED | {"gate_form": "key"},
    {"gate_form": "key", "K": 128, "V": 128, "T": 100},
    {"gate_form": "key", "G": 2, "initial_state": True},
    thorough({"gate_form": "key", "K": 72, "V": 200, "initial_state": True}),
    {"gate_form": "key", "K": 136, "V": 136, "gates": "-inf", "G": 2},
    {"gate_form": "key", "gates": "none", "V": 136},
    thorough(PACKED | {"gate_form": "key", "K": 200, "V": 72}),
    PACKED | {"gate_form": "key", "K": 72, "V": 200},
    PACKED | {"gate_form": "key", "K": 40, "V": 136, "gates": "-inf"},
    thorough({"gate_form": "key", "K": 64, "V": 200, "T": 100, "H": 4, "G": 2, "gates": "strong"}),
    {"gate_form": "key", "K": 128, "V": 136, "gates": "extreme", "mild": slice(64), "blocks": (64, 64)},
    PACKED | {"gate_form": "key", "K": 136, "V": 72, "gates": "extreme", "mild": slice(64, 128), "blocks": (64, 128)},
    {"gate_form": "key", "V": 136, "T": 500, "blocks": (64, 64)},  # more chunks than pipeline stages
    thorough({"gate_form": "key", "V": 136, "T": 500, "blocks": (64, 128)}),
    {"gate_form": "key", "V": 136, "T": 500, "blocks": (64, 192), "initial_state": True},
    thorough(
        PACKED | {"gate_form": "key", "K": 72, "V": 200, "gates": "extreme", "mild": slice(64), "blocks": (64, 192)}
    ),
    {"normalizer": 16, "gate_dtype": BFLOAT16, "initial_state": True},
    {"normalizer": 1, "gate_form": "constant"},
    {"normalizer": 16, "gate_form": "key", "gate_dtype": BFLOAT16, "K": 40, "G": 2},
    thorough({"normalizer": 16, "gate_form": "key", "gate_dtype": BFLOAT16, "K": 72, "V": 128, "B": 2, "T": 70}),
    PACKED | {"normalizer": 8, "gate_form": "key"},
    thorough({"normalizer": 16, "gate_form": "key", "gate_dtype": BFLOAT16, "V": 256, "B": 2, "H": 2, "G": 2, "T": 70}),
    thorough({"normalizer": 1, "gate_form": "key", "K": 136, "V": 136, "dstate": False}),
    thorough(PACKED | {"normalizer": 4, "gate_form": "key", "gate_dtype": BFLOAT16, "K": 200, "V": 72}),
    PACKED | {"normalizer": 2, "R": 2},
    {"gate_form": "key", "dtype": torch.float16},
    {"gate_form": "key", "K": 128, "V": 128, "T": 100, "dtype": torch.float16, "initial_state": True},
    {"gate_form": "key", "K": 72, "V": 128, "G": 2, "dtype": torch.float16},
    PACKED | {"gate_form": "key", "dtype": torch.float16},
    {"gate_form": "key", "dtype": torch.float32},
    {"gate_form": "key", "K": 128, "V": 128, "T": 100, "dtype": torch.float32, "initial_state": True},
    {"gate_form": "key", "K": 72, "V": 128, "B": 2, "H": 2, "G": 2, "dtype": torch.float32},
    PACKED | {"gate_form": "key", "dtype": torch.float32},
    {"gates": "none", "initial_state": True, "dtype": torch.float16},
    {"gates": "none", "initial_state": True, "dtype": torch.float32},
    {"K": 128, "V": 128, "B": 2, "T": 100, "H": 2, "R": 2, "dtype": torch.float32, "initial_state": True},
    {"K": 72, "V": 40, "H": 2, "G": 2, "dtype": torch.float32},
    {"gate_form": "constant", "dtype": torch.float32},
    PACKED | {"R": 2, "dtype": torch.float32},
    {"R": 2, "heads": 2, "initial_state": True, "T": 200},  # value heads in groups
    {"R": 4, "heads": 3, "K": 128, "V": 40, "B": 2, "H": 2, "T": 70, "gates": "-inf"},
    thorough({"R": 6, "heads": 6, "K": 128, "V": 128, "initial_state": True}),
    {"R": 2, "heads": 1, "gate_form": "constant", "K": 136, "V": 136},
    {"heads": 1, "K": 136, "V": 264, "H": 2, "T": 100, "initial_state": True},  # wide heads without groups
    PACKED | {"heads": 1, "gate_form": "constant", "V": 200, "gates": "strong"},
    {"R": 3, "heads": 2, "gates": "none", "K": 40, "T": 100, "initial_state": True},
    thorough(PACKED | {"heads": 1, "gates": "none", "V": 136}),
    {"R": 2, "heads": 2, "normalizer": 2, "gate_dtype": BFLOAT16, "gates": "strong"},
    thorough(PACKED | {"R": 3, "heads": 2, "K": 128, "dstate": False}),
    {"lengths": (0, 65, 1), "padding": 10, "R": 9, "heads": 9, "gates": "extreme", "V": 72},
    {"skips": True, "R": 5, "heads": 5, "initial_state": True, "T": 100},  # factors of v and a skip
    {"skips": True, "R": 3, "heads": 2, "K": 136, "V": 136, "T": 70, "gates": "-inf"},
    thorough({"skips": True, "heads": 1, "H": 2, "K": 128, "V": 128}),
    thorough({"R": 2, "heads": 2, "T": 300, "B": 2, "initial_state": True, "length": 128}),
    thorough({"R": 2, "heads": 2, "T": 300, "K": 128, "dstate": False, "length": 128, "gates": "strong"}),
    {"lengths": (100, 0, 300, 1), "R": 2, "heads": 2, "skips": True, "dstate": False, "length": 128},
    thorough({"lengths": (100, 0, 150, 1), "R": 2, "heads": 2, "K": 136, "initial_state": True, "length": 128}),
    {"T": 300, "length": 128, "initial_state": True},
    thorough(PACKED | {"skips": True, "R": 6, "heads": 6, "gates": "strong"}),
    PACKED | {"skips": "channel", "R": 2, "heads": 2, "V": 72},
    *every_other_thorough([{"gate_form": "key"} | sizes for sizes in GROUPS]),
    {"gate_form": "key", "R": 2, "H": 2, "V": 136, "T": 100, "gates": "strong", "initial_state": True},
    thorough({"gate_form": "key", "R": 3, "K": 136, "V": 136, "gates": "-inf", "dstate": False}),
    thorough({"gate_form": "key", "R": 2, "H": 2, "V": 256, "T": 70, "normalizer": 16, "gate_dtype": BFLOAT16}),
    thorough(PACKED | {"gate_form": "key", "R": 2, "K": 72, "V": 200, "gates": "-inf"}),
    *every_other_thorough(WIDE_HALF),
)


@pytest.mark.parametrize("sizes", other_dtypes_thinned(GRADIENTS), ids=str)
def test_gradients(kernels, sizes):
    check_gradients(kernels, **sizes)


@pytest.mark.parametrize(
    ("factors", "widths"),
    chequered(
        [
            (1e-3, 30, 1000, 1e-4),  # states above 65504
            (30, 30, 1e-3, 1e-3),  # scores up to 65504
            (30, 1e-3, 1e-3, 1e3),  # gradients of states above 65504
            (1, 1, 1, 1e-5),  # gradients below the normal numbers of float16
            (1, 3e-3, 3e-2, 3e-2),
        ],
        [{}, {"K": 136, "V": 136}],
    ),
    ids=str,
)
def test_gradients_of_float16_in_range(kernels, widths, factors):
    check_gradients(kernels, dtype=torch.float16, gate_form="key", factors=factors, dstate=False, T=300, **widths)


@pytest.mark.parametrize(
    ("factors", "sizes"),
    chequered(
        [(1e-6, 1e4, 1e4, 1e-8), (1e4, 1e-6, 1e9, 1e2), (1e-4, 1e-4, 1e-6, 1e-9)],
        [{"gate_form": "head"}, {"gate_form": "key"}, {"gate_form": "key", "K": 136, "V": 136}],
    ),
    ids=str,
)
def test_gradients_of_float32_in_range(kernels, factors, sizes):
    check_gradients(kernels, dtype=torch.float32, factors=factors, dstate=False, T=300, **sizes)


@pytest.mark.parametrize(
    ("factors", "sizes"),
    chequered(
        [{"scale": 0.0}, {"scale": -3.0}, {"scale": 1e-7, "factors": (1, 1, 1, 1e4)}],
        [{"gate_form": "head"}, {"gate_form": "key"}, {"gate_form": "key", "K": 72, "V": 136}],
    ),
    ids=str,
)
def test_gradients_of_float16_of_any_scale(kernels, factors, sizes):
    check_gradients(kernels, initial_state=True, dtype=torch.float16, **factors, **sizes)


@pytest.mark.parametrize(
    ("gates", "factors"),
    chequered(["none", "mild", "strong"], [(1000, 1e-3, 0.1, 1), (1e-3, 1000, 0.1, 1), (2000, 2000, 1e-2, 1e-2)]),
    ids=str,
)
def test_gradients_of_wide_heads_with_large_queries_and_keys(kernels, factors, gates):
    """Decays of a mild chunk multiply q and k by up to 403, which makes these above 65504."""
    sizes = {"gate_form": "key", "K": 136, "V": 72, "dtype": torch.float16, "gates": gates}
    scale = 1e-4 if factors[0] == factors[1] else 1e-2
    check_gradients(kernels, scale=scale, factors=factors, dstate=False, **sizes)


@pytest.mark.parametrize(
    ("sizes", "strength", "dtype"),
    chequered(
        [{"gate_form": "head"}, {"gate_form": "key"}, {"gate_form": "key", "K": 136, "V": 72}],
        [-8.0, -0.01],
        [BFLOAT16, torch.float16],
    ),
    ids=str,
)
def test_gradients_of_uniform_gates(kernels, monkeypatch, sizes, strength, dtype):
    """Strong gates make dg small beside the products of a token's own key and value."""
    monkeypatch.setattr("gla_core.workloads.inputs.random_gate", lambda shape, *_: torch.full(shape, strength))
    check_gradients(kernels, T=200, dtype=dtype, **sizes)
    if sizes == {"gate_form": "head"}:
        check_gradients(kernels, T=200, R=2, heads=2, skips=True)


@pytest.mark.parametrize(
    ("sizes", "backwards"),
    chequered(
        [
            {"T": 300, "gates": "-inf"},
            {"T": 300, "gate_form": "constant", "R": 2, "K": 128, "V": 128},
            {"T": 200, "gates": "none"},
            {"lengths": (100, 0, 200, 1), "K": 72, "gates": "strong"},
            {"T": 300, "gate_form": "key", "gates": "-inf", "K": 128, "V": 128},
            {"lengths": (100, 0, 200, 1), "gate_form": "key", "K": 72},
            {"T": 300, "gate_form": "key", "normalizer": 1, "gate_dtype": BFLOAT16},
            {"T": 300, "gate_form": "key", "H": 2, "R": 2, "gates": "-inf"},
            {"lengths": (100, 0, 200, 1), "gate_form": "key", "H": 2, "R": 3, "dtype": torch.float32},
            {"lengths": (100, 0, 200, 1), "gate_form": "key", "normalizer": 1},
            {"lengths": (100, 0, 200, 1), "normalizer": 2},
            {"T": 300, "gates": "extreme", "dtype": torch.float16},
            {"T": 300, "gates": "extreme", "gate_form": "key", "dtype": torch.float16},
            {"T": 300, "gates": "none", "dtype": torch.float16},
            {"T": 300, "dtype": torch.float32, "B": 2, "H": 2, "R": 2},
            {"T": 300, "gates": "extreme", "gate_form": "key", "dtype": torch.float32},
            {"lengths": (100, 0, 200, 1), "dtype": torch.float32},
            {"lengths": (100, 0, 200, 1), "gates": "-inf", "gate_form": "key", "dtype": torch.float16},
        ],
        [False, True],
    ),
    ids=str,
)
def test_states_of_segments(kernels, sizes, backwards):
    check_states(kernels, inputs(**sizes), backwards, sizes.get("normalizer"))


def built_states(kernels, x, backwards, normalizer=None, length=128, o=None, slots=None):
    """Returns the segments, their states S from zero, and their decays D, computed from k and v, or from q and v."""
    B, T, Hv, V = x.v.shape
    K = x.k.shape[3]
    segments = cut(B, T, length, length, x.cu_seqlens, o, slots=slots)
    gluon_on_cpu.run(segments.launches)
    S = unwritten(segments.count, Hv, K, V, dtype=torch.float32)
    D = None if x.g is None else unwritten(segments.count, Hv, K, dtype=torch.float32)
    recurrence = Recurrence(x.q if backwards else x.k, x.v, x.g, None, S, 0.3, backwards, normalizer)
    parameters = Parameters(C=64, BK=64, BV=64 if V <= 64 else 128, stages=2)
    plan = SegmentPlan(length, length, None, parameters, True)  # pyright: ignore[reportArgumentType]
    gluon_on_cpu.run(kernels.states.launch_states(plan, recurrence, segments, S, D))
    return segments, S, D


def check_states(kernels, x, backwards, normalizer=None, length=128):
    segments, S, D = built_states(kernels, x, backwards, normalizer, length)
    left, g = x.q if backwards else x.k, None if x.g is None else log_gates(x.g, normalizer, torch.float64)
    for i, rows in places(x, segments, length):
        options = (left[:, rows], x.v[:, rows], oracle.tokens_of(g, rows.start, rows.stop), None, backwards)
        decay, state = oracle.chunk_gla_summary(*options)
        assert relative_error(S[i], (0.3 if backwards else 1) * state[0]) <= budget(x.q.dtype)
        assert D is None or relative_error(D[i], decay[0]) <= 2e-5  # exp of a float32 sum


@pytest.mark.parametrize("form", ["head", "key"])
def test_gradients_of_states_of_uniform_strong_gates_in_float16(kernels, monkeypatch, form):
    """The gates of all first tokens are so strong that exp(b) is 0 in float16."""
    monkeypatch.setattr("gla_core.workloads.inputs.random_gate", lambda shape, *_: torch.full(shape, -30.0))
    check_states(kernels, inputs(T=200, gate_form=form, dtype=torch.float16), True)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("gate", [-1.0, -0.2, -torch.inf])
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1300},
        pytest.param({"lengths": (700, 0, 300, 200)}, marks=pytest.mark.thorough),
        {"T": 600, "gate_form": "constant"},
        {"T": 1300, "gate_form": "key", "K": 72},
        {"lengths": (700, 0, 300, 200), "gate_form": "key"},
    ],
    ids=str,
)
def test_segments_that_forget(kernels, monkeypatch, sizes, gate, backwards):
    """Tokens that gates decay to 0 are not read; with gates of keys, a chunk of them is."""
    monkeypatch.setattr("gla_core.workloads.inputs.random_gate", lambda shape, *_: torch.full(shape, gate))
    monkeypatch.setattr(kernels.states, "AHEAD", 4)
    x = inputs(**sizes)
    check_states(kernels, x, backwards, length=640)
    if gate == -1.0:
        _, S, D = built_states(kernels, x, backwards, length=640)
        for y in (x.q, x.k, x.v):
            y[:, 192 if x.g.ndim == 4 else 128 : 440] = torch.nan
        _, again, decay = built_states(kernels, x, backwards, length=640)
        assert torch.equal(S[0], again[0])
        assert torch.equal(D[0], decay[0])


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("key", [0, 71])
@pytest.mark.parametrize("others", [-3.0, -torch.inf])
def test_segments_that_one_key_does_not_forget(kernels, key, others, backwards):
    x = inputs(T=700, gate_form="key", K=72)
    x.g.fill_(others)[..., key] = -0.01
    check_states(kernels, x, backwards, length=640)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_segments_that_forget_after_mild_gates(kernels, backwards):
    """The chunks that count are as many as the mild gates before the strong ones."""
    x = inputs(T=1280, gate_form="key", K=128, V=128, gates="mild")
    x.g[:, 300:340] = -5.0
    check_states(kernels, x, backwards, length=640)


def places(x, segments, length):
    """Returns the number and the rows of each segment that is not empty."""
    if segments.order is not None:
        return [(i, slice(a, b)) for i, a, b, *_ in segments.order.tolist() if a < b]
    starts = [*range(0, x.q.shape[1], length), x.q.shape[1]]
    return [(i, slice(a, b)) for i, (a, b) in enumerate(itertools.pairwise(starts))]


# ---- the emulator


def test_a_write_before_the_last_read_is_found():
    tile = gluon_on_cpu.Tile(torch.ones(2, 2))
    product = gluon_on_cpu.Product(tile, tile, None)
    tile.store(torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="a tile changed"):
        product.finish()


def test_a_copy_over_a_load_without_a_fence_is_found():
    tiles = gluon_on_cpu.Tile(torch.ones(2, 2, 2))
    tiles.index(0).load()
    assert gluon_on_cpu._overwritten(tiles.index(0).memory)
    assert not gluon_on_cpu._overwritten(tiles.index(1).memory)
    gluon_on_cpu._loads_are_done()  # as a fence or a store does
    assert not gluon_on_cpu._overwritten(tiles.index(0).memory)


def test_a_read_that_may_come_before_the_write_is_found():
    tile, bar = gluon_on_cpu.Tile(torch.zeros(2, 2)), gluon_on_cpu.Barrier()
    gluon_on_cpu._init(bar, count=1)
    writer = threading.Thread(target=lambda: (tile.store(torch.ones(2, 2)), gluon_on_cpu._arrive(bar)))
    gluon_on_cpu._wait(bar, 1)  # passes at once: this is the wait for phase 1, and phase 0 has not ended
    writer.start()
    writer.join()
    try:
        with pytest.raises(AssertionError, match="does not know"):
            tile.load()
        gluon_on_cpu._wait(bar, 0)
        assert tile.load().sum() == 4
    finally:
        gluon_on_cpu._writes.clear()


def test_a_barrier_that_never_completes_is_found():
    with pytest.raises(TimeoutError, match="deadlock"):
        gluon_on_cpu._specialize([(gluon_on_cpu._wait, (gluon_on_cpu.Barrier(), 0))] * 2)
    gluon_on_cpu._failed.clear()
