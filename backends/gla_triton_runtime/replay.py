"""Records the launches of a call, and replays them on the tensors of later calls of the same signature.

A small call spends most of its time on the host, which describes launches, specialises their arguments, looks up
compiled kernels and encodes tensor maps. This work gives the same results for all calls of one signature. So the
launches of a prepared call are recorded. A replay makes them on other tensors through the C function that Triton's
launchers call, which saves a microsecond for each launch. Allocators often return the same addresses, so the arguments
of launches are cached by the addresses of the tensors. Launches that are made repeatedly at the same addresses become a
CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.architecture import interpreted
from gla_triton_runtime.graph import Graph
from gla_triton_runtime.launch import Launch, current_device

ALIGNMENT = 16
"""The alignment of addresses in bytes. Triton compiles one kernel for aligned addresses and another one for all others.
Only launches of the first kernel are replayed. The alignment of a tensor does not matter if all kernels name its
parameter in `do_not_specialize_on_alignment`."""
_LINE = 128
"""The number of bytes of a cache line; scratch tensors begin at multiples of this number."""
_MOST_MAPS = 1024
_MOST_PREPARED = 4096
"""The maximum number of calls whose launches are cached by their addresses, at about 2 KiB each."""
_MOST_GRAPHS = 256
"""The maximum number of graphs that are kept. Each takes about 120 KiB of device memory."""
_REPLAYS_BEFORE, _REPLAYS_AGAIN = 4, 64
"""The number of replays at the same addresses after which launches become a graph, and the number after which they
become one again once their graph has been dropped.

Making a graph takes as much time as 4 to 10 starts of it save. If calls need more graphs than are kept, the second
number makes new graphs so rare that they take little of the time of a call.
"""
_NONE = -1
"""The place of an argument that is None: the last address, which is 0 and follows the addresses of all tensors."""


class _TensorMap:
    """A parameter of a kernel that takes a tensor map, for all tensors of one layout.

    A map is encoded once for each address and then cached, because often only some tensors of a call are at new
    addresses.

    Attributes:
        layout: attributes of the descriptor other than its tensor.
        box: Triton's metadata of the tile.
        encoded: arguments of the kernel, by address.
    """

    def __init__(self, descriptor: Any, box: Any) -> None:
        self.layout = {name: value for name, value in vars(descriptor).items() if name != "base"}
        self.box = box
        self.encoded: dict[int, list[Any]] = {}

    def encode(self, address: int) -> list[Any]:
        """Returns the kernel's arguments for a tensor at this address: the encoded map, then shape and strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        base = SimpleNamespace(data_ptr=lambda: address)  # Triton reads nothing else of a tensor
        launch_arguments = () if _launcher() in (TRITON_3_6, TRITON_3_7) else (None,)  # Triton 3.8 reads nothing of it
        encoded = make_tensordesc_arg(SimpleNamespace(base=base, **self.layout), self.box, *launch_arguments)
        _put(self.encoded, address, encoded, _MOST_MAPS)
        return encoded


_PreparedLaunch = tuple[Any, tuple[int, int, int], tuple[Any, ...]]
"""A launch without its stream: Triton's C function, the grid, which precedes the stream, and the arguments after it."""


@dataclass(eq=False, slots=True)
class _Prepared:
    """The launches of a call on tensors at given addresses.

    Attributes:
        launches: the launches in order.
        left: number of replays that remain before the launches become a graph.
        graph: the graph of the launches; None if there is none.
    """

    launches: list[_PreparedLaunch]
    left: int = _REPLAYS_BEFORE
    graph: Graph | None = None

    def start(self, stream: int) -> None:
        """Makes the launches on the current stream, `stream`. If it is being captured, they are made one by one."""
        graph = self.graph  # another thread may drop it
        if len(self.launches) == 1 or _capturing():
            self._launch(stream)
        elif graph is not None:
            try:
                graph.start(stream)
            except RuntimeError:  # the graph has launched nothing
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
        with contextlib.suppress(RuntimeError):  # after an error, these launches are made one by one for good
            graph = Graph(self._launch)
            with _graphs_change:
                if len(_graphed) >= _MOST_GRAPHS:
                    for other in _graphed:
                        other.graph, other.left = None, _REPLAYS_AGAIN
                    _graphed.clear()
                self.graph = graph
                _graphed.append(self)

    def _give_up(self, graph: Graph) -> None:
        """Drops `graph` for good, unless another thread has already dropped it."""
        with _graphs_change:
            if self.graph is graph:
                self.graph = None
                _graphed.remove(self)


@functools.cache
def graphs_are_on() -> bool:
    """Returns whether launches that are made repeatedly become a CUDA graph; GLA_GRAPHS=0 turns graphs off."""
    return os.environ.get("GLA_GRAPHS", "").strip().lower() not in ("0", "false", "no", "off")


_graphed: list[_Prepared] = []
"""The calls that have a graph, on all devices. This list and the graphs change together, under `_graphs_change`."""
_graphs_change = threading.RLock()  # reentrant, since garbage collection may run code that takes it again
_capturing = torch.cuda.is_current_stream_capturing


@dataclass(frozen=True, slots=True)
class _RecordedLaunch:
    """A launch without its stream, its tensors and its floats.

    Attributes:
        launch: Triton's C function.
        grid: the arguments of the C function before the stream.
        kernel: the arguments of the C function between the stream and the kernel's arguments.
        spread: whether the C function takes the kernel's arguments one by one; otherwise it takes a tuple of them.
        places: for each tensor of the kernel, its index among the addresses of the call.
        maps: for each tensor of the kernel, its tensor map, or None if it is passed as a pointer; empty if all are
            passed as pointers.
        takes_floats: whether the kernel takes the floats of the call.
        fixed: the last arguments of the kernel, which are the same for all calls.
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
        """Returns the launch on the tensors of a call, given their addresses."""
        arguments: list[Any] = self._mapped(addresses) if self.maps else [addresses[i] for i in self.places]
        if self.takes_floats:
            arguments += floats
        if self.spread:
            return self.launch, self.grid, (*self.kernel, *arguments, *self.fixed)
        return self.launch, self.grid, (*self.kernel, (*arguments, *self.fixed))

    def _mapped(self, addresses: list[int]) -> list[Any]:
        """Returns the kernel's tensors as arguments: an address, or an encoded map if the tensor has one."""
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
    """The launches of a call in order. A recorded call equals only itself.

    All scratch tensors of a call lie in one block of memory. The addresses of a call are numbered: first the tensors of
    the call that are not None, then the scratch memory, then `parts`. These numbers are called places.

    Attributes:
        device: index of the device of the launches.
        stream: takes this index, and returns the current stream of the device.
        present: takes the tensors of a call, of which there are at least two, and returns those that are not None.
        scratch: size in bytes and device of the scratch memory; None if there are no scratch tensors.
        parts: the scratch tensors, then the parts of tensors (see `part`). For each, the place of the memory or tensor
            that contains it, and its offset in bytes.
        aligned: the places of tensors of the call whose addresses must be multiples of `ALIGNMENT`.
        launches: the recorded launches.
    """

    device: int
    stream: Callable[[int], int]
    present: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]
    scratch: tuple[int, torch.device] | None
    parts: tuple[tuple[int, int], ...]
    aligned: tuple[int, ...]
    launches: tuple[_RecordedLaunch, ...]

    def prepared(self, addresses: list[int], floats: tuple[float, ...]) -> _Prepared:
        """Returns the launches, given the addresses of the tensors and, behind them, of the scratch memory."""
        addresses = addresses.copy()
        for place, bytes_into in self.parts:
            addresses.append(addresses[place] + bytes_into)
        addresses.append(0)  # at _NONE
        return _Prepared([launch.prepared(addresses, floats) for launch in self.launches])


_prepared: dict[Hashable, _Prepared] = {}
"""Maps a recorded call, its floats, and the addresses of its tensors and scratch memory to launches that were made.

All recorded calls share this cache, so that its size does not depend on their number.
"""


def _put(cache: dict[Any, Any], key: Hashable, value: object, most: int) -> None:
    if len(cache) >= most:
        cache.clear()
    cache[key] = value


def record(tensors: Sequence[Tensor | None], launches: Sequence[Launch]) -> RecordedCall | None:
    """Returns the launches of a call for `replay`, or None if they cannot be replayed.

    Args:
        tensors: the tensors that the call takes and returns, at least two. Any other tensor of the launches is either
            scratch or a `part` of a tensor. Scratch is contiguous and allocated anew for each call, shares no memory
            with other tensors, and no result depends on its initial contents.
        launches: the launches of the call in order, after they have been made. Each takes all floats of the call, or
            none of them. The parameters of its kernel are in the order of `_Arguments`.
    """
    if why_not_replayed():
        return None
    arguments = [_arguments(launch) for launch in launches]
    present_of = operator.itemgetter(*(i for i, x in enumerate(tensors) if x is not None))
    present = present_of(tensors)
    taken = [getattr(x, "base", x) for each in arguments for x in each.tensors if x is not None]
    aligned = [x for launch, each in zip(launches, arguments, strict=True) for x in _aligned(launch, each)]
    parts = {id(x): x for x in taken if hasattr(x, _WHOLE)}
    places = {id(x): i for i, x in enumerate(present)}
    scratch = list({id(x): x for x in map(_whole_of, taken) if id(x) not in places}.values())
    has_duplicate = len({id(x) for x in present}) < len(present)
    are_aligned = math.gcd(ALIGNMENT, *(x.data_ptr() for x in aligned)) == ALIGNMENT
    has_fixed_layout = all(_is_fixed(x) for each in arguments for x in each.fixed)
    if has_duplicate or not are_aligned or not has_fixed_layout or not _are_separate(scratch, present):
        return None
    *begins, size = itertools.accumulate((ceil_div(x.nbytes, _LINE) * _LINE for x in scratch), initial=0)
    memory = (size, present[0].device) if scratch else None
    places.update({id(x): len(present) + 1 + i for i, x in enumerate([*scratch, *parts.values()])})
    into = [(len(present), begin) for begin in begins]
    into += [(places[id(_whole_of(x))], x.data_ptr() - _whole_of(x).data_ptr()) for x in parts.values()]
    if any(launch.compiled.run.global_scratch_size or launch.compiled.run.profile_scratch_size for launch in launches):
        return None  # Triton would have to allocate memory for each launch
    recorded = tuple(_recorded(*each, places) for each in zip(launches, arguments, strict=True))
    wholes = {id(_whole_of(x)) for x in aligned}
    aligned_places = tuple(i for i, x in enumerate(present) if id(x) in wholes)
    active: Any = driver.active
    stream = active.get_current_stream
    return RecordedCall(current_device(), stream, present_of, memory, tuple(into), aligned_places, recorded)


def _are_separate(scratch: Sequence[Tensor], present: Sequence[Tensor]) -> bool:
    """Returns whether each scratch tensor is contiguous and has memory of its own, as it has in a replay."""
    if not all(x.is_contiguous() for x in scratch):
        return False
    filled = [x for x in scratch if x.nbytes]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in filled)
    others = {x.untyped_storage().data_ptr() for x in present}
    overlap = any(end > start for (_, end), (start, _) in itertools.pairwise(spans))
    return not overlap and others.isdisjoint(x.untyped_storage().data_ptr() for x in filled)


class _Arguments(NamedTuple):
    """The arguments of a launch, in the order of the kernel's parameters: tensors, floats, and all others.

    Attributes:
        tensors: tensors, descriptors of tensors, and None.
        floats: the floats of the call.
        fixed: integers, and constants of the compiler.
    """

    tensors: list[Any]
    floats: list[float]
    fixed: list[Any]


def _arguments(launch: Launch) -> _Arguments:
    """Returns the arguments of a launch, divided by how a replay treats them."""
    values = list(launch.arguments.values())
    tensors = list(itertools.takewhile(lambda x: x is None or _is_tensor(x), values))
    floats = list(itertools.takewhile(lambda x: isinstance(x, float), values[len(tensors) :]))
    return _Arguments(tensors, floats, values[len(tensors) + len(floats) :])


def check_floats(launches: Sequence[Launch], floats: tuple[float, ...]) -> None:
    """Raises an error unless each launch takes as many floats as the call has, or none."""
    for launch in launches:
        taken = _arguments(launch).floats
        if taken and len(taken) != len(floats):
            raise ValueError(f"{launch.kernel.fn.__name__} takes the floats {taken}; the call passes {floats}")


def _aligned(launch: Launch, arguments: _Arguments) -> list[Tensor]:
    """Returns the tensors of a launch whose addresses its compiled kernel takes for multiples of `ALIGNMENT`."""
    taken = zip(arguments.tensors, launch.kernel.params, strict=False)  # tensors are the first arguments
    return [getattr(x, "base", x) for x, p in taken if x is not None and not p.do_not_specialize_on_alignment]


def _is_tensor(x: Any) -> bool:
    """Returns whether x is a tensor or a descriptor of one."""
    return isinstance(x, Tensor) or hasattr(x, "base")


def _is_fixed(x: Any) -> bool:
    """Returns whether an argument is the same for all calls of one signature."""
    return not isinstance(x, float) and not _is_tensor(x)


_WHOLE = "_part_of"


def part(x: Tensor, start: int, end: int) -> Tensor:
    """Returns rows `start` to `end` of x for launches that are recorded.

    The result holds a reference to x: a replay computes its address from the address of x.
    """
    rows = x[start:end]
    setattr(rows, _WHOLE, x)
    return rows


def _whole_of(x: Any) -> Any:
    """Returns the tensor that x is a `part` of, or x itself if it is not a part."""
    return getattr(x, _WHOLE, x)


def _recorded(launch: Launch, arguments: _Arguments, places: dict[int, int]) -> _RecordedLaunch:
    """Returns the recorded launch; `places` maps the id of a tensor to its place in the call."""
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


TRITON_3_6, TRITON_3_7, TRITON_3_8 = _KNOWN = ("3.6", "3.7", "3.8")
"""The versions of Triton whose launchers are known: `_after_the_stream` holds the arguments of their C functions."""


@functools.cache
def _launcher() -> str:
    """Returns the major and minor version of Triton."""
    return ".".join(triton.__version__.split(".")[:2])


def _after_the_stream(run: Any, kernel: Any) -> tuple[Any, ...]:
    """Returns the arguments of the C function between the stream and the kernel's arguments.

    `CudaLauncher.__call__` passes the same, except that scratch memory, metadata of the launch and hooks are None here.
    Hooks would take a third of the time even if none is set.
    """
    begin = (kernel.function, run.launch_cooperative_grid, run.launch_pdl)
    if _launcher() == TRITON_3_6:
        return (*begin, None, None, kernel.packed_metadata, None, None, None)
    return (*begin, kernel.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)


def _behind_encoding(launch: Any) -> Any:
    """Returns the C function that a launcher's `launch` calls after it has encoded descriptors as tensor maps.

    In the known versions of Triton, `launch` is a closure over it, made by
    `triton.backends.nvidia.driver.wrap_handle_tensordesc`.
    """
    return launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents


def replay(call: RecordedCall, tensors: Sequence[Tensor | None], floats: tuple[float, ...]) -> bool:
    """Makes recorded launches on other tensors, which have the recorded layouts, and are None at the same places.

    Returns:
        Whether the launches were made. Nothing is launched if an address is not aligned, if `call.device` is not the
        current device, or if a profiler has set hooks.
    """
    if call.device != current_device() or _profiled():
        return False
    addresses = [*map(Tensor.data_ptr, call.present(tensors))]
    if call.scratch is None:
        addresses.append(0)
    else:
        size, device = call.scratch
        memory = torch.UntypedStorage(size, device=device)  # a tensor takes longer to make
        addresses.append(memory.data_ptr())
    prepared_for = (call, floats, *addresses)
    prepared = _prepared.get(prepared_for)
    if prepared is None:  # the addresses of a cached entry were checked when it was made
        if math.gcd(ALIGNMENT, *(addresses[i] for i in call.aligned)) != ALIGNMENT:
            return False
        prepared = call.prepared(addresses, floats)
        _put(_prepared, prepared_for, prepared, _MOST_PREPARED)
    prepared.start(call.stream(call.device))
    return True


def why_not_replayed() -> str | None:
    """Returns the reason why launches are not replayed and Triton's slower launcher makes them; None if replayed."""
    if interpreted():
        return "kernels are interpreted (TRITON_INTERPRET=1)"
    if torch.version.hip is not None:
        return "launches are replayed on NVIDIA GPUs alone"
    if _profiled():
        return "a profiler listens to Triton's launches"
    if not _launchers_are_known():
        return f"Triton {triton.__version__} launches kernels in another way than {_KNOWN[0]} to {_KNOWN[-1]}"
    return None


def _profiled() -> bool:
    """Returns whether a profiler has set hooks for launches, which only Triton's own launcher calls."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


@functools.cache
def _launchers_are_known() -> bool:
    """Returns whether this Triton has a known version and encodes tensor maps in the known way."""
    if _launcher() not in _KNOWN:
        return False
    from triton.backends.nvidia import driver as nvidia

    def launch() -> None: ...

    try:
        known = _behind_encoding(nvidia.wrap_handle_tensordesc(launch, {0: "tensordesc<fp16[1,1]>"}, None)) is launch
    except (AttributeError, IndexError, TypeError, ValueError):
        return False
    return known and hasattr(nvidia, "make_tensordesc_arg")
