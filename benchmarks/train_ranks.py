"""Measures training of examples/train_lm.py over the GPUs of a host, and whether a killed training resumes.

    python benchmarks/train_ranks.py --ranks 1,2,4,8
    python benchmarks/train_ranks.py --device cpu --ranks 1,2 --long-window 64 -- --width 16 --layers 2 --heads 2

A row is one of these:

    sharded    The model is sharded by FSDP2, and every rank reads `--batch` windows (weak scaling).
    together   All ranks read one long window together, by context parallelism and FSDP2.
    resumed    A training is killed after its first checkpoint and resumed. `difference` is the largest difference of a
               loss, in nats, from a training that was left alone.

The efficiency is the tokens per second of a rank, divided by those of a rank of the first of `--ranks`. Arguments after
`--` go to train_lm.py. The file is written after every row.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lists
import record
import torch

SCRIPT = Path(__file__).parents[1] / "examples" / "train_lm.py"
KINDS = ("sharded", "together", "resumed")
LIMIT = 300
"""The seconds after which a training has failed."""
Facts = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and prints and writes each row."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    about = record.conditions(device, options.commit)
    target = record.path_of(options.out, about["device"], f"train_{options.preset}_ranks")
    rows: list[record.Row] = []
    for call, facts in measured(options):
        rows.append(record.Row(call=call, who="gla-core", facts=facts, **about))
        print(f"{call}: {facts}", flush=True)
        record.write(target, rows)


def measured(options: argparse.Namespace) -> Iterator[tuple[str, Facts]]:
    """Yields each measurement in words, and its numbers."""
    for kind in options.kinds:
        if kind == "resumed":
            for ranks in options.ranks:
                difference = difference_after_kill(options, ranks)
                yield f"{record.counted(ranks, 'rank')}, resumed", {"largest difference of a loss": difference}
            continue
        first: float | None = None
        for ranks in options.ranks:
            if kind == "together":
                sizes = {"batch": 1, "window": options.long_window, "context-parallel": ranks}
            else:
                sizes = {"batch": options.batch * ranks}
            speed = tokens_per_second(options, ranks, [f"--{name}={value}" for name, value in sizes.items()])
            first = first or speed / ranks
            words = ", ".join(
                [record.counted(ranks, "rank"), kind, *(f"{name} {size}" for name, size in sizes.items())]
            )
            yield words, {"tokens/s": speed, "tokens/s of a rank": speed / ranks, "efficiency": speed / ranks / first}


def tokens_per_second(options: argparse.Namespace, ranks: int, more: Sequence[str]) -> float:
    """Trains, and returns the tokens per second of all ranks."""
    printed = wait(start(options, ranks, ["--steps", str(options.steps), *more]))
    match = re.search(r"Speed: ([\d,]+) tokens/s", printed)
    if match is None:
        raise SystemExit(f"no speed was printed:\n{printed}")
    return float(match[1].replace(",", ""))


def difference_after_kill(options: argparse.Namespace, ranks: int) -> float:
    """Trains, and trains again but kills all ranks after a checkpoint; returns the largest difference of a loss."""
    with tempfile.TemporaryDirectory() as folder:
        left_alone, killed = Path(folder, "alone"), Path(folder, "killed")
        common = ["--batch", str(2 * ranks), "--steps", "12", "--save-every", "4"]
        wait(start(options, ranks, [*common, "--out", str(left_alone)]))
        kill_after_checkpoint(start(options, ranks, [*common, "--out", str(killed)]), killed)
        wait(start(options, ranks, [*common, "--out", str(killed)]))
        pairs = zip(losses(left_alone), losses(killed), strict=True)
        return max(abs(x - y) for x, y in pairs)


def start(options: argparse.Namespace, ranks: int, more: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Starts a training on a number of ranks, as torchrun would; returns the processes."""
    command = [sys.executable, str(SCRIPT), "--preset", options.preset, "--device", options.device]
    begin = functools.partial(subprocess.Popen, [*command, *options.more, *more], stdout=subprocess.PIPE, text=True)
    threads = {"OMP_NUM_THREADS": "1"}  # else each rank would start a thread a core
    if ranks == 1:
        return [begin(env={**threads, **os.environ})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        begin(env={**threads, **os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def wait(processes: Sequence[subprocess.Popen[str]]) -> str:
    """Waits for the ranks to end; returns what rank 0 printed. If one fails, all are killed and the program ends."""
    end = time.monotonic() + LIMIT
    try:
        printed = [process.communicate(timeout=end - time.monotonic())[0] for process in processes]
    finally:
        kill(processes)
    if any(process.returncode for process in processes):
        raise SystemExit(f"a training failed; it printed:\n{printed[0]}")
    return printed[0]


def kill_after_checkpoint(processes: Sequence[subprocess.Popen[str]], out: Path) -> None:
    """Kills the ranks of a training once `out` holds a checkpoint."""
    end = time.monotonic() + LIMIT
    while not any(out.glob("step-*[0-9]")) and processes[0].poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    ended = processes[0].poll()
    kill(processes)
    if ended is not None or not any(out.glob("step-*[0-9]")):
        raise SystemExit(f"a training was to be killed after a checkpoint; it ended before, with code {ended}")


def kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kills the processes that still run."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def losses(out: Path) -> list[float]:
    """Returns the losses of all steps up to the last checkpoint."""
    last = max(out.glob("step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-")))
    return json.loads((last / "run.json").read_text())["losses"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", type=lists.numbers, default=[1, 2, 4, 8], help="numbers of ranks, separated by commas"
    )
    parser.add_argument(
        "--kinds", type=functools.partial(lists.names, known=KINDS), default=KINDS, help="of rows, separated by commas"
    )
    parser.add_argument("--preset", default="340m", help="of train_lm.py (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of a rank in a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a training that is timed (%(default)s)")
    parser.add_argument("--long-window", type=int, default=131072, help="tokens that ranks read together (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results file")
    parser.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser.add_argument("more", nargs="*", help="arguments of train_lm.py, after --")
    return parser


if __name__ == "__main__":
    main()
