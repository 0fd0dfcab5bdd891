"""Generates the README's table, docs/results.md and their pictures from the files under benchmarks/results.

python3 benchmarks/readme_tables.py          prints the generated part of docs/results.md
python3 benchmarks/readme_tables.py --write  writes it between the markers of both pages, and draws (needs matplotlib)

Every row of the README's table and every point of the pictures comes from one file, which one run of
`evidence.py readme` wrote at one commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import context_parallel
import crossover
import model_pictures
import readme

from gla_core.bench import plots, results
from gla_core.bench.baselines import BASELINES
from gla_core.bench.results import Results
from gla_core.bench.run import by_op
from gla_core.bench.suite import Row
from gla_core.conformance.summary import ratio_text

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
MARKED = re.compile(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", re.DOTALL)

DEVICE = "NVIDIA H200"
"""The device of the README's table and of the pictures."""
OURS = ("triton_fused", "parallel_scan")
HEADLINE = (
    ("chunk_gla", "train_b8_t4096_h16", "forward"),
    ("chunk_gla", "train_b8_t4096_h16", "forward+backward"),
    ("chunk_gla", "long_b1_t65536_h8", "forward"),
    ("chunk_gla", "prefill_b1_t8192_h16", "forward"),
    ("chunk_gla", "packed_64_t65536_h8", "forward"),
    ("chunk_gla", "packed_64_t65536_h8", "forward+backward"),
    ("recurrent_gla_step", "decode_b64", "step_graph"),
    ("recurrent_gla_step", "decode_b1024", "step_graph"),
    ("online_softmax", "rows_8192_columns_50257", "forward"),
    ("softmax_attention", "causal_b4_t4096_h16", "forward"),
)
IN_WORDS = {"forward": "forward", "forward+backward": "forward and backward", "step_graph": "in a CUDA graph"}
WAYS = {
    "fla": "FLA's model",
    "accelerated": "FLA's model after `accelerate()`",
    "ours": "`gla_transformers`, eager",
    "blocks": "`gla_transformers`, each layer compiled",
    "compiled": "`gla_transformers`, the whole loss compiled",
}
"""The ways of models.py, in words."""
MODEL = "FLA's GLA model with 374M parameters"
ModelRow = dict[str, Any]


def headline(folder: Path) -> str:
    """Returns the Markdown of the README's table and the result of the kit; '' if the run is missing."""
    path = measured_in(folder)
    if not path.exists():
        return ""
    calls, of_models = readme.read(path)
    calls = [row for row in calls if readme.is_steady(row)]
    of_calls = {_call_in_words(key): _headline([row for row in calls if row.key == key]) for key in HEADLINE}
    model_lines = _headline_of_models(of_models)
    lines = ["| call | baseline | fastest of this project | times as fast |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {call} | {cells} |" for call, cells in {**of_calls, **model_lines}.items() if cells]
    told = [_run(path, calls, of_models), _left_out(of_calls, model_lines), _how_right(folder)]
    return "\n".join(lines) + "\n\n" + " ".join(filter(None, told)) + "\n"


def _left_out(of_calls: dict[str, str | None], of_models: dict[str, str | None]) -> str:
    """Returns a sentence about the rows that have no steady time in the run; '' if there are none."""
    missing = [call for call, cells in of_calls.items() if cells is None]
    number = sum(cells is None for cells in of_models.values())
    missing += [f"{number} rows of whole models"] if number else []
    return f"Left out, because the run has no steady times for them: {'; '.join(missing)}." if missing else ""


def measured_in(folder: Path) -> Path:
    """Returns the file from which the README's table and the pictures are made."""
    return folder / f"readme-{results.short_name(DEVICE)}.json"


def render(folder: Path) -> str:
    """Returns the Markdown of everything in the folder, ending in a newline; '' if there is nothing."""
    times = [_section(results.read(path), path) for path in _files_of_times(folder)]
    kit = _conformance(sorted(folder.glob("conformance-*.json")))
    told = [
        tell(json.loads(path.read_text()), path)
        for name, tell in _SECTIONS.items()
        for path in sorted(folder.glob(f"{name}-*.json"))
    ]
    return "\n".join([*_pictures(pictures_of(folder)), *kit, *told, *times])


def draw(folder: Path) -> None:
    """Draws all pictures of the files in the folder."""
    path = measured_in(folder)
    if path.exists():
        found = json.loads(path.read_text())
        plots.plot(_results(found, _of_whole_groups(readme.read(path)[0])), pictures_of(folder))
        model_pictures.draw(found, pictures_of(folder))
    for path in folder.glob("selection-*.json"):
        crossover.draw(path)
    for path in folder.glob("ranks-*.json"):
        context_parallel.draw(json.loads(path.read_text()), path.with_suffix(".svg"))


def _of_whole_groups(calls: Sequence[Row]) -> list[Row]:
    """Returns the rows of calls whose times are all steady, so that no group in a picture lacks a bar."""
    unsteady = {row.key for row in calls if not readme.is_steady(row)}
    return [row for row in calls if row.key not in unsteady]


def _results(found: dict[str, Any], calls: Sequence[Row]) -> Results:
    """Returns the calls of a file of readme.py as `Results`."""
    names = [field.name for field in dataclasses.fields(Results) if field.name != "rows"]
    return Results(**{name: found[name] for name in names}).with_rows(calls)


def pictures_of(folder: Path) -> Path:
    """Returns the folder of the pictures of `DEVICE`."""
    return folder / results.short_name(DEVICE)


def between_markers(page: str) -> str | None:
    """Returns the text between the markers; None if the page has no markers."""
    found = MARKED.search(page)
    return found and found[1]


def insert(page: str, generated: str) -> str:
    """Returns the page with `generated` between its markers. Raises ValueError if it has no markers."""
    if between_markers(page) is None:
        raise ValueError(f"the page has no markers; put {BEGIN} and {END} on lines of their own")
    return MARKED.sub(lambda _: f"{BEGIN}\n{generated}{END}", page)


def _files_of_times(folder: Path) -> list[Path]:
    others = ("conformance", *_SECTIONS)
    return [path for path in sorted(folder.glob("*.json")) if path.name.partition("-")[0] not in others]


def _call_in_words(key: tuple[str, str, str]) -> str:
    op, workload, direction = key
    return f"`{op}` {IN_WORDS[direction]}: {plots.in_words(op, workload)}"


def _headline(rows: Sequence[Row]) -> str | None:
    """Returns the cells of one call, the faster one of `OURS` beside the baseline; None if a time is missing."""
    timed = {row.backend: row for row in rows if row.seconds is not None}
    baselines = [row for row in timed.values() if row.backend in BASELINES]
    if not baselines or not timed.keys() >= set(OURS):
        return None
    ours = min((timed[name] for name in OURS), key=_seconds)
    theirs, time = results.time_text(_seconds(baselines[0])), results.time_text(_seconds(ours))
    ratio = _seconds(baselines[0]) / _seconds(ours)
    return f"{baselines[0].backend} {theirs} | {ours.backend} {time} | {ratio:.2f}"


def _seconds(row: Row) -> float:
    assert row.seconds is not None
    return row.seconds


def _headline_of_models(rows: Sequence[ModelRow]) -> dict[str, str | None]:
    """Returns the table cells of whole models, by call: training by device time, decoding eager and in a CUDA graph.

    The cells are None if a time is missing.
    """
    found = {(row["what"], row["way"]): row for row in rows if row["size"] == 8}
    fine = {key: row for key, row in found.items() if "error" not in row}
    lines: dict[str, str | None] = {}
    for way, call in (
        ("accelerated", f"a training step of {MODEL} (8 x 2048 tokens) after `accelerate()`, time on the device"),
        ("compiled", "the same step by `gla_transformers`, compiled, time on the device"),
    ):
        lines[call] = None
        if fine.keys() >= {("train", "fla"), ("train", way)}:
            theirs, ours = fine["train", "fla"], fine["train", way]
            ratio = theirs["device_seconds"] / ours["device_seconds"]
            lines[call] = f"fla {_both_times(theirs)} | {_both_times(ours)} | {ratio:.2f}"
    for what, call in (
        ("generate", f"decoding of {MODEL} by `generate`, by `gla_transformers`, 8 sequences"),
        ("graph", "the same decoding, each in a CUDA graph"),
    ):
        lines[call] = None
        if (what, "fla") in found and (what, "ours") in fine:
            theirs, ours = found[what, "fla"], fine[what, "ours"]
            ratio = "-" if "error" in theirs else f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}"
            lines[call] = f"fla {_words_per_second(theirs)} | {_words_per_second(ours)} | {ratio}"
    return lines


def _both_times(row: ModelRow) -> str:
    return f"{results.time_text(row['device_seconds'])} (wall {results.time_text(row['seconds'])})"


def _words_per_second(row: ModelRow) -> str:
    return "cannot be captured" if "error" in row else f"{row['tokens_per_second']:,.0f} tokens/s"


def _run(path: Path, calls: Sequence[Row], of_models: Sequence[ModelRow]) -> str:
    """Returns sentences about the run from which all rows of the README's table come."""
    found = json.loads(path.read_text())
    keys = [row.spread for row in calls if row.key in HEADLINE] + [row.get("spread") for row in of_models]
    spread = max((x for x in keys if x is not None), default=0.0)
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "fla", "transformers"))
    training = (
        " Training steps are compared by the time on the device, because the host can limit the wall time, which "
        "stands beside it."
    )
    return (
        f"{found['device']}, {versions}; one run at commit {found['commit'][:10]}, {found['date'][:10]}. Times are "
        f"medians; the quartiles of each are at most {spread:.0%} of it apart.{training if of_models else ''}"
    )


def _how_right(folder: Path) -> str:
    """Returns a sentence about the kit's cases on `DEVICE`; '' if the kit did not run."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("conformance-*.json"))]
    found = [report for report in found if report["device"]["name"] == DEVICE]
    if not found:
        return ""
    parts = []
    for report in found:
        counts = report["counts"]
        others = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("failed", "open") if counts[outcome])
        parts.append(f"`{report['backend']['name']}` {counts['passed']}" + (f" ({others})" if others else ""))
    return f"Cases of the conformance kit passed there: {', '.join(parts)}."


def _section(found: Results, path: Path) -> str:
    written = f"Written by `benchmarks/evidence.py times` into `benchmarks/results/{path.name}`."
    return "\n".join(
        [
            f"## Times: {path.stem.partition('-')[0]}, {found.device}\n",
            f"{_conditions(found)}. {COLUMNS} {written}\n",
            *_beside_baselines(found.rows),
            *_all_rows(found.rows),
        ]
    )


COLUMNS = (
    "Times are medians. GB/s counts each input and output once. 'Of floor' is GB/s as a share of the speed of a copy. "
    "'× fla' is the time of FLA divided by the time of the row."
)


def _conditions(found: Results) -> str:
    driver = f", driver {found.driver}" if found.driver else ""
    named = ("torch", "triton", "fla")
    versions = ", ".join(f"{name} {getattr(found, name)}" for name in named if getattr(found, name))
    bandwidth = f"; copies run at {found.copy_bandwidth / 1e12:.2f} TB/s" if found.copy_bandwidth else ""
    # A commit with spaces also names rows that were measured again at another commit.
    commit = f" at {found.commit if ' ' in found.commit else found.commit[:10]}" if found.commit else ""
    return f"gla_core {found.gla_core}{commit}, {versions}{driver}, {found.date[:10]}{bandwidth}"


def _all_rows(rows: Sequence[Row]) -> list[str]:
    """Returns a folded table for each op."""
    return [
        f"<details><summary>{op}: {len(of_op)} measurements</summary>\n\n{results.markdown(of_op)}\n\n</details>\n"
        for op, of_op in by_op(rows)
    ]


def _beside_baselines(rows: Sequence[Row]) -> list[str]:
    """Returns a table of the faster one of `OURS` beside each baseline; empty without baselines."""
    ours = [row for row in rows if row.backend in OURS and row.ratio_to]
    lines = [
        "| workload | direction | baseline | | faster of ours | | times as fast |",
        "| --- | --- | --- | ---: | --- | ---: | ---: |",
    ]
    for key in dict.fromkeys(row.key for row in ours):
        row = max((row for row in ours if row.key == key), key=lambda row: max(row.ratio_to.values()))
        for name, ratio in row.ratio_to.items():
            theirs, time = results.time_text((row.seconds or 0) * ratio), results.time_text(row.seconds)
            lines.append(
                f"| {row.workload} | {row.direction} | {name} | {theirs} | {row.backend} | {time} | {ratio:.2f} |"
            )
    return ["\n".join(lines) + "\n"] if ours else []


def _conformance(paths: Sequence[Path]) -> list[str]:
    """Returns a table of the kit's results for each backend, with the errors that come closest to their budgets."""
    if not paths:
        return []
    lines = [
        "## Conformance\n",
        "The table counts the cases of the kit. A case is open if the backend declines it. The last two columns give "
        "the "
        "largest error of values and of gradients as a share of the error that is allowed. "
        "Written by `gla conformance NAME --report` into `benchmarks/results/conformance-*.json`.\n",
        "| backend | device | gla_core at | cases | passed | failed | open | values | gradients |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for path in paths:
        found = json.loads(path.read_text())
        counts = found["counts"]
        numbers = [sum(counts[name] for name in ("passed", "failed", "open"))]
        numbers += [counts[name] for name in ("passed", "failed", "open")]
        worst = [_worst(found["properties"], name) for name in ("values", "gradients")]
        cells = [found["backend"]["name"], found["device"]["name"], (found["commit"] or "-")[:10], *numbers, *worst]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return ["\n".join(lines) + "\n"]


def _worst(properties: Sequence[dict[str, Any]], name: str) -> str:
    """Returns the largest error of a property over all ops, as a share of its budget; "-" if none was measured."""
    texts = [ratio_text(row["worst"]) for row in properties if row["property"] == name and row["worst"]]
    return max(texts, key=lambda text: float("inf") if text == "infinite" else float(text), default="-")


def _measured(found: dict[str, Any]) -> str:
    """Returns versions of gla_core and PyTorch, and the date."""
    return f"gla_core {found['gla_core']} at {found['commit'][:10]}, torch {found['torch']}, {found['date'][:10]}"


# ---- the run of the README


def _readme(found: dict[str, Any], path: Path) -> str:
    """Returns the section of a file of readme.py: calls beside their baselines, then whole models."""
    calls, of_models = readme.read(path)
    run, fine = _results(found, calls), [row for row in of_models if "error" not in row]
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in found["model"].items())
    failed = [f"- {row['what']} {row['way']} {row['size']}: {row['error']}" for row in of_models if "error" in row]
    return "\n".join(
        [
            f"## The README's table, its pictures and whole models: one run, {found['device']}\n",
            f"{_conditions(run)}, transformers {found['transformers']}. {COLUMNS} Written by "
            f"`benchmarks/evidence.py readme` into `benchmarks/results/{path.name}`.\n",
            *_beside_baselines(run.rows),
            *_all_rows(run.rows),
            f"The model is FLA's GLA model ({sizes}) in bfloat16, with random weights. A training step is forward, "
            "backward "
            "and a fused AdamW. 'Step' is wall time, with the distance of its quartiles as a share of it; 'on the "
            "device' "
            "is the time of all kernels, and 'of GLA' the part of gated linear attention. 'Times as fast' compares "
            "with FLA's model, by wall time and by time on the device.\n",
            *_training(fine),
            "Decoding is greedy, after a prompt of 512 tokens. In a CUDA graph of "
            "eight steps, FLA's states are copied once per graph to where its first step reads them. 'Same words' "
            "says whether the graph decodes the words of eager steps.\n",
            *_decoding(fine),
            *(["Failed:\n", *failed, ""] if failed else []),
        ]
    )


def _training(rows: Sequence[ModelRow]) -> list[str]:
    """Returns tables of training steps of 8 sequences, and of one sequence of several lengths."""
    lines = []
    for what, title in (("train", "8 sequences of 2048 tokens"), ("length", "one sequence")):
        of_what = sorted(
            (row for row in rows if row["what"] == what), key=lambda row: (row["sequences"], row["tokens"])
        )
        theirs = {row["tokens"]: row for row in of_what if row["way"] == "fla"}
        lines += [
            f"| training, {title} | tokens | step | spread | on the device | of GLA | tokens/s | memory "
            "| times as fast, wall | on the device |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in of_what:
            times = [results.time_text(row[name]) for name in ("seconds", "device_seconds", "gla_seconds")]
            cells = [WAYS[row["way"]], f"{row['sequences'] * row['tokens']:,}", times[0], f"{row['spread']:.1%}"]
            cells += [*times[1:], f"{row['tokens_per_second']:,.0f}", f"{row['gib']:.1f} GiB"]
            cells += [_ratio(theirs.get(row["tokens"]), row, name) for name in ("seconds", "device_seconds")]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def _decoding(rows: Sequence[ModelRow]) -> list[str]:
    """Returns a table of decoding by `generate` and in a CUDA graph."""
    decoded = [row for row in rows if row["what"] in ("generate", "graph")]
    decoded.sort(key=lambda row: (row["what"], row["size"]))
    theirs = {(row["what"], row["size"]): row for row in decoded if row["way"] == "fla"}
    lines = [
        "| decoding | how | sequences | first token | a step | spread | tokens/s | same words | times as fast |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in decoded:
        how = "CUDA graph" if row["what"] == "graph" else "`generate`"
        same = {None: "", True: "yes", False: "no"}[row.get("same_words_as_eager")]
        cells = [WAYS[row["way"]], how, str(row["size"]), results.time_text(row["first_token"])]
        cells += [results.time_text(row["seconds"]), f"{row['spread']:.1%}", f"{row['tokens_per_second']:,.0f}", same]
        lines.append(f"| {' | '.join([*cells, _ratio(theirs.get((row['what'], row['size'])), row, 'seconds')])} |")
    return [*lines, ""]


def _ratio(theirs: ModelRow | None, ours: ModelRow, name: str) -> str:
    return "-" if theirs is None else f"{theirs[name] / ours[name]:.2f}"


# ---- other files


def _others(found: dict[str, Any]) -> str:
    """Returns the parts of a selection that were measured at other commits."""
    parts = {row["part"]: row["commit"] for row in found["rows"] if "commit" in row}
    return "".join(f"; {part} at {commit}" for part, commit in parts.items())


def _selection(found: dict[str, Any], path: Path) -> str:
    lines = [
        f"## What auto picks, {found['device']}\n",
        f"{_measured(found)}{_others(found)}. The slowdown of a pick is the time of the backend that `auto` picks "
        "divided by the time of the fastest one. The grid has calls of chunk_gla_fwd with shapes that no constant was "
        "fitted to; 'forms' are calls with other forms of gates, value heads in groups, or float16. For packed "
        "sequences, forward and backward, `auto` knows how many there are but not how long. "
        f"Written by `benchmarks/evidence.py selection` into `benchmarks/results/{path.name}`.\n",
        "| calls | measured | close to the fastest | largest slowdown |\n| --- | ---: | ---: | ---: |",
    ]
    for part, of_part in found["summary"].items():
        close = f"{of_part['close']:.1%} within {of_part['within'] - 1:.0%}"
        cells = (part, str(of_part["calls"]), close, f"{of_part['worst']:.2f} ×")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_pictures(path.with_suffix(""))])


def _shapes(found: dict[str, Any], path: Path) -> str:
    """Returns the section of a file of shapes.py: times divided by the times that they are compared with."""
    lines = [
        f"## Shapes that the kernels were not tuned for, {found['device']}\n",
        f"{_measured(found)}. Calls of chunk_gla_fwd by the backend that `auto` picks. 'Odd widths' divides the time "
        "by that of the memory floor, and 'odd pairs' the time of forward and backward, in CUDA graphs, by that of "
        "their floor. 'One giant' divides it by the time of the longest sequence alone plus the time of the others. "
        "'Invariant' divides the time under `batch_invariant` by the time without it, for the workloads of "
        "models, forward and with the backward. "
        f"Written by `benchmarks/evidence.py shapes` into `benchmarks/results/{path.name}`, which has every call.\n",
    ]
    for part, of_part in found["summary"].items():
        numbers = f"median {of_part['median']:.2f}, largest {of_part['worst']:.2f}"
        lines.append(f"- {part}: {of_part['calls']} calls, {numbers}")
    lines += ["", "| B T H K V | | time | backend | over the floor |", "| --- | --- | ---: | --- | ---: |"]
    for row in (row for row in found["rows"] if row["part"].startswith("odd")):
        sizes = " ".join(str(row["dims"][name]) for name in ("B", "T", "H", "K", "V"))
        way, backend, seconds = "pair", row.get("backend"), row.get("seconds")
        if row["part"] == "odd widths":
            way, backend, seconds = "forward", row["pick"], row["measured"][row["pick"]]
        lines.append(f"| {sizes} | {way} | {results.time_text(seconds)} | {backend} | {row['over']:.2f} |")
    return "\n".join([*lines, ""])


def _ranks(found: dict[str, Any], path: Path) -> str:
    """Returns the section of a file of context_parallel.py: times on one rank and on all, and predictions for more."""
    ranks, predicted = found["rows"][0]["ranks"], list(next(filter(None, (row["predicted"] for row in found["rows"]))))
    graphs = "Times are replays of CUDA graphs."
    how = graphs if found.get("graphs") else "Times are eager calls; for short sequences the host decides them."
    longest = found["longest"]
    lines = [
        f"## One row of tokens over {ranks} GPUs, {found['device']}\n",
        f"{_measured(found)}. The table compares gla_core.distributed.chunk_gla on {ranks} GPUs with "
        f"gla_core.chunk_gla on one of them, for K = V = 128. {how} A row is one sequence with a gate for each key, "
        "one with a gate for each head, or 65 packed sequences with a gate for each key. Efficiency is the time on one "
        f"rank divided by {ranks} times the time on all. The last columns predict it for other numbers of ranks with "
        f"as many tokens each; they are not measured. The longest sequence of {longest['heads']} heads that trains has "
        f"{longest['one_rank']:,} tokens on one rank and {longest['all_ranks']:,} on all. "
        f"Written by `benchmarks/context_parallel.py` into `benchmarks/results/{path.name}`.\n",
        "| row | T | H | direction | one rank | all | gathers | efficiency | "
        f"{' | '.join(f'of {R}' for R in predicted)} |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |" + " ---: |" * len(predicted),
    ]
    for row in found["rows"]:
        times = [results.time_text(row[name]) for name in ("one_rank", "all_ranks", "gather")]
        efficient = [row["efficiency"], *(row["predicted"] or {}).values()]
        numbers = ["-" if x is None else f"{x:.2f}" for x in efficient] + ["-"] * (1 + len(predicted) - len(efficient))
        cells = [row["kind"], f"{row['tokens']:,}", str(row["heads"]), row["direction"], *times, *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    picture = path.with_suffix(".svg")
    drawn = [f"![{picture.stem}](../benchmarks/results/{picture.name})\n"] if picture.exists() else []
    return "\n".join([*lines, "", *drawn])


def _serving(found: dict[str, Any], path: Path) -> str:
    """Returns the section of a file of serving.py: a line for each batch, with a time for each engine."""
    engines = list(dict.fromkeys(row["who"] for row in found["rows"]))
    lines = [
        f"## Serving, {found['device']}\n",
        f"{_measured(found)}. A layer of lightning attention as in Ling-2.5: 64 heads, K = V = 128, bfloat16, float32 "
        "states in a pool. 'Decode' is one token of each sequence, 'verify' and 'replay' are four drafts of each, in a "
        "CUDA graph. 'Prefill' and 'mixed' are eager. 'Of floor' counts tokens, outputs and states once; "
        "'-' stands for what was not measured. "
        f"Written by `benchmarks/serving.py` into `benchmarks/results/{path.name}`.\n",
        f"| batch | {' | '.join(engines)} | of floor |",
        "| --- |" + " ---: |" * (len(engines) + 1),
    ]
    batches: dict[str, dict[str, ModelRow]] = {}
    for row in found["rows"]:
        counted = [(row[name], name) for name in ("decodes", "sequences", "tokens") if name in row]
        sizes = ", ".join(f"{n} {name.removesuffix('s') if n == 1 else name}" for n, name in counted)
        batches.setdefault(f"{row['what']}: {sizes}", {})[row["who"]] = row
    for words, rows in batches.items():
        times = (results.time_text(rows[who].get("seconds")) if who in rows else "-" for who in engines)
        lines.append(f"| {words} | {' | '.join(times)} | {rows[engines[0]].get('of_floor', 0):.2f} |")
    return "\n".join([*lines, ""])


_SECTIONS = {"readme": _readme, "selection": _selection, "shapes": _shapes, "ranks": _ranks, "serving": _serving}
"""The functions that write the section of a file, by the first part of its name, in the order of the page."""


def _pictures(folder: Path) -> list[str]:
    """Returns the pictures in a folder of benchmarks/results, as docs/results.md shows them."""
    pictures = sorted(folder.glob("*.svg"))
    return [f"![{p.stem}](../benchmarks/results/{folder.name}/{p.name})\n" for p in pictures]


def main() -> None:
    """Prints the page, or writes both pages and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md, docs/results.md and the pictures")
    if not parser.parse_args().write:
        print(render(FOLDER), end="")
        return
    draw(FOLDER)
    README.write_text(insert(README.read_text(), headline(FOLDER)))
    PAGE.write_text(insert(PAGE.read_text(), render(FOLDER)))


if __name__ == "__main__":
    main()
