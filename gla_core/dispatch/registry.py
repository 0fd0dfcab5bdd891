"""Which backends exist: discovered once from entry points, or registered at run time.

Discovery loads each plugin on its own. One that fails to import, breaks the contract or reuses a name is quarantined
with its traceback, and everything else goes on working. Afterwards the registry is a plain dict.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pluggy

from gla_core.dispatch import hookspecs
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities
from gla_core.dispatch.environment import environment
from gla_core.dispatch.errors import BackendError, UnknownBackendError, UnknownOpError, nearest

OWN_DISTRIBUTION = "gla-core"

on_change: list[Callable[[], None]] = []
"""Called whenever the set of backends changes, so that what was derived from it can be dropped."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `gla.backends()`: a backend that works, or a plugin in quarantine.

    Attributes:
        name: the backend's name, or the entry-point name of a plugin in quarantine.
        version, ops, capabilities: the backend's; None and empty for a plugin in quarantine.
        plugin: entry-point name it came by, or 'register()'.
        error: traceback of what went wrong, None if nothing did.
    """

    name: str
    version: str | None
    ops: tuple[str, ...]
    capabilities: Capabilities | None
    plugin: str
    error: str | None = None


_lock = threading.RLock()
_discovered: dict[str, Backend] | None = None  # from entry points; None until the first use
_registered: dict[str, Backend] = {}  # at run time
_plugin_of: dict[str, str] = {}
_quarantine: dict[str, str] = {}  # entry-point name to traceback


def installed() -> dict[str, Backend]:
    """The backends that work, by name. Discovers them on the first call."""
    with _lock:
        return {**_discover(), **_registered}


def get(name: str) -> Backend:
    """The backend called `name`. Raises UnknownBackendError with the nearest spelling."""
    known = installed()
    if name in known:
        return known[name]
    if name in _quarantine:
        cause = _quarantine[name].strip().splitlines()[-1]
        raise UnknownBackendError(f"backend {name!r} failed to load: {cause} (`gla doctor` shows the traceback)")
    raise UnknownBackendError(
        f"unknown backend {name!r}{nearest(name, known)} (installed: {', '.join(known) or 'none'})"
    )


def backends() -> list[BackendInfo]:
    """What is installed: working backends first, then plugins in quarantine with their load errors."""
    working = [
        BackendInfo(b.name, b.version, tuple(b.ops), b.capabilities, _plugin_of[b.name]) for b in installed().values()
    ]
    return working + [BackendInfo(name, None, (), None, name, error) for name, error in _quarantine.items()]


class Registration:
    """Handle of a backend registered at run time; a context manager that unregisters it on exit."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def unregister(self) -> None:
        """Remove the backend; does nothing the second time."""
        with _lock:
            if _registered.get(self.backend.name) is self.backend:
                del _registered[self.backend.name]
                _changed()

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(self, *_: object) -> None:
        self.unregister()


def register(backend: Backend) -> Registration:
    """Register a backend at run time, in tests and notebooks; packages use the hook instead.

    Returns:
        A handle whose `unregister()` takes it back; also a context manager.

    Raises:
        BackendError: a signature that does not match, a name in use, a value that is no Backend.
        UnknownOpError: an op that does not exist.

    Example:
        >>> with gla.register(Backend("mine", "1.0", {"online_softmax": mine})):
        ...     gla.online_softmax(x, backend="mine")
    """
    with _lock:
        check_backend(backend, taken=installed())
        _registered[backend.name] = backend
        _plugin_of[backend.name] = "register()"
        _changed()
    return Registration(backend)


def rediscover() -> None:
    """Forget what discovery found, so that the next use looks again; run-time registrations stay."""
    global _discovered
    with _lock:
        _discovered = None
        _quarantine.clear()
        _changed()


def check_backend(backend: object, taken: Iterable[str] = ()) -> None:
    """Raise BackendError or UnknownOpError unless `backend` honours the contract and its name is free."""
    if not isinstance(backend, Backend):
        raise BackendError(f"expected a gla_core.dispatch.backend.Backend; got {type(backend).__name__}")
    name = backend.name
    if not (isinstance(name, str) and name.isidentifier()) or name == "auto":
        raise BackendError(f"backend name {name!r} must be an identifier other than 'auto'")
    if name in taken:
        raise BackendError(f"backend name {name!r} is already in use; choose another")
    if not isinstance(backend.capabilities, Capabilities):
        raise BackendError(f"backend {name!r}: capabilities is {type(backend.capabilities).__name__}")
    for op, function in backend.ops.items():
        if op not in OP_PARAMETERS:
            raise UnknownOpError(f"backend {name!r} implements an unknown op {op!r}{nearest(op, OP_PARAMETERS)}")
        _check_signature(name, op, function)


def _check_signature(name: str, op: str, function: Callable) -> None:
    if not callable(function):
        raise BackendError(f"backend {name!r}: op {op!r} is {type(function).__name__}, not a function")
    got = tuple(inspect.signature(function).parameters)
    if got != OP_PARAMETERS[op]:
        raise BackendError(
            f"backend {name!r}: {op} takes ({', '.join(got)}); the contract is ({', '.join(OP_PARAMETERS[op])})"
        )


def _changed() -> None:
    for callback in on_change:
        callback()


def _discover() -> dict[str, Backend]:
    global _discovered
    if _discovered is None:
        _discovered = {}
        blocked = environment().blocked_plugins
        entry_points = sorted(importlib.metadata.entry_points(group=hookspecs.ENTRY_POINTS), key=_own_first)
        for unknown in sorted(blocked - {e.name for e in entry_points}):
            known = nearest(unknown, (e.name for e in entry_points))
            warnings.warn(f"GLA_BLOCK_PLUGINS names no installed plugin {unknown!r}{known}", stacklevel=3)
        for entry_point in entry_points:
            if entry_point.name not in blocked:
                _load(entry_point, _discovered)
    return _discovered


def _own_first(entry_point: importlib.metadata.EntryPoint) -> tuple[bool, str]:
    # A plugin that reuses the name of one of our backends must lose, whatever the order on sys.path.
    own = entry_point.dist is not None and entry_point.dist.name == OWN_DISTRIBUTION
    return (not own, entry_point.name)


def _load(entry_point: importlib.metadata.EntryPoint, found: dict[str, Backend]) -> None:
    """Add the backends of one plugin to `found`, all or none of them."""
    new: dict[str, Backend] = {}
    try:
        for backend in _call_hook(entry_point):
            check_backend(backend, taken=[*found, *new, *_registered])
            new[backend.name] = backend
    except (Exception, SystemExit):  # SystemExit: a plugin's sys.exit() must not end the program
        _quarantine[entry_point.name] = traceback.format_exc()
        return
    found.update(new)
    _plugin_of.update(dict.fromkeys(new, entry_point.name))


def _call_hook(entry_point: importlib.metadata.EntryPoint) -> list[Backend]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), name=entry_point.name)
    manager.check_pending()
    if not manager.hook.gla_register_backends.get_hookimpls():
        raise BackendError(f"{entry_point.value} implements no hook; decorate gla_register_backends with hookimpl")
    (offered,) = manager.hook.gla_register_backends()
    if not isinstance(offered, list):
        raise BackendError(f"gla_register_backends returned {type(offered).__name__}; expected a list of Backend")
    return offered
