"""Two baselines that count bytes, which the model should beat. With n the counts in a training text of N bytes,

    unigram   p(b)     = (n(b) + 1) / (N + 256)
    bigram    p(b | a) = (n(a, b) + p(b)) / (n(a) + 1)

where n(a) counts the pairs that begin with a. The bigram model adds the unigram as one observation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.demo.model import BYTES


def unigram(text: Tensor) -> Tensor:
    """Returns the probabilities [256] (float64) of bytes, from text [n] uint8."""
    counts = torch.bincount(text.long(), minlength=BYTES).double()
    return (counts + 1) / (counts.sum() + BYTES)


def bigram(text: Tensor) -> Tensor:
    """Returns the probabilities [256, 256] (float64) of a byte given the byte before it: row a holds p(. | a)."""
    pairs = text[:-1].long() * BYTES + text[1:].long()
    counts = torch.bincount(pairs, minlength=BYTES * BYTES).double().view(BYTES, BYTES)
    return (counts + unigram(text)) / (counts.sum(1, keepdim=True) + 1)


def unigram_bits(probabilities: Tensor, windows: Tensor) -> float:
    """Returns the mean bits per byte of windows [N, T + 1] uint8, without the first byte of each."""
    return float(-probabilities[windows[:, 1:].long()].log2().mean())


def bigram_bits(probabilities: Tensor, windows: Tensor) -> float:
    """Returns the mean bits per byte of windows [N, T + 1] uint8, each byte given the byte before it."""
    return float(-probabilities[windows[:, :-1].long(), windows[:, 1:].long()].log2().mean())
