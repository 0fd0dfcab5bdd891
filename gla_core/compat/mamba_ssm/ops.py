"""Mamba-2's scan and its decoding step, with mamba_ssm's arguments and results.

Per head, with A < 0 a number, dt_t >= 0 a number, and x_t a row of headdim channels:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t^T B_t        S in R^{headdim x dstate}
    y_t = S_t C_t + D x_t                             out_t = y_t * silu(z_t)

This is `gla_core.chunk_ssd` with q = C and k = B: gated linear attention with v = dt x and g = dt A. Head i reads B and
C of group i // (nheads / ngroups). States have the channels first.

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (arXiv 2405.21060); the arguments are those of mamba_ssm 2.3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from gla_core.dispatch.tensors import wide
from gla_core.ops import autocast, checks
from gla_core.ops.fused import fused
from gla_core.ops.gla import chunk_gla, chunk_ssd, recurrent_gla_step, recurrent_ssd_step
from gla_core.ops.gla.chunk_ssd import SSD_FORWARD, check_limits, values_and_gates
from gla_core.ops.gla.recurrent_ssd_step import without_skipped
from gla_core.ops.gla.ssd import output, rates, time_steps

_SCAN = {
    "x": "batch seqlen nheads headdim",
    "dt": "batch seqlen nheads",
    "A": "nheads",
    "B": "batch seqlen ngroups dstate",
    "C": "batch seqlen ngroups dstate",
    "D": "nheads or nheads headdim",
    "z": "batch seqlen nheads headdim",
    "dt_bias": "nheads",
    "initial_states": "batch nheads headdim dstate",
    "seq_idx": "batch seqlen",
}
_STEP = {
    "state": "P nheads dim dstate",
    "x": "batch nheads dim",
    "dt": "batch nheads dim",
    "A": "nheads dim dstate",
    "B": "batch ngroups dstate",
    "C": "batch ngroups dstate",
    "D": "nheads dim",
    "z": "batch nheads dim",
    "dt_bias": "nheads dim",
}
"""The shapes of the arguments of the two functions."""


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | Any:
    """Computes Mamba-2's scan, as `mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined` does.

    It is differentiable in all tensors of floating-point numbers, also with return_varlen_states. The host never waits
    for the device. dt, its softplus, the gates and the products with D and z are computed in float32 (float64 with
    float64 inputs); each may have any dtype. Under autocast, x dt, B and C are cast as in `gla_core.chunk_gla`, and out
    keeps the dtype of x.

    Without seq_idx, `gla_core.chunk_ssd` computes the scan; a backend may do so in one kernel. If z has another dtype
    than x, or a gradient is recorded, the product with silu(z) follows the scan. torch.compile makes one kernel on a
    GPU of what comes before an op and one of what follows it. The first call then takes seconds, as does the first with
    another combination of dtypes and optional arguments.

    Args:
        x: inputs [batch, seqlen, nheads, headdim], float64, float32, float16 or bfloat16.
        dt: time steps [batch, seqlen, nheads], before dt_bias and softplus.
        A: the rate of each head [nheads], at most 0: a head forgets the factor exp(dt A) per token.
        B: [batch, seqlen, ngroups, dstate], where ngroups divides nheads. It is cast to the dtype of x.
        C: [batch, seqlen, ngroups, dstate]. It is cast to the dtype of x.
        chunk_size: it changes no result and is not used.
        D: factor of x in the output, [nheads] or [nheads, headdim]. None means 0.
        z: [batch, seqlen, nheads, headdim]; the output is multiplied by silu(z). None means no factor.
        dt_bias: it is added to dt [nheads].
        initial_states: the state before the first token [batch, nheads, headdim, dstate], of any dtype. None means 0.
            With seq_idx it belongs to sequence 0: a row whose first index is not 0 does not read it.
        seq_idx: the sequence of each token [batch, seqlen], integers. The state is set to 0 where the index differs
            from the index before.
        cu_seqlens: offsets of the sequences of seq_idx [N+1], int32 or int64; batch is 1, and the last offset is
            seqlen. They are read only with return_varlen_states.
        dt_softplus: whether to apply softplus to dt + dt_bias.
        dt_limit: the smallest and the largest dt, at least 0. Values outside are clamped after softplus. So a negative
            dt becomes 0.
        return_final_states: whether to return the state after the last token of each row.
        return_varlen_states: whether to return the state after the last token of each sequence.

    Returns:
        out [batch, seqlen, nheads, headdim] with the dtype of x, or a tuple of out and the states asked for: the final
        states [batch, nheads, headdim, dstate], then the states of the sequences [N, nheads, headdim, dstate]. States
        are float32 (float64 with float64 inputs).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device; dt_limit is negative; cu_seqlens or
            seq_idx is missing, or batch is not 1, with return_varlen_states.
        NoBackendError, NotImplementedError: as in `gla_core.chunk_gla`.

    Example:
        >>> x, dt = torch.randn(2, 100, 8, 64), torch.rand(2, 100, 8)
        >>> A = -torch.rand(8)
        >>> B, C = torch.randn(2, 100, 1, 128), torch.randn(2, 100, 1, 128)
        >>> out, states = mamba_chunk_scan_combined(
        ...     x, dt, A, B, C, 256, return_final_states=True
        ... )
    """
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    _check(_SCAN, **tensors, initial_states=initial_states, seq_idx=seq_idx)
    _check_options(x, seq_idx, cu_seqlens, dt_limit, return_varlen_states)
    state = None if initial_states is None else initial_states.to(wide(x.dtype))
    q, k = C.to(x.dtype), B.to(x.dtype)
    if seq_idx is None and _takes(x):
        # the op takes z with the dtype of x alone
        in_op, after = (z, None) if z is None or z.dtype == x.dtype else (None, z)
        limits = {"dt_min": dt_limit[0], "dt_max": dt_limit[1]}
        options = {"z": in_op, "dt_softplus": dt_softplus, **limits, "state_v_first": True}
        o, state = chunk_ssd(q, k, x, dt, A.to(wide(x.dtype)), D, dt_bias, state, return_final_states, **options)
        out = o if after is None else fused(output, o, x, None, after)
        return (out, state) if return_final_states else out
    v, g = fused(_values_and_gates, x, dt, A, dt_bias, seq_idx, dt_softplus, dt_limit)
    offsets = cu_seqlens if return_varlen_states else None
    if state is not None and offsets is not None:
        state = F.pad(state, (0, 0) * 3 + (0, len(offsets) - 2))  # the other sequences begin with 0
    wanted = return_final_states or return_varlen_states
    o, state = chunk_gla(q, k, v, g, 1.0, state, wanted, offsets, state_v_first=True)
    out = o.to(x.dtype) if D is None and z is None else fused(output, o, x, D, z)
    if offsets is None:
        return (out, state) if return_final_states else out
    if not return_final_states:
        return out, state
    last = (offsets[:-1] < offsets[-1]).sum() - 1  # the last sequence that has a token
    return out, state.index_select(0, last.clamp(min=0)[None]), state


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Advances a state by one token per row, in place, as mamba_ssm's `selective_state_update` does.

    A step of Mamba-2 has one gate for each head. It is recognized by its strides: A of stride 0 along dim and dstate,
    and dt and dt_bias of stride 0 along dim. mamba_ssm's Mamba-2 layer passes such tensors, made with `expand`. Every
    other step, such as Mamba-1's, is computed with a gate for each channel and key, which is exact and reads more.

    With one head, all tensors may lack the dimension nheads or ngroups.

    Args:
        state: the states before the token, overwritten by those after it: [P, nheads, dim, dstate]. P is batch without
            state_batch_indices. A dtype that `gla_core.recurrent_gla_step` does not take, such as float64 with float32
            inputs, costs two copies of all P states.
        x: inputs [batch, nheads, dim], float64, float32, float16 or bfloat16.
        dt: time steps [batch, nheads, dim], before dt_bias and softplus. They are not clamped.
        A: rates [nheads, dim, dstate], at most 0.
        B: [batch, ngroups, dstate], where ngroups divides nheads. It is cast to the dtype of x.
        C: [batch, ngroups, dstate]. It is cast to the dtype of x.
        D: factor of x in the output [nheads, dim]. None means 0.
        z: [batch, nheads, dim]; the output is multiplied by silu(z). None means no factor.
        dt_bias: it is added to dt [nheads, dim].
        dt_softplus: whether to apply softplus to dt + dt_bias.
        state_batch_indices: for each row, the index of its state [batch], int32 or int64, no state twice. A row with a
            negative index reads and writes no state, and its out is 0.

    Returns:
        out [batch, nheads, dim] with the dtype of x, without the dimension nheads if state lacks it.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or the strides of state do not allow to
            write it in place.
        RuntimeError: an input requires a gradient; call it under torch.no_grad().
        NoBackendError, NotImplementedError: as in `gla_core.recurrent_ssd_step`.

    Example:
        >>> A = -torch.rand(8, 1, 1).expand(8, 64, 128)
        >>> dt = torch.rand(2, 8, 1).expand(2, 8, 64)
        >>> state, x = torch.zeros(2, 8, 64, 128), torch.randn(2, 8, 64)
        >>> B, C = torch.randn(2, 2, 1, 128)
        >>> out = selective_state_update(state, x, dt, A, B, C)
    """
    states = _with_heads(state, 4, 1)
    x, dt, B, C, z = (_with_heads(y, 3, 1) for y in (x, dt, B, C, z))
    A, D, dt_bias = _with_heads(A, 3, 0), _with_heads(D, 2, 0), _with_heads(dt_bias, 2, 0)
    _check(_STEP, state=states, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    out = advance(states, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    return out if state.ndim > 3 else out.squeeze(1)


def advance(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None = None,
    A_is_log: bool = False,
) -> Tensor:
    """Computes `selective_state_update` for arguments that have the dimension nheads and need no checks.

    Args:
        A_is_log: whether A holds log(-A).
    """
    if _shared(A, 1, 2) and _shared(dt, 2) and (dt_bias is None or _shared(dt_bias, 1)):
        others = {"dt": dt[..., 0], "A": A[:, 0, 0], "dt_bias": None if dt_bias is None else dt_bias[:, 0]}
        D_per_channel = D is not None and not _shared(D, 1)  # the op takes a number for each head
        if not D_per_channel:
            others |= {"D": None if D is None else D[:, 0], "z": z}
        others = {name: None if y is None else _taken(y, x.dtype) for name, y in others.items()}
        options = {"scale": 1.0, "dt_softplus": dt_softplus, "A_is_log": A_is_log, "slots": state_batch_indices}
        written = _writable(states, x.dtype)
        o = recurrent_ssd_step(C.to(x.dtype), B.to(x.dtype), x, written, **others, **options, state_v_first=True)
        out = output(o, x, D, z) if D_per_channel else o.to(x.dtype)
    else:
        dtype = wide(x.dtype)
        dt = time_steps(dt, dt_bias, dt_softplus, dtype)
        v, g = (x * dt).flatten(1)[..., None], (dt[..., None] * rates(A, A_is_log, dtype)).flatten(1, 2)
        token = (C.to(x.dtype), B.to(x.dtype), v.to(x.dtype), g)
        states = _channels_as_heads(states)
        written, D_per_channel = _writable(states, x.dtype), True
        o, _ = recurrent_gla_step(*token, written, 1.0, state_batch_indices, inplace=True, state_v_first=True)
        out = output(o.reshape(x.shape), x, D, z)
    if written is not states:
        states.copy_(written)
    return without_skipped(out, states, state_batch_indices) if D_per_channel else out


def _taken(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x in a dtype that an op takes with inputs of `dtype`."""
    return x if x.dtype in (dtype, torch.float32) else x.to(wide(dtype))


def _writable(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns states in a dtype in which a step writes them with inputs of `dtype`: themselves, or a copy."""
    taken = (torch.float64,) if dtype == torch.float64 else (torch.float32, torch.bfloat16, torch.float16)
    return states if states.dtype in taken else states.to(wide(dtype))


def _takes(x: Tensor) -> bool:
    """Returns whether `chunk_ssd` computes a scan as well as operations around `chunk_gla` do.

    Under autocast it would round x, and out, to the dtype of autocast. On a CPU, a compiler that sees the operations
    makes better code of them.
    """
    return autocast.inputs(SSD_FORWARD, x)[0].dtype == x.dtype and (x.is_cuda or not is_compiling())


def _values_and_gates(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    seq_idx: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Returns v = dt x with the dtype of x, and g = dt A, which is -inf where a sequence begins."""
    v, g = values_and_gates(x, dt, A, dt_bias, softplus, *limit)
    if seq_idx is not None:
        before = F.pad(seq_idx[:, :-1], (1, 0))  # a row continues sequence 0
        g = g.masked_fill((seq_idx != before)[..., None], -torch.inf)
    return v, g


def _channels_as_heads(states: Tensor) -> Tensor:
    """Returns a view [P, nheads * dim, 1, dstate] of states [P, nheads, dim, dstate]."""
    P, nheads, dim, dstate = states.shape
    if nheads > 1 and dim > 1 and states.stride(1) != dim * states.stride(2):
        raise ValueError(
            f"state has strides {states.stride()}; expected heads and channels that follow each other in memory, or A, "
            "dt and dt_bias expanded along dim and dstate"
        )
    return states.view(P, nheads * dim, 1, dstate)


def _with_heads(x: Any, ndim: int, position: int) -> Any:
    """Returns x with a dimension of one head at a position, if it has one dimension less than ndim."""
    return x.unsqueeze(position) if isinstance(x, Tensor) and x.ndim == ndim - 1 else x


def _shared(x: Tensor, *dims: int) -> bool:
    """Returns whether each of the dimensions repeats one element, by the strides."""
    return all(x.stride(dim) == 0 or x.shape[dim] == 1 for dim in dims)


def _check(shapes: Mapping[str, str], **tensors: Tensor | None) -> None:
    """Checks the shapes of the given arguments, the dtype of x and the number of groups."""
    sizes: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            checks.tensor_of_any(name, tensor, tuple(shapes[name].split(" or ")), sizes)
            if name == "x":
                checks.dtype(name, tensor, checks.FLOATS)
    if sizes["ngroups"] < 1 or sizes["nheads"] % sizes["ngroups"] != 0:
        raise ValueError(f"B has {sizes['ngroups']} groups; expected a divisor of nheads = {sizes['nheads']}")


def _check_options(
    x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None, limit: tuple[float, float], varlen: bool
) -> None:
    """Checks dt_limit, and the arguments that return_varlen_states needs."""
    check_limits(*limit, "dt_limit")
    if not varlen:
        return
    if seq_idx is None or cu_seqlens is None:
        missing = "cu_seqlens" if cu_seqlens is None else "seq_idx"
        raise ValueError(f"{missing} is None; return_varlen_states needs both seq_idx [1, seqlen] and cu_seqlens [N+1]")
    if x.shape[0] != 1:
        raise ValueError(f"x has batch = {x.shape[0]}; return_varlen_states takes sequences packed in one row")
