"""Launches that are kept: the same results from the second call on, and profilers still hear of them."""

from __future__ import annotations

import pytest
import torch

import gla_core as gla

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu


@pytest.fixture
def heard():
    """What Triton's hooks are told of launches."""
    from triton import knobs

    calls = []

    def note(*_):
        calls.append(1)

    knobs.runtime.launch_enter_hook.add(note)
    yield calls
    knobs.runtime.launch_enter_hook.remove(note)


def test_the_second_call_gives_what_the_first_gave():
    x = torch.randn(64, 1000, device="cuda")
    first, second, third = (gla.online_softmax(x + i, backend="triton_fused") for i in (0, 0, 1))
    assert torch.equal(first, second)
    assert torch.equal(third, gla.online_softmax(x + 1, backend="triton_fused"))
    torch.testing.assert_close(third, torch.softmax(x + 1, -1))


def test_another_stream():
    x = torch.randn(64, 1000, device="cuda")
    gla.online_softmax(x, backend="triton_fused")
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        torch.cuda._sleep(10_000_000)
        y = x * 2
        found = gla.online_softmax(y, backend="triton_fused")
    aside.synchronize()
    torch.testing.assert_close(found, torch.softmax(2 * x, -1))


def test_profilers_hear_of_every_launch(heard):
    x = torch.randn(64, 1001, device="cuda")
    for _ in range(3):
        gla.online_softmax(x, backend="triton_fused")
    assert len(heard) == 3
