"""Trains a model: random windows of text, AdamW, and a learning rate that follows the budget of seconds or steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.demo.model import LanguageModel


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes of the model and of a training step, and the length of the training."""

    width: int
    blocks: int
    heads: int
    window: int  # number of bytes that the model reads at once in training
    batch: int
    learning_rate: float
    seconds: float


# Found by trial: these settings learn most in their time, on two CPU cores and on one data-centre GPU.
SETTINGS = {
    "cpu": Settings(width=128, blocks=2, heads=4, window=256, batch=8, learning_rate=3e-3, seconds=100),
    "cuda": Settings(width=512, blocks=4, heads=8, window=512, batch=32, learning_rate=1e-3, seconds=40),
}


GRADIENT_NORM = 1.0
"""The maximum norm of all gradients together; larger gradients are scaled down to it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The length of the training: `steps` if given, otherwise `seconds`."""

    seconds: float
    steps: int | None = None

    def used(self, steps: int, seconds: float) -> float:
        """Returns the fraction of the budget that is spent, from 0 to 1."""
        part = seconds / self.seconds if self.steps is None else steps / self.steps
        return min(part, 1.0)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the training after a step; `used` is the fraction of the budget that is spent."""

    steps: int
    used: float
    bits_per_byte: float
    bytes_per_second: float


def train(
    model: LanguageModel, text: Tensor, settings: Settings, budget: Budget, generator: torch.Generator
) -> Iterator[Progress]:
    """Trains `model` on text [n] uint8; takes one step for each `Progress` that is requested.

    The model may be used between two steps, and the training may be left at any time.
    """
    optimizer = new_optimizer(model)
    device = next(model.parameters()).device
    start, steps, used = time.perf_counter(), 0, 0.0
    while used < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.learning_rate, used)
        windows = sample(text, settings.batch, settings.window, generator).to(device)
        loss = training_step(model, optimizer, windows)
        steps, seconds = steps + 1, time.perf_counter() - start
        used = budget.used(steps, seconds)
        yield Progress(steps, used, loss / math.log(2), steps * settings.batch * settings.window / seconds)


def training_step(model: LanguageModel, optimizer: torch.optim.Optimizer, windows: Tensor, parts: int = 1) -> float:
    """Takes one step on windows [B, T + 1] uint8, in `parts` slices; returns the loss before the step, in nats."""
    optimizer.zero_grad()
    total = 0.0
    for part in windows.chunk(parts):
        loss = loss_of(model, part) / parts
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    return float(total)


def loss_of(model: LanguageModel, windows: Tensor) -> Tensor:
    """Returns the mean nats per byte of windows [B, T + 1] uint8, without the first byte of each."""
    logits, _ = model(windows[:, :-1].long())
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten().long())


def new_optimizer(model: LanguageModel) -> torch.optim.Optimizer:
    """Returns AdamW over the parameters of a model; the learning rate is set at every step."""
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95), fused=True)


def learning_rate(peak: float, used: float) -> float:
    """Returns the learning rate, which rises to `peak` in the first 5 % of the budget, then falls to 0 on a cosine."""
    warmup = 0.05
    if used < warmup:
        return peak * max(used / warmup, 0.02)
    return peak * 0.5 * (1 + math.cos(math.pi * (used - warmup) / (1 - warmup)))


def sample(text: Tensor, batch: int, window: int, generator: torch.Generator) -> Tensor:
    """Returns windows [batch, window + 1] uint8 from random places of text [n]."""
    starts = torch.randint(len(text) - window, (batch, 1), generator=generator, device=text.device)
    return text[starts + torch.arange(window + 1, device=text.device)]
