"""Drafts of n-grams change no token, and some of them are accepted."""

import pytest
from requests_of_tests import DRAFTS, expected, greedy, prompt, states_of_drafts, tokens


@pytest.mark.parametrize("convolved", [False, True], ids=["", "convolved"])
def test_drafts(gla, engine, accepted, convolved):
    folder, model = gla(use_short_conv=convolved)
    prompts = [prompt(length) for length in (1, 5, 64, 65, 100, 129)]
    llm = engine(folder, speculative_config=DRAFTS, enable_prefix_caching=False, max_num_batched_tokens=64)
    assert tokens(llm, prompts, greedy(30)) == expected(model, prompts, 30)
    assert set(accepted) >= {1, 2, 3}
    assert states_of_drafts(llm) == [0, 0]


@pytest.mark.parametrize("name", ["GatedDeltaNet", "KDA", "HGRN2"])
def test_drafts_of_other_models(fla, engine, accepted, name):
    """One layer and tied embeddings make a model that repeats itself, so that n-grams are good drafts."""
    folder, model = fla(name, use_short_conv=True, num_hidden_layers=1, tie_word_embeddings=True)
    prompts = [prompt(length) for length in (1, 65, 100)]
    llm = engine(folder, speculative_config=DRAFTS, enable_prefix_caching=False, max_num_batched_tokens=64)
    assert tokens(llm, prompts, greedy(30)) == expected(model, prompts, 30)
    assert max(accepted) > 1


def test_too_many_drafts_are_refused(gla, engine):
    with pytest.raises(ValueError, match="num_speculative_tokens is 8; expected at most 7"):
        engine(gla()[0], speculative_config=DRAFTS | {"num_speculative_tokens": 8}, enable_prefix_caching=False)
