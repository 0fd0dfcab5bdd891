"""Has flash-linear-attention's models compute gated linear attention here: one line before or after they are made.

Its functions are replaced where they are defined, so that modules that are imported later find the replacements, and by
name in every module that has imported them already. What is not computed here is left to the originals.

Where all of them are replaced at once, its GLA layer hands over key/value heads once, and no longer once for each query
head: the `repeat` that it calls is replaced in the layer's module. States in its caches keep all heads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

from torch import Tensor

from gla_core.compat.fla import on_cpu, ops
from gla_core.dispatch.errors import nearest

FUNCTIONS: Mapping[str, Callable] = {
    "chunk_gla": ops.chunk_gla,
    # Its layers keep states [N, H, V, K] between calls, and do not say so to this one, which fails in 0.6.0.
    "fused_chunk_gla": functools.partial(ops.chunk_gla, state_v_first=True),
    "fused_recurrent_gla": ops.fused_recurrent_gla,
}
TABLES = ("ACT2FN",)
"""Names of dictionaries that hold functions."""
_HOME, _LAYER = "fla.ops.gla", "fla.layers.gla"


def accelerate(*functions: str, cpu: bool = False) -> Acceleration:
    """Replace functions of `fla.ops.gla` wherever flash-linear-attention calls them, now and in what it imports later.

    Args:
        functions: names among `FUNCTIONS`; all by default. What is replaced already stays so.
        cpu: replace as well what its GLA and HGRN2 models have in Triton alone, for tensors on a CPU, by PyTorch; see
            on_cpu.py.

    Returns:
        What was replaced where, to print, and to undo: as a context manager it is undone at the end.

    Raises:
        ImportError: flash-linear-attention is not installed. ValueError: a name that is not among `FUNCTIONS`.

    Example:
        >>> print(accelerate())
        >>> with accelerate("chunk_gla"):
        ...     model(tokens)
    """
    for name in functions:
        if name not in FUNCTIONS:
            raise ValueError(f"unknown function {name!r}{nearest(name, FUNCTIONS)} (there are {', '.join(FUNCTIONS)})")
    wanted: list[tuple[str, str, Callable, Callable[[dict[str, Any]], bool]]] = [
        (_HOME, name, _for_query_heads(FUNCTIONS[name]), _is_computed_here) for name in functions or FUNCTIONS
    ]
    for home, members in on_cpu.REPLACED.items() if cpu else ():
        wanted += [(home, name, function, _is_on_cpu) for name, function in members.items()]
    made = {}
    for home, name, function, serves in wanted:
        original = getattr(importlib.import_module(home), name)
        if not isinstance(original, _Replacement):
            made[name] = _Replacement(function, original, serves)
    if made.keys() >= FUNCTIONS.keys():
        original = importlib.import_module(_LAYER).repeat
        made["repeat"] = _Replacement(_heads, original, _repeats_heads, within=_LAYER)
    return Acceleration(made)


class Acceleration:
    """Functions of flash-linear-attention that have been replaced.

    Attributes:
        replaced: by name, the modules in which it was found; after `undo` empty.
    """

    def __init__(self, made: dict[str, _Replacement]) -> None:
        self._made = made
        self.replaced = {name: _exchange(name, new.original, new, new.within) for name, new in made.items()}

    def undo(self) -> None:
        """Put the originals back, in modules too that were imported since."""
        for name, new in self._made.items():
            _exchange(name, new, new.original, new.within)
        self._made, self.replaced = {}, {}

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        if not self.replaced:
            return "nothing of flash-linear-attention is replaced by this"
        how = {"repeat": "left out for key/value heads"}
        lines = [
            f"{name}: {how.get(name, 'computed by gla_core')} in {', '.join(places)}"
            for name, places in self.replaced.items()
        ]
        return "\n".join([*lines, "gates of values (gv) and reverse are left to flash-linear-attention"])


class _Replacement:
    """A function, or the original for calls that it does not serve; within a module, or a package with all in it."""

    def __init__(
        self, function: Callable, original: Callable, serves: Callable[[dict[str, Any]], bool], within: str = "fla"
    ) -> None:
        self.function, self.original, self.serves, self.within = function, original, serves, within
        self._names = _parameters(function)
        self.__name__, self.__doc__ = getattr(original, "__name__", function.__class__.__name__), original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        return (self.function if self.serves(given) else self.original)(*args, **kwargs)


def _parameters(function: Callable) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # an activation of PyTorch's in C
        return ["x"]


def _for_query_heads(function: Callable) -> Callable:
    """The function with states of query heads, also where k and v have fewer heads than q."""

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
    """Heads [..., h, d] of a tensor [..., h * d], once each."""
    return tensor.unflatten(-1, (-1, sizes["d"]))


def _repeats_heads(given: dict[str, Any]) -> bool:
    return given.get("pattern") == "... (h d) -> ... (h g) d"


def _is_computed_here(given: dict[str, Any]) -> bool:
    return given.get("gv") is None and not given.get("reverse")


def _is_on_cpu(given: dict[str, Any]) -> bool:
    return all(x.device.type == "cpu" for x in given.values() if isinstance(x, Tensor))


def _exchange(name: str, old: Callable, new: Callable, within: str) -> tuple[str, ...]:
    """Put `new` where a module of this package has `old`, by name or in a table, and name the modules."""
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
