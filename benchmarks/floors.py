"""Draws calls at random, and predicts how many floors each takes on a GPU, which need not be here.

    python3 benchmarks/floors.py [--calls 4000] [--seed 0] [--assume H200] [--dtypes bfloat16] [--limit 6] [--most 40]

The floors of a call are the seconds that the backend which `auto` picks predicts, divided by the larger of two times:
to move each input and output once, at the speed of a copy, and to compute the products of the chunked form, with chunks
of 64 tokens (`floor_seconds` in gla_core/bench/models.py). The calls with the most floors are printed, each as a
command of `gla explain`. Calls whose work does not fill the GPU are left out: their floor is below `LEAST`, or they
have fewer chunks of heads than the GPU has multiprocessors.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from gla_core.bench.models import PRODUCTS, products
from gla_core.cli.calls import SHAPES, describe_call
from gla_core.dispatch.backend import CHUNK, OpCall
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.ops import ABSTRACT_OPS

BANDWIDTH = 4.23e12
"""Bytes per second of a copy on an H200, read and written together."""
MULTIPROCESSORS = 132
LEAST = 20e-6
"""The least floor of a call that fills a GPU, in seconds."""
MOST_BYTES = 2**34
"""The maximum number of bytes of the inputs and outputs of a call."""
OVER_SEQUENCES = ("chunk_gla_fwd", "chunk_gla_bwd", "chunk_ssd_fwd", "chunk_ssd_bwd", "chunk_gla_pool")
STEPS = (
    "recurrent_gla_step",
    "recurrent_gla_steps",
    "recurrent_gla_replay",
    "recurrent_ssd_step",
    "recurrent_gla_layer_step",
)


class Surveyed(NamedTuple):
    """A call with its options for `gla explain`, its floor and predicted time in seconds, and its kernels."""

    call: OpCall
    options: dict[str, Any]
    floor: float
    seconds: float
    backend: str
    kernels: tuple[str, ...]

    @property
    def floors(self) -> float:
        """Returns the predicted time divided by the floor."""
        return self.seconds / self.floor

    def __str__(self) -> str:
        options = (
            f"--{name.replace('_', '-')} {value}" for name, value in self.options.items() if name not in ("op", "every")
        )
        kept = " with checkpoints" if self.options["every"] else ""
        kernels = "; ".join(self.kernels)
        return (
            f"{self.floors:6.2f} floors of {self.floor * 1e6:.0f} us: gla explain {self.options['op']} "
            f"{shlex.join(' '.join(options).split())}{kept}: {self.backend}: {kernels}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, draws calls, and prints those with the most floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4000, help="number of calls to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--assume", default="H200", help="the GPU, as in `gla explain`")
    parser.add_argument("--dtypes", default="bfloat16", help="dtypes to draw from, separated by commas")
    parser.add_argument("--limit", type=float, default=6.0, help="the number of floors above which calls are counted")
    parser.add_argument("--most", type=int, default=40, help="number of calls to print")
    options = parser.parse_args(arguments)
    surveyed = sorted(survey(options.calls, options.seed, options.assume, options.dtypes.split(",")), key=_by_floors)
    for each in surveyed[: options.most]:
        print(each)
    above = sum(each.floors > options.limit for each in surveyed)
    print(f"{above} of {len(surveyed)} calls that fill the GPU take more than {options.limit:g} floors")


def _by_floors(each: Surveyed) -> float:
    return -each.floors


def survey(calls: int, seed: int, assume: str, dtypes: Sequence[str]) -> Iterator[Surveyed]:
    """Yields those calls that fill the GPU, of `calls` calls that are drawn from a seed."""
    random = Random(seed)
    for _ in range(calls):
        options: dict[str, Any] = {**drawn(random, random.choice(dtypes)), "assume": assume}
        call = described(**options)
        floor = floor_seconds(call)
        if floor < LEAST or not _fills(call) or sum(ABSTRACT_OPS[call.op].floor_bytes(call)) > MOST_BYTES:
            continue
        explanation = explain_call(call, current_request("auto"))
        winner = explanation.candidates[0]
        assert winner.refusal is None, explanation
        assert winner.seconds is not None, explanation
        yield Surveyed(call, options, floor, winner.seconds, winner.name, winner.kernels)


def described(op: str, every: int | None, **options: Any) -> OpCall:
    """Returns the call of an op with these options of `gla explain`.

    Args:
        every: the tokens between the checkpoints that a forward returns or a backward is given; None without.
    """
    call = describe_call(op, **options)
    if every is None:
        return call
    forward = op.endswith("_fwd")
    return dataclasses.replace(call, checkpoints=forward, scalars={**call.scalars, "checkpoint_every": every})


def drawn(random: Random, dtype: str) -> dict[str, Any]:
    """Returns the options of a call that is drawn at random, as `described` takes them."""
    op = random.choice(OVER_SEQUENCES if random.random() < 0.8 else STEPS)
    is_ssd, chunked = "ssd" in op, op in OVER_SEQUENCES
    K, V = ((8 * _between(random, 1, 128) if random.random() < 0.5 else 64 * random.randint(1, 4)) for _ in "KV")
    group = _between(random, 2, 256) if random.random() < 0.5 else 1
    H = _between(random, 1, 64)
    T = _between(random, 1, 131072) if chunked else _between(random, 1, 8)
    N = _between(random, 1, 256) if chunked else _between(random, 1, 1024)
    sizes: dict[str, Any] = {"B": N, "T": T, "H": H, "K": K, "V": V, "L": 2 * T, "N": N}
    options: dict[str, Any] = {"op": op, "dtype": dtype}
    if op == "chunk_gla_pool" or (chunked and random.random() < 0.4):
        sizes |= {"B": 1, "T": N * T}
        options |= {} if "N" in SHAPES[op] else {"varlen": N}
        options |= {"max_seqlen": random.choice((T, 2 * T, N * T))} if random.random() < 0.3 else {}
    options["shape"] = ",".join(str(sizes[name]) for name in SHAPES[op])
    heads = "value_heads" if is_ssd or random.random() < 0.7 else "query_heads"
    options |= {heads: H * group} if group > 1 else {}
    if not is_ssd:
        options["gate"] = random.choice(("key", "key", "head", "constant", "none"))
        logits = options["gate"] != "none" and op != "recurrent_gla_layer_step" and random.random() < 0.2
        options |= {"gate_normalizer": 16} if logits else {}
    return {**options, "every": CHUNK if op in OVER_SEQUENCES[:4] and random.random() < 0.6 else None}


def _between(random: Random, low: int, high: int) -> int:
    """Returns a number from low to high, of which each octave is as likely as another."""
    return round(low * (high / low) ** random.random())


def floor_seconds(call: OpCall) -> float:
    """Returns the floor of a call; see above."""
    dims = {"T": 1, "Hq": call.dims["H"], "N": call.dims["B"], **call.dims}
    length = dims["B"] * dims["T"] / dims["N"]  # the mean, if sequences are packed
    operations = products({**dims, "B": dims["N"], "T": length}, call.gate_form)
    moved = sum(ABSTRACT_OPS[call.op].floor_bytes(call))
    return max(moved / BANDWIDTH, operations * (2 if call.op.endswith("_bwd") else 1) / PRODUCTS)


def _fills(call: OpCall) -> bool:
    """Returns whether the chunks of all heads are at least as many as the multiprocessors of the GPU."""
    chunks = max(call.dims["B"], call.dims["B"] * call.dims.get("T", 1) // CHUNK)
    return chunks * max(call.dims.get("Hq", 1), call.dims["Hv"]) >= MULTIPROCESSORS


if __name__ == "__main__":
    main()
