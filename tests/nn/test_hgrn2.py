"""The HGRN2 layer against a direct evaluation in float64, one token at a time."""

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance import oracle
from gla_core.nn import HGRN2

LAYERS = {
    "plain": {"expand_ratio": 4},
    "heads": {"num_heads": 2},
    "both": {"num_heads": 2, "expand_ratio": 3},
    "conv": {"expand_ratio": 4, "use_short_conv": True, "conv_bias": True, "conv_size": 3},
    "not_affine": {"expand_ratio": 8, "elementwise_affine": False, "norm_eps": 0.1},
}
BOUND = torch.tensor([0.0, 0.3, 0.9, 0.999], dtype=torch.float64)


@pytest.fixture(params=LAYERS)
def options(request):
    return LAYERS[request.param]


def make(options, dtype=torch.float64):
    """Returns a small layer; every parameter is random, so that none can be ignored unnoticed."""
    torch.manual_seed(0)
    layer = HGRN2(16, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


def convolved(x, p, name):
    weight, bias = p.get(f"{name}_conv1d.weight"), p.get(f"{name}_conv1d.bias")
    if weight is None:
        return x
    W = weight.shape[-1]
    padded = F.pad(x, (0, 0, W - 1, 0))
    return sum(weight[:, 0, i] * padded[:, i : i + x.shape[1]] for i in range(W)) + bias


def evaluate(layer, options, x, bound=0.0):
    """Returns the layer's output for x [B, T, hidden], from its parameters by their names in flash-linear-attention."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    q, f, v = (convolved(x @ p[f"{n}_proj.weight"].T, p, n) for n in "qfi")
    alpha = bound + (1 - bound) / (1 + torch.exp(-f))
    heads = options.get("num_heads") or 16 // options["expand_ratio"]
    q, k, g, v = (t.unflatten(-1, (heads, -1)) for t in (q / (1 + torch.exp(-q)), 1 - alpha, alpha.log(), v))
    o = oracle.chunk_gla(q, k, v, g)[0].flatten(-2)
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + options.get("norm_eps", 1e-5))
    return (o * p["g_norm.weight"] if "g_norm.weight" in p else o) @ p["o_proj.weight"].T


@pytest.mark.parametrize("T", [1, 2, 70])
def test_values_and_gradients(T, options):
    layer = make(options)
    x = torch.randn(2, T, 16, dtype=torch.float64, requires_grad=True)
    y, state = layer(x)
    assert state is None
    expected = evaluate(layer, options, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    actual = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, wanted, dy), rtol=1e-8, atol=1e-8)


def test_a_lower_bound_of_the_gate(assert_same_state):
    options = LAYERS["plain"]
    layer, x = make(options), torch.randn(2, 20, 16, dtype=torch.float64)
    bound = BOUND.repeat(4).requires_grad_()
    y, final = layer(x, output_final_state=True, lower_bound=bound)
    expected = evaluate(layer, options, x, bound)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    inside, dy = bound > 0, torch.randn_like(y)
    actual, reference = (torch.autograd.grad(z, bound, dy, retain_graph=True)[0] for z in (y, expected))
    torch.testing.assert_close(actual[inside], reference[inside], rtol=1e-7, atol=1e-7)
    assert actual.isfinite().all()
    _, state = layer(x[:, :-1], output_final_state=True, lower_bound=bound)
    y1, state = layer.step(x[:, -1], state, lower_bound=bound)
    torch.testing.assert_close(y1, y[:, -1].detach())
    assert_same_state(state, final)


@torch.no_grad()
def test_a_step_from_projections(options, assert_same_state):
    layer, x, bound = make(options), torch.randn(2, 16, dtype=torch.float64), torch.rand((), dtype=torch.float64)
    _, state = layer(torch.randn(2, 5, 16, dtype=torch.float64), output_final_state=True)
    residual, indices = torch.randn(2, 16, dtype=torch.float64), torch.tensor([1, -1])
    args = {"slots": indices, "lower_bound": bound}
    expected, wanted = layer.step(x, state, **args)
    made = [projection(x)[:, None] for projection in (layer.q_proj, layer.f_proj, layer.i_proj)]
    o, after = layer.step_from_projections(x, made, state, **args)
    torch.testing.assert_close(layer.o_proj(layer.g_norm(o)), expected, rtol=1e-10, atol=1e-10)
    assert_same_state(after, wanted)
    actual, _ = layer.step(x, state, residual=residual.clone(), **args)
    torch.testing.assert_close(actual, residual + expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_residual(options, padded):
    layer, (x, residual) = make(options), torch.randn(2, 2, 5, 16, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]) if padded else None
    expected = residual + layer(x, attention_mask=mask)[0]
    actual, _ = layer(x, attention_mask=mask, residual=residual.clone())
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_gate_is_float32_in_bfloat16():
    layer = make(LAYERS["plain"], torch.bfloat16)
    with torch.no_grad():
        layer.f_proj.weight.fill_(0.5)
    q, k, v, g = layer.op_inputs(torch.ones(1, 3, 16, dtype=torch.bfloat16), lambda *projections: projections)
    assert (q.dtype, k.dtype, v.dtype) == (torch.bfloat16,) * 3
    torch.testing.assert_close(g, torch.full((1, 3, 4, 4), -3.3540637289566e-4), rtol=1e-5, atol=0)
    torch.testing.assert_close(k.float(), torch.full((1, 3, 4, 4), 3.3535013046648e-4), rtol=4e-3, atol=0)


def test_in_training():
    layer = make({"expand_ratio": 8}, torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, target = torch.randn(4, 30, 16), torch.randn(4, 30, 16)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(layer(x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3, "expand_ratio": 4}, "hidden_size is 16; expected a multiple of num_heads = 3"),
        ({"expand_ratio": 17}, "num_heads is 0; expected a whole number, at least 1"),
        ({"expand_ratio": 4, "mode": "chunks"}, "unknown mode 'chunks'; did you mean 'chunk'?"),
        ({"expand_ratio": 4, "backend": "a b"}, "cannot read 'a b'"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        HGRN2(16, **options)


def test_parameters_are_named_as_in_flash_linear_attention():
    names = [name for name, _ in HGRN2(16, expand_ratio=4, use_short_conv=True, conv_bias=True).named_parameters()]
    convolutions = [f"{n}_conv1d.{p}" for n in "qfi" for p in ("weight", "bias")]
    assert names == [*(f"{n}_proj.weight" for n in "qfi"), *convolutions, "g_norm.weight", "o_proj.weight"]
    assert HGRN2(256).state_shape == (2, 128, 128)
