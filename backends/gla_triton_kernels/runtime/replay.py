"""Recorded launches: quick when a call comes back.

A small call spends most of its time on the host: describing launches, specialising their arguments, finding what has
been compiled, encoding tensor maps. All of this is the same for calls of one signature. So the launches of a prepared
call are recorded, and replayed on other tensors by the function in C that Triton's launchers call, which spares a
microsecond a launch. Allocators return the same addresses again and again, so launches are kept ready by the addresses
of their tensors, and those that are made repeatedly become a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from gla_triton_kernels.runtime.architecture import interpreted
from gla_triton_kernels.runtime.graph import Graph
from gla_triton_kernels.runtime.launch import Launch, current_device

ALIGNMENT = 16
"""Bytes. Triton compiles for addresses that are multiples of it, or that are not: only the former are replayed."""
_LINE = 128
"""Bytes of a line of the cache; scratch tensors begin at multiples."""
_MOST_MAPS = 1024
_MOST_PREPARED = 4096
"""Calls at certain addresses whose launches are kept prepared: about 2 KiB each."""
_MOST_GRAPHS = 256
"""About 120 KiB of the device's memory each."""
_REPLAYS_BEFORE, _REPLAYS_AGAIN = 4, 64
"""Replays at the same addresses before launches become a graph, and after theirs was dropped become one again.

A graph takes as long to make as 4 to 10 of its starts spare. Where more are wanted than are kept, they are made so
seldom that it takes little of a call's time.
"""
_NONE = -1
"""The place of a None among the tensors of a call: behind them."""


class _TensorMap:
    """A parameter of a kernel that is a tensor map, for all tensors of one layout.

    A map is encoded once for an address: of a call's tensors often only some are at addresses that are new to it.
    """

    def __init__(self, descriptor: Any, box: Any) -> None:
        self.layout = {name: value for name, value in vars(descriptor).items() if name != "base"}
        self.box = box
        self.encoded: dict[int, list[Any]] = {}

    def encode(self, address: int) -> list[Any]:
        """Returns the kernel's arguments for a tensor at this address: the map encoded, then shape and strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        base = SimpleNamespace(data_ptr=lambda: address)  # all that is asked of a tensor
        encoded = make_tensordesc_arg(SimpleNamespace(base=base, **self.layout), self.box)
        _put(self.encoded, address, encoded, _MOST_MAPS)
        return encoded


_PreparedLaunch = tuple[Any, tuple[int, int, int], tuple[Any, ...]]
"""A launch but for its stream: Triton's function in C, and what it takes before the stream, the grid, and after it."""


@dataclass(eq=False, slots=True)
class _Prepared:
    """The launches of a call at certain addresses; `left` replays from now they become a graph."""

    launches: list[_PreparedLaunch]
    left: int = _REPLAYS_BEFORE
    graph: Graph | None = None

    def start(self, stream: int) -> None:
        """Makes the launches on a stream, the current one; a capture of it is told of them one by one."""
        graph = self.graph  # another thread may drop it
        if len(self.launches) == 1 or _capturing():
            self._launch(stream)
        elif graph is not None:
            try:
                graph.start(stream)
            except RuntimeError:  # nothing of it was launched
                self._give_up(graph)
                self._launch(stream)
        else:
            self._launch(stream)
            self.left -= 1
            if self.left == 0 and graphs_are_on():
                self._capture()

    def _launch(self, stream: int) -> None:
        for launch, grid, arguments in self.launches:
            launch(*grid, stream, *arguments)

    def _capture(self) -> None:
        with contextlib.suppress(RuntimeError):  # then these launches are made one by one for good
            graph = Graph(self._launch)
            with _graphs_change:
                if len(_graphed) >= _MOST_GRAPHS:
                    for other in _graphed:
                        other.graph, other.left = None, _REPLAYS_AGAIN
                    _graphed.clear()
                self.graph = graph
                _graphed.append(self)

    def _give_up(self, graph: Graph) -> None:
        """Drops this graph for good, unless another thread has dropped it."""
        with _graphs_change:
            if self.graph is graph:
                self.graph = None
                _graphed.remove(self)


@functools.cache
def graphs_are_on() -> bool:
    """Returns whether launches that are made repeatedly become a CUDA graph; GLA_GRAPHS=0 turns that off."""
    return os.environ.get("GLA_GRAPHS", "").strip().lower() not in ("0", "false", "no", "off")


_graphed: list[_Prepared] = []
"""The calls that have a graph, of all devices; it and their graphs change together, under `_graphs_change`."""
_graphs_change = threading.RLock()  # a collection of garbage may call in between
_capturing = torch.cuda.is_current_stream_capturing


@dataclass(frozen=True, slots=True)
class _RecordedLaunch:
    """A launch, but for its stream, tensors and floats.

    Attributes:
        launch: Triton's function in C. grid, kernel: what it takes before the stream, and after it.
        spread: whether it takes the kernel's arguments one by one, not as a tuple.
        places: of the kernel's tensors among those of the call. maps: of each of them that is mapped; empty if none is.
        takes_floats: whether the kernel takes the floats of the call.
        fixed: the kernel's last arguments, which are the same for all calls.
    """

    launch: Any
    grid: tuple[int, int, int]
    kernel: tuple[Any, ...]
    spread: bool
    places: tuple[int, ...]
    maps: tuple[_TensorMap | None, ...]
    takes_floats: bool
    fixed: tuple[Any, ...]

    def prepared(self, addresses: list[int], floats: tuple[float, ...]) -> _PreparedLaunch:
        """Returns the launch on the tensors of a call, which are at these addresses."""
        arguments: list[Any] = self._mapped(addresses) if self.maps else [addresses[i] for i in self.places]
        if self.takes_floats:
            arguments += floats
        if self.spread:
            return self.launch, self.grid, (*self.kernel, *arguments, *self.fixed)
        return self.launch, self.grid, (*self.kernel, (*arguments, *self.fixed))

    def _mapped(self, addresses: list[int]) -> list[Any]:
        """Addresses, and encoded maps in the place of those that are mapped."""
        arguments = []
        for place, tensor_map in zip(self.places, self.maps, strict=True):
            address = addresses[place]
            if tensor_map is None:
                arguments.append(address)
            else:
                arguments += tensor_map.encoded.get(address) or tensor_map.encode(address)
        return arguments


@dataclass(frozen=True, eq=False, slots=True)
class RecordedCall:
    """The launches of a call in order, and the device they are for; equal only to itself.

    Attributes:
        memory: how the memory of all scratch tensors is allocated; None if there are none.
        parts: scratch tensors as parts of that memory, then parts of tensors (see `part`): the place of the whole, and
            bytes into it. Places count the tensors of the call, the memory, then these parts.
    """

    device: int
    memory: dict[str, Any] | None
    parts: tuple[tuple[int, int], ...]
    launches: tuple[_RecordedLaunch, ...]

    def prepared(self, addresses: list[int], floats: tuple[float, ...]) -> _Prepared:
        """The launches on tensors, and memory for scratch behind them, at these addresses."""
        addresses = addresses.copy()
        for place, bytes_into in self.parts:
            addresses.append(addresses[place] + bytes_into)
        addresses.append(0)  # at _NONE
        return _Prepared([launch.prepared(addresses, floats) for launch in self.launches])


_prepared: dict[Hashable, _Prepared] = {}
"""Launches that were made, by the call, its floats, and the addresses of its tensors and of the memory for scratch.

Of all calls together, so that it stays small however many are recorded.
"""


def _put(cache: dict[Any, Any], key: Hashable, value: object, most: int) -> None:
    if len(cache) >= most:
        cache.clear()
    cache[key] = value


def record(tensors: Sequence[Tensor | None], launches: Sequence[Launch]) -> RecordedCall | None:
    """Returns the launches of a call for `replay`, or None if they cannot be replayed.

    Args:
        tensors: what the call has been given, and returns. Other tensors of the launches are scratch: contiguous,
            allocated anew for each call, on whose contents before it nothing depends; or a `part` of either.
        launches: in order, as they have been made. Each takes all the call's floats, or none. The parameters of its
            kernel are in the order of `_Arguments`.
    """
    arguments = [_arguments(launch) for launch in launches]
    given = [x for x in tensors if x is not None]
    taken = [getattr(x, "base", x) for each in arguments for x in each.tensors if x is not None]
    parts = {id(x): x for x in taken if hasattr(x, _WHOLE)}
    places = {id(x): i for i, x in enumerate(tensors) if x is not None}
    scratch = list({id(x): x for x in map(_whole_of, taken) if id(x) not in places}.values())
    one_in_two_places = len({id(x) for x in given}) < len(given)
    aligned = math.gcd(ALIGNMENT, *(x.data_ptr() for x in given + taken)) == ALIGNMENT
    told_apart = all(_is_fixed(x) for each in arguments for x in each.fixed)
    if one_in_two_places or not aligned or not all(x.is_contiguous() for x in scratch) or not told_apart:
        return None
    if why_not_replayed():
        return None
    *begins, size = itertools.accumulate((-(-x.nbytes // _LINE) * _LINE for x in scratch), initial=0)
    memory = {"size": (size,), "dtype": torch.uint8, "device": given[0].device} if scratch else None
    places.update({id(x): len(tensors) + 1 + i for i, x in enumerate([*scratch, *parts.values()])})
    into = [(len(tensors), begin) for begin in begins]
    into += [(places[id(_whole_of(x))], x.data_ptr() - _whole_of(x).data_ptr()) for x in parts.values()]
    if any(launch.compiled.run.global_scratch_size or launch.compiled.run.profile_scratch_size for launch in launches):
        return None  # memory that Triton allocates for each launch
    recorded = tuple(_recorded(*each, places) for each in zip(launches, arguments, strict=True))
    return RecordedCall(current_device(), memory, tuple(into), recorded)


class _Arguments(NamedTuple):
    """The arguments of a launch in the order of the kernel's parameters, which begin with tensors and end with numbers.

    Attributes:
        tensors: tensors, descriptors of tensors, and None.
        floats: those of the call.
        fixed: integers, and constants of the compiler.
    """

    tensors: list[Any]
    floats: list[float]
    fixed: list[Any]


def _arguments(launch: Launch) -> _Arguments:
    """Returns the arguments of a launch by what a replay does with them."""
    values = list(launch.arguments.values())
    tensors = list(itertools.takewhile(lambda x: x is None or _is_tensor(x), values))
    floats = list(itertools.takewhile(lambda x: isinstance(x, float), values[len(tensors) :]))
    return _Arguments(tensors, floats, values[len(tensors) + len(floats) :])


def _is_tensor(x: Any) -> bool:
    """Returns whether x is a tensor or a descriptor of one."""
    return isinstance(x, Tensor) or hasattr(x, "base")


def _is_fixed(x: Any) -> bool:
    """Returns whether an argument is the same for all calls that have the same key."""
    return not isinstance(x, float) and not _is_tensor(x)


_WHOLE = "_part_of"


def part(x: Tensor, start: int, end: int) -> Tensor:
    """Rows start to end of x, for launches that are recorded: it remembers x, where a replay finds it."""
    found = x[start:end]
    setattr(found, _WHOLE, x)
    return found


def _whole_of(x: Any) -> Any:
    """Returns the tensor that x is a part of, or x itself."""
    return getattr(x, _WHOLE, x)


def _recorded(launch: Launch, arguments: _Arguments, places: dict[int, int]) -> _RecordedLaunch:
    """Returns a launch of tensors that stand at these places of the call, by their ids."""
    run, maps = launch.compiled.run, ()
    function, (tensors, floats, fixed) = run.launch, arguments
    descriptors = [x for x in tensors if hasattr(x, "base")]
    if descriptors:
        function, boxes = _behind_encoding(function), launch.compiled.metadata.tensordesc_meta
        map_of = {id(x): _TensorMap(x, box) for x, box in zip(descriptors, boxes, strict=True)}
        maps = tuple(map_of.get(id(x)) for x in tensors)
    at = tuple(places.get(id(getattr(x, "base", x)), _NONE) for x in tensors)
    kernel, spread = _after_the_stream(run, launch.compiled), _launcher() == TRITON_3_6
    return _RecordedLaunch(function, launch.grid, kernel, spread, at, maps, bool(floats), tuple(fixed))


TRITON_3_6, TRITON_3_7 = "3.6", "3.7"
"""The versions of Triton whose launchers are known: what they hand to the function in C is written out below."""


@functools.cache
def _launcher() -> str:
    """Returns the major and minor version of Triton."""
    return ".".join(triton.__version__.split(".")[:2])


def _after_the_stream(run: Any, kernel: Any) -> tuple[Any, ...]:
    """Returns what `CudaLauncher.__call__` hands to the function in C between the stream and the kernel's arguments.

    No scratch memory, no metadata of the launch, and no hooks: these take a third of the time even where none is set.
    """
    begin = (kernel.function, run.launch_cooperative_grid, run.launch_pdl)
    if _launcher() == TRITON_3_6:
        return (*begin, None, None, kernel.packed_metadata, None, None, None)
    return (*begin, kernel.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)


def _behind_encoding(launch: Any) -> Any:
    """The function to which a launcher's `launch` hands its arguments once it has encoded descriptors as tensor maps.

    It is a closure of `triton.backends.nvidia.driver.wrap_handle_tensordesc`, in Triton 3.6 and 3.7.
    """
    return launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents


def replay(call: RecordedCall, tensors: Sequence[Tensor | None], floats: tuple[float, ...]) -> bool:
    """Makes recorded launches on other tensors, which have the layouts of the recorded ones.

    Returns:
        False, and nothing is launched, if an address is not aligned, another device is the current one, or a profiler
        listens.
    """
    if call.device != current_device() or _profiled():
        return False
    memory = torch.empty(**call.memory) if call.memory else None
    addresses = [0 if x is None else x.data_ptr() for x in (*tensors, memory)]
    prepared_for = (call, floats, *addresses)
    prepared = _prepared.get(prepared_for)
    if prepared is None:  # what is found has addresses that were checked when it was kept
        if math.gcd(ALIGNMENT, *addresses) != ALIGNMENT:
            return False
        prepared = call.prepared(addresses, floats)
        _put(_prepared, prepared_for, prepared, _MOST_PREPARED)
    active: Any = driver.active
    prepared.start(active.get_current_stream(call.device))
    return True


def why_not_replayed() -> str | None:
    """Returns why every call takes Triton's own way to a launch, slower on the host; None if calls are replayed."""
    if interpreted():
        return "kernels are interpreted (TRITON_INTERPRET=1)"
    if torch.version.hip is not None:
        return "launches are replayed on NVIDIA GPUs alone"
    if _profiled():
        return "a profiler listens to Triton's launches"
    if not _launchers_are_known():
        return f"Triton {triton.__version__} launches kernels in another way than 3.6 and 3.7"
    return None


def _profiled() -> bool:
    """Returns whether a profiler wants to hear of launches, which only Triton's own way tells it of."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


@functools.cache
def _launchers_are_known() -> bool:
    """Returns whether the launchers of this Triton are known, by its version and by the encoding of tensor maps."""
    if _launcher() not in (TRITON_3_6, TRITON_3_7):
        return False
    from triton.backends.nvidia import driver as nvidia

    def launch() -> None: ...

    try:
        known = _behind_encoding(nvidia.wrap_handle_tensordesc(launch, {0: "tensordesc<fp16[1,1]>"}, None)) is launch
    except (AttributeError, IndexError, TypeError, ValueError):
        return False
    return known and hasattr(nvidia, "make_tensordesc_arg")
