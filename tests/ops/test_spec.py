"""The description of an op, and everything that is derived from it."""

import pytest
import torch

import gla_core as gla
from gla_core.dispatch import registry
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities, Layout, arguments_of
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import AS_INPUT, FLAG, INPUT, INTEGER, POOL, WIDE, Argument, OpSpec, Result, Role

CPU = torch.device("cpu")
PLAIN = OpSpec(
    name="scaled_sum",
    public="scaled_sum",
    arguments=(
        Argument("x", "Tensor", "B K", INPUT, differentiable=True),
        Argument("weight", "Tensor?", "K", AS_INPUT, None),
        Argument("scale", "float?", default=None, in_call=False),
        Argument("squared", "bool", default=False),
    ),
    results=(Result("total", "B", WIDE), Result("dweight", like="weight")),
    sizes={"B": "B", "K": "K"},
)


def test_a_new_op_needs_its_description_alone():
    assert PLAIN.parameters == ("x", "weight", "scale", "squared")
    schema = "scaled_sum(Tensor x, Tensor? weight, float? scale, bool squared, bool needs_grad=False, str backend='')"
    assert PLAIN.schema() == f"{schema} -> (Tensor, Tensor)"
    assert PLAIN.command_line_sizes == ("B", "K")
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    call = PLAIN.describe(x, None, None, True)
    facts = {"layouts": {"x": Layout((3, 4), (4, 1), torch.bfloat16)}}
    assert call.given == {"squared"}
    assert call == PLAIN.call({"B": 3, "K": 4}, CPU, torch.bfloat16, scalars={"squared": True}, **facts)
    total, dweight = PLAIN.expected(x, None, None, True)
    assert (total.name, total.shape, total.dtype, dweight) == ("total", (3,), torch.float32, None)
    assert PLAIN.floor_bytes(call) == (2 * 12, 4 * 3)
    weighted = PLAIN.describe(x, x[0].clone(), None, True)
    assert PLAIN.floor_bytes(weighted) == (2 * (12 + 4), 4 * 3 + 2 * 4)
    assert PLAIN.prepared((x, None, None, True)) == (x, None, 0.5, True)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.zeros(3), None, None, False), ValueError, r"x has shape \[3\]; expected \[B, K\]"),
        ((torch.zeros(3, 4), torch.zeros(5), None, False), ValueError, r"weight has shape .* with K=4"),
        ((torch.zeros(3, 4), torch.zeros(4).double(), None, False), TypeError, "weight is float64; .* float32, as x"),
        ((torch.zeros(3, 4), None, "2", False), TypeError, "scale is str; expected a number or None"),
        ((torch.zeros(3, 4), None, None, 1), TypeError, "squared is int; expected True or False"),
        ((torch.zeros(3, 0), None, None, False), ValueError, "K is 0; expected at least 1"),
        ((torch.zeros(3, 4), torch.zeros(4, device="meta"), None, False), ValueError, "weight is on meta and x is on"),
    ],
)
def test_its_checks_name_the_argument(args, error, message):
    with pytest.raises(error, match=message):
        PLAIN.describe(*args)


def test_arguments_are_completed_as_a_function_completes_them():
    x = torch.zeros(3, 4)
    assert PLAIN.complete((x,), {"squared": True}) == (x, None, None, True)
    for args, kwargs, message in (
        ((), {}, "misses x"),
        ((x,), {"x": x}, "got x"),
        ((x,), {"wieght": x}, "got wieght"),
        ((x,) * 5, {}, "got 5 arguments"),
    ):
        with pytest.raises(TypeError, match=message):
            PLAIN.complete(args, kwargs)


WRITING = OpSpec(
    name="read_and_add",
    public="read_and_add",
    arguments=(
        Argument("x", "Tensor", "B Hv K V", INPUT),
        Argument("pool", "Tensor(a!)", "P Hv K V", POOL, role=Role.STATE),
        Argument("cu_seqlens", "Tensor", "N+1", INTEGER, role=Role.OFFSETS),
        Argument("slots", "Tensor", "N", INTEGER, role=Role.SLOTS),
        Argument("others", "Tensor?", "N", INTEGER, None, Role.MARKS),
        Argument("flags", "Tensor?", "N", FLAG, None, Role.MARKS),
        Argument("pad", "int", default=-1),
        Argument("out", "Tensor(b!)?", "B Hv K V", AS_INPUT, None),
        Argument("most", "SymInt?", default=None, hint=True),
    ),
    results=(Result("o", "B Hv K V", into="out"),),
    sizes={"B": "B", "Hv": "Hv", "K": "K", "V": "V", "N": "N", "P": "N"},
)


def writing(**changes):
    """Returns the arguments of the op `WRITING`, in order, with changes."""
    integers = torch.zeros(3, dtype=torch.int32)
    arguments = {"x": torch.zeros(1, 2, 3, 4), "pool": torch.zeros(5, 2, 3, 4), "cu_seqlens": integers}
    arguments |= {"slots": integers[:2], "others": None, "flags": None, "pad": -1, "out": None, "most": None}
    return tuple({**arguments, **changes}.values())


def test_arguments_that_are_always_written_are_declared_by_their_types():
    assert WRITING.written == ("pool", "out")
    assert WRITING.required == {"x", "pool", "cu_seqlens", "slots", "pad"}
    without_out = "Tensor x, Tensor(a!) pool, Tensor cu_seqlens, Tensor slots, Tensor? others, Tensor? flags, int pad"
    schema = f"read_and_add({without_out}, SymInt? most=None, str backend='') -> Tensor"
    assert WRITING.schema(without=("out",)) == schema
    call = WRITING.describe(*writing(flags=torch.ones(2, dtype=torch.bool), pad=0))
    assert call.given == {"flags"}
    assert (call.state_dtype, call.indexed, call.variable_length) == (torch.float32, True, True)
    assert call.scalars == {"pad": 0}


def test_a_call_known_by_its_sizes_gives_all_required_integers():
    call = WRITING.call({"B": 1, "Hv": 2, "K": 3, "V": 4, "N": 2}, CPU, torch.bfloat16)
    assert (call.indexed, call.variable_length, call.state_dtype) == (True, True, torch.float32)
    assert call.dims["P"] == 2
    assert call.given == set()


def test_the_floor_reads_and_writes_the_states_of_the_sequences():
    call = WRITING.call({"B": 1, "Hv": 2, "K": 3, "V": 4, "N": 2, "P": 50}, CPU, torch.bfloat16)
    tokens, states = 2 * 24, 4 * 2 * 24
    assert WRITING.floor_bytes(call) == (tokens + states, tokens + states)


def test_a_result_is_the_argument_that_it_is_written_into():
    (fresh,) = WRITING.expected(*writing())
    out = torch.zeros(1, 2, 3, 4)
    (written,) = WRITING.expected(*writing(out=out))
    assert fresh.written is None
    assert written.written is out
    assert fresh.shape == written.shape == (1, 2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_may_have_few_bits_and_any_distance_between_its_slots(dtype):
    pages = torch.zeros(5, 24 + 7, dtype=dtype)[:, :24].view(5, 2, 3, 4)
    for pool in (pages, pages.mT.contiguous().mT):
        assert WRITING.describe(*writing(pool=pool)).state_dtype == dtype


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"pool": torch.zeros(1, 2, 3, 4).expand(5, -1, -1, -1)},
            ValueError,
            "pool has stride 0 along dimension 0 of size 5 and is written in place; expected memory of its own",
        ),
        ({"pool": torch.zeros(5, 2, 3, 8)[..., ::2]}, ValueError, "pool has strides .* its last dimension, or the one"),
        ({"pool": torch.zeros(5, 2, 3, 4).double()}, TypeError, "pool is float64; expected float32 or bfloat16 or"),
        ({"out": torch.zeros(1, 3, 2, 4).mT}, ValueError, "out has shape"),
        ({"out": torch.zeros(1, 3, 2, 4).transpose(1, 2)}, ValueError, "out has strides .* expected a contiguous"),
        ({"out": torch.zeros(1, 2, 3, 4).half()}, TypeError, "out is float16; expected float32, as x"),
        ({"flags": torch.ones(2, dtype=torch.int32)}, TypeError, "flags is int32; expected bool"),
        ({"others": torch.ones(2)}, TypeError, "others is float32; expected int32 or int64"),
    ],
)
def test_checks_of_written_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        WRITING.describe(*writing(**changes))


@pytest.mark.parametrize("op", ABSTRACT_OPS)
def test_the_contract_is_the_description(op):
    spec = ABSTRACT_OPS[op]
    assert spec.contract == OP_PARAMETERS[op] == spec.parameters[: len(spec.contract)]
    options = () if spec.raw_inputs is None else spec.raw_inputs.options  # which the core computes for the reference
    taken, required = arguments_of(registry.get("reference").ops[op]), set(spec.contract).difference(options)
    assert [name for name in taken if name not in options] == [name for name in spec.contract if name in required]
    assert callable(getattr(gla, spec.public))


def test_capabilities_may_differ_by_op():
    narrow = Capabilities(dtypes=frozenset({torch.float64}))
    ops = {"online_softmax": torch_softmax, "softmax_attention": registry.get("reference").ops["softmax_attention"]}
    x, q = torch.zeros(2, 3), torch.zeros(1, 2, 1, 4)
    with gla.register(Backend("mine", "1", ops, op_capabilities={"online_softmax": narrow})):
        with pytest.raises(gla.NoBackendError, match="computes float64; x is float32"):
            gla.online_softmax(x, backend="mine")
        gla.softmax_attention(q, q, q, backend="mine")
    for wrong, message in (
        ({"online_sofmax": narrow}, "did you mean 'online_softmax'"),
        ({"online_softmax": {"cpu"}}, "capabilities is set; expected Capabilities"),
        ([narrow], "op_capabilities are list; expected a mapping"),
    ):
        with pytest.raises((gla.BackendError, gla.UnknownOpError), match=message):
            gla.register(Backend("mine", "1", ops, op_capabilities=wrong))


def torch_softmax(x, dim):
    return torch.softmax(x, dim)
