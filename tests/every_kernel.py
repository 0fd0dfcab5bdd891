"""Runs every kernel of a backend on small inputs, for a checker to watch:

    python tests/every_kernel.py BACKEND [general_chunks] [hopper_chunks] [general_backwards] [hopper_backwards]
        [summaries] [delta_rules] [steps] [softmaxes] [attentions]
    compute-sanitizer --tool memcheck python tests/every_kernel.py triton_fused
    compute-sanitizer --tool racecheck python tests/every_kernel.py triton_fused general_chunks steps softmaxes
    compute-sanitizer --tool memcheck python tests/every_kernel.py triton_fused hopper_backwards 0/8  # one of 8

Run it without a checker first, so that it compiles undisturbed. The calls of chunk_gla have every two values of
`FACTORS` together in some call, and all combinations of `MOST_USED`. All combinations of `FACTORS` would take hours to
compile.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

import gla_core as gla
from gla_core.conformance.calls import output_shape
from gla_core.dispatch import registry
from gla_core.dispatch.backend import OpCall
from gla_core.workloads.inputs import GlaInputs, delta_inputs, gla_inputs
from gla_triton_kernels.delta import plan
from gla_triton_kernels.gla import backward as gradients
from gla_triton_kernels.gla import forward, sm90, summary
from gla_triton_kernels.gla.general import kernels as general
from gla_triton_runtime.architecture import Architecture, Gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHARE = [0, 1]
"""The number of this process's share of the calls of chunk_gla, and the number of shares."""
WIDTHS = ((16, 16), (64, 64), (64, 136), (128, 128), (128, 256), (256, 128), (512, 64))
GATES: tuple[dict[str, Any], ...] = (
    {"gates": "mild"},
    {"gates": "-inf"},
    {"gates": "none"},
    {"gate_form": "head"},
    {"gate_form": "constant"},
    {"gate": "logsigmoid"},
)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"B": 1, "T": 70, "H": 2},
    {"lengths": (70, 0, 3)},
    {"B": 1, "T": 10, "G": 2},
    {"B": 1, "T": 70, "H": 1, "R": 2},
)
STATES: tuple[dict[str, Any], ...] = (
    {"initial_state": True, "checkpoint_every": 64},
    {"initial_state": False, "checkpoint_every": 128},
)
FACTORS = (tuple({"K": K, "V": V} for K, V in WIDTHS), GATES, LAYOUTS, STATES)
"""The parts of a call of chunk_gla, other than its dtype."""
MOST_USED = (({"dtype": torch.bfloat16},), ({"K": 128, "V": 128},), GATES, LAYOUTS, STATES[:1])
MANY_HEADS = (
    ({"dtype": torch.bfloat16, "H": 24, "K": 256, "gates": "mild"},),
    ({"V": 136}, {"V": 256}),
    ({"B": 1, "T": 70}, {"lengths": (70, 0, 3)}),
    STATES[:1],
)
"""The parts of calls that compute gradients of states in blocks of 192 and of 128 values."""
SCANS = (
    ({"dtype": torch.bfloat16}, {"dtype": torch.float16}),
    ({"K": 64, "V": 64}, {"K": 128, "V": 72}, {"K": 256, "V": 128}),
    ({"B": 1, "T": 70, "H": 1, "R": 2}, {"lengths": (70, 0, 3), "R": 3}),
    ({"gated": False}, {"gated": True}),
)
"""The parts of calls of chunk_ssd."""


def general_chunks() -> None:
    """Runs the kernels for every GPU, with each row of their table."""
    with general_kernels():
        chunks()
    general.TMA_ELEMENTS = 0
    with general_kernels():
        chunk({"B": 1, "T": 70, "H": 2, "K": 128, "V": 128, "dtype": torch.bfloat16})


def hopper_chunks() -> None:
    """Runs the kernels for compute capability 9.0, and those of Mamba-2's scan."""
    with hopper_kernels():
        chunks()
        for call in scans():
            scan(**call)
        for dtype in dtypes():  # more heads than multiprocessors, so blocks share chunks
            chunk({"B": 3, "T": 130, "H": 1, "R": 100, "K": 16, "V": 72, "gate_form": "head", "dtype": dtype})


@contextmanager
def general_kernels() -> Iterator[None]:
    """Makes only the kernels for every GPU compute chunk_gla."""
    with ExitStack() as stack:
        for module, architecture in ((forward, None), (gradients, Architecture.SM100), (summary, Architecture.SM100)):
            plan = by_general_kernels(module.plan, architecture)
            stack.enter_context(mock.patch.object(module, "plan", plan))
        registry.changed()  # calls that were prepared with other plans are forgotten
        yield
    registry.changed()


def by_general_kernels(plan: Callable[..., Any], architecture: Architecture | None = None) -> Callable[..., Any]:
    """Wraps a planning function to take the last kernel of a role, which is general and refuses no call.

    Args:
        architecture: the architecture to plan for, in place of the GPU's own. States that another kernel reads are
            general only if this is not SM90.
    """

    def planned(call: OpCall, gpu: Gpu, cut: bool, *kernels: Any) -> Any:
        gpu = gpu if architecture is None else Gpu(architecture, gpu.multiprocessors)
        return plan(call, gpu, cut, *(each[-1:] for each in kernels))

    return planned


@contextmanager
def hopper_kernels() -> Iterator[None]:
    """Makes the kernels for compute capability 9.0 compute chunk_gla, and share chunks, also for short sequences."""
    forward.SM90_TOKENS = 0
    sm90.SHARES_START = -100
    registry.changed()  # calls that were prepared with other plans are forgotten
    yield


def chunks() -> None:
    for call in calls():
        chunk(call)


def calls() -> Iterator[dict[str, Any]]:
    """Yields this process's share of the calls of chunk_gla."""
    types = tuple({"dtype": dtype} for dtype in dtypes())
    most_used = itertools.product(*MOST_USED) if torch.bfloat16 in dtypes() else ()
    yield from share_of(itertools.chain(pairwise((types, *FACTORS)), most_used))


def share_of(combinations: Iterable[tuple[dict[str, Any], ...]]) -> Iterator[dict[str, Any]]:
    """Yields this process's share of the calls whose parts are given."""
    first, step = SHARE
    for chosen in itertools.islice(combinations, first, None, step):
        yield {name: value for part in chosen for name, value in part.items()}


def pairwise(factors: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yields combinations of one value of each factor, until every two values of two factors were together in one."""
    places = [[(i, a) for a in range(len(values))] for i, values in enumerate(factors)]
    missing = {pair for one, two in itertools.combinations(places, 2) for pair in itertools.product(one, two)}
    while missing:
        chosen = list(min(missing))
        for place in places:
            if place[0] not in dict(chosen):
                chosen.append(max(place, key=lambda new: sum(tuple(sorted((new, old))) in missing for old in chosen)))
        chosen.sort()
        missing.difference_update(itertools.combinations(chosen, 2))
        yield tuple(factors[i][a] for i, a in chosen)


def inputs(call: dict[str, Any]) -> GlaInputs:
    sizes = {name: value for name, value in call.items() if name not in ("gate", "checkpoint_every")}
    return gla_inputs(gate_dtype=torch.float32, device="cuda", **sizes)


def dtypes() -> tuple[torch.dtype, ...]:
    """Returns the dtypes whose kernels depend on the float32 precision; "highest" comes first and takes all dtypes."""
    return DTYPES if torch.get_float32_matmul_precision() == "highest" else (torch.float32,)


def chunk(call: dict[str, Any]) -> None:
    x = inputs(call)
    gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, True, x.cu_seqlens, gate=call.get("gate"))


def scans() -> Iterator[dict[str, Any]]:
    """Yields this process's share of the calls of chunk_ssd."""
    return share_of(itertools.product(*SCANS)) if torch.bfloat16 in dtypes() else iter(())


def scan(gated: bool, gradients: bool = False, **sizes: Any) -> None:
    x = gla_inputs(gate_form="head", initial_state=True, device="cuda", **sizes)
    A, D = torch.randn(2, x.v.shape[2], device="cuda")
    leaves = [y.requires_grad_(gradients) for y in (x.q, x.k, x.v, x.g, D, x.initial_state)]
    z = x.v.detach().clone() if gated else None
    steps = (-A.abs(), D, A, x.initial_state)
    o, state, *_ = gla.chunk_ssd(*leaves[:4], *steps, True, x.cu_seqlens, z=z, dt_softplus=True)
    if gradients:
        torch.autograd.grad((o, state), leaves, (torch.randn_like(o), torch.randn_like(state)))


def general_backwards() -> None:
    """Computes gradients of the same calls with the kernels for every GPU."""
    with general_kernels():
        backwards()


def hopper_backwards() -> None:
    """Computes gradients of the same calls with the kernels for compute capability 9.0."""
    with hopper_kernels():
        backwards()
        for call in share_of(itertools.product(*MANY_HEADS)):
            backward(call)
        for call in scans():
            scan(gradients=True, **call)


def backwards() -> None:
    """Computes gradients from checkpoints and from states built again.

    Calls with checkpoints have an initial and a final state, the others have neither.
    """
    for call in calls():
        backward(call)


def backward(call: dict[str, Any]) -> None:
    x = inputs(call)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state) if y is not None]
    options = {"gate": call.get("gate"), "checkpoint_every": call["checkpoint_every"]}
    final = x.initial_state is not None
    o, state, *_ = gla.chunk_gla(x.q, x.k, x.v, x.g, None, x.initial_state, final, x.cu_seqlens, **options)
    results = [y for y in (o, state) if y is not None]
    torch.autograd.grad(results, leaves, [torch.randn_like(y) for y in results])


def summaries() -> None:
    """Computes states from zero of the same calls in both directions, with both kinds of kernels."""
    for kernels in (general_kernels, hopper_kernels):
        with kernels():
            for call in calls():
                x = inputs(call)
                if call.get("gate") is not None:  # summaries take gates, no logits
                    continue
                do = torch.randn(output_shape(x.q, x.v), device="cuda").to(x.q.dtype)
                for k, v, reverse in ((x.k, x.v, False), (x.q, do, True)):
                    function = gla.chunk_gla_gradient_summary if reverse else gla.chunk_gla_summary
                    function(k, v, x.g, x.cu_seqlens)


def delta_rules() -> None:
    """Computes delta rules of the same calls, their summaries, and their gradients with and without checkpoints."""
    for call in calls():
        sizes = {name: value for name, value in call.items() if name not in ("gate", "checkpoint_every", "G")}
        if sizes["K"] > plan.MOST_KEYS:
            continue
        x = delta_inputs(gate_dtype=torch.float32, device="cuda", **sizes)
        options = {"gate": call.get("gate"), "checkpoint_every": call["checkpoint_every"]}
        leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta, x.initial_state) if y is not None]
        o, *_ = gla.chunk_delta(x.q, x.k, x.v, x.g, x.beta, None, x.initial_state, False, x.cu_seqlens, **options)
        torch.autograd.grad(o, leaves, torch.randn_like(o))
        with torch.no_grad():
            gla.chunk_delta_summary(x.k, x.v, x.g, x.beta, x.cu_seqlens, gate=call.get("gate"))
            do = torch.randn_like(x.v)
            gla.chunk_delta_gradient_summary(x.q, x.k, do, x.g, x.beta, x.cu_seqlens, gate=call.get("gate"))


def steps() -> None:
    """Runs steps of few states and many, narrow and wide, in both dtypes."""
    for B, K, state_dtype in itertools.product((1, 40), (64, 128, 256, 512), (torch.float32, torch.bfloat16)):
        x = gla_inputs(B=B, T=1, H=4, K=K, V=K, dtype=torch.bfloat16, device="cuda", initial_state=True)
        rows = torch.arange(B, device="cuda") - 1
        token = (x.q[:, 0], x.k[:, 0], x.v[:, 0], x.g[:, 0])
        state = x.initial_state.to(state_dtype)
        gla.recurrent_gla_step(*token, state)
        gla.recurrent_gla_step(*token[:3], x.g[:, 0, :, 0], state)
        gla.recurrent_gla_step(*token, state, slots=rows, inplace=True, bonus=x.k[0, 0])
        gla.recurrent_gla_step(*token, state, slots=rows, inplace=True)
        gla.recurrent_gla_layer_step(*token, state.clone(), x.v[:, 0], x.v[0, 0, 0], slots=rows)
        one, dt = (x.q[:, 0], x.k[:, 0], x.v[:, 0]), x.v[:, 0, :, 0].abs()
        gla.recurrent_ssd_step(*one, state.clone(), dt, -dt[0], dt[0], dt[0], x.v[:, 0], slots=rows, dt_softplus=True)
        gla.recurrent_gla_steps(x.q, x.k, x.v, x.g, state.clone(), rows)
        rings = [y.expand(-1, 3, -1, -1).contiguous() for y in (x.k, x.v, x.g.float())]
        gla.recurrent_gla_replay(x.q, x.k, x.v, x.g, state.clone(), *rings, rows, rows % 3, rows % 2)
        beta = x.v[..., 0].sigmoid()
        options = {"normalize": 1e-6, "gate": ("softplus", dt[0].float(), x.g[0, 0].float()), "beta_limit": 1.0}
        gla.recurrent_delta_step(*token, beta[:, 0], state.clone(), slots=rows, inplace=True)
        gla.recurrent_delta_step(*token, beta[:, 0], state.clone(), slots=rows, inplace=True, **options)
        gla.recurrent_delta_replay(x.q, x.k, x.v, x.g, beta, state.clone(), *rings, rows, rows % 3, rows % 2, **options)
        gla.recurrent_delta_steps(x.q, x.k, x.v, x.g, beta, state.clone(), rows[:, None])
        gla.recurrent_delta_replay(x.q, x.k, x.v, x.g, beta, state.clone(), *rings, rows, rows % 3, rows % 2)


def softmaxes() -> None:
    """Runs softmaxes and gradients on chip and in two sweeps, along either dimension, of few and many rows, aligned or
    not.
    """
    for columns, dim, dtype in itertools.product((7, 1000, 16384, 20000, 20001, 40001), (0, 1), dtypes()):
        x = torch.randn(5, columns, device="cuda").to(dtype)
        differentiated(gla.online_softmax, x if dim else x.reshape(columns, 5), dim)
    for columns, dtype in itertools.product((256, 1024), dtypes()):
        differentiated(gla.online_softmax, torch.randn(2048, columns, device="cuda").to(dtype))


def differentiated(function: Callable[..., Any], x: torch.Tensor, *others: Any, **options: Any) -> None:
    """Calls a function and computes the gradients of its results."""
    results = function(x.requires_grad_(), *others, **options)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.grad(results, x, [torch.randn_like(y) for y in results])


def attentions() -> None:
    """Runs softmax attention by the kernel for Hopper and by the general kernel, with TMA and with pointers.

    Libraries compute gradients of the first call of each two, with dlse folded into o in bfloat16. Our kernels compute
    those of the second one.
    """
    for width, tokens, dtype, causal in itertools.product((16, 64, 128, 256), (3, 130), dtypes(), (True, False)):
        q = torch.randn(1, tokens, 2, width, device="cuda").to(dtype)
        k = torch.randn(1, tokens, 1, width + 1, device="cuda").to(dtype)[..., :-1]
        differentiated(lambda q: gla.softmax_attention(q, q, q, causal=causal), q.clone())  # noqa: B023
        differentiated(lambda q: gla.softmax_attention(q, k, k, causal=causal), q)  # noqa: B023


KINDS = (
    *(general_chunks, hopper_chunks, general_backwards, hopper_backwards, summaries),
    *(delta_rules, steps, softmaxes, attentions),
)
PARTS = {run.__name__: run for run in KINDS}


if __name__ == "__main__":
    backend, *names = sys.argv[1:]
    if names and "/" in names[-1]:
        SHARE[:] = map(int, names.pop().split("/"))
    for module in (forward, gradients, summary):
        module.segment_length = lambda *sizes: 64  # else so few tokens would be one segment
    plan.LEAST_CHUNKS = plan.LEAST_SEGMENTS = 1
    with gla.use_backend(backend):
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for name in names or PARTS:
                PARTS[name]()
                torch.cuda.synchronize()
    print("ran:", backend, *(names or PARTS))
