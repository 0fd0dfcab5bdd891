"""What a model remembers between calls: a state for each layer, in storage that stays where it is.

transformers' DynamicCache counts tokens in the keys of softmax attention, and refuses a model that has none; here the
cache counts them itself, on the device, so that nothing of a decoding step is computed on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from gla_core.nn import GatedLinearAttention, GLAState
from gla_transformers.configuration import GLAConfig


class GLACache(Cache):
    """The states of all layers of a model, for `past_key_values`.

    They are allocated by the first call that writes them, and from then on written in place, `reset` and beam search
    included. Gradients do not flow through them.

    Args:
        config: of the model.
        compileable: say so to `generate`, which then compiles the decoding step on a GPU, as it does for
            `cache_implementation="static"`.

    Raises:
        ValueError: `compileable` with layers of softmax attention, whose keys grow.

    Example:
        >>> cache = GLACache(model.config)
        >>> model(prompt, past_key_values=cache)
        >>> logits = model(token, past_key_values=cache).logits  # of one more token
    """

    def __init__(self, config: GLAConfig, compileable: bool = False) -> None:
        if compileable and config.attn is not None:
            raise ValueError("a cache of softmax attention (attn in the configuration) grows: it cannot be compileable")
        super().__init__(layers=[_memory(config, layer, compileable) for layer in range(config.num_hidden_layers)])
        self.compileable = compileable
        self.length: Tensor | None = None

    def advance(self, tokens: int, device: torch.device) -> None:
        """Count so many more tokens of every row, on this device."""
        if self.length is None:
            self.length = torch.zeros((), dtype=torch.int64, device=device)
            if self.compileable:
                _stays(self.length)
        self.length += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens read, of padding too. Waits for the device."""
        return 0 if self.length is None else int(self.length)

    def reset(self) -> None:
        """Forget all, and keep the storage."""
        super().reset()
        if self.length is not None:
            self.length.zero_()


class LayerState:
    """What a layer of gated linear attention remembers, with the methods that transformers asks of a cache's layers."""

    is_sliding = False
    is_croppable = False
    is_initialized = False
    supports_early_init = False

    def __init__(self, compileable: bool) -> None:
        self.is_compileable = compileable
        self.state: GLAState | None = None

    def write(self, new: GLAState) -> None:
        """Write a state into the storage, or make it the storage if there is none yet."""
        if self.state is None:
            self._adopt(_each(new, Tensor.detach))
            return
        for there, tensor in zip(_tensors(self.state), _tensors(new), strict=True):
            there.copy_(tensor.detach())

    def reset(self) -> None:
        """Back to before the first token."""
        for tensor in _tensors(self.state):
            tensor.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row i the state of row beam_idx[i]."""
        for tensor in _tensors(self.state):
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row `repeats` times, in new storage."""
        if self.state is not None:
            self._adopt(_each(self.state, lambda tensor: tensor.repeat_interleave(repeats, 0)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in new storage."""
        if self.state is not None:
            self._adopt(_each(self.state, lambda tensor: tensor[indices]))

    def crop(self, *_: Any) -> None:
        """Raise NotImplementedError: a state does not tell what it was before a token."""
        raise NotImplementedError("tokens cannot be taken back from the state of gated linear attention")

    def get_max_length(self) -> int:
        """Without a bound."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def _adopt(self, state: GLAState) -> None:
        self.state, self.is_initialized = state, True
        if self.is_compileable:
            for tensor in _tensors(state):
                _stays(tensor)


def read(
    layer: GatedLinearAttention,
    x: Tensor,
    memory: LayerState | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    """The layer's output y for x [B, T, hidden_size], after what its memory holds, which x is added to.

    One token without gradients is a step in place. All else as `GatedLinearAttention.forward`.
    """
    if memory is None:
        return layer(x, None, False, cu_seqlens, max_seqlen, attention_mask)[0]
    state = memory.state
    if torch.is_grad_enabled():
        state = state and _each(state, torch.clone)  # autograd keeps what it reads, and this is written below
    elif state is not None and x.shape[1] == 1 and cu_seqlens is None:
        y, _ = layer.step(x[:, 0], state, inplace=True, state_indices=_rows_with_a_token(attention_mask))
        return y[:, None]
    y, state = layer(x, state, True, cu_seqlens, max_seqlen, attention_mask)
    memory.write(state)
    return y


def _rows_with_a_token(attention_mask: Tensor | None) -> Tensor | None:
    """Of a mask [B, 1 or more] the rows that do not end with padding, -1 in place of the others."""
    if attention_mask is None:
        return None
    rows = torch.arange(attention_mask.shape[0], device=attention_mask.device)
    return torch.where(attention_mask[:, -1] != 0, rows, -1)


def _memory(config: GLAConfig, layer: int, compileable: bool) -> Any:
    spec = config.softmax_attention(layer)
    if spec is None:
        return LayerState(compileable)
    return DynamicLayer() if spec["window_size"] is None else DynamicSlidingWindowLayer(spec["window_size"])


def _tensors(state: GLAState | None) -> tuple[Tensor, ...]:
    return () if state is None else (state.recurrent, *(state.conv or ()))


def _each(state: GLAState, function: Any) -> GLAState:
    recurrent, *conv = map(function, _tensors(state))
    return GLAState(recurrent, tuple(conv) or None)  # pyright: ignore[reportArgumentType]


def _stays(tensor: Tensor) -> None:
    """Tell torch.compile that this memory stays, without which its CUDA graphs refuse to write there."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor, guard=False)
