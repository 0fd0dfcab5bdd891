"""States of prefixes are kept and read again, and change no token."""

import pytest
from requests_of_tests import expected, greedy, outputs, prompt

BLOCK = 64


@pytest.fixture(params=[False, True], ids=["", "convolved"])
def llm(request, gla, engine):
    folder, model = gla(use_short_conv=request.param)
    made = engine(folder, enable_prefix_caching=True, block_size=BLOCK, max_num_batched_tokens=256)
    made.model = model
    return made


def cached(llm, prompts):
    """Returns for each prompt how many of its tokens were cached; fails if its continuation is not the expected one."""
    results = outputs(llm, prompts, greedy(20))
    assert [list(x.outputs[0].token_ids) for x in results] == expected(llm.model, prompts, 20)
    return [x.num_cached_tokens for x in results]


def test_hits(llm):
    long, other = prompt(300), prompt(200, seed=1)
    assert cached(llm, [long, other]) == [0, 0]
    assert cached(llm, [long, other]) == [256, 192]  # the last boundary that leaves tokens to compute
    assert cached(llm, [long[:257], [*long[:256], 5, 6], [*long[:255], 60, 6]]) == [256, 256, 0]
    assert cached(llm, [prompt(64), prompt(63)]) == [0, 0]


def test_states_inside_a_prefill_are_kept(llm, monkeypatch):
    """A prompt is computed in one prefill, which writes the state at its last boundary beside its last state."""
    from gla_vllm import recurrence

    kept, prefill = [], recurrence.prefill

    def recorded(*args):
        batch = args[2]
        if batch.checkpoint is not None:
            kept.append((batch.query_start_loc_p.tolist(), batch.checkpoint.checkpoint_offsets.tolist()))
        prefill(*args)

    monkeypatch.setattr(recurrence, "prefill", recorded)
    assert cached(llm, [prompt(200)]) == [0]
    assert kept == [([0, 200], [192])] * 2  # in both layers
    assert cached(llm, [prompt(200)]) == [192]


def test_a_conversation(llm):
    """The next turn reads the state inside the prompt before; the one after it, the state inside the second prompt."""
    first = prompt(100)
    turn = [*first, *expected(llm.model, [first], 40)[0], 3, 4, 5]
    outputs(llm, [first], greedy(40))
    assert cached(llm, [turn]) == [64]
    assert cached(llm, [turn]) == [128]
