"""CUDA graphs of launches, made by functions of the driver.

Not `torch.cuda.CUDAGraph`, which is for captures that allocate: it has the allocator keep memory apart for each, for
all threads while it is captured, and lends it a stream that others use as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_void_p
from typing import Any

_INVALID_CONTEXT = 201
"""A CUresult: the thread has not used CUDA yet."""
_NON_BLOCKING = 1
"""A flag of CUstream_flags: the stream does not wait for the default stream."""
_RELAXED = 2
"""A CUstreamCaptureMode: a capture forbids nobody anything but to wait for its stream."""


class Graph:
    """Launches that were captured, which the driver makes all at once."""

    def __init__(self, launch: Callable[[int], None]) -> None:
        """Captures what `launch` launches on the stream that it is given; nothing of it runs yet.

        Raises:
            RuntimeError: there is no graph, for want of memory perhaps.
        """
        stream, graph, executable, self._context = (c_void_p() for _ in range(4))
        with _relaxed(), contextlib.ExitStack() as after:
            _call("cuCtxGetCurrent", byref(self._context))
            _call("cuStreamCreate", byref(stream), _NON_BLOCKING)
            after.callback(_call, "cuStreamDestroy_v2", stream)
            _call("cuStreamBeginCapture_v2", stream, _RELAXED)
            try:
                launch(stream.value or 0)
            finally:
                _call("cuStreamEndCapture", stream, byref(graph))
            after.callback(_call, "cuGraphDestroy", graph)
            _call("cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0))
        self._executable = executable
        weakref.finalize(self, _destroy, executable).atexit = False

    def start(self, stream: int) -> None:
        """Makes the launches on a stream.

        Raises:
            RuntimeError: the driver refuses.
        """
        status = _driver().cuGraphLaunch(self._executable, c_void_p(stream))
        if status == _INVALID_CONTEXT:
            _call("cuCtxSetCurrent", self._context)
            status = _driver().cuGraphLaunch(self._executable, c_void_p(stream))
        _check("cuGraphLaunch", status)


def _destroy(executable: c_void_p) -> None:
    """Its launches that are under way end as they would have."""
    with _relaxed():
        _call("cuGraphExecDestroy", executable)


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Captures of other threads, and of this one, are no reason for the driver to refuse this thread anything."""
    mode = c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", byref(mode))


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} of the CUDA driver returned error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
