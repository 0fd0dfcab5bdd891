"""The kernel that adds the terms of token pairs of marked chunks to gradients, against the reference on each chunk."""

import itertools

import pytest
import torch

from gla_core.conformance.calls import heads_first
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import gla_inputs
from gla_reference.chunk_gla import chunk_gla_bwd
from tests.grid import grid

pytest.importorskip("triton")

from gla_triton_kernels.gla.sm90 import pairs
from gla_triton_kernels.gla.tensors import BackwardTensors
from gla_triton_runtime.launch import start

CHUNK, KEYS, SCALE = 64, 128, 0.3
BUDGET, ROUNDED = 5e-4, 2e-3
"""The tolerances of float32 sums, and of results that are rounded to bfloat16."""

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_sm90")]


def case(*, offset=0, **sizes):
    """Returns inputs q, k, v, g and do, gradients to add to, and cu_seqlens, which begin at row `offset`."""
    x = gla_inputs(**{"B": 1, "H": 1, "gates": "-inf", "gate_dtype": torch.float32, "device": "cuda", **sizes})
    q, k, v, do = (y.bfloat16() for y in (x.q, x.k, x.v, torch.randn_like(x.v)))
    gradients = [torch.randn_like(y) for y in (q, k, v, x.g)]
    return [q, k, v, x.g, do], gradients, None if x.cu_seqlens is None else x.cu_seqlens + offset


def chunks(inputs, cu_seqlens):
    """Yields for each chunk its row in the marks, its index in the batch, and its tokens."""
    B, T = inputs[0].shape[:2]
    offsets = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    for b in range(B):
        for n, (first, end) in enumerate(itertools.pairwise(offsets)):
            row = b * -(-T // CHUNK) + n + first // CHUNK
            for j, t in enumerate(range(first, end, CHUNK)):
                yield row + j, b, slice(t, min(t + CHUNK, end))


def marks_of(inputs, cu_seqlens, which=lambda i, h, block: (i + h + block) % 2 == 0):
    """Returns marks of the chunks, heads and key blocks that `which` picks.

    Rows without a chunk are marked too, which must have no effect.
    """
    (B, T, H, K), device = inputs[0].shape, inputs[0].device
    rows = B * -(-T // CHUNK) if cu_seqlens is None else len(cu_seqlens) - 1 + T // CHUNK
    marks = torch.full((rows, H, -(-K // KEYS)), 7, dtype=torch.int32, device=device)
    for i, (row, _, _) in enumerate(chunks(inputs, cu_seqlens)):
        for h, block in itertools.product(range(H), range(marks.shape[2])):
            marks[row, h, block] = which(i, h, block)
    return marks


def marked(inputs, cu_seqlens, marks):
    """Yields the slices of each marked chunk in q, k, v, g and do; the first four also apply to dq, dk, dv and dg."""
    for row, b, tokens in chunks(inputs, cu_seqlens):
        for h, block in marks[row].nonzero().tolist():
            head, keys = (slice(b, b + 1), tokens, slice(h, h + 1)), slice(block * KEYS, (block + 1) * KEYS)
            yield (*head, keys), (*head, keys), head, (*head, keys), head


def expected(inputs, gradients, cu_seqlens, marks):
    """Returns the gradients in float64."""
    results = [y.double() for y in gradients]
    for places in marked(inputs, cu_seqlens, marks):
        q, k, v, g, do = (y[place].double() for y, place in zip(inputs, places, strict=True))
        pairs = chunk_gla_bwd(q, k, v, g, SCALE, None, None, None, None, do, None)
        for y, place, added in zip(results, places, pairs, strict=False):
            y[place] += added
        results[3][places[3]] *= g > -120
    return results


def completed(inputs, gradients, cu_seqlens, marks):
    """Returns the kernel's gradients. The kernel adds to copies of the given ones."""
    q, k, v, g, do = inputs
    results = [y.clone() for y in gradients]
    x = BackwardTensors(q, k, v, g, None, cu_seqlens, None, do, None, *results, None)
    no_units = dict.fromkeys(("q_units", "k_units", "v_units", "do_units"))
    start(pairs.launch_pairs(x, no_units, marks, SCALE, KEYS))
    return results


def check(inputs, gradients, cu_seqlens, marks=None):
    """Compares with the reference, checks that nothing else changed, and returns the gradients."""
    marks = marks_of(inputs, cu_seqlens) if marks is None else marks
    results, reference = completed(inputs, gradients, cu_seqlens, marks), expected(inputs, gradients, cu_seqlens, marks)
    for actual, ref in zip(results, reference, strict=True):
        assert relative_error(actual, ref) <= (BUDGET if actual.dtype == torch.float32 else ROUNDED)
    rest = [y.clone() for y in results]
    for places in marked(inputs, cu_seqlens, marks):
        for y, before, place in zip(rest, gradients, places, strict=False):
            y[place] = before[place]
    assert all(torch.equal(y, before) for y, before in zip(rest, gradients, strict=True))
    return results


@pytest.mark.parametrize(
    "sizes",
    [
        *grid(T=150, H=2, gates=["mild", "strong", "extreme", "-inf"]),
        *grid(B=2, T=[1, 64, 65], H=3),
        {"T": 70, "K": 7, "V": 5},
        {"T": 70, "K": 40, "V": 100},
        {"T": 70, "gate_dtype": torch.bfloat16},
        *grid(B=2, T=300, H=2, K=256, V=192, gates=["extreme", "-inf"]),
    ],
    ids=str,
)
def test_sizes(sizes):
    check(*case(**sizes))


@pytest.mark.parametrize("gate", [-2.0, -8.0, -50.0, -85.0, -90.0])
def test_small_gradients_of_gates(gate):
    """Terms of pairs on one side of a gate cancel, and pairs of a token with itself are never added."""
    inputs, gradients, _ = case(T=64)
    inputs[3][:] = gate
    gradients[3][:] = 0
    check(inputs, gradients, None, marks_of(inputs, None, lambda *_: True))


@pytest.mark.parametrize("gate", [-95.0, -100.0, -torch.inf])
@pytest.mark.parametrize("weak", [None, 1, 6, 32])
def test_halves_between_which_every_gate_forgets(gate, weak):
    """Such halves of chunks are skipped, unless one gate of one channel does not forget."""
    inputs, gradients, _ = case(T=128)
    inputs[3][:] = gate
    if weak is not None:
        inputs[3][:, weak, :, 5] = -1.0
    check(inputs, gradients, None, marks_of(inputs, None, lambda *_: True))


def test_nothing_is_added_to_the_gate_of_a_first_token():
    """No token of the chunk comes before its first. If a sequence has no initial state, this dg stays exactly 0."""
    inputs, gradients, _ = case(T=128, H=2, gates="strong")
    gradients[3][:, ::CHUNK] = 0
    dg = check(inputs, gradients, None, marks_of(inputs, None, lambda *_: True))[3]
    assert not dg[:, ::CHUNK].any()


@pytest.mark.parametrize("magnitude", [1e-9, 1e9])
def test_magnitudes(magnitude):
    """The factors of products are float16, scaled by units."""
    inputs, gradients, _ = case(T=128, gates="strong")
    for y in inputs[:2]:
        y *= magnitude
    check(inputs, [torch.zeros_like(y) for y in gradients], None)


def test_channels_and_rows_of_small_magnitude():
    inputs, gradients, _ = case(T=128, gates="strong")
    inputs[0][..., 3], inputs[1][..., 5] = 1e-6, 1e-6
    inputs[4][:, ::7] *= 1e-6
    marks = marks_of(inputs, None, lambda *_: True)
    dq, dk, _, dg = completed(inputs, [torch.zeros_like(y) for y in gradients], None, marks)
    reference = expected(inputs, [torch.zeros_like(y) for y in gradients], None, marks)
    for y, ref in zip((dq, dk, dg), (reference[0], reference[1], reference[3]), strict=True):
        assert max(relative_error(y[..., i], ref[..., i]) for i in (3, 5)) <= 1.5 * ROUNDED  # a norm of few numbers
        assert relative_error(y[:, ::7], ref[:, ::7]) <= 1.5 * ROUNDED


def test_a_block_of_keys_that_is_not_marked():
    inputs, gradients, _ = case(T=64, K=200)
    dq, dk, _, dg = check(inputs, gradients, None, marks_of(inputs, None, lambda i, h, block: block == 1))
    for y, before in zip((dq, dk, dg), (gradients[0], gradients[1], gradients[3]), strict=True):
        assert torch.equal(y[..., :KEYS], before[..., :KEYS])


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 200, "H": 5}, {"lengths": (70, 0, 129), "H": 3}])
def test_many_chunks_a_program(sizes, monkeypatch):
    monkeypatch.setattr(pairs, "PROGRAMS", 2)
    check(*case(**sizes))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths", "offset"), [((0,), 0), ((0, 0, 5), 70), ((130, 0, 1, 64, 0, 70), 5), ((0, 1) * 8, 3)]
)
def test_packed(lengths, offset, index_dtype):
    inputs, gradients, cu_seqlens = case(lengths=lengths, padding=90, offset=offset)
    for y in inputs:
        y[:, :offset], y[:, cu_seqlens[-1] :] = torch.nan, torch.nan
    cu_seqlens = cu_seqlens.to(index_dtype)
    check(inputs, gradients, cu_seqlens, marks_of(inputs, cu_seqlens, lambda *_: True))


def test_gates_whose_gradient_is_exactly_0():
    inputs, gradients, _ = case(T=128, gates="mild")
    inputs[3][:, 10, :, ::3], inputs[3][:, 11, :, 1::3] = -torch.inf, -300.0
    inputs[3][:, 70] = -torch.inf
    dg = check(inputs, gradients, None, marks_of(inputs, None, lambda i, *_: i == 0))[3]
    assert torch.equal(dg[:, :CHUNK] == 0, inputs[3][:, :CHUNK] <= -120)
    assert torch.equal(dg[:, CHUNK:], gradients[3][:, CHUNK:])


def test_strides():
    """Tensors are heads-first, a slice of a wider tensor, or expanded gates."""
    inputs, gradients, _ = case(B=2, T=70, H=2)
    inputs[3] = inputs[3][:1, :1].expand_as(inputs[3])
    results = check(inputs, gradients, None)
    q, k, v, g, do = inputs
    inputs = [heads_first(q), torch.nn.functional.pad(k, (3, 3))[..., 3:-3], heads_first(v), g, do]
    again = completed(inputs, gradients, None, marks_of(inputs, None))
    assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True))
