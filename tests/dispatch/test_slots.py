"""States that are read from the slots of a pool and written into slots."""

import pytest
import torch

from gla_core.dispatch.slots import is_slot, states_of_slots, write_states


def bits(x):
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_are_read_from_slots_and_written_into_slots(dtype):
    pool = torch.randn(5, 2, 3, 4, dtype=dtype)
    pool[3] = torch.nan
    slots, has_state = torch.tensor([4, 3, -1, 0, 9], dtype=torch.int32), torch.tensor([True, False, True, True, True])
    actual = states_of_slots(pool, slots, has_state, torch.float32, pad_slot=0)
    assert actual.is_contiguous()
    assert torch.equal(actual[0], pool[4].float())
    assert not actual[1:].any()
    before, new = pool.clone(), torch.randn(5, 2, 3, 4)
    write_states(pool, slots, new, is_slot(pool, slots, 0) & torch.tensor([False, True, True, True, True]))
    assert torch.equal(pool[3], new[1].to(dtype))
    others = [0, 1, 2, 4]
    assert torch.equal(pool[others], before[others])


def test_nothing_is_written_if_no_slot_is_used():
    """Slot 0, which then stands for all slots, keeps its bits, even those of NaN."""
    pool = torch.full((2, 1, 1, 2), torch.nan)
    bits(pool)[0] += 1  # another NaN
    before = bits(pool).clone()
    write_states(pool, torch.tensor([5, -1]), torch.zeros(2, 1, 1, 2), torch.tensor([False, False]))
    assert torch.equal(bits(pool), before)


def test_a_pool_or_a_batch_may_be_empty():
    empty, pool = torch.zeros(0, 1, 1, 2), torch.ones(3, 1, 1, 2)
    slots, none = torch.tensor([0, 1]), torch.zeros(0, dtype=torch.int64)
    assert torch.equal(states_of_slots(empty, slots, None, torch.float32, -1), torch.zeros(2, 1, 1, 2))
    assert states_of_slots(pool, none, None, torch.float32, -1).shape == (0, 1, 1, 2)
    write_states(empty, slots, torch.ones(2, 1, 1, 2), is_slot(empty, slots, -1))
    write_states(pool, none, empty, none.bool())
    assert torch.equal(pool, torch.ones(3, 1, 1, 2))
