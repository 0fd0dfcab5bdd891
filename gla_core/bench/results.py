"""The files of results: rows, and the device, versions and commit with which they were measured."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gla_core as gla
from gla_core.bench.baselines import BASELINES
from gla_core.bench.suite import Row, with_ratios
from gla_core.files import write_json
from gla_core.installed import driver, first_line, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run on one device.

    Attributes:
        device: the device's name. driver: the NVIDIA driver's version, None without one.
        python, torch, triton, fla, gla_core: versions; None if not installed.
        commit: commit of the source tree; None outside of a git repository. It ends in "+" if the tree has changes.
        date: date of the run, ISO 8601 in UTC.
        copy_bandwidth: bytes per second, read and written together, measured in the same run.
        rows: see `gla_core.bench.suite.Row`.
    """

    device: str
    driver: str | None
    python: str
    torch: str
    triton: str | None
    fla: str | None
    gla_core: str
    commit: str | None
    date: str
    copy_bandwidth: float | None
    rows: tuple[Row, ...] = ()

    def with_rows(self, rows: Sequence[Row]) -> Results:
        """Returns the same run with these rows and their ratios."""
        return dataclasses.replace(self, rows=tuple(with_ratios(rows)))


def describe_run(device: torch.device, copy_bandwidth: float | None, commit: str | None = None) -> Results:
    """Returns results without rows, for a run that begins now."""
    cuda = device.type == "cuda"
    return Results(
        device=torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        driver=driver() if cuda else None,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version_of("triton"),
        fla=version_of("flash-linear-attention"),
        gla_core=gla.__version__,
        commit=commit or _commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        copy_bandwidth=copy_bandwidth,
    )


def conditions(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Returns the device, versions, commit and date, for files whose rows are not `Row`s."""
    described = dataclasses.asdict(describe_run(device, None, commit))
    return {name: value for name, value in described.items() if name not in ("rows", "fla", "copy_bandwidth")}


def file_name(kind: str, device: torch.device) -> str:
    """Returns the name of a file of results: its kind, and the name of the GPU or cpu."""
    return f"{kind}-{short_name(torch.cuda.get_device_name(device)) if device.type == 'cuda' else 'cpu'}.json"


def short_name(device: str) -> str:
    """Returns the name of a device as it appears in file names: h200 for NVIDIA H200."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def write(path: Path, results: Results) -> None:
    """Writes results as JSON. A reader never sees half a file."""
    write_json(path, dataclasses.asdict(results))


def read(path: Path) -> Results:
    """Reads a file that `write` wrote. Raises ValueError for any other file."""
    try:
        fields = json.loads(path.read_text())
        return Results(**{**fields, "rows": tuple(Row(**row) for row in fields["rows"])})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of gla bench: {error}") from None


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and cells of a table. Spreads, errors and each baseline have a column if any row has them."""
    compared = [name for name in BASELINES if any(name in row.ratio_to for row in rows)]
    errors, spreads = any(row.error for row in rows), any(row.spread is not None for row in rows)
    header = ["workload", "direction", "backend", "time", *(["spread"] if spreads else []), "GB/s", "of floor"]
    header += [*(f"× {name}" for name in compared), *(["error"] if errors else [])]
    return header, [
        [
            *(row.workload, row.direction, row.backend, time_text(row.seconds)),
            *(["" if row.spread is None else f"{row.spread:.0%}"] if spreads else []),
            _three_digits(row.gigabytes_per_second),
            "" if row.floor_fraction is None else f"{row.floor_fraction:.1%}",
            *(f"{row.ratio_to[name]:.2f}" if name in row.ratio_to else "" for name in compared),
            *([row.error or ""] if errors else []),
        ]
        for row in rows
    ]


def failures(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each backend and error, with the ops, directions and number of workloads."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.error is not None:
            groups.setdefault((row.backend, row.error.removeprefix(f"{row.backend}: ")), []).append(row)
    return [f"{backend}: {error} ({_concerned(group)})" for (backend, error), group in groups.items()]


def _concerned(rows: Sequence[Row]) -> str:
    directions: dict[str, dict[str, None]] = {}
    for row in rows:
        directions.setdefault(row.op, {})[row.direction] = None
    workloads = list(dict.fromkeys((row.op, row.workload) for row in rows))
    which = workloads[0][1] if len(workloads) == 1 else f"{len(workloads)} workloads"
    return "; ".join([*(f"{op} {', '.join(names)}" for op, names in directions.items()), which])


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table in Markdown, without a newline at its end."""
    header, body = table(rows)
    lines = [header, ["---"] * 3 + ["---:"] * (len(header) - 3), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def time_text(seconds: float | None) -> str:
    """Returns a time with three digits in s, ms or us."""
    if seconds is None:
        return "-"
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * factor
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def _commit() -> str | None:
    here = str(Path(__file__).parent)
    commit = first_line("git", "-C", here, "rev-parse", "HEAD")
    return commit and commit + ("+" if first_line("git", "-C", here, "status", "--porcelain", "-uno") else "")


def _three_digits(x: float | None) -> str:
    return "" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"
