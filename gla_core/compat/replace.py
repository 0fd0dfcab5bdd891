"""Replaces functions in the modules of another library, and puts the originals back.

A function is replaced by name in every module of the library that has it. A call that this package does not compute
goes to the original. Replacements hold for all threads, until the last `Acceleration` that asked for them is undone.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Protocol

import torch

from gla_core.dispatch.logger import logger

TABLES = ("ACT2FN",)
"""Names of the dictionaries in which modules hold functions."""
COMPUTED = "computed by gla_core"
"""The words for a function that this package computes."""
LOCK = threading.RLock()
"""The lock that is held while functions are exchanged and their holders are counted."""
OTHER_CALLS = "not one of the calls that are computed here"
"""The reason of a call for which a function returned NotImplemented."""
LeftOut = Callable[[Mapping[str, Any]], str | None]
"""A function of the arguments of a call by name: why it is left to the original; None if it is computed here."""
_made: dict[tuple[str, Callable], Replacement] = {}
"""The replacement of each original function."""
_methods: dict[tuple[type, str], MethodReplacement] = {}
"""The replacement of each method of a class."""


class Exchange(Protocol):
    """A change that can be made and taken back.

    Attributes:
        name: the name of the function or attribute that it changes.
        how: a few words for the user: what takes the place of the original.
        holders: the accelerations that hold it.
    """

    name: str
    how: str
    holders: list[Acceleration]

    def put(self) -> tuple[str, ...]:
        """Makes the change; returns the names of the changed modules."""
        ...

    def remove(self) -> None:
        """Takes the change back."""
        ...


class Acceleration:
    """A set of replaced functions of another library, and the numbers of their calls until it is undone.

    A call in a function that torch.compile compiles counts when it is traced, and not when it runs. A call that is
    captured into a CUDA graph counts once.

    Attributes:
        replaced: for each name, the modules in which this call found and replaced it. Replacements that an earlier
            `Acceleration` made are left out. Empty after `undo`.
        served: for each name, the number of calls that were computed here.
        left: for each name, the number of calls that were left to the original, by the reason.
    """

    def __init__(self, library: str, wanted: Sequence[Exchange], note: str) -> None:
        self.replaced: dict[str, tuple[str, ...]] = {}
        self.served: Counter[str] = Counter()
        self.left: dict[str, Counter[str]] = {}
        self._library, self._held, self._note = library, wanted, note
        self._how = {new.name: new.how for new in wanted}
        for new in wanted:
            if not new.holders:
                self.replaced[new.name] = self.replaced.get(new.name, ()) + new.put()
            new.holders.append(self)
        logger.info("%s", self)

    def count(self, name: str, reason: str | None) -> None:
        """Counts a call of a replaced function: left to the original for a reason, or served if the reason is None."""
        if reason is None:
            self.served[name] += 1
        else:
            self.left.setdefault(name, Counter())[reason] += 1

    def undo(self) -> None:
        """Puts the originals back, also in modules imported since, unless another `Acceleration` is in force.

        Accelerations can be undone in any order, from any thread, and more than once.
        """
        with LOCK:
            for new in self._held:
                new.holders.remove(self)
                if not new.holders:
                    new.remove()
            self._held, self.replaced = (), {}

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [*self._replacements(), *self._calls()]
        return "\n".join(textwrap.fill(line, 79, subsequent_indent="  ") for line in lines)

    def _replacements(self) -> list[str]:
        if not self.replaced:
            return [f"nothing of {self._library} is replaced by this"]
        modules = {module for places in self.replaced.values() for module in places}
        names: dict[str, list[str]] = {}
        for name in self.replaced:
            names.setdefault(self._how[name], []).append(name)
        first = f"{len(modules)} modules of {self._library} now call gla_core; see `replaced`:"
        return [first, *(f"- {how}: {', '.join(several)}" for how, several in names.items()), f"- {self._note}"]

    def _calls(self) -> list[str]:
        names = [name for name in self._how if name in self.served or name in self.left]
        if not names:
            return []
        return ["calls computed here, and left to the original:", *map(self._calls_of, names)]

    def _calls_of(self, name: str) -> str:
        left = self.left.get(name, {})
        reasons = "; ".join(f"{count}: {reason}" for reason, count in left.items())
        return f"- {name}: {self.served[name]} here" + (f", {sum(left.values())} left ({reasons})" if left else "")


def _count_of(new: Exchange) -> Callable[[str | None], None]:
    """Returns a function that counts a call, by the reason why it is left to the original, or None.

    torch.compile calls it while it traces, and traces nothing of it.
    """

    def count(reason: str | None) -> None:
        for acceleration in new.holders:
            acceleration.count(new.name, reason)

    return torch.compiler.assume_constant_result(count)


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
        left_out: LeftOut,
        within: str,
        how: str,
    ) -> None:
        self.name, self.function, self.original, self.within = name, function, original, within
        self.home, self.how, self.in_force = home, how, False
        self.holders: list[Acceleration] = []
        self._left_out, self._count, self._names = left_out, _count_of(self), parameters(function)
        # Do not copy __dict__: the original's may forbid torch.compile to trace into the function.
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.in_force:
            return self.original(*args, **kwargs)
        reason = self.left_out(*args, **kwargs)
        result = self.function(*args, **kwargs) if reason is None else NotImplemented
        if result is not NotImplemented:
            self._count(None)
            return result
        self._count(reason or OTHER_CALLS)
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return pkgutil.resolve_name, (f"{self.home}:{self.name}",)

    def left_out(self, *args: Any, **kwargs: Any) -> str | None:
        """Returns why a call with these arguments is left to the original, while the replacement is in force.

        None means that the replacement serves it.
        """
        return self._left_out({**dict(zip(self._names, args, strict=False)), **kwargs})

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
        self.name, self.how, self.in_force = f"{owner.__name__}.{method}", how, False
        self.holders: list[Acceleration] = []
        self.owner, self.method, self.original = owner, method, vars(owner).get(method)
        count = _count_of(self)

        @functools.wraps(getattr(owner, method))
        def replaced(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.in_force:
                result = function(layer, *args, **kwargs)
                count(OTHER_CALLS if result is NotImplemented else None)
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
    module: ModuleType, name: str, function: Callable, left_out: LeftOut, within: str, how: str
) -> Replacement:
    """Returns the replacement of a module's function: the current one, an earlier one that layers hold, or a new one.

    Args:
        module: the module that defines the function.
        name: the name of the function in the module.
        function: the function that takes its place.
        left_out: returns why a call goes to the original, given the arguments by name; None if it is for `function`.
        within: the module, or the package with all its modules, in which it is replaced.
        how: a few words for the user: what takes the place of the original.
    """
    current = getattr(module, name)
    if isinstance(current, Replacement):
        return current
    if (name, current) not in _made:
        _made[name, current] = Replacement(module.__name__, name, function, current, left_out, within, how)
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
