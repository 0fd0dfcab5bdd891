"""One fused kernel against segments all at once: the time of each backend against the length of the sequence, as PNG.

python3 benchmarks/crossover.py benchmarks/results/selection-h200.json

The points were measured by benchmarks/selection.py; what `auto` picked is filled, and a line stands where the pick
changes. The picture is written beside the file, into the folder of its name.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla_core.bench.plots import colours, pyplot

MOST_SLOWER = 10
"""Backends that never come within so many times of the fastest are not drawn."""

Row = Mapping[str, Any]


def panels(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of the crossover by the number of heads in the batch, B*H, the shorter sequences first."""
    found: dict[int, list[Row]] = {}
    timed = [row for row in rows if row["part"] == "crossover" and row["measured"]]
    for row in sorted(timed, key=lambda row: row["dims"]["T"]):
        found.setdefault(row["dims"]["B"] * row["dims"]["H"], []).append(row)
    return dict(sorted(found.items()))


def switches(rows: Sequence[Row]) -> list[float]:
    """Lengths between which the pick changes, in their geometric middle."""
    neighbours = itertools.pairwise(rows)
    return [(a["dims"]["T"] * b["dims"]["T"]) ** 0.5 for a, b in neighbours if a["pick"] != b["pick"]]


def drawn(rows: Sequence[Row]) -> list[str]:
    """Names of the backends to draw."""
    names = sorted({name for row in rows for name in row["measured"]})
    return [
        name
        for name in names
        if any(row["measured"].get(name, float("inf")) < MOST_SLOWER * min(row["measured"].values()) for row in rows)
    ]


def draw(path: Path) -> Path:
    """Draw the picture for a results file. Raises ValueError where matplotlib or the measurements are missing."""
    plt, found = pyplot(), json.loads(path.read_text())
    of_heads = panels(found["rows"])
    if not of_heads:
        raise ValueError(f"{path} holds no measurements of the crossover")
    figure, all_axes = plt.subplots(1, len(of_heads), figsize=(3.2 * len(of_heads), 3.6), sharey=True, squeeze=False)
    names = drawn([row for rows in of_heads.values() for row in rows])
    for axes, (heads, rows) in zip(all_axes[0], of_heads.items(), strict=True):
        for name, colour in colours(names).items():
            _line(axes, rows, name, colour)
        for T in switches(rows):
            axes.axvline(T, color="black", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"B·H = {heads}")
        axes.set_xlabel("tokens in a sequence")
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel("ms")
    all_axes[0][0].legend()
    sizes = next(iter(of_heads.values()))[0]["dims"]
    figure.suptitle(
        f"chunk_gla forward, K = {sizes['K']}, V = {sizes['V']}, {found['device']}: "
        "filled is what auto picks, dotted where it switches",
        y=1.02,
    )
    target = path.with_suffix("") / "crossover.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return target


def _line(axes: Any, rows: Sequence[Row], name: str, colour: str) -> None:
    """The times of a backend; the points that it was picked for are filled."""
    timed = [row for row in rows if name in row["measured"]]
    lengths, times = [row["dims"]["T"] for row in timed], [1e3 * row["measured"][name] for row in timed]
    axes.plot(lengths, times, color=colour, label=name)
    for T, seconds, row in zip(lengths, times, timed, strict=True):
        axes.plot(T, seconds, "o", color=colour, markerfacecolor=colour if row["pick"] == name else "white")


def main() -> None:
    """Draw each file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="written by benchmarks/selection.py")
    for path in parser.parse_args().results:
        print(f"wrote {draw(path)}")


if __name__ == "__main__":
    main()
