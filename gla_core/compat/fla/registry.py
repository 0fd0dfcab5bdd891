"""Registers replacements as backends in flash-linear-attention's own registry, `fla.backends`.

flash-linear-attention 0.6.0 looks for registered backends when some of its functions are called. There a replacement
also reaches modules outside flash-linear-attention that imported the function earlier. The names in its modules are
exchanged all the same: its dispatcher breaks the graphs of torch.compile, and FLA_DISABLE_BACKEND_DISPATCH=1 leaves the
dispatcher out.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from gla_core.compat.replace import Replacement

OPERATIONS = {"chunk_gated_delta_rule": "gated_delta_rule"}
"""Functions whose entry has the name of an operation, which may hold entries of other functions too."""


def register(new: Replacement) -> None:
    """Registers a replacement's function for the original, if flash-linear-attention has an entry for it.

    The backend stays registered, because `fla.backends` cannot unregister; it is disabled while the replacement is not
    in force. Registering twice is registering once.
    """
    try:
        backends = importlib.import_module("fla.backends")
    except ImportError:
        return

    class Backend(backends.BaseBackend):
        backend_type = "gla_core"
        priority = -1  # before flash-linear-attention's own, which have 0 or more, as in the exchanged modules
        implementation = staticmethod(new)

        def is_enabled(self) -> bool:
            return new.in_force

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
            if function_name != new.original.__name__:
                return False, "gla_core computes another function of this entry"
            reason = new.left_out(*args, **kwargs)
            return reason is None, reason or ""

    with contextlib.suppress(KeyError):  # most functions have no entry
        backends.register(OPERATIONS.get(new.name, new.original))(Backend)
