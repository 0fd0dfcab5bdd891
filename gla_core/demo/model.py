"""A language model over bytes, built from gated linear attention and as little else as possible.

    x = embedding[bytes]
    x = x + gated_linear_attention(norm(x))        per block: mix along time
    x = x + mlp(norm(x))                           and along channels
    logits = norm(x) @ embedding^T

The same weights are evaluated in two ways: `forward` reads whole sequences through `chunk_gla`, for training and for
prompts; `step` reads one byte, for generation. States pass from one to the other.

B batch   T time   D width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from gla_core.nn import GatedLinearAttention, GLAState

BYTES = 256

States = list[GLAState]
"""A state for each block."""


class LanguageModel(nn.Module):
    """A language model: returns the logits of the next byte, given the bytes so far.

    Args:
        width: D, a multiple of 2 * heads.
        blocks: number of blocks.
        heads: number of heads of each gated linear attention; all their keys together are D/2 wide, all values D.
        mlp_width: width of the inner layer of each MLP, 2 D by default.

    Example:
        >>> model = LanguageModel(width=128, blocks=2, heads=4)
        >>> logits, states = model(prompt[None, :], output_final_states=True)
        >>> logits, states = model.step(logits[:, -1].argmax(-1), states)
    """

    def __init__(self, width: int, blocks: int, heads: int, mlp_width: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        made = (Block(width, heads, mlp_width or 2 * width) for _ in range(blocks))
        self.blocks = cast("Sequence[Block]", nn.ModuleList(made))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # also the output layer, whose logits should begin near 0

    def forward(
        self, tokens: Tensor, states: States | None = None, output_final_states: bool = False
    ) -> tuple[Tensor, States]:
        """Reads bytes [B, T] (int64); returns logits [B, T, 256], and the states if output_final_states is set."""
        x = self.embedding(tokens)  # [B, T, D]
        new_states: States = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i], output_final_states)
            if state is not None:
                new_states.append(state)
        return self._logits(x), new_states

    def step(self, tokens: Tensor, states: States) -> tuple[Tensor, States]:
        """Reads one byte [B] of each sequence; returns logits [B, 256] and the new states."""
        x = self.embedding(tokens)  # [B, D]
        new_states: States = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.step(x, state)
            new_states.append(state)
        return self._logits(x), new_states

    def initial_states(self, batch_size: int) -> States:
        """Returns the states before the first byte."""
        return [block.attention.initial_state(batch_size) for block in self.blocks]

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Gated linear attention followed by a gated MLP; each reads a normed copy of x and adds its result to x."""

    def __init__(self, width: int, heads: int, mlp_width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = GatedLinearAttention(width, num_heads=heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = GatedMLP(width, mlp_width)

    def forward(self, x: Tensor, state: GLAState | None, output_final_state: bool) -> tuple[Tensor, GLAState | None]:
        """Maps x [B, T, D] to [B, T, D]; returns the state too if output_final_state is set."""
        y, state = self.attention(self.attention_norm(x), state, output_final_state)
        return self._mlp(x + y), state

    def step(self, x: Tensor, state: GLAState) -> tuple[Tensor, GLAState]:
        """Maps x [B, D] to [B, D]; returns the new state too."""
        y, state = self.attention.step(self.attention_norm(x), state)
        return self._mlp(x + y), state

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mlp_norm(x))


class GatedMLP(nn.Module):
    """A gated MLP: (silu(x W_gate) * x W_up) W_down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., D] to [..., D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
