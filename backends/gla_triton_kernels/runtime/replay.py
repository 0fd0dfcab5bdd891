"""Calls that are quick when repeated: the launches of a call are recorded, and replayed on other tensors.

Of a small call most time passes on the host: deciding, specialising arguments, looking up what has been compiled,
encoding tensor maps. All of that is the same for every call of the same layouts. So a call is described once, as a
list of `Launch`, and made again by a key.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from gla_triton_kernels.runtime.launch import Launch


class _Map:
    """A parameter of a kept kernel that is a tensor map: all of it but the address."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.described = {name: value for name, value in vars(descriptor).items() if name != "base"}

    def encode(self, x: Tensor) -> list[Any]:
        """What the kernel takes for a map of x: it encoded, its shape and its strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return make_tensordesc_arg(SimpleNamespace(base=x, **self.described), self.metadata)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kept launch. Triton's launcher hands on what it is given to a function in C; this one calls that function."""

    function: Any
    before: tuple[Any, ...]  # what it takes before the stream
    after: tuple[Any, ...]  # and after it; at last come the kernel's arguments
    spread: bool  # whether it takes those one by one, not as a tuple
    places: tuple[int, ...]  # of the kernel's tensors among those of the call
    maps: tuple[_Map | None, ...] | None  # how each is mapped; None where none is
    floats: bool  # whether the kernel takes those of the call
    integers: tuple[Any, ...]

    def again(self, stream: int, tensors: Sequence[Any], addresses: list[int], floats: tuple[float, ...]) -> None:
        """Launch on the tensors of a call, which are at these addresses."""
        arguments: list[Any] = self._mapped(tensors, addresses) if self.maps else [addresses[i] for i in self.places]
        if self.floats:
            arguments += floats
        arguments += self.integers
        if self.spread:
            self.function(*self.before, stream, *self.after, *arguments)
        else:
            self.function(*self.before, stream, *self.after, tuple(arguments))

    def _mapped(self, tensors: Sequence[Any], addresses: list[int]) -> list[Any]:
        arguments = []
        for i, form in zip(self.places, self.maps or (), strict=True):
            if form is None:
                arguments.append(addresses[i])
                continue
            encoded = _encoded.get((form, addresses[i]))
            if encoded is None:
                encoded = form.encode(tensors[i])
                _put(_encoded, (form, addresses[i]), encoded)
            arguments += encoded
        return arguments


@dataclass(frozen=True, slots=True)
class _Call:
    device: int
    scratch: tuple[tuple[torch.Size, torch.dtype], ...]
    launches: tuple[_Launch, ...]


_current_device = torch.accelerator.current_device_index  # a third of the time of torch.cuda.current_device

_NONE = -1
"""The place of a None among a call's tensors: behind them."""
_MOST = 4096
_calls: dict[Hashable, _Call] = {}
_encoded: dict[tuple[_Map, int], list[Any]] = {}


def _put(cache: dict[Any, Any], key: Hashable, value: object) -> None:
    if len(cache) >= _MOST:
        cache.clear()
    cache[key] = value


def record(key: Hashable, tensors: Sequence[Tensor | None], launches: Sequence[Launch]) -> None:
    """Keep the launches of a call for `replay`, which spares the host most of the time of a small one.

    Tensor maps are kept as well, each under its address and what `key` says of the tensor: allocators hand out the same
    addresses over and over, and another tensor of that shape and those strides has the same map.

    Args:
        key: holds the op and all that decides which launches are made and all that Triton compiles for, but for the
            alignment of addresses: only calls with multiples of 16 are kept, and looked up.
        tensors: what the call has been given, and returns. Other tensors of the launches are scratch: contiguous,
            allocated anew for each call, on whose contents before it nothing depends.
        launches: in order. Each takes all the call's floats, or none.
    """
    given = [x for x in tensors if x is not None]
    taken = [getattr(x, "base", x) for launch in launches for x in launch.tensors if x is not None]
    places = {id(x): i for i, x in enumerate(tensors) if x is not None}
    scratch = list({id(x): x for x in taken if id(x) not in places}.values())
    ambiguous = len({id(x) for x in given}) < len(given)  # one tensor in two places
    aligned = _aligned([x.data_ptr() for x in given + taken]) and all(x.is_contiguous() for x in scratch)
    if ambiguous or not aligned or any(launch.kernel is None for launch in launches):
        return
    places.update({id(x): len(tensors) + i for i, x in enumerate(scratch)})
    kept = [_keep(launch, places) for launch in launches]
    if None not in kept:
        shapes = tuple((x.shape, x.dtype) for x in scratch)
        _put(_calls, key, _Call(_current_device(), shapes, tuple(kept)))  # pyright: ignore[reportArgumentType]


def _keep(launch: Launch, places: dict[int, int]) -> _Launch | None:
    """None where this Triton launches kernels in a way that is not known here."""
    function, descriptors = launch.kernel.run.launch, [x for x in launch.tensors if hasattr(x, "base")]
    maps = None
    if descriptors:
        metadata = getattr(launch.kernel.metadata, "tensordesc_meta", None) or ()
        function = _behind_encoding(function)
        if len(metadata) != len(descriptors) or function is None:
            return None
        of = {id(x): _Map(x, of_x) for x, of_x in zip(descriptors, metadata, strict=True)}
        maps = tuple(of.get(id(x)) for x in launch.tensors)
    told = _handed_on(launch)
    if told is None:
        return None
    before, after, spread = told
    at = tuple(places.get(id(getattr(x, "base", x)), _NONE) for x in launch.tensors)
    return _Launch(function, before, after, spread, at, maps, bool(launch.floats), launch.integers)


def _behind_encoding(launch: Any) -> Any:
    """What Triton's `launch` hands encoded tensor maps on to; None where it is not known how it does."""
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    return launch.__closure__[names.index("launcher")].cell_contents if "launcher" in names else None


def _handed_on(launch: Launch) -> tuple[tuple, tuple, bool] | None:
    """`before`, `after` and `spread` of `_Launch`: found by asking Triton's launcher with marks in their places."""
    stream, argument = object(), object()
    told: list[Any] = []
    kernel, run = launch.kernel, copy.copy(launch.kernel.run)
    if any(getattr(run, f"{what}_scratch_size", 1) for what in ("global", "profile")):  # allocated for each launch
        return None
    run.launch = lambda *args: told.extend(args)
    # No hooks: these take a third of the time even where there are none.
    run(*launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, argument)
    *told, last = told
    if stream not in told or last not in (argument, (argument,)):
        return None
    at = told.index(stream)
    return tuple(told[:at]), tuple(told[at + 1 :]), last is argument


def replay(key: Hashable, tensors: Sequence[Tensor | None], *floats: float) -> bool:
    """Launch what was remembered under `key` on these tensors.

    Returns:
        False, and nothing is launched, if nothing was remembered, an address is not aligned, another device is the
        current one, or a profiler listens: only Triton's own way tells it of launches.
    """
    call = _calls.get(key)
    if call is None or call.device != _current_device() or _watched():
        return False
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    if not _aligned(addresses):
        return False
    if call.scratch:
        device = next(x for x in tensors if x is not None).device
        scratch = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in call.scratch]
        tensors = [*tensors, *scratch]
        addresses += [x.data_ptr() for x in scratch]
    addresses.append(0)  # at _NONE
    active: Any = driver.active
    stream = active.get_current_stream(call.device)
    for launch in call.launches:
        launch.again(stream, tensors, addresses, floats)
    return True


def layouts(*tensors: Tensor | None) -> Hashable:
    """All of these tensors that a launch depends on but their addresses: a part of keys."""
    return tuple([None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors])


def _aligned(addresses: list[int]) -> bool:
    return math.gcd(16, *addresses) == 16


def _watched() -> bool:
    """Whether a profiler wants to hear of launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
