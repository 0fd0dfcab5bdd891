"""Draws the time of backends against the length of the sequence: one fused kernel beside parallel segments, as SVG.

python3 benchmarks/crossover.py benchmarks/results/selection-h200.json

The points come from `evidence.py selection`. Points of the backend that `auto` picked are filled, and a dotted line
marks where its pick changes. The picture is written into a folder beside the file, with the file's name.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla_core.bench.plots import colours, legend_below, pyplot, save

MOST_SLOWER = 10
"""Backends that always take more than this many times as long as the fastest are not drawn."""

Row = Mapping[str, Any]


def panels(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Returns the rows of the crossover by the number of heads in the batch, B*H, shorter sequences first."""
    panels_by_heads: dict[int, list[Row]] = {}
    timed = [row for row in rows if row["part"] == "crossover" and row["measured"]]
    for row in sorted(timed, key=lambda row: row["dims"]["T"]):
        panels_by_heads.setdefault(row["dims"]["B"] * row["dims"]["H"], []).append(row)
    return dict(sorted(panels_by_heads.items()))


def switches(rows: Sequence[Row]) -> list[float]:
    """Returns the geometric means of neighbouring lengths between which the pick changes."""
    neighbours = itertools.pairwise(rows)
    return [(a["dims"]["T"] * b["dims"]["T"]) ** 0.5 for a, b in neighbours if a["pick"] != b["pick"]]


def drawn(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the backends to draw."""
    names = sorted({name for row in rows for name in row["measured"]})
    return [
        name
        for name in names
        if any(row["measured"].get(name, float("inf")) < MOST_SLOWER * min(row["measured"].values()) for row in rows)
    ]


def draw(path: Path) -> Path:
    """Draws the picture of a results file. Raises ValueError without matplotlib, or if measurements are missing."""
    plt, report = pyplot(), json.loads(path.read_text())
    by_heads = panels(report["rows"])
    if not by_heads:
        raise ValueError(f"{path} holds no measurements of the crossover")
    figure, all_axes = plt.subplots(1, len(by_heads), figsize=(3.2 * len(by_heads), 3.6), sharey=True, squeeze=False)
    shade = colours(drawn([row for rows in by_heads.values() for row in rows]))
    for axes, (heads, rows) in zip(all_axes[0], by_heads.items(), strict=True):
        for name, colour in shade.items():
            _line(axes, rows, name, colour)
        for T in switches(rows):
            axes.axvline(T, color="black", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"batch × heads = {heads}", fontsize=10)
        axes.xaxis.set_major_formatter(_short)
        axes.yaxis.set_major_formatter(_short)
        axes.set_xlabel("tokens in a sequence")
        axes.tick_params(which="minor", left=False)
        axes.grid(which="both", alpha=0.3)
    all_axes[0][0].set_ylabel("time in ms")
    figure.suptitle(_title(report, next(iter(by_heads.values()))[0]["dims"]), fontsize=11)
    handles = _legend(plt, shade)
    legend_below(figure, handles, [handle.get_label() for handle in handles])
    figure.tight_layout()
    return save(figure, path.with_suffix("") / "crossover.svg")


def _title(report: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    widths = f"K = V = {sizes['K']}" if sizes["K"] == sizes["V"] else f"K = {sizes['K']}, V = {sizes['V']}"
    dtypes = "bfloat16 with float32 gates" if report.get("driver") else "float32"
    return (
        "chunk_gla forward: time of each backend against the length of a sequence, lower is better\n"
        f"{report['device']}, {dtypes}, {widths}; torch {report['torch']}"
    )


def _legend(plt: Any, shade: Mapping[str, str]) -> list[Any]:
    line = plt.Line2D
    points = {"marker": "o", "linestyle": "", "color": "black"}
    return [
        *(line([], [], color=colour, label=name) for name, colour in shade.items()),
        line([], [], label="picked by auto", **points),
        line([], [], label="not picked", markerfacecolor="white", **points),
        line([], [], label="where the pick changes", color="black", linestyle=":"),
    ]


def _line(axes: Any, rows: Sequence[Row], name: str, colour: str) -> None:
    """Draws the times of a backend; the points at which it was picked are filled."""
    timed_rows = [row for row in rows if name in row["measured"]]
    timed = [(row["dims"]["T"], 1e3 * row["measured"][name], row["pick"] == name) for row in timed_rows]
    axes.plot([T for T, *_ in timed], [ms for _, ms, _ in timed], color=colour)
    for filled in (False, True):
        points = [(T, ms) for T, ms, picked in timed if picked == filled]
        lengths, times = [T for T, _ in points], [ms for _, ms in points]
        axes.plot(lengths, times, "o", color=colour, markerfacecolor=colour if filled else "white", zorder=3 + filled)


def _short(number: float, _: Any = None) -> str:
    """Returns a tick's label, such as 0.1, 256 or 64k."""
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def main() -> None:
    """Draws a picture for each file on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="written by benchmarks/evidence.py selection")
    for path in parser.parse_args().results:
        print(f"wrote {draw(path)}")


if __name__ == "__main__":
    main()
