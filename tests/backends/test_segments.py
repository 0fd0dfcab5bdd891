"""How sequences are cut into segments: lengths by arithmetic, boundaries of packed sequences on the device."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gla_triton_kernels.chunk_gla.plan import SEGMENT_UNIT, segment_length

pytest.importorskip("triton")


@pytest.fixture
def cut(device):
    from gla_triton_kernels.chunk_gla import segments

    def cut(lengths, length, dtype=torch.int64):
        return segments.cut(1, sum(lengths), length, torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype))

    return cut


def expected(lengths, length):
    """Boundaries, and the first segment of each sequence and one more."""
    bounds, first, row = [0], [0], 0
    for n in lengths:
        bounds += [*range(row + length, row + n, length), row + n] if n else []
        first.append(len(bounds) - 1)
        row += n
    return bounds, first


def check(segments, lengths, length):
    bounds, first = expected(lengths, length)
    assert segments.count == len(lengths) + sum(lengths) // length
    assert segments.count >= first[-1]
    unused = segments.count + 1 - len(bounds)
    assert segments.bounds.tolist() == bounds + [sum(lengths)] * unused
    assert segments.first.tolist() == first
    assert segments.bounds.dtype == segments.first.dtype == torch.int32


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [(0,), (0, 0, 5), (64,), (65, 64, 0, 63, 1), (1,) * 40, (300, 0, 0, 10)])
def test_boundaries_of_packed_sequences(cut, lengths, dtype):
    check(cut(lengths, 64, dtype), lengths, 64)


@pytest.mark.kernels
def test_more_sequences_than_a_program_sees_at_a_time(cut, device):
    lengths = [i * 37 % 101 for i in range(3000 if device == "cuda" else 300)]
    check(cut(lengths, 1024), lengths, 1024)


@pytest.mark.kernels
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=300 if torch.cuda.is_available() else 30),
    length=st.sampled_from([16, 64, 128]),
)
def test_any_boundaries(cut, lengths, length):
    check(cut(lengths, length), lengths, length)


def test_equal_sequences_are_cut_on_the_host():
    from gla_triton_kernels.chunk_gla.segments import cut

    segments = cut(3, 130, 64, None)
    assert (segments.per_sequence, segments.count, segments.bounds, segments.first) == (3, 9, None, None)


def test_a_segment_is_whole_chunks_or_all():
    tokens = [1, 63, 64, 65, 2048, 8192, 65536]
    for sequences, T, blocks, packed in itertools.product([1, 2, 8, 64], tokens, [1, 8, 33, 512], [False, True]):
        length = segment_length(sequences, T, blocks, 132, packed)
        assert length % SEGMENT_UNIT == 0 or length >= T, (sequences, T, blocks, packed)


def pieces(sequences, T, blocks):
    return -(-T // segment_length(sequences, T, blocks, 132, False))


def test_few_heads_fill_the_device_in_one_wave():
    assert pieces(1, 65536, 8) == 16
    assert pieces(1, 8192, 16) == 8
    assert pieces(1, 65536, 1) == 128


def test_many_heads_stay_whole():
    assert pieces(8, 4096, 16) == 1
    assert pieces(1, 65536, 100) == 1


def test_short_sequences_stay_whole():
    assert pieces(1, 64, 1) == 1
    assert pieces(2, 128, 4) == 1


def test_packed_sequences_that_are_longer_than_half_a_fair_share_are_cut():
    assert segment_length(64, 65536, 8, 132, True) == 2048  # 65536 * 8 / 132 / 2 in whole chunks
    assert segment_length(2000, 65536, 8, 132, True) == 65536  # whatever their lengths


def test_nothing_to_cut():
    for sequences, T in ((0, 0), (0, 5), (3, 0)):
        assert segment_length(sequences, T, 8, 132, False) >= T
        assert segment_length(sequences, T, 8, 132, True) >= T
