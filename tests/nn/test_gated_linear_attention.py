"""The layer against a direct evaluation in float64: the convolution and the recurrence one token at a time."""

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance import oracle
from gla_core.dispatch.tensors import log_gates
from gla_core.nn import GatedLinearAttention


def evaluate(layer, options, x):
    """Returns the layer's output for x [B, T, hidden], from its parameters by their names in flash-linear-attention."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    heads = options["num_heads"]
    kv_heads = options.get("num_kv_heads", heads)
    x = x.double()
    q, k, v = (
        evaluate_convolution(x @ p[f"{n}_proj.weight"].T, p.get(f"{n}_conv1d.weight"), p.get(f"{n}_conv1d.bias"))
        for n in "qkv"
    )
    g = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    g = -torch.log(1 + torch.exp(-g)) / options.get("gate_logit_normalizer", 16)
    if "clamp_min" in options:
        g = torch.maximum(g, torch.tensor(options["clamp_min"], dtype=g.dtype))
    numbers = (heads, kv_heads, kv_heads, kv_heads)
    q, k, v, g = (t.unflatten(-1, (n, t.shape[-1] // n)) for t, n in zip((q, k, v, g), numbers, strict=True))
    if options.get("feature_map"):
        q, k = (F.relu(t) ** 2 for t in (q, k))
    o, _ = oracle.chunk_gla(q, k, v, g)
    gated = options.get("use_output_gate", True)
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + options.get("norm_eps", 1e-5))
    if options.get("elementwise_affine", True):
        fused = gated and options.get("fuse_norm", True) and "gate_fn" not in options
        o = o * p["g_norm_swish_gate.weight" if fused else "g_norm.weight"]
    o = o.flatten(-2)
    if gated:
        gate = x @ p["g_proj.weight"].T
        o = o * (F.gelu(gate, approximate="tanh") if "gate_fn" in options else gate / (1 + torch.exp(-gate)))
    return o @ p["o_proj.weight"].T


def evaluate_convolution(x, weight, bias):
    """Computes silu(bias + sum over i of weight[:, 0, W-1-i] x[t-i]), one output and one input token at a time."""
    if weight is None:
        return x
    W = weight.shape[-1]
    rows = []
    for t in range(x.shape[1]):
        row = torch.zeros_like(x[:, t]) if bias is None else bias.expand_as(x[:, t])
        for i in range(min(W, t + 1)):
            row = row + weight[:, 0, W - 1 - i] * x[:, t - i]
        rows.append(F.silu(row))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("T", [1, 2, 70])
def test_values(name, T, options, make_layer):
    layer = make_layer(name)
    x = torch.randn(2, T, 16, dtype=torch.float64)
    y, state = layer(x)
    assert state is None
    torch.testing.assert_close(y, evaluate(layer, options, x), rtol=1e-10, atol=1e-10)


def test_clamp_min_bounds_the_gate(make_layer):
    layer = make_layer("other_gate")
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    bounded, _ = layer(x)
    layer.clamp_min = None
    free, _ = layer(x)
    assert (bounded - free).abs().max() > 0.01


def test_gradients(name, options, make_layer):
    layer = make_layer(name)
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 40, 16, dtype=torch.float64)
    wanted = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(layer(x)[0], list(wanted.values()), dy)
    expected = torch.autograd.grad(evaluate(layer, options, x), list(wanted.values()), dy)
    for parameter, grad, expected_grad in zip(wanted, grads, expected, strict=True):
        assert expected_grad.abs().max() > 1e-6, f"{parameter} has no influence"
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
def test_gradients_reach_the_state(name, make_layer):
    layer = make_layer(name)
    x = torch.randn(2, 11, 16, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(layer(x)[0][:, 5:].sum(), x)
    _, state = layer(x[:, :5], output_final_state=True)
    (in_two,) = torch.autograd.grad(layer(x[:, 5:], state)[0].sum(), x)
    assert in_two[:, 4].abs().max() > 1e-6
    torch.testing.assert_close(in_two, whole, rtol=1e-10, atol=1e-10)


def shapes(**options):
    layer = GatedLinearAttention(hidden_size=32, num_heads=4, gate_low_rank_dim=3, **options)
    return {name: list(value.shape) for name, value in layer.state_dict().items()}


def test_parameters():
    assert shapes() == {
        "q_proj.weight": [16, 32],
        "k_proj.weight": [16, 32],
        "v_proj.weight": [32, 32],
        "g_proj.weight": [32, 32],
        "gk_proj.0.weight": [3, 32],
        "gk_proj.1.weight": [16, 3],
        "gk_proj.1.bias": [16],
        "g_norm_swish_gate.weight": [8],
        "o_proj.weight": [32, 32],
    }


def test_parameters_of_every_option():
    assert shapes(num_kv_heads=2, expand_v=2, use_short_conv=True, conv_size=5, conv_bias=True) == {
        "q_proj.weight": [16, 32],
        "k_proj.weight": [8, 32],
        "v_proj.weight": [32, 32],
        "q_conv1d.weight": [16, 1, 5],
        "q_conv1d.bias": [16],
        "k_conv1d.weight": [8, 1, 5],
        "k_conv1d.bias": [8],
        "v_conv1d.weight": [32, 1, 5],
        "v_conv1d.bias": [32],
        "g_proj.weight": [64, 32],
        "gk_proj.0.weight": [3, 32],
        "gk_proj.1.weight": [8, 3],
        "gk_proj.1.bias": [8],
        "g_norm_swish_gate.weight": [16],
        "o_proj.weight": [32, 64],
    }


def test_parameters_without_output_gate():
    assert shapes(use_output_gate=False, use_short_conv=True) == {
        "q_proj.weight": [16, 32],
        "k_proj.weight": [16, 32],
        "v_proj.weight": [32, 32],
        "q_conv1d.weight": [16, 1, 4],
        "k_conv1d.weight": [16, 1, 4],
        "v_conv1d.weight": [32, 1, 4],
        "gk_proj.0.weight": [3, 32],
        "gk_proj.1.weight": [16, 3],
        "gk_proj.1.bias": [16],
        "g_norm.weight": [8],
        "o_proj.weight": [32, 32],
    }
    affine = shapes(use_output_gate=False)
    assert affine.keys() - shapes(use_output_gate=False, elementwise_affine=False).keys() == {"g_norm.weight"}


def test_default_sizes():
    with torch.device("meta"):
        layer = GatedLinearAttention()
    expected = {"q_proj": [512, 1024], "v_proj": [1024, 1024], "gk_proj.0": [16, 1024], "g_norm_swish_gate": [256]}
    assert {name: list(layer.get_submodule(name).weight.shape) for name in expected} == expected


def test_bfloat16(name, options, make_layer):
    layer = make_layer(name, torch.bfloat16)
    x = torch.randn(2, 70, 16, dtype=torch.bfloat16)
    expected = evaluate(layer, options, x)
    y, state = layer(x[:, :69], output_final_state=True)
    last, state = layer.step(x[:, 69], state)
    assert (y.dtype, last.dtype, state.recurrent.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    y = torch.cat([y, last[:, None]], dim=1)
    assert (y - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(("name", "normalizer"), [("plain", 16), ("other_gate", 0.5)])
def test_log_gates_near_0_in_bfloat16(name, normalizer, make_layer):
    """The op computes the gates of the first layer from logits; the second layer computes them itself."""
    layer = make_layer(name, torch.bfloat16)
    with torch.no_grad():
        layer.gk_proj[1].weight.zero_()
        layer.gk_proj[1].bias.fill_(8.0)
    g = layer.op_inputs(torch.randn(1, 3, 16, dtype=torch.bfloat16), lambda *projections: projections)[3]
    assert g.dtype == (torch.bfloat16 if name == "plain" else torch.float32)
    g = log_gates(g, layer.gate_normalizer, torch.float32)
    torch.testing.assert_close(g, torch.full_like(g, -3.3540637289566e-4 / normalizer), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_autocast(name, dtype, tolerance, device, options, make_layer):
    layer = make_layer(name, torch.float32).to(device)
    lengths = [12, 5]
    sequences = torch.randn(2, 24, 16).to(device)  # equal on every device
    pieces = [s.split([n, 7, 1, 16 - n]) for s, n in zip(sequences, lengths, strict=True)]  # packed, batched, a step
    packed, more, token = (torch.cat([piece[i] for piece in pieces]) for i in range(3))
    with torch.autocast(device, dtype):
        y, state = layer(packed[None], None, True, torch.tensor([0, *lengths]).cumsum(0).to(device))
        y_more, state = layer(more.view(2, 7, 16), state, True)
        y_token, after = layer.step(token, state)
    assert (y.dtype, y_more.dtype, y_token.dtype) == (dtype, dtype, dtype)
    assert (state.recurrent.dtype, after.recurrent.dtype) == (torch.float32, torch.float32)
    ys = torch.cat([torch.cat(parts) for parts in zip(y[0].split(lengths), y_more, y_token[:, None], strict=True)])
    each = zip(sequences, lengths, strict=True)
    expected = torch.cat([evaluate(layer, options, s[None, : n + 8])[0] for s, n in each])
    assert (ys - expected).norm() < tolerance * expected.norm()

    differentiable = torch.cat([torch.arange(n + 8) < n + 7 for n in lengths])  # every token except the steps
    dy = torch.randn(expected.shape).to(device)[differentiable]
    grads, expected_grads = (
        torch.autograd.grad(out[differentiable], list(layer.parameters()), dy.to(out.dtype)) for out in (ys, expected)
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - expected_grad).norm() < 2 * tolerance * expected_grad.norm()
