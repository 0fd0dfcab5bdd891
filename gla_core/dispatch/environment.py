"""The environment variables, read at first use and again on `reload_environment()`.

GLA_BACKEND         a request (see request.py), weaker than `use_backend` and `backend=`
GLA_BATCH_INVARIANT tokens of a segment, as in `batch_invariant`; off if it is 0 or unset
GLA_BLOCK_PLUGINS   comma-separated entry-point names of plugins that are not to be imported
GLA_CACHE_DIR       folder for measurements of `gla calibrate`, by default $XDG_CACHE_HOME/gla_core or ~/.cache/gla_core
GLA_CHECK           1 adds checks that read tensor values (and so wait for the device), and compare ranks
GLA_CHECKPOINTS     0 makes the backward on a GPU compute states that the forward would otherwise keep for it
GLA_GRAPHS          0 prevents repeated calls on a GPU from becoming CUDA graphs; the Triton backends read it
GLA_KEEP_MEMORY     1 makes the C library keep freed memory on a CPU, for the whole process: see ops/_memory.py
GLA_VLLM_LAYERS     layers of vLLM that the plugin gla_vllm replaces, which alone reads it
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from gla_core.dispatch.errors import nearest

VARIABLES = (
    "GLA_BACKEND",
    "GLA_BATCH_INVARIANT",
    "GLA_BLOCK_PLUGINS",
    "GLA_CACHE_DIR",
    "GLA_CHECK",
    "GLA_CHECKPOINTS",
    "GLA_GRAPHS",
    "GLA_KEEP_MEMORY",
    "GLA_VLLM_LAYERS",
)
_FALSE = ("0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Environment:
    backend: str
    batch_invariant: str
    blocked_plugins: frozenset[str]
    check_values: bool
    cache_dir: Path
    checkpoints: bool
    graphs: bool
    keep_memory: bool


@functools.cache
def environment() -> Environment:
    """Returns the settings in force. Raises ValueError for a flag that is neither true nor false."""
    _warn_of_unknown()
    blocked = (name.strip() for name in os.environ.get("GLA_BLOCK_PLUGINS", "").split(","))
    return Environment(
        backend=os.environ.get("GLA_BACKEND", "").strip(),
        batch_invariant=os.environ.get("GLA_BATCH_INVARIANT", "").strip(),
        blocked_plugins=frozenset(filter(None, blocked)),
        check_values=_flag("GLA_CHECK", False),
        cache_dir=_cache_dir(),
        checkpoints=_flag("GLA_CHECKPOINTS", True),
        graphs=_flag("GLA_GRAPHS", True),
        keep_memory=_flag("GLA_KEEP_MEMORY", False),
    )


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text not in ("", *_FALSE, *_TRUE):
        raise ValueError(f"{name} is {text!r}; expected 0 or 1")
    return text in _TRUE if text else default


def _cache_dir() -> Path:
    configured = os.environ.get("GLA_CACHE_DIR", "").strip()
    everybodys = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.join("~", ".cache")
    return Path(os.path.expanduser(configured or os.path.join(everybodys, "gla_core")))


def _warn_of_unknown() -> None:
    for name in sorted(os.environ):
        if name.startswith("GLA_") and name not in VARIABLES:
            warnings.warn(f"unknown environment variable {name}{nearest(name, VARIABLES)}", stacklevel=2)
