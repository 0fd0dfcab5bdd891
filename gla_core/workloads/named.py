"""Named workloads, one list for both the conformance kit and the benchmarks.

A workload is an op, the sizes of its arguments, and tags that say its purpose:

    ci          small enough for an interpreter on a CPU   odd       sizes that no kernel likes, rare arguments
    train       as in training a model                     packed    sequences of several lengths in one row
    prefill     as in absorbing prompts                    extreme   gates that break factored forms
    decode      one token at a time                        long      sequences or rows longer than a tile by far
    narrow      thousands of tokens, keys or columns, small otherwise: for errors that appear only after many of them
    timed_only  another dtype or gate form of a model's workload; benchmarks only
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gla_core.workloads import attention, delta, gla

TAGS = ("ci", "train", "prefill", "decode", "long", "odd", "packed", "extreme", "narrow", "timed_only")


@dataclass(frozen=True, slots=True)
class Workload:
    """One call, by name.

    Attributes:
        name: unique among the workloads of its op.
        op: a public op; it stands for its forward, and for its backward if gradients are computed.
        sizes: the sizes from which `gla_core.workloads.inputs.arguments` makes the arguments.
        tags: a subset of `TAGS`.
    """

    name: str
    op: str
    tags: frozenset[str]
    sizes: dict = field(hash=False)


WORKLOADS = tuple(
    Workload(name, op, tags, sizes)
    for family in (gla, delta, attention)
    for op, rows in family.TABLES.items()
    for name, tags, sizes in rows
)


def select(op: str | None = None, tags: Iterable[str] = ()) -> list[Workload]:
    """Returns the workloads of an op (by default of all ops) that have all of `tags`."""
    wanted = frozenset(tags)
    return [w for w in WORKLOADS if (op is None or w.op == op) and wanted <= w.tags]
