"""The number of segments into which a rank cuts its piece of a sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gla_core.distributed.chunk_gla import segments_of_a_piece


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
