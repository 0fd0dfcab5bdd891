"""The picture of the crossover, drawn from made-up results."""

import json

import pytest


@pytest.fixture
def crossover(script):
    return script("crossover")


def row(T, fused, scan, pick, heads=1, part="crossover"):
    dims = {"B": 1, "T": T, "H": heads, "Hq": heads, "K": 128, "V": 128, "N": 1}
    return {"part": part, "dims": dims, "measured": {"fused": fused, "scan": scan, "slow": 1.0}, "pick": pick}


ROWS = [
    row(1024, 3e-4, 1e-4, "scan"),
    row(256, 1e-4, 2e-4, "fused"),
    row(256, 1e-4, 2e-4, "fused", heads=64),
    row(100, 1e-4, 2e-4, "fused", part="grid"),
]


def test_a_panel_for_each_number_of_heads(crossover):
    panels = crossover.panels(ROWS)
    assert list(panels) == [1, 64]
    assert [row["dims"]["T"] for row in panels[1]] == [256, 1024]


def test_a_switch_lies_between_two_picks(crossover):
    panels = crossover.panels(ROWS)
    assert crossover.switches(panels[1]) == [512]
    assert crossover.switches(panels[64]) == []


def test_who_is_never_near_is_not_drawn(crossover):
    assert crossover.drawn(ROWS) == ["fused", "scan"]


def test_it_is_drawn_beside_the_results(crossover, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "selection-pretend.json"
    about = {"device": "Pretend", "driver": "1.2.3", "torch": "2.11.0"}
    path.write_text(json.dumps({**about, "rows": ROWS}))
    assert crossover.draw(path) == tmp_path / "selection-pretend" / "crossover.svg"
    picture = crossover.draw(path).read_text()
    assert "chunk_gla forward: time of each backend" in picture
    assert "Pretend, bfloat16 with float32 gates, K = V = 128; torch 2.11.0" in picture
    assert "batch × heads = 64" in picture
    assert crossover.draw(path).read_text() == picture
    path.write_text(json.dumps({**about, "rows": ROWS[-1:]}))
    with pytest.raises(ValueError, match="no measurements of the crossover"):
        crossover.draw(path)
