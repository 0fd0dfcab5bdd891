"""Measures the speedup of one sequence over several ranks: ops of gla_core.distributed beside one rank alone.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --out benchmarks/results
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --device cpu --tokens 1024 --heads 2 --width 16

A row of tokens is of one of these kinds:

    key     one sequence with a gate for each key
    head    one sequence with one gate for each head
    packed  65 sequences of equal lengths with a gate for each key; bounds between ranks cut some of them
    kda     one sequence of a delta rule with a gate for each key
    gdn     one sequence of a delta rule with one gate for each head

Rank 0 first computes the whole sequence alone with the op of gla_core, while the other ranks wait. Then all ranks
compute their shards of it. A time is the median over consecutive calls, on the slowest rank. On a GPU the calls are
replays of a CUDA graph; with `--eager` they are eager calls, and include the host's time. The efficiency is the time of
one rank divided by the time of R ranks and by R. The gathers' share is the time of a pass's gathers alone, divided by
the time of the pass. A length that does not fit into the memory of one rank has no efficiency; it only shows that R
ranks can compute it. On GPUs the run ends with a search for the longest sequences that train on one rank and on all
ranks, with the first number of heads.

A rank that ran out of memory during a pass would leave the other ranks waiting. So each rank first makes the pass in a
group of its own, with as many tokens, and the ranks continue together only if it fits on all of them.

A row also predicts the efficiency of other numbers of ranks, for the same number of tokens per rank. The prediction
assumes that a shard takes as long as measured, and that the exchange takes the same time for every summary that a rank
receives: one from every other rank for a gather, one per round for a scan (exchange.py). It is a model and not a
measurement.

R ranks   T tokens of all ranks   H heads   K key and value width
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lists
import record
import torch
import torch.distributed as dist

import gla_core as gla
from gla_core import distributed
from gla_core.bench import results
from gla_core.bench.measure import synchronize
from gla_core.bench.plots import pyplot, save
from gla_core.distributed import shard
from gla_core.distributed.exchange import MOST_GATHERED, gather
from gla_core.workloads.inputs import delta_inputs, gla_inputs

TOKENS = [2**n for n in range(16, 23)]
HEADS = [8, 16]
LABELS = {
    "key": "",
    "head": "one gate for each head, ",
    "packed": "packed, ",
    "kda": "chunk_delta, ",
    "gdn": "chunk_delta, one gate for each head, ",
}
KINDS = tuple(LABELS)
WITH_DELTA_RULE, GATE_A_HEAD = ("kda", "gdn"), ("head", "gdn")
PACKED = 65
DIRECTIONS = ("forward", "forward+backward")
PREDICTED = (4, 8, 64, 1024)
WARM_UP, CALLS = 3, 9
AT_ONCE = 5
"""The number of calls that are timed together, so that the host's wait for the device does not count."""
MEMORY = 0.95
"""The fraction of a GPU's memory that tensors may take; NCCL and kernels need the rest."""
PROBE, STEP = 2**19, 2**17
"""The tokens of a first call, from which the longest sequence is estimated, and the step of the search."""
Row = dict[str, Any]
Sizes = tuple[int, int, str, str, torch.device]
"""H, K, the kind of the row, the direction, and the device of a pass."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures on all ranks; rank 0 writes and draws."""
    options = _parser().parse_args(arguments)
    device = _join(options.device)
    speaks, graphs = dist.get_rank() == 0, device.type == "cuda" and not options.eager
    about = record.conditions(device, options.commit)
    path, rows = record.path_of(options.out, about["device"], "ranks"), []
    for kind, H, T, direction in itertools.product(options.kinds, options.heads, options.tokens, DIRECTIONS):
        row = measure(T, (H, options.width, kind, direction, device), graphs)
        if speaks:
            rows += as_rows(row, about)
            record.write(path, rows)
            print(in_words(row), flush=True)
    if speaks and options.plot:
        print(_drawn(path), flush=True)
    if device.type == "cuda":
        most = longest(options.heads[0], options.width, device)
        if speaks:
            facts = {"on one rank": most["one_rank"], "on all ranks": most["all_ranks"]}
            call = f"most tokens of a sequence that trains, H{options.heads[0]}, {dist.get_world_size()} ranks"
            rows.append(record.Row(call=call, who="gla-core", facts=facts, **about))
            record.write(path, rows)
            print(f"{call}: {facts}")
    dist.destroy_process_group()


def _join(kind: str) -> torch.device:
    """Makes the process group; returns the device of this rank."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(MEMORY, device)
    # The other ranks wait while rank 0 compiles and computes alone.
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=datetime.timedelta(seconds=200))
    return device


# ---- measuring


def measure(T: int, sizes: Sizes, graphs: bool) -> Row:
    """Times T tokens on one rank and on all; every rank returns the same row."""
    ranks, rank, (H, K, kind, direction, device) = dist.get_world_size(), dist.get_rank(), sizes
    alone = _slowest(seconds_of(lambda: whole(T, sizes), device, graphs) if rank == 0 else 0.0, device)
    together = None
    if _all(fits(lambda: shared(T // ranks, sizes, _itself()), device), device):
        together = _slowest(seconds_of(lambda: shared(T // ranks, sizes), device, graphs, every=True), device)
    exchanged = _slowest(seconds_of(lambda: gathers(sizes), device, graphs, every=True), device)
    row = {"kind": kind, "tokens": T, "heads": H, "width": K, "direction": direction, "ranks": ranks}
    row |= {"one_rank": alone, "all_ranks": together, "gather": exchanged}
    row["efficiency"] = alone / together / ranks if alone and together else None
    row["predicted"] = predicted(row)
    return row


def longest(H: int, K: int, device: torch.device) -> Row:
    """Finds the most tokens whose forward and backward fit into the memory of one rank, and of all ranks."""
    ranks, sizes = dist.get_world_size(), (H, K, KINDS[0], DIRECTIONS[-1], device)
    alone = _most(lambda T: whole(T, sizes), device) if dist.get_rank() == 0 else 0
    shortest = -int(_largest(-_most(lambda T: shared(T, sizes, _itself()), device), device))
    fine = _all(seconds_of(lambda: shared(shortest, sizes), device, graphs=False, every=True) is not None, device)
    return {"one_rank": int(_largest(alone, device)), "all_ranks": ranks * shortest if fine else None}


def _most(prepare: Callable[[int], Callable[[], Any]], device: torch.device) -> int:
    """Returns the largest multiple of STEP tokens with which a call fits into memory."""
    torch.cuda.reset_peak_memory_stats(device)
    if not fits(lambda: prepare(PROBE), device):
        return 0
    bytes_per_token = torch.cuda.max_memory_allocated(device) / PROBE
    room = MEMORY * torch.cuda.get_device_properties(device).total_memory
    T = int(room / bytes_per_token) // STEP * STEP
    while T > 0 and not fits(functools.partial(prepare, T), device):
        T -= STEP
    return T


def seconds_of(
    prepare: Callable[[], Callable[[], Any]], device: torch.device, graphs: bool, every: bool = False
) -> float | None:
    """Returns the median seconds of a call, or None if it does not fit into memory.

    Args:
        prepare: makes the inputs, and returns the call.
        graphs: whether to replay the call as a CUDA graph.
        every: whether all ranks make the call, and begin together.
    """

    def median() -> float:
        call = prepare()
        for _ in range(WARM_UP):
            call()
        with _replayed(call) if graphs else contextlib.nullcontext(call) as again:
            return statistics.median(_sample(again, device, every, AT_ONCE) for _ in range(CALLS))

    return _in_memory(median, device)


@contextlib.contextmanager
def _replayed(call: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Yields the call as a CUDA graph. A graph with collectives must be freed before its process group ends."""
    graph = torch.cuda.CUDAGraph()
    try:
        # NCCL's watchdog thread may query the device while this thread captures.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = call()
        yield graph.replay
        del results
    finally:
        torch.cuda.synchronize()
        graph.reset()


def fits(prepare: Callable[[], Callable[[], Any]], device: torch.device) -> bool:
    """Returns whether a call that this rank makes alone fits into memory."""
    return _in_memory(lambda: _sample(prepare(), device, False, 1), device) is not None


def _in_memory(work: Callable[[], float], device: torch.device) -> float | None:
    try:
        return work()
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _sample(call: Callable[[], Any], device: torch.device, every: bool, number: int) -> float:
    synchronize(device)
    if every:
        dist.barrier()
    start = time.perf_counter()
    for _ in range(number):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / number


def _slowest(seconds: float | None, device: torch.device) -> float | None:
    """Returns the longest time of all ranks; None if a rank has no time."""
    slowest = _largest(math.inf if seconds is None else seconds, device)
    return None if math.isinf(slowest) else slowest


def _largest(x: float, device: torch.device) -> float:
    """Returns the largest x of all ranks."""
    largest = torch.tensor(x, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _all(fine: bool, device: torch.device) -> bool:
    return _slowest(0.0 if fine else None, device) is not None


@functools.cache
def _itself() -> dist.ProcessGroup:
    """Returns a group of this rank alone; all ranks must make their first call at the same place."""
    group, _ = dist.new_subgroups(1)
    assert isinstance(group, dist.ProcessGroup)
    return group


def whole(T: int, sizes: Sizes) -> Callable[[], Any]:
    """Returns a pass over all tokens on this rank."""
    _, _, kind, _, device = sizes
    offsets = offsets_of(T, kind, device)
    longest = None if offsets is None else longest_of(T)
    op = gla.chunk_delta if kind in WITH_DELTA_RULE else gla.chunk_gla
    return _pass_of(lambda *tokens: op(*tokens, cu_seqlens=offsets, max_seqlen=longest)[0], T, sizes)


def shared(T: int, sizes: Sizes, group: dist.ProcessGroup | None = None) -> Callable[[], Any]:
    """Returns a pass over T tokens of this rank, together with the other ranks of a group."""
    ranks, (_, _, kind, _, device) = dist.get_world_size(group), sizes
    offsets = offsets_of(ranks * T, kind, device)
    cut = shard(T, offsets, group, lengths=[T] * ranks, max_seqlen=longest_of(ranks * T))
    op = distributed.chunk_delta if kind in WITH_DELTA_RULE else distributed.chunk_gla
    return _pass_of(lambda *tokens: op(*tokens, shard=cut)[0], T, sizes)


def offsets_of(T: int, kind: str, device: torch.device) -> torch.Tensor | None:
    """Returns the offsets of packed sequences in a row of T tokens; None for one sequence."""
    if kind != "packed":
        return None
    return torch.linspace(0, T, PACKED + 1, dtype=torch.float64).round().to(device, torch.int32)


def longest_of(T: int) -> int:
    """Returns the number of tokens of the longest packed sequence in a row of T tokens."""
    return T // PACKED + 1


def gathers(sizes: Sizes) -> Callable[[], Any]:
    """Returns a call that makes only the gathers of a pass."""
    cut, (H, K, kind, direction, device) = shard(0), sizes
    transition = (1, H, K, K) if kind in WITH_DELTA_RULE else (1, H, K)
    summary = torch.randn(transition, device=device), torch.randn(1, H, K, K, device=device)
    number = 2 if direction == "forward+backward" else 1

    def call() -> None:
        for _ in range(number):
            gather(cut, summary, by_row=True)()

    return call


def _pass_of(forward: Callable[..., torch.Tensor], T: int, sizes: Sizes) -> Callable[[], Any]:
    H, K, kind, direction, device = sizes
    sizes_of_x: dict[str, Any] = {"B": 1, "T": T, "H": H, "K": K, "V": K, "gate_dtype": torch.float32}
    dtype, form = torch.bfloat16 if device.type == "cuda" else torch.float32, "head" if kind in GATE_A_HEAD else "key"
    made = delta_inputs if kind in WITH_DELTA_RULE else gla_inputs
    x = made(**sizes_of_x, dtype=dtype, gates="mild", gate_form=form, device=device)
    tokens = [y for name in ("q", "k", "v", "g", "beta") if (y := getattr(x, name, None)) is not None]
    if direction == "forward":
        return lambda: forward(*tokens)
    leaves, do = [y.requires_grad_() for y in tokens], torch.randn_like(x.v)
    return lambda: torch.autograd.grad(forward(*leaves), leaves, do)


# ---- predictions and output


def predicted(row: Row) -> dict[str, float] | None:
    """Returns the efficiency of other numbers of ranks by the module's model; None if the row has no efficiency."""
    if row["efficiency"] is None or row["gather"] is None or row["ranks"] < 2:
        return None
    shard_alone = max(row["all_ranks"] - row["gather"], 0.0)
    one = row["one_rank"] / row["ranks"]  # for as many tokens as a shard has
    per_summary = row["gather"] / (row["ranks"] - 1)
    received = {R: R - 1 if R <= MOST_GATHERED else math.ceil(math.log2(R)) + 1 for R in PREDICTED}  # summaries
    return {str(R): one / (shard_alone + per_summary * number) for R, number in received.items()}


def as_rows(row: Row, about: Row) -> list[record.Row]:
    """Returns the rows of the file: the time of one rank, and the time of all, compared with it.

    Args:
        about: the conditions of the run, as fields of `record.Row`.
    """
    call = f"{row['kind']} T{row['tokens']} H{row['heads']} K{row['width']} {row['direction']}, {row['ranks']} ranks"
    facts = {name: row[name] for name in ("kind", "tokens", "heads", "width", "direction", "ranks", "efficiency")}
    facts |= {"gathers, s": row["gather"]}
    facts |= {f"predicted of {ranks}": x for ranks, x in (row["predicted"] or {}).items()}
    return [
        record.Row(call=call, who="one rank", seconds=row["one_rank"], **about),
        record.Row(call=call, who="all ranks", baseline="one rank", seconds=row["all_ranks"], facts=facts, **about),
    ]


def in_words(row: Row) -> str:
    """Returns a row in one line."""
    one, all_ranks, exchanged = (results.time_text(row[name]) for name in ("one_rank", "all_ranks", "gather"))
    efficiency = "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
    return (
        f"{row['kind']} T{row['tokens']} H{row['heads']} {row['direction']}: one rank {one}, {row['ranks']} ranks "
        f"{all_ranks}, of which gathers {exchanged}; efficiency {efficiency}"
    )


def draw(path: Path) -> Path:
    """Draws efficiency against length from a file, a line for each direction and heads, beside the file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    efficient = [row for row in record.read(path) if row.facts.get("efficiency") is not None]
    lines: dict[str, list[Row]] = {}
    for facts in (row.facts for row in efficient):
        lines.setdefault(f"{LABELS[facts['kind']]}{facts['heads']} heads, {facts['direction']}", []).append(facts)
    for label, rows in lines.items():
        axes.plot([facts["tokens"] for facts in rows], [facts["efficiency"] for facts in rows], "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.grid(alpha=0.3)
    first, facts = efficient[0], efficient[0].facts
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel("time on one / ({ranks} × time on {ranks})".format_map(facts))
    axes.legend(frameon=False)
    dtype = "bfloat16 with float32 gates" if first.driver else "float32"
    axes.set_title(
        f"One row of tokens over {facts['ranks']} ranks: efficiency, higher is better\n"
        f"{facts['ranks']} × {first.device}, {dtype}, K = V = {facts['width']}; torch {first.versions['torch']}",
        fontsize=11,
    )
    return save(figure, path.with_suffix(".svg"))


def _drawn(path: Path) -> str:
    try:
        return f"wrote {draw(path)}"
    except ValueError as error:
        return f"no plot: {error}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=lists.numbers, default=TOKENS, help="lengths, separated by commas")
    parser.add_argument("--heads", type=lists.numbers, default=HEADS, help="numbers of heads, separated by commas")
    parser.add_argument(
        "--kinds", type=functools.partial(lists.names, known=KINDS), default=KINDS, help="of rows, separated by commas"
    )
    parser.add_argument("--width", type=int, default=128, help="of keys and values of a head")
    parser.add_argument("--eager", action="store_true", help="time calls, not replays of CUDA graphs")
    parser.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser.add_argument("--plot", action="store_true", help="draw efficiency against length, beside the file")
    return parser


if __name__ == "__main__":
    main()
