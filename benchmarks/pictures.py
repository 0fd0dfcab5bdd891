"""Draws how many times as fast calls are as their peers: a bar for each call, narrow enough for a phone."""

from __future__ import annotations

from pathlib import Path

import record

from gla_core.bench.plots import pyplot, save
from gla_core.bench.results import time_text

DRAWN = {
    "op": "ops beside flash-linear-attention and PyTorch",
    "mamba2_scan": "Mamba-2's scan and step beside mamba_ssm",
}
"""The parts that are drawn, in words."""
ALT = {part: f"how many times as fast: {words}" for part, words in DRAWN.items()}
FASTER, SLOWER = "tab:blue", "tab:red"


def draw(path: Path) -> Path | None:
    """Draws a part beside its file, and returns the picture; None if the file has no row beside a peer.

    Raises:
        ValueError: matplotlib is not installed.
    """
    rows = record.read(path)
    compared = [(row, ratio) for row in rows if (ratio := record.ratio(row, rows)) is not None]
    if not compared:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5.2, 0.9 + 0.42 * len(compared)))
    for i, (row, ratio) in enumerate(compared):
        axes.barh(i, ratio - 1, left=1, height=0.5, color=FASTER if ratio >= 1 else SLOWER)
        place = {"xy": (0, i - 0.36), "xycoords": ("axes fraction", "data")}
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.annotate(row.call.replace("`", ""), **place, fontsize=7, bbox=behind)
        label = f" {ratio:.2f} ×, {time_text(row.seconds)} "
        axes.annotate(label, (max(ratio, 1), i), va="center", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(0.5, *(0.8 * ratio for _, ratio in compared)), 3 * max(2, *(ratio for _, ratio in compared)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(len(compared) - 0.4, -0.7)
    axes.set_yticks([])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    versions = {name: rows[0].versions.get(name) for name in ("torch", "triton", "fla", "mamba_ssm")}
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    axes.set_title(f"{DRAWN[path.stem]}: times as fast\n{rows[0].device}; {named}", fontsize=8, loc="left")
    figure.tight_layout()
    return save(figure, path.with_suffix(".svg"))
