"""The numbers of the README and of docs/results.md equal the results files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from gla_core.bench import results
from gla_core.bench.suite import Row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(script):
    return script("readme_tables")


def test_the_pages_hold_what_the_results_say(tables):
    written = {tables.README: tables.headline(tables.FOLDER), tables.PAGE: tables.render(tables.FOLDER)}
    for page, generated in written.items():
        assert tables.between_markers(page.read_text()) == generated, "run: python3 benchmarks/readme_tables.py --write"


def test_every_row_of_the_readme_comes_from_one_run_at_one_commit(tables):
    path = tables.measured_in(tables.FOLDER)
    assert path.exists(), "measure it: benchmarks/evidence.py readme"
    assert re.fullmatch("[0-9a-f]{7,40}", json.loads(path.read_text())["commit"])  # no "+": nothing uncommitted
    table, _, told = tables.headline(tables.FOLDER).partition("\n\n")
    shown = table.splitlines()[2:]
    assert len(shown) >= len(tables.HEADLINE) - 1, "rows are missing: run benchmarks/evidence.py readme again"
    assert ("Left out" in told) == (len(shown) < len(tables.HEADLINE) + 4)
    calls, _ = tables.readme.read(path)
    assert [row.error for row in calls if row.error] == []


def test_the_pictures_are_those_of_the_run(tables):
    calls, of_models = tables.readme.read(tables.measured_in(tables.FOLDER))
    lengths = [row for row in of_models if row["what"] == "length" and "error" not in row]
    drawn = {path.name for path in tables.pictures_of(tables.FOLDER).glob("*.svg")}
    of_models = {"training_speed.svg", "training_memory.svg"} if lengths else set()
    assert drawn == {f"{row.op}.svg" for row in calls} | of_models


def test_generated_files_stay_small():
    """Results are summaries; data without a reader are not committed."""
    assert sum(len(path.read_text().splitlines()) for path in ROOT.rglob("benchmarks/results/*.json")) < 15_000


def test_no_results_no_section(tables, tmp_path):
    assert tables.render(tmp_path) == tables.headline(tmp_path) == ""


def test_a_section_names_its_source(tables, tmp_path, synthetic):
    results.write(tmp_path / "baseline-pretend.json", synthetic)
    section = tables.render(tmp_path)
    assert section.startswith("## Times: baseline, NVIDIA Pretend\n")
    assert section.count("##") == 1
    for text in (
        "gla_core 0.1.0 at 0123456789, torch 2.11.0, triton 3.6.0, driver 1.2.3, 2026-01-02; copies run at 4.00 TB/s",
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
    (tmp_path / "h200" / "chunk_gla.svg").touch()
    assert tables.render(tmp_path).startswith("![chunk_gla](../benchmarks/results/h200/chunk_gla.svg)\n\n## Times")


@pytest.fixture
def measured(tables, tmp_path):
    """A folder with a made-up run for the README: one workload and some rows of models."""

    def call(backend, seconds, direction="forward"):
        row = Row(workload="train_b8_t4096_h16", op="chunk_gla", backend=backend, direction=direction, seconds=seconds)
        return {"what": "call", **dataclasses.asdict(dataclasses.replace(row, spread=0.02))}

    def trained(way, seconds, tokens=2048, sequences=8):
        times = {"seconds": seconds, "spread": 0.01, "device_seconds": seconds / 2, "gla_seconds": seconds / 4}
        speed = {"tokens_per_second": sequences * tokens / seconds, "gib": 2.0, "first_step": 1.0}
        return {"way": way, "sequences": sequences, "tokens": tokens, **times, **speed}

    def decoded(what, way, speed):
        row = {"what": what, "way": way, "size": 8, "sequences": 8, "tokens": 512}
        return {**row, "seconds": 8 / speed, "spread": 0.04, "tokens_per_second": speed, "first_token": 0.05}

    training = [("fla", 0.4), ("accelerated", 0.2), ("compiled", 0.1)]
    rows = [
        *(call(name, seconds) for name, seconds in (("fla", 2e-3), ("triton_fused", 5e-4), ("parallel_scan", 4e-4))),
        *(call(name, 1e-3, "forward+backward") for name in ("fla", "triton_fused")),  # one of ours has no time
        *({"what": "train", "size": 8, **trained(way, seconds)} for way, seconds in training),
        *({"what": "length", "size": 1024, **trained(way, seconds / 8, 1024, 1)} for way, seconds in training),
        *(decoded("generate", way, speed) for way, speed in (("fla", 200), ("ours", 400))),
        *({**decoded("graph", way, 3000), "same_words_as_eager": True} for way in ("fla", "ours")),
    ]
    about = {
        "device": tables.DEVICE,
        "driver": "1.2.3",
        "python": "3.12.3",
        "gla_core": "0.1.0",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "fla": "0.6.0",
        "transformers": "5.17.0",
        "commit": "0123456789abcdef",
        "date": "2026-01-02T03:04:05+00:00",
        "copy_bandwidth": 4e12,
        "model": {"hidden_size": 8},
    }
    tables.measured_in(tmp_path).write_text(json.dumps({**about, "rows": rows}))
    return tmp_path


def test_the_headline_is_the_faster_of_ours_beside_the_baseline(tables, measured):
    counts = {"passed": 7, "failed": 0, "open": 2, "refusals": 1}
    report = {"backend": {"name": "mine"}, "device": {"name": tables.DEVICE}, "counts": counts}
    (measured / "conformance-h200-mine.json").write_text(json.dumps(report))
    lines = tables.headline(measured).splitlines()
    call = "`chunk_gla` forward: 8 sequences of 4096 tokens, 16 heads"
    (left_out,) = re.findall(r"no steady times for them: (.*?)\. ", lines[-1])
    assert left_out.startswith("`chunk_gla` forward and backward: 8 sequences of 4096 tokens, 16 heads; `chunk_gla` f")
    assert len(left_out.split("; ")) == len(tables.HEADLINE) - 1  # all rows of models are there
    assert lines[2] == f"| {call} | fla 2.00 ms | parallel_scan 400 us | 5.00 |"
    assert sum("chunk_gla" in line for line in lines[:-1]) == 1  # and not the call with a missing time
    assert lines[-1].startswith(
        "NVIDIA H200, torch 2.11.0, triton 3.6.0, fla 0.6.0, transformers 5.17.0; one run at commit 0123456789, "
        "2026-01-02. Times are medians; the quartiles of each are at most 4% of it apart."
    )
    assert lines[-1].endswith("Cases of the conformance kit passed there: `mine` 7 (2 open).")


def test_the_headline_compares_training_on_the_device_and_decoding_like_with_like(tables, measured):
    lines = tables.headline(measured).splitlines()[3:7]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["fla 200 ms (wall 400 ms)", "100 ms (wall 200 ms)", "2.00 |"],
        ["fla 200 ms (wall 400 ms)", "50.0 ms (wall 100 ms)", "4.00 |"],
        ["fla 200 tokens/s", "400 tokens/s", "2.00 |"],
        ["fla 3,000 tokens/s", "3,000 tokens/s", "1.00 |"],
    ]


def test_a_graph_that_cannot_be_captured_gives_no_ratio(tables, measured):
    path = tables.measured_in(measured)
    found = json.loads(path.read_text())
    for row in found["rows"]:
        if (row["what"], row.get("way")) == ("graph", "fla"):
            row["error"] = "RuntimeError: no"
    path.write_text(json.dumps(found))
    line = "the same decoding, each in a CUDA graph | fla cannot be captured | 3,000 tokens/s | - |"
    assert line in tables.headline(measured)
    assert "\nFailed:\n\n- graph fla 8: RuntimeError: no\n" in tables.render(measured)


def test_a_time_that_varies_is_not_shown(tables, measured):
    path = tables.measured_in(measured)
    found = json.loads(path.read_text())
    for row in found["rows"]:
        if (row["what"], row.get("backend")) == ("call", "fla"):
            row["spread"] = 0.4
    path.write_text(json.dumps(found))
    table, _, told = tables.headline(measured).partition("\n\n")
    assert "chunk_gla" not in table
    assert "no steady times for them: `chunk_gla` forward: 8 sequences of 4096 tokens, 16 heads; " in told
    assert tables._of_whole_groups(tables.readme.read(path)[0]) == []


def test_every_row_of_the_headline_is_measured(tables):
    cases = [case for job in tables.readme.jobs(torch.device("cuda")) if isinstance(job, list) for case in job]
    planned = {(case.workload.op, case.workload.name, case.direction) for case in cases}
    assert planned >= set(tables.HEADLINE)


def test_a_section_for_the_run(tables, measured):
    section = tables.render(measured)
    assert section.startswith("## The README's table, its pictures and whole models: one run, NVIDIA H200\n\ngla_core")
    for line in (
        "| FLA's model after `accelerate()` | 16,384 | 200 ms | 1.0% | 100 ms | 50.0 ms | 81,920 | 2.0 GiB "
        "| 2.00 | 2.00 |",
        "| `gla_transformers`, the whole loss compiled | 1,024 | 12.5 ms | 1.0% | 6.25 ms | 3.12 ms | 81,920 | 2.0 GiB "
        "| 4.00 | 4.00 |",
        "| `gla_transformers`, eager | CUDA graph | 8 | 50.0 ms | 2.67 ms | 4.0% | 3,000 | yes | 1.00 |",
    ):
        assert line in section


def test_pictures_of_the_run(tables, measured):
    pytest.importorskip("matplotlib")
    tables.draw(measured)
    assert {path.name for path in tables.pictures_of(measured).iterdir()} == {
        *("chunk_gla.svg", "training_speed.svg", "training_memory.svg")
    }
    speed = (tables.pictures_of(measured) / "training_speed.svg").read_text()
    assert "Training GLA of 374M parameters, one sequence a step: tokens per second, higher is better" in speed
    assert "gla_transformers, compiled" in speed


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
    monkeypatch.setattr(tables, "draw", drawn.append)
    monkeypatch.setattr("sys.argv", ["readme_tables.py", "--write"])
    for _ in range(2):  # the second time changes nothing
        tables.main()
        for page, generated in zip(pages, (tables.headline(measured), tables.render(measured)), strict=True):
            assert page.read_text() == f"before\n{tables.BEGIN}\n{generated}{tables.END}\nafter\n"
    assert drawn == [measured] * 2


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
    (tmp_path / "selection-pretend" / "crossover.svg").touch()
    section = tables.render(tmp_path)
    assert section.startswith(
        "## What auto picks, NVIDIA Pretend\n\ngla_core 0.1.0 at 0123456789, torch 2.11.0, 2026-01-02."
    )
    assert "| grid | 120 | 97.5% within 5% | 1.21 × |\n" in section
    assert section.endswith("\n\n![crossover](../benchmarks/results/selection-pretend/crossover.svg)\n")


def test_serving(tables, tmp_path):
    rows = [
        {"what": "decode", "who": "gla_core", "sequences": 64, "seconds": 1e-4, "of_floor": 0.9},
        {"what": "decode", "who": "vllm", "sequences": 64, "seconds": 2e-4, "of_floor": 0.45},
        {
            "what": "mixed",
            "who": "gla_core",
            "decodes": 3,
            "sequences": 1,
            "tokens": 9,
            "seconds": 3e-4,
            "of_floor": 0.5,
        },
        {"what": "mixed", "who": "vllm", "decodes": 3, "sequences": 1, "tokens": 9, "error": "ValueError"},
    ]
    about = {"device": "NVIDIA Pretend", "gla_core": "1", "commit": "abc", "torch": "2", "date": "2026-01-02T03:04:05"}
    (tmp_path / "serving-pretend.json").write_text(json.dumps({**about, "rows": rows}))
    page = tables.render(tmp_path)
    assert "## Serving, NVIDIA Pretend" in page
    assert "| batch | gla_core | vllm | of floor |" in page
    assert "| decode: 64 sequences | 100 us | 200 us | 0.90 |" in page
    assert "| mixed: 3 decodes, 1 sequence, 9 tokens | 300 us | - | 0.50 |" in page


def test_two_ranks_beside_one(tables, tmp_path):
    row = {"kind": "head", "tokens": 65536, "heads": 8, "direction": "forward", "ranks": 2, "one_rank": 4e-3}
    row |= {"all_ranks": 2.5e-3, "gather": 1e-4, "efficiency": 0.8, "predicted": {"4": 0.7, "64": 0.6}}
    too_long = {**row, "tokens": 2**22, "one_rank": None, "efficiency": None, "predicted": None}
    about = {"device": "pretend", "gla_core": "0.1.0", "commit": "abc", "torch": "2", "date": "2026-01-01"}
    found = {**about, "rows": [row, too_long], "longest": {"heads": 8, "one_rank": 4000, "all_ranks": 8000}}
    (tmp_path / "ranks-pretend.json").write_text(json.dumps(found))
    page = tables.render(tmp_path)
    assert "| head | 65,536 | 8 | forward | 4.00 ms | 2.50 ms | 100 us | 0.80 | 0.70 | 0.60 |" in page
    assert "| head | 4,194,304 | 8 | forward | - | 2.50 ms | 100 us | - | - | - |" in page
    assert "has 4,000 tokens on one rank and 8,000 on all" in page
