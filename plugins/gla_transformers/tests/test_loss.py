"""The kernels of the loss of logits. test_training.py has the loss by PyTorch's operators, and models."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_transformers import loss, loss_pytorch
from plugins.gla_transformers.tests.kernels import DEVICE, DTYPES, INTERPRETED, compiled, noted, runs

pytest.importorskip("triton")

from gla_transformers import loss_kernel

IGNORED = loss.IGNORED


@pytest.fixture
def calls(monkeypatch):
    """A list to which every call of a kernel adds its name. On a CPU, kernels are interpreted."""
    recorded = []
    kernels = noted(recorded, loss_kernel, "losses", "gradient")
    monkeypatch.setattr(loss, "_kernels_of", lambda device: kernels)
    return recorded


def made(n, D, dtype=torch.float32, scale=1.0, ignored=IGNORED):
    """Returns logits [n, D], which are a slice of wider rows, with words of -inf, and targets, of which some do not
    count.
    """
    targets = torch.randint(0, D, (n,), device=DEVICE)
    logits = (scale * torch.randn(n, D + 8, device=DEVICE)).clamp(-6e4, 6e4).to(dtype)[:, :D]
    masked = (torch.rand(n, D, device=DEVICE) < 0.1).scatter(1, targets[:, None], False)
    return logits.masked_fill_(masked, -torch.inf), targets.masked_fill(torch.rand(n, device=DEVICE) < 0.3, ignored)


def loss_and_gradient(logits, targets, ignored=IGNORED):
    """Returns the loss of logits and their gradient, which is not that of the loss alone."""
    x = logits.detach().requires_grad_()
    actual = loss.sum_of_losses(x, targets, ignored)
    return actual.detach(), torch.autograd.grad(3 * actual, x)[0]


@runs
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 4),
    D=st.integers(1, 9000) | st.sampled_from([16, 4096, 8208]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
    last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_kernels(n, D, dtype, scale, last, seed):
    """Rows of one tile and of several, equal logits, huge ones, and those of -inf, against float64."""
    torch.manual_seed(seed)
    ignored = D - 1 if last else IGNORED
    logits, targets = made(n, D, dtype, scale, ignored)
    x = logits.double().requires_grad_()
    expected = F.cross_entropy(x, targets, ignore_index=ignored, reduction="none")
    (slope,) = torch.autograd.grad(expected.sum(), x)
    losses, normalizers = loss_kernel.losses(logits, targets, ignored)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    z = torch.where(targets == ignored, 0, x.detach().logsumexp(1))
    torch.testing.assert_close(normalizers.double(), z, rtol=1e-6, atol=1e-5)
    dx = loss_kernel.gradient(logits, targets, normalizers, torch.tensor(1.0, device=DEVICE), ignored)
    rounding = z.abs().max().item() * 2**-23 + {torch.float32: 1e-5}.get(dtype, 4e-3)
    assert (dx.dtype, dx.is_contiguous()) == (dtype, True)
    assert (dx - slope).abs().max() <= rounding
    assert dx[targets == ignored].eq(0).all()


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_and_its_gradient(dtype, calls, monkeypatch):
    logits, targets = made(20, 99, dtype)
    actual = [loss_and_gradient(logits, labels) for labels in (targets, targets.repeat_interleave(2)[::2])]
    assert calls == ["losses", "gradient"] * 2
    monkeypatch.setattr(loss, "_kernels_of", lambda device: None)
    for value, gradient in actual:
        expected = loss_and_gradient(logits, targets)
        torch.testing.assert_close(value, expected[0])
        assert relative_error(gradient, expected[1]) <= FORWARD[dtype]


@runs
def test_the_bits_of_a_row_do_not_depend_on_the_others():
    logits, targets = made(9, 5000)
    one, all_ = (loss_kernel.losses(logits[rows], targets[rows], IGNORED) for rows in (slice(4, 5), slice(None)))
    assert all(torch.equal(a, b[4:5]) for a, b in zip(one, all_, strict=True))


@runs
def test_nan_and_labels_out_of_range(calls):
    """Such a row alone has a gradient of NaN. What an ignored row has, does not matter."""
    for row in (0, 1):
        logits, targets = torch.randn(6, 33, device=DEVICE), torch.arange(6, device=DEVICE)
        for place, value in [((row, 5), torch.nan), ((row, slice(None)), -torch.inf), ((row, 5), torch.inf)]:
            broken = logits.clone()
            broken[place] = value
            check_row(broken, targets, row)
        for label in (33, -1, 2**40, -(2**40)):
            check_row(logits, targets.clone().index_fill_(0, torch.tensor(row, device=DEVICE), label), row)
    broken, targets = torch.randn(2, 33, device=DEVICE), torch.tensor([IGNORED, 4], device=DEVICE)
    broken[0] = torch.nan
    value, gradient = loss_and_gradient(broken, targets)
    torch.testing.assert_close(value, F.cross_entropy(broken[1:], targets[1:]))
    assert gradient[0].eq(0).all()
    assert set(calls) == {"losses", "gradient"}


def check_row(logits, targets, row):
    value, gradient = loss_and_gradient(logits, targets)
    assert value.isnan()
    for rows in (gradient.isnan().all(1), gradient.isnan().any(1)):
        assert rows.nonzero().flatten().tolist() == [row]


@runs
def test_what_is_kept(calls):
    """The loss keeps the logits, the labels and a normalizer for each row, and nothing else."""
    kept = []
    logits, targets = made(5, 33, torch.float16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss.sum_of_losses(logits.requires_grad_(), targets, IGNORED)
    assert [x.data_ptr() for x in kept[:2]] == [logits.data_ptr(), targets.data_ptr()]
    assert [(x.shape, x.dtype) for x in kept[2:]] == [((5,), torch.float32)]  # the normalizers
    assert calls == ["losses"]


@runs
def test_calls_that_are_left_to_pytorch(calls):
    logits, targets = made(6, 8)
    expected = loss_and_gradient(logits, targets)
    assert calls.pop() == "gradient"
    assert calls.pop() == "losses"
    for x in (logits.double(), logits.mT.contiguous().mT):
        value, gradient = loss_and_gradient(x, targets)
        torch.testing.assert_close((value, gradient.float()), expected)
    compiled = torch.compile(loss.sum_of_losses, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, targets, IGNORED), expected[0])
    per_row = torch.func.vmap(lambda x, target: loss.sum_of_losses(x[None], target[None], IGNORED))(logits, targets)
    torch.testing.assert_close(per_row.sum(), expected[0])
    assert calls == []


@runs
def test_second_derivatives(calls):
    logits, targets = (x.clone() for x in made(6, 8, torch.float32))
    logits = logits.nan_to_num(neginf=0).requires_grad_()
    actual = []
    for function in (loss.sum_of_losses, loss._sum_of_losses):
        (slope,) = torch.autograd.grad(function(logits, targets, IGNORED), logits, create_graph=True)
        actual.append(torch.autograd.grad(slope.square().sum(), logits)[0])
    torch.testing.assert_close(*actual)
    assert calls == ["losses"]


@runs
def test_no_rows(calls):
    logits = torch.randn(0, 8, device=DEVICE, requires_grad=True)
    value = loss.sum_of_losses(logits, torch.zeros(0, dtype=torch.int64, device=DEVICE), IGNORED)
    assert (value.item(), torch.autograd.grad(value, logits)[0].shape) == (0, (0, 8))


@runs
@pytest.mark.parametrize("in_parts", [False, True])
def test_training(ours, tokens, calls, in_parts, monkeypatch):
    """A model's loss of whole logits, and that in parts, which the backward computes again."""
    how = {"fuse_cross_entropy": not in_parts, "fuse_linear_cross_entropy": in_parts}
    model, tokens = ours(num_hidden_layers=1, **how).train().to(DEVICE), tokens[:, :16].to(DEVICE)

    def gradients():
        out = model(tokens, labels=tokens)
        return [out.loss, *torch.autograd.grad(out.loss, list(model.parameters()))]

    actual = gradients()
    parts = loss.PARTS
    assert calls == (["losses"] * parts + ["losses", "gradient"] * parts if in_parts else ["losses", "gradient"])
    monkeypatch.setattr(loss, "_kernels_of", lambda device: loss_pytorch)
    for a, b in zip(actual, gradients(), strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("cuda", 80, 32), ("hip", "gfx942", 64)], ids=str)
@pytest.mark.parametrize("D", [32000, 50257])
def test_they_compile_for_gpus(D, target):
    """A thread reads 16 bytes at once if rows are aligned. In the loop over the tiles of a row no thread waits for
    another one: all shuffles and barriers belong to the two reductions over 8 warps that follow the loop.
    """
    x, rows = torch.empty(2, D, dtype=torch.bfloat16), torch.empty(2)
    targets = torch.zeros(2, dtype=torch.int64)
    for kernel, rest in ((loss_kernel._losses, (rows, rows)), (loss_kernel._gradient, (rows, rows[0], x))):
        launch = loss_kernel.launch(kernel, (2, 8, 1), (x, targets, *rest), D, D, IGNORED)
        asm = compiled(launch, target).asm
        if target[0] == "hip":
            assert asm["hsaco"]
            continue
        ptx = asm["ptx"]
        assert ("ld.global.v4" in ptx) == (D == 32000)
        assert ptx.count("shfl.sync") <= 2 * (5 + 3)
