"""How much faster is one sequence over several ranks? Times of gla_core.distributed.chunk_gla beside one rank alone.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --out benchmarks/results
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --device cpu --tokens 1024 --heads 2 --width 16

Rank 0 first computes the whole sequence by itself, by gla_core.chunk_gla, while the others wait; then all ranks compute
their shards of it. A time is the median of the slowest rank's. Efficiency is the time of one rank over that of R ranks,
and over R. The gather's share is what the gathers of a pass take by themselves, of the pass. A length that does not fit
into the memory of one rank has no efficiency: what is then found is that R ranks can do it.

For other numbers of ranks a row predicts the efficiency, with as many tokens a rank as measured: a shard takes what it
took here, and what is exchanged takes as long for every summary that a rank receives, of all others from a gather, of
as many as there are rounds from a scan (exchange.py). It is a model and no measurement.

R ranks   T tokens of all ranks   H heads   K key and value width
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gla_core as gla
from gla_core.bench import results
from gla_core.bench.measure import synchronize
from gla_core.bench.plots import pyplot
from gla_core.distributed import chunk_gla, shard
from gla_core.distributed.exchange import MOST_GATHERED, gather
from gla_core.files import write_json
from gla_core.workloads.inputs import gla_inputs

TOKENS = [2**n for n in range(16, 23)]
HEADS = [8, 16]
DIRECTIONS = ("forward", "forward+backward")
PREDICTED = (4, 8, 64, 1024)
WARM_UP, CALLS = 3, 9
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure on all ranks, and on rank 0 write and draw."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found: Row = {**results.conditions(device, options.commit), "rows": []}
    path = options.out / results.file_name("ranks", device)
    for H in options.heads:
        for T in options.tokens:
            for direction in DIRECTIONS:
                row = measure(T, H, options.width, direction, device)
                if dist.get_rank() == 0:
                    found["rows"].append(row)
                    write_json(path, found)
                    print(in_words(row), flush=True)
    if dist.get_rank() == 0 and options.plot:
        print(f"wrote {draw(found, path.with_suffix('.png'))}")
    dist.destroy_process_group()


# ---- measuring


def measure(T: int, H: int, K: int, direction: str, device: torch.device) -> Row:
    """Time a sequence of T tokens on one rank and on all; the same on every rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    alone = seconds_of(lambda: whole(T, H, K, direction, device), device) if rank == 0 else None
    alone = _agreed(alone, device)
    together = _agreed(seconds_of(lambda: own(T // ranks, H, K, direction, device), device, every=True), device)
    exchanged = _agreed(seconds_of(lambda: gathers(H, K, direction, device), device, every=True), device)
    row = {"tokens": T, "heads": H, "width": K, "direction": direction, "ranks": ranks}
    row |= {"one_rank": alone, "all_ranks": together, "gather": exchanged}
    both = alone is not None and together is not None
    row["efficiency"] = alone / together / ranks if both and alone and together else None
    row["predicted"] = predicted(row)
    return row


def seconds_of(prepare: Callable[[], Callable[[], Any]], device: torch.device, every: bool = False) -> float | None:
    """Median seconds of a call, or None where it does not fit into memory.

    Args:
        prepare: makes the inputs, and returns the call.
        every: all ranks make it, and begin together.
    """
    try:
        call = prepare()
        for _ in range(WARM_UP):
            call()
        samples = [_sample(call, device, every) for _ in range(CALLS)]
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return statistics.median(samples)


def _sample(call: Callable[[], Any], device: torch.device, every: bool) -> float:
    synchronize(device)
    if every:
        dist.barrier()
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def _agreed(seconds: float | None, device: torch.device) -> float | None:
    """The longest time of all ranks that have one; None where one of them failed, or none has any."""
    mine = torch.tensor([-1.0 if seconds is None else seconds], dtype=torch.float64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine) if mine > 0 else None


def whole(T: int, H: int, K: int, direction: str, device: torch.device) -> Callable[[], Any]:
    """All tokens on this rank."""
    return _pass_of(lambda *tokens: gla.chunk_gla(*tokens)[0], T, H, K, direction, device)


def own(T: int, H: int, K: int, direction: str, device: torch.device) -> Callable[[], Any]:
    """T tokens of this rank, with the other ranks."""
    cut = shard(T)
    return _pass_of(lambda *tokens: chunk_gla(*tokens, shard=cut)[0], T, H, K, direction, device)


def gathers(H: int, K: int, direction: str, device: torch.device) -> Callable[[], Any]:
    """The gathers of a pass alone."""
    cut = shard(0)
    decay, state = (torch.randn(1, H, *sizes, device=device) for sizes in ((K,), (K, K)))
    number = 2 if direction == "forward+backward" else 1

    def call() -> None:
        for _ in range(number):
            gather(cut, decay, state, by_row=True)()

    return call


def _pass_of(
    forward: Callable[..., torch.Tensor], T: int, H: int, K: int, direction: str, device: torch.device
) -> Callable[[], Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = gla_inputs(B=1, T=T, H=H, K=K, V=K, gates="mild", gate_dtype=torch.float32, dtype=dtype, device=device)
    tokens = [y for y in (x.q, x.k, x.v, x.g) if y is not None]
    if direction == "forward":
        return lambda: forward(*tokens)
    leaves, do = [y.requires_grad_() for y in tokens], torch.randn_like(x.v)
    return lambda: torch.autograd.grad(forward(*leaves), leaves, do)


# ---- what follows from it


def predicted(row: Row) -> dict[str, float] | None:
    """The efficiency of other numbers of ranks by the model above; None where the row has none itself."""
    if row["efficiency"] is None or row["gather"] is None or row["ranks"] < 2:
        return None
    shard_alone = max(row["all_ranks"] - row["gather"], 0.0)
    one = row["one_rank"] / row["ranks"]  # of as many tokens as a shard has
    per_summary = row["gather"] / (row["ranks"] - 1)
    return {str(R): one / (shard_alone + per_summary * _received(R)) for R in PREDICTED}


def _received(R: int) -> int:
    """Summaries that one of R ranks receives."""
    return R - 1 if R <= MOST_GATHERED else math.ceil(math.log2(R)) + 1


def in_words(row: Row) -> str:
    """One line."""
    one, all_ranks, exchanged = (results.time_text(row[name]) for name in ("one_rank", "all_ranks", "gather"))
    efficiency = "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
    return (
        f"T{row['tokens']} H{row['heads']} {row['direction']}: one rank {one}, {row['ranks']} ranks {all_ranks}, "
        f"of which gathers {exchanged}; efficiency {efficiency}"
    )


def draw(found: Row, target: Path) -> Path:
    """Draw efficiency against length, a line for each number of heads and direction. ValueError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4))
    lines: dict[str, list[Row]] = {}
    for row in found["rows"]:
        if row["efficiency"] is not None:
            lines.setdefault(f"{row['heads']} heads, {row['direction']}", []).append(row)
    for label, rows in lines.items():
        axes.plot([row["tokens"] for row in rows], [row["efficiency"] for row in rows], "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("tokens in a sequence")
    axes.set_ylabel(f"efficiency of {found['rows'][0]['ranks']} ranks")
    axes.legend(frameon=False)
    axes.set_title(found["device"])
    figure.savefig(target, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=_numbers, default=TOKENS, help="lengths, separated by commas")
    parser.add_argument("--heads", type=_numbers, default=HEADS, help="numbers of heads, separated by commas")
    parser.add_argument("--width", type=int, default=128, help="of keys and values of a head")
    parser.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser.add_argument("--plot", action="store_true", help="draw efficiency against length, beside the file")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
