"""A batch as vLLM describes it, for types of states and padding that the engine does not use on every CPU."""

import pytest
import torch

import gla_core as gla
from gla_vllm.metadata import GLAMetadata
from gla_vllm.recurrence import Rows, recur

H, K, V = 2, 16, 16


def metadata(decodes, prefills, has_state, **drafts):
    """Returns the description of decodes in these slots, and of prefills {slot: length}."""
    lengths = list(prefills.values())
    return GLAMetadata(
        num_decodes=len(decodes),
        num_decode_tokens=len(decodes),
        num_prefills=len(prefills),
        num_prefill_tokens=sum(lengths),
        num_reqs=len(decodes) + len(prefills),
        has_initial_states_p=torch.tensor(has_state),
        query_start_loc_p=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        state_indices_tensor_p=torch.tensor(list(prefills), dtype=torch.int32),
        state_indices_tensor_d=torch.tensor(decodes, dtype=torch.int32)[:, None],
        query_start_loc_d=None,
        num_accepted_tokens=None,
        seq_lens=torch.tensor([1, 1, *lengths]),
        **drafts,
    )


@pytest.mark.parametrize("v_first", [False, True], ids=["", "V first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mixed_batch_with_padding(dtype, v_first):
    """Two decodes, one of them padding of a CUDA graph; a new prompt and one that goes on; a row of padding."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1 + 1 + 70 + 5 + 1, H, K) for _ in range(3))
    g = -torch.rand(len(q), H)
    pages = torch.randn(6, H * K * V + 7).to(dtype)  # a page has room for more than the state
    pool = pages[:, : H * K * V].view(6, H, K, V)
    if v_first:
        pool = pool.transpose(2, 3)
    before = pool.clone()
    out = torch.full_like(v, torch.nan)
    passed = pool.transpose(2, 3) if v_first else pool
    batch = metadata([3, 0], {1: 70, 4: 5}, [False, True])
    recur(Rows(q, k, v, g, out), [passed], batch, {"state_v_first": v_first})

    expected = before.clone()
    for rows, slot, state in ((slice(0, 1), 3, before[3]), (slice(2, 72), 1, None), (slice(72, 77), 4, before[4])):
        tokens = (x[None, rows] for x in (q, k, v, g))
        initial = None if state is None else state[None].float()
        o, final = gla.chunk_gla(*tokens, initial_state=initial, output_final_state=True)
        torch.testing.assert_close(out[rows], o[0], rtol=1e-5, atol=1e-5)
        expected[slot] = final[0].to(dtype)
    torch.testing.assert_close(pool, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert torch.equal(pool[[0, 2, 5]], before[[0, 2, 5]])
    assert torch.equal(out[[1, 77]], torch.zeros(2, H, V))
