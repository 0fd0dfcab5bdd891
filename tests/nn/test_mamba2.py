"""The Mamba-2 layer against its recurrence in float64, one token at a time."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from gla_core.nn import Mamba2, mamba2
from gla_core.nn.rms_norm import RMSNormGated

LAYERS = {
    "plain": {"d_state": 3, "headdim": 8},
    "grouped": {"d_state": 2, "headdim": 4, "ngroups": 2, "D_has_hdim": True, "d_conv": 2, "conv_bias": False},
    "norm_first": {"d_state": 3, "headdim": 16, "ngroups": 2, "norm_before_gate": True, "bias": True, "norm_eps": 0.1},
    "no_norm": {"d_state": 3, "headdim": 8, "rmsnorm": False, "expand": 1, "dt_limit": (0.3, 1.5)},
    "gate_alone": {"d_state": 3, "headdim": 8, "rmsnorm": False, "D_has_hdim": True},
}


@pytest.fixture(params=LAYERS)
def options(request):
    return LAYERS[request.param]


def make(dtype=torch.float64, **options):
    """Returns a small layer; every parameter is random."""
    layer = Mamba2(16, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def evaluate(layer, options, x):
    """Returns y for x [B, T, 16], and the state after it, from the parameters by their names in mamba_ssm."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    groups, N, P, W = options.get("ngroups", 1), options["d_state"], options["headdim"], options.get("d_conv", 4)
    inner = 16 * options.get("expand", 2)
    heads = inner // P
    zxbcdt = x.double() @ p["in_proj.weight"].T + p.get("in_proj.bias", 0)
    z, xBC, dt = zxbcdt.split([inner, inner + 2 * groups * N, heads], -1)
    padded = F.pad(xBC, (0, 0, W - 1, 0))
    xBC = sum(p["conv1d.weight"][:, 0, i] * padded[:, i : i + x.shape[1]] for i in range(W))
    u, B, C = F.silu(xBC + p.get("conv1d.bias", 0)).split([inner, groups * N, groups * N], -1)
    u = u.unflatten(-1, (heads, P))
    B, C = (y.unflatten(-1, (groups, N)).repeat_interleave(heads // groups, 2) for y in (B, C))
    dt = torch.log(1 + torch.exp(dt + p["dt_bias"])).clamp(*options.get("dt_limit", (0, torch.inf)))
    D = p["D"].view(heads, -1)
    S, rows = x.new_zeros(x.shape[0], heads, N, P, dtype=torch.float64), []
    for t in range(x.shape[1]):
        decay = torch.exp(-dt[:, t] * p["A_log"].exp())[..., None, None]
        S = decay * S + dt[:, t, :, None, None] * B[:, t, :, :, None] * u[:, t, :, None]
        rows.append((torch.einsum("bhn,bhnp->bhp", C[:, t], S) + D * u[:, t]).flatten(1))
    y, gate = torch.stack(rows, 1), F.silu(z)
    if options.get("rmsnorm", True):
        y = y if options.get("norm_before_gate") else y * gate
        y = y.unflatten(-1, (groups, -1))
        y = y / torch.sqrt((y**2).mean(-1, keepdim=True) + options.get("norm_eps", 1e-5))
        y = y.flatten(-2) * p["norm.weight"] * (gate if options.get("norm_before_gate") else 1)
    else:
        y = y * gate
    return y @ p["out_proj.weight"].T + p.get("out_proj.bias", 0), S


@pytest.mark.parametrize("T", [1, 40])
def test_values_and_gradients(T, options):
    layer, x = make(**options), torch.randn(2, T, 16, dtype=torch.float64, requires_grad=True)
    y, state = layer(x, output_final_state=True)
    expected, S = evaluate(layer, options, x)
    torch.testing.assert_close((y, state.recurrent), (expected, S), rtol=1e-10, atol=1e-10)
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    gradients = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, wanted, dy), rtol=1e-9, atol=1e-9)
    for parameter, gradient in zip(layer.parameters(), gradients[1:], strict=True):
        assert gradient.shape == parameter.shape
        assert T == 1 or gradient.any()  # one token forgets nothing, so that A_log has no influence


@pytest.mark.parametrize("sizes", [{}, {"rmsnorm": False}, {"D_has_hdim": True}, {"dt_limit": (0.3, 1.5)}], ids=str)
def test_without_gradients_the_ops_compute_all_between_convolution_and_norm(sizes, monkeypatch):
    options = {"d_state": 3, "headdim": 8} | sizes
    layer, x, passed = make(**options), torch.randn(2, 7, 16, dtype=torch.float64), []
    for name in ("chunk_ssd", "recurrent_ssd_step"):
        function = getattr(mamba2, name)

        def call(*args, function=function, **kwargs):
            x = inspect.signature(function).bind(*args, **kwargs).arguments
            passed.append({n for n in ("D", "dt_bias", "z") if x.get(n) is not None})
            return function(*args, **kwargs)

        monkeypatch.setattr(mamba2, name, call)
    with torch.no_grad():
        y, state = layer(x[:, :6], output_final_state=True)
        last, state = layer.step(x[:, 6], state)
    expected, S = evaluate(layer, options, x)
    torch.testing.assert_close(torch.cat([y, last[:, None]], 1), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.recurrent, S, rtol=1e-10, atol=1e-10)
    in_op = {"D"} | ({"z"} if "rmsnorm" in sizes else set()) | (set() if "dt_limit" in sizes else {"dt_bias"})
    assert passed == [in_op, in_op - {"D"} if "D_has_hdim" in sizes else in_op]


def test_a_step_under_a_transform_of_torch_func():
    layer, x = make(**LAYERS["plain"]), torch.randn(3, 2, 16, dtype=torch.float64)
    state = layer.initial_state(2)
    together = torch.vmap(lambda y: layer.step(y, state)[0])(x)
    torch.testing.assert_close(together, torch.stack([layer.step(y, state)[0] for y in x]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precision(dtype, tolerance, options):
    layer, x = make(dtype, **options), torch.randn(2, 40, 16).to(dtype)
    y, state = layer(x[:, :39], output_final_state=True)
    last, state = layer.step(x[:, 39], state)
    assert (y.dtype, last.dtype, state.recurrent.dtype) == (dtype, dtype, torch.float32)
    expected, _ = evaluate(layer, options, x)
    assert (torch.cat([y, last[:, None]], 1) - expected).norm() < tolerance * expected.norm()


def test_autocast():
    layer, x = make(torch.float32, **LAYERS["plain"]), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16
    assert (y - layer(x)[0]).norm() < 0.03 * y.norm()


def test_the_norm_of_groups_without_a_gate():
    norm, x = RMSNormGated(6, 0.0, groups=2), torch.randn(3, 6)
    parts = torch.cat([F.normalize(x[:, :3], dim=1), F.normalize(x[:, 3:], dim=1)], 1) * 3**0.5
    torch.testing.assert_close(norm(x), parts)


def test_parameters_have_the_names_of_mamba_ssm():
    layer = make(d_state=4, headdim=8, ngroups=2, bias=True)
    assert {name: list(x.shape) for name, x in layer.state_dict().items()} == {
        "dt_bias": [4],
        "A_log": [4],
        "D": [4],
        "in_proj.weight": [84, 16],
        "in_proj.bias": [84],
        "conv1d.weight": [48, 1, 4],
        "conv1d.bias": [48],
        "norm.weight": [32],
        "out_proj.weight": [16, 32],
        "out_proj.bias": [16],
    }
    fewer = make(rmsnorm=False, conv_bias=False, headdim=8, D_has_hdim=True, chunk_size=64, use_mem_eff_path=False)
    more = {"in_proj.bias", "out_proj.bias", "conv1d.bias", "norm.weight"}
    assert layer.state_dict().keys() - fewer.state_dict().keys() == more
    assert fewer.D.shape == (32,)


def test_initial_values():
    options = {"headdim": 2, "expand": 16, "dt_min": 0.01, "dt_init_floor": 0.05, "A_init_range": (2, 3)}
    torch.manual_seed(1)
    layer = Mamba2(16, **options, conv_init=0.01)
    dt, A = F.softplus(layer.dt_bias), layer.A_log.exp()
    assert 0.04999 < dt.min() < 0.0501
    assert 0.09 < dt.max() < 0.1001
    assert 1.9999 < A.min() < 2.1
    assert 2.9 < A.max() < 3.0001
    assert layer.D.eq(1).all()
    assert 0.009 < layer.conv1d.weight.abs().max() <= 0.01
    empty = Mamba2(16, **options, conv_init=0.01, device="meta").to_empty(device="cpu")
    torch.manual_seed(1)
    empty.reset_parameters()
    torch.testing.assert_close(dict(empty.named_parameters()), dict(layer.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(
    "rows", [{}, {"attention_mask": torch.tensor([[0, 1, 0, 1, 1]])}, {"cu_seqlens": torch.tensor([1, 3, 4])}]
)
def test_a_residual(options, rows):
    """It is added to every row, also where y is 0 because there is no token."""
    layer, (x, residual) = make(**options), torch.randn(2, 1, 5, 16, dtype=torch.float64)
    expected = residual + layer(x, **rows)[0]
    torch.testing.assert_close(layer(x, **rows, residual=residual)[0], expected)
    state, slots = layer.initial_state(4), torch.tensor([3, -1, 0, 4, 1])
    expected = residual[0] + layer.step(x[0], state, slots=slots)[0]
    y, _ = layer.step(x[0], state, slots=slots, residual=residual[0].clone())
    torch.testing.assert_close(y, expected)


def test_over_ranks():
    """With one rank, the layer reads its shard as it reads the tokens; its heads cannot be spread over ranks."""
    import torch.distributed as dist  # takes half a second, and only this test needs it

    from gla_core import distributed

    layer, x = make(**LAYERS["grouped"]), torch.randn(1, 12, 16, dtype=torch.float64)
    offsets = torch.tensor([0, 5, 9])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        y, _ = layer(x, shard=distributed.shard(12, offsets))
        more, _ = layer(x, shard=distributed.shard(12, offsets), residual=x)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(y, layer(x, cu_seqlens=offsets)[0])
    assert not y[:, 9:].any()
    torch.testing.assert_close(more, x + y)
    with pytest.raises(TypeError, match=r"layer is Mamba2; expected .* keep other layers whole on every rank"):
        distributed.tensor_parallel_plan(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headdim": 5}, "expand . d_model is 32; expected a multiple of headdim = 5"),
        ({"headdim": 8, "ngroups": 3}, "ngroups is 3; expected a divisor of the number of heads, 4"),
        ({"headdim": 8, "d_state": 0}, "d_state is 0; expected a whole number, at least 1"),
        ({"headdim": 8, "dt_limit": (-1.0, 1.0)}, r"dt_limit is \(-1.0, 1.0\); expected two numbers, at least 0"),
        ({"headdim": 8, "A_init_range": (0, 1)}, r"A_init_range is \(0, 1\); expected two finite numbers"),
        ({"headdim": 8, "A_init_range": (1, math.inf)}, r"A_init_range is \(1, inf\); expected two finite numbers"),
        ({"headdim": 8, "dt_min": 0.2}, r"\(dt_min, dt_max\) is \(0.2, 0.1\); expected two finite numbers above 0"),
        ({"headdim": 8, "backend": "a b"}, "cannot read 'a b'"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba2(16, **options)


def test_a_state_of_another_layer():
    layer, x = make(**LAYERS["plain"]), torch.zeros(2, 16, dtype=torch.float64)
    state = layer.initial_state(2)
    with pytest.raises(ValueError, match=r"state\.conv has 0 tensors; expected 1"):
        layer.step(x, state._replace(conv=None))
    message = r"state\.conv\[0\] has shape \[2, 2, 38\]; .* with N=2, conv_size-1=3, width=38"
    with pytest.raises(ValueError, match=message):
        layer.step(x, state._replace(conv=(state.conv[0][:, 1:],)))
