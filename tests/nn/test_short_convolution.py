import pytest
import torch
import torch.nn.functional as F

from gla_core.nn.short_convolution import ShortConvolution, packing


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize("bias", [False, True])
def test_is_a_causal_conv1d_with_silu(W, T, bias):
    convolution = ShortConvolution(6, W, bias).double()
    torch_convolution = torch.nn.Conv1d(6, 6, W, padding=W - 1, groups=6, bias=bias).double()
    torch_convolution.load_state_dict(convolution.state_dict())
    x = torch.randn(2, T, 6, dtype=torch.float64)
    y, history = convolution(x)
    torch.testing.assert_close(y, F.silu(torch_convolution(x.mT)[..., :T].mT))
    assert torch.equal(history, torch.cat([x.new_zeros(2, W - 1, 6), x], dim=1)[:, T:])


@pytest.mark.parametrize("activation", ["silu", None, "relu"])
@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"history": True}, {"lengths": [2, 7]}, {"T": 2}, {"packed": [1, 4, 4, 9]}], ids=str
)
def test_by_a_kernel(options, W, activation):
    """A kernel computes every call of an activation that it knows, and the result is that of PyTorch."""
    shapes = []

    def kernel(x, weight, bias, name):
        shapes.append(list(x.shape))
        y = F.conv1d(x, weight[:, None], bias, padding=W - 1, groups=6)[..., : x.shape[2]]
        return y if name is None else getattr(F, name)(y)

    convolution = ShortConvolution(6, W, bias=True, activation=activation).double()
    x = torch.randn(1 if "packed" in options else 2, options.get("T", 10), 6, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor(options["packed"]) if "packed" in options else None
    N = len(x) if offsets is None else len(offsets) - 1
    history = torch.randn(N, W - 1, 6, dtype=torch.float64) if "history" in options or "packed" in options else None
    lengths = torch.tensor(options["lengths"]) if "lengths" in options else None
    places = None if offsets is None else packing(offsets, x.shape[1], W)
    results = []
    for convolution.kernel in (kernel, None, lambda *_: None):
        y, after = convolution(x, history, places, lengths)
        results.append((y, after, *torch.autograd.grad((y**2).sum() + after.sum(), [x, *convolution.parameters()])))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)
    assert len(shapes) == (activation != "relu")
    if not options and activation != "relu":
        assert shapes == [[2, 6, 10]], "x itself, without room for a history"


def test_packing_by_hand():
    places = packing(torch.tensor([1, 4, 4, 5]), 6, 3)  # x .. .. a0 a1 a2 .. .. .. .. c0 x, behind one more .. ..
    assert places.tokens.tolist() == [2, 5, 6, 7, 12, 13]
    assert places.histories.tolist() == [[3, 4], [8, 9], [10, 11]]
    assert places.last.tolist() == [[6, 7], [8, 9], [11, 12]]


def test_packed_inputs_and_histories_get_their_gradients():
    convolution = ShortConvolution(3, 3, bias=True).double()
    places = packing(torch.tensor([0, 1, 1, 5]), 5, 3)
    x = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    history = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, history, convolution.weight, convolution.bias)
    assert torch.autograd.gradcheck(lambda x, history, *_: convolution(x, history, places), inputs)


@pytest.mark.parametrize("offsets", [[0, 2, 6], [2, 3], [9], [7, 20, -5, 3]])
def test_any_offsets_stay_inside(offsets):
    places = packing(torch.tensor(offsets), 9, 4)
    y, history = ShortConvolution(3, 4)(torch.randn(1, 9, 3), packing=places)
    assert y.shape == (1, 9, 3)
    assert history.shape == (len(offsets) - 1, 3, 3)
    assert y.isfinite().all()


def test_compile_packed():
    torch._dynamo.reset()
    convolution = ShortConvolution(7, 3, bias=True)

    def run(x, history, cu_seqlens):
        return convolution(x, history, packing(cu_seqlens, x.shape[1], 3))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, offsets in enumerate([[0, 2, 3, 3, 6, 11], [0, 1, 2, 11, 11, 13, 19]]):
        x = torch.randn(1, offsets[-1], 7, requires_grad=True)
        history = torch.randn(len(offsets) - 1, 2, 7, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            out = compiled(x, history, torch.tensor(offsets))
        expected = run(x, history, torch.tensor(offsets))
        torch.testing.assert_close(out, expected)
        wanted = (x, history, *convolution.parameters())
        grads, expected_grads = (torch.autograd.grad(y.sum() + h.sum(), wanted) for y, h in (out, expected))
        torch.testing.assert_close(grads, expected_grads)


def test_history_does_not_keep_the_rows_alive():
    _, history = ShortConvolution(3, 4)(torch.randn(1, 500, 3))
    assert history.untyped_storage().nbytes() == 3 * 3 * 4


def test_half_precision_is_rounded_once():
    convolution = ShortConvolution(8, 4, bias=True).bfloat16()
    x = torch.randn(2, 30, 8).bfloat16()
    y, history = convolution(x)
    assert (y.dtype, history.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(y, convolution.float()(x.float())[0].bfloat16())


def test_initial_weights_have_the_range_of_conv1d():
    torch.manual_seed(0)
    convolution = ShortConvolution(2000, 4, bias=True)
    for parameter in convolution.parameters():
        assert 0.49 < parameter.max() <= 0.5
        assert -0.5 <= parameter.min() < -0.49
