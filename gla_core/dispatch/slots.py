"""Reads the states of sequences from the slots of a pool, and writes them into slots.

N sequences   P slots   Hv value heads   K, V key and value width
"""

from __future__ import annotations

import torch


def is_slot(pool: torch.Tensor, slots: torch.Tensor, pad_slot: int) -> torch.Tensor:
    """Returns which of `slots` [N] are used [N]: those inside the pool [P, Hv, K, V] that are not `pad_slot`."""
    return (slots >= 0) & (slots < len(pool)) & (slots != pad_slot)


def states_of_slots(
    pool: torch.Tensor, slots: torch.Tensor, has_state: torch.Tensor | None, dtype: torch.dtype, pad_slot: int
) -> torch.Tensor:
    """Returns the states that sequences start from [N, Hv, K, V]: a contiguous copy of the slots [N] of a pool.

    A state is 0 if its slot is not used (see `is_slot`), or if has_state [N] is False. It is then 0 even if the slot
    holds NaN. No value is read on the host.
    """
    if len(pool) == 0:
        return pool.new_zeros((len(slots), *pool.shape[1:]), dtype=dtype)
    there = is_slot(pool, slots, pad_slot)
    there = there if has_state is None else there & has_state
    states = pool[torch.where(there, slots, 0).long()]
    return torch.where(there[:, None, None, None], states, 0).to(dtype).contiguous()


def write_states(pool: torch.Tensor, slots: torch.Tensor, states: torch.Tensor, where: torch.Tensor) -> None:
    """Writes states [N, Hv, K, V] into the slots [N] of a pool where the flags `where` [N] are True.

    Each state is rounded once to the dtype of the pool. No value is read on the host.
    """
    write_entries(pool, (slots,), states, where)


def write_entries(
    memory: torch.Tensor, at: tuple[torch.Tensor, ...], values: torch.Tensor, where: torch.Tensor
) -> None:
    """Writes values [N, ...] to memory[at], by one or two indices [N], where the flags `where` [N] are True."""
    if len(memory) == 0 or len(where) == 0:
        return
    # An entry that is not written repeats the first one that is, and writes the same values to the same place. If none
    # is written, all write what the first place of the memory holds.
    rows = torch.arange(len(where), device=where.device)
    writer = torch.where(where, rows, where.int().argmax(keepdim=True))
    to = tuple(torch.where(where, index, 0)[writer].long() for index in at)
    memory.index_put_(to, torch.where(where.any(), values.to(memory.dtype)[writer], memory[to]))
