"""The ops of a server beside what vLLM and SGLang run for a layer of lightning attention.

The layer is that of Ling-2.5: 64 heads, K = V = 128, a constant gate for each head, bfloat16 tokens, and a pool of
float32 states. `evidence.py run --parts serving --engines FOLDER` measures it. The folder may hold lightning_attn.py of
vLLM and seg_la.py of SGLang, copied from their distributions; both need Triton and no more.

    decode     one token of each sequence, in a CUDA graph, as engines decode
    verify     four drafts of each sequence, in a CUDA graph; the state after each draft goes to a slot of its own
    replay     the same with one state for each sequence, and a ring of the last tokens, of which two are accepted
    prefill    sequences of equal lengths, eager, so the time includes waits of the host
    mixed      decodes first, then prefills, in one call of `chunk_gla_pool`; others take two functions

vLLM computes one prefill after another: it reads the offsets on the host, copies q, k and v of a sequence, and launches
four kernels on float32 tensors. `Vllm.prefill` is this loop, written anew.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from record import Job, attempt, counted
from torch import Tensor

import gla_core as gla
from gla_core.bench import measure

H, K, V, DRAFTS = 64, 128, 128, 4
DECODES = (1, 8, 64, 256, 512)
PREFILLS = ((1, 512), (1, 4096), (1, 16384), (4, 4096), (16, 512), (16, 2048))
MIXED = ((64, 1, 4096), (256, 4, 1024))
Fields = dict[str, Any]


class Batch(NamedTuple):
    """Tokens of packed sequences whose states are in a pool; each sequence reads and writes slot n + 1.

    Attributes:
        q, k, v: [1, T, H, 128], bfloat16. g: [H], log gates, float32. pool: [P, H, K, V], float32.
        cu_seqlens: [N+1], int32. slots: [N], int32.
        decodes: the number of sequences of one token, which come first.
        rings: ring_k and ring_v [N+1, 2 DRAFTS, H, 128], ring_start and num_accepted [N]; empty without a replay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    pool: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    decodes: int
    rings: tuple[Tensor, ...] = ()


def batch(device: torch.device, decodes: int, prefills: int = 0, tokens: int = 0) -> Batch:
    """Returns a batch of `decodes` sequences of one token and `prefills` sequences of `tokens` tokens."""
    T, N = decodes + prefills * tokens, decodes + prefills
    q, k, v = (torch.randn(1, T, H, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    ends = torch.tensor([1] * decodes + [tokens] * prefills).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0)).to(device, torch.int32)
    g = -torch.logspace(-6, -0.5, H, 2.0, device=device)
    pool, slots = torch.zeros(N + 1, H, K, V, device=device), torch.arange(1, N + 1, device=device, dtype=torch.int32)
    return Batch(q, k, v, g, pool, offsets, slots, decodes)


def drafts(device: torch.device, N: int) -> Batch:
    """Returns DRAFTS tokens of each of N sequences, with one state and a ring for each."""
    x = batch(device, DRAFTS * N)
    keys, values = (torch.zeros(N + 1, 2 * DRAFTS, H, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    start, accepted = (torch.full((N,), n, device=device, dtype=torch.int32) for n in (0, DRAFTS // 2))
    return x._replace(pool=x.pool[: N + 1].clone(), slots=x.slots[:N], rings=(keys, values, start, accepted))


# ---- who is measured


class Ours:
    """The ops of gla_core."""

    def decode(self, x: Batch) -> Tensor:
        token = (x.q[0], x.k[0], x.v[0], x.g, x.pool)
        return gla.recurrent_gla_step(*token, slots=x.slots, inplace=True)[0]

    def verify(self, x: Batch) -> Tensor:
        """Returns outputs for rows of drafts; the pool has DRAFTS slots for each sequence."""
        N = len(x.slots) // DRAFTS
        q, k, v = (y[0].unflatten(0, (N, DRAFTS)) for y in (x.q, x.k, x.v))
        return gla.recurrent_gla_steps(q, k, v, x.g, x.pool, x.slots.view(N, DRAFTS))

    def replay(self, x: Batch) -> Tensor:
        q, k, v = (y[0].unflatten(0, (len(x.slots), DRAFTS)) for y in (x.q, x.k, x.v))
        keys, values, start, accepted = x.rings
        return gla.recurrent_gla_replay(q, k, v, x.g, x.pool, keys, values, None, x.slots, start, accepted)

    def prefill(self, x: Batch) -> Tensor:
        return gla.chunk_gla_pool(x.q, x.k, x.v, x.g, x.pool, x.cu_seqlens, x.slots)

    mixed = prefill


class Vllm:
    """vLLM's functions of lightning_attn.py, and its loop over prefills."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def decode(self, x: Batch) -> Tensor:
        q, k, v = (y[0, : x.decodes, :, None] for y in (x.q, x.k, x.v))  # [N, H, 1, 128]
        return self.module.linear_decode_forward_triton(q, k, v, x.pool, -x.g[:, None, None], x.slots[: x.decodes], 32)

    def prefill(self, x: Batch) -> Tensor:
        outputs = []
        for n in range(x.decodes, len(x.slots)):
            start, end, slot = x.cu_seqlens[n], x.cu_seqlens[n + 1], x.slots[n]
            # Copies [1, H, T, 128] in float32, the only dtype that the functions compile for
            rows = (y[0, start:end].transpose(0, 1) for y in (x.q, x.k, x.v))
            q, k, v = (y.new_empty(1, *y.shape, dtype=torch.float32).copy_(y) for y in rows)
            state = x.pool[slot]
            o, after = self.module.lightning_attention(q, k, v, -x.g, 256, state[None].contiguous())
            state.copy_(after[0, :, -1])
            outputs.append(o[0].transpose(0, 1).flatten(1).contiguous())
        return torch.cat(outputs)

    def mixed(self, x: Batch) -> Tensor:
        return torch.cat([self.decode(x), self.prefill(x)])


class Sglang:
    """SGLang's seg_la.py."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def prefill(self, x: Batch) -> Tensor:
        lengths, N = x.cu_seqlens.diff(), len(x.slots)
        meta = self.module.SegLaMeta(N, 0, x.cu_seqlens, x.slots, lengths, torch.ones_like(lengths))
        return self.module.seg_la_fwd(x.q[0], x.k[0], x.v[0], x.pool, -x.g, meta)

    decode = prefill


def others(folder: Path | None) -> dict[str, Any]:
    """Returns the engines whose files are in a folder, by name. vLLM's file gets the few names that it imports."""
    if folder is None:
        return {}
    import triton
    import triton.language as tl

    for name, values in {
        "vllm": {},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: True)},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
    }.items():
        vars(sys.modules.setdefault(name, ModuleType(name))).update(values)
    files = {"vllm": ("lightning_attn.py", Vllm), "sglang": ("seg_la.py", Sglang)}
    return {who: made(_load(folder / name)) for who, (name, made) in files.items() if (folder / name).exists()}


def _load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))


# ---- measurements


def batches(device: torch.device) -> Iterator[tuple[str, str, Callable[[], Batch]]]:
    """Yields the method to measure, its batch in words, and a function that makes the batch."""
    for what, make, tokens in (("decode", batch, 1), ("verify", batch, DRAFTS), ("replay", drafts, 1)):
        for N in DECODES:
            yield what, counted(N, "sequence"), functools.partial(make, device, tokens * N)
    for N, T in PREFILLS:
        yield "prefill", f"{counted(N, 'sequence')}, {T} tokens", functools.partial(batch, device, 0, N, T)
    for N, prefills, T in MIXED:
        words = f"{N} decodes, {counted(prefills, 'sequence')}, {T} tokens"
        yield "mixed", words, functools.partial(batch, device, N, prefills, T)


def jobs(device: torch.device, bandwidth: float, folder: Path | None) -> list[Job]:
    """Returns a job for each batch, with a row for each engine of `folder` that has the method, and one for gla-core.

    Args:
        bandwidth: bytes per second of a copy on the device.
        folder: see `others`; rows are compared with the first of these engines.
    """
    made = []
    for what, words, make in batches(device):
        engines = [who for who, engine in others(folder).items() if hasattr(engine, what)]
        first = engines[0] if engines else None
        call = f"{what}: {words}"
        rows = [(call, who, None if who == first else first) for who in (*engines, "gla-core")]
        whos = tuple(who for _, who, _ in rows)
        made.append(Job(rows, functools.partial(_measure, what, make, whos, folder, device, bandwidth)))
    return made


def _measure(
    what: str,
    make: Callable[[], Batch],
    whos: Sequence[str],
    folder: Path | None,
    device: torch.device,
    bandwidth: float,
) -> list[Fields]:
    engines = {"gla-core": Ours(), **others(folder)}

    def time(who: str) -> Fields:
        timing = measured(what, make, getattr(engines[who], what), device)
        share = floor_bytes(what, make()) / timing.seconds / bandwidth
        return {"seconds": timing.seconds, "spread": timing.spread, "facts": {"of floor": share}}

    return [attempt(functools.partial(time, who)) for who in whos]  # another engine may not run here


def floor_bytes(what: str, x: Batch) -> int:
    """Returns the bytes of tokens, outputs, states that are read and states that are written, each counted once."""
    tokens = sum(y.nbytes for y in (x.q, x.k, x.v, x.v))
    states = x.pool[1:].nbytes
    return tokens + states + (states // DRAFTS if what == "verify" else states)


def measured(
    what: str, make: Callable[[], Batch], run: Callable[[Batch], Tensor], device: torch.device
) -> measure.Timing:
    """Measures a call, which cycles through batches that together exceed the device's cache."""
    first = make()
    number = min(8, measure.rotations(first.pool.nbytes + first.q.nbytes, device))
    made = [first, *(make() for _ in range(number - 1))]
    in_graph = device.type == "cuda" and what in ("decode", "verify", "replay")
    timer = measure.time_graph if in_graph else measure.time_calls
    return timer([functools.partial(run, x) for x in made], device, 0.3)
