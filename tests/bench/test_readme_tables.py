"""The numbers of the README and of docs/results.md equal the results files, and agree with each other."""

import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = 150
"""The number of commits that the README's run may be behind the newest result."""


@pytest.fixture
def tables(script):
    return script("readme_tables")


def test_the_pages_hold_what_the_results_say(tables):
    written = {
        tables.README: tables.headline,
        tables.PAGE: tables.render,
        tables.MODELS_PAGE: tables.render_models,
        tables.SERVING_PAGE: tables.render_serving,
    }
    for page, generate in written.items():
        generated = generate(tables.FOLDER)
        assert tables.between_markers(page.read_text()) == generated, "run: python3 benchmarks/readme_tables.py --write"


def test_the_readme_is_one_run_at_one_commit(tables):
    measured = tables.readme_run(tables.FOLDER)
    assert measured, "measure it: benchmarks/evidence.py run"
    commits = {row.commit for rows in measured.values() for row in rows}
    assert len(commits) == 1
    assert not commits.pop().endswith("+"), "the source tree had changes"
    shown = tables.headline(tables.FOLDER).partition("\n\n")[0].splitlines()[2:]
    assert len(shown) == len(tables.HEADLINE)
    for i, rows in enumerate(measured.values()):
        called = {row.call for row in rows}
        for (_, call, _), line in zip(tables.HEADLINE, shown, strict=True):
            cell = line.split(" | ")[1 + i]
            assert cell != "-", f"{call} is missing: measure it"
            assert (call in called) != ("(at " in cell), "a cell of another run has to name its commit"


def test_rows_of_a_call_have_one_commit(tables):
    """Two measurements of a call at different commits would contradict each other on the page."""
    commits = {}
    for part, row in tables.shown_rows(tables.FOLDER):
        commits.setdefault((part, row.device, row.call), set()).add(row.commit)
    assert {key: x for key, x in commits.items() if len(x) > 1} == {}


def test_every_row_names_a_commit_a_device_and_versions(tables):
    for part, row in tables.shown_rows(tables.FOLDER):
        assert row.commit, (part, row.call)
        assert row.device
        assert row.versions["torch"]
        assert part in {*tables.SECTIONS, "precision", "model_calls"}


def commits_between(older: str, newer: str) -> int | None:
    """Returns the number of commits after `older` up to `newer`, where a merged branch counts as one commit.

    Returns None outside of a repository with both.
    """
    command = ["git", "-C", str(ROOT), "rev-list", "--count", "--first-parent", f"{older}..{newer}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    return int(ran.stdout) if ran.returncode == 0 else None


def test_the_readme_is_not_much_older_than_the_newest_result(tables):
    (newest, *_) = sorted((row for _, row in tables.shown_rows(tables.FOLDER)), key=lambda row: row.date, reverse=True)
    (rows, *_) = tables.readme_run(tables.FOLDER).values()
    behind = commits_between(rows[0].commit, newest.commit)
    if behind is None:
        pytest.skip("the history of the repository is not here")
    assert behind <= OLDEST, "run: benchmarks/evidence.py run"


def test_pictures_are_of_files_that_are_there(tables):
    drawn = {path.relative_to(tables.FOLDER).with_suffix(".jsonl") for path in tables.FOLDER.glob("*/*.svg")}
    expected = {path.relative_to(tables.FOLDER) for path in tables.FOLDER.glob("*/*.jsonl")}
    assert {path for path in drawn if not path.parent.name.startswith("selection")} <= expected


def test_generated_files_stay_small(tables):
    """Results are summaries; data without a reader are not committed."""
    paths = [path for path in tables.FOLDER.rglob("*") if path.suffix in (".json", ".jsonl")]
    assert 0 < sum(len(path.read_text().splitlines()) for path in paths) < 10_000


def test_no_results_no_section(tables, tmp_path):
    assert tables.render(tmp_path) == tables.headline(tmp_path) == ""


ABOUT = {
    "commit": "0123456789abcdef",
    "date": "2026-01-02T03:04:05+00:00",
    "device": "NVIDIA Pretend",
    "versions": {"python": "3.12.3", "gla_core": "0.1.0", "torch": "2.11.0", "fla": "0.6.0"},
}
OTHERS = ("o", "state", "dq", "dk", "dv")
FORWARD = "`chunk_gla` forward: 8 sequences of 4096 tokens, 16 heads"


@pytest.fixture
def measured(tables, tmp_path):
    """A folder with a made-up run: a few rows of each part of the README."""
    Row = tables.Row

    def pair(call, theirs, ours, peer="fla", who="gla-core", **facts):
        return [
            Row(call=call, who=peer, seconds=theirs, spread=0.02, facts=facts, **ABOUT),
            Row(call=call, who=who, baseline=peer, seconds=ours, spread=0.01, facts=facts, **ABOUT),
        ]

    scan = next(call for part, call, _ in tables.HEADLINE if part == "mamba2_scan")
    step = {"wall, s": 0.1, "GiB": 15.4, "first step, s": 9.0}
    rows = {
        "op": [*pair(FORWARD, 2e-3, 4e-4), *pair("`online_softmax` forward: 4 rows of 8", 1e-5, 2e-5, "torch")],
        "mamba2_scan": pair(scan, 3e-3, 2e-3, "mamba_ssm"),
        "models": [
            *pair(tables.TRAINING, 0.1, 0.05, who="gla_transformers, compiled", **step),
            *pair(tables.TRAINING, 0.1, 0.08, who="gla_transformers", **step)[1:],
            *pair(tables.DECODING, 3e-3, 1e-3, who="gla_transformers"),
        ],
        "precision": [
            Row(call="`chunk_gla`, bfloat16", who=who, facts={**dict.fromkeys(OTHERS, x), "dg": y}, **ABOUT)
            for who, x, y in (("fla", 2e-3, 1e-3), ("gla-core", 2e-3, 3e-3))
        ],
    }
    for part, part_rows in rows.items():
        tables.record.write(tmp_path / "pretend" / f"{part}.jsonl", part_rows)
    return tmp_path


def changed(tables, folder, part, **fields):
    """Changes fields of the rows of a part that `who` computed."""
    path = folder / "pretend" / f"{part}.jsonl"
    who = fields.pop("who")
    rows = [dataclasses.replace(row, **fields) if row.who == who else row for row in tables.record.read(path)]
    tables.record.write(path, rows)


def test_the_headline(tables, measured):
    counts = {"passed": 7, "failed": 0, "open": 2, "refusals": 1}
    report = {"backend": {"name": "mine"}, "device": {"name": "NVIDIA Pretend"}, "commit": "01234567", "counts": counts}
    (measured / "conformance-pretend-mine.json").write_text(json.dumps(report))
    table, _, told = tables.headline(measured).replace("\N{NO-BREAK SPACE}", " ").partition("\n\n")
    cells = [line.split(" | ")[1].removesuffix(" |") for line in table.splitlines()]
    assert cells[0] == "NVIDIA Pretend"
    assert cells[2] == "**5.00 ×**: 400 us; FLA 2.00 ms"
    assert cells[3:5] == ["-", "-"]  # the made-up run has no such rows
    assert cells[5] == "**1.50 ×**: 2.00 ms; mamba_ssm 3.00 ms"
    assert cells[6].startswith("**2.00 ×**: 50.0 ms (wall 100 ms, 15.4 GiB); FLA 100 ms (wall")
    assert cells[7] == "**3.00 ×**: 1.00 ms; FLA 3.00 ms"
    for sentence in (
        "One run at commit 0123456789, 2026-01-02: torch 2.11.0, fla 0.6.0; medians.",
        "the softmax ops: 0.50 to 0.5 times as fast as the peer, median 0.5, 1 of 1 slower.",
        "the errors of o, dq, dk and dv are 1.00 to 1.00 times FLA's, and that of dg is 3.00 to 3.00 times; ",
        "This run did not measure: `chunk_gla` forward: 1 sequence of 65,536 tokens, 8 heads; ",
        "; RetNet 1.3B, a constant gate; ",
        "Cases of the conformance kit passed at this commit: `mine` on NVIDIA Pretend 7 (2 open).",
    ):
        assert sentence in told


def test_a_cell_of_an_earlier_run_names_its_commit(tables, measured):
    earlier = {"commit": "fedcba9876", "date": "2026-01-01T03:04:05+00:00"}
    for who in ("fla", "gla_transformers", "gla_transformers, compiled"):
        changed(tables, measured, "models", who=who, **earlier)
    last = tables.headline(measured).replace("\N{NO-BREAK SPACE}", " ").partition("\n\n")[0].splitlines()[-1]
    assert last.endswith("| **3.00 ×**: 1.00 ms; FLA 3.00 ms (at fedcba98) |")


def test_a_device_of_another_commit_has_no_column(tables, measured):
    rows = tables.record.read(measured / "pretend" / "op.jsonl")
    older = {"commit": "fedcba98", "device": "NVIDIA Older", "date": "2026-01-01T03:04:05+00:00"}
    other = [dataclasses.replace(row, **older) for row in rows]
    tables.record.write(measured / "older" / "op.jsonl", other)
    assert tables.headline(measured).startswith("| call | NVIDIA Pretend |\n")
    rows = [dataclasses.replace(row, commit=ABOUT["commit"]) for row in other]
    tables.record.write(measured / "older" / "op.jsonl", rows)
    assert tables.headline(measured).startswith("| call | NVIDIA Pretend | NVIDIA Older |\n")


def test_a_time_that_varies_has_no_ratio(tables, measured):
    changed(tables, measured, "op", who="fla", spread=0.4)
    assert "| unsteady: " in tables.headline(measured)
    page = tables.render(measured).replace("\N{NO-BREAK SPACE}", " ")
    assert f"| {FORWARD} | - | 400 us | fla 2.00 ms (spread 40%) | 1% |" in page


def test_a_failed_peer_is_said_and_has_no_ratio(tables, measured):
    changed(tables, measured, "models", who="fla", error="RuntimeError: cannot be captured. See there", seconds=None)
    page = tables.render(measured).replace("\N{NO-BREAK SPACE}", " ")
    assert "| - | gla_transformers | 1.00 ms | fla: cannot be captured |" in page


def test_the_page(tables, measured):
    page = tables.render(measured).replace("\N{NO-BREAK SPACE}", " ")
    for text in (
        "## The ops at the sizes of models\n",
        "### NVIDIA Pretend\n\nAt 0123456789, 2026-01-02; torch 2.11.0, fla 0.6.0. Rows: [`op.jsonl`](../op.jsonl).\n",
        f"| call | times as fast | time | peer | spread |\n| --- | ---: | ---: | --- | ---: |\n| {FORWARD} | 5.00 |",
        f"| {tables.TRAINING} | 2.00 | gla_transformers, compiled | 50.0 ms | fla 100 ms | 1% | 100 ms | 15.4 |",
        "## Precision\n",
        "| `chunk_gla`, bfloat16 | gla-core | 2.0e-03 | 2.0e-03 | 2.0e-03 | 2.0e-03 | 2.0e-03 | 3.0e-03 |",
    ):
        assert text in page, text


def test_serving_has_a_page_of_its_own(tables, measured):
    row, folder = functools.partial(tables.Row, call="GDN, decode: 8 sequences", **ABOUT), measured / "pretend"
    rows = [
        row(who="vllm", seconds=2e-5, spread=0.01),
        row(who="flashinfer", baseline="vllm", error="ModuleNotFoundError: No module named 'flashinfer'"),
        row(who="gla-core", baseline="vllm", seconds=1e-5, spread=0.01, facts={"of floor": 0.9, "apart": 0.0032}),
    ]
    tables.record.write(folder / "serving.jsonl", rows)
    page = tables.render_serving(measured).replace("\N{NO-BREAK SPACE}", " ")
    assert "## Times beside vLLM, SGLang and FlashInfer\n" in page
    assert "| - | flashinfer | ModuleNotFoundError: No module named 'flashinfer' | vllm 20.0 us |" in page
    assert "| 2.00 | gla-core | 10.0 us | vllm 20.0 us | 1% | 0.90 | 3.2e-03 |" in page
    assert "GDN" not in tables.render(measured)


def test_errors_beside_times_are_also_those_of_the_baseline(tables, measured):
    row, folder = functools.partial(tables.Row, call="KDA, alternating", **ABOUT), measured / "pretend"
    rows = [
        row(who="fla", seconds=2e-3, spread=0.01, facts={"error": 0.0049}),
        row(who="gla-core", baseline="fla", seconds=1e-3, spread=0.01, facts={"error": 0.0021}),
    ]
    tables.record.write(folder / "delta_peers.jsonl", rows)
    page = tables.render(measured).replace("\N{NO-BREAK SPACE}", " ")
    assert "| KDA, alternating | - | fla | 2.00 ms |  | 1% | 4.9e-03 |" in page
    assert "| KDA, alternating | 2.00 | gla-core | 1.00 ms | fla 2.00 ms | 1% | 2.1e-03 |" in page


def test_rows_of_several_commits_have_a_column_for_them(tables, measured):
    path = measured / "pretend" / "op.jsonl"
    rows = tables.record.read(path)
    tables.record.write(path, [*rows[:2], *(dataclasses.replace(row, commit="fedcba9876") for row in rows[2:])])
    page = tables.render(measured)
    assert "At 0123456789, fedcba9876, 2026-01-02 to 2026-01-02" in page
    assert "| 1% | 0123456 |" in page


def test_pictures_of_the_run(tables, measured):
    pytest.importorskip("matplotlib")
    tables.draw(measured)
    assert {path.name for path in (measured / "pretend").glob("*.svg")} == {"op.svg", "mamba2_scan.svg"}
    drawn = (measured / "pretend" / "op.svg").read_text()
    assert "5.00 ×, 400 us" in drawn
    page = tables.render(measured)
    assert page.startswith("![how many times as fast: ops beside flash-linear-attention and PyTorch, pretend](../bench")
    assert page.index("op.svg") < page.index("mamba2_scan.svg")


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
    pages = [measured / name for name in ("README.md", "results.md", "models.md", "serving.md")]
    names, generators = ("README", "PAGE", "MODELS_PAGE", "SERVING_PAGE"), [tables.headline, tables.render]
    generators += [tables.render_models, tables.render_serving]
    for page in pages:
        page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    for name, value in zip(("FOLDER", *names), (measured, *pages), strict=True):
        monkeypatch.setattr(tables, name, value)
    drawn = []
    monkeypatch.setattr(tables, "draw", drawn.append)
    monkeypatch.setattr("sys.argv", ["readme_tables.py", "--write"])
    for _ in range(2):  # the second time changes nothing
        tables.main()
        for page, generate in zip(pages, generators, strict=True):
            assert page.read_text() == f"before\n{tables.BEGIN}\n{generate(measured)}{tables.END}\nafter\n"
    assert drawn == [measured] * 2


def test_a_page_without_markers(tables):
    assert tables.between_markers("nothing here") is None
    with pytest.raises(ValueError, match="no markers"):
        tables.insert("nothing here", "text")


def test_a_selection_is_told_in_a_few_lines(tables, tmp_path):
    grid = {"shapes": 70, "calls": 120, "within": 1.05, "close": 0.975, "worst": 1.21}
    head = {"device": "NVIDIA Pretend", "gla_core": "0.1.0", "commit": "0123456789abcdef", "torch": "2.11.0"}
    report = {**head, "date": "2026-01-02T03:04:05+00:00", "summary": {"grid": grid}, "rows": []}
    (tmp_path / "selection-pretend.json").write_text(json.dumps(report))
    (tmp_path / "selection-pretend").mkdir()
    (tmp_path / "selection-pretend" / "crossover.svg").touch()
    section = tables.render(tmp_path)
    assert section.startswith(
        "## What auto picks, NVIDIA Pretend\n\ngla_core 0.1.0 at 0123456789, torch 2.11.0, 2026-01-02."
    )
    assert "| grid | 120 | 97.5% within 5% | 1.21 × |\n" in section
    assert section.endswith("(../benchmarks/results/selection-pretend/crossover.svg)\n")


@pytest.fixture
def models_measured(tables, measured):
    """The made-up run, with calls of models: 4, 0.5 and 2 times as fast, one eager, and one whose peer failed."""

    def pair(call, theirs, ours, floors, eager=False, error=None):
        facts = {"eager": True} if eager else {}
        return [
            tables.Row(call=call, who="fla", seconds=theirs, spread=0.02, error=error, **ABOUT),
            tables.Row(
                call=call, who="gla-core", baseline="fla", seconds=ours, spread=0.01,
                facts={**facts, "floors": floors, "backend": "triton"}, **ABOUT,
            ),
        ]  # fmt: skip

    rows = [
        *pair("GLA 1.3B: forward", 4e-4, 1e-4, 1.5),
        *pair("RetNet 3B: forward and backward", 1e-3, 2e-3, 19.6, eager=True),
        *pair("GLA 1.3B: step", 2e-4, 1e-4, 1.1),
        *pair("Based 1B: step", None, 3e-4, 2.0, error="RuntimeError: no such sizes"),
    ]
    tables.record.write(measured / "pretend" / "model_calls.jsonl", rows)
    return measured


def test_the_page_of_models(tables, models_measured):
    page = tables.render_models(models_measured).replace("\N{NO-BREAK SPACE}", " ")
    measured, _, listed = page.partition("## The models\n")
    lines = measured.splitlines()
    assert lines[:3] == [
        "## NVIDIA Pretend",
        "",
        "At 0123456789, 2026-01-02; torch 2.11.0, fla 0.6.0. Rows: [`model_calls.jsonl`](../model_calls.jsonl).",
    ]
    assert lines[4:] == [
        "| model | call | ours | peer | times as fast | floors |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| GLA 1.3B | forward | 100 us | fla 400 us | 4.00 | 1.5 |",
        "| RetNet 3B | forward and backward (eager) | 2.00 ms | fla 1.00 ms | 0.50 | 19.6 |",
        "| GLA 1.3B | step | 100 us | fla 200 us | 2.00 | 1.1 |",
        "| Based 1B | step | 300 us | fla: no such sizes | - | 2.0 |",
        "",
    ]
    assert "| GLA 1.3B | `chunk_gla` | key | B4 T4096 H4 K256 V512 | fla-hub/gla-1.3B-100B: config.json |\n" in listed


def test_the_readme_quotes_the_worst_and_the_median_model(tables, models_measured):
    assert (
        "Of 3 calls of published models ([table](docs/models.md)), the worst is RetNet 3B: forward and backward, 0.50 "
        "times as fast as fla at 19.6 floors; the median is GLA 1.3B: step, 2.00 times as fast as fla at 1.1 floors."
    ) in tables.headline(models_measured)


def test_the_readme_is_silent_on_models_that_were_not_measured(tables, measured):
    assert "published models (" not in tables.headline(measured)
    assert tables.render_models(measured).startswith("## The models\n")


def test_no_row_is_compared_across_devices(tables, measured):
    """The page has a table for each device, so a ratio is of one device."""
    rows = [row for _, row in tables.shown_rows(measured)]
    other = [dataclasses.replace(row, device="another", seconds=1.0) for row in rows if row.baseline is None]
    for row in rows:
        assert tables.record.ratio(row, [*other, *rows]) == tables.record.ratio(row, rows)
