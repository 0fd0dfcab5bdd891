"""Gates given as logits: the results are those of log gates that torch.nn.functional.logsigmoid computes."""

import dataclasses
import inspect
import io
import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    gradients,
    loss_gradients,
    oracle_gradients,
    oracle_results,
    random_logits,
    run,
    with_loss,
)
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, Capabilities, Prepared
from gla_core.dispatch.tensors import log_gates
from gla_core.workloads.inputs import gla_inputs, token_of

WIDE = torch.float64
FORMS = ("constant", "head", "key")
BACKENDS = ("reference", "parallel_scan,reference")
LOGITS = {"gate": "logsigmoid", "gate_normalizer": 4}
ALL_ROWS = {"slots": None}
PACKED = {"lengths": (0, 20, 65, 1), "padding": 7}


def inputs_of(form, **changes):
    """Returns float64 arguments of chunk_gla with logits of a form in place of gates, and an initial state."""
    sizes = {"T": 70, "R": 2, "K": 5, "V": 3, "dtype": WIDE, "gate_form": form, "initial_state": True, **changes}
    x = gla_inputs(**sizes)
    return dataclasses.replace(x, g=random_logits(x.g))


def values(x, number=4, **options):
    """Returns the oracle's results for logits."""
    return oracle_results("chunk_gla", x, gate_normalizer=number, **options)


def derivatives(x, number=4):
    """Returns the oracle's gradients for logits."""
    return oracle_gradients("chunk_gla", x, gate_normalizer=number)


def check(x, backend, number=4):
    """Compares results and gradients with the results and gradients of the oracle, which receives log gates."""
    options = {"gate": "logsigmoid", "gate_normalizer": number}
    compare(run("chunk_gla", x, backend, **options), values(x, number), FORWARD[x.q.dtype])
    compare(gradients("chunk_gla", x, backend, **options), derivatives(x, number), GRADIENT[x.q.dtype])


def compare(actual, expected, tolerance):
    for name, ref in expected.items():
        assert actual[name].shape == ref.shape, name
        assert relative_error(actual[name], ref) <= tolerance, name


def without_sequence(x):
    """Returns the index of the first row that belongs to no sequence, after filling these rows with NaN."""
    end = int(x.cu_seqlens[-1])
    for y in (x.q, x.k, x.v, x.g):
        if y.ndim > 1:  # a constant gate has no rows
            y[:, end:] = torch.nan
    return end


# ---- values and gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, backend):
    check(inputs_of(form), backend)
    check(inputs_of(form, R=1, G=2, **PACKED), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_logit_may_have_any_value(form, backend):
    """A logit of -inf closes a gate, and its gradient is 0; a logit of +inf opens a gate."""
    x = inputs_of(form, H=4)
    x.g[..., :4] = torch.tensor([torch.inf, -torch.inf, 800.0, -800.0], dtype=WIDE)
    check(x, backend, 1)
    dg = gradients("chunk_gla", x, backend, gate="logsigmoid")["dg"][..., :2]
    assert torch.equal(dg, torch.zeros_like(dg))


@pytest.mark.parametrize("number", [1, 16, np.int64(16), 16.0, 1000])
def test_every_whole_number_divides_the_log_gates(number):
    check(inputs_of("head", T=9), "reference", number)


def test_the_number_is_16_by_default():
    x = inputs_of("key", T=9)
    assert torch.equal(gla.chunk_gla(x.q, x.k, x.v, x.g, gate="logsigmoid").o, forward_of_16(x))


def forward_of_16(x):
    return gla.chunk_gla(x.q, x.k, x.v, x.g, gate="logsigmoid", gate_normalizer=16).o


def test_the_number_has_no_effect_on_log_gates():
    x = gla_inputs(T=9)
    assert torch.equal(gla.chunk_gla(x.q, x.k, x.v, x.g, gate_normalizer=3).o, gla.chunk_gla(x.q, x.k, x.v, x.g).o)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_has_the_shape_and_dtype_of_the_logits(form, dtype):
    """Log gates of bfloat16 logits are computed in float32: here they would be 0.3 % off in bfloat16."""
    x = inputs_of(form, dtype=torch.bfloat16, gate_dtype=dtype)
    dg = gradients("chunk_gla", x, "reference", ("g",), **LOGITS)["dg"]
    assert (dg.shape, dg.dtype) == (x.g.shape, dtype)
    state = values(x)["state"]
    assert relative_error(run("chunk_gla", x, "reference", **LOGITS)["state"], state) <= FORWARD[torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    x = inputs_of(form, B=1, T=3, K=3, V=2)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
    assert torch.autograd.gradcheck(lambda *tensors: gla.chunk_gla(*tensors, backend="reference", **LOGITS).o, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_belong_to_no_sequence_may_hold_anything(form, backend):
    x = inputs_of(form, **PACKED)
    expected = {**run("chunk_gla", x, backend, **LOGITS), **gradients("chunk_gla", x, backend, **LOGITS)}
    end = without_sequence(x)
    for name, y in {**run("chunk_gla", x, backend, **LOGITS), **gradients("chunk_gla", x, backend, **LOGITS)}.items():
        assert torch.equal(y, expected[name]), name
        if name not in ("state", "dinitial_state") and y.ndim > 1:
            assert not y[:, end:].any(), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, (0, 70, 130, 0)], ids=str)
def test_checkpoints(form, lengths):
    """The forward returns the states, and the backward uses them."""
    x = inputs_of(form, T=150, lengths=lengths)
    tensors = (x.q, x.k, x.v, x.g, None, x.initial_state)
    actual = gla.chunk_gla(*tensors, False, x.cu_seqlens, checkpoint_every=64, **LOGITS).checkpoints
    expected = values(x, checkpoint_every=64)["checkpoints"]
    assert relative_error(actual, expected) <= FORWARD[WIDE]
    y = {**with_loss("chunk_gla_bwd", x), "checkpoint_every": 64, "gate_normalizer": 4}
    grads = run("chunk_gla_bwd", y, "reference", checkpoints=expected)
    compare(grads, derivatives(x), GRADIENT[WIDE])
    changed = run("chunk_gla_bwd", y, "reference", checkpoints=2 * expected)
    assert not torch.equal(changed["dq"], grads["dq"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_step(form, inplace, backend):
    x = inputs_of(form, B=3, T=1)
    token = {name: token_of(getattr(x, name), 0) for name in "qkvg"}
    pool = torch.randn(5, *x.initial_state.shape[1:], dtype=WIDE)
    kwargs = {**token, "state": pool.clone(), "slots": torch.tensor([4, -1, 0])}
    expected = oracle_results("recurrent_gla_step", {**kwargs, "g": log_gates(token["g"], 4, WIDE)})
    o, state = gla.recurrent_gla_step(**kwargs, inplace=inplace, backend=backend, **LOGITS)
    compare({"o": o, "state": state}, expected, FORWARD[WIDE])
    swapped = kwargs | {"state": pool.mT.contiguous()}
    o, state = gla.recurrent_gla_step(**swapped, inplace=inplace, backend=backend, state_v_first=True, **LOGITS)
    compare({"o": o, "state": state.mT}, expected, FORWARD[WIDE])


@pytest.mark.parametrize("sizes", [{}, PACKED, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_summary_and_its_gradients(form, sizes):
    x = inputs_of(form, **sizes)
    wide = [y.to(WIDE, copy=True).requires_grad_() for y in (x.k, x.v, x.g)]
    if x.cu_seqlens is not None:
        without_sequence(x)
    leaves = [y.requires_grad_() for y in (x.k, x.v, x.g)]
    actual = gla.chunk_gla_summary(*leaves, x.cu_seqlens, backend="reference", **LOGITS)
    expected = oracle.chunk_gla_summary(*wide[:2], log_gates(wide[2], 4, WIDE), x.cu_seqlens)
    seeds = [torch.randn(y.shape, dtype=WIDE) for y in expected]
    compare(actual._asdict(), dict(zip(actual._fields, expected, strict=True)), FORWARD[x.k.dtype])
    grads = torch.autograd.grad(actual, leaves, [seed.to(y.dtype) for seed, y in zip(seeds, actual, strict=True)])
    wanted = torch.autograd.grad(expected, wide, seeds)
    compare(dict(zip("kvg", grads, strict=True)), dict(zip("kvg", wanted, strict=True)), GRADIENT[x.k.dtype])


@pytest.mark.parametrize("form", FORMS)
def test_a_summary_of_gradients(form):
    x = inputs_of(form, **PACKED)
    actual = gla.chunk_gla_gradient_summary(x.q, x.v, x.g, x.cu_seqlens, **LOGITS)
    expected = oracle.chunk_gla_summary(x.q, x.v, log_gates(x.g, 4, WIDE), x.cu_seqlens, True)
    for y, ref in zip(actual, expected, strict=True):
        assert relative_error(y, ref) <= FORWARD[WIDE]


def test_states_with_values_first():
    x = inputs_of("key")
    tensors = (x.q, x.k, x.v, x.g, None)
    expected = gla.chunk_gla(*tensors, x.initial_state, True, checkpoint_every=64, **LOGITS)
    options = {"checkpoint_every": 64, "state_v_first": True, **LOGITS}
    actual = gla.chunk_gla(*tensors, x.initial_state.mT.contiguous(), True, **options)
    for y, ref in zip(actual, (expected.o, expected.state.mT, expected.checkpoints.mT), strict=True):
        assert torch.equal(y, ref)


def test_logits_that_are_not_contiguous():
    x = inputs_of("key")
    repeated = x.g[..., :1].expand(-1, -1, -1, 5)
    expected = gla.chunk_gla(x.q, x.k, x.v, repeated.contiguous(), **LOGITS).o
    assert torch.equal(gla.chunk_gla(x.q, x.k, x.v, repeated, **LOGITS).o, expected)


@pytest.mark.parametrize("form", FORMS)
def test_batch_invariance(form):
    """Each packed sequence has the bits that it has alone, forwards and backwards."""
    x = inputs_of(form, **PACKED, dtype=torch.float32)
    do, dstate = loss_gradients("chunk_gla", x).values()
    with gla.batch_invariant(64):
        o, grads = run("chunk_gla", x, "reference", **LOGITS)["o"], gradients("chunk_gla", x, "reference", **LOGITS)
        for n, (first, last) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
            q, k, v, g = (oracle.tokens_of(y, first, last).contiguous() for y in (x.q, x.k, x.v, x.g))
            changes = {"initial_state": x.initial_state[n : n + 1], "cu_seqlens": None}
            alone = dataclasses.replace(x, q=q, k=k, v=v, g=g, **changes)
            assert torch.equal(run("chunk_gla", alone, "reference", **LOGITS)["o"], o[:, first:last])
            seeds = {"o": do[:, first:last].contiguous(), "state": dstate[n : n + 1]}
            for name, d in gradients("chunk_gla", alone, "reference", loss=seeds, **LOGITS).items():
                if name != "dinitial_state" and d.ndim > 1:
                    assert torch.equal(d, grads[name][:, first:last]), name
    compare(grads, derivatives(x), GRADIENT[torch.float32])


def test_steps_are_batch_invariant():
    x = inputs_of("key", B=3, T=1, dtype=torch.float32)
    q, k, v, g = (y[:, 0] for y in (x.q, x.k, x.v, x.g))
    with gla.batch_invariant():
        o, state = gla.recurrent_gla_step(q, k, v, g, x.initial_state, **LOGITS)
        alone = gla.recurrent_gla_step(q[1:2], k[1:2], v[1:2], g[1:2], x.initial_state[1:2], **LOGITS)
    assert torch.equal(alone[0], o[1:2])
    assert torch.equal(alone[1], state[1:2])
    arguments = {"q": q, "k": k, "v": v, "g": g, "state": x.initial_state}
    expected = oracle_results("recurrent_gla_step", arguments, gate_normalizer=4)
    compare({"o": o, "state": state}, expected, FORWARD[torch.float32])


def test_the_backward_keeps_the_logits_and_no_tensor_of_log_gates():
    """torch.nn.functional.logsigmoid would keep a float32 copy of the logits, and the op the log gates."""
    x = inputs_of("key", dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        gla.chunk_gla(x.q, x.k, x.v, x.g.requires_grad_(), **LOGITS)
    gate_dtypes = [y.dtype for y in kept if y is not None and y.shape == x.g.shape]
    assert gate_dtypes == [torch.bfloat16]


# ---- in PyTorch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_autocast(form, dtype):
    """Logits in autocast's dtype stay as they are, and other ones become float32."""
    x = inputs_of(form, dtype=torch.float32, gate_dtype=dtype)
    cast = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    q, k, v = (y.bfloat16() for y in (x.q, x.k, x.v))
    expected = gla.chunk_gla(q, k, v, x.g.to(cast), None, x.initial_state, True, **LOGITS)
    g = x.g.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        actual = gla.chunk_gla(x.q, x.k, x.v, g, None, x.initial_state, True, **LOGITS)
        token = (*(y[:, 0] for y in (x.q, x.k, x.v)), token_of(x.g, 0), x.initial_state)
        step = gla.recurrent_gla_step(*token, **LOGITS)
    assert torch.equal(actual.o, expected.o)
    assert torch.equal(actual.state, expected.state)
    (dg,) = torch.autograd.grad(actual.o.float().sum(), g)
    assert (dg.dtype, dg.shape) == (dtype, g.shape)
    token = (*(y[:, 0] for y in (q, k, v)), token_of(x.g.to(cast), 0), x.initial_state)
    assert all(torch.equal(y, ref) for y, ref in zip(step, gla.recurrent_gla_step(*token, **LOGITS), strict=True))


def test_autocast_hands_bfloat16_logits_to_the_backend():
    received = []

    def chunk_gla_fwd(q, k, v, g, scale, gate_normalizer):
        received.append((g.dtype, gate_normalizer))
        return torch.zeros_like(v), None, None

    x = inputs_of("key", R=1, dtype=torch.float32, gate_dtype=torch.bfloat16)
    with gla.register(Backend("mine", "1", {"chunk_gla_fwd": chunk_gla_fwd})), torch.autocast("cpu", torch.bfloat16):
        gla.chunk_gla(x.q, x.k, x.v, x.g, backend="mine", **LOGITS)
    assert received == [(torch.bfloat16, 4)]


def test_a_number_that_varies_in_a_compiled_graph():
    def function(q, k, v, g, number):
        return gla.chunk_gla(q, k, v, g, gate="logsigmoid", gate_normalizer=number).o * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    x = inputs_of("head", T=9)
    for number in (4, 16, 5):
        assert torch.equal(compiled(x.q, x.k, x.v, x.g, number), function(x.q, x.k, x.v, x.g, number))


def test_a_bad_number_is_refused_in_a_compiled_graph():
    def function(q, k, v, g):
        return gla.chunk_gla(q, k, v, g, gate="logsigmoid", gate_normalizer=1.5).o

    torch._dynamo.reset()
    x = inputs_of("head", T=9)
    with pytest.raises(Exception, match=r"gate_normalizer is 1\.5; expected a whole number"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v, x.g)


@pytest.mark.parametrize("number", [0, -4, 1.5, math.inf, math.nan, 2**31, 1e300, 10**30, True, "16", torch.tensor(4)])
def test_a_bad_number_is_refused(number):
    x = inputs_of("head", T=9)
    message = f"gate_normalizer is {number!r}; expected a whole number from 1 to"
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.chunk_gla(x.q, x.k, x.v, x.g, gate="logsigmoid", gate_normalizer=number)


def test_an_exported_program():
    class Module(torch.nn.Module):
        def forward(self, q, k, v, g):
            return gla.chunk_gla(q, k, v, g, output_final_state=True, **LOGITS)

    x, file = inputs_of("key"), io.BytesIO()
    torch.export.save(torch.export.export(Module(), (x.q, x.k, x.v, x.g)), file)
    file.seek(0)
    actual = torch.export.load(file).module()(x.q, x.k, x.v, x.g)
    compare(actual._asdict(), values(dataclasses.replace(x, initial_state=None)), FORWARD[WIDE])


# ---- backends that take log gates alone


def with_log_gates_only(function, received):
    """Returns a function of a backend like `function`, without gate_normalizer; it records the gates it receives."""
    names = [name for name in inspect.signature(function).parameters if name != "gate_normalizer"]

    def run(*args):
        kwargs = dict(zip(names, args, strict=True))
        received.append(kwargs["g"].detach().clone())
        return function(**kwargs, gate_normalizer=None)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    run.__signature__ = inspect.Signature(parameters)
    return run


def prepared(function, calls):
    """Returns a Prepared that runs `function`, and records the calls that it prepares."""

    def prepare(call):
        calls.append(call)
        return function

    return Prepared(prepare, tuple(inspect.signature(function).parameters), lambda call: [f"gates {call.gate_dtype}"])


@pytest.fixture(params=["functions", "prepared"])
def mine(request):
    """Registers the backend "mine", whose ops take no gate_normalizer.

    Returns:
        The gates that it receives, and the calls that it prepares.
    """
    ops, received, calls = registry.get("reference").ops, [], []
    names = ("chunk_gla_fwd", "chunk_gla_bwd", "chunk_gla_summary", "recurrent_gla_step")
    ours = {name: with_log_gates_only(ops[name], received) for name in names}
    if request.param == "prepared":
        ours = {name: prepared(function, calls) for name, function in ours.items()}
    can = Capabilities(gates=frozenset(FORMS), grouped_values=True, checkpoints=True)
    can = dataclasses.replace(can, dtypes=frozenset({torch.bfloat16, torch.float32, WIDE}))
    with gla.register(Backend("mine", "1", ours, can, cost=lambda call: 0.0)):
        yield received, calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, WIDE], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_backend_without_logits_receives_log_gates(mine, form, dtype):
    x, (received, calls) = inputs_of(form, dtype=dtype), mine
    check(x, "mine")
    wide = WIDE if dtype == WIDE else torch.float32
    assert [g.dtype for g in received] == [wide] * 3  # two forwards and a backward
    for g in received:
        torch.testing.assert_close(g, F.logsigmoid(x.g.to(wide)) / 4)
    for call in calls:
        assert (call.gate_dtype, call.scalars["gate_normalizer"], call.layouts["g"].dtype) == (wide, None, wide)
        assert "gate_normalizer" not in call.given
    assert gradients("chunk_gla", x, "mine", ("g",), **LOGITS)["dg"].dtype == dtype


@pytest.mark.parametrize("inplace", [False, True])
def test_its_step(mine, inplace):
    x = inputs_of("key", B=3, T=1, dtype=torch.bfloat16)
    token = {name: getattr(x, name)[:, 0] for name in "qkvg"}
    expected = oracle_results(
        "recurrent_gla_step",
        {**token, "g": log_gates(token["g"], 4, WIDE), "state": x.initial_state.clone(), **ALL_ROWS},
    )
    state = x.initial_state.clone()
    o, new = gla.recurrent_gla_step(**token, state=state, inplace=inplace, backend="mine", **LOGITS)
    assert (new is state) == inplace
    compare({"o": o, "state": new}, expected, FORWARD[torch.bfloat16])


def test_its_summary(mine):
    x, (received, _) = inputs_of("head"), mine
    actual = gla.chunk_gla_summary(x.k, x.v, x.g, backend="mine", **LOGITS)
    torch.testing.assert_close(received, [log_gates(x.g, 4, WIDE)])
    for y, ref in zip(actual, oracle.chunk_gla_summary(x.k, x.v, log_gates(x.g, 4, WIDE)), strict=True):
        assert relative_error(y, ref) <= FORWARD[WIDE]


def test_its_other_arguments(mine):
    """Checkpoints, packed sequences with NaN after the last one, repeated logits, and batch invariance."""
    x = inputs_of("key", **PACKED, dtype=torch.float32)
    expected, dexpected = (values(x), derivatives(x))
    end = without_sequence(x)
    with gla.batch_invariant(64):
        compare(run("chunk_gla", x, "mine", **LOGITS), expected, FORWARD[torch.float32])
    tensors = (x.q, x.k, x.v, x.g, None, x.initial_state, True, x.cu_seqlens)
    o, state, _ = gla.chunk_gla(*tensors, backend="mine", checkpoint_every=64, **LOGITS)
    compare({"o": o, "state": state}, expected, FORWARD[torch.float32])
    grads = gradients("chunk_gla", x, "mine", **LOGITS)
    compare(grads, dexpected, GRADIENT[torch.float32])
    assert not grads["dg"][:, end:].any()
    y = inputs_of("key")
    repeated = dataclasses.replace(y, g=y.g[..., :1].expand(-1, -1, -1, 5))
    check(repeated, "mine")


def test_auto_selects_it_and_explain_describes_what_it_receives(mine):
    x, (received, calls) = inputs_of("key", T=9, dtype=torch.bfloat16), mine
    gla.chunk_gla(x.q, x.k, x.v, x.g, **LOGITS)
    assert len(received) == 1
    explanation = gla.explain("chunk_gla", x.q, x.k, x.v, x.g, gate="logsigmoid", gate_normalizer=4)
    assert explanation.winner == "mine"
    (candidate,) = (c for c in explanation.candidates if c.name == "mine")
    assert candidate.kernels == (("gates torch.float32",) if calls else ())


def test_a_backend_judges_the_call_that_it_receives():
    """Its `supports` and its cost model see float32 log gates, which are what its function reads."""
    seen = []

    def supports(call):
        seen.append((call.gate_dtype, call.scalars["gate_normalizer"]))
        return None if call.gate_dtype == torch.float32 else "reads float32 gates"

    def cost(call):
        seen.append((call.gate_dtype, call.scalars["gate_normalizer"]))
        return 0.0

    function = with_log_gates_only(registry.get("reference").ops["chunk_gla_fwd"], [])
    x = inputs_of("key", T=9, R=1, dtype=torch.bfloat16)
    with gla.register(Backend("mine", "1", {"chunk_gla_fwd": function}, supports=supports, cost=cost)):
        assert gla.explain("chunk_gla", x.q, x.k, x.v, x.g, gate="logsigmoid").winner == "mine"
        assert set(seen) == {(torch.float32, None)}
        with pytest.raises(gla.NoBackendError, match="mine: reads float32 gates"):
            gla.chunk_gla(x.q, x.k, x.v, x.g, backend="mine")


@pytest.mark.parametrize(("forward_takes", "backward_takes"), [(True, False), (False, True)])
def test_a_backend_with_logits_in_one_direction(forward_takes, backward_takes):
    ops = registry.get("reference").ops
    ours = {
        name: ops[name] if takes else with_log_gates_only(ops[name], [])
        for name, takes in (("chunk_gla_fwd", forward_takes), ("chunk_gla_bwd", backward_takes))
    }
    can = dataclasses.replace(registry.get("reference").capabilities, checkpoints=True)
    with gla.register(Backend("mine", "1", ours, can)):
        check(inputs_of("head"), "mine")
        with gla.batch_invariant(64):
            check(inputs_of("head", **PACKED), "mine")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda actual: actual[:3], "returned 3 values; expected a tuple"),
        (lambda actual: None, "returned None; expected a tuple"),
        (lambda actual: (*actual[:3], None, actual[4]), "returned None for dg; expected a tensor"),
        (lambda actual: (*actual[:3], actual[3][..., :1], actual[4]), "returned dg of shape [1, 9, 2, 1]; expected"),
    ],
)
def test_wrong_results_of_its_backward_are_refused(wrong, message):
    function = with_log_gates_only(registry.get("reference").ops["chunk_gla_bwd"], [])

    def chunk_gla_bwd(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate):
        return wrong(function(q, k, v, g, scale, initial_state, cu_seqlens, checkpoints, checkpoint_every, do, dstate))

    x = inputs_of("key", B=1, T=9, R=1, dtype=torch.float32)
    with (
        gla.register(Backend("mine", "1", {"chunk_gla_bwd": chunk_gla_bwd})),
        pytest.raises(gla.BackendError, match=re.escape(message)),
    ):
        gradients("chunk_gla", x, "chunk_gla_bwd=mine;*=reference", **LOGITS)


# ---- explain


@pytest.mark.parametrize("op", ["chunk_gla", "chunk_gla_bwd"])
def test_explain(op):
    x = inputs_of("head", T=9)
    explanation = gla.explain(op, x.q, x.k, x.v, g=x.g, gate="logsigmoid")
    assert explanation.call.scalars["gate_normalizer"] == 16
    assert "gates per head, gates from logits" in str(explanation)
    assert explanation.call == gla.explain(op, x.q, x.k, x.v, x.g, gate_normalizer=16).call
    plain = gla.explain(op, x.q, x.k, x.v, x.g)
    assert "logits" not in str(plain)
    assert gla.explain(op, x.q, x.k, x.v, x.g, gate=None, gate_normalizer=4).call == plain.call


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "sigmoid"}, "gate is 'sigmoid'; expected 'logsigmoid'"),
        ({"gate": "logsigmoid", "gate_normalizer": 0}, "gate_normalizer is 0; expected a whole number"),
        ({"gate": "logsigmoid", "g": None}, "gate is 'logsigmoid' and g is None"),
        ({"gate_normalizer": 0}, "gate_normalizer is 0; expected 1 to 2147483647, or None if g holds log gates"),
        ({"gate_normalizer": 4, "g": None}, "gate_normalizer is 4 and g is None; expected the logits"),
    ],
)
@pytest.mark.parametrize("op", ["chunk_gla", "chunk_gla_bwd", "recurrent_gla_step"])
def test_explain_refuses_what_a_call_refuses(op, options, message):
    x = inputs_of("key", B=3, T=1)
    tokens = {name: getattr(x, name) for name in "qkvg"}
    if op == "recurrent_gla_step":
        tokens = {name: y[:, 0] for name, y in tokens.items()} | {"state": x.initial_state}
    with pytest.raises(ValueError, match=re.escape(message)):
        gla.explain(op, **(tokens | options))


def test_another_op_has_no_argument_gate():
    with pytest.raises(TypeError, match="got gate"):
        gla.explain("online_softmax", torch.randn(3, 4), gate="logsigmoid")
