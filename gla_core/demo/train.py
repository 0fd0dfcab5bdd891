"""Training: random windows of text, AdamW, a learning rate that follows the budget of time or of steps."""

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
    """Sizes of the model and of a training step, and how long to train."""

    width: int
    blocks: int
    heads: int
    window: int  # bytes that the model reads at once in training
    batch: int
    learning_rate: float
    seconds: float


# Found by trial: what learns most in the time, on two CPU cores and on one data-centre GPU.
SETTINGS = {
    "cpu": Settings(width=128, blocks=2, heads=4, window=256, batch=8, learning_rate=3e-3, seconds=100),
    "cuda": Settings(width=512, blocks=4, heads=8, window=512, batch=32, learning_rate=1e-3, seconds=40),
}


GRADIENT_NORM = 1.0
"""To which the norm of all gradients together is clipped."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: for `steps` if given, else for `seconds`."""

    seconds: float
    steps: int | None = None

    def used(self, steps: int, seconds: float) -> float:
        """The part of the budget that is spent, from 0 to 1."""
        part = seconds / self.seconds if self.steps is None else steps / self.steps
        return min(part, 1.0)


@dataclass(frozen=True, slots=True)
class Progress:
    """What to show after a step: `used` is the part of the budget that is spent."""

    steps: int
    used: float
    bits_per_byte: float
    bytes_per_second: float


def train(
    model: LanguageModel, text: Tensor, settings: Settings, budget: Budget, generator: torch.Generator
) -> Iterator[Progress]:
    """Train `model` on text [n] uint8, one step for each `Progress` that is asked for.

    Stop asking, and the model is what the steps so far have made of it.
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
    """One step on windows [B, T + 1] uint8, `parts` of them one after another. Returns the loss before it, in nats."""
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
    """Nats per byte of bytes 1.. of each of windows [B, T + 1] uint8."""
    logits, _ = model(windows[:, :-1].long())
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten().long())


def new_optimizer(model: LanguageModel) -> torch.optim.Optimizer:
    """AdamW over the parameters of a model; its learning rate is set at every step."""
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95), fused=True)


def learning_rate(peak: float, used: float) -> float:
    """Rises to the peak over the first 5 % of the budget, then falls to nothing along a cosine."""
    warmup = 0.05
    if used < warmup:
        return peak * max(used / warmup, 0.02)
    return peak * 0.5 * (1 + math.cos(math.pi * (used - warmup) / (1 - warmup)))


def sample(text: Tensor, batch: int, window: int, generator: torch.Generator) -> Tensor:
    """Windows [batch, window + 1] uint8 from random places of text [n]."""
    starts = torch.randint(len(text) - window, (batch, 1), generator=generator)
    return text[starts + torch.arange(window + 1)]
