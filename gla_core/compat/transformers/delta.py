"""Computes the functions that transformers' layers with a delta rule call, for sequences and for one token.

Most models have a gate for each head (gated delta rule), and some a gate for each key (Kimi delta attention). The
shape of the gates says which rule it is, so one function computes both. If flash-linear-attention is installed,
transformers binds the names of these functions to its kernels, which need a GPU; the replacements run on a CPU too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gla_core.compat import hopper
from gla_core.compat.transformers.family import CONVOLUTIONS, Family, Function
from gla_core.dispatch.tensors import wide
from gla_core.ops.calls import needs_gradient
from gla_core.ops.delta import chunk_delta, recurrent_delta_step

EPS = 1e-6
"""The eps of the l2 norm of queries and keys, in all models."""


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *others: Any,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> Any:
    """Computes a delta rule of any number of tokens. Like transformers, it ignores arguments for other functions."""
    if others:  # the functions for sequences and for one token do not agree on what they are
        return NotImplemented
    tokens, normalize = (query, key, value, g, beta), EPS if use_qk_l2norm_in_kernel else None
    state = None if initial_state is None else initial_state.to(wide(query.dtype))
    if state is None or query.shape[1] != 1 or cu_seqlens is not None or needs_gradient(*tokens, state):
        return chunk_delta(*tokens, None, state, output_final_state, cu_seqlens, normalize=normalize)
    o, state = recurrent_delta_step(*(x.squeeze(1) for x in tokens), state=state, normalize=normalize)
    return o.unsqueeze(1), state if output_final_state else None


def _left_out(arguments: Mapping[str, Any]) -> str | None:
    """Returns why a call is left to the original: for its kernels, or as `cu_seqlens` is missing.

    In transformers, layers with gates per key do not pass on `cu_seq_lens_q` as `cu_seqlens`.
    """
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in arguments.values())
    q, v, g = (arguments[name] for name in ("query", "value", "g"))
    if on_gpu and not hopper.computes_delta_rule(q, v, g):
        return hopper.neither(hopper.IN_WORDS)
    is_packed = any(arguments.get(name) is not None for name in ("seq_idx", "cu_seq_lens_q"))
    return "packed sequences without cu_seqlens" if is_packed and arguments.get("cu_seqlens") is None else None


HOW = f"computed by gla_core on a CPU, and {hopper.IN_WORDS}, but for packed sequences without cu_seqlens"
_RULE = Function(_delta_rule, _left_out, HOW)
GATED_DELTA_RULE = Family(
    models=dict.fromkeys(("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"), "5.16")
    | {"lara_mini": "5.24"},
    functions={"torch_chunk_gated_delta_rule": _RULE, "torch_recurrent_gated_delta_rule": _RULE, **CONVOLUTIONS},
)
"""The models with one gate for each head."""
KIMI_DELTA_ATTENTION = Family(
    models={"bailing_hybrid": "5.20", "glm5_next": "5.16", "kimi_linear": "5.17"},
    functions={"chunk_kimi_delta_attention": _RULE, "recurrent_kimi_delta_attention": _RULE, **CONVOLUTIONS},
)
"""The models with a gate for each key."""
