"""benchmarks/context_parallel.py: its results from given times, and a small run on two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "context_parallel.py"
ROW = {
    "kind": "key",
    "tokens": 64,
    "heads": 2,
    "width": 16,
    "direction": "forward",
    "ranks": 2,
    "one_rank": 2.0,
    "all_ranks": 1.1,
}
ROW |= {"gather": 0.1, "efficiency": 2.0 / 1.1 / 2}


@pytest.fixture
def context_parallel(script):
    return script("context_parallel")


def test_more_ranks_are_predicted_from_a_shard_and_the_summaries_that_it_receives(context_parallel):
    actual = context_parallel.predicted(ROW)
    assert actual == {
        "4": pytest.approx(1.0 / 1.3),
        "8": pytest.approx(1.0 / 1.7),
        "64": pytest.approx(1.0 / 1.7),  # by a scan
        "1024": pytest.approx(1.0 / 2.1),
    }
    assert context_parallel.predicted({**ROW, "efficiency": None}) is None


def test_a_row_in_words(context_parallel):
    assert context_parallel.in_words(ROW) == (
        "key T64 H2 forward: one rank 2.00 s, 2 ranks 1.10 s, of which gathers 100 ms; efficiency 0.91"
    )
    too_long = {**ROW, "one_rank": None, "efficiency": None}
    assert "one rank -, 2 ranks 1.10 s" in context_parallel.in_words(too_long)


@pytest.mark.thorough
def test_two_ranks(context_parallel, tmp_path):
    options = ["--device", "cpu", "--tokens", "128", "--heads", "2", "--width", "16", "--plot"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(SCRIPT)]
    ran = subprocess.run(
        [*command, *options, f"--out={tmp_path}", "--commit=abc"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    (path,) = tmp_path.glob("*/ranks.jsonl")
    rows = context_parallel.record.read(path)
    kinds = ["key", "key", "head", "head", "packed", "packed"]
    assert {row.commit for row in rows} == {"abc"}
    assert [row.facts["kind"] for row in rows[1::2]] == kinds
    for one, together in zip(rows[::2], rows[1::2], strict=True):
        assert together.facts["ranks"] == 2
        assert together.facts["efficiency"] == pytest.approx(one.seconds / together.seconds / 2, rel=1e-3)
        assert min(one.seconds, together.seconds, together.facts["gathers, s"]) > 0
    assert ran.stdout.count("efficiency") == 6  # only rank 0 prints
    assert path.with_suffix(".svg").read_text().count("one row of tokens over 2 ranks: efficiency") == 1
