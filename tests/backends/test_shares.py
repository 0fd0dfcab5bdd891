"""The division of jobs among blocks: see gla/sm90/shares.py."""

import random

import pytest

from gla_triton_kernels.gla import sm90
from gla_triton_kernels.gla.sm90 import Division, fastest_division
from tests import gluon_on_cpu

pytest.importorskip("triton")


def parts_of_blocks(shares, jobs, chunks, blocks):
    """Returns the parts of each block, in order: the job, the first of its chunks, the end, and the chunks before."""
    made = []
    for i in range(blocks):
        with gluon_on_cpu.program((i,), (blocks,)):
            share = shares.share_of_block(jobs, chunks)
            made.append([tuple(int(x) for x in shares.part_of_share(share, p)) for p in range(int(share[1]))])
    return made


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_has_a_block_and_no_block_waits(seed):
    draw = random.Random(seed)
    shares = gluon_on_cpu.load("shares").shares
    multiprocessors = draw.randint(1, 12)
    jobs, chunks = draw.randint(multiprocessors, 40), draw.randint(1, 30)
    _, blocks, _ = shares.share_jobs(jobs, chunks, multiprocessors, 1, 64 * 64, "cpu")
    assert blocks <= multiprocessors
    made = parts_of_blocks(shares, jobs, chunks, blocks)
    covered = sorted((job, c) for parts in made for job, first, end, _ in parts for c in range(first, end))
    assert covered == [(job, c) for job in range(jobs) for c in range(chunks)]
    for i, parts in enumerate(made):
        before = 0
        for job, first, end, done in parts:
            assert done == before
            before += end - first
            if first > 0:  # the previous block begins with the first part of this job, and ends it earlier
                assert made[i - 1][0][:3] == (job, 0, first)
                assert first <= done or i == blocks - 1  # the last block may have a smaller share


def test_shares_are_taken_where_the_last_wave_would_be_small():
    assert fastest_division({1: 320, 2: 160}, 1.5, 64, 132, True) == Division(2, 132)
    assert fastest_division({1: 260, 2: 130}, 1.5, 64, 132, False) == Division(2, None)
    assert fastest_division({1: 256, 2: 128}, 1.5, 64, 132, True) == Division(2, None)
    assert fastest_division({1: 128}, 1.5, 512, 132, True) == Division(1, None)
    assert fastest_division({1: 192, 2: 96}, 1.4, 64, 132, True) == Division(2, None)
    assert fastest_division({1: 160}, 1.5, 4, 132, True) == Division(1, None)  # too short
    assert fastest_division({1: 0}, 1.5, 0, 132, True) == Division(1, None)


def test_a_share_is_never_predicted_to_be_slower(monkeypatch):
    monkeypatch.setattr(sm90, "SHARES_START", 0)
    for jobs in range(1, 500):
        programs = fastest_division({1: jobs}, 1.5, 64, 132, True).programs
        assert (programs is not None) == (jobs > 132 and jobs % 132 != 0), jobs
