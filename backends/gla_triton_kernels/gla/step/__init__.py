"""Decoding: step.py and layer_step.py hold kernels for one token, tokens.py for several tokens.

plan.py chooses their launch parameters, and cost.py predicts their seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gla_core.dispatch.backend import Constants, OpCall, Prepared
from gla_triton_kernels.gla.step import cost


def _prepare(call: OpCall) -> Callable[..., tuple]:
    from gla_triton_kernels.gla.step.step import prepare

    return prepare(call)


def _prepare_layer_step(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.layer_step import prepare

    return prepare(call)


def _prepare_steps(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.tokens import prepare_steps

    return prepare_steps(call)


def _prepare_replay(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.tokens import prepare_replay

    return prepare_replay(call)


_STEP = ("q", "k", "v", "g", "state", "scale", "state_indices", "gate_normalizer", "inplace")
_LAYER_STEP = ("output_gate", "norm_weight", "scale", "norm_eps", "activation", "state_indices", "gate_normalizer")
_CALL = ("q", "k", "v", "g", "pool", "slots", "scale", "cu_seqlens")
_SEQUENCES = ("num_accepted", "read_slots", "has_state", "pad_slot", "gate_normalizer", "out")
_RINGS = ("ring_k", "ring_v", "ring_g", "slots", "ring_start", "num_accepted")
_REPLAY = ("scale", "cu_seqlens", "has_state", "pad_slot", "gate_normalizer", "out")

OPS = {
    "recurrent_gla_step": Prepared(_prepare, _STEP),
    "recurrent_gla_layer_step": Prepared(_prepare_layer_step, ("q", "k", "v", "g", "state", *_LAYER_STEP)),
    "recurrent_gla_steps": Prepared(_prepare_steps, (*_CALL, *_SEQUENCES)),
    "recurrent_gla_replay": Prepared(_prepare_replay, ("q", "k", "v", "g", "pool", *_RINGS, *_REPLAY)),
}
"""The ops of decoding. One kernel, or two for a layer with few heads, reads the state of every sequence once. It writes
the state once, but `steps` writes it after each token."""

SECONDS: dict[str, Callable[[OpCall, Constants], float]] = {
    "recurrent_gla_step": cost.seconds,
    "recurrent_gla_layer_step": cost.seconds,
    "recurrent_gla_steps": cost.seconds_of_steps,
    "recurrent_gla_replay": cost.seconds_of_replay,
}
"""The functions that predict the seconds of calls."""
