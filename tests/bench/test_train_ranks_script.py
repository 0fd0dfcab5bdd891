"""benchmarks/train_ranks.py: its rows from given speeds, and a small run."""

import pytest

TINY = ["--width=16", "--layers=2", "--heads=2", "--window=32"]


@pytest.fixture
def train_ranks(script):
    return script("train_ranks")


def test_efficiency_is_the_speed_of_a_rank_beside_one_rank_alone(train_ranks, monkeypatch, tmp_path):
    asked = []

    def given_speed(options, ranks, more):
        asked.append(more)
        return {1: 100.0, 2: 190.0}[ranks]

    monkeypatch.setattr(train_ranks, "tokens_per_second", given_speed)
    train_ranks.main(["--device=cpu", "--ranks=1,2", "--kinds=sharded,together", f"--out={tmp_path}", "--commit=abc"])
    (written,) = tmp_path.glob("*/train_340m_ranks.jsonl")
    rows = train_ranks.record.read(written)
    assert {row.commit for row in rows} == {"abc"}
    assert [row.facts["efficiency"] for row in rows] == [1.0, 0.95, 1.0, 0.95]
    assert rows[1].call == "2 ranks, sharded, batch 16"
    assert asked[1] == ["--batch=16"]
    assert asked[3] == ["--batch=1", "--window=131072", "--context-parallel=2"]


@pytest.mark.thorough
@pytest.mark.slow
def test_small_trainings(train_ranks, tmp_path):
    options = ["--device=cpu", "--ranks=2", "--steps=6", "--batch=2", "--long-window=64"]
    train_ranks.main([*options, f"--out={tmp_path}", "--", *TINY])
    (written,) = tmp_path.glob("*/*.jsonl")
    sharded, together, resumed = train_ranks.record.read(written)
    assert min(sharded.facts["tokens/s"], together.facts["tokens/s"]) > 0
    assert (resumed.call, resumed.facts) == ("2 ranks, resumed", {"largest difference of a loss": 0.0})
