"""The retention layer against its recurrence in float64, one token at a time, with the rotation as complex numbers."""

import io

import pytest
import torch
import torch.nn.functional as F

import gla_core as gla
from gla_core.nn import GLAState, Retention
from gla_core.nn.rotary import rotated

LAYERS = {
    "plain": {"num_heads": 2},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "expand_v": 1.0, "feature_map": "sqrelu", "gate_fn": "gelu"},
    "no_gate": {"num_heads": 1, "use_output_gate": False, "norm_eps": 0.1},
    "conv": {"num_heads": 2, "use_short_conv": True, "conv_size": 2, "conv_bias": True},
}


@pytest.fixture(params=LAYERS)
def options(request):
    return LAYERS[request.param]


def make(dtype=torch.float64, **options):
    """Returns a small layer; every parameter is random."""
    layer = Retention(16, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def turned(x, first):
    """Rotates x [B, T, heads, K] at positions first, first + 1, ..: pairs of channels are complex numbers."""
    half = x.shape[-1] // 2
    frequencies = 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (first + torch.arange(x.shape[1]))[:, None] * frequencies
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([z.real, z.imag], -1)


def convolved(x, p, name):
    """Returns the output of a convolution of width 2, and silu; x itself without convolutions."""
    if f"{name}_conv1d.weight" not in p:
        return x
    weight = p[f"{name}_conv1d.weight"]
    return F.silu(weight[:, 0, 0] * F.pad(x, (0, 0, 1, 0))[:, :-1] + weight[:, 0, 1] * x + p[f"{name}_conv1d.bias"])


def evaluate(layer, options, x, first=0):
    """Returns y for x [B, T, 16] whose first token has the position `first`, from the parameters by their names."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    heads, kv_heads = options["num_heads"], options.get("num_kv_heads", options["num_heads"])
    q, k, v = (
        convolved(x.double() @ p[f"{name}_proj.weight"].T, p, name).unflatten(-1, (n, -1))
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if "feature_map" in options:
        q, k = F.relu(q) ** 2, F.relu(k) ** 2
    q, k = turned(q, first) * q.shape[-1] ** -0.5, turned(k, first)
    rows, S = [], x.new_zeros(x.shape[0], heads, q.shape[-1], v.shape[-1], dtype=torch.float64)
    for t in range(x.shape[1]):
        tokens = []
        for h in range(heads):
            of = h * kv_heads // heads
            after = (1 - 2.0 ** (-5 - h)) * S[:, h] + k[:, t, of, :, None] * v[:, t, of, None]
            tokens.append(after)
        S = torch.stack(tokens, 1)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    o = torch.stack(rows, 1)
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + options.get("norm_eps", 1e-5))
    (norm,) = (p[name] for name in p if "norm" in name)
    o = (o * norm).flatten(-2)
    if options.get("use_output_gate", True):
        gate = x.double() @ p["g_proj.weight"].T
        o = o * (F.gelu(gate, approximate="tanh") if "gate_fn" in options else F.silu(gate))
    return o @ p["o_proj.weight"].T


@pytest.mark.parametrize("T", [1, 40])
def test_values_and_gradients(T, options):
    layer, x = make(**options), torch.randn(2, T, 16, dtype=torch.float64, requires_grad=True)
    y, state = layer(x)
    assert state is None
    expected = evaluate(layer, options, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    actual = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, wanted, dy), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions_in_half_precision(dtype):
    """In bfloat16 the number 5001 would be rounded to 4992."""
    layer, x = make(dtype, **LAYERS["plain"]), torch.randn(2, 9, 16).to(dtype)
    start = layer.initial_state(2)._replace(position=torch.full((2,), 5001))
    y, state = layer(x[:, :8], start, output_final_state=True)
    last, state = layer.step(x[:, 8], state)
    assert (y.dtype, state.recurrent.dtype, state.position.dtype) == (dtype, torch.float32, torch.int64)
    assert state.position.tolist() == [5010, 5010]
    expected = evaluate(layer, LAYERS["plain"], x, 5001)
    error = (torch.cat([y, last[:, None]], 1) - expected).norm() / expected.norm()
    assert error < (0.02 if dtype == torch.bfloat16 else 1e-3)


def test_the_rotation_depends_on_differences_of_positions():
    q, k = torch.randn(2, 1, 6, 1, 8, dtype=torch.float64)
    near, far = (rotated(q, k, torch.arange(6)[None] + first, 100.0) for first in (0, 1000))
    scores = [torch.einsum("bihk,bjhk->bij", *pair) for pair in (near, far)]
    torch.testing.assert_close(*scores)
    assert (near[0] - far[0]).abs().max() > 0.1
    pair = (q[..., :4].clone().requires_grad_(), k[..., :4].clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda q, k: rotated(q, k, torch.arange(6)[None], 100.0), pair)


def test_gates_of_many_heads():
    _, _, _, g = make(num_heads=8).op_inputs(torch.randn(1, 1, 16, dtype=torch.float64), lambda *made: made)
    torch.testing.assert_close(g.exp(), 1 - 2.0 ** -torch.arange(5, 13, dtype=torch.float64))


def test_parameters_have_the_names_of_flash_linear_attention():
    shapes = {name: list(x.shape) for name, x in make(num_heads=4, num_kv_heads=2).state_dict().items()}
    assert shapes == {
        "q_proj.weight": [16, 16],
        "k_proj.weight": [8, 16],
        "v_proj.weight": [16, 16],
        "g_proj.weight": [32, 16],
        "g_norm_swish_gate.weight": [8],
        "o_proj.weight": [16, 32],
    }
    more = make(num_heads=4, use_short_conv=True, conv_bias=True, fuse_norm=False, mode="parallel").state_dict().keys()
    convolutions = {f"{x}_conv1d.{kind}" for x in "qkv" for kind in ("weight", "bias")}
    assert more - shapes.keys() == {*convolutions, "g_norm.weight"}


def test_default_sizes():
    with torch.device("meta"):
        layer = Retention()
    assert layer.state_shape == (8, 128, 256)
    assert layer.initial_state(2).position.device.type == "meta"


def test_a_state_is_saved_and_loaded():
    _, state = make(**LAYERS["conv"])(torch.randn(2, 3, 16, dtype=torch.float64), output_final_state=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, GLAState)
    torch.testing.assert_close(tuple(loaded), tuple(state))


def test_what_is_refused():
    layer, x = make(num_heads=2), torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expand_k / num_heads is 5; expected an even number"):
        Retention(10, num_heads=2)
    state = layer.initial_state(1)
    with pytest.raises(ValueError, match=r"state\.position is None; expected integers \[N\]"):
        layer(x, state._replace(position=None))
    with pytest.raises(ValueError, match=r"state\.position has shape \[2\]; expected \[N\] with N=1"):
        layer.step(x[:, 0], state._replace(position=torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(TypeError, match=r"state\.position is float32; expected int32 or int64"):
        layer.step(x[:, 0], state._replace(position=torch.zeros(1)))
    other = gla.nn.GatedLinearAttention(16, 1.0, 2.0, 2).double()
    with pytest.raises(ValueError, match=r"state\.position is given; expected None"):
        other(x, state)


def test_shards_are_refused():
    layer, x = make(num_heads=4), torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="the layer has a rotary embedding; expected neither"):
        layer(x, shard=object())
