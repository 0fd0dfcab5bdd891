"""Holds the ops, a folder for each family, and lists the description of every abstract op."""

from typing import Any

from gla_core.ops import attention, delta, gla
from gla_core.ops.spec import OpSpec, declare

__all__ = ["ABSTRACT_OPS", "FAMILIES", "PUBLIC_OPS", "RUNS", "OpSpec"]

FAMILIES = (gla.SPECS, delta.SPECS, attention.SPECS)
"""The ops of each family."""
ABSTRACT_OPS = {spec.name: spec for family in FAMILIES for spec in family}
for _spec in ABSTRACT_OPS.values():
    declare(_spec)

_BACKWARDS = {spec.backward for spec in ABSTRACT_OPS.values()}
PUBLIC_OPS = {spec.public: spec for spec in ABSTRACT_OPS.values() if spec.name not in _BACKWARDS}
"""Maps the name of each public op to the abstract op of its forward."""

RUNS: dict[str, tuple[OpSpec, dict[str, Any]]] = {
    **{name: (spec, {}) for ops in (PUBLIC_OPS, ABSTRACT_OPS) for name, spec in ops.items()},
    **gla.RUNS,
}
"""Maps a public or abstract name to its abstract op, and to the arguments that the name fixes."""
