"""The README's table and docs/results.md, generated from the files under benchmarks/results, and their pictures.

python3 benchmarks/readme_tables.py          print what docs/results.md holds
python3 benchmarks/readme_tables.py --write  put it between the markers of both pages, and draw (needs matplotlib)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
TRAINED = ("chunk_gla", "forward+backward")
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


def headline(folder: Path) -> str:
    """Markdown of the README's table: the quickest of ours beside the baseline, and what the kit found."""
    found = newest(folder)
    lines = ["| call | baseline | quickest of ours | times as fast |", "| --- | ---: | ---: | ---: |"]
    for key in HEADLINE:
        ours = [row for row in found.rows if row.key == key and row.ratio_to] if found else []
        if ours:
            lines.append(_headline(min(ours, key=lambda row: row.seconds or 0)))
    if found is None or len(lines) == 2:
        return ""
    lines += _headline_of_models(folder / f"models-{results.short_name(DEVICE)}.json")
    told = f"{found.device}, torch {found.torch}, triton {found.triton}, fla {found.fla}; medians. "
    return "\n".join(lines) + f"\n\n{told}{_how_right(folder)}\n"


def render(folder: Path) -> str:
    """Markdown of everything in the folder, ending in a line end; '' where there is nothing."""
    times = [_section(results.read(path), path) for path in _files_of_times(folder)]
    kit = _conformance(sorted(folder.glob("conformance-*.json")))
    told = [
        tell(json.loads(path.read_text()), path)
        for name, tell in _SECTIONS.items()
        for path in sorted(folder.glob(f"{name}-*.json"))
    ]
    return "\n".join([*_pictures(pictures_of(folder)), *kit, *told, *times])


def newest(folder: Path) -> Results | None:
    """The last measurement of each call and backend on `DEVICE`, in one; of the reference, training alone.

    Each row keeps the ratio to the baseline of its own run. Calls that none of ours was measured at are left out.
    """
    runs = [found for path in _files_of_times(folder) if (found := results.read(path)).device == DEVICE]
    runs.sort(key=lambda found: found.date)
    shown = [row for found in runs for row in found.rows if row.error is None and _shown(row)]
    # What was measured beside a baseline is kept until it is measured so again.
    shown.sort(key=lambda row: bool(row.ratio_to) or row.backend in BASELINES)
    rows = {(row.key, row.backend): row for row in shown}
    measured = {row.key for row in rows.values() if row.backend not in BASELINES}
    baselines_first = sorted(rows.values(), key=lambda row: row.backend not in BASELINES)
    kept = tuple(row for row in baselines_first if row.key in measured)
    return dataclasses.replace(runs[-1], rows=kept) if runs else None


def pictures_of(folder: Path) -> Path:
    """Where the pictures of `DEVICE` are."""
    return folder / results.short_name(DEVICE)


def between_markers(page: str) -> str | None:
    """What stands between the markers, None where there are none."""
    found = MARKED.search(page)
    return found and found[1]


def insert(page: str, generated: str) -> str:
    """The page with `generated` between its markers. Raises ValueError where there are none."""
    if between_markers(page) is None:
        raise ValueError(f"the page has no markers; put {BEGIN} and {END} on lines of their own")
    return MARKED.sub(lambda _: f"{BEGIN}\n{generated}{END}", page)


def _files_of_times(folder: Path) -> list[Path]:
    others = ("conformance", *_SECTIONS)
    return [path for path in sorted(folder.glob("*.json")) if path.name.partition("-")[0] not in others]


def _shown(row: Row) -> bool:
    of_training = (row.op, row.direction) == TRAINED and row.backend.endswith("reference")
    return row.backend in (*BASELINES, *OURS) or of_training


def _headline(row: Row) -> str:
    (baseline, ratio), *_ = row.ratio_to.items()
    theirs, time = results.time_text((row.seconds or 0) * ratio), results.time_text(row.seconds)
    call = f"`{row.op}` {IN_WORDS[row.direction]}: {plots.in_words(row.op, row.workload)}"
    return f"| {call} | {baseline} {theirs} | {row.backend} {time} | {ratio:.2f} |"


def _headline_of_models(path: Path) -> list[str]:
    """A step of training and decoding of a whole model beside FLA's; nothing without the file."""
    if not path.exists():
        return []
    rows = {(row["what"], row["way"], row.get("rows")): row for row in json.loads(path.read_text())["rows"]}
    step, accelerated, compiled = (rows["train", way, None]["seconds"] for way in ("fla", "accelerated", "compiled"))
    decoded, in_graph = (rows["generate", way, 8]["tokens_per_second"] for way in ("fla", "graph"))
    training = "training step of FLA's GLA model of 340M parameters, 8 sequences of 2048 tokens"
    lines = [
        (f"{training}, after `accelerate()`", *map(results.time_text, (step, accelerated)), step / accelerated),
        ("the same by `gla_transformers`, compiled", *map(results.time_text, (step, compiled)), step / compiled),
        (
            "tokens a second of it, 8 sequences, in a CUDA graph; fla's by `generate`",
            f"{decoded:,.0f}",
            f"{in_graph:,.0f}",
            in_graph / decoded,
        ),
    ]
    return [f"| {call} | fla {theirs} | {ours} | {ratio:.2f} |" for call, theirs, ours, ratio in lines]


def _how_right(folder: Path) -> str:
    """A sentence of what the kit found on `DEVICE`; '' where it did not run."""
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
    driver = f", driver {found.driver}" if found.driver else ""
    versions = ", ".join(
        f"{name} {getattr(found, name)}" for name in ("torch", "triton", "fla") if getattr(found, name)
    )
    bandwidth = f"; copies at {found.copy_bandwidth / 1e12:.2f} TB/s" if found.copy_bandwidth else ""
    commit = f" at {found.commit[:10]}" if found.commit else ""
    lines = [
        f"## Times: {path.stem.rpartition('-')[0]}, {found.device}\n",
        f"gla_core {found.gla_core}{commit}, {versions}{driver}, {found.date[:10]}{bandwidth}. Medians. "
        "GB/s counts each input and output once; 'of floor' is that over the copy bandwidth; "
        "'× fla' is the time of FLA over that of the row. "
        f"Written by `benchmarks/evidence.py` into `benchmarks/results/{path.name}`.\n",
    ]
    lines += _beside_baselines(found.rows)
    for op, rows in by_op(found.rows):
        summary = f"<summary>{op}: {len(rows)} measurements</summary>"
        lines.append(f"<details>{summary}\n\n{results.markdown(rows)}\n\n</details>\n")
    return "\n".join(lines)


def _beside_baselines(rows: Sequence[Row]) -> list[str]:
    """A table of the quicker one of `OURS` beside each baseline; nothing where there is none."""
    ours = [row for row in rows if row.backend in OURS and row.ratio_to]
    lines = [
        "| workload | direction | baseline | | quicker of ours | | times as fast |",
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
    """A table of what the kit found of each backend, and where errors come closest to their budgets."""
    if not paths:
        return []
    lines = [
        "## Conformance\n",
        "Cases of the kit, and the largest error of values and of gradients as a part of its budget. "
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
    """The largest error of a property over all ops, as a part of its budget; "-" where nothing was measured."""
    texts = [ratio_text(row["worst"]) for row in properties if row["property"] == name and row["worst"]]
    return max(texts, key=lambda text: float("inf") if text == "infinite" else float(text), default="-")


def _measured(found: dict[str, Any]) -> str:
    """By which gla_core and PyTorch, and when."""
    return f"gla_core {found['gla_core']} at {found['commit'][:10]}, torch {found['torch']}, {found['date'][:10]}"


def _models(found: dict[str, Any], path: Path) -> str:
    """A file of models.py: a step of training, then generating, of each way beside FLA's."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in found["model"].items())
    lines = [
        f"## Whole models beside FLA's, {found['device']}\n",
        f"{_measured(found)}. FLA's GLA model ({sizes}) in bfloat16, as it is (`fla`) and after "
        "`gla_core.compat.fla.accelerate()`; and that of `gla_transformers`: eager "
        "(`ours`), with each layer compiled (`blocks`), with the whole loss compiled, and "
        "decoding in a CUDA graph. A step has 8 sequences of 2048 tokens and a fused AdamW; prompts have 512 tokens. "
        f"Written by `benchmarks/models.py` into `benchmarks/results/{path.name}`.\n",
        "| training | step | tokens/s | on the device | of GLA | memory | times as fast |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    theirs = {row.get("rows"): row for row in found["rows"] if row["way"] == "fla"}
    for row in (row for row in found["rows"] if row["what"] == "train"):
        times = [results.time_text(row[name]) for name in ("seconds", "device_seconds", "gla_seconds")]
        ratio = theirs[None]["seconds"] / row["seconds"]
        speed, memory = f"{row['tokens_per_second']:,.0f}", f"{row['gib']:.1f} GiB"
        lines.append(f"| {row['way']} | {times[0]} | {speed} | {times[1]} | {times[2]} | {memory} | {ratio:.2f} |")
    lines += [
        "",
        "| generating | sequences | first token | tokens/s | times as many |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in (row for row in found["rows"] if row["what"] == "generate"):
        ratio = row["tokens_per_second"] / theirs[row["rows"]]["tokens_per_second"]
        first, speed = results.time_text(row["first_token"]), f"{row['tokens_per_second']:,.0f}"
        lines.append(f"| {row['way']} | {row['rows']} | {first} | {speed} | {ratio:.2f} |")
    return "\n".join([*lines, ""])


def _selection(found: dict[str, Any], path: Path) -> str:
    lines = [
        f"## What auto picks, {found['device']}\n",
        f"{_measured(found)}. "
        "The time of the backend that is picked over that of the fastest. The grid is one of chunk_gla_fwd, of shapes "
        "that no constant was fitted to; of packed sequences, forward and backward, nothing is known but how many. "
        f"Written by `benchmarks/evidence.py selection` into `benchmarks/results/{path.name}`.\n",
        "| calls | measured | close to the fastest | slowest pick |\n| --- | ---: | ---: | ---: |",
    ]
    for part, of_part in found["summary"].items():
        close = f"{of_part['close']:.1%} within {of_part['within'] - 1:.0%}"
        cells = (part, str(of_part["calls"]), close, f"{of_part['worst']:.2f} ×")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_pictures(path.with_suffix(""))])


def _shapes(found: dict[str, Any], path: Path) -> str:
    """All parts of a file of shapes.py: what they take over what they are held to."""
    lines = [
        f"## Shapes that nobody tuned for, {found['device']}\n",
        f"{_measured(found)}. "
        "chunk_gla_fwd by the backend that `auto` picks. Odd widths: time over that of the memory floor. One giant: "
        "time over that of the longest sequence by itself and then of the others. Invariant: the workloads of models, "
        "forward and with the backward, under `batch_invariant` over without. Written by `benchmarks/evidence.py "
        f"shapes` into `benchmarks/results/{path.name}`, which has every call.\n",
    ]
    for part, of_part in found["summary"].items():
        numbers = f"{of_part['median']:.2f} in the median, {of_part['worst']:.2f} at worst"
        lines.append(f"- {part}: {of_part['calls']} calls, {numbers}")
    lines += ["", "| B T H K V | time | backend | over the floor |", "| --- | ---: | --- | ---: |"]
    for row in (row for row in found["rows"] if row["part"] == "odd widths"):
        sizes = " ".join(str(row["dims"][name]) for name in ("B", "T", "H", "K", "V"))
        time = results.time_text(row["measured"][row["pick"]])
        lines.append(f"| {sizes} | {time} | {row['pick']} | {row['over']:.2f} |")
    return "\n".join([*lines, ""])


def _ranks(found: dict[str, Any], path: Path) -> str:
    """A file of context_parallel.py: times on one rank and on all, and what its model makes of them for more ranks."""
    ranks, predicted = found["rows"][0]["ranks"], list(next(filter(None, (row["predicted"] for row in found["rows"]))))
    how = "Replays of CUDA graphs." if found.get("graphs") else "Eager calls: of short sequences it is the host's time."
    longest = found["longest"]
    lines = [
        f"## One sequence over {ranks} GPUs, {found['device']}\n",
        f"{_measured(found)}. "
        f"gla_core.distributed.chunk_gla beside gla_core.chunk_gla on one of them, K = V = 128. {how} Efficiency is "
        f"the time of one rank over {ranks} times that of all; for other numbers of ranks it is a prediction, of as "
        "many tokens a rank, and not measured. Longest sequence that trains, of "
        f"{longest['heads']} heads: {longest['one_rank']:,} tokens on one, {longest['all_ranks']:,} on all. "
        f"Written by `benchmarks/context_parallel.py` into `benchmarks/results/{path.name}`.\n",
        f"| T | H | direction | one rank | all | gathers | efficiency | {' | '.join(f'of {R}' for R in predicted)} |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: |" + " ---: |" * len(predicted),
    ]
    for row in found["rows"]:
        times = [results.time_text(row[name]) for name in ("one_rank", "all_ranks", "gather")]
        efficient = [row["efficiency"], *(row["predicted"] or {}).values()]
        numbers = ["-" if x is None else f"{x:.2f}" for x in efficient] + ["-"] * (1 + len(predicted) - len(efficient))
        cells = [f"{row['tokens']:,}", str(row["heads"]), row["direction"], *times, *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    picture = path.with_suffix(".png")
    drawn = [f"![{picture.stem}](../benchmarks/results/{picture.name})\n"] if picture.exists() else []
    return "\n".join([*lines, "", *drawn])


_SECTIONS = {"models": _models, "selection": _selection, "shapes": _shapes, "ranks": _ranks}
"""What tells of a file with this before its device, in the order of the page."""


def _pictures(folder: Path) -> list[str]:
    """Those in a folder of benchmarks/results, as docs/results.md shows them."""
    pictures = sorted(folder.glob("*.png"))
    return [f"![{p.stem}](../benchmarks/results/{folder.name}/{p.name})\n" for p in pictures]


def main() -> None:
    """Print the page, or write both pages and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md, docs/results.md and the pictures")
    if not parser.parse_args().write:
        print(render(FOLDER), end="")
        return
    found = newest(FOLDER)
    if found is not None:
        plots.plot(found, pictures_of(FOLDER))
    README.write_text(insert(README.read_text(), headline(FOLDER)))
    PAGE.write_text(insert(PAGE.read_text(), render(FOLDER)))


if __name__ == "__main__":
    main()
