"""Evaluates the model on held-out text in both of its forms, and generates text."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.demo.model import LanguageModel


def held_out_windows(text: Tensor, window: int, most: int) -> Tensor:
    """Returns at most `most` windows [N, window + 1] uint8, spread evenly over text [n] without overlap."""
    windows = text.unfold(0, window + 1, window + 1)
    places = torch.linspace(0, len(windows) - 1, min(most, len(windows)), device=text.device).long()
    return windows[places]


@torch.no_grad()
def model_bits(model: LanguageModel, windows: Tensor, batch: int) -> float:
    """Returns the mean bits per byte of windows [N, T + 1] uint8, each byte given the bytes before it in its window."""
    total = 0.0
    for part in windows.to(_device(model)).long().split(batch):
        logits, _ = model(part[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"))
    return total / windows[:, 1:].numel() / math.log(2)


@torch.no_grad()
def both_forms(model: LanguageModel, text: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits [T, 256] of text [T] uint8 in the chunked form, and byte by byte in the recurrent form."""
    tokens = text.to(_device(model)).long()[None]
    chunked, _ = model(tokens)
    states, steps = model.initial_states(1), []
    for token in tokens.unbind(1):
        logits, states = model.step(token, states)
        steps.append(logits)
    return chunked[0], torch.cat(steps)


def bits_of(logits: Tensor, text: Tensor) -> float:
    """Returns the mean bits per byte of text [T] uint8; row t of logits [T, 256] predicts byte t + 1."""
    return float(F.cross_entropy(logits[:-1], text[1:].to(logits.device).long())) / math.log(2)


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: bytes, count: int, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    """Continues the prompt by `count` bytes, one at a time. The chunked form reads the prompt at once."""
    tokens = torch.tensor([list(prompt or b"\n")], device=_device(model))  # [1, T]
    logits, states = model(tokens, output_final_states=True)
    logits = logits[:, -1]  # [1, 256]
    for _ in range(count):
        token = choose(logits, temperature, generator)
        yield int(token)
        logits, states = model.step(token.to(logits.device), states)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draws a byte [1] from logits [1, 256] divided by the temperature; temperature 0 takes the likeliest byte."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator)[:, 0]


def _device(model: LanguageModel) -> torch.device:
    return next(model.parameters()).device
