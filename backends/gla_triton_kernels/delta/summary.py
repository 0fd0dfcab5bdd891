"""Plans summaries of sequences of a delta rule on Hopper, in both directions, and describes their launches.

    state after = transition (state before) + state        dstate before = transition (dstate after) + dstate

The kernels of sm90/ that carry states, or gradients of states, through segments also compute the summary of a segment
(`launch_summaries`). If sequences stay whole, each is one segment. Otherwise two scans compute the summary of each
sequence from those of its segments: one of states from 0, and one of transitions from the identity. The first could
compose transitions as well, but each of its blocks of values would repeat the products [K, K]. On other GPUs,
`chunk_delta_fwd` and `chunk_delta_bwd` compute summaries as states with K more columns. Planning imports no Triton.

B batch   T tokens   N sequences   H heads of q and k   Hv value heads   K, V key and value width   I segments
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gla_core.dispatch.backend import OpCall, Reason
from gla_triton_kernels.chunks.results import with_copies
from gla_triton_kernels.delta import sm90
from gla_triton_kernels.delta.forward import segments_of
from gla_triton_kernels.delta.plan import MOST_KEYS_OF_TRANSITION, in_segments
from gla_triton_kernels.delta.sm90 import backward_calls
from gla_triton_runtime.architecture import gpu_of_call

if TYPE_CHECKING:
    from gla_triton_kernels.chunks.segments import Segments
    from gla_triton_runtime.launch import Launch


class Summaries(NamedTuple):
    """The tensors of a call, results included.

    Attributes:
        q: [B, T, H, K]; None for summaries of states.
        values: v or do, [B, T, Hv, V].
        state: receives the states, or their gradients, from 0, [N, Hv, K, V].
        transition: [N, Hv, K, K].
        identity, zero: what a scan computes transitions from, [N, Hv, K, K] and [I, Hv, K, K]; None if sequences
            stay whole.
    """

    q: Tensor | None
    k: Tensor  # [B, T, H, K]
    values: Tensor
    g: Tensor | None  # [B, T, Hv, K], [B, T, Hv] or [Hv]
    beta: Tensor  # [B, T, Hv]
    cu_seqlens: Tensor | None  # [N+1]
    state: Tensor
    transition: Tensor
    identity: Tensor | None
    zero: Tensor | None


def refusal(call: OpCall) -> Reason | None:
    """Returns why the kernel for SM90 computes no summaries of a call, or None."""
    gpu = gpu_of_call(call)
    reason = backward_calls.refusal(call, gpu) if _is_backwards(call) else sm90.refusal(_with_q(call), gpu)
    if reason is None and call.dims["K"] > MOST_KEYS_OF_TRANSITION:
        return f"computes transitions of at most {MOST_KEYS_OF_TRANSITION} keys; K is {call.dims['K']}"
    return reason


def explain(call: OpCall, cut: bool) -> list[str]:
    """Returns the line that names the kernel of a call that `refusal` does not refuse."""
    length = _length(call, cut)
    return [f"kernel delta.sm90.{'backward' if _is_backwards(call) else 'forward'}{in_segments(length)}"]


def _is_backwards(call: OpCall) -> bool:
    return call.op == "chunk_delta_gradient_summary"


def _with_q(call: OpCall) -> OpCall:
    """Returns the call with q, for which the forward reads k."""
    return replace(call, layouts={**call.layouts, "q": call.layouts["k"]}) if "k" in call.layouts else call


def _copied(call: OpCall) -> frozenset[str]:
    """Returns the names in `Summaries` of tensors that are copied so that TMA can address them, as in sm90/."""
    names = backward_calls.copied(call) if _is_backwards(call) else sm90.copied(_with_q(call)) - {"q"}
    return frozenset("values" if name in ("v", "do") else name for name in names)


def _widened(call: OpCall) -> OpCall:
    """Returns the call with as many columns as states and transitions have."""
    return replace(call, dims={**call.dims, "V": call.dims["K"] + call.dims["V"]})


def _length(call: OpCall, cut: bool) -> int | None:
    """Returns the tokens of a segment; None if sequences stay whole."""
    return sm90.cut_length(_widened(call), gpu_of_call(call), cut)


def prepare(call: OpCall, cut: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepares a summary of states.

    Args:
        cut: whether to cut sequences into segments if they do not fill the device.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.delta.tensors import Tensors
    from gla_triton_runtime.prepared import rehearsed

    length, normalizer = _length(call, cut), call.scalars["gate_normalizer"]
    kernel = sm90.parameters(_widened(call), gpu_of_call(call), length)

    def launch(x: Summaries, segments: Segments, state: Tensor, transition: Tensor) -> list[Launch]:
        from gla_triton_kernels.delta.sm90.forward import launch_summaries

        no_o = x.values  # nothing is written to it
        y = Tensors(x.k, x.k, x.values, x.g, x.beta, None, x.cu_seqlens, no_o, state)
        return [launch_summaries(kernel, y, segments, transition, True, normalizer)]

    compute = _computation(call, length, launch)

    def run(
        k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None, gate_normalizer: int | None
    ) -> tuple[Tensor, Tensor]:
        return compute(None, k, v, g, beta, cu_seqlens)

    return rehearsed(run, call)


def prepare_gradient(call: OpCall, cut: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepares a summary of gradients of states; see `prepare`.

    Raises:
        LaunchError: a kernel does not compile for this device, or does not fit it.
    """
    from gla_triton_kernels.delta.tensors import BackwardTensors
    from gla_triton_runtime.prepared import rehearsed

    def launch(x: Summaries, segments: Segments, state: Tensor, transition: Tensor) -> list[Launch]:
        from gla_triton_kernels.delta.sm90.backward import launch_summaries
        from gla_triton_kernels.delta.sm90.backward_pairs import launch_pairs

        do, unused = x.values, (x.k, x.k, x.values, x.g, x.beta)  # nothing is written to gradients of tokens
        assert x.q is not None
        y = BackwardTensors(x.q, x.k, do, x.g, x.beta, None, x.cu_seqlens, None, do, None, *unused, state)
        chunks, pairs = launch_pairs(y, 1.0)
        return [*pairs, launch_summaries(y, chunks, segments, state, transition, True)]

    compute = _computation(call, _length(call, cut), launch)

    def run(
        q: Tensor,
        k: Tensor,
        do: Tensor,
        g: Tensor | None,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        gate_normalizer: int | None,
    ) -> tuple[Tensor, Tensor]:
        return compute(q, k, do, g, beta, cu_seqlens)

    return rehearsed(run, call)


def _computation(
    call: OpCall, length: int | None, launch: Callable[..., list[Launch]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function that allocates the results of a call and fills them; for `launch` see `launches`.

    Args:
        length: tokens of a segment; None if sequences stay whole.
    """
    from gla_triton_kernels.chunks.cutting import most_segments
    from gla_triton_runtime.prepared import Launches

    T, Hv, K, V, N = (call.dims[name] for name in ("T", "Hv", "K", "V", "N"))
    empty = N == 0 or T == 0
    segments = 0 if length is None else most_segments(N, T, length, call.variable_length)
    copied, launched = _copied(call), Launches(call.device)

    def compute(
        q: Tensor | None,
        k: Tensor,
        values: Tensor,
        g: Tensor | None,
        beta: Tensor,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        new = partial(k.new_empty, dtype=torch.float32)
        state, transition, identity, zero = new(N, Hv, K, V), new(N, Hv, K, K), None, None
        if segments or empty:
            identity = torch.eye(K, dtype=torch.float32, device=k.device).expand(N, Hv, K, K)
            if empty:
                return transition.copy_(identity), state.zero_()
            zero = k.new_zeros(segments, Hv, K, K, dtype=torch.float32)
        x = Summaries(q, k, values, g, beta, cu_seqlens, state, transition, identity, zero)
        x = with_copies(x, copied) if copied else x
        if unrecorded := launched.replay(x, 1.0):
            unrecorded.start(launches(launch, x, length, _is_backwards(call)))
        return transition, state

    return compute


def launches(launch: Callable[..., list[Launch]], x: Summaries, length: int | None, backwards: bool) -> list[Launch]:
    """Returns the launches that fill the results in x.

    Args:
        launch: returns the launches that fill the summaries of all segments, [I, Hv, K, V] and [I, Hv, K, K].
        length: tokens of a segment; None if sequences stay whole.
        backwards: whether the summaries are those of gradients.
    """
    from gla_triton_kernels.chunks.scan import launch_scan
    from gla_triton_kernels.chunks.segments import Recurrence

    segments = segments_of(length, x.k, x.cu_seqlens)
    if length is None:
        return [*segments.launches, *launch(x, segments, x.state, x.transition)]
    states, transitions = (y.new_empty(segments.count, *y.shape[1:]) for y in (x.state, x.transition))
    made = [*segments.launches, *launch(x, segments, states, transitions)]
    for reached, before, after in ((states, None, x.state), (x.zero, x.identity, x.transition)):
        assert reached is not None
        recurrence = Recurrence(x.k, x.values, x.g, before, after, backwards=backwards)
        made += launch_scan(False, recurrence, segments, reached, transitions, None)
    return made
