"""The one hook that a package implements to add backends; it names the package in the entry-point group `ENTRY_POINTS`.

[project.entry-points."gla_core.backends"]
mine = "my_package"
"""

from __future__ import annotations

import pluggy

from gla_core.dispatch.backend import Backend

PROJECT = "gla_core"
ENTRY_POINTS = "gla_core.backends"

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def gla_register_backends() -> list[Backend]:
    """Returns the backends that this package offers.

    The core calls the hook when a backend is first needed, perhaps in several threads at once, and again after
    `gla.reload_environment()`. It must not import triton or touch a device: import kernels inside the op functions. An
    exception quarantines the package and leaves all others working.
    """
    raise NotImplementedError
