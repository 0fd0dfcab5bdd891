"""Makes flash-linear-attention's models compute gated linear attention here, with one line before or after they are
created.

Besides those of `fla.ops.gla` these are the functions with one gate for each head or none. Functions that are composed
of several calls are computed here on a CPU. On a GPU they are left to flash-linear-attention, whose kernels take less
work; among these, LightNet and normalized linear attention call functions that are replaced.

The functions are replaced in the modules that define them, so modules that are imported later find the replacements.
They are also replaced in every module that has imported them already. A call that this package does not compute goes to
the original function. Replacements hold for all threads, until the last `Acceleration` that asked for them is undone.

If all functions are replaced at once, flash-linear-attention's GLA layer passes each key/value head once instead of
once per query head: the `repeat` that it calls is replaced in the layer's module. Cached states keep all query heads.

Its layers pass the offsets of packed sequences to every function except `fused_chunk_gla`; padded sequences are packed
too. Layers in mode "fused_chunk" therefore run in mode "chunk", which computes the same.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

from torch import Tensor

from gla_core.compat.fla import composed, heads, on_cpu, ops
from gla_core.dispatch.errors import nearest

HOMES: Mapping[str, Mapping[str, Callable]] = {
    "fla.ops.gla": {
        "chunk_gla": ops.chunk_gla,
        # Its layers keep states [N, H, V, K] but do not pass state_v_first here; the original always raises in 0.6.0.
        "fused_chunk_gla": functools.partial(ops.chunk_gla, state_v_first=True),
        "fused_recurrent_gla": ops.fused_recurrent_gla,
    },
    "fla.ops.simple_gla": {
        "chunk_simple_gla": heads.chunk_simple_gla,
        "fused_chunk_simple_gla": heads.fused_chunk_simple_gla,
        "fused_recurrent_simple_gla": heads.fused_recurrent_simple_gla,
        "parallel_simple_gla": heads.parallel_simple_gla,
    },
    "fla.ops.retention": {
        "chunk_retention": heads.chunk_retention,
        "fused_chunk_retention": heads.fused_chunk_retention,
        "fused_recurrent_retention": heads.fused_recurrent_retention,
        "parallel_retention": heads.parallel_retention,
    },
    "fla.ops.lightning_attn": {
        "chunk_lightning_attn": heads.chunk_lightning_attn,
        "fused_recurrent_lightning_attn": heads.fused_recurrent_lightning_attn,
    },
    "fla.ops.linear_attn": {
        "chunk_linear_attn": heads.chunk_linear_attn,
        "fused_chunk_linear_attn": heads.fused_chunk_linear_attn,
        "fused_recurrent_linear_attn": heads.fused_recurrent_linear_attn,
    },
    "fla.ops.lightnet": {
        "chunk_lightnet": composed.chunk_lightnet,
        "fused_recurrent_lightnet": composed.fused_recurrent_lightnet,
    },
    "fla.ops.gsa": {"chunk_gsa": composed.chunk_gsa, "fused_recurrent_gsa": composed.fused_recurrent_gsa},
    "fla.ops.rwkv6": {
        "chunk_rwkv6": composed.chunk_rwkv6,
        "fused_recurrent_rwkv6": composed.fused_recurrent_rwkv6,
    },
}
"""Functions that are computed here, by the module that has the original and then by name."""
FUNCTIONS: Mapping[str, Callable] = {name: function for home in HOMES.values() for name, function in home.items()}
TABLES = ("ACT2FN",)
"""Names of the dictionaries in which modules hold functions."""
_GLA, _LAYER = "fla.ops.gla", "fla.layers.gla"
_LAYERS_WITH_MODES = {_LAYER: "GatedLinearAttention", "fla.layers.hgrn2": "HGRN2Attention"}
_lock = threading.RLock()
"""The lock that is held while functions are exchanged and their holders are counted."""
_made: dict[tuple[str, Callable], _Replacement] = {}
"""The replacement of each original function."""


def accelerate(*functions: str, cpu: bool = False) -> Acceleration:
    """Replaces functions of `fla.ops` in all modules of flash-linear-attention, also in those imported later.

    Args:
        functions: names among `FUNCTIONS`; all by default. Functions that are replaced already stay replaced. With
            "fused_chunk_gla", flash-linear-attention's GLA and HGRN2 layers in mode "fused_chunk" run in mode "chunk".
        cpu: whether to compute in PyTorch, for tensors on a CPU, the other functions that flash-linear-attention's GLA
            and HGRN2 models have only in Triton; see on_cpu.py.

    Returns:
        The replacements that were made. Print it to see them, and call `undo` to remove them; as a context manager it
        removes them at its end.

    Raises:
        ImportError: flash-linear-attention is not installed.
        ValueError: a name is not among `FUNCTIONS`.

    Example:
        >>> print(accelerate())
        >>> with accelerate("chunk_gla"):
        ...     model(tokens)
    """
    for name in functions:
        if name not in FUNCTIONS:
            raise ValueError(f"unknown function {name!r}{nearest(name, FUNCTIONS)} (there are {', '.join(FUNCTIONS)})")
    names = set(functions) or FUNCTIONS.keys()
    with _lock:
        wanted: list[_Replacement | _ModeOfLayers] = [
            _replacement(home, name, function, _SERVES.get(home, _is_computed_here))
            for home, members in HOMES.items()
            for name, function in members.items()
            if name in names
        ]
        for home, members in on_cpu.REPLACED.items() if cpu else ():
            wanted += [_replacement(home, name, function, _is_on_cpu) for name, function in members.items()]
        if HOMES[_GLA].keys() <= names:
            wanted.append(_replacement(_LAYER, "repeat", _heads, _repeats_heads, within=_LAYER))
        if "fused_chunk_gla" in names:
            wanted += [_mode_of_layers(home, layer) for home, layer in _LAYERS_WITH_MODES.items()]
        return Acceleration(wanted)


class Acceleration:
    """A set of replaced functions of flash-linear-attention.

    Attributes:
        replaced: for each name, the modules in which this call found and replaced it. Replacements that an earlier
            `Acceleration` made are left out. Empty after `undo`.
    """

    def __init__(self, wanted: list[_Replacement | _ModeOfLayers]) -> None:
        self.replaced: dict[str, tuple[str, ...]] = {}
        self._held = wanted
        for new in wanted:
            if new.holders == 0:
                self.replaced[new.name] = self.replaced.get(new.name, ()) + new.put()
            new.holders += 1

    def undo(self) -> None:
        """Puts the originals back, also in modules imported since, unless another `Acceleration` is in force.

        Accelerations can be undone in any order, from any thread, and more than once.
        """
        with _lock:
            for new in self._held:
                new.holders -= 1
                if new.holders == 0:
                    new.remove()
            self._held, self.replaced = [], {}

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        if not self.replaced:
            return "nothing of flash-linear-attention is replaced by this"
        how = {"repeat": "left out for key/value heads", "mode": "'fused_chunk' runs as 'chunk'"}
        lines = [
            f"{name}: {how.get(name, 'computed by gla_core')} in {', '.join(places)}"
            for name, places in self.replaced.items()
        ]
        return "\n".join([*lines, "gates of values (gv) and output_attentions are left to flash-linear-attention"])


class _Replacement:
    """A replacement for a function; it calls the original for calls that it does not serve.

    It applies within one module, or within a package and all its modules. References to it that remain after it is
    removed call the original.
    """

    def __init__(
        self, name: str, function: Callable, original: Callable, serves: Callable[[dict[str, Any]], bool], within: str
    ) -> None:
        self.name, self.function, self.original, self.serves, self.within = name, function, original, serves, within
        self.holders, self.in_force = 0, False
        self._names = _parameters(function)
        # Do not copy __dict__: the original's may forbid torch.compile to trace into the function.
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        return (self.function if self.in_force and self.serves(given) else self.original)(*args, **kwargs)

    def put(self) -> tuple[str, ...]:
        """Replaces the original; returns the names of the modules in which it was found."""
        self.in_force = True
        return _exchange(self.name, self.original, self, self.within)

    def remove(self) -> None:
        """Puts the original back."""
        self.in_force = False
        _exchange(self.name, self, self.original, self.within)


class _ModeOfLayers(property):
    """The attribute `mode` of a class of layers: "chunk" if the layer's mode is "fused_chunk", otherwise its mode."""

    name = "mode"

    def __init__(self, layer: type) -> None:
        super().__init__(_mode, _set_mode)
        self.layer, self.holders = layer, 0

    def put(self) -> tuple[str, ...]:
        """Sets the attribute on the class; returns the name of the class's module."""
        setattr(self.layer, self.name, self)
        return (self.layer.__module__,)

    def remove(self) -> None:
        """Deletes the attribute from the class, so that each layer's own `mode` is visible again."""
        delattr(self.layer, self.name)


def _mode(layer: Any) -> str:
    mode = vars(layer)["mode"]
    return "chunk" if mode == "fused_chunk" else mode


def _set_mode(layer: Any, mode: str) -> None:
    vars(layer)["mode"] = mode


def _replacement(
    home: str, name: str, function: Callable, serves: Callable[[dict[str, Any]], bool], within: str = "fla"
) -> _Replacement:
    """Returns the replacement of a function: the current one, an earlier one that layers may hold, or a new one."""
    found = getattr(importlib.import_module(home), name)
    if isinstance(found, _Replacement):
        return found
    if (name, found) not in _made:
        call = _for_query_heads(function) if home == _GLA else function
        _made[name, found] = _Replacement(name, call, found, serves, within)
    return _made[name, found]


def _mode_of_layers(home: str, name: str) -> _ModeOfLayers:
    layer = getattr(importlib.import_module(home), name)
    found = vars(layer).get("mode")
    return found if isinstance(found, _ModeOfLayers) else _ModeOfLayers(layer)


def _parameters(function: Callable) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # PyTorch's activations written in C have no signature
        return ["x"]


def _for_query_heads(function: Callable) -> Callable:
    """Wraps a function so that its states have one head per query head, even if k and v have fewer heads than q."""

    @functools.wraps(function, updated=())
    def call(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if q.shape[2] == k.shape[2]:
            return function(q, k, *args, **kwargs)
        given, groups = {**dict(zip(names, (q, k, *args), strict=False)), **kwargs}, q.shape[2] // k.shape[2]
        state = given.pop("initial_state", None)
        o, state = function(**given, initial_state=None if state is None else state[:, ::groups])
        return o, None if state is None else state.repeat_interleave(groups, 1)

    names = _parameters(function)
    return call


def _heads(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Splits a tensor [..., h * d] into heads [..., h, d], without repeating them."""
    return tensor.unflatten(-1, (-1, sizes["d"]))


def _repeats_heads(given: dict[str, Any]) -> bool:
    return given.get("pattern") == "... (h d) -> ... (h g) d"


def _is_computed_here(given: dict[str, Any]) -> bool:
    return given.get("gv") is None and not given.get("output_attentions")


def _is_on_cpu(given: dict[str, Any]) -> bool:
    return all(x.device.type == "cpu" for x in given.values() if isinstance(x, Tensor))


def _is_one_call(given: dict[str, Any]) -> bool:
    return given.get("normalize") is False or _is_on_cpu(given)


_SERVES = {
    "fla.ops.linear_attn": _is_one_call,
    "fla.ops.lightnet": _is_on_cpu,
    "fla.ops.gsa": _is_on_cpu,
    "fla.ops.rwkv6": _is_on_cpu,
}
"""The calls that are computed here, for modules of which not all are."""


def _exchange(name: str, old: Callable, new: Callable, within: str) -> tuple[str, ...]:
    """Replaces `old` by `new` in the modules of a package, by name or in a table; returns the names of the modules."""
    places = []
    for path, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not f"{path}.".startswith(f"{within}."):
            continue
        if vars(module).get(name) is old:
            setattr(module, name, new)
            places.append(module.__name__)
        for table in TABLES:
            for key, value in vars(module).get(table, {}).items():
                if value is old:
                    vars(module)[table][key] = new
    return tuple(sorted(places))
