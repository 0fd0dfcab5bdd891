"""Keeps memory that is freed on a CPU for the tensors of the next ops, if GLA_KEEP_MEMORY=1.

By default glibc returns freed blocks of more than 128 KiB to the system. The next op then maps them again page by page,
which takes 10 to 50 % of the time of a forward. With the settings made here, glibc keeps blocks of up to 32 MiB, 64
MiB in all. The settings apply to the whole process, and so they are off by default. They are made once, when an op
first runs on a CPU. The constants of the cost models that are shipped for a CPU were measured with these settings.
"""

from __future__ import annotations

import ctypes
import functools

from gla_core.dispatch.environment import environment

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h
LARGEST = 2**25
"""The bytes of the largest block that is kept. glibc allows no larger value."""


@functools.cache
def keep_freed() -> None:
    """Makes the C library keep freed memory, if it is glibc and GLA_KEEP_MEMORY is 1."""
    if not environment().keep_memory:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
        return
    mallopt(_MMAP_THRESHOLD, LARGEST)
    mallopt(_TRIM_THRESHOLD, 2 * LARGEST)
