"""Properties of the ops that write states in place: messages, checks of values, PyTorch, and backends of others."""

import re

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import GATES, Backend, Capabilities, Prepared, arguments_of
from gla_core.ops import ABSTRACT_OPS
from tests.ops.serving import (
    LAYER_STEP,
    LONG,
    OPS,
    POOL,
    REPLAY,
    STEPS,
    arguments,
    assert_computed,
    call,
    check,
    expected,
    ints,
    keyword_only_forward,
    keyword_only_step,
    memory,
    plain_forward,
    plain_step,
    written,
)

ones = torch.ones
NAN = torch.nan
FLAGS = torch.tensor([True, False])
NUMBERS = ("slots", "ring_start", "num_accepted")


def packed(op):
    """Returns the sizes of a call with two packed sequences."""
    return {"lengths": (3, 3), **{name: y for name, y in OPS[op].items() if name not in ("B", "T")}}


def replay(**sizes):
    """Returns the sizes of a replay, with changes."""
    return {**OPS[REPLAY], **sizes}


def kept(offsets, slots):
    """Returns the arguments of snapshots."""
    return {"snapshot_offsets": ints(*offsets), "snapshot_slots": ints(*slots)}


def by_op(table):
    """Returns the rows of a table, each with the name of its op."""
    return [(op, *row) for op, rows in table.items() for row in rows]


def named(x):
    return x if isinstance(x, str) else ""


PACKED_STEPS, PACKED_REPLAY = packed(STEPS), packed(REPLAY)
TWO_ROWS = {"q": ones(2, 8, 2, 4), "k": ones(2, 8, 2, 4), "v": ones(2, 8, 2, 3), "g": None}
BAD = {}
BAD[POOL] = [
    ({"read_slots": ints(0, 1, 2)}, ValueError, "read_slots has 3 entries; expected 2, one for each sequence of cu_"),
    ({"write_slots": ints(0)}, ValueError, "write_slots has shape [1]; expected [N] with N=2"),
    ({"read_slots": torch.zeros(2)}, TypeError, "read_slots is float32; expected int32 or int64"),
    ({"read_slots": None}, TypeError, "read_slots is NoneType; expected a tensor [N]"),
    ({"cu_seqlens": None}, TypeError, "cu_seqlens is NoneType; expected a tensor [N+1]"),
    ({"cu_seqlens": ints()}, ValueError, "cu_seqlens is empty; expected N+1 offsets"),
    (TWO_ROWS, ValueError, "cu_seqlens goes with B = 1; q has B = 2"),
    ({"has_state": ints(0, 1, dtype=torch.int32)}, TypeError, "has_state is int32; expected bool"),
    ({"has_state": ones(3, dtype=torch.bool)}, ValueError, "has_state has shape [3]; expected [N] with N=2"),
    ({"snapshot_offsets": ints(0, 0)}, ValueError, "snapshot_offsets is given and snapshot_slots is None"),
    ({"snapshot_slots": ints(0, 0)}, ValueError, "snapshot_slots is given and snapshot_offsets is None"),
    ({"pad_slot": 1.0}, TypeError, "pad_slot is float; expected an integer"),
    ({"pool": ones(6, 2, 3, 4)}, ValueError, "pool has shape [6, 2, 3, 4]; expected [P, Hv, K, V] with Hv=2"),
    ({"pool": ones(6, 2, 4, 3).double()}, TypeError, "pool is float64; expected float32 or bfloat16 or"),
    ({"pool": ones(1, 2, 4, 3).expand(6, -1, -1, -1)}, ValueError, "pool has stride 0 along dimension 0"),
    ({"pool": ones(6, 2, 4, 6)[..., ::2]}, ValueError, "its last dimension, or the one before, must be"),
    ({"out": ones(1, 8, 2, 4)}, ValueError, "out has shape [1, 8, 2, 4]; expected [B, T, Ho, V] with"),
    ({"out": ones(1, 8, 2, 3).half()}, TypeError, "out is float16; expected float32, as q"),
    ({"out": ones(1, 8, 2, 6)[..., ::2]}, ValueError, "out has strides (96, 12, 6, 2) and is written in place"),
    ({"gate": "sigmoid"}, ValueError, "gate is 'sigmoid'; expected 'logsigmoid'"),
    ({"max_seqlen": -1}, ValueError, "max_seqlen is -1; expected the tokens of the longest sequence"),
    ({"snapshot_slots": torch.zeros(2)}, TypeError, "snapshot_slots is float32; expected int32 or int64"),
]  # fmt: skip
BAD[STEPS] = [
    ({"slots": ints((4, 1, 0))}, ValueError, "slots has 1 rows; expected 2, one for each row of q"),
    ({"slots": ints(4, 1)}, ValueError, "q has T = 3 tokens for each sequence and slots has 1 columns"),
    ({"slots": torch.zeros(2, 9, dtype=torch.int64)}, ValueError, "slots has 9 columns; expected 1 to 8"),
    ({"slots": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "slots has 0 columns; expected 1 to 8"),
    ({"slots": torch.zeros(2, 3)}, TypeError, "slots is float32; expected int32 or int64"),
    ({"sizes": PACKED_STEPS, "slots": ints((4, 1, 0))},
     ValueError, "slots has 1 rows; expected 2, one for each sequence of cu_seq"),
    ({"cu_seqlens": ints(0, 3, 6)}, ValueError, "cu_seqlens goes with B = 1; q has B = 2"),
    ({"num_accepted": ints(1)}, ValueError, "num_accepted has shape [1]; expected [N] with N=2"),
    ({"read_slots": torch.zeros(2)}, TypeError, "read_slots is float32; expected int32 or int64"),
    ({"has_state": ints(1, 1)}, TypeError, "has_state is int64; expected bool"),
    ({"pool": ones(8, 2, 4, 6)[..., ::2]}, ValueError, "its last dimension, or the one before, must be"),
    ({"out": ones(2, 3, 2, 4)}, ValueError, "out has shape [2, 3, 2, 4]; expected [B, T, Ho, V] with"),
]  # fmt: skip
BAD[REPLAY] = [
    ({"slots": ints(4)}, ValueError, "ring_start has shape [2]; expected [N] with N=1"),
    (dict.fromkeys(NUMBERS, ints(4)), ValueError, "slots has 1 entries; exp"),
    ({"sizes": PACKED_REPLAY} | dict.fromkeys(NUMBERS, ints(4)), ValueError, "each sequence of cu_seq"),
    ({"slots": torch.zeros(2)}, TypeError, "slots is float32; expected int32 or int64"),
    ({"num_accepted": None}, TypeError, "num_accepted is NoneType; expected a tensor [N]"),
    ({"has_state": ints(1, 1)}, TypeError, "has_state is int64; expected bool"),
    ({"sizes": replay(L=5)}, ValueError, "q has T = 3 tokens for each sequence and ring_k has L = 5; expected L of at"),
    ({"sizes": replay(L=1)}, ValueError, "ring_k has L = 1 tokens; expected 2 to 16: twice the tokens of a sequence"),
    ({"sizes": replay(L=17)}, ValueError, "ring_k has L = 17 tokens; expected 2 to 16: twice the tokens of a sequence"),
    ({"ring_v": ones(8, 5, 2, 3)}, ValueError, "ring_v has shape [8, 5, 2, 3]; expected [P, L, Hv, V]"),
    ({"ring_k": ones(8, 6, 2, 4).half()}, TypeError, "ring_k is float16; expected float32, as q"),
    ({"ring_k": ones(8, 6, 2, 8)[..., ::2]}, ValueError, "its last dimension must be contiguous"),
    ({"ring_k": ones(8, 1, 2, 4).expand(8, 6, 2, 4)}, ValueError, "ring_k has stride 0 along dimension"),
    ({"ring_g": None}, ValueError, "ring_g is None and g has shape [2, 3, 2, 4]; expected memory [P, L,"),
    ({"ring_g": ones(8, 6, 2)}, ValueError, "ring_g has shape [8, 6, 2]; expected [P, L, Hv, K], because"),
    ({"ring_g": ones(8, 6, 2, 4).bfloat16()}, TypeError, "ring_g is bfloat16; expected float32"),
    ({"sizes": replay(gate_form="constant"), "ring_g": ones(8, 6, 2)},
     ValueError, "ring_g is given and g is constant; expected None"),
    ({"sizes": replay(gates="none"), "ring_g": ones(8, 6, 2)},
     ValueError, "ring_g is given and g is None; expected None"),
    ({"pool": ones(7, 2, 4, 3)}, ValueError, "pool has shape [7, 2, 4, 3]; expected [P, Hv, K, V]"),
    ({"pool": ones(8, 2, 4, 6)[..., ::2]}, ValueError, "its last dimension, or the one before, must be"),
    ({"cu_seqlens": ints(0, 3, 6)}, ValueError, "cu_seqlens goes with B = 1; q has B = 2"),
    ({"out": ones(2, 3, 2, 4)}, ValueError, "out has shape [2, 3, 2, 4]; expected [B, T, Ho, V] with"),
]  # fmt: skip
BAD[LAYER_STEP] = [
    ({"v": ones(2, 2, 3).half()}, TypeError, "v is float16; expected float32, as q"),
    ({"state": ones(3, 2, 4, 3)}, ValueError, "state has shape [3, 2, 4, 3]; expected [P, Hv, K, V] with P=2"),
    ({"state": ones(2, 2, 4, 1).expand(-1, -1, -1, 3)}, ValueError, "state has stride 0 along dimension 3 of size 3"),
    ({"output_gate": ones(2, 2, 3)}, ValueError, "output_gate has 2 heads; expected 4, as o"),
    ({"output_gate": ones(2, 4, 5)}, ValueError, "output_gate has shape [2, 4, 5]; expected [B, Ho, V] with B=2, V=3"),
    ({"output_gate": ones(2, 4, 3).half()}, TypeError, "output_gate is float16; expected float32, as q"),
    ({"norm_weight": ones(12)}, ValueError, "norm_weight has shape [12]; expected [V] with V=3"),
    ({"norm_weight": ones(3).double()}, TypeError, "norm_weight is float64; expected float32, as q or float32"),
    ({"norm_eps": "1e-5"}, TypeError, "norm_eps is str; expected a number"),
    ({"activation": "relu"}, ValueError, "activation is 'relu'; expected 'silu' or 'sigmoid'"),
    ({"activation": None}, TypeError, "activation is NoneType; expected a name"),
    ({"gate": "sigmoid"}, ValueError, "gate is 'sigmoid'; expected 'logsigmoid'"),
    ({"slots": torch.zeros(2)}, TypeError, "slots is float32; expected int32 or int64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "error", "message"), by_op(BAD), ids=named)
def test_refused_with_a_message_before_anything_is_written(op, changes, error, message):
    x = arguments(op, **changes)
    before = {name: y.clone() for name, y in memory(op, x).items()}
    with pytest.raises(error, match=re.escape(message)):
        call(op, x)
    assert all(torch.equal(y, before[name]) for name, y in memory(op, x).items())


SIZES_OF_VALUES = {POOL: {"sizes": LONG}}
BAD_VALUES = {}
BAD_VALUES[POOL] = [
    ({"read_slots": ints(3, 3)}, "read_slots[1] is 3, which sequence 0 writes too, by read_slots; expected no"),
    ({"write_slots": ints(3, 3)}, "write_slots[1] is 3, which sequence 0 writes too, by write_slots; expected no slot"),
    ({"write_slots": ints(1, 0)}, "read_slots[1] is 1, which sequence 0 writes; expected a slot that no"),
    ({"cu_seqlens": ints(0, 7, 5)}, "expected offsets from 0 to T = 200 that do not descend"),
    ({"max_seqlen": 7}, "max_seqlen is 7; the longest sequence of cu_seqlens has 130 tokens"),
    (kept((0, 100), (0, 2)), "snapshot_offsets[1] is 100; expected a multiple of 64"),
    (kept((64, 64), (2, 4)), "snapshot_slots[1] is 4, which sequence 0 writes too, by read"),
    (kept((64, 0), (1, 2)), "snapshot_slots[0] is 1, which sequence 1 writes too"),
    ({"pool": torch.full((6, 1, 2, 2), NAN)}, "pool holds NaN in 8 of 8 places"),
    ({"g": ones(1, 200, 1, 2)}, "g has values up to 1.0; expected the log of a forget gate"),
]  # fmt: skip
BAD_VALUES[STEPS] = [
    ({"slots": ints((4, 1, 4), (2, 3, 5))}, "slots[:, 2][0] is 4, which sequence 0 writes too, by slots[:, 0]"),
    ({"read_slots": ints(6, 1)}, "read_slots[1] is 1, which sequence 0 writes; expected a slot that no"),
    ({"sizes": PACKED_STEPS, "cu_seqlens": ints(0, 4, 6)}, "sequence 0 has 4 tokens; slots has 3 columns"),
    ({"pool": torch.full((8, 2, 4, 3), NAN)}, "pool holds NaN in 48 of 48 places"),
]  # fmt: skip
BAD_VALUES[REPLAY] = [
    ({"slots": ints(4, 4)}, "slots[1] is 4, which sequence 0 writes too, by slots; expected no slot twice"),
    ({"sizes": {**PACKED_REPLAY, "lengths": (4, 2)}}, "sequence 0 has 4 tokens; a ring of L = 6 tokens serves 3"),
    ({"pool": torch.full((8, 2, 4, 3), NAN)}, "pool holds NaN in 48 of 48 places"),
    ({"ring_v": torch.full((8, 6, 2, 3), NAN)}, "ring_v holds NaN in 24 of 24 places"),
    ({"g": ones(2, 3, 2, 4)}, "g has values up to 1.0; expected the log of a forget gate"),
]  # fmt: skip
BAD_VALUES[LAYER_STEP] = [
    ({"norm_weight": torch.full((3,), NAN)}, "norm_weight holds NaN in 3 of 3 places"),
    ({"g": ones(2, 2, 4)}, "g has values up to 1.0; expected the log of a forget gate"),
    ({"slots": ints(1, 1)}, "slots is [1, 1]; expected no state twice"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "message"), by_op(BAD_VALUES), ids=named)
def test_values_are_checked_on_request(op, changes, message, check_values):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(op, arguments(op, **(SIZES_OF_VALUES.get(op, {}) | changes)))


GOOD_VALUES = {
    POOL: [
        {"read_slots": ints(3, 3), "write_slots": ints(0, 1)},  # one prefix, two requests
        {"read_slots": ints(-1, -1)},
        {"read_slots": ints(5, 5), "pad_slot": 5},
        {"write_slots": ints(1, 0), "has_state": FLAGS},  # a new sequence reads no slot
        {"write_slots": ints(2, 3), **kept((100, 0), (2, 2))},  # none is kept: the first sequence has 70 tokens
        kept((64, 128), (0, 9)),
        {"pool": torch.full((6, 1, 2, 2), NAN), "has_state": FLAGS & False},
    ],
    STEPS: [
        {"read_slots": ints(6, 6)},  # one prefix, two requests
        {"slots": ints((4, 1, -1), (2, -1, 9))},
        {"has_state": FLAGS & False, "pool": torch.full((8, 2, 4, 3), NAN)},
        {"read_slots": ints(-1, 1), "slots": ints((4, 1, 0), (1, 3, 5))},  # a skipped sequence writes nothing
        {"num_accepted": ints(9, 0)},
    ],
    REPLAY: [
        {"slots": ints(-1, -1)},
        {"has_state": FLAGS & False, "pool": torch.full((8, 2, 4, 3), NAN)},
        {"num_accepted": ints(9, -1)},
        {"num_accepted": ints(0, 0), "ring_k": torch.full((8, 6, 2, 4), NAN)},
    ],
}


@pytest.mark.parametrize(("op", "changes"), [(op, changes) for op, rows in GOOD_VALUES.items() for changes in rows])
def test_good_values_pass_the_checks(op, changes, check_values):
    check(op, arguments(op, **(SIZES_OF_VALUES.get(op, {}) | changes)))


# ---- PyTorch

OUTS = {POOL: ones(1, 8, 2, 3), STEPS: ones(2, 3, 2, 3), REPLAY: ones(2, 3, 2, 3)}


def with_out(op):
    """Returns the arguments of a call, with memory for its output if the op takes that."""
    return arguments(op, **({"out": OUTS[op].clone()} if op in OUTS else {}))


INPUTS = {
    POOL: ("q", "k", "v", "g", "pool"),
    STEPS: ("v", "pool"),
    REPLAY: ("v", "pool", "ring_k"),
    LAYER_STEP: ("v", "state", "output_gate", "norm_weight"),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in INPUTS.items() for name in names])
def test_it_has_no_backward(op, name):
    x = arguments(op)
    x[name].requires_grad_()
    message = f"{op} has no backward and an input requires a gradient; train with chunk_gla"
    with pytest.raises(RuntimeError, match=message):
        call(op, x)
    with torch.no_grad():
        call(op, x)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in with_out(op) if name in written(op)])
def test_what_it_writes_is_seen_by_autograd(op, name):
    """A backward that needs the old values must fail, and not use the values that were written."""
    x = with_out(op)
    loss = (torch.ones(1, requires_grad=True) * x[name]).sum()
    call(op, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", OPS)
def test_it_runs_in_inference_mode(op):
    with torch.inference_mode():
        check(op, arguments(op))


@pytest.mark.parametrize("op", OPS)
def test_vmap_is_refused(op):
    x = arguments(op)
    with pytest.raises(NotImplementedError, match="transforms no op that writes a pool or a state; call chunk_gla"):
        torch.vmap(lambda q: call(op, {**x, "q": q}))(x["q"][None])


@pytest.mark.parametrize(("op", "has_out"), [*((op, False) for op in OPS), *((op, True) for op in OUTS)])
def test_one_graph_writes_its_memory(op, has_out):
    def function(y, x):
        return call(op, {**x, "q": y * 1.0}) + 1

    x = with_out(op) if has_out else arguments(op)
    x |= {POOL: {"has_state": FLAGS}, STEPS: {"num_accepted": ints(3, 1)}}.get(op, {})
    wanted = expected(op, x)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_computed(op, compiled(x["q"], x) - 1, x, wanted)


# ---- backends


LOGITS = {"gate": "logsigmoid", "gate_normalizer": 4}
FUNCTIONS = {
    "chunk_gla_fwd": (plain_forward, keyword_only_forward),
    "recurrent_gla_step": (plain_step, keyword_only_step),
}


@pytest.mark.parametrize("kind", ["plain", "keyword_only", "prepared"])
@pytest.mark.parametrize("op", OPS)
def test_any_implementation_of_its_part_computes_it(op, kind):
    part = ABSTRACT_OPS[op].lowering.by
    plain, keyword_only = FUNCTIONS[part]
    prepared = Prepared(lambda call: plain, arguments_of(plain))
    implementation = {"plain": plain, "keyword_only": keyword_only, "prepared": prepared}[kind]
    changes = kept((2, 64), (0, 2)) if op == POOL else {}
    with gla.register(Backend("mine", "1", {part: implementation}, Capabilities())):
        for options in ({}, LOGITS):
            check(op, arguments(op, **changes), **options, backend="mine")
        with gla.batch_invariant(64):
            check(op, arguments(op), backend="mine")


DESCRIBED = [
    *((POOL, form, number) for form, number in (("key", None), ("key", 16), (None, None))),
    *((op, form, None if form is None else 16) for op in (STEPS, REPLAY) for form in (None, *GATES)),
    (LAYER_STEP, "key", 16),
]


@pytest.mark.parametrize(("op", "form", "number"), DESCRIBED)
def test_a_prepared_part_is_described_as_its_own_call_would_be(op, form, number):
    """A lowering prepares its part by the description of the tensors that it passes on."""
    spec = ABSTRACT_OPS[op]
    part = ABSTRACT_OPS[spec.lowering.by]
    sizes = {**OPS[op], "gate_form": form or "key", "gates": "mild" if form else "none"}
    x = arguments(op, sizes | ({"dtype": torch.float16} if op in (REPLAY, LAYER_STEP) else {}))
    x |= {"scale": 1.0, "gate_normalizer": number} | ({"max_seqlen": 5, **kept((2, 2), (0, 2))} if op == POOL else {})
    described, times = zip(*spec.lowering.parts(spec.describe(*spec.complete((), x))), strict=True)
    assert times == {POOL: (1, 1), LAYER_STEP: (1,), STEPS: (3,), REPLAY: (6,)}[op]
    assert list(described) == [part.describe(*part.complete((), passed_on(op, x, n))) for n in range(len(described))]
    assert len(described) == (2 if op == POOL else 1)


def passed_on(op, x, n):
    """Returns the arguments that an op passes on to call n of its part."""
    shared = {"scale": x["scale"], "gate_normalizer": x["gate_normalizer"]}
    tokens = {name: x[name] for name in "qkvg"}
    if op == POOL:
        states, offsets = torch.zeros(2 * (n + 1), 2, 4, 3), torch.zeros(2 * (n + 1) + 1, dtype=torch.int64)
        packed = {"initial_state": states, "output_final_state": True, "cu_seqlens": offsets}
        return {**tokens, **shared, **packed, "max_seqlen": x["max_seqlen"]}
    if op == LAYER_STEP:
        return {**tokens, **shared, "state": x["state"], "state_indices": x["slots"], "inplace": True}
    tokens = {name: y if y is None or y.ndim == 1 else y[:, 0].contiguous() for name, y in tokens.items()}
    if op == REPLAY:  # it passes on log gates
        tokens["g"], shared["gate_normalizer"] = None if x["g"] is None else tokens["g"].float(), None
    return {**tokens, **shared, "state": torch.zeros(2, 2, 4, 3)}
