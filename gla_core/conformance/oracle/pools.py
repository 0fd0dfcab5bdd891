"""The meaning of ops on packed sequences and on states in a pool, in float64, by that of an op on a sequence.

The tokens of a family, such as q, k, v and g, are the arguments that these functions do not name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Whole = Callable[..., tuple[Tensor, Tensor]]
"""Takes tokens [B, T, ..], the scale and the initial state by name; returns o and the final state."""


def over_sequences(
    sequence: Callable[[Mapping[str, Any], Tensor], tuple[Tensor, list[Tensor]]],
    x: Mapping[str, Any],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    every: int | None,
) -> tuple[Tensor, ...]:
    """Computes tokens x, each packed sequence on its own.

    Args:
        sequence: takes tokens by name and the state before them; returns o, and the states before each token and after
            the last one.
        every: the number of tokens from one checkpoint to the next; None asks for no checkpoints.

    Returns:
        o [B, T, Ho, V], 0 in rows that belong to no sequence; the final state [N, Hv, K, V]; and, if asked for, the
        checkpoints [B, n, Hv, K, V], 0 in rows that hold none.
    """
    if cu_seqlens is None:
        o, states = sequence(x, zero_state(**x) if initial_state is None else initial_state.double())
        if every is None:
            return o, states[-1]
        kept = states[:-1:every]
        return o, states[-1], torch.stack(kept, 1) if kept else states[0][:, None][:, :0]
    q, v, offsets, none = x["q"], x["v"], cu_seqlens.tolist(), zero_state(**x)
    o, finals = [zero_rows(q, v, offsets[0])], [none[:0]]
    rows = 0 if every is None else len(offsets) - 1 + q.shape[1] // every
    checkpoints = none[:, None].repeat(1, rows, 1, 1, 1)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        before = None if initial_state is None else initial_state[n : n + 1]
        o_n, final, *kept = over_sequences(sequence, span(x, a, b), before, None, every)
        o.append(o_n)
        finals.append(final)
        if every is not None:
            first = n + a // every
            checkpoints[:, first : first + kept[0].shape[1]] = kept[0]
    o.append(zero_rows(q, v, q.shape[1] - offsets[-1]))
    results = torch.cat(o, 1), torch.cat(finals)
    return results if every is None else (*results, checkpoints)


def prompts_in_pool(whole: Whole) -> Callable[..., tuple[Tensor, dict[int, Tensor]]]:
    """Returns the oracle of packed sequences whose states are in a pool."""

    def oracle(
        *,
        pool: Tensor,
        cu_seqlens: Tensor,
        read_slots: Tensor,
        write_slots: Tensor | None = None,
        scale: float | None = None,
        has_state: Tensor | None = None,
        snapshot_offsets: Tensor | None = None,
        snapshot_slots: Tensor | None = None,
        pad_slot: int = -1,
        **x: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Computes sequences one after another; the pool is only read.

        Returns:
            o [1, T, Ho, V], and for each slot that is written its state [Hv, K, V].
        """
        used = {slot for slot in range(len(pool)) if slot != pad_slot}
        o, written = zero_rows(x["q"], x["v"], x["q"].shape[1]), {}
        for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            slot = int(read_slots[n])
            begins = slot in used and (has_state is None or bool(has_state[n]))
            before = pool[slot][None].double() if begins else zero_state(**x)
            o[:, a:b], after = whole(**span(x, a, b), scale=scale, initial_state=before)
            to = slot if write_slots is None else int(write_slots[n])
            if to in used:
                written[to] = after[0]
            if snapshot_offsets is None or snapshot_slots is None:
                continue
            count, to = int(snapshot_offsets[n]), int(snapshot_slots[n])
            if 0 < count < b - a and to in used:
                written[to] = whole(**span(x, a, a + count), scale=scale, initial_state=before)[1][0]
        return o, written

    return oracle


def steps_in_pool(whole: Whole) -> Callable[..., tuple[Tensor, dict[int, Tensor]]]:
    """Returns the oracle of several steps from a state in a pool, each of which keeps its state."""

    def oracle(
        *,
        pool: Tensor,
        slots: Tensor,
        scale: float | None = None,
        cu_seqlens: Tensor | None = None,
        num_accepted: Tensor | None = None,
        read_slots: Tensor | None = None,
        has_state: Tensor | None = None,
        pad_slot: int = -1,
        **x: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Computes sequences one after another and token by token; the pool is only read.

        Returns:
            o [B, T, Ho, V], and for each slot that is written its state [Hv, K, V].
        """
        used = {slot for slot in range(len(pool)) if slot != pad_slot}
        (B, T), (N, S) = x["q"].shape[:2], slots.shape
        x = {name: y if y is None or y.ndim == 1 else y.flatten(0, 1)[None] for name, y in x.items()}
        o, written = zero_rows(x["q"], x["v"], B * T), {}
        offsets = [n * T for n in range(N + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        for n, (a, b) in enumerate(itertools.pairwise(offsets)):
            count = 1 if num_accepted is None else max(1, min(S, int(num_accepted[n])))
            slot = int(slots[n, count - 1]) if read_slots is None else int(read_slots[n])
            is_new = has_state is not None and not bool(has_state[n])
            if (int(slots[n, 0]) if is_new else slot) not in used:
                continue
            state = zero_state(**x) if is_new else pool[slot][None].double()
            for j in range(min(S, b - a)):
                token = span(x, a + j, a + j + 1)
                o[:, a + j : a + j + 1], state = whole(**token, scale=scale, initial_state=state)
                if int(slots[n, j]) in used:
                    written[int(slots[n, j])] = state[0]
        return o[0].unflatten(0, (B, T)), written

    return oracle


def replay_in_pool(
    whole: Whole, replayed: Whole, kept: Callable[[Mapping[str, Any], Tensor], Tensor]
) -> Callable[..., tuple[Tensor, dict[int, Tensor], dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]]]]:
    """Returns the oracle of new tokens after the accepted ones of the last call, which are in rings.

    Args:
        replayed: advances a state by tokens q = 0, k, v and g, as rings hold them.
        kept: takes the tokens of a sequence [1, T, ..] by name and the state before them; returns what ring_v holds of
            them [1, T, Hv, V].
    """

    def oracle(
        *,
        pool: Tensor,
        ring_k: Tensor,
        ring_v: Tensor,
        ring_g: Tensor | None,
        slots: Tensor,
        ring_start: Tensor,
        num_accepted: Tensor,
        scale: float | None = None,
        cu_seqlens: Tensor | None = None,
        has_state: Tensor | None = None,
        pad_slot: int = -1,
        **x: Any,
    ) -> tuple[Tensor, dict[int, Tensor], dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]]]:
        """Computes sequences one after another, in float64; the pool and the rings are only read.

        Returns:
            o [B, T, Ho, V]; for each slot that is written its state [Hv, K, V]; for each slot and token of the rings
            that are written k [H, K], what ring_v holds [Hv, V], and the log gate, which is None if ring_g is None.
        """
        used = {slot for slot in range(len(pool)) if slot != pad_slot}
        (B, T), N, L = x["q"].shape[:2], len(slots), ring_k.shape[1]
        x = {name: y if y is None or y.ndim == 1 else y.flatten(0, 1)[None] for name, y in x.items()}
        o, written, entries = zero_rows(x["q"], x["v"], B * T), {}, {}
        offsets = [n * T for n in range(N + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        for n, (a, b) in enumerate(itertools.pairwise(offsets)):
            slot, b = int(slots[n]), min(b, a + L // 2)
            if slot not in used:
                continue
            is_new = has_state is not None and not bool(has_state[n])
            accepted, start = max(0, min(L // 2, int(num_accepted[n]))), int(ring_start[n])
            at = [(start + i) % L for i in range(accepted)]
            old = {"q": x["q"].new_zeros(1, accepted, *x["q"].shape[2:]), "k": ring_k[slot, at][None]}
            old |= {"v": ring_v[slot, at][None], "g": x["g"] if ring_g is None else ring_g[slot, at][None]}
            state = zero_state(**x) if is_new else pool[slot][None].double()
            _, state = replayed(**old, initial_state=state)
            if is_new or accepted:
                written[slot] = state[0]
            new = span(x, a, b)
            o[:, a:b], _ = whole(**new, scale=scale, initial_state=state)
            values = kept(new, state)[0]
            for t in range(b - a):
                gate = None if new["g"] is None or ring_g is None else new["g"][0, t]
                entries[slot, (start + accepted + t) % L] = (new["k"][0, t], values[t], gate)
        return o[0].unflatten(0, (B, T)), written, entries

    return oracle


def step_in_pool(whole: Whole) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the oracle of one token of each row, whose states may be in a pool."""

    def oracle(
        *, state: Tensor, scale: float | None = None, slots: Tensor | None = None, **x: Any
    ) -> tuple[Tensor, Tensor]:
        """Computes one token of each row; a row whose index lies outside the pool is skipped, and its o is 0.

        Returns:
            o [B, Ho, V] and all states [P, Hv, K, V].
        """
        q, v = x["q"], x["v"]
        used = used_rows(q, state, slots)
        rows = torch.arange(len(q), device=q.device)[used] if slots is None else slots.long()[used]
        tokens = {name: y if y is None or y.ndim == 1 else y[used][:, None] for name, y in x.items()}
        o, new = zero_rows(q[None], v[None], len(q))[0], state.double().clone()
        o1, new[rows] = whole(**tokens, scale=scale, initial_state=new[rows])
        o[used] = o1[:, 0]
        return o, new

    return oracle


def span(x: Mapping[str, Any], start: int | None, end: int | None) -> dict[str, Any]:
    """Returns the tokens `start` to `end` of named arguments."""
    return {name: tokens_of(y, start, end) for name, y in x.items()}


def tokens_of(x: Tensor | None, start: int | None, end: int | None) -> Tensor | None:
    """Returns the tokens `start` to `end` of x [B, T, ..]; a constant gate [Hv] is that of all tokens."""
    return x if x is None or x.ndim == 1 else x[:, start:end]


def for_value_heads(x: Tensor, v: Tensor) -> Tensor:
    """Returns q or k with each head repeated for the value heads that read it, in float64."""
    return x.double().repeat_interleave(max(v.shape[-2] // x.shape[-2], 1), dim=-2)


def used_rows(q: Tensor, state: Tensor, slots: Tensor | None) -> Tensor:
    """Returns a mask [B] of the rows whose index lies in the pool."""
    if slots is None:
        return torch.ones(len(q), dtype=torch.bool, device=q.device)
    return (slots >= 0) & (slots < len(state))


def zero_rows(q: Tensor, v: Tensor, rows: int) -> Tensor:
    heads = max(q.shape[2], v.shape[2])
    return torch.zeros(q.shape[0], rows, heads, v.shape[-1], dtype=torch.float64, device=q.device)


def zero_state(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    shape = q.shape[0], v.shape[2], k.shape[3], v.shape[3]
    return torch.zeros(shape, dtype=torch.float64, device=q.device)
