"""The kernels of the gradients of the softmax ops on their own: the edges of tiles, groups, layouts, special values."""

import functools
import os

import pytest
import torch

from gla_core.conformance.calls import oracle_gradients
from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.workloads.inputs import normal
from tests.backends.prepared_calls import call_prepared, preparing

pytest.importorskip("triton")

from gla_triton_kernels.online_softmax.plan import MOST_ON_CHIP as MOST
from gla_triton_kernels.online_softmax.plan import MOST_UNALIGNED_ON_CHIP as ODD

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COLUMNS = [1, 31, 1024, 1025, 4097, ODD + 1, MOST + 16, 2 * MOST + 16, 70001]
TOKENS = [(1, 1), (31, 33), (64, 128), (65, 129), (130, 67)] + ([] if INTERPRETED else [(257, 300), (500, 63)])
WIDTHS = [(16, 16), (24, 70), (128, 128)] + ([] if INTERPRETED else [(64, 64), (256, 256), (512, 512), (40, 512)])

pytestmark = pytest.mark.kernels


@pytest.fixture(params=[torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16]), ids=str)
def dtype(request):
    """Returns a dtype, but not bfloat16 if kernels are interpreted: the interpreter truncates where it should round."""
    return request.param


def random(*shape, device, dtype=torch.float32, seed=0):
    return normal(shape, dtype, torch.Generator(device).manual_seed(seed))


# ---- softmax


@pytest.fixture
def softmax_gradient(backend):
    return functools.partial(call_prepared, "online_softmax_bwd", preparing(backend, "online_softmax_bwd"))


def check_softmax(softmax_gradient, x, dim, dy):
    dx = softmax_gradient(x, dim, dy)
    assert dx.is_contiguous()
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    ref = oracle_gradients("online_softmax", {"x": x, "dim": dim}, {"y": dy})["dx"]
    assert relative_error(dx, ref) <= GRADIENT[x.dtype]
    return dx


@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_at_the_edges_of_tiles_and_splits(softmax_gradient, device, dtype, columns):
    x, dy = (random(3, columns, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    x[1, : columns // 2] = -torch.inf
    if columns == 1:  # a softmax of one column is 1, whatever x is
        assert not softmax_gradient(x, 1, dy).any()
    else:
        check_softmax(softmax_gradient, x, 1, dy)


@pytest.mark.parametrize("columns", [7, 3000])
def test_the_first_dimension(softmax_gradient, device, columns):
    x, dy = (random(columns, 40, device=device, seed=seed) for seed in (0, 1))
    check_softmax(softmax_gradient, x, 0, dy)


def test_a_tensor_of_many_dimensions(softmax_gradient, device):
    x = random(2, 3, 4, 5, 6, device=device).permute(4, 1, 3, 0, 2)
    check_softmax(softmax_gradient, x, 2, random(*x.shape, device=device, seed=1).mT.contiguous().mT)


@pytest.mark.parametrize("columns", [1000, ODD + 1, MOST + 16])
def test_infinite_rows(softmax_gradient, device, columns):
    """A row of -inf is NaN, and a row with an infinite dy has no finite element; other rows are finite."""
    x, dy = (random(4, columns, device=device, seed=seed) for seed in (0, 1))
    x[1], dy[2, columns // 2] = -torch.inf, torch.inf
    dx = softmax_gradient(x, 1, dy)
    assert dx[1].isnan().all()
    assert dx.isfinite().all(1).tolist() == dx.isfinite().any(1).tolist() == [True, False, False, True]


# ---- attention


@pytest.fixture
def attention_gradients():
    """Both backends have the same kernels. On a GPU, libraries compute some of the calls."""
    return functools.partial(call_prepared, "softmax_attention_bwd", preparing("triton_fused", "softmax_attention_bwd"))


def attention_inputs(device, dtype, Tq, Tk, H=1, G=1, K=16, V=16):
    shapes = {"q": (2, Tq, H * G, K), "k": (2, Tk, H, K), "v": (2, Tk, H, V), "do": (2, Tq, H * G, V)}
    x = {name: random(*shape, device=device, dtype=dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return x | {"dlse": random(2, Tq, H * G, device=device, seed=9)}


def check_attention(attention_gradients, x, causal, scale=0.3):
    """Checks gradients with and without that of lse, of the queries that see a key."""
    blind = max(x["q"].shape[1] - x["k"].shape[1], 0) if causal else 0
    seeing = {n: x[n] for n in ("k", "v")} | {"q": x["q"][:, blind:], "scale": scale, "causal": causal}
    q, k, v = x["q"].double(), *(x[n].double().repeat_interleave(x["q"].shape[2] // x["k"].shape[2], 2) for n in "kv")
    s = scale * torch.einsum("bihk,bjhk->bihj", q, k)
    if causal:
        mask = torch.ones(s.shape[1], s.shape[3], dtype=torch.bool, device=s.device).tril(s.shape[3] - s.shape[1])
        s = s.masked_fill(~mask[:, None, :], -torch.inf)
    o, lse = torch.einsum("bihj,bjhv->bihv", s.softmax(-1), v).to(x["q"].dtype), s.logsumexp(-1).float()
    for dlse in (None, x["dlse"]):
        gradients = attention_gradients(x["q"], x["k"], x["v"], o, lse, scale, causal, x["do"], dlse)
        loss = {"o": x["do"][:, blind:]} | ({} if dlse is None else {"lse": dlse[:, blind:]})
        ref = oracle_gradients("softmax_attention", seeing, loss)
        ref["dq"] = torch.nn.functional.pad(ref["dq"], (0, 0, 0, 0, blind, 0))
        for gradient, (name, expected) in zip(
            gradients, sorted(ref.items(), key=lambda item: "qkv".index(item[0][1])), strict=True
        ):
            assert gradient.is_contiguous()
            assert gradient.dtype == x["q"].dtype
            assert relative_error(gradient, expected) <= GRADIENT[x["q"].dtype], name


@pytest.mark.parametrize(("Tq", "Tk"), TOKENS)
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_at_the_edges_of_tiles(attention_gradients, device, dtype, Tq, Tk, causal):
    check_attention(attention_gradients, attention_inputs(device, dtype, Tq, Tk), causal)


@pytest.mark.parametrize(("H", "G"), [(2, 3), (1, 5)])
@pytest.mark.parametrize(("Tq", "Tk"), [(40, 70), (70, 40)])
def test_groups(attention_gradients, device, H, G, Tq, Tk):
    check_attention(attention_gradients, attention_inputs(device, torch.float32, Tq, Tk, H, G), True)


@pytest.mark.parametrize(("K", "V"), WIDTHS)
def test_widths(attention_gradients, device, dtype, K, V):
    check_attention(attention_gradients, attention_inputs(device, dtype, 40, 50, K=K, V=V), True)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.5])
def test_scales(attention_gradients, device, scale):
    x = attention_inputs(device, torch.float32, 33, 33)
    if scale:
        check_attention(attention_gradients, x, True, scale)
    else:
        o = x["v"].cumsum(1) / torch.arange(1, 34, device=device)[:, None, None]
        lse = torch.arange(1, 34, device=device).log().expand(2, -1)[..., None]
        dq, dk, dv = attention_gradients(x["q"], x["k"], x["v"], o, lse, 0.0, True, x["do"], None)
        assert not dq.any()
        assert not dk.any()
        assert dv.any()


@pytest.mark.parametrize(("Tq", "Tk"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(attention_gradients, device, Tq, Tk):
    x = attention_inputs(device, torch.float32, Tq, Tk)
    o, lse = torch.full_like(x["do"], torch.nan), torch.full_like(x["dlse"], -torch.inf)
    gradients = attention_gradients(x["q"], x["k"], x["v"], o, lse, 1.0, True, x["do"], x["dlse"])
    assert [y.shape for y in gradients] == [x[n].shape for n in "qkv"]
    assert not any(y.any() for y in gradients)


# ---- gradients by a library


@pytest.mark.parametrize("dtype", [torch.float16] + ([] if INTERPRETED else [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("V", [1, 24, 128])
def test_the_gradient_of_lse_is_folded_into_o(device, dtype, V):
    """Without the second column, the error of float16 would be up to 2^-11 of dlse."""
    from gla_triton_kernels.softmax_attention.fold import launch_fold
    from gla_triton_runtime.launch import start

    o, do = (random(2, 3, 5, V, device=device, dtype=dtype, seed=seed).transpose(1, 2) for seed in (0, 1))
    dlse = 100 * random(2, 5, 3, device=device, seed=2)
    do.sign_().mul_(0.5 + random(2, 5, 3, V, device=device, dtype=dtype, seed=3).abs())
    folded_o, folded_do = (
        torch.empty(o.shape, dtype=dtype, device=device),
        torch.empty(o.shape, dtype=dtype, device=device),
    )
    start(launch_fold(o, do, dlse, folded_o, folded_do))
    assert torch.equal(folded_do, do)
    error = (folded_o.double() * folded_do).sum(-1) - ((o.double() * do).sum(-1) - dlse)
    last_bit = torch.finfo(dtype).eps * (dlse.abs() + 10 if V == 1 else 10)
    assert bool((error.abs() <= last_bit).all())


def test_the_gradient_of_lse_is_folded_into_rows_without_a_gradient_of_o(device):
    from gla_triton_kernels.softmax_attention.fold import TINY, launch_fold
    from gla_triton_runtime.launch import start

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    o, do, dlse = random(1, 4, 2, 16, device=device, dtype=dtype), torch.zeros(1, 4, 2, 16, device=device), 3.0
    folded_o, folded_do = torch.empty_like(o), torch.empty_like(o)
    start(launch_fold(o, do.to(dtype), torch.full((1, 4, 2), dlse, device=device), folded_o, folded_do))
    delta = (folded_o.double() * folded_do).sum(-1)
    assert relative_error(delta, torch.full_like(delta, -dlse)) <= torch.finfo(dtype).eps
    assert folded_do.max() == TINY.value
    assert (folded_do != 0).sum() == 8


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_libraries_take_our_tensors(name):
    """PyTorch describes the results of both libraries without a GPU. They are new and contiguous, [B, T, H, width]."""
    from gla_triton_kernels.softmax_attention import library

    q, k = (torch.empty(2, 64, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    lse = torch.empty(2, 8, 64, device="meta")
    gradients = getattr(library, name)(q, k, k, q, lse, 0.1, True, q)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]
    assert all(x.is_contiguous() and not x._is_view() for x in gradients)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads first in memory
    assert all(x.is_contiguous() for x in getattr(library, name)(q, k, k, q, lse, 0.1, True, q))
