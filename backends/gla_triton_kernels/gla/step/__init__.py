"""Decoding: step.py, layer_step.py and ssd_step.py hold kernels for one token, tokens.py for several tokens.

plan.py chooses their launch parameters, and cost.py predicts their seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gla_core.dispatch.backend import OpCall, Prepared


def _prepare(call: OpCall) -> Callable[..., tuple]:
    from gla_triton_kernels.gla.step.step import prepare

    return prepare(call)


def _prepare_delta(call: OpCall) -> Callable[..., tuple]:
    from gla_triton_kernels.gla.step.step import prepare_delta

    return prepare_delta(call)


def _prepare_layer_step(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.layer_step import prepare

    return prepare(call)


def _prepare_ssd_step(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.ssd_step import prepare

    return prepare(call)


def _prepare_steps(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.tokens import prepare_steps

    return prepare_steps(call)


def _prepare_replay(call: OpCall) -> Callable[..., Tensor]:
    from gla_triton_kernels.gla.step.tokens import prepare_replay

    return prepare_replay(call)


DELTA = ("beta", "normalize", "beta_limit", "gate_activation", "bound", "A_log", "dt_bias")
"""The arguments that only delta rules have; the functions of their ops take them last."""
_STEP = ("q", "k", "v", "g", "state", "scale", "state_indices", "gate_normalizer")
_CALL = ("q", "k", "v", "g", "pool", "slots", "scale", "cu_seqlens")
_SEQUENCES = ("num_accepted", "read_slots", "has_state", "pad_slot", "gate_normalizer", "out")
_LAYER = ("output_gate", "norm_weight", "scale", "norm_eps", "activation", "state_indices", "gate_normalizer")
_SSD = ("dt", "A", "dt_bias", "D", "z", "scale", "dt_softplus", "A_is_log", "state_indices")
_RINGS = ("ring_k", "ring_v", "ring_g", "slots", "ring_start", "num_accepted")
_REPLAY = ("scale", "cu_seqlens", "has_state", "pad_slot", "gate_normalizer", "out")

STEP = Prepared(_prepare, (*_STEP, "bonus", "inplace"))
"""One token: one kernel reads every state once and writes it once."""
DELTA_STEP = Prepared(_prepare_delta, (*_STEP, "inplace", *DELTA))
"""One token of a delta rule, by the same kernel."""
LAYER_STEP = Prepared(_prepare_layer_step, ("q", "k", "v", "g", "state", *_LAYER))
"""One token and the norm of its output: one kernel, or two if there are few heads, read and write every state once."""
SSD_STEP = Prepared(_prepare_ssd_step, ("q", "k", "v", "state", *_SSD))
"""One token of Mamba-2: one kernel reads every state once and writes it once."""
STEPS = Prepared(_prepare_steps, (*_CALL, *_SEQUENCES))
"""Several tokens: one kernel reads the state of every sequence once, and writes it after each token."""
REPLAY = Prepared(_prepare_replay, ("q", "k", "v", "g", "pool", *_RINGS, *_REPLAY))
"""Several tokens after those accepted: one kernel reads the state of every sequence once and writes it once."""
