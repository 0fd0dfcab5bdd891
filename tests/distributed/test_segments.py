"""The number of segments into which a rank cuts its piece of a sequence."""

from types import SimpleNamespace

import pytest
import torch

from gla_core.dispatch.transitions import apply
from gla_core.distributed.exchange import before_each
from gla_core.distributed.over_ranks import segments_of_a_piece


@pytest.mark.parametrize(
    ("heads", "tokens", "segments"),
    [
        (8, 65536, 16),  # 16 * 8 blocks for 132 multiprocessors
        (16, 65536, 8),
        (3, 64 * 43, 1),  # 43 chunks, a prime
        (3, 64 * 45, 5),
        (8, 1024, 2),  # segments have at least 512 tokens
        (8, 1023, 1),
        (100, 65536, 1),
        (200, 65536, 1),
        (0, 65536, 1),
        (8, 0, 1),
    ],
)
def test_segments_fill_a_gpu(monkeypatch, heads, tokens, segments):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    assert segments_of_a_piece(heads, tokens, torch.device("cuda")) == segments


def test_a_cpu_has_whole_pieces():
    assert segments_of_a_piece(8, 65536, torch.device("cpu")) == 1


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("form", [(3,), (3, 3)])
def test_summaries_before_each_segment(form, backwards):
    """They join the summaries of the segments that come first, whether transitions are diagonal or dense."""
    M, segments = 2, 4
    transition, update = (torch.randn(M, segments, 2, *sizes, dtype=torch.float64) for sizes in (form, (3, 5)))
    start = torch.randn(M, 2, 3, 5, dtype=torch.float64)
    summary = transition.flatten(0, 1), update.flatten(0, 1)
    before, whole = before_each(summary, segments, backwards)
    state, matrices = start, transition if len(form) == 2 else transition.diag_embed()
    for i in reversed(range(segments)) if backwards else range(segments):
        torch.testing.assert_close(apply(before[0][:, i], start, before[1][:, i]), state)
        state = matrices[:, i] @ state + update[:, i]
    torch.testing.assert_close(apply(whole[0], start, whole[1]), state)
