"""`generate` of transformers' models with Mamba-2 or a delta rule, after `accelerate()`; see generation.py.

Most of these models have layers of softmax attention too, whose keys grow with each token. For a CUDA graph they are
copied to memory of a fixed size, transformers' `StaticLayer`, from the first token to the last. Without graphs, models
with such layers are left to transformers' loop.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils

from gla_core.extension import is_plain
from gla_transformers import generation
from gla_transformers.cache import RecurrentStates
from gla_transformers.graphs import CAPTURES, Graphs

NAMES = ("cache_params", "past_key_values", "cache")
"""The names that models and versions of transformers give a cache."""
LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
WITHOUT_STATES: Any = getattr(cache_utils, "DummyLayer", None)
"""The class of recurrent states, and that of layers without any; None in versions of transformers that lack it."""
FIXED: dict[Any, Any] = {
    getattr(cache_utils, growing, None): getattr(cache_utils, fixed, None)
    for growing, fixed in (
        ("DynamicLayer", "StaticLayer"),
        ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"),
    )
}
"""The classes of states whose keys grow, and for each the class that has them in memory of a fixed size."""
MASKED = ("eager", "sdpa")
"""Attention of transformers that masks keys; others, such as flash attention, would read all memory of a fixed size."""
LEAST_CAPACITY = 256
"""The least number of tokens for which there is memory of a fixed size."""
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
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
    kinds = set(map(type, cache.layers))
    if not kinds <= {LAYER, WITHOUT_STATES, *FIXED} or any(getattr(x, "record_past", False) for x in cache.layers):
        return None
    grows = not kinds.isdisjoint(FIXED)
    masks = model.config._attn_implementation in MASKED
    if grows and not (input_ids.device.type in CAPTURES and masks and _positions_are_known(input_ids, inputs)):
        return None
    asked = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
    rules = generation.rules(model, *asked, inputs.keys() - {"position_ids"} if grows else inputs)
    if rules is None:
        return None
    capacity = _capacity(rules.limit) if grows else 0
    padding = _padding(inputs.get("attention_mask"), capacity) if grows else ()
    reads = functools.partial(_logits, model, name, "position_ids" in inputs)
    advance = functools.partial(_advance, model, rules, reads, padding, cache, capacity)
    try:
        return generation.sample(model, rules, input_ids, generation_config, streamer, inputs, cache, advance)
    finally:
        _let_grow(cache)


def _advance(
    model: Any,
    rules: generation.Rules,
    reads: Any,
    padding: Sequence[Tensor],
    cache: Any,
    capacity: int,
    state: generation.State,
    n: int,
) -> Tensor:
    """Computes `generation.steps`, in a graph if possible."""

    def call(inputs: Sequence[Tensor], states: RecurrentStates) -> Tensor:
        state = generation.State(*inputs[: len(generation.State._fields)])
        read = functools.partial(reads, states.cache, state, inputs[len(state) :])
        return generation.steps(rules, state, n, read)

    _fix(cache, capacity)
    inputs, states, records = (*state, *padding), RecurrentStates(cache), None
    if is_plain(model, type(model)) and not model.training:
        if model not in _graphs:
            _graphs[model] = Graphs(*_classes(model))
        records = _graphs[model].repeat(model, call, inputs, n, (rules.key(), capacity, bool(padding)), states)
    return call(inputs, states) if records is None else records


def _classes(model: nn.Module) -> set[type[nn.Module]]:
    """Returns the classes of the modules of a model that can be captured: those of its file, and functions."""
    kinds = set(map(type, model.modules()))
    return {nn.Conv1d, nn.Identity, *(x for x in kinds if x.__module__ in (type(model).__module__, *_ACTIVATIONS))}


def _logits(
    model: Any, name: str, takes_positions: bool, cache: Any, state: generation.State, padding: Any, words: Tensor
) -> Tensor:
    """Reads a token [B, 1] of each row, and returns the logits [B, V] of the next one."""
    options: dict[str, Any] = {name: cache, "use_cache": True, "logits_to_keep": 1, "return_dict": True}
    if takes_positions:
        options["position_ids"] = (state.length - 1).expand(len(words), 1)
    if padding:
        options["attention_mask"], number = padding
        options["position_ids"] = options["position_ids"] - number[:, None]
    return model(words, **options).logits[:, -1]


# ---- keys in memory of a fixed size


def _positions_are_known(input_ids: Tensor, inputs: dict[str, Any]) -> bool:
    """Returns whether positions go on from the number of tokens of each row, padding aside."""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or inputs.get("inputs_embeds") is not None:
        return False
    if mask is not None and (mask.shape != input_ids.shape or mask.device != input_ids.device):
        return False
    number = input_ids.shape[1] if mask is None else mask.long().sum(1)
    return bool((positions[:, -1] + 1 == number).all())


def _padding(mask: Tensor | None, capacity: int) -> Sequence[Tensor]:
    """Returns a mask [B, capacity] of keys, and the number of padding tokens [B] of each row; () without padding."""
    if mask is None or bool(mask.all()):
        return ()
    return nn.functional.pad(mask, (0, capacity - mask.shape[1]), value=1), (mask == 0).sum(1)


def _capacity(tokens: int) -> int:
    """Returns the number of tokens for which there is memory: up to a quarter more, so that sizes recur."""
    step = max(LEAST_CAPACITY, 1 << (tokens.bit_length() - 3))
    return -(-tokens // step) * step


def _fix(cache: Any, capacity: int) -> None:
    """Copies keys that grow to memory of a fixed size."""
    for i, layer in enumerate(cache.layers):
        if type(layer) not in FIXED or not layer.is_initialized:
            continue
        fixed, tokens = _moved(layer, FIXED[type(layer)], max_cache_len=capacity), layer.get_seq_length()
        fixed.lazy_initialization(layer.keys, layer.values)
        fixed.keys[:, :, :tokens], fixed.values[:, :, :tokens] = layer.keys, layer.values
        fixed.cumulative_length.fill_(tokens)
        cache.layers[i] = fixed


def _let_grow(cache: Any) -> None:
    """Gives the keys that `_fix` has moved memory of their own size."""
    growing = {fixed: growing for growing, fixed in FIXED.items()}
    for i, layer in enumerate(cache.layers):
        if type(layer) in growing:
            tokens = int(layer.cumulative_length)
            new = _moved(layer, growing[type(layer)])
            new.lazy_initialization(layer.keys, layer.values)
            new.keys, new.values = layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone()
            cache.layers[i] = new


def _moved(layer: Any, kind: Any, **options: Any) -> Any:
    """Returns states of another class, with the recurrent states of a layer, if it has any."""
    new = kind(**options)
    if isinstance(layer, LAYER):
        recurrent = vars(LAYER()).keys() | {"number_of_states"}
        vars(new).update({name: x for name, x in vars(layer).items() if name in recurrent})
    return new
