"""Functions of `fla.ops` that are a delta rule, with the same arguments and results, computed here.

    kda                a gate for each key
    gated_delta_rule   a gate for each head
    delta_rule         no gate

Dimensions and states are as in `gla_core.chunk_delta`. Tokens and the initial state may have different dtypes; o has
that of v. Gates are natural logarithms, or logits with use_gate_in_kernel. A call of a recurrent function with one
token and no gradients is computed as a decoding step.
Source: flash-linear-attention 0.6.0, fla/ops/kda, fla/ops/gated_delta_rule and fla/ops/delta_rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.compat.fla.ops import is_one_token, layout, no_more, one_token, over_sequences
from gla_core.dispatch.tensors import wide
from gla_core.ops.delta import chunk_delta as _chunk_delta
from gla_core.ops.delta import recurrent_delta_step as _recurrent_delta_step


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes Kimi delta attention over sequences, as `fla.ops.kda.chunk_kda` does.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, Hv, V]; value head i reads query and key head i // (Hv/H).
        g: natural logarithm of the forget gate [B, T, Hv, K], at most 0, or its logits.
        beta: which part of the difference to v is learnt [B, T, Hv], or its logits.
        scale: factor of the output; K^-1/2 by default.
        initial_state: [N, Hv, K, V], or [N, Hv, V, K] with state_v_first.
        output_final_state: whether to return the final state too, in the layout of initial_state.
        use_qk_l2norm_in_kernel: whether to divide q and k by sqrt(sum of squares + 1e-6) for each token and head.
        use_gate_in_kernel: whether g holds logits. The log gate is then -exp(A_log) softplus(g + dt_bias), or with
            lower_bound, lower_bound sigma(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: whether beta holds logits, of which sigma is used.
        allow_neg_eigval: whether 2 sigma of these logits is used.
        safe_gate: it has no effect: gates of any strength are exact.
        lower_bound: the smallest log gate, below 0; used with use_gate_in_kernel alone.
        disable_recompute: whether to keep the states of chunks for the backward, which otherwise computes them again.
        return_intermediate_states: not computed here.
        state_v_first: whether states are [N, Hv, V, K], both given and returned.
        cu_seqlens: [N+1] offsets of packed sequences, B = 1.
        cu_seqlens_cpu: the same offsets on the CPU. They give the longest sequence without waiting for the device.
        cp_context: not computed here.
        use_graph: it has no effect: no call waits for the device.
        max_num_seqs: it has no effect.
        kwargs: A_log [Hv] and dt_bias [Hv * K], either of which may be None, and chunk_size, which has no effect.

    Returns:
        o [B, T, Hv, V] and the final state (None unless output_final_state).

    Raises:
        NotImplementedError: cp_context or return_intermediate_states is given.
        ValueError: use_gate_in_kernel has neither A_log nor lower_bound; allow_neg_eigval is set, and
            use_beta_sigmoid_in_kernel is not.
        TypeError: an argument is unknown. Other errors are as in `gla_core.chunk_delta`.
    """
    _refuse("chunk_kda", cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    logits = _key_gate(use_gate_in_kernel, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), lower_bound, v)
    state_v_first = layout("chunk_kda", state_v_first, kwargs)
    options = _options(use_qk_l2norm_in_kernel, logits, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = (scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    return _call(
        over_sequences, _chunk_delta, (q, k, v, g, beta), *rest, recompute_states=not disable_recompute, **options
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_kda`, as `fla.ops.kda.fused_recurrent_kda` does.

    Raises:
        NotImplementedError: beta has a number for each value, [B, T, Hv, V]. Other errors are as in `chunk_kda`.
    """
    _refuse("fused_recurrent_kda", beta=beta)
    state_v_first = layout("fused_recurrent_kda", state_v_first, kwargs)
    logits = _key_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, v)
    options = _options(use_qk_l2norm_in_kernel, logits, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return _recurrent((q, k, v, g, beta), *rest, **options)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule over sequences, as `fla.ops.gated_delta_rule.chunk_gated_delta_rule` does.

    Args:
        g: natural logarithm of the forget gate [B, T, Hv], at most 0, or its logits.
        chunk_indices: it has no effect.
        kwargs: use_gate_in_kernel, A_log [Hv] and dt_bias [Hv], with which the log gate is
            -exp(A_log) softplus(g + dt_bias), and chunk_size, which has no effect.

    The other arguments and the results are as in `chunk_kda`.

    Raises:
        NotImplementedError: cp_context is given.
        ValueError: use_gate_in_kernel is set without A_log; allow_neg_eigval is set, and use_beta_sigmoid_in_kernel is
            not.
        TypeError: an argument is unknown. Other errors are as in `gla_core.chunk_delta`.
    """
    _refuse("chunk_gated_delta_rule", cp_context=cp_context)
    logits = _gate(*(kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias")))
    state_v_first = layout("chunk_gated_delta_rule", state_v_first, kwargs)
    options = _options(use_qk_l2norm_in_kernel, logits, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = (scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    return _call(over_sequences, _chunk_delta, (q, k, v, g, beta), *rest, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_gated_delta_rule`, as `fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule` does.

    Args:
        g: natural logarithm of a gate for each head [B, T, Hv], or its logits. Without g and gk there is no decay.
        gk: natural logarithm of a gate for each key [B, T, Hv, K].
        beta: [B, T, Hv]; None means 1.

    The other arguments and the results are as in `chunk_gated_delta_rule`, with A_log and dt_bias. It is differentiable
    here.

    Raises:
        NotImplementedError: gv, both g and gk, or a beta for each value is given.
        ValueError: use_gate_in_kernel is set without g. Other errors are as in `chunk_gated_delta_rule`.
    """
    _refuse("fused_recurrent_gated_delta_rule", g=g, gk=gk, gv=gv, beta=beta)
    state_v_first = layout("fused_recurrent_gated_delta_rule", state_v_first, kwargs)
    if use_gate_in_kernel and g is None:
        raise ValueError("use_gate_in_kernel is set and g is None; expected the logits of the gates as g")
    logits = _gate(use_gate_in_kernel, A_log, dt_bias)
    options = _options(use_qk_l2norm_in_kernel, logits, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return _recurrent((q, k, v, gk if g is None else g, _or_one(beta, v)), *rest, **options)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the delta rule of DeltaNet over sequences, as `fla.ops.delta_rule.chunk_delta_rule` does.

    The arguments and the results are as in `chunk_kda`, without a gate; states are [N, H, K, V]. float32 is computed
    too, which the original refuses.

    Raises:
        TypeError: an argument is unknown. Other errors are as in `gla_core.chunk_delta`.
    """
    no_more("chunk_delta_rule", kwargs)
    rest = (scale, initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu)
    return _call(over_sequences, _chunk_delta, (q, k, v, None, beta), *rest, **_options(use_qk_l2norm_in_kernel))


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_delta_rule`, as `fla.ops.delta_rule.fused_recurrent_delta_rule` does; beta is 1 by default.

    Raises:
        NotImplementedError: beta has a number for each value. Other errors are as in `gla_core.chunk_delta`.
    """
    _refuse("fused_recurrent_delta_rule", beta=beta)
    rest = (scale, initial_state, output_final_state, False, cu_seqlens)
    return _recurrent((q, k, v, None, _or_one(beta, v)), *rest, **_options(use_qk_l2norm_in_kernel))


def left_out(arguments: Mapping[str, Any]) -> str | None:
    """Returns what a call of a function above asks for that is not computed here; None if all of it is computed."""
    if arguments.get("gv") is not None:
        return "gates of values (gv)"
    if arguments.get("gk") is not None and arguments.get("g") is not None:
        return "a gate for each key (gk) beside one for each head (g)"
    if getattr(arguments.get("beta"), "ndim", 3) == 4:
        return "a beta for each value"
    if arguments.get("cp_context") is not None:
        return "context parallelism (cp_context)"
    return "states inside sequences" if arguments.get("return_intermediate_states") else None


def _refuse(function: str, **arguments: Any) -> None:
    what = left_out(arguments)
    if what is not None:
        raise NotImplementedError(f"{what}: not computed here; call flash-linear-attention's own {function}")


def _recurrent(
    tokens: tuple[Any, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_delta`, and as a decoding step if there is one token and no gradient."""
    q, *others = tokens
    rest = (scale, initial_state, output_final_state, state_v_first)
    if is_one_token(q, cu_seqlens, *others, initial_state, *(options["gate"] or ())):
        return _call(one_token, _recurrent_delta_step, tokens, *rest, **options)
    return _call(over_sequences, _chunk_delta, tokens, *rest, cu_seqlens, **options)


def _call(
    function: Callable[..., tuple], op: Callable[..., tuple], tokens: tuple[Any, ...], *rest: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `over_sequences` or `one_token` with tokens whose dtypes may differ; o then has that of v."""
    v, alike = tokens[2], _alike(*tokens)
    o, state = function(op, alike, *rest, **options)
    return o if alike[2] is v else o.to(v.dtype), state


def _alike(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor) -> tuple[Any, ...]:
    """Returns the tokens in dtypes that the ops take together; the original functions convert each by itself."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return q, k, v, *(x if x is None or x.dtype == dtype else x.to(wide(dtype)) for x in (g, beta))


def _gate(
    use_gate: bool | None, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None = None
) -> tuple | None:
    """Returns how log gates are computed from logits, as the argument `gate` of `chunk_delta`."""
    if not use_gate:
        return None
    if A_log is not None:
        A_log = A_log.flatten()
    elif bound is None:
        raise ValueError("use_gate_in_kernel is set and A_log is None; expected a tensor [Hv]")
    return ("softplus", A_log, dt_bias) if bound is None else ("bounded", A_log, dt_bias, bound)


def _key_gate(
    use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, v: Tensor
) -> tuple | None:
    """Returns `_gate` for gates per key, whose dt_bias is [Hv * K]."""
    if use_gate and dt_bias is not None:
        dt_bias = dt_bias.reshape(v.shape[2], -1)
    return _gate(use_gate, A_log, dt_bias, bound)


def _options(
    use_qk_l2norm: bool, gate: tuple | None = None, use_beta_sigmoid: bool = False, allow_neg_eigval: bool = False
) -> dict[str, Any]:
    """Returns the options of `chunk_delta` and `recurrent_delta_step`."""
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval is set; expected use_beta_sigmoid_in_kernel too, or betas up to 2 without it"
        )
    beta_limit = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else None
    return {"normalize": 1e-6 if use_qk_l2norm else None, "gate": gate, "beta_limit": beta_limit}


def _or_one(beta: Tensor | None, v: Tensor) -> Tensor:
    return v.new_ones(v.shape[:3]) if beta is None else beta
