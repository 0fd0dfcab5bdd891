"""`generate` of transformers' Mamba-2 models without attention, after `accelerate()`; see generation.py."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils
from transformers.activations import ACT2FN

from gla_core.extension import is_plain
from gla_transformers import generation
from gla_transformers.cache import RecurrentStates
from gla_transformers.graphs import Graphs

NAMES = ("cache_params", "cache")
"""The names that versions of transformers give a cache."""
LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""The class of the states of a layer; None in versions of transformers whose models keep them otherwise."""
_graphs: weakref.WeakKeyDictionary[nn.Module, Graphs] = weakref.WeakKeyDictionary()


def sample(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> Any:
    """Returns what transformers' `_sample` returns; None for calls that are left to it."""
    name = next((name for name in NAMES if inputs.get(name) is not None), NAMES[0])
    cache: Any = inputs.get(name)
    if "_sample" not in vars(type(model)) or type(cache) is not cache_utils.DynamicCache or not inputs.get("use_cache"):
        return None  # a subclass, or a cache that transformers compiles for
    if any(type(layer) is not LAYER or layer.record_past for layer in cache.layers):
        return None
    asked = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
    rules = generation.rules(model, *asked, inputs)
    if rules is None:
        return None
    advance = functools.partial(_advance, model, rules, name, RecurrentStates(cache))
    return generation.sample(model, rules, input_ids, generation_config, streamer, inputs, cache, advance)


def _advance(
    model: Any, rules: generation.Rules, name: str, states: RecurrentStates, state: generation.State, n: int
) -> Tensor:
    """Computes `generation.steps`, in a graph if possible."""

    def call(inputs: Any, states: RecurrentStates) -> Tensor:
        def read(words: Tensor) -> Tensor:
            output = model(words, **{name: states.cache}, use_cache=True, logits_to_keep=1, return_dict=True)
            return output.logits[:, -1]

        return generation.steps(rules, generation.State(*inputs), n, read)

    records = None
    if is_plain(model, type(model)) and not model.training:
        if model not in _graphs:
            classes = {type(x) for x in model.modules() if type(x).__module__ == type(model).__module__}
            _graphs[model] = Graphs(*classes, nn.Conv1d, type(ACT2FN["silu"]))
        records = _graphs[model].repeat(model, call, state, n, rules.key(), states)
    return call(state, states) if records is None else records
