"""The installed backends: discovered once from entry points, or registered at run time.

Discovery loads each plugin separately. A plugin that fails to import, breaks the contract or reuses a name is
quarantined with its traceback, and everything else goes on working. Afterwards the registry is a plain dict.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pluggy
import torch

from gla_core.dispatch import hookspecs
from gla_core.dispatch.backend import (
    DEVICE_FACTS,
    GATES,
    OP_PARAMETERS,
    OP_REQUIRED,
    Backend,
    Capabilities,
    CostModel,
    Prepared,
    any_of,
    arguments_of,
    is_constant,
)
from gla_core.dispatch.environment import environment
from gla_core.dispatch.errors import BackendError, UnknownBackendError, UnknownOpError, attempt, nearest
from gla_core.dispatch.lowering import completed

OWN_DISTRIBUTION = "gla-core"

AUTO = "auto"
INVARIANT = "batch_invariant"
RESERVED = (AUTO, INVARIANT)
"""The words of a request, which are no names of backends."""

on_change: list[Callable[[], None]] = []
"""The functions to call whenever the set of backends changes, so that they drop results derived from it."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `gla.backends()`: a backend that works, or a plugin in quarantine.

    Attributes:
        name: the backend's name, or the entry-point name of a plugin in quarantine.
        version, capabilities: as in `Backend`; None for a plugin in quarantine.
        ops: the abstract ops that it serves: those that it implements, then those that the core computes by them.
        plugin: name of the entry point that offered the backend, or 'register()'.
        error: the traceback; None if the plugin works.
    """

    name: str
    version: str | None
    ops: tuple[str, ...]
    capabilities: Capabilities | None
    plugin: str
    error: str | None = None


@dataclass(slots=True)
class _Discovery:
    """The result of a discovery: backends, their plugins, and the tracebacks of plugins in quarantine, by name.

    It is not `complete` if the discovery was started by a plugin that is still being imported.
    """

    backends: dict[str, Backend] = field(default_factory=dict)
    plugin_of: dict[str, str] = field(default_factory=dict)
    quarantine: dict[str, str] = field(default_factory=dict)
    blocked: list[str] = field(default_factory=list)
    complete: bool = True


def survive_fork(lock: threading.Lock | threading.RLock) -> None:
    """Makes a fork wait until `lock` is free, because the child could never acquire it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


_lock = threading.RLock()  # guards replacing these values; never held while a plugin's code runs
_discovered: _Discovery | None = None  # from entry points; None until the first use
_reloads = 0
_registered: dict[str, Backend] = {}  # at run time
_in_progress = threading.local()  # discovery: what this thread has discovered so far
survive_fork(_lock)


def installed() -> dict[str, Backend]:
    """Returns the backends that work, by name. Discovers them on the first call."""
    return {**_discover().backends, **_registered}


def get(name: str, source: str = "") -> Backend:
    """Returns the backend called `name`. Raises UnknownBackendError with the nearest spelling."""
    discovery = _discovered or _discover()
    known = {**discovery.backends, **_registered}
    if name in known:
        return known[name]
    if name in discovery.quarantine:
        cause = discovery.quarantine[name].strip().splitlines()[-1]
        raise UnknownBackendError(
            f"{source}backend {name!r} failed to load: {cause} (`gla doctor` shows the traceback)"
        )
    if name in discovery.blocked:
        raise UnknownBackendError(
            f"{source}backend {name!r} is blocked by GLA_BLOCK_PLUGINS; remove it from that environment variable"
        )
    blocked = f"; plugins blocked by GLA_BLOCK_PLUGINS: {', '.join(discovery.blocked)}" if discovery.blocked else ""
    raise UnknownBackendError(
        f"{source}unknown backend {name!r}{nearest(name, [*known, AUTO])} "
        f"(installed: {', '.join(known) or 'none'}{blocked})"
    )


def backends() -> list[BackendInfo]:
    """Returns the installed backends: working ones first, then plugins in quarantine with their load errors."""
    discovery = _discover()
    working = [
        BackendInfo(b.name, b.version, tuple(b.ops), b.capabilities, discovery.plugin_of.get(b.name, "register()"))
        for b in {**discovery.backends, **_registered}.values()
    ]
    return working + [BackendInfo(name, None, (), None, name, error) for name, error in discovery.quarantine.items()]


class Registration:
    """Handle of a backend registered at run time; a context manager that unregisters it on exit."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._active = True

    def unregister(self) -> None:
        """Removes the backend; does nothing the second time."""
        global _registered
        with _lock:
            if not self._active:
                return
            self._active = False
            _registered = {name: backend for name, backend in _registered.items() if name != self.backend.name}
        changed()

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(self, *_: object) -> None:
        self.unregister()


def register(backend: Backend) -> Registration:
    """Registers a backend at run time, in tests and notebooks; packages use the hook instead.

    Returns:
        A handle whose `unregister()` removes it; also a context manager.

    Raises:
        BackendError: the value is not a Backend or breaks the contract, or its name is in use.
        UnknownOpError: the backend has an op that does not exist.

    Example:
        >>> with gla.register(Backend("mine", "1.0", {"online_softmax": mine})):
        ...     gla.online_softmax(x, backend="mine")
    """
    global _registered
    check_backend(backend, taken=installed())
    with _lock:
        _check_free(backend.name, _registered)  # another thread may have taken the name meanwhile
        _registered = {**_registered, backend.name: completed(backend)}
    changed()
    return Registration(backend)


def rediscover() -> None:
    """Forgets the result of the discovery, so that the next use discovers again; run-time registrations stay."""
    global _discovered, _reloads
    if getattr(_in_progress, "discovery", None) is None:  # not if a plugin calls this during its own discovery
        with _lock:
            _discovered = None
            _reloads += 1
    changed()


def check_backend(backend: object, taken: Iterable[str] = ()) -> None:
    """Raises BackendError or UnknownOpError unless `backend` honours the contract and its name is free."""
    if not isinstance(backend, Backend):
        raise BackendError(f"expected a gla_core.dispatch.backend.Backend; got {type(backend).__name__}")
    name = backend.name
    if not (isinstance(name, str) and name.isidentifier()) or name in RESERVED:
        raise BackendError(f"backend name {name!r} must be an identifier other than {any_of([*map(repr, RESERVED)])}")
    _check_free(name, taken)
    if not isinstance(backend.version, str):
        raise BackendError(f"backend {name!r}: version is {backend.version!r}; expected a string")
    _check_capabilities(name, backend.capabilities)
    for op, can in _items(name, backend.op_capabilities, "op_capabilities"):
        _check_op(f"backend {name!r} has capabilities of", op)
        _check_capabilities(name, can)
    if not callable(backend.supports):
        raise BackendError(f"backend {name!r}: supports is {backend.supports!r}; expected a function of an OpCall")
    if not isinstance(backend.ops, Mapping):
        raise BackendError(f"backend {name!r}: ops is {type(backend.ops).__name__}; expected a mapping")
    for op, function in backend.ops.items():
        _check_op(f"backend {name!r} implements", op)
        _check_implementation(name, op, function)
    _check_cost(name, backend.cost)
    if backend.notes is not None and not callable(backend.notes):
        raise BackendError(f"backend {name!r}: notes is {type(backend.notes).__name__}; expected a function or None")


def _check_op(who: str, op: object) -> None:
    if op not in OP_PARAMETERS:
        raise UnknownOpError(f"{who} an unknown op {op!r}{nearest(str(op), OP_PARAMETERS)}")


def _check_free(name: str, taken: Iterable[str]) -> None:
    if name in taken:
        raise BackendError(f"backend name {name!r} is already in use; choose another")


def _is_set_of(kind: type, value: object) -> bool:
    return isinstance(value, frozenset | set) and len(value) > 0 and all(isinstance(x, kind) for x in value)


def _is_set_of_devices(value: object) -> bool:
    return value == frozenset() or _is_set_of(str, value)


def _is_widths(value: object) -> bool:
    return isinstance(value, range) and len(value) > 0


def _is_compute_capability(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, int) for x in value)


_CAPABILITIES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "devices": (lambda x: x is None or _is_set_of(str, x), "None or a set of device types such as 'cuda', not empty"),
    "dtypes": (lambda x: _is_set_of(torch.dtype, x), "a set of torch.dtype, not empty"),
    "min_compute_capability": (_is_compute_capability, "two integers such as (8, 0)"),
    "key_widths": (_is_widths, "a range, not empty"),
    "value_widths": (_is_widths, "a range, not empty"),
    "gates": (lambda x: isinstance(x, frozenset) and x <= set(GATES), f"a set of {', '.join(map(repr, GATES))}"),
    "batch_invariant": (_is_set_of_devices, "a set of device types such as 'cuda'"),
}
_FLAG = (lambda x: isinstance(x, bool), "True or False")


def _check_capabilities(name: str, can: object) -> None:
    if not isinstance(can, Capabilities):
        raise BackendError(f"backend {name!r}: capabilities is {type(can).__name__}; expected Capabilities")
    for capability in (each.name for each in dataclasses.fields(can)):
        is_right, expected = _CAPABILITIES.get(capability, _FLAG)
        value = getattr(can, capability)
        if not is_right(value):
            raise BackendError(f"backend {name!r}: capability {capability} is {value!r}; expected {expected}")


def _check_implementation(name: str, op: str, implementation: object) -> None:
    """Checks that the implementation of an op takes arguments that the op has, by name, and all that are required."""
    if isinstance(implementation, Prepared):
        _check_prepared(name, op, implementation)
    elif not callable(implementation):
        raise BackendError(f"backend {name!r}: op {op!r} is {type(implementation).__name__}; expected a function")
    try:
        takes = arguments_of(implementation)  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError) as error:
        raise BackendError(f"backend {name!r}: the signature of {op} cannot be read ({error})") from error
    contract = OP_PARAMETERS[op]
    unknown = [parameter for parameter in takes if parameter not in contract]
    if unknown:
        raise BackendError(
            f"backend {name!r}: {op} takes {unknown[0]!r}{nearest(unknown[0], contract)} "
            f"(the op has the arguments {', '.join(contract)})"
        )
    if not isinstance(implementation, Prepared):
        _check_names(name, op, implementation)
    missing = [parameter for parameter in contract if parameter in OP_REQUIRED[op].difference(takes)]
    if missing:
        raise BackendError(f"backend {name!r}: {op} does not take {', '.join(missing)}, which every call of it gives")


def _check_names(name: str, op: str, function: Callable[..., object]) -> None:
    """Raises BackendError for an argument that cannot be given by its name."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BackendError(
                f"backend {name!r}: {op} takes {parameter.name!r} as a {parameter.kind.description} argument; "
                "expected one that can be given by its name"
            )


def _check_prepared(name: str, op: str, implementation: Prepared) -> None:
    prepare, takes, kernels = implementation.prepare, implementation.takes, implementation.kernels
    if not callable(prepare):
        raise BackendError(f"backend {name!r}: prepare of {op} is {type(prepare).__name__}; expected a function")
    if not isinstance(takes, tuple) or not all(isinstance(each, str) for each in takes):  # ("x") is a string
        raise BackendError(f"backend {name!r}: takes of {op} is {takes!r}; expected a tuple of the names of arguments")
    twice = [argument for i, argument in enumerate(takes) if argument in takes[:i]]
    if twice:
        raise BackendError(f"backend {name!r}: {op} takes {twice[0]!r} twice")
    if kernels is not None and not callable(kernels):
        raise BackendError(
            f"backend {name!r}: kernels of {op} is {type(kernels).__name__}; expected a function or None"
        )


def _check_cost(name: str, cost: object) -> None:
    if not isinstance(cost, CostModel):
        if cost is not None and not callable(cost):
            raise BackendError(f"backend {name!r}: cost is {type(cost).__name__}; expected a CostModel or a function")
        return
    if not callable(cost.formula):
        raise BackendError(f"backend {name!r}: the formula of cost is {type(cost.formula).__name__}, not a function")
    if not isinstance(cost.kernels, Mapping):
        raise BackendError(
            f"backend {name!r}: kernels of cost is {cost.kernels!r}; expected a mapping from ops to names"
        )
    for kind, ops in _items(name, cost.constants, "constants"):
        for op, constants in _items(name, ops, f"constants of {kind!r}"):
            _check_op(f"backend {name!r} has constants of", op)
            for constant, value in _items(name, constants, f"constants of {kind!r}, {op}"):
                if constant in DEVICE_FACTS:
                    raise BackendError(f"backend {name!r}: the constant {constant!r} of {op} is the core's; rename it")
                if not is_constant(value):
                    raise BackendError(
                        f"backend {name!r}: the constant {constant!r} of {op} for {kind!r} is {value!r}; "
                        "expected a positive number"
                    )


def _items(name: str, value: object, what: str) -> Iterable[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise BackendError(f"backend {name!r}: the {what} are {type(value).__name__}; expected a mapping")
    return value.items()


def changed() -> None:
    """Calls the functions of `on_change`."""
    for callback in on_change:
        callback()


def _discover() -> _Discovery:
    """Returns the result of the discovery. If threads start it at the same time, each discovers, and the first result
    is kept.
    """
    global _discovered
    discovery = _discovered or getattr(_in_progress, "discovery", None)
    if discovery is not None:
        return discovery
    reloads, discovery = _reloads, _load_all()
    with _lock:
        if _discovered is None and discovery.complete and reloads == _reloads:
            _discovered = discovery
    changed()
    return _discovered or discovery


def _load_all() -> _Discovery:
    discovery = _in_progress.discovery = _Discovery()  # set now: a plugin may ask for the backends while it is imported
    try:
        blocked = environment().blocked_plugins
        entry_points = sorted(importlib.metadata.entry_points(group=hookspecs.ENTRY_POINTS), key=_own_first)
        for unknown in sorted(blocked - {e.name for e in entry_points}):
            known = nearest(unknown, (e.name for e in entry_points))
            warnings.warn(f"GLA_BLOCK_PLUGINS names no installed plugin {unknown!r}{known}", stacklevel=3)
        for entry_point in entry_points:
            if entry_point.name in blocked:
                discovery.blocked.append(entry_point.name)
            else:
                _load(entry_point, discovery)
    finally:
        _in_progress.discovery = None
    return discovery


def _own_first(entry_point: importlib.metadata.EntryPoint) -> tuple[bool, str]:
    # A plugin that reuses the name of one of our backends must lose, whatever the order on sys.path.
    ours = entry_point.dist is not None and entry_point.dist.name == OWN_DISTRIBUTION
    return (not ours, entry_point.name)


def _load(entry_point: importlib.metadata.EntryPoint, discovery: _Discovery) -> None:
    """Adds the backends of one plugin to `discovery`, all or none of them."""
    new, error = attempt(_backends_of, entry_point, discovery)
    if new is not None:
        discovery.backends.update(new)
        discovery.plugin_of.update(dict.fromkeys(new, entry_point.name))
    elif _is_being_imported(entry_point.module):
        discovery.complete = False
    else:
        said_before = discovery.quarantine.get(entry_point.name, "")
        discovery.quarantine[entry_point.name] = said_before + "".join(traceback.format_exception(error))


def _backends_of(entry_point: importlib.metadata.EntryPoint, discovery: _Discovery) -> dict[str, Backend]:
    """Imports a plugin, calls its hook, and returns its backends by name, after checking each of them."""
    new: dict[str, Backend] = {}
    for backend in _call_hook(entry_point):
        check_backend(backend, taken=[*discovery.backends, *new, *_registered])
        new[backend.name] = completed(backend)
    return new


def _is_being_imported(module: str) -> bool:
    """Returns whether the calling thread is still importing a module, or a package that contains it."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    specs = [getattr(sys.modules.get(name), "__spec__", None) for name in names]
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _call_hook(entry_point: importlib.metadata.EntryPoint) -> list[Backend]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), name=entry_point.name)
    manager.check_pending()
    if not manager.hook.gla_register_backends.get_hookimpls():
        raise BackendError(f"{entry_point.value} implements no hook; decorate gla_register_backends with hookimpl")
    offered = next(iter(manager.hook.gla_register_backends()), None)  # pluggy drops a None
    if not isinstance(offered, list):
        raise BackendError(f"gla_register_backends returned {type(offered).__name__}; expected a list of Backend")
    return offered
