"""Makes CUDA graphs of launches with functions of the CUDA driver.

`torch.cuda.CUDAGraph` does not fit, because it is made for captures that allocate memory. For each graph, it makes the
allocator reserve memory, and does so for all threads during the capture. Its capture uses a stream that other code also
uses.
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
"""The CUresult that a thread gets if it has not used CUDA yet."""
_NON_BLOCKING = 1
"""A flag of CUstream_flags: the stream does not wait for the default stream."""
_RELAXED = 2
"""A CUstreamCaptureMode: while a stream is captured, no thread may wait for it, and all other calls are allowed."""


class Graph:
    """Captured launches, which the driver makes in one call."""

    def __init__(self, launch: Callable[[int], None]) -> None:
        """Captures the launches that `launch` makes on the stream that it receives. No kernel runs yet.

        Raises:
            RuntimeError: the driver cannot make the graph, for example because memory is short.
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
        self._executable, self._launch = executable, _driver().cuGraphLaunch
        weakref.finalize(self, _destroy, executable).atexit = False

    def start(self, stream: int) -> None:
        """Makes the launches on a stream.

        Raises:
            RuntimeError: the driver refuses; no launch was made.
        """
        status = self._launch(self._executable, stream)
        if status == _INVALID_CONTEXT:
            _call("cuCtxSetCurrent", self._context)
            status = self._launch(self._executable, stream)
        if status:
            _check("cuGraphLaunch", status)


def _destroy(executable: c_void_p) -> None:
    """Destroys an executable graph. Launches of it that are still running finish normally."""
    with _relaxed():
        _call("cuGraphExecDestroy", executable)


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Lets this thread call any function of the driver while this or another thread captures a stream."""
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
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuGraphLaunch.argtypes = c_void_p, c_void_p  # with types, a stream is passed as an integer
    return driver
