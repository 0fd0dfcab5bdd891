"""Random calls of the ops of both families on a pool of states, against the float64 oracle.

Drawn from a seed: lengths, padding, gates, dtypes, pages, slots that are read and written, new sequences, pads, drafts
that were accepted, and checkpoints. There are a thousand calls on a GPU for each backend, and a few on a CPU, where the
kernels are interpreted. Memory that no sequence writes keeps its bits.
"""

import pytest
import torch

import gla_core as gla
from gla_core.conformance.calls import Expected, as_logits, check, oracle_results
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import gla_inputs, normal
from tests.backends.test_random_cases import DTYPES, ENOUGH, LONGEST, WIDTHS, batches, head_counts, seeds, sources
from tests.backends.test_random_delta import delta

pytest.importorskip("triton")
FAMILIES = {"gla": gla_inputs, "delta": delta}
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@batches
@pytest.mark.usefixtures("short_segments")
@pytest.mark.kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls(device, batch, backend, family, random_cases):
    with gla.use_backend(backend):
        numbers = seeds(device, batch, random_cases)
        missed = [case for seed in numbers for case in misses(seed, device, backend, family)]
    assert not missed


def misses(seed, device, backend, family):
    """Yields a description of each wrong result of the call drawn from `seed`, with its error."""
    kind, draw = sources(seed, device)
    op, x, written, logits = kind.choice([prefill, verification])(kind, draw, device, seed, family)
    sizes = {name: tuple(y.shape) for name, y in x.items() if isinstance(y, torch.Tensor)}
    failures = []

    def measure(results, truth, budget):
        for name, result in results.items():
            if (error := relative_error(result.cpu(), truth[name])) > budget:
                failures.append(f"seed {seed}: {name} {x['q'].dtype} {x['pool'].dtype} {sizes}: error {error:.1e}")

    x = as_logits(op, x, logits) if logits else x
    on_cpu = {name: y.cpu() if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    check(op, x, backend, measure, Expected(oracle_results(op, on_cpu), {"pool": written}))
    yield from failures


def tokens(kind, draw, device, seed, family, lengths):
    """Returns the tokens and cu_seqlens of packed sequences, and the divisor of log sigma if g holds logits."""
    dtype, (K, V) = kind.choice(DTYPES), kind.choice(WIDTHS if device == "cuda" else WIDTHS[:2])
    heads = head_counts(kind, draw)
    heads["gates"] = "mild" if heads["gates"] == "extreme" and dtype == torch.float16 else heads["gates"]
    x = FAMILIES[family](lengths=lengths, K=K, V=V, dtype=dtype, device=device, seed=seed, **heads)
    g, logits = x.g, None
    if g is not None and kind.random() < 0.2:
        logits = kind.choice([1, 16])
        g = 2 * normal(tuple(g.shape), torch.float32, torch.Generator(device).manual_seed(seed))
    named = {"q": x.q, "k": x.k, "v": x.v, "g": g, **({"beta": x.beta} if family == "delta" else {})}
    return named, x.cu_seqlens, logits


def new_pool(kind, draw, device, seed, P, x):
    """Returns states [P, Hv, K, V] in pages of memory, whose values or keys are contiguous."""
    _, _, Hv, V = x["v"].shape
    K, room = x["k"].shape[3], kind.choice([0, 0, 1, 24])
    generator = torch.Generator(device).manual_seed(seed)
    memory = normal((P, Hv * K * V + room), torch.float32, generator).to(kind.choice(POOL_DTYPES))
    size = memory[:, : Hv * K * V]
    return size.view(P, Hv, V, K).mT if kind.random() < 0.3 else size.view(P, Hv, K, V)


class Slots:
    """Hands out the slots of a pool, each one once."""

    def __init__(self, draw, P):
        self.draw, self.pad = draw, draw.choice([-1, 0])
        self.left = [slot for slot in range(P) if slot != self.pad]
        self.unused = [-1, P, P + 7, self.pad]
        draw.shuffle(self.left)

    def one(self, used=0.85):
        """Returns a slot that was not handed out before, or, with the rest of the probability, one that is not used."""
        return self.left.pop() if self.draw.random() < used else self.draw.choice(self.unused)

    def some(self, count, **options):
        return [self.one(**options) for _ in range(count)]

    def holds(self, slot):
        return slot not in self.unused


def prefill(kind, draw, device, seed, family):
    lengths = [draw.choice([0, 1, draw.randint(2, LONGEST)]) for _ in range(draw.randint(0, 5))]
    lengths.insert(draw.randint(0, len(lengths)), draw.choice([draw.randint(ENOUGH, LONGEST), draw.randint(65, 140)]))
    N, P = len(lengths), 4 * len(lengths) + 3
    x, offsets, logits = tokens(kind, draw, device, seed, family, tuple(lengths))
    slots = Slots(draw, P)
    read = slots.some(N)
    write = None if kind.random() < 0.5 else slots.some(N)
    marks = None if kind.random() < 0.4 else [draw.random() < 0.6 for _ in range(N)]
    before = kept = None
    if kind.random() < 0.5:
        before, kept = [64 * draw.randint(-1, 1 + n // 64) for n in lengths], slots.some(N)
    integers = kind.choice([torch.int32, torch.int64])

    def tensor(values, dtype=integers):
        return None if values is None else torch.tensor(values, dtype=dtype, device=device)

    x |= {"pool": new_pool(kind, draw, device, seed, P, x), "cu_seqlens": offsets.to(integers)}
    x |= {"read_slots": tensor(read), "write_slots": tensor(write), "has_state": tensor(marks, torch.bool)}
    x |= {"snapshot_offsets": tensor(before), "snapshot_slots": tensor(kept), "pad_slot": slots.pad}
    written = [slot for slot in write or read if slots.holds(slot)]
    if kept is not None:
        rows = zip(kept, before, lengths, strict=True)
        written += [slot for slot, offset, length in rows if slots.holds(slot) and 0 < offset < length]
    spoil_new_states(x["pool"], read, marks, slots)
    return f"chunk_{family}_pool", x, written, logits


def verification(kind, draw, device, seed, family):
    S, N = kind.randint(1, 8), draw.randint(1, 6)
    packed = kind.random() < 0.5
    lengths = [draw.randint(0, S) for _ in range(N)] if packed else [S] * N
    x, offsets, logits = tokens(kind, draw, device, seed, family, tuple(lengths) if sum(lengths) else (1,) * N)
    lengths = offsets.diff().tolist()
    if not packed:
        x = {name: y if y is None or y.ndim == 1 else y.unflatten(1, (N, S))[0] for name, y in x.items()}
    P = N * (S + 1) + 3
    slots = Slots(draw, P)
    table = [slots.some(S) for _ in range(N)]
    read = None if kind.random() < 0.5 else slots.some(N)
    accepted = None if read or kind.random() < 0.4 else [draw.randint(-1, S + 1) for _ in range(N)]
    marks = None if kind.random() < 0.4 else [draw.random() < 0.6 for _ in range(N)]
    integers = kind.choice([torch.int32, torch.int64])

    def tensor(values, dtype=integers):
        return None if values is None else torch.tensor(values, dtype=dtype, device=device)

    x |= {"pool": new_pool(kind, draw, device, seed, P, x), "slots": tensor(table), "read_slots": tensor(read)}
    x |= {"num_accepted": tensor(accepted), "has_state": tensor(marks, torch.bool), "pad_slot": slots.pad}
    x["cu_seqlens"] = offsets.to(integers) if packed else None
    begins = read or [row[min(max(1 if accepted is None else accepted[n], 1), S) - 1] for n, row in enumerate(table)]
    written = []
    for n, row in enumerate(table):
        is_new = marks is not None and not marks[n]
        if slots.holds(row[0] if is_new else begins[n]):
            written += [slot for slot in row[: lengths[n]] if slots.holds(slot)]
    if accepted is None:
        spoil_new_states(x["pool"], begins, marks, slots)
    return f"recurrent_{family}_steps", x, written, logits


def spoil_new_states(pool, read, marks, slots):
    """Fills the slots of new sequences with NaN, which must not be read."""
    new = [slot for slot, has in zip(read, marks or [], strict=False) if not has and slots.holds(slot)]
    pool[new] = torch.nan
