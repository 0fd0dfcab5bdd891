"""Layers with delta rules beside flash-linear-attention's own, computed by its naive functions: `make test-fla`."""

import functools
import importlib
import itertools

import pytest
import torch

from gla_core.compat.fla import accelerate, state_from_fla
from gla_core.nn import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from tests.compat.test_layers_of_others import CLOSE, check_values_and_gradients, randomize

LAYERS = {
    "kda": (KimiDeltaAttention, "kda", {"head_dim": 8, "num_heads": 2}),
    "kda_groups": (
        KimiDeltaAttention,
        "kda",
        {"head_dim": 6, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5, "conv_bias": True, "conv_size": 3}
        | {"allow_neg_eigval": True, "norm_eps": 0.1},
    ),
    "kda_bounded": (
        KimiDeltaAttention,
        "kda",
        {"head_dim": 8, "num_heads": 2, "use_short_conv": False, "safe_gate": True, "lower_bound": -5.0},
    ),
    "gdn": (GatedDeltaNet, "gated_deltanet", {"head_dim": 8, "num_heads": 2}),
    "gdn_groups": (
        GatedDeltaNet,
        "gated_deltanet",
        {"head_dim": 6, "num_heads": 2, "num_v_heads": 6, "expand_v": 1.5, "allow_neg_eigval": True}
        | {"output_gate_activation": "sigmoid", "use_short_conv": False},
    ),
    "gdn_no_gate": (GatedDeltaNet, "gated_deltanet", {"head_dim": 8, "num_heads": 1, "use_gate": False}),
    "delta": (DeltaNet, "delta_net", {"num_heads": 2}),
    "delta_gate": (
        DeltaNet,
        "delta_net",
        {"num_heads": 2, "expand_k": 0.5, "expand_v": 2.0, "use_gate": True, "qk_activation": "elu", "qk_norm": "sum"}
        | {"allow_neg_eigval": True, "conv_bias": True},
    ),
    "delta_no_beta": (
        DeltaNet,
        "delta_net",
        {"num_heads": 4, "use_beta": False, "use_short_conv": False, "qk_activation": "relu"},
    ),
}
FUNCTIONS = {
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "gated_deltanet": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "delta_net": ("chunk_delta_rule", "fused_recurrent_delta_rule"),
}


def gates(module, g, A_log, dt_bias, lower_bound):
    if module == "kda":
        from fla.ops.kda import gate

        if lower_bound is not None:
            return gate.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
        return gate.naive_kda_gate(g, A_log, dt_bias)
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate

    return naive_gdn_gate(g, A_log, dt_bias)


def rule(module, q, k, v, g, beta, state):
    """Computes a delta rule by FLA's naive function for it; state and result are [N, Hv, K, V]."""
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.naive import naive_recurrent_kda

    if module == "kda":
        return naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    if module == "gated_deltanet":
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=state, output_final_state=True)
    o, state = delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), state)
    return o.transpose(1, 2), state


def naive(
    module,
    q,
    k,
    v,
    beta,
    g=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    use_gate_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    safe_gate=False,
    lower_bound=None,
    A_log=None,
    dt_bias=None,
):
    """Computes what FLA's functions of these arguments compute."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if use_gate_in_kernel:
        g = gates(module, g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    tokens = (q, k, v, beta) if g is None else (q, k, v, g, beta)
    if cu_seqlens is None:
        parts, states = [tokens], [initial_state]
    else:
        parts = [tuple(x[:, a:b] for x in tokens) for a, b in itertools.pairwise(cu_seqlens.tolist())]
        states = [None] * len(parts) if initial_state is None else initial_state.split(1)
    each = [
        rule(module, *part[:3], part[3] if g is not None else None, part[-1], state)
        for part, state in zip(parts, states, strict=True)
    ]
    state = torch.cat([state for _, state in each])
    state = state.mT if state_v_first else state
    return torch.cat([o for o, _ in each], 1), state if output_final_state else None


@pytest.fixture(params=LAYERS)
def layers(request, monkeypatch):
    """Returns FLA's layer, and ours with the same parameters."""
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention 0.6.0: make test-fla")
    kind, module, options = LAYERS[request.param]
    home = importlib.import_module(f"fla.layers.{module}")
    with accelerate(cpu=True):
        for name in FUNCTIONS[module]:
            monkeypatch.setattr(home, name, functools.partial(naive, module))
        theirs = randomize(getattr(home, kind.__name__)(hidden_size=32, layer_idx=0, **options))
        ours = kind(32, **options)
        ours.load_state_dict(theirs.state_dict())
        yield theirs, ours


@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
def test_values_and_gradients(layers):
    theirs, ours = layers
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    check_values_and_gradients(theirs, ours)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
def test_packed(layers):
    x, offsets = torch.randn(1, 40, 32), torch.tensor([0, 9, 40])
    theirs, ours = (layer(x, cu_seqlens=offsets)[0] for layer in layers)
    torch.testing.assert_close(theirs, ours, **CLOSE)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
@pytest.mark.parametrize("padded", [False, True])
def test_decoding(layers, padded):
    """The layer can continue from the states of FLA's cache, with the values first in two of the three layers."""
    from fla.models.utils import Cache

    theirs, ours = (layer.eval() for layer in layers)
    x, mask = torch.randn(2, 30, 32), torch.ones(2, 30, dtype=torch.long)
    mask[0, :20] = 1 - int(padded)
    y, state = ours(x[:, :28], output_final_state=True, attention_mask=mask[:, :28])
    expected, _, cache = theirs(x[:, :28], mask[:, :28] if padded else None, Cache(), use_cache=True)
    torch.testing.assert_close(y, expected, **CLOSE)
    for t in (28, 29):
        taken = state_from_fla(cache[0])
        if isinstance(ours, DeltaNet):
            taken = taken._replace(recurrent=cache[0]["recurrent_state"].clone())
        torch.testing.assert_close(tuple(taken), tuple(state), **CLOSE)
        y, state = ours.step(x[:, t], taken)  # first, because FLA's layer overwrites its cache
        expected, _, cache = theirs(x[:, t : t + 1], mask[:, : t + 1] if padded else None, cache, use_cache=True)
        torch.testing.assert_close(y[:, None], expected, **CLOSE)
