"""Hopper's forward of the delta rule, emulated on a CPU, against the oracle: see tests/gluon_on_cpu.py."""

import dataclasses

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.tensors import log_gates
from gla_core.workloads.inputs import delta_inputs

pytest.importorskip("triton")
from gla_triton_kernels.chunks.results import copy_or_clear
from gla_triton_kernels.chunks.segments import cut, whole
from gla_triton_kernels.delta import summary
from gla_triton_kernels.delta.sm90 import Parameters, tokens_of_block
from gla_triton_kernels.delta.tensors import Tensors
from tests import gluon_on_cpu
from tests.backends.pools import PROMPTS, check_slots, pooled

BFLOAT16 = torch.bfloat16
PACKED = {"lengths": (0, 65, 1, 0, 130, 3), "padding": 10, "initial_state": True}
pytestmark = pytest.mark.kernels  # Triton's kernel that sorts packed sequences is interpreted


@pytest.fixture(scope="module")
def forward():
    folders = {gluon_on_cpu.SM90: ("common",), "gla_triton_kernels.delta.sm90": ("common", "forward")}
    return gluon_on_cpu.load_from(folders).forward


def inputs(**sizes):
    """Returns random inputs. Rows that belong to no sequence hold NaN."""
    sizes = {"B": 1, "T": 130, "H": 1, "K": 64, "V": 64, "gate_dtype": torch.float32, **sizes}
    x = delta_inputs(dtype=BFLOAT16, **sizes)
    if x.cu_seqlens is not None:
        for y in (x.q, x.k, x.v, x.g, x.beta):
            if y is not None and y.ndim > 1:
                y[:, int(x.cu_seqlens[-1]) :] = torch.nan
    return x


def computed(forward, x, groups=1, every=64, normalizer=None, length=None, has_outputs=True):
    """Returns the outputs, the final states and the checkpoints of the kernel.

    Args:
        length: tokens of a segment; None if sequences stay whole.
        has_outputs: whether the kernel computes outputs.
    """
    (B, T, Hv, V), K = x.v.shape, x.k.shape[3]
    N = B if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    rows = -(-T // every) if x.cu_seqlens is None else N + T // every
    o, final = torch.full((B, T, Hv, V), torch.nan, dtype=BFLOAT16), torch.full((N, Hv, K, V), torch.nan)
    if length is not None and x.cu_seqlens is not None:
        copy_or_clear(final, x.initial_state)
    kept = torch.zeros(B, rows, Hv, K, V, dtype=BFLOAT16)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.cu_seqlens, o, final, kept)
    tensors = tensors if has_outputs else tensors._replace(o=None)
    kernel = parameters(x, groups)
    segments = whole(B, T, x.cu_seqlens, o) if length is None else cut(B, T, length, length, x.cu_seqlens, o)
    outputs = forward.launch_outputs(kernel, tensors, segments, K**-0.5, every, normalizer)
    gluon_on_cpu.run([*segments.launches, *outputs])
    return o, final, kept


def parameters(x, groups):
    """Returns the launch parameters that sm90/__init__.py chooses, for one state warpgroup or two."""
    K = x.k.shape[3]
    parts, BT = 2 if K > 128 else 1, tokens_of_block(x.g is not None and x.g.ndim == 4)
    return Parameters(64 if K <= 64 else 128, max(parts, groups), parts=parts, BT=BT)


def check(results, x, every=64, normalizer=None, budget=FORWARD[BFLOAT16]):
    g = x.g if normalizer is None else log_gates(x.g, normalizer, torch.float64)
    wanted = oracle.chunk_delta_with_checkpoints(x.q, x.k, x.v, g, x.beta, None, x.initial_state, x.cu_seqlens, every)
    for actual, truth in zip(results, wanted, strict=True):
        assert relative_error(actual, truth) <= budget


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 200, "B": 2, "initial_state": True},  # more chunks than pipeline stages
        {"gates": "-inf", "K": 40, "V": 72, "initial_state": True, "gate_dtype": BFLOAT16},
        {"gates": "strong", "K": 128, "V": 128, "T": 70, "R": 2},  # chunks that are not mild
        {"gates": "extreme", "T": 70, "K": 96, "V": 192, "initial_state": True},
        {"gates": "none", "H": 2, "R": 3, "T": 70},
        {"gate_form": "head", "gates": "-inf", "R": 2, "K": 96, "V": 192, "initial_state": True},
        {"gate_form": "constant", "gates": "strong", "H": 2},
        {**PACKED, "gates": "-inf"},
        {**PACKED, "gate_form": "head", "gates": "extreme", "R": 2},
        {**PACKED, "gates": "none"},
        {"gate_form": "head", "gates": "-inf", "R": 2, "K": 256, "V": 72, "T": 200, "initial_state": True},
        {**PACKED, "gate_form": "head", "gates": "extreme", "K": 136},
        {"gates": "none", "K": 192, "T": 70, "initial_state": True},
    ],
    ids=str,
)
def test_values(forward, sizes):
    x = inputs(**sizes)
    check(computed(forward, x, groups=2 if x.v.shape[3] > 64 else 1), x)


@pytest.mark.parametrize(
    "sizes",
    [
        {"gates": "mild", "T": 200, "initial_state": True},
        {"gates": "strong", "K": 128, "V": 128, "T": 70},
        {**PACKED, "gates": "none", "K": 136},
        {"gate_form": "head", "gates": "-inf", "R": 2, "K": 256, "V": 72, "T": 200},
    ],
    ids=str,
)
def test_states_without_outputs_have_the_same_bits(forward, sizes):
    """Gradients read such states, and other launches leave out q."""
    x = inputs(**sizes)
    _, *wanted = computed(forward, x)
    _, *states = computed(forward, dataclasses.replace(x, q=torch.full_like(x.q, torch.nan)), has_outputs=False)
    assert all(map(torch.equal, states, wanted))


@pytest.mark.parametrize(
    ("length", "every", "sizes"),
    [
        (64, 64, {"T": 200, "initial_state": True}),
        (64, 128, {"T": 260, "B": 2, "gates": "-inf", "K": 40, "V": 72}),
        (128, 64, {"T": 300, "gates": "strong", "K": 128, "V": 192, "R": 2, "initial_state": True}),
        (64, 64, {"T": 140, "gate_form": "head", "K": 128, "V": 40, "H": 2, "R": 2}),
        (64, 64, {"T": 140, "gates": "none", "K": 96, "V": 128, "initial_state": True}),
        (64, 64, {**PACKED, "gates": "mild"}),
        (64, 128, {**PACKED, "gate_form": "head", "gates": "extreme", "R": 2, "V": 128}),
        (64, 64, {"lengths": (200, 0, 70), "gate_form": "constant"}),
    ],
    ids=str,
)
def test_segments(forward, length, every, sizes):
    x = inputs(**sizes)
    groups = 2 if x.v.shape[3] > 64 else 1
    check(computed(forward, x, groups, every, length=length), x, every)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (None, {"T": 140, "B": 2, "K": 40, "V": 72, "gates": "-inf", "R": 2}),
        (None, {**PACKED, "gate_form": "head", "gates": "mild"}),
        (64, {"T": 140, "gate_form": "constant", "K": 96}),
        (64, {**PACKED, "gates": "strong"}),
    ],
    ids=str,
)
def test_summaries(forward, length, sizes):
    x = inputs(**sizes)
    (B, T, Hv, V), K, cu_seqlens = x.v.shape, x.k.shape[3], x.cu_seqlens
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    state, transition = torch.full((N, Hv, K, V), torch.nan), torch.full((N, Hv, K, K), torch.nan)
    identity, zero = torch.eye(K).expand_as(transition), torch.zeros(N + B * (T // 64 + 1), Hv, K, K)
    tensors = summary.Summaries(None, x.k, x.v, x.g, x.beta, cu_seqlens, state, transition, identity, zero)

    def launch(_, segments, states, transitions):
        y = Tensors(x.k, x.k, x.v, x.g, x.beta, None, cu_seqlens, x.v, states)
        kernel = parameters(x, 2 if V > 64 else 1)
        return [forward.launch_summaries(kernel, y, segments, transitions, True, None)]

    gluon_on_cpu.run(summary.launches(launch, tensors, length, False))
    wanted = oracle.chunk_delta_summary(x.k, x.v, x.g, x.beta, cu_seqlens)
    assert relative_error(state, wanted[1]) <= FORWARD[BFLOAT16]
    # A transition is a factor, so its absolute errors count.
    assert relative_error(identity + transition, identity + wanted[0]) <= FORWARD[BFLOAT16]


@pytest.mark.parametrize(
    ("pool_dtype", "v_first", "sizes"),
    [
        (torch.float32, False, {"gate_form": "head"}),
        (torch.float16, True, {"gates": "mild", "K": 72, "V": 128}),
        (BFLOAT16, True, {"gates": "none", "R": 2, "K": 136}),
    ],
    ids=str,
)
def test_states_in_a_pool(forward, pool_dtype, v_first, sizes):
    x = inputs(**{**PROMPTS, **sizes})
    (B, T, Hv, V), K = x.v.shape, x.k.shape[3]
    pool, slots, (o, states) = pooled(oracle.chunk_delta_pool, x, pool_dtype, v_first)
    actual, before = torch.full((B, T, Hv, V), torch.nan, dtype=BFLOAT16), pool.clone()
    segments = whole(B, T, x.cu_seqlens, actual, slots)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, x.cu_seqlens, actual, None, pool, pool=pool)
    outputs = forward.launch_outputs(parameters(x, 1 if V <= 64 else 2), tensors, segments, K**-0.5, None)
    gluon_on_cpu.run([*segments.launches, *outputs])
    assert relative_error(actual, o) <= FORWARD[BFLOAT16]
    check_slots(pool, before, states, FORWARD[BFLOAT16])


@pytest.mark.parametrize("gate_form", ["key", "head"])
def test_gates_from_logits(forward, gate_form):
    x = inputs(gate_form=gate_form, T=100)
    x = dataclasses.replace(x, g=2 * torch.randn(x.g.shape) + 1)
    check(computed(forward, x, normalizer=16), x, normalizer=16)


def test_bits_do_not_depend_on_the_columns_of_a_block(forward):
    x = inputs(V=128, T=70)
    for ones, others in zip(computed(forward, x, 1), computed(forward, x, 2), strict=True):
        assert torch.equal(ones, others)


def test_checkpoints_after_several_chunks(forward):
    x = inputs(T=200, lengths=(130, 70), gate_form="head")
    check(computed(forward, x, every=128), x, every=128)


@pytest.mark.parametrize("gate_form", ["key", "head"])
@pytest.mark.parametrize(
    ("size", "length", "beta"), [(1e4, 1.0, 2.0), (1e-4, 1.0, 1.0), (1.0, 4.0, 0.125), (1.0, 2.0**-6, 1.0)]
)
def test_values_and_keys_of_any_size(forward, gate_form, size, length, beta):
    x = inputs(gate_form=gate_form, T=80)
    x.v.mul_(size)
    x.k.mul_(length)
    x.beta.mul_(beta)
    check(computed(forward, x), x)


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_keys_that_are_alike(forward, share):
    """Keys have a direction in common, or are all equal: then each token overwrites what the one before wrote."""
    x = inputs(gate_form="head", T=100)
    k = share * x.k[:, :1].double() + (1 - share) * x.k.double()
    x.k.copy_(torch.nn.functional.normalize(k, dim=-1))
    check(computed(forward, x), x)
