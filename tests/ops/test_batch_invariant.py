"""`gla.batch_invariant`: the bits of a sequence do not depend on the batch, nor on the number of calls."""

import contextlib
import importlib
import itertools
import math
import os
from types import SimpleNamespace

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import gradients, oracle_gradients
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.backend import Backend, Prepared
from gla_core.dispatch.registry import get
from gla_core.dispatch.tensors import pairwise_sum
from gla_core.ops import fused as fused_module
from gla_core.ops.gla.chunk_gla import BACKWARD
from gla_core.workloads.inputs import gla_inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # it is slow for float32, which it computes token by token
TOKENS = 64
LENGTHS = (1, 66, 130)


@pytest.fixture(
    params=[
        "reference",
        "auto",
        pytest.param("parallel_scan", marks=pytest.mark.kernels),
        pytest.param("triton_fused", marks=pytest.mark.gpu),
    ]
)
def backend(request):
    return request.param


def inputs(device, **sizes):
    """Returns packed sequences of these lengths, and gradients of their results."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16 if INTERPRETED else torch.float32
    sizes = {
        "H": 1 if INTERPRETED else 2,
        "K": 64 if device == "cuda" else 16,
        "V": 72 if device == "cuda" else 24,
        "gates": "-inf",
    } | sizes
    x = gla_inputs(lengths=LENGTHS, dtype=dtype, gate_dtype=torch.float32, initial_state=True, device=device, **sizes)
    torch.manual_seed(1)
    return x, torch.randn_like(x.v), torch.randn_like(x.initial_state)


def tokens_of(x, do, first, last):
    """Returns the rows from `first` to `last` as a batch of one, not packed."""
    return [None if y is None else y[:, first:last].contiguous() for y in (x.q, x.k, x.v, x.g, do)]


def run(q, k, v, g, do, state, dstate, cu_seqlens=None, backend="auto"):
    """Returns o, the final states, and all gradients of a call with an initial state."""
    leaves = [y.detach().clone().requires_grad_() for y in (q, k, v, g, state)]
    q, k, v, g, state = leaves
    o, final = gla.chunk_gla(q, k, v, g, 0.3, state, True, cu_seqlens, backend=backend)
    return [o.detach(), final.detach(), *torch.autograd.grad([o, final], leaves, [do, dstate])]


@pytest.mark.parametrize(
    ("gates", "width"),
    [
        ("-inf", {}),
        pytest.param("mild", {}, marks=pytest.mark.gpu),  # other kernels or other parts of them on a GPU
        pytest.param("-inf", {"K": 128, "V": 128}, marks=pytest.mark.gpu),
        pytest.param("mild", {"K": 128, "V": 256}, marks=pytest.mark.gpu),
    ],
)
def test_alone_and_packed(device, backend, gates, width):
    """Each sequence of a packed batch equals itself as a batch of one; both agree with the oracle."""
    x, do, dstate = inputs(device, gates=gates, **width)
    with gla.batch_invariant(TOKENS):
        o, final, *tokens, dinitial = run(x.q, x.k, x.v, x.g, do, x.initial_state, dstate, x.cu_seqlens, backend)
        for n, (first, last) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
            states = (x.initial_state[n : n + 1], dstate[n : n + 1])
            alone = run(*tokens_of(x, do, first, last), *states, backend=backend)
            together = [final[n : n + 1], *(y[:, first:last] for y in tokens), dinitial[n : n + 1]]
            for actual, expected in zip([o[:, first:last], *together], alone, strict=True):
                assert torch.equal(actual, expected)
    arguments = (x.q, x.k, x.v, x.g, 0.3, x.initial_state, True, x.cu_seqlens)
    without, final_without = gla.chunk_gla(*arguments, backend="reference")
    assert relative_error(o, without) <= 2 * FORWARD[x.q.dtype]
    assert relative_error(final, final_without) <= 2 * FORWARD[x.q.dtype]


def test_gradients_are_right(device, backend):
    x, _, _ = inputs(device)
    expected = oracle_gradients("chunk_gla", x)
    with gla.batch_invariant(TOKENS):
        actual = gradients("chunk_gla", x, backend)
    for name, gradient in actual.items():
        assert relative_error(gradient, expected[name]) <= GRADIENT[x.q.dtype], name


@pytest.mark.parametrize("form", ["constant", "head"])
def test_every_form_of_gate(form, device, backend):
    """With groups of values. The gradient of a constant gate is the sum of the sequences' shares."""
    x, _, _ = inputs(device, R=2, gate_form=form, gates="mild")
    do, dstate = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    tensors = (x.q, x.k, x.v, x.g, do, x.initial_state, dstate, x.cu_seqlens)
    with gla.batch_invariant(TOKENS):
        whole, shares = run(*tensors, backend), []
        for n, (first, last) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
            q, k, v, g, seed = (oracle.tokens_of(y, first, last).contiguous() for y in (x.q, x.k, x.v, x.g, do))
            alone = run(q, k, v, g, seed, x.initial_state[n : n + 1], dstate[n : n + 1], backend=backend)
            states = x.initial_state.shape
            parts = [y[n : n + 1] if y.shape == states else oracle.tokens_of(y, first, last) for y in whole]
            shares.append(alone[5])
            for actual, expected in zip(parts, alone, strict=True):
                assert actual.ndim == 1 or torch.equal(actual, expected)
    dg = sum(shares) if form == "constant" else torch.cat(shares, 1)
    torch.testing.assert_close(whole[5], dg, rtol=1e-5, atol=1e-5)
    for actual, expected in zip(whole, run(*tensors, "reference"), strict=True):
        assert relative_error(actual, expected) <= 2 * GRADIENT[x.q.dtype]


@pytest.mark.thorough
def test_rows_of_a_batch(device, backend):
    """Two rows of a batch equal themselves as batches of one."""
    x, do, dstate = inputs(device)
    rows = [y[:, :130].reshape(2, 65, *y.shape[2:]) for y in (x.q, x.k, x.v, x.g, do)]
    with gla.batch_invariant(TOKENS):
        both = run(*rows, x.initial_state[:2], dstate[:2], backend=backend)
        for b in range(2):
            row = slice(b, b + 1)
            alone = run(*(y[row] for y in rows), x.initial_state[row], dstate[row], backend=backend)
            assert all(torch.equal(actual[row], expected) for actual, expected in zip(both, alone, strict=True))


@pytest.mark.thorough
def test_a_prompt_in_two_calls(device, backend):
    """130 tokens equal 64 tokens followed by 66 from the state of the first call, forwards and backwards."""
    x, do, dstate = inputs(device)
    first, last = x.cu_seqlens[2:].tolist()
    state, dfinal = x.initial_state[2:], dstate[2:]
    with gla.batch_invariant(TOKENS):
        whole = run(*tokens_of(x, do, first, last), state, dfinal, backend=backend)
        begin, rest = tokens_of(x, do, first, first + 64), tokens_of(x, do, first + 64, last)
        entering = run(*begin, state, torch.zeros_like(state), backend=backend)[1]
        after = run(*rest, entering, dfinal, backend=backend)
        before = run(*begin, state, after[-1], backend=backend)
    joined = [torch.cat([a, b], 1) for a, b in zip(before[:1] + before[2:6], after[:1] + after[2:6], strict=True)]
    expected = [*whole[:1], *whole[2:6], whole[1], whole[6]]
    assert all(torch.equal(a, b) for a, b in zip([*joined, after[1], before[6]], expected, strict=True))


def test_steps(device, backend):
    """A row of many equals itself alone, with a pool of states and without."""
    x, _, _ = inputs(device)
    B = 190 if device == "cuda" else 5
    q, k, v, g = (y[0, :B].contiguous() for y in (x.q, x.k, x.v, x.g))
    pool = torch.randn(B + 7, *x.initial_state.shape[1:], device=device)
    rows = torch.arange(B, device=device) + 7
    with gla.batch_invariant():
        o, new = gla.recurrent_gla_step(q, k, v, g, pool, slots=rows, backend=backend)
        plain_o, plain_new = gla.recurrent_gla_step(q, k, v, g, pool[7:], backend=backend)
        for b in (0, B - 1):
            row = slice(b, b + 1)
            alone = gla.recurrent_gla_step(*(y[row] for y in (q, k, v, g)), pool[7 + b : 8 + b], backend=backend)
            assert torch.equal(o[row], alone[0])
            assert torch.equal(new[7 + b], alone[1][0])
            assert torch.equal(plain_o[row], alone[0])
            assert torch.equal(plain_new[row], alone[1])
    assert torch.equal(new[:7], pool[:7])
    assert relative_error(o, gla.recurrent_gla_step(q, k, v, g, pool[7:])[0]) <= 2 * FORWARD[q.dtype]


def ssd_step(q, k, v, g, pool, slots):
    options = {"z": v, "slots": slots, "dt_softplus": True}
    return gla.recurrent_ssd_step(q, k, v, pool, g, -torch.ones_like(g[0]), **options)


def layer_step(q, k, v, g, pool, slots):
    return gla.recurrent_gla_layer_step(q, k, v, -g.abs(), pool, v, slots=slots)


def delta_step(q, k, v, g, pool, slots):
    gate = ("bounded", None, None, -5.0)
    return gla.recurrent_delta_step(
        q, k, v, g, g, pool, slots=slots, inplace=True, normalize=1e-6, gate=gate, beta_limit=1.0
    ).o


def delta_prompt(q, k, v, g, pool, slots):
    """The rows are prompts of one token."""
    gate, offsets = ("bounded", None, None, -5.0), torch.arange(len(q) + 1, device=q.device)
    x = (y[None] for y in (q, k, v, g, g))
    return gla.chunk_delta_pool(*x, pool, offsets, slots, normalize=1e-6, gate=gate, beta_limit=1.0)[0]


@pytest.mark.parametrize("call", [ssd_step, layer_step, delta_step, delta_prompt])
def test_activations_of_rows_that_fill_no_vector(device, call):
    """A row has five heads. On a CPU, PyTorch computes some activations of the last numbers of a tensor otherwise."""
    torch.manual_seed(0)
    B = 30
    q, k = torch.randn(2, B, 5, 8, device=device)
    v, g, pool = (torch.randn(B, 5, *width, device=device) for width in ((8,), (), (8, 8)))
    slots, together = torch.arange(B, device=device), pool.clone()
    with gla.batch_invariant(TOKENS):
        o = call(q, k, v, g, together, slots)
        for b in range(B):
            row, alone = slice(b, b + 1), pool.clone()
            assert torch.equal(call(*(y[row] for y in (q, k, v, g)), alone, slots[row]), o[row])
            assert torch.equal(alone[b], together[b])


@pytest.mark.thorough
def test_checkpoints_stand_where_they_do_without(device, backend):
    x, _, _ = inputs(device)
    calls = [
        (x.q, x.k, x.v, x.g, 0.3, x.initial_state, True, x.cu_seqlens),
        (*(y[:, :196].reshape(2, 98, *y.shape[2:]) for y in (x.q, x.k, x.v, x.g)), 0.3, x.initial_state[:2], True),
    ]
    for call in calls:
        *_, expected = gla.chunk_gla(*call, backend="reference", checkpoint_every=64)
        with gla.batch_invariant(128):
            *_, actual = gla.chunk_gla(*call, backend=backend, checkpoint_every=64)
        assert relative_error(actual, expected) <= 2 * FORWARD[x.q.dtype]


# ---- when it is in force


@pytest.mark.usefixtures("fresh_registry")
def test_who_asks(monkeypatch):
    """A block overrides the variable, and an inner block an outer one; a backend's name overrides neither."""
    q, k, v = (torch.randn(1, 3, 1, 4) for _ in range(3))

    def asked(**options):
        return gla.explain("chunk_gla_fwd", q, k, v, **options).call.batch_invariant

    assert asked() is None
    with gla.batch_invariant():
        assert asked() == asked(backend="reference") == 4096
        with gla.use_backend("reference"):
            assert asked() == 4096
        with gla.batch_invariant(64):
            assert asked() == 64
        with gla.use_backend("batch_invariant=0"):
            assert asked() is None
    monkeypatch.setenv("GLA_BATCH_INVARIANT", "128")
    gla.reload_environment()
    assert asked() == 128
    with gla.batch_invariant(64):
        assert asked() == 64


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("tokens", [1, 100, -64, "many"])
def test_what_is_no_multiple_of_64(monkeypatch, tokens):
    with pytest.raises(ValueError, match=r"^batch_invariant: tokens is .*; expected a multiple of 64"):
        gla.batch_invariant(tokens)
    monkeypatch.setenv("GLA_BATCH_INVARIANT", str(tokens))
    gla.reload_environment()
    with pytest.raises(ValueError, match=r"GLA_BATCH_INVARIANT: .* expected a multiple of 64"):
        gla.chunk_gla(*(torch.randn(1, 3, 1, 4) for _ in range(3)))


def test_other_ops_say_that_they_do_not_keep_it():
    with gla.batch_invariant(), pytest.raises(NotImplementedError, match="online_softmax is not batch-invariant"):
        gla.online_softmax(torch.randn(2, 3))


def test_checkpoints_have_to_fit_into_segments():
    q, k, v = (torch.randn(1, 300, 1, 4) for _ in range(3))
    with gla.batch_invariant(128), pytest.raises(ValueError, match="divisor of the 128 tokens"):
        gla.chunk_gla(q, k, v, checkpoint_every=192, backend="reference")


def test_a_backward_without_its_forward_says_so():
    q, k, v = (torch.randn(1, 70, 1, 4, requires_grad=True) for _ in range(3))
    backward = {"chunk_gla_bwd": get("reference").ops["chunk_gla_bwd"]}
    request = "chunk_gla_fwd=reference;chunk_gla_bwd=alone"
    with gla.register(Backend("alone", "0", backward)), gla.batch_invariant(TOKENS):
        o, _ = gla.chunk_gla(q, k, v, backend=request)
        with pytest.raises(gla.NoBackendError, match="request a backend that implements both"):
            o.sum().backward()


def test_a_backward_runs_as_its_forward(device):
    """The backward uses it outside the block, too, on autograd's own thread if there is one."""
    x, do, _ = inputs(device)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
    with gla.batch_invariant(TOKENS):
        o, _ = gla.chunk_gla(*leaves, cu_seqlens=x.cu_seqlens)
        inside = torch.autograd.grad(o, leaves, do, retain_graph=True)
    outside = torch.autograd.grad(o, leaves, do)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("way", ["eager", "autocast", "create_graph"])
def test_a_block_around_a_backward_alone_changes_nothing(way):
    reference, seen = get("reference"), []

    def prepare(call):
        seen.append(call.batch_invariant)
        return reference.ops["chunk_gla_bwd"]

    backward = Prepared(prepare, BACKWARD.contract)
    q, k, v = (torch.randn(1, 70, 1, 4, requires_grad=True) for _ in range(3))
    mine = Backend("mine", "0", {**reference.ops, "chunk_gla_bwd": backward}, reference.can("chunk_gla_bwd"))
    with gla.register(mine):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            o, _ = gla.chunk_gla(q, k, v, backend="mine")
        with gla.batch_invariant(TOKENS):
            torch.autograd.grad(o.float().square().sum(), q, create_graph=way == "create_graph")
    assert seen == [None]


def test_mapped():
    x = gla_inputs(B=3, T=70, H=1, K=8, V=8)

    def forward(*args):
        return gla.chunk_gla(*(y[None] for y in args))[0][0]

    with gla.batch_invariant(TOKENS):
        expected = gla.chunk_gla(x.q, x.k, x.v, x.g)[0]
        assert torch.equal(torch.vmap(forward)(x.q, x.k, x.v, x.g), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside):
    x = gla_inputs(B=2, T=70, H=1, K=8, V=8)
    compiled = torch.compile(lambda *args: gla.chunk_gla(*args)[0], fullgraph=True, backend="aot_eager")

    def with_block(*args):
        with gla.batch_invariant(TOKENS):
            return gla.chunk_gla(*args)[0]

    with gla.batch_invariant(TOKENS):
        expected = gla.chunk_gla(x.q, x.k, x.v, x.g)[0]
        if not inside:
            assert torch.equal(compiled(x.q, x.k, x.v, x.g), expected)
    if inside:
        compiled = torch.compile(with_block, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.q, x.k, x.v, x.g), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 5, 72, 100, 128])
def test_a_pairwise_sum_does_not_depend_on_the_rows_beside_it(width, dtype):
    """The order of torch.sum depends on them if the numbers of a row lie apart in memory."""
    torch.manual_seed(0)
    x = torch.randn(width, 100).to(dtype).mT
    sums = pairwise_sum(x)
    assert sums.dtype == dtype
    assert torch.equal(sums, torch.stack([pairwise_sum(row) for row in x]))
    bound = torch.finfo(dtype).eps * math.ceil(math.log2(width)) / 2 * x.double().abs().sum(-1)
    assert ((sums.double() - x.double().sum(-1)).abs() <= bound + 1e-14).all()


def scan(q, x, dt, backend):
    return gla.chunk_ssd(q, q, x, dt, -torch.rand(2), torch.rand(2), z=x, dt_softplus=True, backend=backend)


def delta_rule(q, x, dt, backend):
    return gla.chunk_delta(
        q, q, x, dt, dt, normalize=1e-6, gate=("softplus", None, None), beta_limit=1, backend=backend
    )


@pytest.mark.parametrize(("module", "call"), [("gla.chunk_ssd", scan), ("delta.inputs", delta_rule)])
@pytest.mark.parametrize("by_argument", [True, False])
@pytest.mark.parametrize("tokens", [64, 0])
def test_nothing_around_an_op_is_compiled(tokens, by_argument, module, call, monkeypatch):
    """Compiled code may round otherwise for other shapes. A backward after the block has the setting of its forward."""
    fused, compiled = fused_module.fused, []
    monkeypatch.setattr(fused_module, "_compiled", lambda function: compiled.append(function) or function)
    monkeypatch.setattr(fused_module, "_has_triton", lambda: True)

    def fused_on_gpu(function, *args, **options):
        return fused(lambda gpu: function(*args), SimpleNamespace(is_cuda=True), **options)

    monkeypatch.setattr(importlib.import_module(f"gla_core.ops.{module}"), "fused", fused_on_gpu)
    q, x, dt = (torch.randn(1, 70, 2, *width, requires_grad=True) for width in ((8,), (4,), ()))
    setting = f"batch_invariant={tokens}"
    with contextlib.nullcontext() if by_argument else gla.use_backend(setting):
        o, _ = call(q, x, dt, setting if by_argument else None)
    o.sum().backward()
    assert bool(compiled) == (tokens == 0)
