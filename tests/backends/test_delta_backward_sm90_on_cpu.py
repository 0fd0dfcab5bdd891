"""Hopper's backward kernels of the delta rule, emulated on a CPU, against the oracle: see tests/gluon_on_cpu.py."""

import dataclasses

import pytest
import torch

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.workloads.inputs import delta_inputs

pytest.importorskip("triton")
from gla_triton_kernels.chunks.results import copy_or_clear
from gla_triton_kernels.chunks.segments import cut, whole
from gla_triton_kernels.delta import summary
from gla_triton_kernels.delta.tensors import BackwardTensors
from tests import gluon_on_cpu

pytestmark = pytest.mark.kernels  # Triton's kernels among them are interpreted

MODULES = ("common", "common_backward", "backward_pairs", "backward_blocks", "backward", "gradients")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


@pytest.fixture(scope="module")
def kernels():
    return gluon_on_cpu.load_from({gluon_on_cpu.SM90: ("common",), "gla_triton_kernels.delta.sm90": MODULES})


def inputs(**sizes):
    """Returns random inputs, with some betas of 0; rows of no sequence hold NaN."""
    sizes = {"B": 1, "T": 130, "H": 1, "K": 128, "V": 128, "dtype": torch.bfloat16, **sizes}
    x = delta_inputs(gate_dtype=torch.float32, **sizes)
    x.beta[:, 3::9] = 0.0
    if x.cu_seqlens is not None:
        for y in (x.q, x.k, x.v, x.g, x.beta):
            if y is not None:
                y[:, : int(x.cu_seqlens[0])] = torch.nan
                y[:, int(x.cu_seqlens[-1]) :] = torch.nan
    return x


def computed(kernels, x, do, dstate, length=None):
    """Returns the gradients by name.

    Args:
        length: tokens of a segment; None if sequences stay whole.
    """
    scale = x.q.shape[3] ** -0.5
    _, _, checkpoints = oracle.chunk_delta_with_checkpoints(
        x.q, x.k, x.v, x.g, x.beta, scale, x.initial_state, x.cu_seqlens, 64
    )
    new = [None if y is None else torch.full(y.shape, torch.nan, dtype=y.dtype) for y in (x.q, x.k, x.v, x.g, x.beta)]
    dinitial = None if x.initial_state is None else torch.full(x.initial_state.shape, torch.nan)
    inputs = (
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.initial_state,
        x.cu_seqlens,
        checkpoints.bfloat16().contiguous(),
        do,
        dstate,
    )
    y = BackwardTensors(*inputs, *new, dinitial)
    chunks, pairs = kernels.backward_pairs.launch_pairs(y, scale)
    segments = whole(*x.k.shape[:2], x.cu_seqlens)
    if length is not None:
        segments = cut(*x.k.shape[:2], length, length, x.cu_seqlens)
        if dinitial is not None and x.cu_seqlens is not None:
            copy_or_clear(dinitial, dstate)
    leaving, passes = kernels.backward.launch_states(y, chunks, segments)
    gradients = kernels.gradients.launch_gradients(y, chunks, y.checkpoints, leaving, scale, 2)
    gluon_on_cpu.run([*pairs, *segments.launches, *passes, *gradients])
    return {name: getattr(y, f"d{name}") for name in NAMES}


def expected(x, do, dstate):
    """Returns the gradients of the oracle by name."""
    tensors = {name: getattr(x, name) for name in NAMES}
    z = {name: None if y is None else y.double().requires_grad_() for name, y in tensors.items()}
    o, state = oracle.chunk_delta(**z, cu_seqlens=x.cu_seqlens)
    loss = (o * do.double()).sum() + (0.0 if dstate is None else (state * dstate.double()).sum())
    loss.backward()
    return {name: None if y is None else y.grad for name, y in z.items()}


def check(kernels, x, has_dstate=True, length=None):
    rows = slice(None) if x.cu_seqlens is None else slice(int(x.cu_seqlens[0]), int(x.cu_seqlens[-1]))
    do = torch.randn(x.v.shape).to(x.v.dtype)
    N = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    dstate = torch.randn(N, x.v.shape[2], x.k.shape[3], x.v.shape[3]) if has_dstate else None
    actual = computed(kernels, x, do, dstate, length)
    for name, y in expected(x, do, dstate).items():
        if y is not None:
            part = slice(None) if name == "initial_state" else rows
            a, b = (z if name == "initial_state" else z[:, part] for z in (actual[name], y))
            assert relative_error(a, b) <= GRADIENT[torch.bfloat16], name
    return actual


@pytest.mark.parametrize(
    "sizes",
    [
        {"gate_form": "key", "gates": "mild", "initial_state": True},
        {"gate_form": "key", "gates": "-inf", "R": 2, "H": 2},
        {"gate_form": "key", "gates": "mild", "K": 72, "V": 40, "initial_state": True},
        {
            "gate_form": "key",
            "lengths": (1, 0, 66, 7, 64),
            "padding": 12,
            "gates": "-inf",
            "H": 2,
            "initial_state": True,
        },
        {"gate_form": "head", "gates": "-inf", "R": 2, "initial_state": True},
        {"gate_form": "head", "lengths": (66, 0, 1), "padding": 12, "gates": "mild", "K": 96, "R": 3},
        {"gates": "none", "V": 104},
    ],
    ids=str,
)
def test_gradients(kernels, sizes):
    check(kernels, inputs(**sizes))


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (None, {"gate_form": "head", "gates": "-inf", "K": 256, "V": 136, "R": 2}),
        (None, {"gate_form": "head", "lengths": (66, 0, 1), "padding": 12, "gates": "mild", "K": 200, "V": 64}),
        (None, {"gates": "none", "K": 136, "V": 40}),
        (None, {"gate_form": "constant", "gates": "mild", "K": 72, "V": 40, "T": 70}),
        (64, {"gate_form": "head", "gates": "mild", "K": 96, "V": 192}),
        (64, {"gate_form": "head", "lengths": (140, 66), "gates": "-inf", "K": 40, "V": 136}),
    ],
    ids=str,
)
def test_passes_before_general_gradients(kernels, length, sizes):
    """They write Y, whose product with beta is dv, and the gradients of states."""
    x = inputs(**sizes, initial_state=True)
    do, dstate = torch.randn(x.v.shape).to(x.v.dtype), torch.randn(x.initial_state.shape)
    y, leaving, dinitial = passes(kernels, x, do, dstate, length)
    rows = slice(None) if x.cu_seqlens is None else slice(int(x.cu_seqlens[0]), int(x.cu_seqlens[-1]))
    wanted, most = expected(x, do, dstate), GRADIENT[torch.bfloat16]
    assert relative_error((x.beta[..., None] * y.float())[:, rows], wanted["v"][:, rows]) <= most
    assert relative_error(dinitial, wanted["initial_state"]) <= most
    if x.cu_seqlens is None:  # the gradient of a state does not depend on the state
        parts = {name: getattr(x, name) for name in NAMES[:-1]}
        tail = {name: y if y is None or y.ndim == 1 else y[:, 64:] for name, y in parts.items()}
        wanted = expected(dataclasses.replace(x, **tail), do[:, 64:], dstate)["initial_state"]
        assert relative_error(leaving[0], wanted[0]) <= most


def test_passes_from_logits(kernels):
    x, normalizer = inputs(gate_form="head", gates="mild", K=40, V=40), 16
    logits = torch.randn(x.g.shape)
    do, dstate = torch.randn(x.v.shape).to(x.v.dtype), torch.randn(1, 1, 40, 40)
    y, _, _ = passes(kernels, dataclasses.replace(x, g=logits), do, dstate, None, normalizer)
    gates = torch.nn.functional.logsigmoid(logits) / normalizer
    wanted = expected(dataclasses.replace(x, g=gates), do, dstate)["v"]
    assert relative_error(x.beta[..., None] * y.float(), wanted) <= GRADIENT[torch.bfloat16]


def passes(kernels, x, do, dstate, length, normalizer=None):
    """Returns Y, the gradients of the states that leave chunks, and those of initial states."""
    y = torch.full_like(x.v, torch.nan)
    dinitial = None if x.initial_state is None else torch.full_like(dstate, torch.nan)
    tensors = (getattr(x, name) for name in NAMES)
    tensors = BackwardTensors(*tensors, x.cu_seqlens, None, do, dstate, x.q, x.k, x.v, x.g, x.beta, dinitial)
    chunks, pairs = kernels.backward_pairs.launch_pairs(tensors, x.q.shape[3] ** -0.5, normalizer)
    segments = whole(*x.k.shape[:2], x.cu_seqlens)
    if length is not None:
        segments = cut(*x.k.shape[:2], length, length, x.cu_seqlens)
    leaving, launches = kernels.backward.launch_states(tensors, chunks, segments, y)
    gluon_on_cpu.run([*pairs, *segments.launches, *launches])
    return y, leaving, dinitial


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (64, {"T": 200, "gate_form": "key", "gates": "mild", "initial_state": True}),
        (128, {"T": 300, "gate_form": "head", "gates": "-inf", "R": 2, "K": 72, "V": 104}),
        (64, {"T": 140, "gates": "none", "B": 2, "K": 64, "V": 40, "initial_state": True}),
        (64, {"lengths": (140, 0, 66, 7), "padding": 9, "gate_form": "key", "gates": "-inf", "initial_state": True}),
        (64, {"lengths": (70, 1, 200), "gate_form": "head", "gates": "mild", "H": 2}),
    ],
    ids=str,
)
def test_segments(kernels, length, sizes):
    check(kernels, inputs(**sizes), length=length)


def test_segments_without_a_gradient_of_the_final_state(kernels):
    check(kernels, inputs(T=200, gate_form="head", gates="mild", initial_state=True), has_dstate=False, length=64)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (None, {"T": 140, "B": 2, "gate_form": "key", "gates": "-inf", "R": 2, "K": 72, "V": 104}),
        (None, {"lengths": (66, 0, 1), "padding": 12, "gate_form": "head", "gates": "mild"}),
        (64, {"lengths": (140, 0, 66, 7), "padding": 9, "gate_form": "key", "gates": "mild"}),
        (64, {"T": 140, "gates": "none", "K": 64, "V": 40}),
    ],
    ids=str,
)
def test_summaries(kernels, length, sizes):
    x = inputs(**sizes)
    (B, T, Hv, V), K, cu_seqlens = x.v.shape, x.k.shape[3], x.cu_seqlens
    N, do = B if cu_seqlens is None else len(cu_seqlens) - 1, torch.randn(x.v.shape).bfloat16()
    state, transition = torch.full((N, Hv, K, V), torch.nan), torch.full((N, Hv, K, K), torch.nan)
    identity, zero = torch.eye(K).expand_as(transition), torch.zeros(N + B * (T // 64 + 1), Hv, K, K)
    tensors = summary.Summaries(x.q, x.k, do, x.g, x.beta, cu_seqlens, state, transition, identity, zero)

    def launch(_, segments, states, transitions):
        y = BackwardTensors(
            x.q, x.k, do, x.g, x.beta, None, cu_seqlens, None, do, None, x.q, x.k, do, x.g, x.beta, None
        )
        chunks, pairs = kernels.backward_pairs.launch_pairs(y, 1.0)
        return [*pairs, kernels.backward.launch_summaries(y, chunks, segments, states, transitions, True)]

    gluon_on_cpu.run(summary.launches(launch, tensors, length, True))
    wanted = oracle.chunk_delta_gradient_summary(x.q, x.k, do, x.g, x.beta, cu_seqlens)
    assert relative_error(state, wanted[1]) <= GRADIENT[torch.bfloat16]
    # A transition is a factor, so its absolute errors count.
    assert relative_error(identity + transition, identity + wanted[0]) <= GRADIENT[torch.bfloat16]


@pytest.mark.parametrize("gate_form", ["key", "head"])
def test_closed_gates_have_the_gradient_0(kernels, gate_form):
    x = inputs(gate_form=gate_form, gates="-inf", T=70)
    x.g[:, 7] = -torch.inf
    closed = x.g == -torch.inf
    assert (check(kernels, x)["g"][closed] == 0).all()


@pytest.mark.parametrize("gate_form", ["key", "head"])
@pytest.mark.parametrize("most", [1, 2])
def test_correlated_keys(kernels, gate_form, most):
    """Most of a value is explained by the state, and most of dg is a difference; betas up to 2 add signs."""
    x = inputs(gate_form=gate_form, gates="mild", T=128)
    mixed = torch.nn.functional.normalize(x.k[:, :1].float() + x.k.float(), dim=-1)
    x = with_gates(dataclasses.replace(x, k=mixed.to(x.k.dtype), beta=most * x.beta), -0.5)
    check(kernels, x, has_dstate=False)


@pytest.mark.parametrize("gate_form", ["key", "head"])
def test_equal_keys(kernels, gate_form):
    x = with_gates(inputs(gate_form=gate_form, gates="mild", T=128), -5.0)
    check(kernels, dataclasses.replace(x, k=x.k[:, :1].expand_as(x.k).contiguous()), has_dstate=False)


def with_gates(x, least):
    """Returns the inputs with log gates from `least` to 0, as models with bounded gates have them."""
    return dataclasses.replace(x, g=least * torch.sigmoid(torch.randn(x.g.shape)))


def test_a_row_of_a_batch_has_the_same_bits_alone(kernels):
    x = inputs(gate_form="key", gates="-inf", B=2, T=80)
    do = torch.randn(x.v.shape).to(x.v.dtype)
    both = computed(kernels, x, do, None)
    parts = {name: getattr(x, name) for name in NAMES}
    alone = dataclasses.replace(x, **{name: y if y is None else y[1:] for name, y in parts.items()})
    for name, y in computed(kernels, alone, do[1:], None).items():
        assert y is None or torch.equal(y, both[name][1:]), name
