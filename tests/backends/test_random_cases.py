"""Random calls of every op against the float64 oracle: shapes, dtypes, gates, packing and layout drawn from a seed.

For both Triton backends: a thousand each on a GPU, a few where the kernels are interpreted.
"""

from __future__ import annotations

import random

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import heads_first
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import GATES, gla_inputs, normal

pytest.importorskip("triton")

WIDTHS = [(16, 16), (19, 37), (64, 64), (128, 128), (40, 200), (96, 8), (256, 64)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPS = ["chunk_gla"] * 7 + ["recurrent_gla_step", "softmax_attention", "online_softmax"]
BATCH = 20


@pytest.mark.parametrize(
    ("device", "batch"),
    [("cpu", 0), *(pytest.param("cuda", i, marks=pytest.mark.gpu) for i in range(1000 // BATCH))],
)
@pytest.mark.usefixtures("short_segments")
@pytest.mark.kernels
def test_random_cases(device, batch, backend):
    seeds = range(batch * BATCH, (batch + 1) * BATCH) if device == "cuda" else range(8)
    with gla.use_backend(backend):
        missed = [case for seed in seeds for case in misses(seed, device)]
    assert not missed


def misses(seed, device):
    """What the case drawn from `seed` got wrong: its description and error, or nothing."""
    draw = random.Random(seed)
    op = draw.choice(OPS)
    dtype = draw.choice(DTYPES if device == "cuda" else DTYPES[:2])
    found, expected, description = CASES[op](draw, dtype, device, seed)
    for x, ref in zip(found, expected, strict=True):
        error = relative_error(x, ref)
        if error > FORWARD[dtype]:
            yield f"seed {seed}: {op} {dtype} {description}: error {error:.1e}"


def chunk_gla(draw, dtype, device, seed):
    K, V = draw.choice(WIDTHS if device == "cuda" else WIDTHS[:2])
    longest = 300 if device == "cuda" else 20
    sizes = {"K": K, "V": V, "H": draw.randint(1, 3), "G": draw.choice([1, 1, 1, 3]), "gates": draw.choice(GATES)}
    if draw.random() < 0.4:
        sizes["lengths"] = tuple(draw.choice([0, 1, draw.randint(2, longest)]) for _ in range(draw.randint(1, 5)))
    else:
        sizes |= {"B": draw.randint(1, 3), "T": draw.randint(0, longest)}
    sizes |= {"initial_state": draw.random() < 0.5, "gate_dtype": draw.choice([dtype, torch.float32])}
    x = gla_inputs(dtype=dtype, device=device, seed=seed, **sizes)
    layout = heads_first if draw.random() < 0.3 else lambda y: y
    q, k, v, g = (None if y is None else layout(y) for y in (x.q, x.k, x.v, x.g))
    rest = {"initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens}
    found = gla.chunk_gla(q, k, v, g, output_final_state=True, **rest)
    return found, oracle.chunk_gla(q, k, v, g, **rest), sizes


def recurrent_gla_step(draw, dtype, device, seed):
    K, V = draw.choice(WIDTHS)
    sizes = {"B": draw.randint(1, 9), "H": draw.randint(1, 3), "G": draw.choice([1, 3]), "K": K, "V": V}
    sizes["gates"] = draw.choice(GATES)
    x = gla_inputs(T=1, dtype=dtype, device=device, initial_state=True, seed=seed, **sizes)
    q, k, v, g = (None if y is None else y[:, 0] for y in (x.q, x.k, x.v, x.g))
    found = gla.recurrent_gla_step(q, k, v, g, x.initial_state)
    o, state = oracle.chunk_gla(x.q, x.k, x.v, x.g, initial_state=x.initial_state)
    return found, (o[:, 0], state), sizes


def softmax_attention(draw, dtype, device, seed):
    K, V = draw.choice(WIDTHS)
    longest = 300 if device == "cuda" else 40
    B, H, G = draw.randint(1, 2), draw.randint(1, 3), draw.choice([1, 3])
    Tk = draw.randint(1, longest)
    Tq = draw.randint(1, Tk)
    causal = draw.random() < 0.5
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((B, Tq, H * G, K), (B, Tk, H, K), (B, Tk, H, V))
    q, k, v = (normal(shape, dtype, generator) for shape in shapes)
    found = gla.softmax_attention(q, k, v, causal=causal)
    return found, oracle.softmax_attention(q, k, v, causal=causal), (*shapes, causal)


def online_softmax(draw, dtype, device, seed):
    shape = [draw.randint(1, 40), draw.choice([1, 7, 100, 1024, 3000]), draw.randint(1, 9)]
    draw.shuffle(shape)
    dim = draw.randrange(3)
    x = normal(tuple(shape), dtype, torch.Generator(device).manual_seed(seed))
    return [gla.online_softmax(x, dim)], [oracle.softmax(x, dim)], (shape, dim)


CASES = {f.__name__: f for f in (chunk_gla, recurrent_gla_step, softmax_attention, online_softmax)}
