"""The results section of the README, generated from the files under benchmarks/results.

python3 benchmarks/readme_tables.py                    print it
python3 benchmarks/readme_tables.py --write README.md  put it between the markers
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gla_core.bench import results
from gla_core.bench.results import Results
from gla_core.bench.run import by_op
from gla_core.bench.suite import Row

FOLDER = Path(__file__).parent / "results"
OURS = ("triton_fused", "parallel_scan")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
MARKED = re.compile(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", re.DOTALL)


def render(folder: Path) -> str:
    """Markdown of every table of times in the folder, ending in a line end; '' where there is none."""
    selections = sorted(folder.glob("selection-*.json"))
    tables = [p for p in sorted(folder.glob("*.json")) if p not in selections and not p.match("conformance-*")]
    sections = [_section(results.read(path), path) for path in tables]
    return "".join(sections + [_selection(json.loads(path.read_text()), path) for path in selections])


def between_markers(readme: str) -> str | None:
    """What stands between the markers, None where there are none."""
    found = MARKED.search(readme)
    return found and found[1]


def insert(readme: str, generated: str) -> str:
    """The README with `generated` between its markers. Raises ValueError where there are none."""
    if between_markers(readme) is None:
        raise ValueError(f"the README has no markers; put {BEGIN} and {END} on lines of their own")
    return MARKED.sub(lambda _: f"{BEGIN}\n{generated}{END}", readme)


def _section(found: Results, path: Path) -> str:
    driver = f", driver {found.driver}" if found.driver else ""
    versions = ", ".join(
        f"{name} {getattr(found, name)}" for name in ("torch", "triton", "fla") if getattr(found, name)
    )
    bandwidth = f"; copies at {found.copy_bandwidth / 1e12:.2f} TB/s" if found.copy_bandwidth else ""
    commit = f" at {found.commit[:10]}" if found.commit else ""
    lines = [
        f"### {path.stem.rpartition('-')[0]}, {found.device}\n",
        f"gla_core {found.gla_core}{commit}, {versions}{driver}, {found.date[:10]}{bandwidth}. Medians. "
        "GB/s counts each input and output once; 'of floor' is that over the copy bandwidth; "
        "'× fla' is the time of FLA over that of the row. "
        f"Written by `benchmarks/evidence.py` into `benchmarks/results/{path.name}`.\n",
    ]
    lines += _beside_baselines(found.rows)
    for op, rows in by_op(found.rows):
        summary = f"<summary>{op}: {len(rows)} measurements</summary>"
        lines.append(f"<details>{summary}\n\n{results.markdown(rows)}\n\n</details>\n")
    return "\n".join(lines + _pictures(path))


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


def _selection(found: dict[str, Any], path: Path) -> str:
    lines = [
        f"### What auto picks, {found['device']}\n",
        f"gla_core {found['gla_core']} at {found['commit'][:10]}, torch {found['torch']}, {found['date'][:10]}. "
        "The time of the backend that is picked over that of the fastest; the grid is one of chunk_gla_fwd, of shapes "
        "that no constant was fitted to. "
        f"Written by `benchmarks/selection.py` into `benchmarks/results/{path.name}`.\n",
        "| calls | measured | within 5 % of the fastest | slowest pick |\n| --- | ---: | ---: | ---: |",
    ]
    for part, of_part in found["summary"].items():
        cells = (part, str(of_part["calls"]), f"{of_part['close']:.1%}", f"{of_part['worst']:.2f} ×")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_pictures(path)])


def _pictures(path: Path) -> list[str]:
    """Those in the folder of a results file."""
    pictures = sorted((path.parent / path.stem).glob("*.png"))
    return [f"![{p.stem}](benchmarks/results/{path.stem}/{p.name})\n" for p in pictures]


def main() -> None:
    """Print the section, or write it into a README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a README with markers")
    options = parser.parse_args()
    generated = render(FOLDER)
    if options.write is None:
        print(generated, end="")
    else:
        options.write.write_text(insert(options.write.read_text(), generated))


if __name__ == "__main__":
    main()
