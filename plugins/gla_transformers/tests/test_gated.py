"""The activation of the MLP, norms, and the gates of HGRN2, in one kernel each, and models that run them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.nn.hgrn2 import log_gate
from gla_transformers import GLACache, causal_convolution
from gla_transformers import gated as dispatch
from gla_transformers.gated import forgetting, gated, normed
from plugins.gla_transformers.tests.kernels import DEVICE, DTYPES, INTERPRETED, noted, runs

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gla_transformers import causal_convolution_kernel, gated_kernel

EPS = 1e-5


@pytest.fixture
def calls(monkeypatch):
    """A list to which every call of a kernel adds its name. On a CPU, kernels are interpreted."""
    recorded = []
    names = ("gated", "gated_backward", "normed", "normed_backward", "forgetting", "forgetting_backward")
    kernels = noted(recorded, gated_kernel, *names)
    monkeypatch.setattr(dispatch, "_kernels_of", lambda device: kernels)
    return recorded


def slices(shape, dtype, number=2):
    """Returns tensors [.., *shape[-2:]] that are slices of one projection, and need gradients."""
    *tokens, H, V = shape
    made = torch.randn(*tokens, number * H * V + 5, device=DEVICE).to(dtype)
    parts = made[..., : number * H * V].split(H * V, -1)
    return [part.unflatten(-1, (H, V)).requires_grad_() for part in parts]


def compare(function, expected, *inputs):
    """Checks a function and its gradients against an expression in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, z = function(*inputs), expected(*exact)
    dy = torch.randn(y.shape, device=DEVICE).to(y.dtype)
    actual, wanted = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(z, exact, dy.double())
    for a, b, x in zip((y, *actual), (z, *wanted), (inputs[0], *inputs), strict=True):
        assert a.dtype == x.dtype
        assert a.shape == b.shape
        assert relative_error(a, b) <= FORWARD[x.dtype]


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 1100])
def test_gated(width, dtype, calls):
    gate, x = (y.flatten(-2) for y in slices((2, 3, 1, width), dtype))
    compare(gated, lambda gate, x: F.silu(gate) * x, gate, x)
    assert calls == ["gated", "gated_backward"]


def norm(x, weight=None, gate=None):
    """Returns the norm by the kernel."""
    return normed(x, weight, gate, EPS)


def formula(x, weight=None, gate=None):
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return y if gate is None else y * F.silu(gate)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 2, 16), (7, 1, 100), (1, 3, 2049), (90, 3, 128)], ids=str)
def test_normed(shape, dtype, calls):
    x, gate = slices(shape, dtype)
    weight = torch.rand(shape[-1], device=DEVICE).to(dtype).requires_grad_()
    compare(norm, formula, x, weight, gate)
    compare(lambda x, gate: norm(x, gate=gate), lambda x, gate: formula(x, gate=gate), x, gate)
    compare(norm, formula, x, weight.detach().float().requires_grad_(), gate)  # as under autocast
    compare(norm, formula, x, weight)
    compare(norm, formula, x.detach().flatten(0, -2).requires_grad_())
    assert calls == ["normed", "normed_backward"] * 5


@runs
def test_the_bits_of_a_row_do_not_depend_on_the_others(calls):
    x, gate = (y.detach() for y in slices((40, 2, 64), torch.float32))
    weight = torch.rand(64, device=DEVICE)
    assert torch.equal(norm(x, weight, gate)[7:8], norm(x[7:8], weight, gate[7:8]))


@runs
def test_gates_in_any_order_and_no_rows(calls):
    x, gate = (y.detach() for y in slices((3, 4, 8), torch.float32))
    swapped = gate.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(norm(x, gate=swapped), norm(x, gate=gate))
    assert torch.equal(gated(gate.mT, x.mT), gated(gate, x).mT)
    compare(norm, formula, *slices((0, 2, 8), x.dtype, 1))
    compare(gated, lambda gate, x: F.silu(gate) * x, *slices((0, 2, 8), x.dtype))


@runs
def test_calls_that_are_left_to_pytorch(calls):
    x, gate = slices((3, 2, 8), torch.float32)
    one = x.detach()[0, 0]
    for a, b in [(x.double(), gate.double()), (x, gate.half()), (x, gate[:1]), (x[0], gate[0]), (one, None)]:
        assert norm(a, gate=b) is None
    assert norm(x, torch.rand(8, dtype=torch.float64, device=DEVICE), gate) is None
    wide = torch.randn(1, 1, dispatch.WIDEST + 1, device=DEVICE)
    assert norm(wide) is None
    assert torch.equal(gated(gate.double(), x.double()), F.silu(gate.double()) * x.double())
    over = torch.func.vmap(torch.func.grad(lambda gate, x: gated(gate, x).sum()))(gate.detach(), x.detach())
    torch.testing.assert_close(over, torch.autograd.grad((F.silu(gate) * x).sum(), gate)[0])
    assert calls == []


@pytest.fixture
def gates(dtype, bounded):
    """Returns q, logits [2, 3, 1100] from -100 to 100, slices of one projection, and a bound with zeros, or None."""
    q, f = (x.detach().flatten(-2) for x in slices((2, 3, 1, 1100), dtype))
    f.copy_(torch.linspace(-100, 100, 6600, device=DEVICE).view(2, 3, 1100))
    bound = torch.linspace(0, 0.999, 1100, device=DEVICE) if bounded else None
    if bounded:
        bound[::9] = 0
    return q, f, bound


def forgotten(q, f, bound):
    """Returns what `forgetting` does in float64, by terms that neither cancel nor overflow, nor do their gradients."""
    c = 0 if bound is None else bound
    sigma, other = f.clamp(max=0).sigmoid(), (-f.clamp(min=0)).sigmoid()  # of f where f < 0, and of -f elsewhere
    k = (1 - c) * torch.where(f < 0, 1 - sigma, other)
    g = torch.where(f < 0, (c + (1 - c) * sigma).log(), (-(1 - c) * other).log1p())
    return F.silu(q), k, g


def double(tensors):
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors]


@runs
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounded", [False, True])
def test_forgetting(dtype, gates, calls):
    """Log gates have their relative precision at both ends, where keys are 1 and near 0."""
    actual, expected = forgetting(*gates), forgotten(*double(gates))
    assert [x.dtype for x in actual] == [dtype, dtype, torch.float32]
    for a, b, precision in zip(actual, expected, (dtype, dtype, torch.float32), strict=True):
        assert relative_error(a, b) <= FORWARD[precision]
    torch.testing.assert_close(actual[2].double(), expected[2], rtol=2e-5, atol=1e-37)  # a GPU rounds exponents
    usual = expected[2] > -70  # PyTorch's are not below -87
    torch.testing.assert_close(actual[2][usual], log_gate(*gates[1:])[usual], rtol=1e-4, atol=1e-6)
    assert calls == ["forgetting"]


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounded", [False, True])
def test_gradients_of_forgetting(dtype, gates, calls):
    """The gradients of logits and of the bound have their relative precision too."""
    exact, inputs, kept = double(gates), [x for x in gates if x is not None], []
    for x in inputs:
        x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = forgetting(*gates)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs], "nothing else is kept"
    dy, dk, dg = torch.randn_like(results[0]), -torch.rand_like(results[1]), torch.rand_like(results[2])
    if gates[2] is not None:
        dg[(gates[2] == 0) & (gates[1] < -60)] = 0  # times exp(-f) it may be too large for float32
    actual = torch.autograd.grad(results, inputs, (dy, dk, dg))
    wanted = torch.autograd.grad(forgotten(*exact), exact[: len(inputs)], (dy.double(), dk.double(), dg.double()))
    for x, a, b in zip(inputs, actual, wanted, strict=True):
        assert (a.dtype, a.shape) == (x.dtype, x.shape)
        assert relative_error(a, b) <= FORWARD[x.dtype]
        if x is not gates[0]:  # silu's slope has a zero
            smallest = 1e-7 if x.dtype == torch.float16 else 1e-25
            torch.testing.assert_close(a.double(), b, rtol=max(2e-5, FORWARD[x.dtype]), atol=smallest)
    assert calls == ["forgetting", "forgetting_backward"]


@runs
@pytest.mark.parametrize("i", range(3))
def test_one_gradient_of_forgetting(i, calls):
    """Compares the gradient of one input from one result, with a bound in half precision; and without rows."""
    for rows in (3, 0):
        q, f = (x.detach().flatten(-2) for x in slices((2, rows, 1, 8), torch.float32))
        inputs = [q, f, (0.9 * torch.rand(8, device=DEVICE)).half()]
        x, exact = inputs[i].requires_grad_(), double(inputs)
        (actual,) = torch.autograd.grad(forgetting(*inputs)[i].sum(), x)
        (wanted,) = torch.autograd.grad(forgotten(*exact)[i].sum(), exact[i])
        assert actual.dtype == x.dtype
        assert relative_error(actual, wanted) <= FORWARD[x.dtype]
    assert calls == ["forgetting", "forgetting_backward"] * 2


@runs
def test_large_gradients_of_closed_gates(calls):
    """Without a bound the gradient of a logit is at most that of the log gate, though 1 / alpha is out of range."""
    f = torch.tensor([[-80.0, -69.0, 0.0]], device=DEVICE, requires_grad=True)
    _, _, g = forgetting(torch.zeros_like(f), f, None)
    (actual,) = torch.autograd.grad(g, f, torch.full_like(f, 1e9))
    torch.testing.assert_close(actual, torch.sigmoid(-f.detach()) * 1e9)


@runs
def test_gates_that_are_left_to_pytorch(calls):
    q, f = (x.flatten(-2) for x in slices((2, 3, 1, 8), torch.float32))
    for bound in (torch.zeros((), device=DEVICE), torch.zeros(8, dtype=torch.float64, device=DEVICE)):
        assert forgetting(q, f, bound) is None
    assert forgetting(q, f[..., :4], None) is forgetting(q.double(), f.double(), None) is None
    results = []
    torch.func.vmap(lambda q, f: results.append(forgetting(q, f, None)) or q)(q, f)
    assert results == [None]
    assert calls == []


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_they_compile_for_an_h100(whole, gate_first):
    """With a weight and a gate, and without both. Each thread reads 16 bytes at once."""
    head = {"H": 4, "G": 4 if gate_first else 1, "V": 256, "BN": gated_kernel.TILE // 256, "ALL": 256}
    head |= {"GATE_FIRST": gate_first and whole}
    head |= {} if whole else {"weight_ptr": None, "gate_ptr": None}
    unbounded = {} if whole else {"bound_ptr": None}
    no_sums = {} if whole else {"sums_ptr": None}
    written = {} if whole else {"dgate_ptr": None, "sums_ptr": None}
    for kernel, constants in [
        (gated_kernel._gated, {"BLOCK": gated_kernel.BLOCK}),
        (gated_kernel._gated_backward, {"BLOCK": gated_kernel.BLOCK}),
        (gated_kernel._forgetting, {"BLOCK": gated_kernel.BLOCK} | unbounded),
        (gated_kernel._forgetting_backward, {"BLOCK": gated_kernel.BLOCK} | unbounded | no_sums),
        (gated_kernel._normed, head),
        (gated_kernel._normed_backward, head | written),
    ]:
        floats = {"eps": "fp32"} | dict.fromkeys(("sums_ptr", "bound_ptr", "g_ptr", "dg_ptr"), "*fp32")
        types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names} | floats
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        aligned = [i for i, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")]
        sixteen = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(kernel, signature, constants, sixteen)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert "ld.global.v4" in compiled.asm["ptx"]


# ---- models


LAYER = ["normed", "normed", "normed", "gated"]
"""The kernels of a layer: the norm of its input, that of heads with the gate, that of the MLP, and the activation."""


def gradients(model, tokens):
    """Returns the logits and the gradients of a step of training."""
    out = model(tokens, labels=tokens)
    return [out.logits, *torch.autograd.grad(out.loss, list(model.parameters()))]


@pytest.fixture
def assert_by_pytorch(monkeypatch):
    """A function that checks that a computation gives the same without the kernels."""

    def check(actual, computation, dispatch=dispatch):
        monkeypatch.setattr(dispatch, "_kernels_of", lambda device: None)
        for a, b in zip(actual, computation(), strict=True):
            assert relative_error(a, b) <= 1e-5

    return check


@runs
@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "layer"), [("gla", LAYER), ("hgrn2", ["normed", "forgetting", "normed", "normed", "gated"])]
)
def test_a_prompt(model_type, layer, ours, tokens, calls, assert_by_pytorch):
    model, tokens = ours(model_type=model_type).to(DEVICE), tokens[:, :20].to(DEVICE)
    actual = model(tokens).logits
    assert calls == layer * 2 + ["normed"]
    assert_by_pytorch([actual], lambda: [model(tokens).logits])


@runs
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(ours, tokens, calls, checkpointing, assert_by_pytorch):
    model, tokens = ours(use_short_conv=True).to(DEVICE).train(), tokens[:, :20].to(DEVICE)
    if checkpointing:
        model.gradient_checkpointing_enable()
    actual = gradients(model, tokens)
    norm_calls, activation = ["normed", "normed_backward"], ["gated", "gated_backward"]
    backward = (LAYER if checkpointing else []) + activation + norm_calls * 3
    assert calls == LAYER * 2 + ["normed"] + norm_calls + backward * 2
    assert_by_pytorch(actual, lambda: gradients(model, tokens))


@runs
@pytest.mark.parametrize("model_type", ["gla", "hgrn2"])
def test_short_convolutions(model_type, ours, tokens, monkeypatch, assert_by_pytorch):
    """The kernels of convolutions compute training, prompts and steps, of padded rows too."""
    model, tokens = ours(model_type=model_type, use_short_conv=True).to(DEVICE), tokens[:, :20].to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0

    @torch.no_grad()
    def generated():
        cache = GLACache(model.config)
        whole = model(tokens, attention_mask=mask).logits
        parts = (tokens[:, :13], tokens[:, 13:14], tokens[:, 14:])
        pieces = [model(part, past_key_values=cache).logits for part in parts]
        return whole[mask > 0], torch.cat(pieces, 1)

    calls = []
    kernels = noted(calls, causal_convolution_kernel, "convolve", "convolve_backward")
    monkeypatch.setattr(causal_convolution, "_kernels_of", lambda device: kernels)
    actual = [*gradients(model, tokens), *generated()]
    assert calls.count("convolve_backward") == 6
    assert calls.count("convolve") == 6 * 5
    assert_by_pytorch(actual, lambda: [*gradients(model, tokens), *generated()], causal_convolution)


@runs
def test_training_of_hgrn2(ours, tokens, calls, assert_by_pytorch):
    model, tokens = ours(model_type="hgrn2").to(DEVICE).train(), tokens[:, :20].to(DEVICE)
    actual = gradients(model, tokens)
    assert calls.count("forgetting") == calls.count("forgetting_backward") == 2
    assert_by_pytorch(actual, lambda: gradients(model, tokens))


@runs
def test_autocast(ours, tokens, calls):
    """The kernels serve autocast, which changes nothing in them."""
    x, gate = slices((3, 2, 8), torch.float16)
    weight = torch.rand(8, device=DEVICE)
    expected = norm(x, weight, gate), gated(gate, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert all(map(torch.equal, (norm(x, weight, gate), gated(gate, x)), expected))
    calls.clear()
    with torch.autocast(DEVICE, torch.bfloat16):
        gradients(ours(num_hidden_layers=1).to(DEVICE).train(), tokens[:, :20].to(DEVICE))
    assert len(calls) == 2 * 5 + 2, "and again for the two results in bfloat16; linear layers keep casts of the others"


@runs
def test_compiled_code_is_left_to_the_compiler(ours, tokens, calls):
    model, tokens = ours(num_hidden_layers=1).to(DEVICE).train(), tokens[:, :20].to(DEVICE)
    wanted = gradients(model, tokens)
    calls.clear()
    torch._dynamo.reset()
    loss = torch.compile(lambda tokens: model(tokens, labels=tokens).loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(loss(tokens), list(model.parameters()))
    assert calls == []
    for a, b in zip(actual, wanted[1:], strict=True):
        assert relative_error(a, b) <= 1e-5


def test_a_model_may_be_copied_and_pickled(ours, tokens):
    model = ours()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens).logits, model(tokens).logits)
