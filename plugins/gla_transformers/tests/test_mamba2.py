"""Parts of a Mamba-2 layer in one kernel each: their values, the calls that they leave to PyTorch, and their number.

tests/compat/test_with_transformers.py has transformers' models that run in these kernels.
"""

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_transformers import causal_convolution, few_rows, gated, mamba2
from plugins.gla_transformers.tests.kernels import DEVICE, DTYPES, INTERPRETED, compiled, noted, runs

pytest.importorskip("triton")

from gla_transformers import causal_convolution_kernel, few_rows_kernel, gated_kernel, mamba2_kernel
from gla_transformers import causal_convolution_kernel as sequences
from gla_triton_runtime.architecture import Architecture, Gpu

EPS = 1e-5


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """A list to which every call of a kernel adds its name. On a CPU, kernels are interpreted."""
    recorded = []
    for dispatch, module, names in (
        (mamba2, mamba2_kernel, ("convolve_token",)),
        (causal_convolution, causal_convolution_kernel, ("convolve", "convolve_backward")),
        (gated, gated_kernel, ("normed", "normed_backward")),
    ):
        functions = noted(recorded, module, *names)
        monkeypatch.setattr(dispatch, "_kernels_of", lambda device, functions=functions: functions)
    products = noted(recorded, few_rows_kernel, "product")
    products.is_served = few_rows_kernel.is_served
    monkeypatch.setattr(few_rows, "kernel_of", lambda device: products)
    return recorded


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(actual, expected, dtype):
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= FORWARD[dtype]


@runs
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize(("batch", "channels", "width"), [(1, 5, 4), (3, 130, 3), (2, 300, 2)])
def test_convolution(batch, channels, width, activation, dtype, calls):
    """Several tokens, slices of a projection, one after the other."""
    state, weight, bias = rand(batch, channels, width, dtype=dtype), rand(channels, width, dtype=dtype), rand(channels)
    bias = None if activation == "swish" else bias.to(dtype)
    history = state.double()
    for _ in range(width + 1):
        x = rand(batch, 1, channels + 7, dtype=dtype)[..., 3 : 3 + channels].mT
        y = mamba2.convolve_token(x, state, weight, bias, activation)
        history = torch.cat([history[..., 1:], x.double()], -1)
        expected = (history * weight.double()).sum(-1, keepdim=True) + (0 if bias is None else bias.double()[:, None])
        check(y, F.silu(expected) if activation else expected, dtype)
        assert y.mT.is_contiguous()
        assert torch.equal(state.double(), history)
    assert calls == ["convolve_token"] * (width + 1)


def convolved(x, weight, bias, activation):
    """Returns the causal convolution of x [B, C, T] by PyTorch."""
    width = weight.shape[1]
    y = F.conv1d(x, weight[:, None], bias, padding=width - 1, groups=len(weight))[..., : x.shape[2]]
    return y if activation is None else F.silu(y)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("order", ["tokens", "channels"])
@pytest.mark.parametrize(("batch", "channels", "T", "width"), [(1, 5, 1, 4), (2, 70, 37, 3), (1, 64, 32, 4)])
def test_convolution_of_sequences(batch, channels, T, width, order, activation, dtype, calls):
    """Values and gradients. The memory of x is that of a slice of a projection, or has tokens contiguous."""
    x = rand(batch, T, channels + 7, dtype=dtype)[..., 3 : 3 + channels].mT
    x = (x if order == "channels" else x.contiguous()).requires_grad_()
    arguments = [x, rand(channels, width, dtype=dtype).requires_grad_(), rand(channels, dtype=dtype).requires_grad_()]
    for some in (arguments, arguments[:2]):
        exact = [y.detach().double().requires_grad_() for y in some]
        without = [None] * (3 - len(some))
        y, expected = mamba2.convolve_sequences(*some, *without, activation), convolved(*exact, *without, activation)
        dy = torch.randn_like(y)
        gradients = torch.autograd.grad(y, some, dy), torch.autograd.grad(expected, exact, dy.double())
        for a, b in zip((y, *gradients[0]), (expected, *gradients[1]), strict=True):
            check(a, b, dtype)
        assert y.mT.is_contiguous()
    assert calls == ["convolve", "convolve_backward"] * 2


@runs
@pytest.mark.parametrize(
    ("T", "width", "many"),
    [(3, 8, False), (32, 4, False), (33, 8, False), (39, 1, False), (31, 4, True), (128, 2, True), (131, 8, True)],
)
def test_convolution_of_runs(T, width, many, calls, monkeypatch):
    """Short and many tokens, which end within a run, with it, and behind the tile of a program.

    Channels end behind a tile, and dy has every second one of its memory.
    """
    monkeypatch.setattr(causal_convolution_kernel, "MANY", 0 if many else 2**22)
    x, weight, bias = (y.requires_grad_() for y in (rand(1, T, 129).mT, rand(129, width), rand(129)))
    dy = rand(1, T, 258).mT[:, ::2]
    y = mamba2.convolve_sequences(x, weight, bias, "silu")
    exact = [y.detach().double().requires_grad_() for y in (x, weight, bias)]
    expected = convolved(*exact, "silu")
    gradients = torch.autograd.grad(y, (x, weight, bias), dy), torch.autograd.grad(expected, exact, dy.double())
    for a, b in zip((y, *gradients[0]), (expected, *gradients[1]), strict=True):
        check(a, b, torch.float32)
    assert calls == ["convolve", "convolve_backward"]


@runs
@pytest.mark.parametrize("shape", [(0, 6, 9), (2, 6, 0)])
def test_no_tokens(shape, calls):
    x, weight = rand(*shape).requires_grad_(), rand(6, 4).requires_grad_()
    y = mamba2.convolve_sequences(x, weight, None, "silu")
    assert torch.autograd.grad(y.sum(), weight)[0].eq(0).all()


@runs
def test_convolutions_that_are_left_to_pytorch(calls):
    x, weight = rand(2, 6, 9), rand(6, 4)
    wide = rand(6, causal_convolution.WIDEST + 1)
    for arguments in (
        (x.double(), weight),
        (x, weight.double()),
        (x, rand(5, 4)),
        (x, wide),
        (x, weight.mT.contiguous().mT),
    ):
        assert mamba2.convolve_sequences(*arguments, None, "silu") is None
    assert mamba2.convolve_sequences(x, weight, None, "gelu") is None
    assert calls == []


def norm(x, weight, gate, groups, gate_first):
    """Returns the norm of groups by PyTorch."""
    u = x * F.silu(gate) if gate_first and gate is not None else x
    y = F.rms_norm(u.unflatten(-1, (groups, -1)), (x.shape[-1] // groups,), None, EPS).flatten(-2) * weight
    return y if gate_first or gate is None else y * F.silu(gate)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("rows", "groups", "width"), [(1, 1, 20), (7, 4, 16), (3, 3, 700), (90, 2, 64), (0, 2, 8)])
@pytest.mark.parametrize("tokens", [1, 2])
def test_norm(rows, tokens, groups, width, gate_first, dtype, calls):
    """Values and gradients; the gate is a slice of a projection."""
    x, gates = (rand(rows, tokens, groups * width + n, dtype=dtype) for n in (0, 5))
    gate = gates[..., : groups * width].requires_grad_()
    weight = rand(groups * width, dtype=dtype).requires_grad_()
    x.requires_grad_()
    for arguments in ((x, weight, gate), (x, weight)):
        exact = [y.detach().double().requires_grad_() for y in arguments]
        y = mamba2.norm(*arguments, *[None] * (3 - len(arguments)), EPS, groups, gate_first)
        expected = norm(*exact, *[None] * (3 - len(arguments)), groups, gate_first)
        dy = torch.randn_like(y)
        results = torch.autograd.grad(y, arguments, dy), torch.autograd.grad(expected, exact, dy.double())
        for a, b in zip((y, *results[0]), (expected, *results[1]), strict=True):
            check(a, b, dtype)
    assert calls == ["normed", "normed_backward"] * 2


@runs
def test_wide_norms(calls):
    """Rows of Mamba-2 models have up to 8192 channels; more warps read longer ones."""
    x, weight = rand(3, 5120), rand(5120)
    check(mamba2.norm(x, weight, x, EPS, 1, True), norm(x.double(), weight.double(), x.double(), 1, True), x.dtype)
    assert calls == ["normed"]


def product_inputs(M, K, N, dtype, stream=None, residual=True):
    """Returns x, a weight, the weight of the norm and the residual; x and the residual have the dtype of the stream."""
    stream = stream or dtype
    weight = rand(N, K, dtype=dtype) / K**0.5
    return rand(M, 1, K, dtype=stream), weight, rand(K, dtype=dtype), rand(M, 1, N, dtype=stream) if residual else None


@runs
@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("M", "dtype"),
    [(M, dtype) for M in (1, 2, 5) for dtype in DTYPES if M <= 2 or dtype != torch.float32],  # by tensor cores
    ids=str,
)
def test_product(M, residual, groups, dtype, calls):
    """Float32 is rounded to the dtype of the weight before the norm, which works in groups as a kernel of its own."""
    for stream in {dtype, torch.float32} if groups == 1 else {dtype}:
        x, weight, norm_weight, added = product_inputs(M, 64, 24, dtype, stream, residual)
        calls.clear()
        y = mamba2.product(x, weight, norm_weight, EPS, groups, added)
        normed = norm(x.to(dtype).double(), norm_weight.double(), None, groups, True).to(dtype)
        expected = normed.double() @ weight.double().mT + (0 if added is None else added.double())
        assert y.dtype == (dtype if added is None else stream)
        assert relative_error(y, expected) <= FORWARD[dtype]
        assert calls == ["normed"] * (groups > 1) + ["product"]


@torch.no_grad()
def test_products_that_are_left_to_pytorch(calls):
    x, weight, norm_weight, residual = product_inputs(2, 64, 24, torch.float32)
    many = product_inputs(65, 64, 24, torch.float16)
    for arguments in (
        many,
        product_inputs(3, 64, 24, torch.float32),
        (x, weight.half(), norm_weight, residual),
        (x.double(), weight.double(), norm_weight.double(), residual.double()),
        (x.half(), weight, norm_weight, residual),
        (x.expand(-1, 2, -1), weight, norm_weight, residual),
        (x[..., :48], weight, norm_weight, residual),
        (x.mT.contiguous().mT.expand(2, 1, 64)[..., ::2], weight[:, :32].contiguous(), norm_weight[:32], residual),
        (x, weight.mT.contiguous().mT, norm_weight, residual),
        (x, weight, norm_weight[:48], residual),
        (x, weight, norm_weight, residual[..., :23]),
        (x, weight, norm_weight, residual.half()),
        (x[..., :20].contiguous(), weight[:, :20].contiguous(), norm_weight[:20], residual),
    ):
        assert mamba2.product(*arguments[:3], EPS, 1, arguments[3]) is None
    assert mamba2.product(x, weight, norm_weight, EPS, 3, residual) is None
    with torch.enable_grad():
        assert mamba2.product(x.clone().requires_grad_(), weight, norm_weight, EPS, 1, residual) is None
    assert calls == []


@torch.no_grad()
def test_calls_that_are_left_to_pytorch(calls):
    x, state, weight = rand(2, 6, 1), rand(2, 6, 4), rand(6, 4)
    for arguments in (
        (rand(2, 6, 2), state, weight, None, "silu"),
        (x, rand(2, 6, 5), weight, None, "silu"),
        (x, state, weight, None, "gelu"),
        (x.double(), state, weight, None, "silu"),
        (x, state.mT.contiguous().mT, weight, None, "silu"),
    ):
        assert mamba2.convolve_token(*arguments) is None
    with torch.enable_grad():
        assert mamba2.convolve_token(x.clone().requires_grad_(), state, weight, None, "silu") is None
    assert mamba2.norm(rand(2, 6), weight.new_ones(6, dtype=torch.float64), None, EPS, 2, True) is None
    assert mamba2.norm(rand(2, 6), rand(6), None, EPS, 4, True) is None
    assert calls == []


TARGETS = {"H100": ("cuda", 90, 32), "A100": ("cuda", 80, 32), "MI300X": ("hip", "gfx942", 64)}


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("whole", [True, False])
def test_they_compile_for_gpus(target, whole):
    """With all optional arguments, and without them."""
    gpu = Gpu({"H100": Architecture.SM90, "A100": Architecture.SM80, "MI300X": Architecture.AMD}[target], 132)
    x, filters = torch.empty(64, 9088, dtype=torch.bfloat16)[:, :4352], torch.empty(4352, 4, dtype=torch.bfloat16)
    history = torch.empty(64, 4352, 4, dtype=torch.bfloat16)
    convolution = (x, history, filters, filters[:, 0].contiguous() if whole else None, torch.empty_like(x))
    launches = [mamba2_kernel.convolution(convolution, gpu, whole)]
    u, sums = x[:, None].expand(-1, 99, -1).mT, torch.empty(64 * 4, 5, 4352)
    for kernel, rest in ((sequences._convolve, (u,)), (sequences._convolve_backward, (u, u, sums))):
        launches.append(sequences.launch(kernel, (u, *convolution[2:4], *rest), whole))
    for launch in launches:
        asm = compiled(launch, TARGETS[target]).asm
        if target == "MI300X":
            assert asm["hsaco"]
        elif launch.kernel in (sequences._convolve, sequences._convolve_backward):
            # A thread loads 4 channels at once, of 8 tokens and of 4, and each token once but for those beside a run.
            loads = 3 + 8 if launch.kernel is sequences._convolve else 3 + (6 if whole else 3) + 4 + 4
            assert asm["ptx"].count("ld.global.v2.b32") == loads
