"""The figures of the README and of docs/results.md are those of the results files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gla_core.bench import results
from gla_core.bench.suite import Row
from gla_core.workloads.named import WORKLOADS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(script):
    return script("readme_tables")


def test_the_pages_hold_what_the_results_say(tables):
    written = {tables.README: tables.headline(tables.FOLDER), tables.PAGE: tables.render(tables.FOLDER)}
    for page, generated in written.items():
        assert tables.between_markers(page.read_text()) == generated, "run: python3 benchmarks/readme_tables.py --write"


def test_generated_files_stay_small():
    """Results are summaries; what nobody reads is not committed."""
    assert sum(len(path.read_text().splitlines()) for path in ROOT.rglob("benchmarks/results/*.json")) < 15_000


def test_no_results_no_section(tables, tmp_path):
    assert tables.render(tmp_path) == tables.headline(tmp_path) == ""


def test_a_section_names_its_source(tables, tmp_path, synthetic):
    results.write(tmp_path / "baseline-pretend.json", synthetic)
    section = tables.render(tmp_path)
    assert section.startswith("## Times: baseline, NVIDIA Pretend\n")
    assert section.count("##") == 1
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


def test_pictures_of_the_device_come_first(tables, tmp_path, synthetic):
    results.write(tmp_path / "baseline-h200.json", synthetic)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "chunk_gla.png").touch()
    assert tables.render(tmp_path).startswith("![chunk_gla](../benchmarks/results/h200/chunk_gla.png)\n\n## Times")


@pytest.fixture
def measured(tables, tmp_path, synthetic):
    """A folder with an old run and a new one of the device of the README."""

    def row(backend, seconds, direction="forward"):
        return Row(workload="train_b8_t4096_h16", op="chunk_gla", backend=backend, direction=direction, seconds=seconds)

    def run(name, date, *rows):
        found = dataclasses.replace(synthetic, device=tables.DEVICE, date=date).with_rows(rows)
        results.write(tmp_path / f"{name}-h200.json", found)

    both = "forward+backward"
    training = [row("fla", 4e-3, both), row("reference", 4e-2, both)]
    run("old", "2026-01-01", row("fla", 3e-3), row("reference", 9e-3), row("triton_fused", 1e-3), *training)
    run("new", "2026-01-02", row("fla", 2e-3), row("gla_fla", 2e-3), row("triton_fused", 5e-4), row("parallel_scan", 1))
    return tmp_path


def test_the_newest_measurement_of_each_counts(tables, measured):
    found = tables.newest(measured)
    assert {(row.direction, row.backend): row.seconds for row in found.rows} == {
        ("forward", "fla"): 2e-3,
        ("forward", "triton_fused"): 5e-4,
        ("forward", "parallel_scan"): 1,
        ("forward+backward", "fla"): 4e-3,
        ("forward+backward", "reference"): 4e-2,
    }
    assert (found.rows[0].backend, found.date) == ("fla", "2026-01-02")


def test_the_headline_is_the_quickest_of_ours_beside_the_baseline(tables, measured):
    counts = {"passed": 7, "failed": 0, "open": 2, "refusals": 1}
    report = {"backend": {"name": "mine"}, "device": {"name": tables.DEVICE}, "counts": counts}
    (measured / "conformance-h200-mine.json").write_text(json.dumps(report))
    lines = tables.headline(measured).splitlines()
    assert lines[2:4] == [
        "| `chunk_gla` forward: 8 sequences of 4096 tokens, 16 heads | fla 2.00 ms | triton_fused 500 us | 4.00 |",
        "| `chunk_gla` forward and backward: 8 sequences of 4096 tokens, 16 heads "
        "| fla 4.00 ms | reference 40.0 ms | 0.10 |",
    ]
    assert lines[-1].endswith("Cases of the conformance kit passed there: `mine` 7 (2 open).")


def test_every_row_of_the_headline_is_a_workload(tables):
    names = {(workload.op, workload.name) for workload in WORKLOADS}
    assert {(op, name) for op, name, _ in tables.HEADLINE} <= names


def test_models_stand_beside_flas(tables, measured):
    def step(way, seconds):
        times = {"seconds": seconds, "device_seconds": seconds / 2, "gla_seconds": seconds / 4}
        return {"what": "train", "way": way, **times, "tokens_per_second": 2**14 / seconds, "gib": 2.0}

    def generated(way, speed):
        return {"what": "generate", "way": way, "rows": 8, "first_token": 0.05, "tokens_per_second": speed}

    rows = [step("fla", 0.4), step("accelerated", 0.2), step("compiled", 0.1)]
    rows += [generated("fla", 200), generated("graph", 3000)]
    about = {
        "device": tables.DEVICE,
        "gla_core": "0.1.0",
        "commit": "0123456789ab",
        "torch": "2.11.0",
        "date": "2026-01-02",
    }
    (measured / "models-h200.json").write_text(json.dumps({**about, "model": {"hidden_size": 8}, "rows": rows}))
    section = tables.render(measured)
    assert (
        "## Whole models beside FLA's, NVIDIA H200\n\ngla_core 0.1.0 at 0123456789, torch 2.11.0, 2026-01-02."
        in section
    )
    assert "| accelerated | 200 ms | 81,920 | 100 ms | 50.0 ms | 2.0 GiB | 2.00 |" in section
    assert "| graph | 8 | 50.0 ms | 3,000 | 15.00 |" in section
    ratios = [line.split("|")[-2].strip() for line in tables.headline(measured).splitlines()[4:7]]
    assert ratios == ["2.00", "4.00", "15.00"]


def test_conformance_is_told_in_a_line(tables, tmp_path):
    def worst(error):
        return {"case": "a", "quantity": "o", "error": error, "budget": 0.01}

    report = {
        "backend": {"name": "mine"},
        "device": {"name": "NVIDIA Pretend"},
        "commit": "0123456789abcdef",
        "counts": {"passed": 7, "failed": 1, "open": 2, "refusals": 1},
        "properties": [
            {"property": "values", "worst": worst(0.004)},
            {"property": "values", "worst": worst(0.005)},
            {"property": "gradients", "worst": worst(None)},
            {"property": "scale", "worst": worst(0.009)},
        ],
    }
    (tmp_path / "conformance-pretend-mine.json").write_text(json.dumps(report))
    section = tables.render(tmp_path)
    assert section.startswith("## Conformance\n\n")
    assert section.endswith("| mine | NVIDIA Pretend | 0123456789 | 10 | 7 | 1 | 2 | 0.50 | infinite |\n")


def test_writing_replaces_what_stands_between_the_markers(tables, measured, monkeypatch):
    pages = measured / "README.md", measured / "results.md"
    for page in pages:
        page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    for name, value in (("FOLDER", measured), ("README", pages[0]), ("PAGE", pages[1])):
        monkeypatch.setattr(tables, name, value)
    drawn = []
    monkeypatch.setattr(tables.plots, "plot", lambda found, folder: drawn.append((len(found.rows), folder.name)))
    monkeypatch.setattr("sys.argv", ["readme_tables.py", "--write"])
    for _ in range(2):  # the second time changes nothing
        tables.main()
        for page, generated in zip(pages, (tables.headline(measured), tables.render(measured)), strict=True):
            assert page.read_text() == f"before\n{tables.BEGIN}\n{generated}{tables.END}\nafter\n"
    assert drawn == [(5, "h200")] * 2


def test_a_page_without_markers(tables):
    assert tables.between_markers("nothing here") is None
    with pytest.raises(ValueError, match="no markers"):
        tables.insert("nothing here", "text")


def test_a_selection_is_told_in_a_few_lines(tables, tmp_path):
    of_grid = {"shapes": 70, "calls": 120, "within": 1.05, "close": 0.975, "worst": 1.21}
    head = {"device": "NVIDIA Pretend", "gla_core": "0.1.0", "commit": "0123456789abcdef", "torch": "2.11.0"}
    found = {**head, "date": "2026-01-02T03:04:05+00:00", "summary": {"grid": of_grid}, "rows": []}
    (tmp_path / "selection-pretend.json").write_text(json.dumps(found))
    (tmp_path / "selection-pretend").mkdir()
    (tmp_path / "selection-pretend" / "crossover.png").touch()
    section = tables.render(tmp_path)
    assert section.startswith(
        "## What auto picks, NVIDIA Pretend\n\ngla_core 0.1.0 at 0123456789, torch 2.11.0, 2026-01-02."
    )
    assert "| grid | 120 | 97.5% within 5% | 1.21 × |\n" in section
    assert section.endswith("\n\n![crossover](../benchmarks/results/selection-pretend/crossover.png)\n")


def test_two_ranks_beside_one(tables, tmp_path):
    row = {"tokens": 65536, "heads": 8, "direction": "forward", "ranks": 2, "one_rank": 4e-3, "all_ranks": 2.5e-3}
    row |= {"gather": 1e-4, "efficiency": 0.8, "predicted": {"4": 0.7, "64": 0.6}}
    too_long = {**row, "tokens": 2**22, "one_rank": None, "efficiency": None, "predicted": None}
    about = {"device": "pretend", "gla_core": "0.1.0", "commit": "abc", "torch": "2", "date": "2026-01-01"}
    found = {**about, "rows": [row, too_long], "longest": {"heads": 8, "one_rank": 4000, "all_ranks": 8000}}
    (tmp_path / "ranks-pretend.json").write_text(json.dumps(found))
    page = tables.render(tmp_path)
    assert "| 65,536 | 8 | forward | 4.00 ms | 2.50 ms | 100 us | 0.80 | 0.70 | 0.60 |" in page
    assert "| 4,194,304 | 8 | forward | - | 2.50 ms | 100 us | - | - | - |" in page
    assert "4,000 tokens on one, 8,000 on all" in page
