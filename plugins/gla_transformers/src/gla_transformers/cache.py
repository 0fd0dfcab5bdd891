"""The cache of a model: a state for each layer, in storage whose address does not change.

transformers' DynamicCache counts tokens by the keys of softmax attention, and refuses a model without such layers. This
cache counts tokens itself, on the device, so that a decoding step computes nothing on the host.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from gla_core.extension import is_plain
from gla_core.nn import HGRN2, GatedLinearAttention, GLAState
from gla_transformers.configuration import SharedConfig

NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of a cache in arguments and results of transformers: `cache` from 5.24 on."""


class GLACache(Cache):
    """The states of all layers of a model, for `past_key_values` or `cache`.

    The first call that writes the states allocates them. Later calls, `reset` and beam search write them in place.
    Gradients do not flow through them.

    Args:
        config: configuration of the model.
        compileable: whether `generate` compiles the decoding step on a GPU, as it does for
            `cache_implementation="static"`.

    Raises:
        ValueError: `compileable` is set and the model has layers of softmax attention, whose keys grow.

    Example:
        >>> cache = GLACache(model.config)
        >>> model(prompt, past_key_values=cache)
        >>> logits = model(token, past_key_values=cache).logits  # of one more token
    """

    def __init__(self, config: SharedConfig, compileable: bool = False) -> None:
        if compileable and config.attn is not None:
            raise ValueError("a cache of softmax attention (attn in the configuration) grows: it cannot be compileable")
        super().__init__(layers=[_memory(config, layer, compileable) for layer in range(config.num_hidden_layers)])
        self.compileable = compileable
        self.length: Tensor | None = None

    def advance(self, tokens: int, device: torch.device) -> None:
        """Adds `tokens` to the number of tokens that each row has read; the number is kept on `device`."""
        if self.length is None:
            self.length = torch.zeros((), dtype=torch.int64, device=device)
            if self.compileable:
                _stays(self.length)
        self.length += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens read, including padding. Waits for the device."""
        return 0 if self.length is None else int(self.length)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of all states; none before the first token."""
        return [tensor for layer in self.layers for tensor in _tensors(layer.state)]  # pyright: ignore[reportAttributeAccessIssue]

    def kind(self) -> list[bool]:
        """Returns what states of the same shapes depend on: which layers round theirs to bfloat16."""
        return [layer.rounded for layer in self.layers]  # pyright: ignore[reportAttributeAccessIssue]

    def sharing(self) -> GLACache:
        """Returns a cache with the same states in the same memory."""
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        self.share_with(other)
        return other

    def share_with(self, other: GLACache) -> None:
        """Gives another cache these states in place of its own: tensors of its own, in the same memory."""
        for there, here in zip(other.layers, self.layers, strict=True):
            there._adopt(_each(here.state, Tensor.detach))  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self) -> None:
        """Forgets all tokens, and keeps the storage."""
        super().reset()
        if self.length is not None:
            self.length.zero_()


class RecurrentStates:
    """The states in a cache of transformers at addresses that stay, with the methods of a `GLACache`.

    They are states of recurrent layers, and keys and values of softmax attention in memory of a fixed size.
    """

    compileable = False

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of all states."""
        return [x for layer in self.cache.layers for held in _held(layer) for x in held.values()]

    def kind(self) -> None:
        """Returns None: nothing."""

    def sharing(self) -> RecurrentStates:
        """Returns a cache with the same states in the same memory."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in cache.layers:
            vars(layer).update({name: dict(x) for name, x in vars(layer).items() if isinstance(x, dict)})
        other = RecurrentStates(cache)
        self.share_with(other)
        return other

    def share_with(self, other: RecurrentStates) -> None:
        """Gives another cache these states in place of its own: tensors of its own, in the same memory."""
        for there, here in zip(other.cache.layers, self.cache.layers, strict=True):
            attributes, *states = _held(here)
            vars(there).update({name: x.detach() for name, x in attributes.items()})
            for name, held in zip(_RECURRENT, states, strict=False):
                getattr(there, name).update({i: x.detach() for i, x in held.items()})


_RECURRENT = ("conv_states", "recurrent_states")


def _held(layer: Any) -> list[dict[Any, Tensor]]:
    """Returns the states of a layer: those that are attributes, by name, and the recurrent ones, by number."""
    attributes = vars(layer)
    keys = {name: attributes.get(name) for name in ("keys", "values", "cumulative_length")}
    recurrent = [attributes[name] for name in _RECURRENT if name in attributes]
    return [{name: x for name, x in held.items() if isinstance(x, Tensor)} for held in (keys, *recurrent)]


class Keys(NamedTuple):
    """Keys and values of S columns of each row; a column is a token or padding.

    Attributes:
        keys, values: [B, H, S, D].
        positions: [B, S] int64, the number of tokens of the row before each token; -1 for padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


class LayerState:
    """The memory of a layer of GLA or HGRN2, with the methods that transformers calls on a cache's layers.

    Attributes:
        state: a `GLAState`; None before the first token. In a cache in bfloat16, `recurrent` is in it.
    """

    is_sliding = False
    is_croppable = False
    is_initialized = False
    supports_early_init = False

    def __init__(self, compileable: bool, rounded: bool = False) -> None:
        self.is_compileable, self.rounded = compileable, rounded
        self.state: Any = None

    def write(self, new: GLAState) -> None:
        """Writes a state into the storage; without storage, the state becomes the storage."""
        if self.state is None:
            new = _each(new, Tensor.detach)
            if self.rounded and new.recurrent.dtype == torch.float32:  # float64 keeps float64
                new = new._replace(recurrent=new.recurrent.bfloat16())
            self._adopt(new)
            return
        for there, tensor in zip(_tensors(self.state), _tensors(new), strict=True):
            there.copy_(tensor.detach())

    def reset(self) -> None:
        """Sets the state to 0, its value before the first token."""
        for tensor in _tensors(self.state):
            tensor.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives row i the state of row beam_idx[i]."""
        for tensor in _tensors(self.state):
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, in new storage."""
        if self.state is not None:
            self._adopt(_each(self.state, lambda tensor: tensor.repeat_interleave(repeats, 0)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at `indices`, in new storage."""
        if self.state is not None:
            self._adopt(_each(self.state, lambda tensor: tensor[indices]))

    def crop(self, *_: Any) -> None:
        """Raises NotImplementedError: the state before a token cannot be computed from the state after it."""
        raise NotImplementedError("tokens cannot be taken back from the state of gated linear attention")

    def get_max_length(self) -> int:
        """Returns -1: there is no maximum length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def _adopt(self, state: GLAState) -> None:
        self.state, self.is_initialized = state, True
        if self.is_compileable:
            for tensor in _tensors(state):
                _stays(tensor)


class KeyMemory(LayerState):
    """The memory of a layer of softmax attention, in storage that grows up to its window.

    Attributes:
        state: the `Keys` of the last window - 1 tokens of each row, with padding in front if a row has fewer tokens;
            without a window, the `Keys` of all tokens. None before the first token.
        padded: whether `state` may contain padding.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__(compileable=False)
        self.window, self.padded = window, False

    def read_on(self, k: Tensor, v: Tensor, positions: Tensor, padded: bool) -> Keys:
        """Adds keys and values [B, H, T, D] at positions [B, T], and returns them behind the earlier ones.

        `padded` says whether some of the added columns may be padding.
        """
        seen = Keys(k, v, positions)
        if self.state is not None:
            old = self.state
            seen = Keys(
                torch.cat([old.keys, k], 2), torch.cat([old.values, v], 2), torch.cat([old.positions, positions], 1)
            )
        self.padded |= padded
        self._adopt(_each(seen if self.window is None else self._last(seen, padded), Tensor.detach))
        return seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives row i the keys and values of row beam_idx[i], in new storage."""
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        """Forgets all tokens, and frees the storage."""
        self.state, self.padded, self.is_initialized = None, False, False

    def _last(self, seen: Keys, padded: bool) -> Keys:
        """Returns the keys that later tokens can see, but at least one column: its position counts the tokens."""
        assert self.window is not None
        surplus = max(seen.positions.shape[1] - max(self.window - 1, 1), 0)
        if not padded:  # only earlier columns may be padding, and they are in front
            return Keys(seen.keys[:, :, surplus:], seen.values[:, :, surplus:], seen.positions[:, surplus:])
        order = (seen.positions >= 0).to(torch.uint8).argsort(dim=1, stable=True)[:, surplus:]
        rows = torch.arange(len(order), device=order.device)[:, None]
        k, v = (x.transpose(1, 2)[rows, order].transpose(1, 2) for x in seen[:2])
        return Keys(k, v, seen.positions[rows, order])


def read(
    layer: Any,
    x: Tensor,
    memory: LayerState | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    residual: Tensor | None,
    lower_bound: Tensor | None,
) -> Tensor:
    """Returns a layer's output y for x [B, T, hidden_size], after the tokens in its memory, and adds x to the memory.

    Without gradients, a plain layer computes one token by a step in place. A layer that is not plain, such as a wrapper
    of one, is called.

    Args:
        layer: a `GatedLinearAttention` or `HGRN2`, or a module around one.

    The other arguments are as in `GatedLinearAttention.forward` and `HGRN2.forward`.
    """
    bounded: dict[str, Any] = {} if lower_bound is None else {"lower_bound": lower_bound}
    options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "attention_mask": attention_mask}
    options |= {"residual": residual, **bounded}
    if memory is None:
        return layer(x, **options)[0]
    state = memory.state
    if torch.is_grad_enabled():
        state = state and _each(state, torch.clone)  # autograd keeps these tensors, which are overwritten below
    elif state is not None and x.shape[1] == 1 and cu_seqlens is None and is_plain(layer, GatedLinearAttention, HGRN2):
        rows = rows_with_a_token(attention_mask)
        to = None if residual is None else residual[:, 0]
        return layer.step(x[:, 0], state, inplace=True, slots=rows, residual=to, **bounded)[0][:, None]
    y, state = layer(x, state, output_final_state=True, **options)
    memory.write(state)
    return y


def rows_with_a_token(attention_mask: Tensor | None) -> Tensor | None:
    """Returns the row numbers of a mask [B, 1 or more], with -1 for rows whose last column is padding."""
    if attention_mask is None:
        return None
    rows = torch.arange(attention_mask.shape[0], device=attention_mask.device)
    return torch.where(attention_mask[:, -1] != 0, rows, -1)


def _memory(config: SharedConfig, layer: int, compileable: bool) -> Any:
    spec = config.softmax_attention(layer)
    if spec is None:
        return LayerState(compileable, config.state_dtype == "bfloat16")
    return KeyMemory(spec["window_size"])


def _tensors(state: GLAState | Keys | None) -> tuple[Tensor, ...]:
    if isinstance(state, GLAState):
        return state.recurrent, *(state.conv or ())
    return state or ()


def _each(state: Any, function: Any) -> Any:
    """Returns a state of the same kind, with the function applied to each tensor."""
    if isinstance(state, Keys):
        return Keys(*map(function, state))
    recurrent, *conv = map(function, _tensors(state))
    return GLAState(recurrent, tuple(conv) or None)  # pyright: ignore[reportArgumentType]


def _stays(tensor: Tensor) -> None:
    """Tells torch.compile that a tensor's address does not change; its CUDA graphs refuse to write to it otherwise."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor, guard=False)
