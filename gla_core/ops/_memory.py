"""Memory that is freed on a CPU: kept for the tensors of the next ops, not returned to the system by the C library.

glibc returns freed blocks beyond 128 KiB, to be mapped again page by page for the next op: that takes 10 to 50 % of
chunk_gla's time. With these settings, for the whole process, it keeps blocks up to 32 MiB, 64 MiB in all. They are set
once, when an op first runs on a CPU, and not with GLA_KEEP_MEMORY=0. Shipped constants of cost models expect them.
"""

from __future__ import annotations

import ctypes
import functools

from gla_core.dispatch.environment import environment

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h
LARGEST = 2**25
"""Bytes of the largest block that is kept, which glibc does not let be greater."""


@functools.cache
def keep_freed() -> None:
    """Have the C library keep freed memory, if it is glibc and the user has not said otherwise."""
    if not environment().keep_memory:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
        return
    mallopt(_MMAP_THRESHOLD, LARGEST)
    mallopt(_TRIM_THRESHOLD, 2 * LARGEST)
