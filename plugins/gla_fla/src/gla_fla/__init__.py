"""flash-linear-attention (FLA) 0.6.0 as a backend: the baseline in every comparison.

Neither FLA nor Triton is imported before an op runs. Calls that FLA cannot compute are refused with a reason.
"""

from __future__ import annotations

import torch

from gla_core.dispatch.backend import Backend, Capabilities, OpCall, Reason, hookimpl

__version__ = "0.1.0"

_LEAST_V_BACKWARD = 9  # FLA's dA kernel sums over min(64, next power of 2 of V) columns, and tl.dot needs at least 16


@hookimpl
def gla_register_backends() -> list[Backend]:
    from gla_fla import native
    from gla_fla.chunk_gla import chunk_gla_bwd, chunk_gla_fwd
    from gla_fla.recurrent_gla_step import recurrent_gla_step

    ops = (chunk_gla_fwd, chunk_gla_bwd, recurrent_gla_step)
    return [
        Backend(
            name="gla_fla",
            version=__version__,
            ops={op.__name__: native.raising_launch_errors(op) for op in ops},
            capabilities=Capabilities(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
                min_compute_capability=(8, 0),
                grouped_queries=False,
                cuda_graphs=True,
            ),
            supports=supports,
        )
    ]


def supports(call: OpCall) -> Reason | None:
    """Returns the reason why FLA cannot compute a call, if capabilities cannot express it."""
    if call.op == "recurrent_gla_step":
        return _step_refusal(call)
    if call.dtype == torch.float32 and call.float32_matmul_precision == "highest":
        return (
            "multiplies float32 in TF32, and torch.get_float32_matmul_precision() is 'highest'; "
            "allow TF32 by torch.set_float32_matmul_precision('high')"
        )
    if call.capturing and call.variable_length:
        return "waits for the host with cu_seqlens, so it cannot be captured into a CUDA graph"
    if call.op == "chunk_gla_bwd" and call.dims["V"] < _LEAST_V_BACKWARD:
        return f"computes gradients for V from {_LEAST_V_BACKWARD}; V is {call.dims['V']}"
    return None


def _step_refusal(call: OpCall) -> Reason | None:
    if call.state_dtype != torch.float32:
        return f"writes float32 states; state is {str(call.state_dtype).removeprefix('torch.')}"
    if call.indexed:
        return "has no pool of states; leave out slots"
    return None
