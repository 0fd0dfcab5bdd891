"""Generates the README's table, tables of pages in docs and pictures from the files under benchmarks/results.

python3 benchmarks/readme_tables.py          prints the generated part of docs/results.md
python3 benchmarks/readme_tables.py --write  writes between the markers of the pages, and draws (needs matplotlib)

Times are rows of record.py's schema in results/<device>/*.jsonl; what is in results/history is not shown. The README's
table holds the calls of HEADLINE, all at one commit.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import context_parallel
import crossover
import op_calls
import pictures
import record
from record import Row

from gla_core.bench import results
from gla_core.conformance.summary import ratio_text
from gla_core.workloads.models import FUNCTIONS, MODELS

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
MODELS_PAGE, SERVING_PAGE = ROOT / "docs" / "models.md", ROOT / "docs" / "serving.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
MARKED = re.compile(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", re.DOTALL)
LONG = 30
"""The number of rows above which a table is folded."""


class Section(NamedTuple):
    """A section of the page: a title, what the reader has to know, and the facts that have a column."""

    title: str
    about: str
    facts: Sequence[str] = ()


SECTIONS = {
    part: Section(**fields)
    for part, fields in tomllib.loads(Path(__file__).with_name("sections.toml").read_text()).items()
}
"""The sections by the name of their files, in the order of the page."""
TRAINING, DECODING = "training step, 8 x 2048 tokens", "decoding in a CUDA graph, 8 sequences"
HEADLINE = (
    (
        "op",
        "`chunk_gla` forward: 8 sequences of 4096 tokens, 16 heads",
        "`chunk_gla` forward: 8 x 4096 tokens, 16 heads",
    ),
    ("op", "`chunk_gla` forward and backward: 8 sequences of 4096 tokens, 16 heads", "the same, forward and backward"),
    (
        "op",
        "`chunk_gla` forward and backward: 64 packed sequences, 65,536 tokens in all, 8 heads",
        "64 packed sequences, 65,536 tokens, 8 heads, forward and backward",
    ),
    (
        "mamba2_scan",
        "Mamba-2's scan forward and backward: Granite-4-small (1 x 32768 tokens, 1 group, 128 heads, state 128 x 64)",
        "Mamba-2's scan of Granite-4-small, 32,768 tokens, forward and backward",
    ),
    ("models", TRAINING, "training step of a 374M GLA model, 8 x 2048 tokens: time on the device"),
    ("models", DECODING, "decoding step of that model in a CUDA graph, 8 sequences"),
)
"""The rows of the README: part, call, and the words of the README."""
NAMES = {"fla": "FLA", "mamba_ssm": "mamba_ssm"}
SEVERAL = {"models": "gla_transformers, compiled"}
"""The implementation that the README shows of a part that has several, if it has the call."""
UNITS = {
    "GiB": "{:.1f}",
    "apart": "{:.1e}",
    "error": "{:.1e}",
    "floors": "{:.1f}",
    "kernels": "{:.0f}",
    "tokens/s": "{:,.0f}",
    "tokens/s of a rank": "{:,.0f}",
}


# ---- README


def headline(folder: Path) -> str:
    """Returns the Markdown of the README's table and of what stands below it; '' if nothing was measured."""
    measured = readme_run(folder)
    if not measured:
        return ""
    lines = [
        f"| call | {' | '.join(rows[0].device for rows in measured.values())} |",
        "| --- |" + " --- |" * len(measured),
        *(
            f"| {words} | {' | '.join(_cell(folder / device, part, call, rows) for device, rows in measured.items())} |"
            for part, call, words in HEADLINE
        ),
    ]
    every = [row for rows in measured.values() for row in rows]
    run = every[0]
    told = [
        f"One run at commit {run.commit:.10}, {run.date:.10}: {_versions(run)}; medians.",
        _ranges(every),
        _models_in_words([row for device in measured for row in record.read(folder / device / "model_calls.jsonl")]),
        _left_out(every),
        _precision_in_words(every),
        _kit_in_words(folder, run.commit),
    ]
    return "\n".join(lines) + "\n\n" + " ".join(filter(None, told)) + "\n"


def readme_run(folder: Path) -> dict[str, list[Row]]:
    """Returns the rows of the run that the README shows, by device: those of the newest commit with its first line."""
    part, first, _ = HEADLINE[0]
    rows = {device: record.read(folder / device / f"{part}.jsonl") for device in devices(folder)}
    commits = {row.date: row.commit for device_rows in rows.values() for row in device_rows if row.call == first}
    if not commits:
        return {}
    commit = commits[max(commits)]
    every = {device: [row for _, row in shown_rows(folder, device) if row.commit == commit] for device in rows}
    return {
        device: device_rows for device, device_rows in every.items() if any(row.call == first for row in device_rows)
    }


def _cell(folder: Path, part: str, call: str, rows: Sequence[Row]) -> str:
    """Returns a cell of the README: how many times as fast, and both times; "-" if a time is missing.

    Args:
        folder: the results of the device, of which an earlier row is shown, with its commit, if `rows` lack the call.
    """
    chosen = [row for row in rows if row.call == call]
    earlier = not chosen
    if earlier:
        chosen = [row for row in record.read(folder / f"{part}.jsonl") if row.call == call]
    ours = sorted((row for row in chosen if row.baseline), key=lambda row: row.who != SEVERAL.get(part))
    if not ours:
        return "-"
    ratio = record.ratio(ours[0], chosen)
    theirs = next(row for row in chosen if row.who == ours[0].baseline)
    shown = "unsteady" if ratio is None else f"**{ratio:.2f}\N{NO-BREAK SPACE}×**"
    at = f" (at {ours[0].commit:.8})" if earlier else ""
    return f"{shown}: {_times(ours[0])}; {NAMES[theirs.who]} {_times(theirs)}{at}"


def _times(row: Row) -> str:
    """Returns a row's time, followed in brackets by the facts that the README shows of training."""
    facts = row.facts
    if "wall, s" not in facts:
        return _time(row.seconds)
    memory = f"{_number('GiB', facts['GiB'])}\N{NO-BREAK SPACE}GiB"
    return f"{_time(row.seconds)} (wall {_time(facts['wall, s'])}, {memory})"


def _versions(row: Row) -> str:
    return ", ".join(
        f"{name} {version}" for name, version in row.versions.items() if name not in ("python", "gla_core")
    )


GROUPS = {
    "`chunk_gla` and its step, over forms of gates and dtypes": r"`(chunk|recurrent)_gla",
    "Mamba-2's scan and step, over published models": r"Mamba-2's scan (forward|step)",
    "the softmax ops": r"`(online_softmax|softmax_attention)`",
}
"""Groups of calls of which the README gives the range, and the pattern of their names."""


def _ranges(rows: Sequence[Row]) -> str:
    """Returns a sentence on how fast each group of calls is beside its peer, losses included; '' without such calls."""
    parts = []
    for words, pattern in GROUPS.items():
        compared = [row for row in rows if re.match(pattern, row.call)]
        ratios = [ratio for row in compared if (ratio := record.ratio(row, rows))]
        if ratios:
            slower = sum(ratio < 1 for ratio in ratios)
            median = statistics.median(ratios)
            parts.append(
                f"{words}: {min(ratios):.2f} to {max(ratios):.1f} times as fast as the peer, median {median:.1f}, "
                f"{slower} of {len(ratios)} slower"
            )
    return f"Losses included, {'; '.join(parts)}." if parts else ""


def _models_in_words(rows: Sequence[Row]) -> str:
    """Returns a sentence on the worst and the median call of published models; '' without such calls."""
    compared = [(ratio, row) for row in rows if "floors" in row.facts and (ratio := record.ratio(row, rows))]
    if not compared:
        return ""
    compared.sort(key=lambda pair: pair[0])
    worst, median = (
        f"{row.call}, {ratio:.2f} times as fast as {row.baseline} at {_number('floors', row.facts['floors'])} floors"
        for ratio, row in (compared[0], compared[(len(compared) - 1) // 2])
    )
    return (
        f"Of {len(compared)} calls of published models ([table](docs/models.md)), the worst is {worst}; the median is "
        f"{median}."
    )


def _left_out(rows: Sequence[Row]) -> str:
    """Returns a sentence on the calls of ops that a run did not reach; '' if it measured all."""
    measured = {row.call for row in rows}
    missing = [
        call.words or op_calls.call_in_words(call, call.directions[0])
        for call in op_calls.CALLS
        if call.baseline and not measured & {op_calls.call_in_words(call, direction) for direction in call.directions}
    ]
    return f"This run did not measure: {'; '.join(missing)}." if missing else ""


def _precision_in_words(rows: Sequence[Row]) -> str:
    """Returns a sentence on errors beside FLA's with mild and strong gates in bfloat16; '' without measurements."""
    errors = {(row.call, row.who): row.facts for row in rows if "dg" in row.facts and "bfloat16" in row.call}
    pairs = [
        (facts, errors[call, "fla"])
        for (call, who), facts in errors.items()
        if who == "gla-core" and 0 < errors.get((call, "fla"), {"dg": 0})["dg"] < float("inf")
    ]
    if not pairs:
        return ""
    ranges = {
        name: (min(x), max(x)) for name in ("o", "dq", "dk", "dv", "dg") if (x := [a[name] / b[name] for a, b in pairs])
    }
    others = [bound for name, bounds in ranges.items() if name != "dg" for bound in bounds]
    return (
        f"In bfloat16, the errors of o, dq, dk and dv are {min(others):.2f} to {max(others):.2f} times FLA's, and that "
        f"of dg is {ranges['dg'][0]:.2f} to {ranges['dg'][1]:.2f} times; inputs cast to float32 bring them to FLA's or "
        "below ([table](docs/results.md#precision))."
    )


def _kit_in_words(folder: Path, commit: str | None) -> str:
    """Returns a sentence about the kit's cases at a commit; '' if the kit did not run there."""
    parts = []
    for path in sorted(folder.glob("conformance-*.json")):
        report = json.loads(path.read_text())
        other, counts = report["commit"], report["counts"]
        if not (commit and other and (commit.startswith(other) or other.startswith(commit))):  # they may be shortened
            continue
        others = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("failed", "open") if counts[outcome])
        name = f"`{report['backend']['name']}` on {report['device']['name']}"
        parts.append(f"{name} {counts['passed']}" + (f" ({others})" if others else ""))
    return f"Cases of the conformance kit passed at this commit: {', '.join(parts)}." if parts else ""


# ---- the page of results


def render(folder: Path) -> str:
    """Returns the Markdown of docs/results.md, ending in a newline; '' if there is nothing in the folder."""
    shown = _pictures(folder / device for device in devices(folder))
    sections = [text for part in SECTIONS if part != "serving" for text in _section(folder, part)]
    kit = _conformance(sorted(folder.glob("conformance-*.json")))
    picks = [_selection(json.loads(path.read_text()), path) for path in sorted(folder.glob("selection-*.json"))]
    return "\n".join([*shown, *sections[:3], *_precision(folder), *sections[3:], *kit, *picks])


def devices(folder: Path) -> list[str]:
    """Returns the names of the devices that have rows, as in file names, the newest kind of GPU first."""
    return sorted({path.parent.name for path in folder.glob("*/*.jsonl")}, reverse=True)


def shown_rows(folder: Path, device: str = "*") -> list[tuple[str, Row]]:
    """Returns the name of the part and the row of everything that the page shows of a device, by default of all."""
    return [(path.stem, row) for path in sorted(folder.glob(f"{device}/*.jsonl")) for row in record.read(path)]


def _section(folder: Path, part: str) -> Iterator[str]:
    """Yields the section of a part, with a table for each device; nothing if it has no rows."""
    section = SECTIONS[part]
    tables = [table for device in devices(folder) for table in _tables(folder / device / f"{part}.jsonl", section)]
    if tables:
        yield "\n".join([f"## {section.title}\n", f"{section.about}\n", *tables])


def _tables(path: Path, section: Section) -> Iterator[str]:
    rows = record.read(path)
    if not rows:
        return
    table = _table(rows, section.facts)
    if len(table) > LONG:
        table = [f"<details><summary>{len(table) - 2} rows</summary>\n", *table, "\n</details>"]
    yield "\n".join([f"### {rows[0].device}\n", f"{_where(rows, path)}\n", *table, ""])


def _where(rows: Sequence[Row], path: Path) -> str:
    """Returns a sentence with the commits, dates and versions of rows."""
    commits = list(dict.fromkeys(f"{row.commit:.10}" for row in rows))
    dates = sorted({row.date[:10] for row in rows})
    at = f"At {commits[0]}, {dates[0]}" if len(commits) == 1 else f"At {', '.join(commits)}, {dates[0]} to {dates[-1]}"
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"{at}; {_versions(rows[-1])}. Rows: [`{name}`](../{name})."


def _table(rows: Sequence[Row], facts: Sequence[str]) -> list[str]:
    """Returns a table of every row that is no baseline, with the time of its baseline beside it.

    Baselines have rows too if the errors of calls are shown.
    """
    calls = {(row.call, row.who): row for row in rows}
    compared = {(row.call, row.baseline) for row in rows if row.baseline}
    shown = [row for row in rows if "error" in facts or (row.call, row.who) not in compared]
    peers, whos = any(row.baseline for row in shown), len({row.who for row in shown}) > 1
    commits = len({row.commit for row in rows}) > 1
    facts = [name for name in facts if any(name in row.facts for row in shown)]
    timed = any(row.seconds for row in shown)
    columns: list[tuple[str, str, Callable[[Row], str]]] = [
        ("call", "---", lambda row: row.call),
        *([("times as fast", "---:", lambda row: _ratio(row, rows))] if peers else []),
        *([("by", "---", lambda row: row.who)] if whos else []),
        *([("time", "---:", lambda row: row.error or _time(row.seconds))] if timed else []),
        *([("peer", "---", lambda row: _peer(row, calls))] if peers else []),
        *([("spread", "---:", _spread)] if any(row.spread for row in rows) else []),
        *(
            (name.removesuffix(", s"), "---:", lambda row, name=name: _number(name, row.facts.get(name)))
            for name in facts
        ),
        *([("commit", "---", lambda row: f"{row.commit:.7}")] if commits else []),
    ]
    lines = [f"| {' | '.join(name for name, _, _ in columns)} |", f"| {' | '.join(rule for _, rule, _ in columns)} |"]
    return lines + [f"| {' | '.join(text(row).replace('|', '/') for _, _, text in columns)} |" for row in shown]


def _ratio(row: Row, rows: Iterable[Row]) -> str:
    ratio = record.ratio(row, rows)
    return "-" if ratio is None else f"{ratio:.2f}"


def _peer(row: Row, calls: dict[tuple[str, str], Row]) -> str:
    """Returns the name and time of a row's baseline, or why it has none."""
    if row.baseline is None:
        return ""
    peer = calls[row.call, row.baseline]
    if peer.error:
        return f"{peer.who}: {peer.error.partition(':')[2].strip().partition('. ')[0] or peer.error}"
    unsteady = "" if peer.steady else f" (spread {peer.spread:.0%})"
    return f"{peer.who} {_time(peer.seconds)}{unsteady}"


def _spread(row: Row) -> str:
    return "" if row.spread is None else f"{row.spread:.0%}" + ("" if row.steady else ", unsteady")


def _number(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith(", s"):
        return _time(value)
    if isinstance(value, bool) or name == "same words":
        return "yes" if value else "no"
    plain = {str: "{}", int: "{:,}"}.get(type(value), "{:.2f}")
    return UNITS.get(name, plain).format(value) if not isinstance(value, str) else value


def _time(seconds: float | None) -> str:
    return results.time_text(seconds).replace(" ", "\N{NO-BREAK SPACE}")


def _precision(folder: Path) -> list[str]:
    """Returns the section on errors beside FLA's and mamba_ssm's."""
    tables = []
    for device in devices(folder):
        path = folder / device / "precision.jsonl"
        rows = record.read(path)
        for names in (("o", "state", "dq", "dk", "dv", "dg"), ("out", "dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias")):
            shown = [row for row in rows if names[0] in row.facts]
            if not shown:
                continue
            tables += [f"### {rows[0].device}\n", f"{_where(rows, path)}\n"] if names[0] == "o" else []
            tables += [f"| inputs | by | {' | '.join(names)} | time |", "| --- | --- |" + " ---: |" * (1 + len(names))]
            for row in shown:
                errors = " | ".join(f"{row.facts[name]:.1e}" for name in names)
                tables.append(f"| {row.call} | {row.who} | {errors} |")
            tables.append("")
    if not tables:
        return []
    about = (
        "The norm of the difference from the result in float64, divided by the norm of that result, on the same "
        "inputs (2 sequences of 2048 tokens, 4 heads, K = V = 128, float32 gates). Rounding an exact result to "
        "bfloat16 alone costs 1.7e-3, to float16 2.1e-4. 'In float32' casts q, k and v to float32 before the call and"
        ' o back, under `torch.set_float32_matmul_precision("high")`: use it where a gradient has to be more precise.'
        " Its price is that of float32 in the table of the ops. FLA's kernels run in their first configurations."
    )
    return ["\n".join(["## Precision\n", f"{about}\n", *tables])]


def _conformance(paths: Sequence[Path]) -> list[str]:
    """Returns a table of the kit's results for each backend, with the errors that come closest to their budgets."""
    if not paths:
        return []
    lines = [
        "## Conformance\n",
        "The table counts the cases of the kit. A case is open if the backend declines it. The last two columns give "
        "the largest error of values and of gradients as a share of the error that is allowed. "
        "Written by `gla conformance NAME --report` into `benchmarks/results/conformance-*.json`.\n",
        "| backend | device | gla_core at | cases | passed | failed | open | values | gradients |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for path in paths:
        report = json.loads(path.read_text())
        counts = report["counts"]
        numbers = [sum(counts[name] for name in ("passed", "failed", "open"))]
        numbers += [counts[name] for name in ("passed", "failed", "open")]
        worst = [_worst(report["properties"], name) for name in ("values", "gradients")]
        cells = [report["backend"]["name"], report["device"]["name"], (report["commit"] or "-")[:10], *numbers, *worst]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return ["\n".join(lines) + "\n"]


def _worst(properties: Sequence[dict[str, Any]], name: str) -> str:
    """Returns the largest error of a property over all ops, as a share of its budget; "-" if none was measured."""
    texts = [ratio_text(row["worst"]) for row in properties if row["property"] == name and row["worst"]]
    return max(texts, key=lambda text: float("inf") if text == "infinite" else float(text), default="-")


def _selection(report: dict[str, Any], path: Path) -> str:
    """Returns the section of a file of selection.py: how close the picks of `auto` are to the fastest backend."""
    parts = {row["part"]: row["commit"] for row in report["rows"] if "commit" in row}
    others = "".join(f"; {part} at {commit}" for part, commit in parts.items())
    chunks = (
        " The grid has forwards of chunk_gla with shapes that no constant was fitted to; 'forms' are calls with other "
        "forms of gates, value heads in groups, or float16. For packed sequences, forward and backward, `auto` knows "
        "how many there are but not how long."
    )
    lines = [
        f"## What auto picks, {report['device']}\n",
        f"gla_core {report['gla_core']} at {report['commit'][:10]}, torch {report['torch']}, {report['date'][:10]}"
        f"{others}. The slowdown of a pick is the time of the backend that `auto` picks "
        f"divided by the time of the fastest one.{chunks if 'grid' in report['summary'] else ''} "
        f"Written by `benchmarks/evidence.py selection` into `benchmarks/results/{path.name}`.\n",
        "| calls | measured | close to the fastest | largest slowdown |\n| --- | ---: | ---: | ---: |",
    ]
    for part, summed in report["summary"].items():
        close = f"{summed['close']:.1%} within {summed['within'] - 1:.0%}"
        lines.append(f"| {part} | {summed['calls']} | {close} | {summed['worst']:.2f} × |")
    return "\n".join([*lines, "", *_pictures([path.with_suffix("")])])


def _pictures(folders: Iterable[Path]) -> list[str]:
    """Returns the pictures in folders of benchmarks/results, with words for who cannot see them."""
    return [
        f"![{pictures.ALT.get(path.stem, path.stem)}, {path.parent.name}]"
        f"(../benchmarks/results/{path.parent.name}/{path.name})\n"
        for folder in folders
        for path in sorted(folder.glob("*.svg"), key=lambda path: [*SECTIONS, path.stem].index(path.stem))
    ]


def render_serving(folder: Path) -> str:
    """Returns the Markdown of the times of a server's ops."""
    return "\n".join(_section(folder, "serving"))


# ---- the page of models


def render_models(folder: Path) -> str:
    """Returns the Markdown of the calls of published models by device, and of the sizes and sources of the models."""
    sections = []
    for device in devices(folder):
        path = folder / device / "model_calls.jsonl"
        rows = record.read(path)
        if rows:
            sections += [f"## {rows[0].device}\n", f"{_where(rows, path)}\n", *_model_calls(rows), ""]
    sections += ["## The models\n", "| model | function | gates | sizes | source |", "| --- | --- | --- | --- | --- |"]
    for model in MODELS:
        sizes = " ".join(f"{name}{size}" for name, size in model.sizes.items())
        form = FUNCTIONS[model.function].gate_form
        sections.append(f"| {model.name} | `{model.function}` | {form} | {sizes} | {model.source} |")
    return "\n".join(sections) + "\n"


def _model_calls(rows: Sequence[Row]) -> list[str]:
    """Returns the table of the calls of models, with the time of the peer beside ours."""
    calls = {(row.call, row.who): row for row in rows}
    lines = ["| model | call | ours | peer | times as fast | floors |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in (row for row in rows if "backend" in row.facts):
        model, _, way = row.call.rpartition(": ")
        way += " (eager)" if row.facts.get("eager") else ""
        cells = [model, way, row.error or _time(row.seconds), _peer(row, calls), _ratio(row, rows)]
        lines.append(
            f"| {' | '.join(cell.replace('|', '/') for cell in [*cells, _number('floors', row.facts.get('floors'))])} |"
        )
    return lines


# ---- writing


def draw(folder: Path) -> None:
    """Draws all pictures of the files in the folder."""
    for device in devices(folder):
        for part in pictures.DRAWN:
            pictures.draw(folder / device / f"{part}.jsonl")
        if (folder / device / "ranks.jsonl").exists():
            context_parallel.draw(folder / device / "ranks.jsonl")
    for path in folder.glob("selection-*.json"):
        if "crossover" in json.loads(path.read_text())["summary"]:
            crossover.draw(path)


def between_markers(page: str) -> str | None:
    """Returns the text between the markers; None if the page has no markers."""
    match = MARKED.search(page)
    return match and match[1]


def insert(page: str, generated: str) -> str:
    """Returns the page with `generated` between its markers. Raises ValueError if it has no markers."""
    if between_markers(page) is None:
        raise ValueError(f"the page has no markers; put {BEGIN} and {END} on lines of their own")
    return MARKED.sub(lambda _: f"{BEGIN}\n{generated}{END}", page)


def main() -> None:
    """Prints the page of results, or writes the pages and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md, the pages and the pictures")
    if not parser.parse_args().write:
        print(render(FOLDER), end="")
        return
    draw(FOLDER)
    README.write_text(insert(README.read_text(), headline(FOLDER)))
    PAGE.write_text(insert(PAGE.read_text(), render(FOLDER)))
    MODELS_PAGE.write_text(insert(MODELS_PAGE.read_text(), render_models(FOLDER)))
    SERVING_PAGE.write_text(insert(SERVING_PAGE.read_text(), render_serving(FOLDER)))


if __name__ == "__main__":
    main()
