"""Both forms of a transition beside products of matrices in float64, and in the scans of the reference."""

import pytest
import torch

from gla_core.dispatch.transitions import apply, compose, summaries_of_beginnings
from gla_reference._chunks import chunk

K, V = 5, 3
forms = pytest.mark.parametrize("form", [(1,), (K,), (K, K)], ids=["shared", "diagonal", "dense"])


def normal(*sizes, dtype=torch.float64, seed=0):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(transition, form):
    """Returns a transition of any form as a matrix [.., K, K]."""
    return transition if len(form) == 2 else transition.expand(*transition.shape[:-1], K).diag_embed()


def summary(form, *sizes, seed=0, dtype=torch.float64):
    return normal(*sizes, *form, dtype=dtype, seed=2 * seed), normal(*sizes, K, V, dtype=dtype, seed=2 * seed + 1)


@forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_apply(form, dtype):
    (transition, update), state = summary(form, 2, 4, dtype=dtype), normal(2, 1, K, V, dtype=dtype, seed=9)
    after = apply(transition, state, update)
    expected = matrix(transition.double(), form) @ state.double() + update.double()
    assert after.dtype == dtype
    torch.testing.assert_close(after.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(apply(transition, state, update, out=torch.empty_like(update)), after)


@forms
def test_compose_is_associative_and_applies_both(form):
    first, second, third = (summary(form, 2, 4, seed=i) for i in range(3))
    left, right = compose(compose(third, second), first), compose(third, compose(second, first))
    state = normal(2, 4, K, V, seed=9)
    expected = state
    for transition, update in (first, second, third):
        expected = matrix(transition, form) @ expected + update
    for transition, update in (left, right):
        torch.testing.assert_close(apply(transition, state, update), expected)
    torch.testing.assert_close(left, right)


@forms
@pytest.mark.parametrize("stretches", [1, 4, 5])
def test_summaries_of_beginnings(form, stretches):
    transitions, updates = normal(2, stretches, 3, *form), normal(2, stretches, 3, K, V, seed=1)
    products, states = summaries_of_beginnings((transitions, updates))
    product, state = torch.eye(K, dtype=torch.float64).expand(2, 3, K, K), 0 * updates[:, 0]
    for i in range(stretches):
        product = matrix(transitions[:, i], form) @ product
        state = matrix(transitions[:, i], form) @ state + updates[:, i]
        torch.testing.assert_close(matrix(products[:, i], form), product)
        torch.testing.assert_close(states[:, i], state)


@forms
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 9, 9, 20], [3, 4, 18]])
def test_the_scans_of_the_reference(form, reverse, offsets):
    """States go through the chunks of each sequence, and checkpoints give the same states."""
    C, L = 4, 8
    chunks = chunk(2 if offsets is None else 1, 20, C, None if offsets is None else torch.tensor(offsets))
    R, H, N = (1 if offsets else 2), 2, chunks.N
    transition, update = summary(form, R, H, chunks.n)
    start = normal(N, H, K, V, seed=9)

    def step(c, state):
        return apply(transition[:, :, c], state, update[:, :, c])

    entering, leaving = chunks.scan(start, step, reverse)
    rows = [(b, range(chunks.n)) for b in range(R)]
    if offsets is not None:
        rows = [(0, (chunks.sequence == i).nonzero()[:, 0].tolist()) for i in range(N)]
    for i, (b, places) in enumerate(rows):
        state = start[i]
        for c in reversed(places) if reverse else places:
            torch.testing.assert_close(entering[b, :, c], state)
            state = matrix(transition[b, :, c], form) @ state + update[b, :, c]
        torch.testing.assert_close(leaving[i], state)
    if not reverse:
        resumed = chunks.resume(chunks.checkpoints(entering, L), L, step, start.dtype)
        for b, places in rows:
            torch.testing.assert_close(resumed[b, :, places], entering[b, :, places])
