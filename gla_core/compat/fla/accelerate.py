"""Has flash-linear-attention's models compute gated linear attention here: one line before or after they are made.

Its functions are replaced where they are defined, so that modules that are imported later find the replacements, and by
name in every module that has imported them already. What is not computed here is left to the originals.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

from gla_core.compat.fla import ops
from gla_core.dispatch.errors import nearest

FUNCTIONS: Mapping[str, Callable] = {
    "chunk_gla": ops.chunk_gla,
    # Its layers keep states [N, H, V, K] between calls, and do not say so to this one, which fails in 0.6.0.
    "fused_chunk_gla": functools.partial(ops.chunk_gla, state_v_first=True),
    "fused_recurrent_gla": ops.fused_recurrent_gla,
}
NOT_HERE = ("gv", "reverse")
_HOME = "fla.ops.gla"


def accelerate(*functions: str) -> Acceleration:
    """Replace functions of `fla.ops.gla` wherever flash-linear-attention calls them, now and in what it imports later.

    Args:
        functions: names among `FUNCTIONS`; all by default. What is replaced already stays so.

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
    home = importlib.import_module(_HOME)
    made = {}
    for name in functions or FUNCTIONS:
        original = getattr(home, name)
        if not isinstance(original, _Replacement):
            made[name] = _Replacement(FUNCTIONS[name], original)
    return Acceleration(made)


class Acceleration:
    """Functions of flash-linear-attention that have been replaced.

    Attributes:
        replaced: by name, the modules in which it was found; after `undo` empty.
    """

    def __init__(self, made: dict[str, _Replacement]) -> None:
        self._made = made
        self.replaced = {name: _exchange(name, new.original, new) for name, new in made.items()}

    def undo(self) -> None:
        """Put the originals back, in modules too that were imported since."""
        for name, new in self._made.items():
            _exchange(name, new, new.original)
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
        lines = [f"{name}: computed by gla_core in {', '.join(places)}" for name, places in self.replaced.items()]
        return "\n".join([*lines, "gates of values (gv) and reverse are left to flash-linear-attention"])


class _Replacement:
    """The function, or the original for what it does not compute."""

    def __init__(self, function: Callable, original: Callable) -> None:
        self.function, self.original = function, original
        names = list(inspect.signature(function).parameters)
        self._beyond = [names.index(name) for name in NOT_HERE if name in names]
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = [*(kwargs.get(name) for name in NOT_HERE), *(args[i] for i in self._beyond if i < len(args))]
        if any(x is not None and x is not False for x in asked):
            return self.original(*args, **kwargs)
        return self.function(*args, **kwargs)


def _exchange(name: str, old: Callable, new: Callable) -> tuple[str, ...]:
    """Put `new` where a module of flash-linear-attention has `old` under this name, and return the modules' names."""
    places = [
        module
        for path, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and path.partition(".")[0] == "fla" and vars(module).get(name) is old
    ]
    for module in places:
        setattr(module, name, new)
    return tuple(sorted(module.__name__ for module in places))
