"""Draws results as SVG: the speed of each backend relative to a baseline. Needs matplotlib."""

from __future__ import annotations

import importlib
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gla_core.bench.baselines import BASELINES
from gla_core.bench.results import Results, time_text
from gla_core.bench.suite import TIMED, Row
from gla_core.dispatch import registry
from gla_core.extras import how_to_install
from gla_core.workloads.named import WORKLOADS, Workload

TITLES = {
    "forward": "forward",
    "forward+backward": "training: forward and backward",
    "step": "one step, launched by the host",
    "step_graph": "one step in a CUDA graph",
}
GREY = "0.45"
"""The colour of baselines."""
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:cyan")
"""The colours of backends, in the order in which they are installed."""
FULL_NAMES = {"fla": "flash-linear-attention", "torch": "PyTorch", "loop": "a loop over tokens"}
WIDTH, BAR, GAP = 5, 0.22, 1.7
"""The width of a picture and the height of a bar in inches, and the gap between two workloads in bars. At this width
letters of 9 points stay legible on a phone. The name of a workload stands in the gap."""
LINE = 70
"""The number of letters in a line of a title."""
BESIDE = {
    "xytext": (4, 0),
    "textcoords": "offset points",
    "fontsize": 9,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}
"""Options of words beside a bar or an axis: on white, at a distance."""
WIDEST = 12
"""The relative speed above which an axis is logarithmic."""
EQUAL = 0.03
"""The relative difference of times below which two backends share a bar. It must hold for every workload of an op."""


def pyplot() -> Any:
    """Returns matplotlib.pyplot, set to draw into files that are the same in every run.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise ValueError(f"plots need matplotlib: {how_to_install('bench')}") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "gla-core", "svg.fonttype": "none"})  # text stays text: small files
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> Path:
    """Writes a figure as SVG without a date, closes it, and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
    return path


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int = 5) -> None:
    """Puts a legend below a figure's axes."""
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=columns, frameon=False)


def plot(results: Results, folder: Path) -> list[Path]:
    """Draws a picture for each op into `folder`, with a panel for each direction.

    Returns:
        The files written, <op>.svg.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot()
    timed = [row for row in results.rows if row.seconds is not None and row.direction in TIMED]
    return [
        save(_draw(plt, [row for row in timed if row.op == op], results), folder / f"{op}.svg")
        for op in dict.fromkeys(row.op for row in timed)
    ]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each backend; an installed backend has the same colour in every picture."""
    backends = [name for name in dict.fromkeys([*registry.installed(), *names]) if name not in BASELINES]
    backend_colours = dict(zip(backends, itertools.cycle(COLOURS), strict=False))
    return {name: backend_colours.get(name, GREY) for name in names}


def in_order(names: Sequence[str]) -> list[str]:
    """Returns the names of backends in the order of their bars: baselines, known backends, then others by name."""
    known = [*BASELINES, "triton_fused", "parallel_scan", "reference"]
    return sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))


def speeds(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Returns rows of one workload and direction, each with its speed relative to the first of them."""
    first = rows[0]
    return [(row, row.ratio_to.get(first.backend) or (first.seconds or 0) / (row.seconds or 1)) for row in rows]


def equal_backends(rows: Sequence[Row]) -> dict[str, str]:
    """Maps each backend whose times equal an earlier backend's in every row of an op to that earlier backend."""
    seconds = {(row.workload, row.direction, row.backend): row.seconds or 0.0 for row in rows}
    calls = {(row.workload, row.direction) for row in rows}
    names = [name for name in in_order([row.backend for row in rows]) if name not in BASELINES]
    equal: dict[str, str] = {}
    for one, other in itertools.combinations(names, 2):
        pairs = [(seconds.get((*call, one)), seconds.get((*call, other))) for call in calls]
        if one not in equal and all(a and b and abs(a / b - 1) < EQUAL for a, b in pairs):
            equal.setdefault(other, one)
    return equal


def in_words(op: str, workload: str) -> str:
    """Returns words for a workload, such as "8 sequences of 4096 tokens, 16 heads"; its name if it is not known."""
    known = _known(op, workload)
    return workload if known is None else workload_in_words(known)


def conditions(op: str, workloads: Sequence[str]) -> str:
    """Returns the dtypes and widths that these workloads share, such as "bfloat16 with float32 gates"."""
    sizes = [known.sizes for name in workloads if (known := _known(op, name))]
    dtypes = {(s.get("dtype", torch.float32), s.get("gate_dtype") if "gla" in op else None) for s in sizes}
    parts = []
    if len(dtypes) == 1:
        ((dtype, gates),) = dtypes
        parts.append(_dtype(dtype) + (f" with {_dtype(gates)} gates" if gates not in (None, dtype) else ""))
    usual = [s["K"] == s["V"] == 128 for s in sizes if "K" in s]
    if any(usual):
        parts.append("K = V = 128" if all(usual) else "K = V = 128 unless a label says otherwise")
    return ", ".join(parts)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _known(op: str, workload: str) -> Workload | None:
    return next((w for w in WORKLOADS if (w.op, w.name) == (op, workload)), None)


def workload_in_words(workload: Workload) -> str:
    """Returns words for the sizes of a workload."""
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


# ---- drawing


def _draw(plt: Any, rows: Sequence[Row], results: Results) -> Any:
    """Returns a figure of one op, with a panel for each direction. All panels have the same workloads and bars."""
    op, equal = rows[0].op, equal_backends(rows)
    shown = [row for row in rows if row.backend not in equal]
    bars = in_order([row.backend for row in shown])
    directions = [name for name in TIMED if any(row.direction == name for row in shown)]
    workloads = _listed(op, [row.workload for row in shown])
    colour = colours(bars)
    logarithmic = any(speed > WIDEST for group in _groups(shown, bars) for _, speed in speeds(group))
    height = 1.2 + len(directions) * (0.8 + BAR * len(workloads) * (len(bars) + GAP))
    figure, panels = plt.subplots(len(directions), 1, figsize=(WIDTH, height), squeeze=False)
    for axes, direction in zip(panels[:, 0], directions, strict=True):
        _scale(axes, logarithmic)
        for i, name in enumerate(workloads):
            group = {row.backend: row for row in shown if (row.workload, row.direction) == (name, direction)}
            _bars(axes, i * (len(bars) + GAP), group, colour, logarithmic)
            above = (0, i * (len(bars) + GAP) - 0.7)
            axes.annotate(in_words(op, name), above, **BESIDE, xycoords=axes.get_yaxis_transform())
        _describe(axes, direction, f"speed relative to {_full(bars[0])}" + (", log scale" if logarithmic else ""))
        axes.set_yticks([])
        axes.set_ylim(len(workloads) * (len(bars) + GAP) - GAP, -GAP)
    figure.suptitle(_title(op, bars[0], workloads, results), fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=shade) for shade in colour.values()]
    legend_below(figure, handles, [_label(name, equal) for name in bars], columns=1 if equal else 3)
    figure.tight_layout()
    return figure


def _label(name: str, equal: dict[str, str]) -> str:
    same = [name, *(other for other, one in equal.items() if one == name)]
    return name if len(same) == 1 else f"{' and '.join(same)}: equal within {EQUAL:.0%}"


def _title(op: str, baseline: str, workloads: Sequence[str], results: Results) -> str:
    named = ["torch", "triton", *(["fla"] if baseline == "fla" else [])]
    versions = [f"{name} {version}" for name in named if (version := getattr(results, name))]
    where = ", ".join(filter(None, [results.device, conditions(op, workloads)]))
    below = textwrap.wrap(f"{where}; {', '.join(versions)}", LINE)
    return "\n".join([f"{op}: speed relative to {_full(baseline)}, higher is better", *below])


def _full(name: str) -> str:
    return FULL_NAMES.get(name, name)


def _groups(rows: Sequence[Row], bars: Sequence[str]) -> list[list[Row]]:
    """Returns the rows of each workload and direction, in the order of their bars."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: bars.index(row.backend)):
        groups.setdefault((row.workload, row.direction), []).append(row)
    return list(groups.values())


def _bars(axes: Any, y: float, group: dict[str, Row], colour: dict[str, str], logarithmic: bool) -> None:
    """Draws one bar per backend from y down, labelled with time and speed, or "no time" if it has none."""
    present = [group[name] for name in colour if name in group]
    speed_of = {row.backend: speed for row, speed in speeds(present)} if present else {}
    for i, name in enumerate(colour):
        speed, text = 0.0 if not logarithmic else 1.0, "no time"
        if name in group:
            speed = speed_of[name]
            text = time_text(group[name].seconds)
            text += f", {speed:.{1 if speed >= 2 else 2}f} ×" if name != next(iter(colour)) else ""
        start = 1.0 if logarithmic else 0.0
        axes.barh(y + i, speed - start, left=start, height=0.9, color=colour[name])
        axes.annotate(text, (max(speed, start), y + i), **BESIDE, va="center")


def _scale(axes: Any, logarithmic: bool) -> None:
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _describe(axes: Any, direction: str, label: str) -> None:
    axes.set_xlabel(label)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.margins(y=0.01)
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    if axes.get_xscale() == "log":
        axes.set_xlim(0.8 * min([1.0, *ends]), 4 * max([1.0, *ends]))
    else:
        axes.set_xlim(0, 1.5 * max([1.0, *ends]))
    axes.set_title(TITLES[direction], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _listed(op: str, names: Sequence[str]) -> list[str]:
    """Returns the workloads in the order of `gla_core.workloads.named`, followed by all others."""
    listed = [w.name for w in WORKLOADS if w.op == op]
    return sorted(dict.fromkeys(names), key=lambda name: listed.index(name) if name in listed else len(listed))
