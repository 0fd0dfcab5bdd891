"""Pictures of results, as PNG: time against sequence length, fraction of the floor, ratio to FLA. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gla_core.bench.results import Results
from gla_core.bench.suite import TIMED, Row
from gla_core.workloads.named import select


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises ValueError where it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise ValueError("plots need matplotlib: pip install 'gla-core[bench]'") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot(results: Results, folder: Path) -> list[Path]:
    """Draw what the results allow into `folder`.

    Returns:
        The files written: chunk_gla-time.png, <op>-floor.png, <op>-ratio-to-fla.png; none for what was not measured.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    timed = [row for row in results.rows if row.seconds is not None and row.direction in TIMED]
    written = _time_against_length(plt, results, [row for row in timed if row.op == "chunk_gla"], folder)
    for op in dict.fromkeys(row.op for row in timed):
        rows = [row for row in timed if row.op == op]
        floor = [(_label(row), row.floor_fraction) for row in rows if row.floor_fraction is not None]
        ratio = [(_label(row), row.ratio_to["fla"]) for row in rows if "fla" in row.ratio_to]
        written += _bars(plt, results, floor, "fraction of the memory floor", folder / f"{op}-floor.png")
        written += _bars(plt, results, ratio, "times as fast as FLA", folder / f"{op}-ratio-to-fla.png")
    return written


def _time_against_length(plt: Any, results: Results, rows: Sequence[Row], folder: Path) -> list[Path]:
    """A line per backend and direction, over the workloads of the width that most of them have."""
    sizes = {w.name: w.sizes for w in select("chunk_gla") if "T" in w.sizes}
    rows = [row for row in rows if row.workload in sizes]
    if not rows:
        return []
    widths = [(sizes[row.workload]["K"], sizes[row.workload]["V"]) for row in rows]
    K, V = max(widths, key=widths.count)
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, width in zip(rows, widths, strict=True):
        B, T, H = (sizes[row.workload][name] for name in "BTH")
        if width == (K, V) and row.seconds is not None:
            lines[f"{row.backend} {row.direction}"].append((T, row.seconds / (B * T * H) * 1e9))
    figure, axes = plt.subplots(figsize=(8, 5))
    for label, points in lines.items():
        lengths, times = zip(*sorted(points), strict=True)
        axes.plot(lengths, times, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens in a sequence")
    axes.set_ylabel("ns per token and head")
    axes.set_title(f"chunk_gla, K = {K}, V = {V}, {results.device}")
    axes.legend()
    return _save(plt, figure, folder / "chunk_gla-time.png")


def _bars(plt: Any, results: Results, bars: Sequence[tuple[str, float]], title: str, path: Path) -> list[Path]:
    if not bars:
        return []
    labels, values = zip(*reversed(bars), strict=True)  # the first on top
    figure, axes = plt.subplots(figsize=(9, 1 + 0.25 * len(bars)))
    axes.barh(range(len(bars)), values)
    axes.set_yticks(range(len(bars)), labels)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_title(f"{title}, {results.device}")
    return _save(plt, figure, path)


def _label(row: Row) -> str:
    return f"{row.workload} {row.direction} {row.backend}"


def _save(plt: Any, figure: Any, path: Path) -> list[Path]:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return [path]
