"""The figures of the README are those of the results files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gla_core.bench import results
from gla_core.bench.suite import Row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(script):
    return script("readme_tables")


def test_the_readme_holds_what_the_results_say(tables):
    generated = tables.render(tables.FOLDER)
    assert (tables.between_markers((ROOT / "README.md").read_text()) or "") == generated, (
        "run: python3 benchmarks/readme_tables.py --write README.md"
    )


def test_no_results_no_section(tables, tmp_path):
    assert tables.render(tmp_path) == ""


def test_a_section_names_its_source(tables, tmp_path, synthetic):
    results.write(tmp_path / "baseline-pretend.json", synthetic)
    results.write(tmp_path / "conformance-pretend.json", synthetic)
    section = tables.render(tmp_path)
    assert section.startswith("### baseline, NVIDIA Pretend\n")
    assert section.count("###") == 1
    for text in (
        "gla_core 0.1.0 at 0123456789, torch 2.11.0, triton 3.6.0, driver 1.2.3, 2026-01-02; copies at 4.00 TB/s",
        "`benchmarks/results/baseline-pretend.json`",
        "<summary>chunk_gla: 3 measurements</summary>\n\n| workload |",
        "| short | forward | mine | 500 us | 1600 | 40.0% | 4.00 |",
        "<summary>recurrent_gla_step: 1 measurements</summary>",
    ):
        assert text in section
    assert "![" not in section


def test_the_quicker_of_ours_stands_beside_the_baseline(tables, tmp_path, synthetic):
    def row(backend, seconds):
        return Row(workload="short", op="chunk_gla", backend=backend, direction="forward", seconds=seconds)

    ours = [row("triton_fused", 4e-4), row("parallel_scan", 5e-4)]
    results.write(tmp_path / "triton-pretend.json", synthetic.with_rows([*synthetic.rows, *ours]))
    table = tables.render(tmp_path).partition("<details>")[0]
    assert "| short | forward | fla | 2.00 ms | triton_fused | 400 us | 5.00 |" in table
    assert "parallel_scan" not in table
    assert "mine" not in table


def test_pictures_beside_the_results_are_shown(tables, tmp_path, synthetic):
    results.write(tmp_path / "baseline-pretend.json", synthetic)
    (tmp_path / "baseline-pretend").mkdir()
    (tmp_path / "baseline-pretend" / "chunk_gla-time.png").touch()
    assert tables.render(tmp_path).endswith(
        "\n\n![chunk_gla-time](benchmarks/results/baseline-pretend/chunk_gla-time.png)\n"
    )


def test_writing_replaces_what_stands_between_the_markers(tables, tmp_path, synthetic, monkeypatch):
    results.write(tmp_path / "baseline-pretend.json", synthetic)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["readme_tables.py", "--write", str(readme)])
    for _ in range(2):  # the second time changes nothing
        tables.main()
        text = readme.read_text()
        assert tables.between_markers(text) == tables.render(tmp_path)
        assert text.startswith(f"before\n{tables.BEGIN}\n###")
        assert text.endswith(f"\n{tables.END}\nafter\n")


def test_a_readme_without_markers(tables):
    assert tables.between_markers("nothing here") is None
    with pytest.raises(ValueError, match="no markers"):
        tables.insert("nothing here", "text")


def test_a_selection_is_told_in_a_few_lines(tables, tmp_path):
    of_grid = {"shapes": 70, "calls": 120, "close": 0.975, "worst": 1.21}
    head = {"device": "NVIDIA Pretend", "gla_core": "0.1.0", "commit": "0123456789abcdef", "torch": "2.11.0"}
    found = {**head, "date": "2026-01-02T03:04:05+00:00", "summary": {"grid": of_grid}, "rows": []}
    (tmp_path / "selection-pretend.json").write_text(json.dumps(found))
    (tmp_path / "selection-pretend").mkdir()
    (tmp_path / "selection-pretend" / "crossover.png").touch()
    section = tables.render(tmp_path)
    assert section.startswith(
        "### What auto picks, NVIDIA Pretend\n\ngla_core 0.1.0 at 0123456789, torch 2.11.0, 2026-01-02."
    )
    assert "| grid | 120 | 97.5% | 1.21 × |\n" in section
    assert section.endswith("\n\n![crossover](benchmarks/results/selection-pretend/crossover.png)\n")
