"""Tests what public ops share: results with names, and arguments with the names and places of the version before."""

import inspect
import io
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs
from tests.ops.serving import LAYER_STEP, LONG, POOL, REPLAY, STEP, STEPS, arguments, call

X = gla_inputs(B=2, T=5, K=4, V=3, dtype=torch.float64, initial_state=True)
TOKENS = (X.q, X.k, X.v, X.g)
TOKEN = tuple(y[:, 0] for y in TOKENS)
STATE = X.initial_state
RESULTS = {
    "recurrent_gla_step": ((*TOKEN, STATE), gla.RecurrentGlaStep, ("o", "state")),
    "chunk_gla_summary": (TOKENS[1:], gla.ChunkGlaSummary, ("decay", "state")),
    "chunk_gla_gradient_summary": ((X.q, X.v, X.g), gla.ChunkGlaGradientSummary, ("decay", "dstate")),
    "softmax_attention": (TOKENS[:3], gla.SoftmaxAttention, ("o", "lse")),
    "merge_attention": ((X.v, X.v[..., 0], X.v, X.v[..., 0]), gla.SoftmaxAttention, ("o", "lse")),
}
OPTIONS = [{}, {"inplace": True}, {"state_v_first": True}, {"inplace": True, "state_v_first": True}]
CALLS = [(op, {}) for op in RESULTS if op != "recurrent_gla_step"] + [("recurrent_gla_step", x) for x in OPTIONS]


@pytest.mark.parametrize(("op", "options"), CALLS)
def test_results_have_names(op, options):
    args, kind, names = RESULTS[op]
    args = tuple(x.mT if x is STATE and options.get("state_v_first") else x for x in args)
    results = getattr(gla, op)(*(x.clone() for x in args), **options)
    first, second = results
    assert type(results) is kind
    assert results._fields == names
    assert getattr(gla, kind.__name__) is kind
    for i, (name, x) in enumerate(zip(names, (first, second), strict=True)):
        assert getattr(results, name) is x
        assert results[i] is x


class Module(torch.nn.Module):
    """Calls an op, and returns its results, one of them changed."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *args):
        results = getattr(gla, self.op)(*args)
        return type(results)(results[0] + 1, results[1])


@pytest.mark.parametrize("op", RESULTS)
def test_named_results_leave_graphs_programs_traces_and_transforms(op):
    args, kind, _ = RESULTS[op]
    expected = Module(op)(*args)
    torch._dynamo.reset()
    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(op), args), file)
    file.seek(0)
    computed = {
        "compiled": torch.compile(Module(op), fullgraph=True, backend="aot_eager")(*args),
        "exported": torch.export.load(file).module()(*args),
        "vmap": torch.vmap(getattr(gla, op))(*(x[None] for x in args)),
    }
    for name, results in computed.items():
        assert type(results) is kind, name
    computed["vmap"] = kind(computed["vmap"][0][0] + 1, computed["vmap"][1][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        computed["traced"] = torch.jit.trace(Module(op), args)(*args)
    for name, results in computed.items():
        torch.testing.assert_close(results, expected, msg=name)


# ---- arguments as the version before took them


SLOTS = torch.tensor([1, 0])
SNAPSHOTS = {"snapshot_offsets": torch.tensor([64, 64]), "snapshot_slots": torch.tensor([2, 3])}
WITH_NEW_NAMES = {
    STEP: dict(zip(("q", "k", "v", "g", "state", "slots"), (*TOKEN, STATE, SLOTS), strict=True)),
    LAYER_STEP: arguments(LAYER_STEP, slots=SLOTS),
    POOL: arguments(POOL, LONG, **SNAPSHOTS),
}
RENAMED = [
    (STEP, "state_indices", "slots"),
    (LAYER_STEP, "state_indices", "slots"),
    (POOL, "checkpoint_offsets", "snapshot_offsets"),
    (POOL, "checkpoint_slots", "snapshot_slots"),
]


def copied(x):
    return tree_map(lambda y: y.clone() if isinstance(y, torch.Tensor) else y, x)


def assert_same(a, b):
    """Checks that two results, with the arguments that their calls wrote, have the same bits."""
    for y, ref in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert torch.equal(y, ref) if isinstance(y, torch.Tensor) else y == ref


@pytest.mark.parametrize(("op", "old", "new"), RENAMED)
def test_an_old_name_warns_and_means_the_same(op, old, new):
    x, y = copied(WITH_NEW_NAMES[op]), copied(WITH_NEW_NAMES[op])
    expected = call(op, x)
    y[old] = y.pop(new)
    with pytest.warns(DeprecationWarning, match=f"{old} of {op} is now called {new}") as caught:
        results = call(op, y)
    assert [each.filename for each in caught] == [call.__code__.co_filename]
    y[new] = y.pop(old)
    assert_same((results, dict(sorted(y.items()))), (expected, dict(sorted(x.items()))))
    with pytest.raises(TypeError, match=f"{op} got {new} and {old}, its name in version 0.1; pass {new} only"):
        call(op, {**x, old: x[new]})


def test_an_old_name_in_a_compiled_graph():
    def step(q, state):
        return gla.recurrent_gla_step(q, *TOKEN[1:], state, state_indices=SLOTS)

    torch._dynamo.reset()
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(TOKEN[0], STATE)
    expected = gla.recurrent_gla_step(*TOKEN, STATE, slots=SLOTS)
    assert torch.equal(results.o, expected.o)
    assert torch.equal(results.state, expected.state)


def in_order(op):
    """Returns the positional arguments of an op in order."""
    kwargs, parameters = arguments(op), inspect.signature(getattr(gla, op)).parameters.values()
    return tuple(kwargs.get(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


BY_POSITION = {
    "chunk_gla": (*TOKENS, None, None, False, None),
    "linear_attention": (*TOKENS[:3], None, False, 1.0, None, False, None),
    "chunk_gla_summary": (*TOKENS[1:], None),
    "chunk_gla_gradient_summary": (X.q, X.v, X.g, None),
    "recurrent_gla_step": (*TOKEN, STATE, None, None, False),
    "softmax_attention": (*TOKENS[:3], None, False),
    "online_softmax": (X.v, -1),
    **{op: in_order(op) for op in (POOL, STEPS, REPLAY, LAYER_STEP)},
}


@pytest.mark.parametrize("op", BY_POSITION)
def test_a_backend_by_position_warns_and_means_the_same(op):
    function, args = getattr(gla, op), BY_POSITION[op]
    with pytest.warns(DeprecationWarning, match=f"pass backend to {op} by name; version 0.3") as caught:
        results = function(*copied(args), "reference")
    assert [each.filename for each in caught] == [__file__]
    assert_same(results, function(*copied(args), backend="reference"))
    with (
        pytest.raises(gla.UnknownBackendError, match="mine"),
        pytest.warns(DeprecationWarning, match="version 0.3 does not take it by position"),
    ):
        function(*copied(args), "mine")
    with pytest.raises(TypeError, match=f"{op} got backend by position and by name"):
        function(*args, "reference", backend="reference")
    with pytest.raises(TypeError, match=f"{op} got too many positional arguments"):
        function(*args, "reference", None)
