"""Replaces functions in the modules of another library, and puts the originals back.

A function is replaced by name in every module of the library that has it. A call that this package does not compute
goes to the original. Replacements hold for all threads, until the last `Acceleration` that asked for them is undone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, Protocol

TABLES = ("ACT2FN",)
"""Names of the dictionaries in which modules hold functions."""
COMPUTED = "computed by gla_core"
"""The words for a function that this package computes."""
LOCK = threading.RLock()
"""The lock that is held while functions are exchanged and their holders are counted."""
_logger = logging.getLogger("gla_core")
_made: dict[tuple[str, Callable], Replacement] = {}
"""The replacement of each original function."""
_methods: dict[tuple[type, str], MethodReplacement] = {}
"""The replacement of each method of a class."""


class Exchange(Protocol):
    """A change that can be made and taken back.

    Attributes:
        name: the name of the function or attribute that it changes.
        how: a few words for the user: what takes the place of the original.
        holders: the number of accelerations that hold it.
    """

    name: str
    how: str
    holders: int

    def put(self) -> tuple[str, ...]:
        """Makes the change; returns the names of the changed modules."""
        ...

    def remove(self) -> None:
        """Takes the change back."""
        ...


class Acceleration:
    """A set of replaced functions of another library.

    Attributes:
        replaced: for each name, the modules in which this call found and replaced it. Replacements that an earlier
            `Acceleration` made are left out. Empty after `undo`.
    """

    def __init__(self, library: str, wanted: Sequence[Exchange], note: str) -> None:
        self.replaced: dict[str, tuple[str, ...]] = {}
        self._library, self._held, self._note = library, wanted, note
        self._how = {new.name: new.how for new in wanted}
        for new in wanted:
            if new.holders == 0:
                self.replaced[new.name] = self.replaced.get(new.name, ()) + new.put()
            new.holders += 1
        _logger.info("%s", self)

    def undo(self) -> None:
        """Puts the originals back, also in modules imported since, unless another `Acceleration` is in force.

        Accelerations can be undone in any order, from any thread, and more than once.
        """
        with LOCK:
            for new in self._held:
                new.holders -= 1
                if new.holders == 0:
                    new.remove()
            self._held, self.replaced = (), {}

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        if not self.replaced:
            return f"nothing of {self._library} is replaced by this"
        modules = {module for places in self.replaced.values() for module in places}
        names: dict[str, list[str]] = {}
        for name in self.replaced:
            names.setdefault(self._how[name], []).append(name)
        lines = [f"{len(modules)} modules of {self._library} now call gla_core; see `replaced`:"]
        lines += [f"- {how}: {', '.join(several)}" for how, several in names.items()]
        return "\n".join(textwrap.fill(line, 79, subsequent_indent="  ") for line in [*lines, f"- {self._note}"])


class Replacement:
    """A replacement for a function; it calls the original for calls that it does not serve.

    It applies within one module, or within a package and all its modules. References to it that remain after it is
    removed call the original. So does a call for which the function returns NotImplemented. It is copied and pickled as
    functions are, by its name: where it is not in force, the name stands for the original.
    """

    def __init__(
        self,
        home: str,
        name: str,
        function: Callable,
        original: Callable,
        serves: Callable[[dict[str, Any]], bool],
        within: str,
        how: str,
    ) -> None:
        self.name, self.function, self.original, self.serves, self.within = name, function, original, serves, within
        self.home, self.how, self.holders, self.in_force = home, how, 0, False
        self._names = parameters(function)
        # Do not copy __dict__: the original's may forbid torch.compile to trace into the function.
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs) if self.in_force and self.accepts(*args, **kwargs) else NotImplemented
        return self.original(*args, **kwargs) if result is NotImplemented else result

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return pkgutil.resolve_name, (f"{self.home}:{self.name}",)

    def accepts(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether the replacement serves a call with these arguments, while it is in force."""
        return self.serves({**dict(zip(self._names, args, strict=False)), **kwargs})

    def put(self) -> tuple[str, ...]:
        """Replaces the original; returns the names of the modules in which it was found."""
        self.in_force = True
        return _exchange(self.name, self.original, self, self.within)

    def remove(self) -> None:
        """Puts the original back."""
        self.in_force = False
        _exchange(self.name, self, self.original, self.within)


class MethodReplacement:
    """A replacement for a method of a class, which may have inherited it; see `Replacement`."""

    def __init__(self, owner: type, function: Callable, how: str, method: str) -> None:
        self.name, self.how, self.holders, self.in_force = f"{owner.__name__}.{method}", how, 0, False
        self.owner, self.method, self.original = owner, method, vars(owner).get(method)

        @functools.wraps(getattr(owner, method))
        def replaced(layer: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(layer, *args, **kwargs) if self.in_force else NotImplemented
            if result is not NotImplemented:
                return result
            original = self.original or getattr(super(owner, owner), method)
            return original(layer, *args, **kwargs)

        self.replaced = replaced

    def put(self) -> tuple[str, ...]:
        """Replaces the method; returns the name of the class's module."""
        self.in_force = True
        setattr(self.owner, self.method, self.replaced)
        if self.method == "forward":  # transformers wraps the `forward` of a block here, for checkpoints in training
            super(self.owner, self.owner).__init_subclass__()
        return (self.owner.__module__,)

    def remove(self) -> None:
        """Puts the original back."""
        self.in_force = False
        if self.original is None:
            delattr(self.owner, self.method)
        else:
            setattr(self.owner, self.method, self.original)


def classes_of(module: ModuleType) -> list[type]:
    """Returns the classes that a module defines."""
    return [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]


def method_replacement(owner: type, function: Callable, how: str, method: str = "forward") -> MethodReplacement:
    """Returns the replacement of a method of a class: the current one, or a new one."""
    if (owner, method) not in _methods:
        _methods[owner, method] = MethodReplacement(owner, function, how, method)
    return _methods[owner, method]


def is_replaced(owner: type) -> bool:
    """Returns whether the `forward` of a class is replaced now."""
    method = _methods.get((owner, "forward"))
    return method is not None and method.in_force


def replacement(
    module: ModuleType, name: str, function: Callable, serves: Callable[[dict[str, Any]], bool], within: str, how: str
) -> Replacement:
    """Returns the replacement of a module's function: the current one, an earlier one that layers hold, or a new one.

    Args:
        module: the module that defines the function.
        name: the name of the function in the module.
        function: the function that takes its place.
        serves: returns whether a call is for `function`, given the arguments by name. Other calls go to the original.
        within: the module, or the package with all its modules, in which it is replaced.
        how: a few words for the user: what takes the place of the original.
    """
    current = getattr(module, name)
    if isinstance(current, Replacement):
        return current
    if (name, current) not in _made:
        _made[name, current] = Replacement(module.__name__, name, function, current, serves, within, how)
    return _made[name, current]


def parameters(function: Callable) -> list[str]:
    """Returns the names of a function's parameters."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # PyTorch's activations written in C have no signature
        return ["x"]


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
