"""Many requests share few states: none is mixed up with another, and none is lost."""

import random

import pytest
from requests_of_tests import VOCABULARY, expected, greedy, outputs, prompt, tokens
from vllm.exceptions import VLLMValidationError


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_states(llm):
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("cached", [False, True], ids=["", "with a prefix cache"])
def test_a_hundred_requests(gla, engine, cached):
    """They have random lengths, arrive at random steps, and end by length, by a stop token or because they give up."""
    folder, model = gla()
    llm = engine(
        folder,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=24 if cached else 7,
        enable_prefix_caching=cached,
        **({"block_size": 64} if cached else {}),
    )
    draw, before = random.Random(0), free_states(llm)
    prompts = [prompt(draw.randint(1, 150), draw.randint(0, 5)) for _ in range(100)]
    news, stops = ([draw.randint(1, 20) for _ in prompts], [draw.sample(range(VOCABULARY), 3) for _ in prompts])
    arrivals = sorted(draw.randint(0, 150) for _ in prompts)
    quitters = {i: arrivals[i] + draw.randint(1, 30) for i in range(0, 100, 10)}
    answers, finished, step = {}, set(), 0
    while step <= arrivals[-1] or llm.llm_engine.has_unfinished_requests():
        for i in (i for i, arrival in enumerate(arrivals) if arrival == step):
            how = greedy(news[i], stop_token_ids=stops[i])
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, how)
        llm.llm_engine.abort_request([str(i) for i, end in quitters.items() if end == step])
        for output in llm.llm_engine.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
            finished |= {int(output.request_id)} if output.finished else set()
        step += 1
    assert finished >= set(range(100)) - set(quitters)
    for i, (whole, stop) in enumerate(zip(expected(model, prompts, 20), stops, strict=True)):
        until = next((n + 1 for n, token in enumerate(whole) if token in stop), 20)
        wanted = whole[: min(until, news[i])]
        assert answers.get(i, []) == (wanted if i in finished else wanted[: len(answers.get(i, []))])
    assert free_states(llm) == before
    assert not scheduler(llm).requests


def test_preemption(gla, engine, monkeypatch):
    """Requests that need more states than there are give theirs up, and are computed again."""
    folder, model = gla()
    sizes = {"max_num_batched_tokens": 256, "block_size": 64, "num_gpu_blocks_override": 6}
    llm = engine(folder, enable_prefix_caching=True, **sizes)
    preempted, preempt = [], scheduler(llm)._preempt_request

    def recorded(request, *args, **kwargs):
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler(llm), "_preempt_request", recorded)
    prompts = [prompt(length, seed) for seed, length in enumerate((120, 121, 122, 123))]
    assert tokens(llm, prompts, greedy(30)) == expected(model, prompts, 30)
    assert preempted


def test_the_longest_prompt_and_one_token(gla, engine):
    folder, model = gla()
    llm = engine(folder, max_model_len=100, max_num_batched_tokens=64)
    prompts = [prompt(99), prompt(1)]
    assert tokens(llm, prompts, greedy(1)) == expected(model, prompts, 1)
    with pytest.raises(VLLMValidationError, match="maximum context length is 100 tokens"):
        outputs(llm, [prompt(101)])
    assert tokens(llm, prompts, greedy(1)) == expected(model, prompts, 1)
