"""Pictures of results, as PNG: how fast each backend is beside the baseline, one colour a backend. Needs matplotlib."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gla_core.bench.results import Results, time_text
from gla_core.bench.suite import TIMED, Row
from gla_core.workloads.named import WORKLOADS, Workload

TITLES = {
    "forward": "forward",
    "forward+backward": "training: forward and backward",
    "step": "one step, launched by the host",
    "step_graph": "one step, in a CUDA graph",
}
COLOURS = {
    "fla": "0.45",
    "torch": "0.45",
    "gla_fla": "0.75",
    "parallel_scan": "tab:blue",
    "triton_fused": "tab:orange",
    "reference": "tab:green",
}
OTHER_COLOURS = ("tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
BAR, GAP = 0.22, 0.7
"""Inches that a bar is high, and bars that fit between two workloads."""

LONGEST = 8
"""Times as fast as the baseline at which a bar is cut; the text beside it says its true length."""


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises ValueError where it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise ValueError("plots need matplotlib: pip install 'gla-core[bench]'") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot(results: Results, folder: Path) -> list[Path]:
    """Draw a picture for each op into `folder`, with a panel for each direction.

    Returns:
        The files written, <op>.png.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    timed = [row for row in results.rows if row.seconds is not None and row.direction in TIMED]
    written = []
    for op in dict.fromkeys(row.op for row in timed):
        figure = _draw(plt, [row for row in timed if row.op == op], f"{op} on {results.device}")
        written.append(folder / f"{op}.png")
        figure.savefig(written[-1], dpi=120, bbox_inches="tight")
        plt.close(figure)
    return written


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each backend, the same in every picture for those that are known."""
    others = itertools.cycle(OTHER_COLOURS)
    return {name: COLOURS.get(name) or next(others) for name in dict.fromkeys(names)}


def speeds(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Rows of one workload and direction, each with how many times as fast as the first of them it is."""
    first = rows[0]
    return [(row, row.ratio_to.get(first.backend) or (first.seconds or 0) / (row.seconds or 1)) for row in rows]


def in_words(op: str, workload: str) -> str:
    """What a workload is, such as "8 sequences of 4096 tokens, 16 heads"; its name if nothing is known of it."""
    known = next((w for w in WORKLOADS if (w.op, w.name) == (op, workload)), None)
    return workload if known is None else _words(known)


def _words(workload: Workload) -> str:
    sizes = workload.sizes
    if workload.op == "online_softmax":
        if len(sizes["shape"]) == 2:
            return "{} rows of {}".format(*map(_number, sizes["shape"]))
        return " × ".join(map(_number, sizes["shape"]))
    if workload.op == "softmax_attention":
        batch = f"batch of {sizes['B']}, " if sizes["B"] > 1 else ""
        keys = f"{_count(sizes['Tq'], 'query', 'queries')}, {_number(sizes['Tk'])} keys"
        return f"{batch}{keys}, {_heads(sizes)}{', causal' if sizes.get('causal') else ''}"
    if "lengths" in sizes:
        tokens = f"{len(sizes['lengths'])} packed sequences, {_number(sum(sizes['lengths']))} tokens in all"
    else:
        tokens = _count(sizes["B"], "sequence", "sequences")
        tokens += f" of {_count(sizes['T'], 'token', 'tokens')}" if "T" in sizes else ""
    return f"{tokens}, {_heads(sizes)}"


def _heads(sizes: dict[str, Any]) -> str:
    widths = "" if sizes["K"] == sizes["V"] == 128 else f" (K {sizes['K']}, V {sizes['V']})"
    return _count(sizes["H"], "head", "heads") + widths


def _count(number: int, one: str, many: str) -> str:
    return f"{_number(number)} {one if number == 1 else many}"


def _number(number: int) -> str:
    return f"{number:,}" if number >= 10_000 else str(number)


def _draw(plt: Any, rows: Sequence[Row], title: str) -> Any:
    """A figure of one op: a panel for each direction, the same workloads in each."""
    directions = [name for name in TIMED if any(row.direction == name for row in rows)]
    names = _in_order(rows)
    room = {name: max(len(_group(rows, name, direction)) for direction in directions) for name in names}
    colour = colours([row.backend for row in rows])
    height = 1.5 + BAR * (sum(room.values()) + GAP * len(names))
    size = (3.4 + 3.8 * len(directions), height)
    figure, panels = plt.subplots(1, len(directions), figsize=size, sharey=True, squeeze=False)
    for axes, direction in zip(panels[0], directions, strict=True):
        place = 0.0
        for name in names:
            _bars(axes, place, _group(rows, name, direction), colour)
            place += room[name] + GAP
        _describe(axes, direction, next(iter(colour)))
    starts = itertools.accumulate((room[name] + GAP for name in names[:-1]), initial=0.0)
    middles = [start + (room[name] - 1) / 2 for start, name in zip(starts, names, strict=True)]
    panels[0][0].set_yticks(middles, [in_words(rows[0].op, name) for name in names])
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{title}: longer is faster")
    handles = [plt.Rectangle((0, 0), 1, 1, color=shade) for shade in colour.values()]
    figure.legend(handles, list(colour), loc="lower center", ncols=len(colour), frameon=False)
    figure.tight_layout(rect=(0, 0.35 / height, 1, 1))
    return figure


def _bars(axes: Any, place: float, rows: Sequence[Row], colour: dict[str, str]) -> None:
    """Bars of one workload, from `place` on; beside each its time."""
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for i, (row, speed) in enumerate(speeds(rows) if rows else []):
        length = min(speed, LONGEST)
        text = time_text(row.seconds) + (f", {speed:.{1 if speed >= 2 else 2}f} ×" if i else "")
        text += " (cut)" if length < speed else ""
        axes.barh(place + i, length, height=0.9, color=colour[row.backend])
        at, beside = (length, place + i), {"xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(text, at, **beside, va="center", fontsize=9, bbox=behind)


def _describe(axes: Any, direction: str, baseline: str) -> None:
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.margins(y=0.01)
    axes.set_xlim(0, 1.5 * max([1.0, *(bar.get_width() for bar in axes.patches)]))
    axes.set_xlabel(f"times as fast as {baseline}")
    axes.set_title(TITLES[direction], fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _in_order(rows: Sequence[Row]) -> list[str]:
    """The workloads as they are listed in `gla_core.workloads.named`, others after them."""
    listed = [w.name for w in WORKLOADS if w.op == rows[0].op]
    found = dict.fromkeys(row.workload for row in rows)
    return sorted(found, key=lambda name: listed.index(name) if name in listed else len(listed))


def _group(rows: Sequence[Row], workload: str, direction: str) -> list[Row]:
    return [row for row in rows if (row.workload, row.direction) == (workload, direction)]
