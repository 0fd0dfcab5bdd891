"""Runs Gluon kernels for Hopper on a CPU: a small emulator of what the kernels of this repository use.

Each kind of warps is a thread, barriers in shared memory are real, and shared memory starts as NaN. One thread runs at
a time: of those that may go on, the one of the highest rank. Ranks are drawn at random for each program, so that each
thread runs as far ahead of another as barriers allow in some programs, and as far behind it in others. Asynchronous
operations are carried out as late as the hardware may: a matrix product or a copy to memory reads its tiles when it is
waited for. A product also compares its tiles with what they held when it was issued, so both a read that comes too
early and a write that comes too early fail. A load to registers counts as under way until its warps store something or
order it by a fence, and a copy over its tile fails before. A read of a tile that has been written fails unless the
thread knows of the write: from the barrier of the copy, or from a barrier at which the writer, or a thread that knew,
has arrived. Layouts and registers have no meaning here, and sums are rounded as PyTorch rounds them.

    kernels = load("forward_head")     # a copy of gla/sm90/forward_head.py, and of what it imports from there
    run(kernels.launch_outputs(plan, x, segments, scale, every))
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import random
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

SM90 = "gla_triton_kernels.gla.sm90"
INTEGERS = {2: torch.int16, 4: torch.int32}
"""Dtypes of integers, by their bytes."""


# ---- the language


class _Whole(int):
    value = property(int)


class _Layout:
    """Stands for any layout: it keeps its arguments, and has no effect."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    value = property(lambda self: self)

    @classmethod
    def get_default_for(cls, *args: Any) -> _Layout:
        return cls(*args)


class Value(torch.Tensor):
    """A tensor or a number in registers. Kernels ask for its layout, which has no effect here.

    `x += y` makes a new value, as in Triton; other names of the old one keep it.
    """

    type = SimpleNamespace(layout=_Layout())  # pyright: ignore[reportAssignmentType,reportIncompatibleMethodOverride]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what PyTorch computes, as values. The base class does so in three times the time of a small sum."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        kind = type(result)
        if kind is tuple or kind is list:
            return kind(map(_as_value, result))
        return _as_value(result)

    def to(self, *args: Any, bitcast: bool = False, **kwargs: Any) -> Any:
        return self.view(args[0]) if bitcast else super().to(*args, **kwargs)

    def split(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.unbind(-1)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def _as_value(x: Any) -> Any:
    return x.as_subclass(Value) if type(x) is torch.Tensor else x


def _value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


def _plain(x: Any) -> torch.Tensor:
    return torch.as_tensor(x).as_subclass(torch.Tensor)


class _Barriers(_Layout):
    """The layout of barriers."""


class Pointer:
    """A pointer to elements of a tensor: flat memory and offsets."""

    def __init__(self, memory: torch.Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + more)

    __radd__ = __add__


def _pointer(x: torch.Tensor) -> Pointer:
    memory = torch.as_strided(x, (_extent(x),), (1,), x.storage_offset())
    return Pointer(memory)


def _extent(x: torch.Tensor) -> int:
    if x.is_contiguous() or not x.numel():
        return x.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _load(at: Pointer, mask: Any = True, other: Any = 0.0) -> torch.Tensor:
    mask, offsets = torch.broadcast_tensors(_plain(mask), _plain(at.offsets))
    values = torch.as_tensor(other, dtype=at.memory.dtype).expand(offsets.shape).clone()
    places = offsets[mask]
    assert bool((places >= 0).all())
    values[mask] = at.memory[places]
    return _value(values)


def _store(at: Pointer, x: Any, mask: Any = True) -> None:
    _loads_are_done()
    mask, offsets, x = torch.broadcast_tensors(_plain(mask), _plain(at.offsets), _plain(x).to(at.memory.dtype))
    places = offsets[mask]
    assert bool((places >= 0).all())
    at.memory[places] = x[mask]


def _scan(x: Any, axis: int, combine: Callable, reverse: bool = False) -> Any:
    if not isinstance(x, tuple):
        return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)
    assert not reverse
    rows = zip(*(each.unbind(axis) for each in x), strict=True)
    sums = itertools.accumulate(rows, lambda a, b: combine(*a, *b))
    return tuple(_value(torch.stack(each, axis)) for each in zip(*sums, strict=True))


def _reduce(x: Any, axis: int, combine: Callable) -> Any:
    """Reduces an axis, whose length is a power of two, by halves."""
    several = isinstance(x, tuple)
    parts = x if several else (x,)
    while parts[0].shape[axis] > 1:
        halves = [each.chunk(2, axis) for each in parts]
        combined = combine(*(first for first, _ in halves), *(second for _, second in halves))
        parts = combined if several else (combined,)
    parts = tuple(each.squeeze(axis) for each in parts)
    return parts if several else parts[0]


class Tile:
    """Shared memory, or a part of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.type = SimpleNamespace(shape=list(memory.shape))
        self.shape, self.dtype = memory.shape, memory.dtype

    def index(self, i: Any) -> Tile:
        return Tile(self.memory[int(i)])

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.memory.view(shape))

    def permute(self, order: list[int]) -> Tile:
        return Tile(self.memory.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: Any) -> Tile:
        size = math.prod(shape) * dtype.itemsize
        return Tile(self.memory.view(-1).view(torch.uint8)[:size].view(dtype).view(shape))

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        return Tile(self.memory.narrow(dim, start, length))

    def load(self, _: Any = None) -> torch.Tensor:
        _check_writes(self.memory)
        _loads.setdefault(_thread.name, []).append(_addresses(self.memory))
        return _value(self.memory.clone())

    def store(self, x: Any) -> None:
        _loads_are_done()
        _record_write(self.memory, _thread.name, _thread.known[_thread.name])
        self.memory.copy_(x)


_loads: dict[object, list[range]] = {}
"""The addresses of the loads of each thread that are under way."""


def _addresses(memory: torch.Tensor) -> range:
    return range(memory.data_ptr(), memory.data_ptr() + _extent(memory) * memory.itemsize)


def _loads_are_done() -> None:
    _loads[_thread.name] = []


def _overwritten(memory: torch.Tensor) -> bool:
    """Returns whether a load of a part of this memory is under way."""
    addresses = _addresses(memory)
    read = (x for loads in _loads.values() for x in loads)
    return any(x.start < addresses.stop and addresses.start < x.stop for x in read)


Knowledge = dict[object, int]
"""The knowledge of a thread: how many phases of each barrier have ended, and up to which time it knows the stores of
each thread. The time of a thread is 1 plus the number of its arrivals at barriers."""


class Barrier:
    """A barrier in shared memory. A phase ends when all arrivals and all expected bytes are there.

    Attributes:
        told: for each phase, what the threads that arrived knew.
    """

    def __init__(self) -> None:
        self.phase, self.count, self.pending, self.bytes = 0, 0, 0, 0
        self.told: list[Knowledge] = [{}]

    def index(self, i: Any) -> Barrier:
        assert int(i) == 0
        return self

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.told.append({})


class _Array:
    def __init__(self, items: list[Barrier]) -> None:
        self.items = items

    def index(self, i: Any) -> Barrier:
        return self.items[int(i)]


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, _Barriers):
        return Barrier() if len(shape) == 1 else _Array([Barrier() for _ in range(shape[0])])
    return Tile(torch.full(shape, float("nan") if dtype.is_floating_point else 12345, dtype=dtype))


class _Thread(threading.local):
    """The state of each thread.

    Attributes:
        name: an object that stands for the thread. The numbers of threads are used again by later threads.
        rank: among the threads of the program.
        known: what the thread knows.
        stores: the copies to global memory that have been started and not waited for.
    """

    def __init__(self) -> None:
        self.name, self.rank = object(), 0
        self.known: Knowledge = {self.name: 1}
        self.stores: list[Callable[[], None]] = []


_thread = _Thread()
_program = threading.local()
_writes: dict[range, tuple[object, int]] = {}
"""The last writes to shared memory, by their addresses: what a reader has to know. For a copy, it is the number of
phases of a barrier; for a store, the time of its thread."""


def _record_write(memory: torch.Tensor, by: object, at: int) -> None:
    addresses = _addresses(memory)
    for other in list(_writes):
        if addresses.start <= other.start and other.stop <= addresses.stop:
            _writes.pop(other, None)
    _writes[addresses] = (by, at)


def _learn(known: Knowledge, more: Knowledge) -> None:
    for one, number in more.items():
        known[one] = max(number, known.get(one, 0))


def _tell(bar: Barrier) -> None:
    """Adds what this thread knows to the current phase of a barrier. Its later stores are of a later time."""
    _learn(bar.told[bar.phase], _thread.known)
    _thread.known[_thread.name] += 1


def _check_writes(memory: torch.Tensor) -> None:
    block = _addresses(memory)
    for addresses, (by, at) in _writes.items():
        if addresses.start < block.stop and block.start < addresses.stop:
            message = "a tile is read by a thread that does not know that it has been written"
            assert _thread.known.get(by, 0) >= at, message


def _wait(bar: Barrier, phase: Any) -> None:
    def ended() -> bool:
        return (bar.phase & 1) != int(phase)

    if _failed or not ended():
        _let_others_run(until=ended)
    last = _thread.known.get(bar, 0)
    if (last & 1) == int(phase):  # otherwise it is a phase that has ended, and the wait shows nothing new
        _learn(_thread.known, bar.told[last] | {bar: last + 1})


def _arrive(bar: Barrier, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        assert bar.pending >= count, "more arrivals than the barrier counts"
        _tell(bar)
        bar.pending -= count
        bar.settle()
        if any(rank > _thread.rank and ready() for rank, ready, _ in _waiting):
            _let_others_run()


def _expect(bar: Barrier, size: int) -> None:
    _tell(bar)
    bar.bytes += size
    bar.pending -= 1


def _init(bar: Barrier, count: int) -> None:
    bar.count = bar.pending = count


class Descriptor:
    """A tensor that TMA moves in blocks; what lies outside of it reads as 0 and is not written."""

    def __init__(self, host: Any) -> None:
        self.x = torch.as_strided(host.base, host.shape, host.strides, host.base.storage_offset())
        self.dtype, self.layout = host.base.dtype, host.layout
        size = self.dtype.itemsize
        for n in host.block_shape:
            size *= n
        self.block_type = SimpleNamespace(shape=list(host.block_shape), nbytes=size)

    def places(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Returns the part of the tensor that a block covers, and the part of the block that lies in the tensor."""
        inside, block = [], []
        for first, n, size in zip(at, self.block_type.shape, self.x.shape, strict=True):
            first = int(first)
            assert first >= 0
            inside.append(slice(first, min(first + n, size)))
            block.append(slice(0, max(min(n, size - first), 0)))
        return tuple(inside), tuple(block)


def _host_descriptor(base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any) -> Any:
    return SimpleNamespace(base=base, shape=shape, strides=strides, block_shape=block_shape, layout=layout)


def _to_shared(desc: Descriptor, at: list[Any], bar: Barrier, tile: Tile) -> None:
    inside, block = desc.places(at)
    assert not _overwritten(tile.memory), "TMA overwrites a tile while warps load it: a fence is missing"
    _record_write(tile.memory, bar, bar.phase + 1)
    tile.memory.zero_()
    tile.memory.view(desc.block_type.shape)[block] = desc.x[inside]
    bar.bytes -= desc.block_type.nbytes
    bar.settle()


def _to_global(desc: Descriptor, at: list[Any], tile: Tile) -> None:
    inside, block = desc.places(at)

    def copy() -> None:
        desc.x[inside] = tile.memory.reshape(desc.block_type.shape)[block]

    _thread.stores.append(copy)


def _store_wait(pending: int) -> None:
    stores = _thread.stores
    due = stores[: len(stores) - pending] if pending else stores
    for copy in due:
        copy()
    _thread.stores = stores[len(due) :]


class Product:
    """A matrix product that has been started."""

    def __init__(self, a: Any, b: Any, acc: Any) -> None:
        for x in (a, b):
            if isinstance(x, Tile):
                _check_writes(x.memory)
        self.operands = [(x, _held(x).clone()) for x in (a, b)]
        self.acc, self.result = acc, None

    def finish(self) -> torch.Tensor:
        if self.result is None:
            for x, then in self.operands:
                assert torch.equal(_bits(_held(x)), _bits(then)), "a tile changed while it was read"
            a, b = (_truncated(then) for _, then in self.operands)
            acc = self.acc.finish() if isinstance(self.acc, Product) else self.acc
            self.result = _value(a @ b if acc is None else acc + a @ b)
        return self.result


def _truncated(x: torch.Tensor) -> torch.Tensor:
    """Returns an operand as matrix units read it: of float32, they read the bits of TF32."""
    if x.dtype != torch.float32:
        return x.float()
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def _held(x: Any) -> torch.Tensor:
    return x.memory if isinstance(x, Tile) else x.as_subclass(torch.Tensor)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(INTEGERS[x.itemsize])  # NaN equals NaN


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    return Product(a, b, acc if use_acc else None)


def _finish(_: int, products: Iterable[Any]) -> Any:
    finished = tuple(x.finish() if isinstance(x, Product) else x for x in products)
    return finished[0] if len(finished) == 1 else finished


# ---- threads


_failed: list[BaseException] = []
_waiting: list[tuple[int, Callable[[], bool], threading.Lock]] = []
"""The threads that do not run: the rank of each, what it waits for, and the lock that it has to get."""
_ranks = random.Random()


def _always() -> bool:
    return True


def _let_others_run(until: Callable[[], bool] = _always) -> None:
    """Gives the turn to the thread of the highest rank that may go on, and returns when this one has it again."""
    turn = _queue_up(_thread.rank, until)
    _start_one()
    turn.acquire()
    if _failed:
        raise TimeoutError("another thread failed, or a barrier is waited for and never completes")


def _queue_up(rank: int, until: Callable[[], bool]) -> threading.Lock:
    turn = threading.Lock()
    turn.acquire()
    _waiting.append((rank, until, turn))
    return turn


def _start_one() -> None:
    """Starts one of the threads that may go on. All of them go on, to fail, if one has failed or none may."""
    ready = [each for each in _waiting if _failed or each[1]()]
    if _waiting and not ready:
        _failed.append(TimeoutError("deadlock: a barrier is waited for and never completes"))
        ready = _waiting
    if ready:
        chosen = max(ready, key=lambda each: each[0])
        _waiting.remove(chosen)
        chosen[2].release()


def _specialize(partitions: list[tuple[Callable, tuple]], *_: Any) -> None:
    number_and_grid = dict(vars(_program))

    def body(function: Callable, args: tuple, rank: int, turn: threading.Lock) -> None:
        turn.acquire()
        _thread.rank = rank
        vars(_program).update(number_and_grid)
        try:
            function(*args)
            assert not _thread.stores, "a copy to memory was not waited for"
        except BaseException as error:
            _failed.append(error)
        _start_one()

    _writes.clear()
    ranks = _ranks.sample(range(len(partitions)), len(partitions))
    threads = [
        threading.Thread(target=body, args=(*each, rank, _queue_up(rank, _always)))
        for each, rank in zip(partitions, ranks, strict=True)
    ]
    for thread in threads:
        thread.start()
    _start_one()
    for thread in threads:
        thread.join()
    if _failed:
        raise next((e for e in _failed if not isinstance(e, TimeoutError)), _failed[0])


def _jit(function: Any) -> Any:
    function.arg_names = list(inspect.signature(function).parameters)
    return function


def _language() -> ModuleType:
    gl: Any = ModuleType("triton.experimental.gluon.language")
    gl.constexpr = lambda x: _Whole(x) if type(x) is int else x
    for name in ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout"):
        setattr(gl, name, _Layout)
    gl.SwizzledSharedLayout = _Layout
    for name in ("float32", "float64", "float16", "bfloat16", "int16", "int32", "int64"):
        setattr(gl, name, getattr(torch, name))
    gl.static_range, gl.cdiv = range, lambda a, b: -(-a // b)
    gl.minimum = lambda a, b: torch.minimum(*torch.broadcast_tensors(_value(a), _value(b)))
    gl.maximum = lambda a, b: torch.maximum(_value(a), _value(b).to(_value(a).dtype))
    gl.where = lambda c, a, b: torch.where(_value(c), a, b)
    gl.to_tensor = _value
    gl.program_id, gl.num_programs = (
        (lambda axis: _value(_program.id[axis])),
        (lambda axis: _value(_program.grid[axis])),
    )
    gl.arange = lambda a, b, _: _value(torch.arange(a, b))
    gl.zeros = lambda shape, dtype, _: _value(torch.zeros(shape, dtype=dtype))
    gl.full = lambda shape, x, dtype, _: _value(torch.full(shape, float(x), dtype=dtype))
    gl.zeros_like, gl.full_like, gl.associative_scan = torch.zeros_like, torch.full_like, _scan
    gl.abs, gl.exp2, gl.log2 = (lambda x: _value(x).abs()), torch.exp2, torch.log2
    gl.fma = lambda a, b, c: torch.addcmul(c.double(), a.double(), b.double()).to(c.dtype)
    gl.join = lambda a, b: torch.stack((a, b), -1)
    gl.gather = lambda x, index, axis: torch.gather(x, axis, index.long())
    gl.sum = lambda x, axis: x.sum(axis)
    gl.reduce = _reduce
    gl.max, gl.min = (lambda x, axis: x.amax(axis)), (lambda x, axis: x.amin(axis))
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.load, gl.store, gl.allocate_shared_memory, gl.warp_specialize = _load, _store, _allocate, _specialize
    return gl


def _ampere() -> ModuleType:
    ampere: Any = ModuleType("triton.experimental.gluon.language.nvidia.ampere")
    ampere.mma_v2 = lambda a, b, acc, input_precision=None: _value(acc + _truncated(a) @ _truncated(b))
    return ampere


def _hopper(gl: Any) -> ModuleType:
    hopper: Any = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = _loads_are_done
    hopper.mbarrier = SimpleNamespace(MBarrierLayout=_Barriers, init=_init, wait=_wait, arrive=_arrive, expect=_expect)
    hopper.tma = SimpleNamespace(
        async_copy_global_to_shared=_to_shared, async_copy_shared_to_global=_to_global, store_wait=_store_wait
    )
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _multiply, _finish
    hopper.warpgroup_mma_init = lambda x: x
    return hopper


# ---- modules and launches


@contextmanager
def _replaced(modules: dict[str, Any]) -> Any:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load(*names: str) -> SimpleNamespace:
    """Returns copies of modules of gla/sm90, by name, whose kernels run on the CPU.

    Args:
        names: the modules; each after the modules of the folder that it imports. common is loaded first.
    """
    return load_from({SM90: ("common", *names)})


def load_from(names: dict[str, tuple[str, ...]]) -> SimpleNamespace:
    """Returns copies of modules by their folders, in this order. A later module replaces one of the same name."""
    gl = _language()
    package: Any = ModuleType("triton.experimental.gluon")
    package.jit = lambda function=None, **_: _jit if function is None else _jit(function)
    package.language, package.constexpr_function = gl, lambda function: function
    parent: Any = ModuleType("triton.experimental")
    parent.gluon = package
    fakes: dict[str, Any] = {"triton.experimental": parent, "triton.experimental.gluon": package}
    fakes["triton.experimental.gluon.language"] = gl
    fakes["triton.experimental.gluon.language.nvidia.hopper"] = _hopper(gl)
    fakes["triton.experimental.gluon.language.nvidia.ampere"] = _ampere()
    fakes["triton.experimental.gluon.nvidia.hopper"] = SimpleNamespace(TensorDescriptor=_host_descriptor)
    modules: dict[str, Any] = {}
    places = [(folder, name) for folder, each in names.items() for name in each]
    with _replaced(fakes | {f"{folder}.{name}": None for folder, name in places}):
        for folder, name in places:
            spec = importlib.util.find_spec(folder)
            assert spec is not None
            assert spec.submodule_search_locations is not None
            path = f"{spec.submodule_search_locations[0]}/{name}.py"
            module_spec = importlib.util.spec_from_file_location(f"{folder}.{name}", path)
            assert module_spec is not None
            assert module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[f"{folder}.{name}"] = module
            module_spec.loader.exec_module(module)
            _simplify(module)
            modules[name] = module
    return SimpleNamespace(**modules)


def _exponents(g: torch.Tensor, normalizer: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `exponents_of_mild_chunk` of common.py, which depends on the layout of g [C, K]."""
    b = g.cumsum(0) * (math.log2(math.e) if normalizer is None else 1 / normalizer)
    return b - 0.5 * b[-1], b[-1] * math.log(2)


def _clear_rows(tile: Tile, rows: Any, _: Any, value: float = 0.0) -> None:
    """Computes `clear_rows` of common.py. It counts as no write, because two warpgroups may clear the same rows."""
    if int(rows) < tile.shape[0]:
        _check_writes(tile.memory)
        _loads_are_done()
        tile.memory[max(int(rows), 0) :] = value


def _publish(flag: Any) -> None:
    """Counts one for each thread of a warpgroup."""
    _store(flag, _load(flag) + 128)


def _wait_for_published(flag: Any) -> None:
    assert _load(flag) == 128, "a block waits for a later one"


def _simplify(module: Any) -> None:
    """Replaces what has no meaning here: constants of Triton by numbers, and inline assembly.

    `replaced` of the module keeps the functions by name.
    """
    simple = {
        "exponents_of_mild_chunk": _exponents,
        "clear_rows": _clear_rows,
        "as_float32": lambda x: x.float(),
        "row_sums": lambda x: x.sum(1),  # one operation in place of a hundred
        "keep_apart": lambda _: None,
        "_log2": torch.log2,
        "_reciprocal": torch.reciprocal,
        "_choose": lambda bits, x, y: torch.where(bits != 0, x, y),
        "_prefetch": lambda *_: None,
        "_prefetch_logits": lambda *_: None,
        "opaque_zero": lambda: _value(0),
        "wait_for_predecessor": lambda: None,
        "let_dependents_start": lambda: None,
        "publish": _publish,
        "wait_for_published": _wait_for_published,
    }
    module.replaced = {name: x for name, x in vars(module).items() if name in simple}
    for name, x in list(vars(module).items()):
        if type(x).__module__ == "triton.language.core" and type(x).__name__ == "constexpr":
            setattr(module, name, x.value)
        elif name in simple:
            setattr(module, name, simple[name])


@contextmanager
def program(number: tuple[int, ...], grid: tuple[int, ...]) -> Any:
    """Lets device functions run as one program of a grid."""
    _program.id, _program.grid = number, grid
    yield


def run(launches: Iterable[Any]) -> None:
    """Makes launches: emulates kernels from `load`, and starts all others, which have to be interpreted."""
    for launch in launches:
        if hasattr(launch.kernel, "fn"):
            launch.kernel[launch.grid](*launch.arguments.values(), **launch.options)
            continue
        sizes = [x.shape for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
        _ranks.seed(f"{launch.kernel.__name__} {launch.grid} {sizes}")  # other ranks in other tests
        for number in itertools.product(*map(range, launch.grid)):
            _program.id, _program.grid = number, launch.grid
            _failed.clear()
            _thread.stores = []
            _loads.clear()
            constants = {name for name, kind in launch.kernel.__annotations__.items() if "constexpr" in str(kind)}
            try:
                launch.kernel(**{name: _argument(x, name in constants) for name, x in launch.arguments.items()})
            finally:
                _writes.clear()


def _argument(x: Any, constant: bool) -> Any:
    if isinstance(x, torch.Tensor):
        return _pointer(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return _value(x) if type(x) is int and not constant else x
