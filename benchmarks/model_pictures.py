"""Draws whole models against the length of a sequence: speed and memory of training, from a file of readme.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gla_core.bench.plots import legend_below, pyplot, save

WAYS = {
    "fla": ("flash-linear-attention's model", "0.45"),
    "accelerated": ("the same after accelerate()", "tab:blue"),
    "compiled": ("gla_transformers, compiled", "tab:orange"),
}
"""The ways of models.py that are drawn, each with its label and its colour."""
Row = dict[str, Any]


def draw(found: Row, folder: Path) -> list[Path]:
    """Draws training_speed.svg and training_memory.svg into `folder`, for the ways that have rows; returns the files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    lengths = [row for row in found["rows"] if row["what"] == "length" and "error" not in row]
    if not lengths:
        return []
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "fla"))
    where = f"{found['device']}, bfloat16; {versions}"
    return [
        save(_speed(lengths, where), folder / "training_speed.svg"),
        save(_memory(lengths, where), folder / "training_memory.svg"),
    ]


def _speed(rows: Sequence[Row], where: str) -> Any:
    figure, axes = _axes(
        rows, f"Training GLA of 374M parameters, one sequence a step: tokens per second, higher is better\n{where}"
    )
    for way, (label, colour) in WAYS.items():
        x, of_way = _of(rows, way)
        axes.plot(x, [row["tokens_per_second"] / 1e3 for row in of_way], "o-", color=colour, label=label)
        device = [row["tokens"] / row["device_seconds"] / 1e3 for row in of_way]
        axes.plot(x, device, linestyle="--", color=colour, linewidth=1)
    axes.plot([], [], linestyle="--", color="black", linewidth=1, label="by time on the device alone")
    axes.set_ylabel("thousand tokens per second")
    return _finished(figure, axes)


def _memory(rows: Sequence[Row], where: str) -> Any:
    figure, axes = _axes(
        rows, f"Training GLA of 374M parameters, one sequence a step: peak memory, lower is better\n{where}"
    )
    for way, (label, colour) in WAYS.items():
        x, of_way = _of(rows, way)
        axes.plot(x, [row["gib"] for row in of_way], "o-", color=colour, label=label)
    axes.set_ylabel("GiB allocated at most")
    return _finished(figure, axes)


def _of(rows: Sequence[Row], way: str) -> tuple[list[int], list[Row]]:
    """Returns the lengths and the rows of a way, shortest first."""
    found = sorted((row for row in rows if row["way"] == way), key=lambda row: row["tokens"])
    return [row["tokens"] for row in found], found


def _axes(rows: Sequence[Row], title: str) -> Any:
    figure, axes = pyplot().subplots(figsize=(7.5, 4))
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens in the sequence")
    axes.grid(alpha=0.3)
    return figure, axes


def _finished(figure: Any, axes: Any) -> Any:
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    legend_below(figure, *axes.get_legend_handles_labels(), columns=2)
    return figure
