"""Names the tensors of a call of chunk_gla; gla_core/ops/gla/chunk_gla.py explains each of them.

B batch   T tokens   N sequences   H key heads   Hq query heads   Hv value heads   Ho heads of o, the more of Hq and Hv
K, V key and value width   n rows of checkpoints   I segments   P slots of a pool
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from gla_core.dispatch.backend import OpCall
from gla_triton_kernels.chunks.results import AnyTensors
from gla_triton_runtime.replay import part


class Tensors(NamedTuple):
    """All tensors of a forward, results included.

    If sequences are cut, `entering` holds the states that enter segments, except for the first segment of a sequence,
    whose entering state is in `initial_state`. If states are in a pool, `entering` holds the entering states of first
    segments as well: by then, a scan has written final states to the pool, perhaps over initial states.
    """

    q: Tensor  # [B, T, Hq, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, Hv, V]
    g: Tensor | None  # [B, T, Hv, K], [B, T, Hv] or [Hv]
    initial_state: Tensor | None  # [N, Hv, K, V]
    cu_seqlens: Tensor | None  # [N+1]
    o: Tensor | None  # [B, T, Ho, V]; None if only states are needed, which not every kernel allows
    final_state: Tensor | None  # [N, Hv, K, V]
    checkpoints: Tensor | None = None  # [B, n, Hv, K, V]
    entering: Tensor | None = None  # [I, Hv, K, V]
    pool: Tensor | None = None  # [P, Hv, K, V], instead of initial_state, final_state and checkpoints
    v_factor: Tensor | None = None  # [B, T, Hv], contiguous; multiplies v
    skip: Tensor | None = None  # [Hv] or [Hv, V]; o is increased by skip v, without the factor
    z: Tensor | None = None  # [B, T, Hv, V]; o is multiplied by silu(z), after the skip


class BackwardTensors(NamedTuple):
    """All tensors of a backward, results included."""

    q: Tensor  # [B, T, Hq, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, Hv, V]
    g: Tensor | None  # [B, T, Hv, K], [B, T, Hv] or [Hv]
    initial_state: Tensor | None  # [N, Hv, K, V]
    cu_seqlens: Tensor | None  # [N+1]
    checkpoints: Tensor | None  # [B, n, Hv, K, V]
    do: Tensor  # [B, T, Ho, V]
    dstate: Tensor | None  # [N, Hv, K, V]
    dq: Tensor  # as q
    dk: Tensor  # as k
    dv: Tensor  # as v
    dg: Tensor | None  # as g
    dinitial_state: Tensor | None  # [N, Hv, K, V]
    v_factor: Tensor | None = None  # [B, T, Hv], contiguous; see `Tensors`
    skip: Tensor | None = None  # [Hv]
    dfactor: Tensor | None = None  # [B, T, Hv]
    dskip: Tensor | None = None  # [B, T, Hv], whose sum over tokens is the gradient of skip

    @property
    def last_leave_none(self) -> bool:
        """Returns whether the last segments of packed sequences have no gradient of their leaving state."""
        return self.cu_seqlens is not None and self.dstate is None


WRITTEN = frozenset({"o", "final_state", "checkpoints"})
"""The results among `Tensors`."""
GRADIENTS = frozenset({"dq", "dk", "dv", "dg", "dinitial_state"})
"""The results among `BackwardTensors`."""

AnyPlan = TypeVar("AnyPlan")  # ForwardPlan or BackwardPlan


def plans_with_rows(plans: Sequence[tuple[OpCall, AnyPlan]], x: AnyTensors) -> list[tuple[AnyPlan, AnyTensors]]:
    """Returns each plan with its rows of the tensors x. The plans cover consecutive rows of the batch, in order."""
    if len(plans) == 1:
        return [(plans[0][1], x)]
    ends = itertools.accumulate((call.dims["B"] for call, _ in plans), initial=0)
    return [(plan, _rows(x, *bounds)) for (_, plan), bounds in zip(plans, itertools.pairwise(ends), strict=True)]


def _rows(x: AnyTensors, start: int, end: int) -> AnyTensors:
    shared = {"skip"}  # and constant gates, which have one dimension
    divided = {name: y for name, y in x._asdict().items() if y is not None and y.ndim > 1 and name not in shared}
    return x._replace(**{name: part(y, start, end) for name, y in divided.items()})
