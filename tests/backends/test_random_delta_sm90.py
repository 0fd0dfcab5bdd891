"""Random calls of Hopper's kernels of delta rules, emulated on a CPU, against the float64 oracle.

Keys, betas and gates are drawn as in test_random_delta.py. `make test` draws a few calls, `make conformance` many.
"""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.workloads.inputs import delta_inputs, normal
from gla_triton_kernels.delta.sm90.backward_calls import MOST_WIDTH
from tests.backends import test_delta_backward_sm90_on_cpu as backward
from tests.backends import test_delta_sm90_on_cpu as forwards
from tests.backends.test_delta_backward_sm90_on_cpu import kernels
from tests.backends.test_delta_sm90_on_cpu import forward
from tests.backends.test_random_cases import has_few_bits
from tests.backends.test_random_delta import amplification, truth

pytestmark = pytest.mark.kernels
__all__ = ["forward", "kernels"]  # fixtures

SMALL, MANY = 1, 100  # the seed of `make test`, whose calls are small, and the number of seeds
ROOM, ROOM_OF_ALIKE = 1.1, 2
"""Factors on budgets, of random keys and of keys that are alike: roundings of what they share do not average out.

By emulation, flash-linear-attention's outputs are then up to 8.8e-3 off; see docs/what_was_tried.
"""
SEEDS = [SMALL, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(MANY) if seed != SMALL)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["none", "head", "key"])
def test_random_calls(forward, kernels, form, seed):
    draw, generator = random.Random(f"{seed} {form}"), torch.Generator().manual_seed(seed)
    alike = draw.choice([0.0, 0.0, 0.7, 1.0])
    x = inputs(draw, form, alike, seed)
    loss = {"o": normal(x.v.shape, x.v.dtype, generator)}
    N = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    if draw.random() < 0.7:
        loss["state"] = normal((N, x.v.shape[2], x.k.shape[3], x.v.shape[3]), torch.float32, generator)
    length = draw.choice([None, 64, 128]) if x.q.shape[3] <= MOST_WIDTH else None
    results = forwards.computed(forward, x, draw.choice([1, 2]), length=length)
    actual = dict(zip(("o", "state", "checkpoints"), results, strict=True))
    if x.q.shape[3] <= MOST_WIDTH:  # of the backward
        gradients = backward.computed(kernels, x, loss["o"], loss.get("state"), length)
        actual |= {f"d{name}": y for name, y in gradients.items() if y is not None}
    named = {**{name: getattr(x, name) for name in (*backward.NAMES, "cu_seqlens")}, "gate": None}
    expected, _ = truth(named, loss, 64)

    def error_of(name, y):
        return relative_error(y, expected[name])

    for name in actual.keys() & expected.keys():
        error, budget = error_of(name, actual[name]), (GRADIENT if name[0] == "d" else FORWARD)[torch.bfloat16]
        budget *= ROOM_OF_ALIKE if alike else ROOM
        if error > budget and not has_few_bits(actual[name], expected[name]):
            assert error <= budget * amplification(named, loss, 64, name, error_of), (name, error)


def inputs(draw, form, alike, seed):
    """Returns random inputs: widths, groups and lengths, gates of any strength, keys `alike`, betas up to 2."""
    wide = [] if form == "key" else [136, 256]
    K, V = draw.choice([40, 64, 72, 96, 128, *wide]), draw.choice([40, 64, 104, 128])
    sizes = {"K": K, "V": V, "H": draw.randint(1, 2), "R": draw.choice([1, 1, 3]), "initial_state": draw.random() < 0.5}
    strengths = ["none"] if form == "none" else ["mild", "strong", "extreme", "-inf"]
    sizes |= {"gate_form": "key" if form == "none" else form, "gates": draw.choice(strengths)}
    if draw.random() < 0.4:
        lengths = [draw.choice([0, 1, draw.randint(2, 150)]) for _ in range(draw.randint(0, 3))]
        sizes["lengths"] = (*lengths, draw.randint(64, 150))
    else:
        sizes |= {"B": draw.randint(1, 2), "T": draw.randint(64, 150)}
    x = delta_inputs(dtype=torch.bfloat16, gate_dtype=torch.float32, seed=seed, **sizes)
    length, most = draw.choice([1.0, 1.0, 4.0, 2.0**-6]), draw.choice([1, 2])
    k = length * F.normalize(alike * x.k[:, :1].float() + (1 - alike) * x.k.float(), dim=-1)
    beta = x.beta * most / max(1.0, length) ** 2  # a state is bounded if beta |k|^2 is at most 2
    if draw.random() < 0.5:
        beta = beta.where(torch.rand(beta.shape, generator=torch.Generator().manual_seed(seed)) >= 0.3, 0)
    return dataclasses.replace(x, k=k.to(x.k.dtype), beta=beta.to(x.beta.dtype))
