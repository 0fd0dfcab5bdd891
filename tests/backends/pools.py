"""Packed sequences whose states are in a pool, for tests of emulated kernels: what they read, and what they leave."""

import torch

from gla_core.conformance.tolerances import relative_error
from gla_triton_kernels.chunks.slots import Slots

PROMPTS = {"lengths": (130, 65, 0, 70, 3), "padding": 10}
"""The sizes of five sequences. Sequences 1 and 3 are new or have no slot."""


def pooled(compute, x, dtype, v_first):
    """Returns a random pool, the slots that the sequences of x read and write, and outputs and states by slot.

    Args:
        compute: the function of the oracle that takes the tokens of x and a pool.
        v_first: whether the pool is a view of memory [9, Hv, V, K].
    """
    (Hv, V), K = x.v.shape[2:], x.k.shape[3]
    pool = torch.randn((9, Hv, V, K) if v_first else (9, Hv, K, V)).to(dtype)
    pool = pool.mT if v_first else pool
    read, write = torch.tensor([8, 1, 1, -1, 4]), torch.tensor([8, 3, 7, 9, 5], dtype=torch.int32)
    has_state = torch.tensor([True, False, True, True, True])
    kept = (torch.tensor([128, 64, 64, 64, 64]), torch.tensor([0, -1, 6, 2, 4]))
    tokens = {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta", "cu_seqlens") if hasattr(x, name)}
    slots = {"read_slots": read, "write_slots": write, "has_state": has_state}
    snapshots = dict(zip(("snapshot_offsets", "snapshot_slots"), kept, strict=True))
    wanted = compute(**tokens, pool=pool, **slots, **snapshots)
    return pool, Slots(read, write, has_state, *kept, len(pool), -1), wanted


def check_slots(pool, before, states, allowed):
    """Checks the slots that the sequences of `PROMPTS` write, and that all others keep their bits."""
    assert sorted(states) == [0, 2, 3, 5, 7, 8]
    assert relative_error(pool[list(states)], torch.stack([*states.values()])) <= allowed
    others = [p for p in range(len(pool)) if p not in states]
    assert torch.equal(pool[others], before[others])
