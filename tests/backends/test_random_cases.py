"""Random calls of every op against the float64 oracle: shapes, dtypes, gates, packing and layout drawn from a seed.

Calls run on both Triton backends, and gradients on each of our backends that has them. There are a thousand cases each
on a GPU, and a few on a CPU, where the kernels are interpreted. `--gate-form FORM` gives all gates one form. The oracle
always runs on the CPU: its loop over tokens would take a GPU longer, even more so if several processes share it.

A case is drawn from two sources of random numbers. `kind` decides what kernels are compiled for, such as dtypes and
widths, and `draw` the rest, such as lengths and values. On a GPU five consecutive cases are of one kind, because it
takes longer to compile the kernels of a case than to run it.
"""

import dataclasses
import random

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.calls import (
    checkpoint_dtype,
    heads_first,
    oracle_gradients,
    repeated,
    run,
    with_loss,
    with_room,
)
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch import registry
from gla_core.workloads.inputs import GATES, gla_inputs, normal, token_of
from tests.kernels import DTYPES, INTERPRETED

pytest.importorskip("triton")
SMALLEST = 1e-30  # below it, products with exp of a gate may be numbers of float32 with few bits

LONGEST = 20 if INTERPRETED else 300
ENOUGH = 10 if INTERPRETED else 16  # tokens of some sequence: the error of fewer is the rounding of single scores
WIDTHS = [(16, 16), (19, 37), (64, 64), (128, 128), (40, 200), (96, 8), (256, 64)]
FORMS = ["key", "key", "head", "constant", "none"]
STRENGTHS = [gates for gates in GATES if gates != "none"]
OPS = ["chunk_gla"] * 7 + ["recurrent_gla_step", "softmax_attention", "online_softmax"]
FEW, BATCH, PER_KIND = 8 if INTERPRETED else 40, 20, 5
WITH_GRADIENTS = [
    "reference",
    pytest.param("triton_fused", marks=pytest.mark.kernels),
    pytest.param("parallel_scan", marks=pytest.mark.kernels),
]

batches = pytest.mark.parametrize(
    ("device", "batch"), [("cpu", 0), *(pytest.param("cuda", i, marks=pytest.mark.gpu) for i in range(1000 // BATCH))]
)


@pytest.fixture(autouse=True)
def gate_form(request, monkeypatch):
    """Limits the forms of gates that cases draw to the one that is asked for."""
    form = request.config.getoption("gate_form")
    if form:
        monkeypatch.setattr(f"{__name__}.FORMS", [form])


def seeds(device, batch, count):
    return range(batch * BATCH, (batch + 1) * BATCH) if device == "cuda" else range(count or FEW)


def sources(seed, device):
    """Returns `kind` and `draw` of a case."""
    return random.Random(f"kind {seed // PER_KIND if device == 'cuda' else seed}"), random.Random(seed)


@batches
@pytest.mark.usefixtures("short_segments")
@pytest.mark.kernels
def test_random_cases(device, batch, backend, random_cases):
    with gla.use_backend(backend):
        missed = [case for seed in seeds(device, batch, random_cases) for case in misses(seed, device)]
    assert not missed


@batches
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.usefixtures("short_segments")
def test_random_gradients(device, batch, backend, random_cases):
    registered = registry.get(backend)
    missed = [
        case for seed in seeds(device, batch, random_cases) for case in missed_gradients(seed, device, registered)
    ]
    assert not missed


def misses(seed, device):
    """Yields a description of each wrong result of the case drawn from `seed`, with its error."""
    kind, draw = sources(seed, device)
    op, dtype = kind.choice(OPS), kind.choice(DTYPES)
    actual, expected, description = CASES[op](kind, draw, dtype, device, seed)
    for x, ref in zip(actual, expected, strict=True):
        error = relative_error(x.cpu(), ref)
        if error > FORWARD[dtype]:
            yield f"seed {seed}: {op} {dtype} {description}: error {error:.1e}"


def missed_gradients(seed, device, backend):
    """Yields a description of each wrong gradient of the case drawn from `seed`, with its name and error."""
    kind, draw = sources(seed, device)
    dtype = kind.choice(DTYPES)
    x, sizes = sequences(kind, draw, dtype, device, seed)
    y = with_loss("chunk_gla_bwd", x)
    do, dstate = (drawn_layout(draw, y[name]) for name in ("do", "dstate"))
    every = kind.choice([None, 64, 128])
    if every is not None:
        z = on_cpu(x)
        tokens = z.q, z.k, z.v, z.g
        *_, states = oracle.chunk_gla_with_checkpoints(*tokens, None, z.initial_state, z.cu_seqlens, every)
        y |= {"checkpoints": states.to(device, checkpoint_dtype(dtype)), "checkpoint_every": every}
    without_dstate = kind.random() < 0.3
    actual = run("chunk_gla_bwd", {**y, "do": do, "dstate": None if without_dstate else dstate}, backend.name)
    actual = {name: d.cpu() for name, d in actual.items()}
    loss = {"o": do.cpu(), "state": (torch.zeros_like(dstate) if without_dstate else dstate).cpu()}
    constant = x.g is not None and x.g.ndim == 1
    wide = dataclasses.replace(x, g=x.g.expand(x.v.shape[:3])) if constant else x
    for name, ref in oracle_gradients("chunk_gla", on_cpu(wide), loss).items():
        if name == "dg" and constant:
            error = error_of_sum(actual[name], ref, max(sizes.get("lengths", [x.q.shape[1]])))
        else:
            error = relative_error(actual[name], ref)
        if error > GRADIENT[dtype] and not has_few_bits(actual[name], ref):
            yield f"seed {seed}: {name} {dtype} {sizes} {every} {do.stride()} {without_dstate}: error {error:.1e}"


def has_few_bits(x, ref):
    """Returns whether a gradient and the expected one are so small that their numbers may have few bits."""
    return max(float(x.norm()), float(ref.norm())) < SMALLEST


def error_of_sum(dg, token_gradients, longest):
    """Returns the error of the gradient of a constant gate, given the gradients of each token's gate [B, T, Hv].

    The sum may be small beside its terms. Errors of all tokens of a sequence may be alike, because an error of a state
    is in all later tokens, so the sum of `longest` terms may have sqrt(longest) times the error of a term.
    """
    error, terms = (
        float((dg.double() - token_gradients.sum((0, 1))).norm()),
        longest**0.5 * float(token_gradients.norm()),
    )
    return error / terms if terms > SMALLEST else error


def on_cpu(x):
    """Returns the inputs on the CPU."""
    named = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    return dataclasses.replace(x, **{name: y.cpu() for name, y in named.items() if y is not None})


def head_counts(kind, draw):
    """Draws numbers of heads, and the form and strength of the gate."""
    groups, by_values = kind.choice([1, 1, 1, 3]), kind.random() < 0.5
    sizes = {"H": draw.randint(1, 3), "G": 1 if by_values else groups, "R": groups if by_values else 1}
    form, gates = kind.choice(FORMS), draw.choice(STRENGTHS)
    return sizes | ({"gates": "none", "gate_form": "key"} if form == "none" else {"gates": gates, "gate_form": form})


def sequences(kind, draw, dtype, device, seed, inputs=gla_inputs):
    """Returns inputs of an op over sequences, and the sizes that were drawn for them."""
    K, V = kind.choice(WIDTHS if device == "cuda" else WIDTHS[:2])
    sizes = {"K": K, "V": V, **head_counts(kind, draw)}
    if kind.random() < 0.4:
        lengths = [draw.choice([0, 1, draw.randint(2, LONGEST)]) for _ in range(draw.randint(0, 4))]
        lengths.insert(draw.randint(0, len(lengths)), draw.randint(ENOUGH, LONGEST))
        sizes["lengths"] = tuple(lengths)
    else:
        sizes |= {"B": draw.randint(1, 3), "T": draw.choice([0] + 19 * [draw.randint(ENOUGH, LONGEST)])}
    sizes |= {"initial_state": kind.random() < 0.5, "gate_dtype": kind.choice([dtype, torch.float32])}
    # Gradients of few gates may lie outside float16's range: below it, or, summed over all tokens, above it.
    is_small = sizes["gates"] == "extreme" and sizes["gate_form"] != "key"
    is_large = dtype == torch.float16 and sizes["gate_form"] == "constant"
    if is_small or is_large:
        sizes["gate_dtype"] = torch.float32
    x = inputs(dtype=dtype, device=device, seed=seed, **sizes)
    if draw.random() < 0.3:
        x = dataclasses.replace(x, **{name: heads_first(y) for name in "qkvg" if (y := getattr(x, name)) is not None})
    return x, sizes


def drawn_layout(draw, x):
    """Returns the values of x, or some of them repeated, with random strides."""
    layouts = [heads_first, with_room, lambda y: repeated(y, 0, 1) if y.numel() else y]
    return draw.choice(layouts)(x) if draw.random() < 0.5 else x


def chunk_gla(kind, draw, dtype, device, seed):
    x, sizes = sequences(kind, draw, dtype, device, seed)
    actual = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True, x.cu_seqlens)
    y = on_cpu(x)
    return actual, oracle.chunk_gla(y.q, y.k, y.v, y.g, None, y.initial_state, y.cu_seqlens), sizes


def recurrent_gla_step(kind, draw, dtype, device, seed):
    K, V = kind.choice(WIDTHS)
    sizes = {"B": draw.randint(1, 9), "K": K, "V": V, **head_counts(kind, draw)}
    x = gla_inputs(T=1, dtype=dtype, device=device, initial_state=True, seed=seed, **sizes)
    q, k, v, g = (token_of(y, 0) for y in (x.q, x.k, x.v, x.g))
    actual = gla.recurrent_gla_step(q, k, v, g, x.initial_state)
    y = on_cpu(x)
    o, state = oracle.chunk_gla(y.q, y.k, y.v, y.g, initial_state=y.initial_state)
    return actual, (o[:, 0], state), sizes


def softmax_attention(kind, draw, dtype, device, seed):
    K, V = kind.choice(WIDTHS)
    longest = 300 if device == "cuda" else 40
    B, H, G = draw.randint(1, 2), draw.randint(1, 3), kind.choice([1, 3])
    Tk = draw.randint(1, longest)
    Tq = draw.randint(1, Tk)
    causal = kind.random() < 0.5
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((B, Tq, H * G, K), (B, Tk, H, K), (B, Tk, H, V))
    q, k, v = (normal(shape, dtype, generator) for shape in shapes)
    actual = gla.softmax_attention(q, k, v, causal=causal)
    return actual, oracle.softmax_attention(q.cpu(), k.cpu(), v.cpu(), causal=causal), (*shapes, causal)


def online_softmax(kind, draw, dtype, device, seed):
    shape = [draw.randint(1, 40), draw.choice([1, 7, 100, 1024, 3000]), draw.randint(1, 9)]
    draw.shuffle(shape)
    dim = draw.randrange(3)
    x = normal(tuple(shape), dtype, torch.Generator(device).manual_seed(seed))
    return [gla.online_softmax(x, dim)], [oracle.softmax(x.cpu(), dim)], (shape, dim)


CASES = {f.__name__: f for f in (chunk_gla, recurrent_gla_step, softmax_attention, online_softmax)}
