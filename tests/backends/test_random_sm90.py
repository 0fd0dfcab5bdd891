"""Random calls of the kernels for Hopper, emulated on a CPU, against the float64 oracle.

Shapes, dtypes, gates and packing are drawn from a seed. `make test` draws a few calls, `make conformance` many.
"""

import random

import pytest
import torch

from gla_core.conformance.tolerances import GRADIENT
from gla_core.workloads.inputs import gla_inputs
from tests.backends import test_sm90_on_cpu as emulated
from tests.backends.test_random_cases import head_counts
from tests.backends.test_sm90_on_cpu import kernels

pytestmark = pytest.mark.kernels
__all__ = ["kernels"]  # a fixture

FEW, MANY = 3, 200
WIDTHS = [(16, 16), (64, 64), (128, 128), (96, 8), (40, 72)]  # TMA takes rows of 16 bytes
WIDE = [(136, 40), (256, 64), (320, 24), (520, 16)]
SEEDS = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(FEW, MANY))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["constant", "head", "key"])
def test_random_calls(kernels, form, seed, monkeypatch):
    draw = random.Random(seed)
    dtype, (K, V) = draw.choice([torch.float16, torch.bfloat16]), draw.choice(WIDTHS)
    if seed % 3 == 1:
        K, V = WIDE[seed // 3 % len(WIDE)]
    sizes = {**head_counts(draw, draw), "K": K, "V": V, "gate_form": form, "dtype": dtype}
    if draw.random() < 0.4:
        lengths = [draw.choice([0, 1, draw.randint(2, 200)]) for _ in range(draw.randint(0, 3))]
        sizes["lengths"] = (*lengths, draw.randint(16, 200))
    else:
        sizes |= {"B": draw.randint(1, 2), "T": draw.randint(16, 200)}
    gate_dtype = dtype if sizes["gates"] != "extreme" and draw.random() < 0.5 else torch.float32
    sizes |= {"initial_state": draw.random() < 0.5, "gate_dtype": gate_dtype}
    monkeypatch.setattr(emulated, "inputs", lambda _normalizer=None, **options: gla_inputs(seed=seed, **options))
    if sizes["gates"] == "extreme":  # few gates have a gradient, so its error may be the rounding of single scores
        monkeypatch.setattr(emulated, "gradient_budget", lambda dtype: 2 * GRADIENT[dtype])
    if sizes["gates"] == "none" and form == "key":  # kernels of gates for heads compute calls without gates
        sizes["gate_form"] = "head"
    emulated.check_forward(kernels, **sizes)
    emulated.check_gradients(kernels, dstate=draw.random() < 0.7, **sizes)
    if sizes["gate_form"] != "key" and sizes.get("G", 1) == 1:  # heads that share q and k together, or have many values
        has_gates = sizes["gates"] != "none"
        more = {"length": draw.choice([None, 64, 128]), "skips": form == "head" and has_gates and draw.random() < 0.5}
        heads, more["V"] = draw.randint(1, sizes.get("R", 1)), draw.choice([V, V, 136, 264])
        emulated.check_gradients(kernels, heads=heads, **{**sizes, **more, "dtype": torch.bfloat16})
