"""Bugs in ops that keep states in a pool: over sequences, over several tokens, and over replayed tokens."""

import itertools

import torch

from tests.conformance.bugs.plant import Op, as_if_dense

pooled = Op("chunk_gla_pool")
stepped = Op("recurrent_gla_steps")
replayed = Op("recurrent_gla_replay")


pooled.bugs(
    "test_values[scattered_slots-float32]",
    flags_of_new_sequences_ignored=lambda x: pooled(x, has_state=None),
    state_written_to_the_slot_that_was_read=lambda x: pooled(x, write_slots=None),
)
pooled.bugs("test_the_pad_slot[small-float32]", pad_slot_written=lambda x: pooled(x, pad_slot=-1))
pooled.bugs("test_pages[small-float32-3]", pages_taken_for_dense=lambda x: pooled(x, pool=as_if_dense(x.pool)))
pooled.bugs("test_out[small-float32]", out_ignored=lambda x: pooled(x, out=None))


@pooled.bug("test_new_sequences_in_slots_of_nan[small-float32]")
def new_sequences_multiply_their_slot_by_0(x):
    if x.has_state is not None:
        x.pool[x.read_slots[~x.has_state & (x.read_slots >= 0)]] *= 0
    return pooled(x, has_state=None)


@pooled.bug("test_slots_outside_the_pool[small-float32--1-")
def slot_counts_from_the_end(x):
    slots = x.read_slots
    return pooled(x, read_slots=torch.where(slots < 0, slots + len(x.pool), slots))


@pooled.bug("test_slots_outside_the_pool[small-float32-P-")
def slot_clamped_into_the_pool(x):
    return pooled(x, read_slots=x.read_slots.clamp(max=len(x.pool) - 1))


@pooled.bug("test_values[small-float32]")
def slot_of_the_sequence_before(x):
    to = x.read_slots if x.write_slots is None else x.write_slots
    return pooled(x, read_slots=x.read_slots.roll(1), write_slots=to)


@pooled.bug("test_values[no_token-float32]", over={"states"})
def state_of_an_empty_sequence_not_copied(x):
    to = x.read_slots if x.write_slots is None else x.write_slots
    return pooled(x, write_slots=torch.where(x.cu_seqlens.diff() > 0, to, -1))


@pooled.bug("test_values[small-float32]")
def state_written_before_it_is_read(x):
    """The outputs of a second pass start from the states that the first pass has written."""
    pooled(x)
    return pooled(x, pool=x.pool.clone())


@pooled.bug("test_pool_dtypes[checkpoints-float32-torch.bfloat16]", over={"o"})
def state_rounded_after_64_tokens(x):
    """Each sequence continues from its state after 64 tokens, in the dtype of the pool."""
    cuts = torch.minimum(x.cu_seqlens[:-1] + 64, x.cu_seqlens[1:])
    o, to = [], x.read_slots if x.write_slots is None else x.write_slots
    for n, (a, b, c) in enumerate(zip(x.cu_seqlens.tolist(), cuts.tolist(), x.cu_seqlens[1:].tolist(), strict=False)):
        row = slice(n, n + 1)
        for start, end, read, has in ((a, b, x.read_slots, x.has_state), (b, c, to, None)):
            parts = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, start:end] for name in "qkvg"}
            others = {"cu_seqlens": torch.tensor([0, end - start]), "checkpoint_offsets": None, "out": None}
            others |= {"read_slots": read[row], "write_slots": to[row], "has_state": None if has is None else has[row]}
            o.append(pooled(x, **parts, **others))
    o.append(torch.zeros_like(o[0][:, :1]).expand(-1, x.q.shape[1] - int(x.cu_seqlens[-1]), -1, -1))
    return torch.cat(o, 1)


@pooled.bug("test_pages[small-float32-1]", over=set())
def memory_after_a_slot_written(x, o):
    size = x.pool[0].numel()
    if x.pool.stride(0) > size:
        x.pool.as_strided((len(x.pool), 1), (x.pool.stride(0), 1), size).zero_()


@pooled.bug("test_written_states_with_values_first[scattered_slots-float32]", swapped_states=True)
def swapped_pool_taken_for_any(x):
    return pooled(x, pool=as_if_dense(x.pool))


@pooled.bug("test_values[checkpoints-float32]", over={"states"})
def checkpoint_of_the_next_token(x):
    return pooled(x, checkpoint_offsets=None if x.checkpoint_offsets is None else x.checkpoint_offsets + 1)


@pooled.bug("test_values[checkpoints-float32]", over={"states"})
def checkpoint_in_bfloat16(x, o):
    if x.checkpoint_slots is not None:
        x.pool[x.checkpoint_slots] = x.pool[x.checkpoint_slots].bfloat16().to(x.pool.dtype)


@pooled.bug("test_snapshot_offsets[checkpoints-float32-0]", over=set())
def checkpoint_before_the_first_token(x):
    if x.checkpoint_offsets is not None:
        first = (x.checkpoint_offsets == 0) & (x.checkpoint_slots >= 0)
        x.pool[x.checkpoint_slots[first]] = x.pool[x.read_slots[first]]
    return pooled(x)


@pooled.bug("test_same_bits_in_calls_in_a_row[checkpoints-float32]", batch_invariant=frozenset({"cpu"}))
def other_bits_of_a_part(x):
    return pooled(x, scale=x.scale * (1 + 1e-6 * (x.q.shape[1] == 64)))


@pooled.bug("test_rows_of_no_sequence[padded-float32]", over={"o"})
def padding_pool_results_call_not_cleared(x, o):
    o[:, x.cu_seqlens[-1] :] = 1


@pooled.bug("test_gates_from_logits[small-float32]")
def logits_taken_for_log_gates_in_a_pool(x):
    return pooled(x, gate_normalizer=None)


@pooled.bug("test_numbers_beyond_float16[checkpoints-float32]", over={"states"})
def states_clamped_to_float16(x):
    return clamped(x, pooled(x))


def clamped(x, o):
    """Returns o; states of the pool above the range of float16 become its largest number."""
    if x.pool.dtype == torch.float16:
        x.pool.clamp_(-65504, 65504)
    return o


@stepped.bug("test_values[accepted-float32]")
def accepted_drafts_counted_from_0(x):
    return stepped(x, num_accepted=None if x.num_accepted is None else x.num_accepted + 1)


stepped.bugs("test_values[accepted-float32]", accepted_drafts_ignored=lambda x: stepped(x, num_accepted=None))
stepped.bugs(
    "test_pages[small-float32-3]", pages_of_steps_taken_for_dense=lambda x: stepped(x, pool=as_if_dense(x.pool))
)
stepped.bugs("test_out[small-float32]", out_of_steps_ignored=lambda x: stepped(x, out=None))


@stepped.bug("test_values[many_sequences-float32]")
def accepted_drafts_before_slots_to_read(x):
    return stepped(x, read_slots=x.read_slots if x.num_accepted is None else None)


@stepped.bug("test_numbers_beyond_float16[small-float32]", over={"states"})
def states_of_steps_clamped_to_float16(x):
    return clamped(x, stepped(x))


@stepped.bug("test_accepted_drafts[accepted-float32-0]")
def no_accepted_draft_read_from_the_end(x):
    S = x.slots.shape[1]
    return stepped(x, num_accepted=torch.where(x.num_accepted == 0, S, x.num_accepted))


@stepped.bug("test_values[packed-float32]")
def states_after_the_last_token_written(x, o):
    """The columns of slots beyond the tokens of a sequence receive its last state."""
    for n, (a, b) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
        for j in range(b - a, x.slots.shape[1]):
            x.pool[x.slots[n, j]] = x.pool[x.slots[n, max(b - a - 1, 0)]]


@stepped.bug("test_pool_dtypes[small-float32-torch.bfloat16]", over={"o"})
def state_rounded_between_tokens(x):
    """Each token continues from the state that was written."""
    o = []
    for j in range(x.q.shape[1]):
        token = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, j : j + 1] for name in "qkvg"}
        read = x.slots[:, j - 1] if j else x.slots[:, 0] if x.read_slots is None else x.read_slots
        others = {"slots": x.slots[:, j : j + 1], "num_accepted": None, "read_slots": read, "out": None}
        o.append(stepped(x, **token, **others, has_state=None if j else x.has_state))
    return torch.cat(o, 1)


@stepped.bug("test_values[small-float32]", over={"states"})
def every_state_written_to_the_first_slot(x):
    return stepped(x, slots=x.slots[:, :1].expand_as(x.slots))


@stepped.bug("test_new_sequences_in_slots_of_nan[small-float32]")
def new_sequences_of_steps_read_their_slot(x):
    return stepped(x, has_state=None)


@stepped.bug("test_new_sequences_in_pad_slots[small-float32]")
def new_sequence_in_a_pad_slot_computed(x):
    slots = x.slots.clone()
    slots[:, 0] = torch.where(slots[:, 0] < 0, x.slots[:, 1], slots[:, 0])
    return stepped(x, slots=slots)


@stepped.bug("test_slots_outside_the_pool[small-float32-first--1]")
def slots_of_steps_count_from_the_end(x):
    return stepped(x, slots=torch.where(x.slots < 0, x.slots + len(x.pool), x.slots))


@stepped.bug("test_rows_of_no_sequence[packed-float32]", over={"o"})
def padding_of_steps_not_cleared(x, o):
    o[:, x.cu_seqlens[-1] :] = 1


def without_tokens(x):
    """Returns arguments x without new tokens."""
    none = {name: y if (y := getattr(x, name)) is None or y.ndim == 1 else y[:, :0] for name in "qkvg"}
    return {**none, "cu_seqlens": None if x.cu_seqlens is None else torch.zeros_like(x.cu_seqlens), "out": None}


replayed.bugs(
    "test_values[small-float32]", accepted_tokens_counted_from_0=lambda x: replayed(x, num_accepted=x.num_accepted + 1)
)
replayed.bugs(
    "test_pages[small-float32-3]", rings_in_pages_taken_for_dense=lambda x: replayed(x, ring_v=as_if_dense(x.ring_v))
)
replayed.bugs("test_out[small-float32]", out_of_replay_ignored=lambda x: replayed(x, out=None))


@replayed.bug("test_numbers_beyond_float16[small-float32]", over={"states"})
def states_of_replay_clamped_to_float16(x):
    return clamped(x, replayed(x))


@replayed.bug("test_ring_start[small-float32-5]")
def ring_not_wrapped(x):
    """No call reads or writes past the end of a ring."""
    L = x.ring_k.shape[1]
    return replayed(x, ring_start=torch.minimum(x.ring_start % L, L - x.num_accepted - x.q.shape[1]))


@replayed.bug("test_values[small-float32]", over={"states"})
def state_written_with_drafts_included(x, o):
    drafts = torch.full_like(x.num_accepted, x.q.shape[1])
    replayed(x, **without_tokens(x), ring_start=x.ring_start + x.num_accepted, num_accepted=drafts)


@replayed.bug("test_values[small-float32]", over={"ring_k"})
def new_tokens_written_over_accepted_ones(x):
    replayed(x, **without_tokens(x))
    return replayed(x, num_accepted=torch.zeros_like(x.num_accepted))


@replayed.bug("test_pool_dtypes[small-float32-torch.bfloat16]", over={"o"})
def state_rounded_before_the_new_tokens(x):
    replayed(x, **without_tokens(x))
    none = torch.zeros_like(x.num_accepted)
    return replayed(x, ring_start=x.ring_start + x.num_accepted, num_accepted=none, has_state=None)


@replayed.bug("test_values[packed-float32]", over={"states"})
def new_sequence_without_accepted_tokens_not_written(x):
    before = x.pool.clone()
    o = replayed(x)
    for slot, accepted in zip(x.slots.tolist(), x.num_accepted.tolist(), strict=True):
        if accepted <= 0 <= slot < len(before):
            x.pool[slot] = before[slot]
    return o


@replayed.bug("test_only_accepted_tokens_are_read[small-float32]")
def tokens_not_accepted_multiplied_by_0(x):
    return replayed(x) + 0 * x.ring_v.sum()


@replayed.bug("test_new_sequences_in_slots_of_nan[small-float32]")
def new_sequences_of_replay_read_their_slot(x):
    return replayed(x, has_state=None)


@replayed.bug("test_slots_outside_the_pool[small-float32--1]")
def slots_of_replay_count_from_the_end(x):
    return replayed(x, slots=torch.where(x.slots < 0, x.slots + len(x.pool), x.slots))


@replayed.bug("test_gates_from_logits[small-float32]", over={"ring_g"})
def log_sigma_kept_without_its_normalizer(x):
    before = x.ring_g.clone()
    o = replayed(x)
    if x.gate_normalizer is not None:
        x.ring_g.copy_(torch.where(x.ring_g == before, before, x.gate_normalizer * x.ring_g))
    return o


@replayed.bug("test_rows_of_no_sequence[packed-float32]", over={"o"})
def padding_of_replay_not_cleared(x, o):
    o[:, x.cu_seqlens[-1] :] = 1
