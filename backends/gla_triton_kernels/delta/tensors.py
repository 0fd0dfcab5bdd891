"""Names the tensors of a call of the delta rule over sequences.

B batch   T tokens   N sequences   H heads of q and k   Hv heads of values, states, gates and beta
K, V key and value width   n rows of checkpoints   I segments
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Tokens(Protocol):
    """The tensors that describe the tokens of a call, forwards or backwards."""

    @property
    def q(self) -> Tensor: ...  # [B, T, H, K]
    @property
    def k(self) -> Tensor: ...  # [B, T, H, K]
    @property
    def v(self) -> Tensor: ...  # [B, T, Hv, V]
    @property
    def g(self) -> Tensor | None: ...  # [B, T, Hv, K], [B, T, Hv] or [Hv]
    @property
    def beta(self) -> Tensor: ...  # [B, T, Hv]


class Tensors(NamedTuple):
    """All tensors of a forward, results included."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial_state: Tensor | None  # [N, Hv, K, V]
    cu_seqlens: Tensor | None  # [N+1]
    o: Tensor | None  # [B, T, Hv, V]; None if only states are needed
    final_state: Tensor | None  # [N, Hv, K, V]
    checkpoints: Tensor | None = None  # [B, n, Hv, K, V], or the pool
    entering: Tensor | None = None  # [I, Hv, K, V], the states that enter segments if sequences are cut
    pool: Tensor | None = None  # [P, Hv, K, V], from which states are read, and into which they are written


class BackwardTensors(NamedTuple):
    """All tensors of a backward, results included."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial_state: Tensor | None  # [N, Hv, K, V]
    cu_seqlens: Tensor | None  # [N+1]
    checkpoints: Tensor | None  # [B, n, Hv, K, V]
    do: Tensor  # [B, T, Hv, V]
    dstate: Tensor | None  # [N, Hv, K, V]
    dq: Tensor  # as q
    dk: Tensor  # as k
    dv: Tensor  # as v
    dg: Tensor | None  # as g
    dbeta: Tensor  # as beta
    dinitial_state: Tensor | None  # [N, Hv, K, V]
