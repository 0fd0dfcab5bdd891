"""Computes one token, or several tokens, of a delta rule by the kernels of gated linear attention (../gla/step/).

    u = beta (v - k diag(exp g) S)        S' = diag(exp g) S + k^T u        o = scale * q S'

A delta rule adds u at its keys where gated linear attention adds v. A program holds all keys of its columns of a state,
so it can compute the read k diag(exp g) S itself. Rings hold u, so accepted tokens are replayed as in gated linear
attention.

B batch   T tokens   N sequences   P slots   H key heads   Hv value heads   K, V key and value width
L tokens of a ring
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gla_core.dispatch.backend import OpCall, Prepared
from gla_triton_runtime.architecture import gpu_of_call


def _prepare(call: OpCall) -> Callable[..., tuple[Tensor, Tensor]]:
    from gla_core.dispatch.tensors import new_state
    from gla_triton_kernels.gla.step.plan import plan
    from gla_triton_kernels.gla.step.step import launch_step
    from gla_triton_runtime.prepared import Launches, rehearsed

    planned, launched = plan(call, gpu_of_call(call)), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        state: Tensor,
        scale: float,
        state_indices: Tensor | None,
        gate_normalizer: int | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        if state_indices is not None and not inplace:  # rows without an index are also copied
            state, inplace = new_state(state).copy_(state), True
        new = None if inplace else new_state(state)
        o = v.new_empty(v.shape)
        if o.numel():
            tensors = (q, k, v, g, state, state_indices, new, o)
            x = (*tensors, beta)
            if unrecorded := launched.replay(x, scale):
                unrecorded.start(launch_step(planned, tensors, scale, gate_normalizer, beta))
        return o, state if new is None else new

    return rehearsed(run, call)


def _prepare_steps(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.tokens import Tensors, launch_tokens, plan_tokens
    from gla_triton_runtime.prepared import Launches, rehearsed

    planned, launched = plan_tokens(call), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        pool: Tensor,
        slots: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        num_accepted: Tensor | None,
        read_slots: Tensor | None,
        has_state: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
        o = v.new_empty(v.shape) if out is None else out
        if len(slots) == 0:
            return o.zero_()
        if o.numel():
            no_rings = (None, None, None, None)
            x = (q, k, v, g, pool, slots, cu_seqlens, num_accepted, has_state, o, read_slots, *no_rings, beta)
            if unrecorded := launched.replay(x, scale):
                unrecorded.start(launch_tokens(planned, Tensors(*x), scale, pad_slot, gate_normalizer))
        return o

    return rehearsed(run, call)


def _prepare_replay(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.tokens import Tensors, launch_tokens, plan_tokens
    from gla_triton_runtime.prepared import Launches, rehearsed

    planned, launched = plan_tokens(call), Launches(call.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        pool: Tensor,
        ring_k: Tensor,
        ring_v: Tensor,
        ring_g: Tensor | None,
        slots: Tensor,
        ring_start: Tensor,
        num_accepted: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        has_state: Tensor | None,
        pad_slot: int,
        gate_normalizer: int | None,
        out: Tensor | None,
    ) -> Tensor:
        o = v.new_empty(v.shape) if out is None else out
        if len(slots) == 0:
            return o.zero_()
        rings = (ring_k, ring_v, ring_g, ring_start)  # without new tokens, the kernel still updates states
        x = (q, k, v, g, pool, slots, cu_seqlens, num_accepted, has_state, o, None, *rings, beta)
        if unrecorded := launched.replay(x, scale):
            unrecorded.start(launch_tokens(planned, Tensors(*x), scale, pad_slot, gate_normalizer))
        return o

    return rehearsed(run, call)


_TOKEN = ("q", "k", "v", "g", "beta")
_SEQUENCES = ("has_state", "pad_slot", "gate_normalizer", "out")
_STEPS = ("pool", "slots", "scale", "cu_seqlens", "num_accepted", "read_slots")
_RINGS = ("ring_k", "ring_v", "ring_g", "slots", "ring_start", "num_accepted")

STEP = Prepared(_prepare, (*_TOKEN, "state", "scale", "state_indices", "gate_normalizer", "inplace"))
"""One token: one kernel reads every state once and writes it once."""
STEPS = Prepared(_prepare_steps, (*_TOKEN, *_STEPS, *_SEQUENCES))
"""Several tokens: one kernel reads the state of every sequence once, and writes it after each token."""
REPLAY = Prepared(_prepare_replay, (*_TOKEN, "pool", *_RINGS, "scale", "cu_seqlens", *_SEQUENCES))
"""Several tokens after those accepted: one kernel reads the state of every sequence once and writes it once."""
