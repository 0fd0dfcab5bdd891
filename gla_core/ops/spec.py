"""Describes an abstract op as data, and derives its checks, schema, results and sizes from the description.

An op is a list of arguments and a list of results. Their dimensions have names, and their dtypes follow rules. From
these follow the checks of a call, its `OpCall`, its torch schema, the results that a backend has to return, the
parameters of the contract, the sizes that a command line takes, the bytes of the memory floor, and the shapes of random
arguments.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.backend import ALIGNMENT, Layout, Lowering, OpCall, RawInputs, declare_op
from gla_core.dispatch.steps import step
from gla_core.dispatch.tensors import checkpoint_dtype, swapped, wide
from gla_core.ops import _overlap, checks
from gla_core.ops.checks import FLOATS, INTEGERS

WIDTHS = ("H", "Hq", "Hv", "K", "V")
"""The names of the sizes that have to be at least 1; all others may be 0."""
HEADS = ("H", "Hq", "Hv", "Ho")
"""The names of the dimensions that count heads."""


class Role(enum.Enum):
    """Says what a tensor is to an op."""

    INPUT = enum.auto()
    """Numbers that the op computes with, such as tokens, rows or weights; also of a result."""
    GATE = enum.auto()
    """A gate, in one of the forms of `Argument.forms`."""
    STATE = enum.auto()
    """States of sequences, or a pool of them; also their gradients."""
    CHECKPOINTS = enum.auto()
    """States inside sequences, at regular positions."""
    RING = enum.auto()
    """Tokens of earlier calls."""
    GATE_PARAMETER = enum.auto()
    """A parameter of the function that computes gates from logits, if the call has such a function."""
    GATE_RING = enum.auto()
    """Gates of earlier tokens, in a ring, if gates differ from token to token."""
    OFFSETS = enum.auto()
    """Offsets of packed sequences."""
    SLOTS = enum.auto()
    """Integers that every call with a pool needs, such as indices into it."""
    MARKS = enum.auto()
    """Further integers or flags for each sequence, which a call may leave out."""


PER_SEQUENCE = (Role.OFFSETS, Role.SLOTS, Role.MARKS)
"""The roles of integers and flags. They refer to sequences and slots of whole tensors."""


@dataclass(frozen=True, slots=True)
class DType:
    """Holds the rule for the dtype of a tensor, which depends on the dtype of the op's first argument.

    Attributes:
        allowed: takes the dtype of the first argument and returns the dtypes that an argument may have. A result has
            the first of them.
        reason: the end of the error message.
    """

    allowed: Callable[[torch.dtype], tuple[torch.dtype, ...]]
    reason: str = ""


INPUT = DType(lambda dtype: FLOATS)
AS_INPUT = DType(lambda dtype: (dtype,), ", as {first}")
AS_INPUT_OR_FLOAT32 = DType(lambda dtype: tuple(dict.fromkeys((dtype, torch.float32))), ", as {first} or float32")
WIDE = DType(lambda dtype: (wide(dtype),), " with {dtype} inputs")
POOL = DType(
    lambda d: (wide(d),) if d == torch.float64 else (torch.float32, torch.bfloat16, torch.float16),
    " with {dtype} inputs",
)
CHECKPOINT = DType(lambda dtype: (checkpoint_dtype(dtype),), " with {dtype} inputs")
INTEGER = DType(lambda dtype: INTEGERS)
FLAG = DType(lambda dtype: (torch.bool,))

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Argument:
    """Describes an argument of an op.

    Attributes:
        type: the type in a torch schema, such as "Tensor?" or "bool"; "Tensor(a!)" if the op always writes the tensor.
        shape: for a tensor, the names of its dimensions, such as "B T H K"; None means any shape.
        dtype: for a tensor, the rule for its dtype; None for a scalar.
        role: for a tensor, what it is to the op.
        default: the value if the argument is left out. For a tensor, None means that a call can be described without
            it.
        differentiable: whether autograd takes its gradient.
        in_call: for a scalar, whether `OpCall.scalars` holds it.
        hint: for a scalar, whether it only affects how a call runs: which backend, and which plan. Backends do not
            receive it as an argument.
        forms: for a gate, the shape of each of its forms; `shape` is then the shape of the largest form. They differ in
            their numbers of dimensions.
        public: the name in the public function, if it differs.
    """

    name: str
    type: str = "Tensor"
    shape: str | None = None
    dtype: DType | None = None
    default: Any = _REQUIRED
    role: Role = Role.INPUT
    differentiable: bool = False
    in_call: bool = True
    hint: bool = False
    forms: Mapping[str, str] | None = None
    public: str = ""

    @property
    def shown(self) -> str:
        """Returns the name that errors call it by."""
        return self.public or self.name

    @property
    def written(self) -> bool:
        """Returns whether every call that gives the argument writes it."""
        return "!" in self.type

    @property
    def is_optional_input(self) -> bool:
        """Returns whether it is an input that may be left out, of which `OpCall` has no field but `given`."""
        return self.type == "Tensor?" and self.role is Role.INPUT

    def dims(self, x: Tensor) -> list[str]:
        """Returns the names of the dimensions of a tensor; empty if the argument may have any shape."""
        shapes = (self.shape,) if self.forms is None else self.forms.values()
        names = [shape.split() for shape in shapes if shape is not None]
        return next((each for each in names if len(each) == x.ndim), names[-1] if names else [])

    def form(self, x: Tensor) -> str | None:
        """Returns the form of a gate; None for any other tensor."""
        named = self.dims(x)
        return next((form for form, shape in (self.forms or {}).items() if shape.split() == named), None)


def gate(forms: Mapping[str, str], differentiable: bool = False) -> Argument:
    """Returns the argument g: a gate in these forms, the largest last. It may be left out."""
    shape = list(forms.values())[-1]
    role = Role.GATE
    return Argument("g", "Tensor?", shape, AS_INPUT_OR_FLOAT32, None, role, differentiable=differentiable, forms=forms)


def arguments_of(spec: OpSpec, *names: str) -> tuple[Argument, ...]:
    """Returns arguments of another op by their names, for an op that has them too."""
    arguments = {argument.name: argument for argument in spec.arguments}
    return tuple(arguments[name] for name in names)


LONGEST = Argument("max_seqlen", "SymInt?", default=None, hint=True)
"""The number of tokens of the longest packed sequence, or an upper bound."""


@dataclass(frozen=True, slots=True)
class Result:
    """Describes a result of an op.

    Attributes:
        shape, dtype, role: as in `Argument`.
        like: the name of an argument. The result has its shape and dtype, and is None if the argument is None.
        when: takes the arguments by name and returns whether the result is asked for; None means that it always is.
        written: takes the arguments by name and returns whether the result is the argument `like` itself, written in
            place; None means that it never is.
        state: whether the result has the memory layout of the argument `like`: keys or values contiguous.
        into: the name of an argument. The result is this argument, written, if it is given, and otherwise a new tensor.
    """

    name: str
    shape: str = ""
    dtype: DType = AS_INPUT
    role: Role = Role.INPUT
    like: str | None = None
    when: Callable[[Mapping[str, Any]], bool] | None = None
    written: Callable[[Mapping[str, Any]], bool] | None = None
    state: bool = False
    into: str | None = None


class Expected(NamedTuple):
    """Describes a result that a backend has to return.

    Attributes:
        written: the argument that the backend has to write and return; None if it has to return a new tensor.
        swapped: whether the last two dimensions are swapped in memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: Tensor | None = None
    swapped: bool = False

    def empty(self, like: Tensor) -> Tensor:
        """Allocates the result on the device of a tensor."""
        if self.swapped:
            *outer, K, V = self.shape
            return like.new_empty((*outer, V, K), dtype=self.dtype).mT
        return like.new_empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """Describes an abstract op.

    Attributes:
        name: the name of the abstract op.
        public: the name of the public function that runs it.
        arguments: the arguments in the order of the contract. The first is a tensor; the devices and dtypes of all
            others depend on it. Hints come last.
        results: the results in order.
        sizes: maps each name in `OpCall.dims` to the name of the size that it equals by default: Hq equals H. That name
            comes before it, is the name itself, or is no name of `OpCall.dims`.
        writes: takes the sizes of a call, returns how often it writes the state of a sequence into a pool.
        limit: takes the sizes of a call and whether it packs sequences along T. It raises ValueError for sizes that the
            op does not serve.
        bind: takes the arguments by name and the sizes so far. It binds sizes that no shape names, without the numbers
            of sequences, states and checkpoints, which are bound before. It raises ValueError or TypeError for values
            that do not fit together. Arguments that hold states are checked after it.
        prepare: takes the arguments in order and returns them as backends receive them. The default of a scale is
            filled in elsewhere.
        reads: takes the arguments by name under GLA_CHECK=1, and returns which places of tensors the op reads. It maps
            the names of the first dimensions of tensors, such as "B T", to an index of places. All of any other tensor
            is read. It raises ValueError for offsets, slots and indices for which the op is not defined. None means
            that no values are checked.
        flops: takes the shapes of the tensors and returns the number of floating-point operations of the mathematics.
        tokens: the names of the arguments with one row a token, or one token a row: q, k, v and g. Packed sequences,
            autocast and batch invariance treat them alike.
        backward: the abstract op that a gradient needs, if any.
        forward: the abstract op of which this op is the gradient, if it is one.
        lowering: how the core computes the op for a backend that lacks it, if it can.
        raw_inputs: the inputs that a call may pass as a layer projects them, if there are any.
        by_segments: computes the op by calls for one segment, or one row, at a time; see `_invariant`. None if the op
            is not batch-invariant.
        autocast_in_float32: whether the op computes in float32 under autocast, as a softmax does, instead of in the
            dtype of autocast.
    """

    name: str
    public: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    sizes: Mapping[str, str]
    limit: Callable[[Mapping[str, int], bool], None] = lambda sizes, packed: None
    bind: Callable[[Mapping[str, Any], dict[str, Any]], None] = lambda args, sizes: None
    prepare: Callable[..., tuple] | None = None
    reads: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = lambda args: {}
    flops: Callable[..., int] | None = None
    writes: Callable[[Mapping[str, int]], float] = lambda sizes: 1
    tokens: tuple[str, ...] = ()
    backward: str | None = None
    forward: str | None = None
    lowering: Lowering | None = None
    raw_inputs: RawInputs | None = None
    by_segments: Callable[..., Any] | None = None
    autocast_in_float32: bool = False

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Returns the names of the arguments, in order."""
        return tuple(argument.name for argument in self.arguments)

    @functools.cached_property
    def contract(self) -> tuple[str, ...]:
        """Returns the names of the arguments that a backend receives, in order: all but the hints at the end."""
        return tuple(argument.name for argument in self.arguments if not argument.hint)

    @functools.cached_property
    def required(self) -> frozenset[str]:
        """Returns the names of the arguments that every backend takes: all but flags and those that may be None.

        The scale is among them, because backends always receive a number.
        """
        may_lack = (a for a in self.arguments if a.type == "bool" or a.type.endswith("?"))
        return frozenset(self.parameters).difference(a.name for a in may_lack if a.name != "scale")

    @functools.cached_property
    def token_arguments(self) -> tuple[Argument, ...]:
        """Returns the arguments that `tokens` names, as an op without a gradient has them."""
        tokens = (a for a in self.arguments if a.name in self.tokens)
        return tuple(dataclasses.replace(argument, differentiable=False) for argument in tokens)

    @functools.cached_property
    def _optional(self) -> tuple[Argument, ...]:
        """The arguments that a backend need not take."""
        return tuple(a for a in self.arguments if not a.hint and a.name not in self.required)

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Maps the name of each argument to itself, and its name in the public function to its name here."""
        return {name: a.name for a in self.arguments for name in (a.name, a.public) if name}

    def as_public(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments by their names in the public function."""
        shown = {a.name: a.shown for a in self.arguments}
        return {shown.get(name, name): x for name, x in arguments.items()}

    @functools.cached_property
    def differentiable(self) -> bool:
        """Returns whether autograd takes a gradient of any argument."""
        return any(argument.differentiable for argument in self.arguments)

    @functools.cached_property
    def written(self) -> tuple[str, ...]:
        """Returns the names of the arguments that every call that gives them writes."""
        return tuple(argument.name for argument in self.arguments if argument.written)

    def written_by(self, passed: Mapping[str, Any]) -> list[str]:
        """Returns the names of the arguments that a call writes, given all by name."""
        in_place = [r.like for r in self.results if r.like is not None and r.written is not None and r.written(passed)]
        return in_place + [name for name in self.written if passed[name] is not None]

    @functools.cached_property
    def places(self) -> frozenset[str]:
        """Returns the names of the arguments that hold no input, and in which a result may be returned."""
        return frozenset(result.into for result in self.results if result.into is not None)

    @functools.cached_property
    def scalars(self) -> dict[str, Any]:
        """Returns the arguments that `OpCall.scalars` holds, with their defaults."""
        return {a.name: a.default for a in self.arguments if a.dtype is None and a.in_call and not a.hint}

    @functools.cached_property
    def _integers(self) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.arguments) if a.type.removesuffix("?") in ("int", "SymInt"))

    @functools.cached_property
    def _scale_at(self) -> int | None:
        return self.parameters.index("scale") if "scale" in self.parameters else None

    @functools.cached_property
    def _states_last(self) -> tuple[Argument, ...]:
        """Returns the arguments in the order of their checks. States are last: their number depends on the others."""
        return tuple(sorted(self.arguments, key=lambda argument: argument.role in (Role.STATE, Role.CHECKPOINTS)))

    @property
    def command_line_sizes(self) -> tuple[str, ...]:
        """Returns the names of the sizes from which all others follow."""
        return tuple(name for name in dict.fromkeys(self.sizes.values()) if self.sizes.get(name, name) == name)

    def dims(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns all sizes of a call, in order, given some of them."""
        dims: dict[str, int] = {}
        for name, other in self.sizes.items():
            dims[name] = sizes[name] if name in sizes else {**sizes, **dims}[other]
        return dims

    def has(self, role: Role) -> Argument | None:
        """Returns the first argument with this role; None if there is none."""
        return self._by_role.get(role)

    @functools.cached_property
    def _by_role(self) -> dict[Role, Argument]:
        """The first argument with each role."""
        return {a.role: a for a in reversed(self.arguments) if a.dtype is not None}

    def complete(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """Returns all arguments, in order, with defaults for those left out.

        Raises:
            TypeError: an argument is missing, unknown, given twice, or one too many.
        """
        names = self.parameters
        kwargs = {self.names.get(name, name): x for name, x in kwargs.items()}
        passed = dict(zip(names, args, strict=False))
        wrong = [name for name in kwargs if name not in names or name in passed]
        if wrong or len(args) > len(names):
            what = ", ".join(wrong) or f"{len(args)} arguments"
            raise TypeError(f"{self.name} takes ({', '.join(names)}); got {what}")
        passed |= kwargs
        missing = [a.name for a in self.arguments if a.name not in passed and a.default is _REQUIRED]
        if missing:
            raise TypeError(f"{self.name} misses {', '.join(missing)}")
        return tuple(passed.get(a.name, a.default) for a in self.arguments)

    def plain(self, args: tuple) -> tuple:
        """Returns the arguments with integers of other libraries, such as NumPy's, as ints; `args` if there is none."""
        for i in self._integers:
            x = checks.integer(args[i])
            if x is not args[i]:
                args = (*args[:i], x, *args[i + 1 :])
        return args

    def prepared(self, args: tuple) -> tuple:
        """Returns the arguments as a backend receives them."""
        if self.prepare is not None:
            args = self.prepare(*args)
        at = self._scale_at
        if at is not None and type(args[at]) is not float:
            args = (*args[:at], scale_or_default(args[0], args[at]), *args[at + 1 :])
        return args

    @step
    def describe(
        self, *args: Any, needs_grad: bool = False, capturing: bool = False, batch_invariant: int | None = None
    ) -> OpCall:
        """Checks all arguments, in order, without reading values, and describes the call.

        The description includes PyTorch's settings.

        Args:
            needs_grad, capturing, batch_invariant: as in `OpCall`.

        Raises:
            ValueError, TypeError: an argument has a wrong type, shape, dtype or device, or cannot be written in place.
        """
        passed = dict(zip(self.parameters, self.plain(args), strict=True))
        sizes = self._check(passed)
        _overlap.check(self.as_public(passed), self.written_by(passed))
        first = {role: passed[argument.name] for role, argument in self._by_role.items()}
        gate, state, packed = self.has(Role.GATE), first.get(Role.STATE), first.get(Role.OFFSETS) is not None
        g = None if gate is None else passed[gate.name]
        return OpCall(
            op=self.name,
            device=args[0].device,
            dtype=args[0].dtype,
            dims={name: sizes[name] for name in self.sizes},
            gate_dtype=None if g is None else g.dtype,
            gate_form=None if gate is None or g is None else gate.form(g),
            state_dtype=None if state is None else state.dtype,
            variable_length=packed,
            longest=passed.get("max_seqlen") if packed else None,
            indexed=first.get(Role.SLOTS) is not None,
            scalars={name: passed[name] for name in self.scalars},
            checkpoints=any(r.role is Role.CHECKPOINTS and (r.when is None or r.when(passed)) for r in self.results),
            needs_grad=needs_grad,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            capturing=capturing,
            float32_matmul_precision=torch.get_float32_matmul_precision(),
            batch_invariant=batch_invariant,
            given=frozenset(a.name for a in self._optional if not _is_default(a, passed[a.name])),
            layouts={name: layout_of(x) for name, x in passed.items() if isinstance(x, Tensor)},
        )

    def error_in_layout(self, error: Exception, args: tuple) -> Exception:
        """Returns the error of a call that was passed states with V before K; its message has their shapes as passed.

        Args:
            error: the error that the call raised with the states transposed.
            args: all arguments, in order, the states transposed.
        """
        states = [argument.role is Role.STATE for argument in self.arguments]
        arguments = tuple(_values_first(a) if s else a for a, s in zip(self.arguments, states, strict=True))
        passed = [checks.transposed(x) if s else x for x, s in zip(args, states, strict=True)]
        try:
            dataclasses.replace(self, arguments=arguments).describe(*passed)
        except (ValueError, TypeError) as told:
            if str(told).partition(" ")[0] == str(error).partition(" ")[0]:  # both are of one argument
                return told
        return error

    def expected(self, *args: Any) -> tuple[Expected | None, ...]:
        """Returns the results that a backend has to return for these arguments; None for each not asked for."""
        passed = dict(zip(self.parameters, args, strict=True))
        sizes = self._check(passed)
        return tuple(_expected(result, passed, sizes, args[0].dtype) for result in self.results)

    def _check(self, passed: Mapping[str, Any]) -> dict[str, Any]:
        """Checks every argument against its description, and returns all sizes of the call."""
        sizes: dict[str, Any] = {}
        first, bound = self.parameters[0], False
        for argument in self._states_last:
            if not bound and argument.role in (Role.STATE, Role.CHECKPOINTS):
                self._bind(passed, sizes)
                bound = True
            if argument.forms is not None:
                self._check_sizes(sizes)  # first, because a gate has the heads of v
            x = passed[argument.name]
            if argument.dtype is None:
                checks.scalar(argument.name, argument.type, x)
            elif x is not None or argument.default is not None:
                _check_tensor(argument, x, sizes, self.arguments[0].shown, passed[first])
        if not bound:
            self._bind(passed, sizes)
        roles = {argument.name: argument.role for argument in self.arguments}
        for name in self.written_by(passed):
            is_ring = roles[name] in (Role.RING, Role.GATE_RING)
            checks.writable(name, passed[name], roles[name] is Role.STATE, is_ring)
        return sizes

    def _bind(self, passed: Mapping[str, Any], sizes: dict[str, Any]) -> None:
        """Checks the sizes against each other, and binds the sizes that no shape names."""
        packed, slots = passed.get("cu_seqlens") is not None, self.has(Role.SLOTS)
        self._check_sizes(sizes)
        self.limit(sizes, packed)
        checks.logits(passed.get("g"), passed.get("gate_normalizer"))
        checks.longest(passed.get("max_seqlen"))
        if "cu_seqlens" in passed:
            self._bind_sequences(packed, sizes)
        if slots is not None and passed[slots.name] is None:
            sizes["P"] = sizes["B"]  # a state for each row
        if "checkpoint_every" in passed:
            checks.checkpoints(passed["checkpoint_every"], passed.get("checkpoints"), packed, sizes)
        self.bind(passed, sizes)
        if "Ho" in sizes and sizes["Ho"] != size_of("Ho", sizes):
            raise ValueError(f"{self._owner('Ho')} has {sizes['Ho']} heads; expected {size_of('Ho', sizes)}, as o")

    def _bind_sequences(self, packed: bool, sizes: dict[str, Any]) -> None:
        """Binds the number N of sequences. Raises ValueError for another number of slots."""
        slots, bound = self.has(Role.SLOTS), sizes.get("N")
        if packed:
            checks.packed(sizes, of=self.arguments[0].shown)
        else:
            sizes["N"] = sizes["B"]
        if slots is not None and bound != sizes["N"]:
            rows = "entries" if slots.shape == "N" else "rows"
            each = "sequence of cu_seqlens" if packed else f"row of {self.arguments[0].shown}"
            raise ValueError(f"{slots.shown} has {bound} {rows}; expected {sizes['N']}, one for each {each}")

    def _check_sizes(self, sizes: Mapping[str, Any]) -> None:
        """Raises ValueError for a width of 0, and for query or value heads not in groups, one group per head of k."""
        for name in WIDTHS:
            if sizes.get(name, 1) < 1:
                raise ValueError(f"{name} is {sizes[name]}; expected at least 1")
        if "H" not in sizes:
            return
        for name in ("Hq", "Hv"):
            if sizes.get(name, 0) % sizes["H"] != 0:
                owners = self._owner(name), self._owner("H")
                raise ValueError(
                    f"{owners[0]} has {sizes[name]} heads; expected a multiple of {owners[1]}'s {sizes['H']}"
                )
        if sizes.get("Hq", 0) > sizes["H"] < sizes.get("Hv", 0):
            raise ValueError(
                f"q has {sizes['Hq']} heads, v has {sizes['Hv']} and k has {sizes['H']}; expected groups of queries or "
                "of values, not both: repeat the heads of k and q for the heads of v"
            )

    def _owner(self, name: str) -> str:
        """Returns the first argument with a dimension of this name."""
        return next(a.shown for a in self.arguments if a.shape is not None and name in a.shape.split())

    # ---- what follows from the description alone

    def call(self, sizes: Mapping[str, int], device: torch.device, dtype: torch.dtype, **facts: Any) -> OpCall:
        """Returns a call of these sizes. Gates, and states that the op requires, have the dtype of states by default.

        Args:
            facts: other fields of `OpCall`, by name; `scalars` may omit scalars that have their default.
        """
        scalars = {**self.scalars, **facts.pop("scalars", {})}
        facts = {
            "gate_dtype": wide(dtype) if self.has(Role.GATE) else None,
            "state_dtype": wide(dtype) if self.requires(Role.STATE) else None,
            **facts,
            **{field: True for role, field in _FIELDS.items() if self.requires(role)},
        }
        facts.setdefault("gate_form", "key" if facts["gate_dtype"] is not None else None)
        call = OpCall(op=self.name, device=device, dtype=dtype, dims=self.dims(sizes), scalars=scalars, **facts)
        return dataclasses.replace(call, given=frozenset(a.name for a in self._optional if _is_passed(a, call)))

    def requires(self, role: Role) -> bool:
        """Returns whether every call passes the first argument with this role."""
        argument = self.has(role)
        return argument is not None and argument.default is _REQUIRED

    def schema(self, without: Sequence[str] = ()) -> str:
        """Returns the schema of the torch op.

        It takes all arguments but those in `without`; needs_grad if differentiable; and the request. The last arguments
        that may be None can be left out.
        """
        taken = [argument for argument in self.arguments if argument.name not in without]
        required = len(taken) - trailing_optional(taken)
        parts = [f"{a.type} {a.name}{'=None' if i >= required else ''}" for i, a in enumerate(taken)]
        parts += ["bool needs_grad=False"] if self.differentiable else []
        results = ", ".join(["Tensor"] * len(self.results))
        results = results if len(self.results) == 1 else f"({results})"
        return f"{self.name}({', '.join(parts)}, str backend='') -> {results}"

    def floor_bytes(self, call: OpCall) -> tuple[int, int]:
        """Returns the bytes of the inputs and of the outputs of a call, without offsets, indices and checkpoints.

        A call that is given a state counts as returning one. Of a pool, the states of the rows or sequences of the call
        count as read, and as written `writes` times. Of rings, as many tokens as the call has count as read, and as
        written.
        """
        likes = {a.name: a for a in self.arguments}
        read = [a for a in self.arguments if a.name not in self.places]
        outputs = [likes[result.like] if result.like else result for result in self.results]
        written = sum(self._bytes(a, call) for a in read if a.written) * self.writes(call.dims)
        return sum(self._bytes(x, call) for x in read), sum(self._bytes(x, call) for x in outputs) + round(written)

    def _bytes(self, x: Argument | Result, call: OpCall) -> int:
        """Returns the bytes of a tensor of a call; 0 if the call has no such tensor."""
        kind = dtype_in_call(x, call)
        if kind is None or (isinstance(x, Argument) and x.is_optional_input and x.name not in call.given):
            return 0
        counted = {"P": call.dims.get(self.sizes.get("P", ""), 0)}
        if x.role in (Role.RING, Role.GATE_RING):
            counted = {"P": call.dims["B"], "L": call.dims["T"]}
        return math.prod(self._shape(x, call.gate_form, {**call.dims, **counted})) * kind.itemsize

    def shape(self, x: Argument | Result, call: OpCall) -> tuple[int, ...]:
        """Returns the shape of an argument or result in a call; all sizes of the call if it may have any shape."""
        return self._shape(x, call.gate_form, call.dims)

    def _shape(self, x: Argument | Result, gate_form: str | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
        shape = x.forms[gate_form] if isinstance(x, Argument) and x.forms and gate_form else x.shape
        return tuple(size_of(name, sizes) for name in (self.sizes if shape is None else shape.split()))


_specs: dict[str, OpSpec] = {}


def declare(spec: OpSpec) -> None:
    """Makes an abstract op known, to the core and to backends."""
    _specs[spec.name] = spec
    for name, attribute in vars(OpSpec).items():
        if isinstance(attribute, functools.cached_property):
            getattr(spec, name)  # a compiler that met the first use would meet its lock
    declare_op(spec.name, spec.contract, spec.required, spec.written, spec.lowering, spec.raw_inputs)


def spec_of(op: str | None) -> OpSpec:
    """Returns the description of an abstract op that is declared."""
    assert op is not None
    return _specs[op]


def part_of(spec: OpSpec) -> OpSpec:
    """Returns the op that computes an op by its lowering; the op itself if it has none."""
    return spec if spec.lowering is None else spec_of(spec.lowering.by)


def batch_invariant_ops() -> str:
    """Returns the names of the public ops that are batch-invariant, as words."""
    *names, last = dict.fromkeys(spec.public for spec in _specs.values() if part_of(spec).by_segments)
    return f"{', '.join(names)} and {last}"


_FIELDS = {Role.OFFSETS: "variable_length", Role.SLOTS: "indexed"}
"""The field of `OpCall` that says whether a call passes an argument with this role."""


def dtype_in_call(x: Argument | Result, call: OpCall) -> torch.dtype | None:
    """Returns the dtype of a tensor in a call.

    None means that the call has no such tensor. It is also returned for scalars, integers, flags and checkpoints.
    """
    if x.dtype is None or x.role in (*PER_SEQUENCE, Role.CHECKPOINTS):
        return None
    if x.role is Role.GATE:
        return call.gate_dtype
    if x.role is Role.STATE:
        return call.state_dtype
    if x.role is Role.GATE_RING and call.gate_form in (None, "constant"):
        return None
    if x.role is Role.GATE_PARAMETER and x.name not in call.given:
        return None
    return call.dtype if x.dtype is INPUT else x.dtype.allowed(call.dtype)[0]


def _is_passed(argument: Argument, call: OpCall) -> bool:
    """Returns whether `call` passes the argument, judged by its sizes."""
    if argument.dtype is None:
        return argument.name in call.scalars and call.scalars[argument.name] != argument.default
    passed = {
        Role.GATE: call.gate_dtype,
        Role.STATE: call.state_dtype,
        Role.GATE_RING: dtype_in_call(argument, call),
        Role.OFFSETS: call.variable_length,
        Role.SLOTS: call.indexed,
        Role.CHECKPOINTS: call.scalars.get("checkpoint_every"),
    }
    return bool(passed.get(argument.role))


def _values_first(state: Argument) -> Argument:
    """Returns the description of a state whose V comes before K."""
    assert state.shape is not None
    *outer, K, V = state.shape.split()
    return dataclasses.replace(state, shape=" ".join((*outer, V, K)))


def _is_default(argument: Argument, x: Any) -> bool:
    return x is argument.default or (argument.dtype is None and x == argument.default)


def layout_of(x: Tensor) -> Layout:
    """Returns the layout of a tensor. A tensor without values counts as aligned."""
    try:
        aligned = x.data_ptr() % ALIGNMENT == 0
    except RuntimeError:  # a tensor without values has no address
        aligned = True
    return Layout(tuple(x.shape), x.stride(), x.dtype, aligned)


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple]:
    """Returns a function that takes a sequence, and returns its elements at these places, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda x: tuple(x[i] for i in places)


def trailing_optional(arguments: Sequence[Argument]) -> int:
    """Returns the number of arguments at the end that may be None."""
    return sum(1 for _ in itertools.takewhile(lambda a: a.type.endswith("?"), reversed(arguments)))


def plain_number(x: Any) -> Any:
    """Converts a number of any library, such as NumPy, to a float; returns anything else unchanged."""
    if type(x) is float or x is None or isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    return float(x)


def scale_or_default(q: Any, scale: Any) -> float:
    """Returns the scale as a float; K^-1/2 if it is None."""
    if scale is not None:
        return plain_number(scale)
    try:
        return q.shape[-1] ** -0.5
    except (AttributeError, IndexError, ZeroDivisionError):
        return 1.0  # the checks that follow refuse this q


def _check_tensor(argument: Argument, x: Any, sizes: dict[str, Any], first: str, first_value: Tensor) -> None:
    """Checks the shape of a tensor and binds the sizes in it; checks dtype and device against the first argument."""
    name = argument.shown
    assert argument.dtype is not None
    if argument.forms is not None:
        checks.tensor_of_any(name, x, tuple(argument.forms.values()), sizes)
    elif argument.shape is not None:
        checks.tensor(name, x, argument.shape, sizes)
    elif not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a tensor")
    reason = argument.dtype.reason.format(first=first, dtype=first_value.dtype)
    checks.dtype(name, x, argument.dtype.allowed(first_value.dtype), reason)
    checks.device(name, x, first, first_value)


def _expected(
    result: Result, passed: Mapping[str, Any], sizes: Mapping[str, Any], first: torch.dtype
) -> Expected | None:
    if result.like is not None:
        x = passed[result.like]
        written = x if result.written is not None and result.written(passed) else None
        lies_swapped = result.state and x is not None and swapped(x)
        return None if x is None else Expected(result.name, tuple(x.shape), x.dtype, written, lies_swapped)
    if result.when is not None and not result.when(passed):
        return None
    written = None if result.into is None else passed[result.into]
    shape = tuple(size_of(n, sizes) for n in result.shape.split())
    return Expected(result.name, shape, result.dtype.allowed(first)[0], written)


def size_of(name: str, sizes: Mapping[str, int]) -> int:
    """Returns the size of this name; Ho, the heads of outputs, and N+1 follow from other sizes."""
    if name == "Ho":
        return max(sizes["Hq"], sizes["Hv"])
    return sizes[name.removesuffix("+1")] + int(name.endswith("+1"))  # torch 2.11 adds no bool to a symbolic size
