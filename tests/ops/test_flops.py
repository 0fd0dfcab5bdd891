"""PyTorch's counter counts the operations of the mathematics, on every backend and in every order of imports."""

import pytest
import torch

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs

B, T, H, G, K, V = 2, 10, 2, 3, 8, 16


def counted(function):
    from torch.utils.flop_counter import FlopCounterMode  # imported after gla_core, which registers the formulas

    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_chunk_gla(backend, device):
    x = gla_inputs(B=B, T=T, H=H, G=G, K=K, V=V)
    q, k, v, g = (y.to(device) for y in (x.q, x.k, x.v, x.g))
    product = 2 * B * T * K * V
    assert counted(lambda: gla.chunk_gla(q, k, v, g, backend=backend)) == product * (H * G + H)
    if device == "cpu":
        q.requires_grad_()
        both = counted(lambda: gla.chunk_gla(q, k, v, g)[0].sum().backward())
        assert both == product * (H * G + H + 2 * H * G + 3 * H)


def test_the_other_ops():
    x = gla_inputs(B=B, T=T, H=H, G=G, K=K, V=V, initial_state=True)
    token = [y[:, 0] for y in (x.q, x.k, x.v, x.g)]
    for inplace in (False, True):
        step = counted(lambda inplace=inplace: gla.recurrent_gla_step(*token, x.initial_state, inplace=inplace))
        assert step == 2 * B * (H * G + H) * K * V
    pool, slots = x.initial_state.clone(), torch.tensor([1])
    packed = [y[:1] for y in (x.q, x.k, x.v, x.g)]
    served = counted(lambda: gla.chunk_gla_pool(*packed, pool, torch.tensor([0, T]), slots))
    assert served == 2 * T * (H * G + H) * K * V
    few = [y[:, :3] for y in (x.q, x.k, x.v, x.g)]
    steps = counted(lambda: gla.recurrent_gla_steps(*few, pool, torch.arange(3 * B).reshape(B, 3)))
    assert steps == 2 * B * 3 * (H * G + H) * K * V
    rings = [y[:, :6].contiguous() for y in (x.k, x.v, x.g)]
    replay = counted(lambda: gla.recurrent_gla_replay(*few, pool, *rings, *(torch.arange(B) for _ in range(3))))
    assert replay == steps
    q = x.q.clone().requires_grad_()
    scores = 2 * B * H * G * T * T
    assert counted(lambda: gla.softmax_attention(x.q, x.k, x.v, causal=True)) == scores * (K + V)
    assert counted(lambda: gla.softmax_attention(q, x.k, x.v)[0].sum().backward()) == scores * (4 * K + 3 * V)
    assert counted(lambda: gla.online_softmax(x.q)) == 0


def test_a_layer_is_counted_with_its_projections():
    layer = gla.nn.GatedLinearAttention(hidden_size=32, num_heads=2)
    x = torch.randn(2, 5, 32)
    linear = sum(2 * 10 * p.numel() for name, p in layer.named_parameters() if p.ndim == 2)
    heads = 2 * 2 * 5 * (2 + 2) * layer.head_k_dim * layer.head_v_dim
    assert counted(lambda: layer(x)) == linear + heads
