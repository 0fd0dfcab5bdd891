"""No kernel computes an offset in too few bits: the test derives bounds of all integers of a kernel from its IR.

Kernels are compiled up to Triton's first IR, for devices that need not exist and for tensors without memory. Every
integer in the IR has a least and a greatest value: the launch gives the arguments, the grid gives the program ids, and
arithmetic gives the rest. If 32 bits may not hold a value, an offset may be wrong in a large tensor. Values that a loop
carries from one iteration to the next have no bounds here; they are counters.
"""

import importlib
import inspect
import itertools
import os
import pkgutil
import re
from collections import ChainMap

import pytest
import torch

import gla_triton_kernels
from gla_core.dispatch.backend import KnownDevice, OpCall
from gla_core.dispatch.tensors import new_checkpoints
from tests.backends.prepared_calls import launches_on

pytest.importorskip("triton")

import triton
from triton._C.libtriton import ir, passes
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not built")


# ---- calls with large tensors, without memory


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_first(*shape, dtype=torch.bfloat16):
    """Makes a tensor [B, T, H, width] that lies in memory as [B, H, T, width]."""
    return empty(*(shape[i] for i in (0, 2, 1, 3)), dtype=dtype).transpose(1, 2)


def gla_inputs(B=2, T=2**20, H=32, G=1, R=1, K=128, V=128, packed=False, new=empty, dtype=torch.bfloat16, form="key"):
    """Makes q, k, v, g, an initial state and cu_seqlens of four sequences; H T K is 2^31 or more."""
    Hv = R * H
    state = empty(4 if packed else B, Hv, K, V, dtype=torch.float32)
    q, k, v = new(B, T, G * H, K, dtype=dtype), new(B, T, H, K, dtype=dtype), new(B, T, Hv, V, dtype=dtype)
    gates = {"constant": lambda: empty(Hv), "head": lambda: empty(B, T, Hv), "key": lambda: new(B, T, Hv, K)}
    g = None if form == "none" else gates[form]().float()
    cu_seqlens = empty(5, dtype=torch.int64) if packed else None
    return q, k, v, g, state, cu_seqlens


def forward(**sizes):
    q, k, v, g, state, cu_seqlens = gla_inputs(**sizes)
    return "chunk_gla_fwd", q, k, v, g, 0.1, state, True, cu_seqlens, 64


def ssd(gated=False, **sizes):
    q, k, x, g, state, cu_seqlens = gla_inputs(form="head", **sizes)
    A = empty(x.shape[2], dtype=torch.float32)
    return "chunk_ssd_fwd", q, k, x, g, A, A, A, True, 0.0, 1.0, state, True, cu_seqlens, 64, x if gated else None


def ssd_backward(skip="head", **sizes):
    _, q, k, x, dt, A, D, *steps, state, _, cu_seqlens, _, _ = ssd(**sizes)
    D = D if skip == "head" else empty(*x.shape[2:])
    checkpoints = new_checkpoints(k, x, cu_seqlens, 64)
    return "chunk_ssd_bwd", q, k, x, dt, A, D, *steps, state, cu_seqlens, checkpoints, 64, x, state


def pool(P=2**16, pool_dtype=torch.float32, **sizes):
    q, k, v, g, state, cu_seqlens = gla_inputs(**PACKED | sizes)
    N, states = len(cu_seqlens) - 1, empty(P, *state.mT.shape[1:], dtype=pool_dtype).mT
    slots, marks = empty(N, dtype=torch.int32), empty(N, dtype=torch.bool)
    return "chunk_gla_pool", q, k, v, g, states, cu_seqlens, slots, slots, 0.1, marks, slots, slots


def backward(normalizer=None, **sizes):
    q, k, v, g, state, cu_seqlens = gla_inputs(**sizes)
    do = empty(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3], dtype=v.dtype)
    checkpoints = new_checkpoints(k, v, cu_seqlens, 64)
    return "chunk_gla_bwd", q, k, v, g, 0.1, state, cu_seqlens, checkpoints, 64, do, state, normalizer


def summary(**sizes):
    _, k, v, g, _, cu_seqlens = gla_inputs(**sizes)
    return "chunk_gla_summary", k, v, g, cu_seqlens, False, None


def step(B=2**14, P=2**20, H=16, G=2, R=1, K=128, V=128, form="key", has_bonus=False):
    Hv = R * H
    q, k, v = empty(G * H, B, K).transpose(0, 1), empty(B, H, K), empty(B, Hv, V)
    g = empty(*{"constant": (Hv,), "head": (B, Hv), "key": (B, Hv, K)}[form])
    state, indices = empty(P, Hv, K, V, dtype=torch.float32), empty(B, dtype=torch.int32)
    bonus = empty(H, K) if has_bonus else None
    return "recurrent_gla_step", q, k, v, g, state, 0.1, indices, None, bonus, True


def layer_step(V=256, **sizes):
    _, q, k, v, g, state, scale, indices, *_ = step(V=V, **sizes)
    output_gate = empty(len(q), max(q.shape[1], v.shape[1]), V)
    return "recurrent_gla_layer_step", q, k, v, g, state, output_gate, empty(V), scale, 1e-5, "silu", indices


def ssd_step(**sizes):
    _, q, k, v, _, state, scale, indices, *_ = step(G=1, form="head", **sizes)
    dt, A = empty(*v.shape[:2]), empty(v.shape[1])
    return "recurrent_ssd_step", q, k, v, state.mT.contiguous().mT, dt, A, A, A, v, scale, True, False, indices


def steps(N=2**14, T=8, P=2**20, H=16, K=128, V=128, packed=False, form="key"):
    B, T = (1, T * N) if packed else (N, T)
    q, k, v = (empty(B, H, T, width).transpose(1, 2) for width in (K, K, V))
    g = empty(*{"constant": (H,), "head": (B, T, H), "key": (B, T, H, K)}[form])
    pool, slots = empty(P, H, K, V, dtype=torch.float32), empty(N, 8, dtype=torch.int32)
    cu_seqlens, per_sequence = empty(N + 1, dtype=torch.int64) if packed else None, empty(N, dtype=torch.int32)
    read = per_sequence if form == "head" else None
    return (
        "recurrent_gla_steps",
        q,
        k,
        v,
        g,
        pool,
        slots,
        0.1,
        cu_seqlens,
        per_sequence,
        read,
        empty(N, dtype=torch.bool),
    )


def replay(N=2**14, T=8, P=2**20, H=16, K=128, V=128, packed=False, form="key"):
    _, q, k, v, g, pool, _, scale, cu_seqlens, numbers, _, has_state = steps(N, T, P, H, K, V, packed, form)
    rings = [empty(P, 16, H, width, dtype=torch.bfloat16) for width in (K, V)]
    gates = {"key": (P, 16, H, K), "head": (P, 16, H)}[form]
    rings.append(empty(*gates, dtype=torch.float32))
    return "recurrent_gla_replay", q, k, v, g, pool, *rings, numbers, numbers, numbers, scale, cu_seqlens, has_state


def delta_forward(**sizes):
    q, k, v, g, state, cu_seqlens = gla_inputs(**sizes)
    return "chunk_delta_fwd", q, k, v, g, empty(*v.shape[:3], dtype=v.dtype), 0.1, state, True, cu_seqlens, 64


def delta_backward(kept=True, **sizes):
    q, k, v, g, state, cu_seqlens = gla_inputs(**sizes)
    beta, checkpoints = empty(*v.shape[:3], dtype=v.dtype), new_checkpoints(k, v, cu_seqlens, 64) if kept else None
    return "chunk_delta_bwd", q, k, v, g, beta, 0.1, state, cu_seqlens, checkpoints, 64 if kept else None, v, state


def delta_pool(**sizes):
    _, *token, states, cu_seqlens, read, write, scale, marks, before, kept = pool(**sizes)
    beta = empty(*token[2].shape[:3])
    return "chunk_delta_pool", *token, beta, states, cu_seqlens, read, write, scale, marks, before, kept


def delta_step(**sizes):
    _, *token, state, scale, indices, normalizer, _, inplace = step(G=1, **sizes)
    Hv, K = state.shape[1:3]
    options = (normalizer, 1e-6, 2.0, "softplus", None, empty(Hv), empty(Hv, K))
    return "recurrent_delta_step", *token, empty(*token[2].shape[:2]), state, scale, indices, *options, inplace


def delta_steps(**sizes):
    _, *token, pool, slots, scale, cu_seqlens, accepted, _read, _has_state = steps(**sizes)
    return "recurrent_delta_steps", *token, empty(*token[2].shape[:3]), pool, slots, scale, cu_seqlens, accepted


def delta_replay(**sizes):
    _, *token, pool, k, v, g, slots, start, accepted, scale, cu_seqlens, has_state = replay(**sizes)
    beta, rings = empty(*token[2].shape[:3]), (k, v, g)
    return "recurrent_delta_replay", *token, beta, pool, *rings, slots, start, accepted, scale, cu_seqlens, has_state


def attention(B, Tq, Tk, H=32, G=1, K=128, new=heads_first):
    return "softmax_attention", new(B, Tq, G * H, K), new(B, Tk, H, K), new(B, Tk, H, K), 0.1, True


def attention_backward(B, Tq, Tk, H=32, G=1, K=128, new=heads_first, dtype=torch.bfloat16, lse_gradient=True):
    q, k = new(B, Tq, G * H, K, dtype=dtype), new(B, Tk, H, K, dtype=dtype)
    lse = new(B, Tq, G * H, 1, dtype=torch.float32)[..., 0]
    return "softmax_attention_bwd", q, k, k, q, lse, 0.1, True, q, lse if lse_gradient else None


def softmax(shape, dim=1):
    return "online_softmax", empty(*shape), dim


def softmax_backward(shape, dim=1):
    return "online_softmax_bwd", empty(*shape), dim, empty(*shape)


SM80, SM90 = 80, 90
PACKED = {"B": 1, "T": 2**18, "H": 64, "packed": True}
WIDE = {"K": 256, "V": 512}
PER_HEAD = {"H": 16, "R": 2, "form": "head", "K": 256}
ODD = {"K": 77, "V": 99, "new": heads_first}
CALLS = {
    "forward": (SM90, forward, "triton_fused", {}),
    "forward, wide": (SM90, forward, "triton_fused", WIDE),
    "forward, odd": (SM90, forward, "triton_fused", ODD),
    "forward, packed": (SM90, forward, "triton_fused", PACKED),
    "forward, in segments": (SM90, forward, "parallel_scan", PACKED),
    "forward, grouped": (SM90, forward, "triton_fused", {"G": 2, "H": 16}),
    "forward, wide, value groups": (SM90, forward, "triton_fused", WIDE | {"H": 16, "R": 2}),
    "scan of Mamba-2": (SM90, ssd, "triton_fused", {"H": 1, "R": 32, "V": 64}),
    "scan of Mamba-2, in segments": (SM90, ssd, "parallel_scan", PACKED | {"H": 1, "R": 32, "K": 256}),
    "scan of Mamba-2, gated": (SM90, ssd, "triton_fused", PACKED | {"H": 1, "R": 32, "V": 72, "gated": True}),
    "scan of Mamba-2, shared chunks": (SM90, ssd, "triton_fused", {"B": 4, "H": 1, "R": 80, "V": 64}),
    "gradients of Mamba-2's scan": (SM90, ssd_backward, "triton_fused", {"H": 1, "R": 32, "V": 64}),
    "gradients of Mamba-2's scan, packed": (SM90, ssd_backward, "triton_fused", PACKED | {"H": 1, "R": 32, "K": 256}),
    "gradients of Mamba-2's scan, a skip for each channel": (
        SM90,
        ssd_backward,
        "triton_fused",
        PACKED | {"H": 1, "R": 32, "skip": "channel"},
    ),
    "pool": (SM90, pool, "triton_fused", {"pool_dtype": torch.bfloat16}),
    "pool, wide": (SM90, pool, "triton_fused", {"K": 256, "V": 512, "H": 16, "P": 2**12}),
    "pool, in segments": (SM90, pool, "parallel_scan", {"form": "constant"}),
    "general pool": (SM80, pool, "triton_fused", {"pool_dtype": torch.float16}),
    "general pool, in segments": (SM80, pool, "parallel_scan", {"form": "head"}),
    "backward": (SM90, backward, "triton_fused", {}),
    "backward, many values": (SM90, backward, "triton_fused", {"V": 256}),
    "backward, many values, packed": (SM90, backward, "triton_fused", PACKED | {"H": 16, "V": 256}),
    "backward, wide": (SM90, backward, "triton_fused", WIDE),
    "backward, wide, TF32": (SM90, backward, "triton_fused", WIDE | {"dtype": torch.float32}),
    "backward, wide, from logits": (SM90, backward, "triton_fused", WIDE | {"normalizer": 16}),
    "backward, odd": (SM90, backward, "triton_fused", ODD),
    "backward, grouped": (SM90, backward, "triton_fused", {"G": 2, "H": 16}),
    "backward, value groups": (SM90, backward, "triton_fused", {"H": 16, "R": 2}),
    "backward, in segments": (SM90, backward, "parallel_scan", PACKED),
    "backward of many rows": (SM90, backward, "triton_fused", {"B": 2**15, "T": 64}),
    "forward, TF32": (SM90, forward, "triton_fused", PACKED | {"dtype": torch.float32}),
    "backward, TF32": (SM90, backward, "triton_fused", {"dtype": torch.float32}),
    "backward, TF32 per head": (SM90, backward, "triton_fused", PER_HEAD | {"dtype": torch.float32}),
    "backward, float32": (SM90, backward, "triton_fused", {"K": 256, "dtype": torch.float32}),
    "backward, float32 per head": (SM90, backward, "triton_fused", PER_HEAD | {"dtype": torch.float32}),
    "backward, float32 in segments": (SM90, backward, "parallel_scan", PACKED | {"G": 2, "dtype": torch.float32}),
    "forward, per head": (SM90, forward, "triton_fused", PER_HEAD | {"K": 128}),
    "forward, constant": (SM90, forward, "parallel_scan", PACKED | {"form": "constant"}),
    "backward, per head": (SM90, backward, "triton_fused", PER_HEAD),
    "backward, constant": (SM90, backward, "parallel_scan", PACKED | {"form": "constant"}),
    "summary": (SM90, summary, "triton_fused", {}),
    "summary, per head": (SM90, summary, "triton_fused", PER_HEAD),
    "general forward": (SM80, forward, "triton_fused", {"new": heads_first}),
    "general forward, in segments": (SM80, forward, "parallel_scan", PACKED | {"H": 16}),
    "general backward": (SM80, backward, "triton_fused", {"K": 256, "dtype": torch.float32}),
    "general backward, in segments": (SM80, backward, "parallel_scan", PACKED | {"G": 2}),
    "general forward, per head": (SM80, forward, "triton_fused", PER_HEAD),
    "general forward, constant": (SM80, forward, "parallel_scan", PACKED | {"form": "constant"}),
    "general backward, per head": (SM80, backward, "triton_fused", PER_HEAD),
    "general backward, constant": (SM80, backward, "parallel_scan", PACKED | {"form": "constant", "G": 2}),
    "step": (SM90, step, "triton_fused", {}),
    "step, per head": (SM90, step, "triton_fused", {"form": "head", "G": 1, "R": 2}),
    "layer step": (SM90, layer_step, "triton_fused", {}),
    "layer step, few rows": (SM90, layer_step, "parallel_scan", {"B": 2, "form": "head", "G": 1, "R": 2}),
    "Mamba-2 step": (SM90, ssd_step, "triton_fused", {"R": 2}),
    "steps": (SM90, steps, "triton_fused", {}),
    "steps, packed": (SM90, steps, "parallel_scan", {"packed": True, "form": "head"}),
    "replay": (SM90, replay, "triton_fused", {}),
    "replay, packed": (SM90, replay, "parallel_scan", {"packed": True, "form": "head"}),
    "delta rule": (SM90, delta_forward, "triton_fused", {"R": 2, "H": 16}),
    "delta rule, packed": (SM80, delta_forward, "triton_fused", PACKED | {"K": 256}),
    "delta rule, packed, per head": (SM90, delta_forward, "triton_fused", PACKED | {"form": "head"}),
    "delta rule, per head": (SM80, delta_forward, "parallel_scan", {"R": 2, "H": 16, "form": "head"}),
    "delta rule, wide keys": (SM90, delta_forward, "triton_fused", {"K": 256, "form": "head"}),
    "delta rule backward": (SM90, delta_backward, "triton_fused", {"R": 2, "H": 16}),
    "delta rule backward, wide keys": (SM90, delta_backward, "triton_fused", {"K": 256, "form": "head"}),
    "delta rule backward, packed": (SM80, delta_backward, "triton_fused", PACKED | {"kept": False}),
    "delta rule backward, per head": (SM80, delta_backward, "parallel_scan", {"R": 2, "H": 16, "form": "constant"}),
    "delta rule, pool": (SM80, delta_pool, "triton_fused", {"R": 2, "H": 16, "V": 64}),
    "delta rule, pool on Hopper": (SM90, delta_pool, "triton_fused", {"R": 2, "H": 16, "form": "head"}),
    "delta rule step": (SM90, delta_step, "triton_fused", {"R": 2}),
    "delta rule steps": (SM90, delta_steps, "triton_fused", {}),
    "delta rule replay": (SM90, delta_replay, "triton_fused", {"packed": True, "form": "head"}),
    "attention": (SM90, attention, "triton_fused", {"B": 2, "Tq": 2**20, "Tk": 2**20}),
    "general attention": (SM80, attention, "triton_fused", {"B": 2, "Tq": 2**18, "Tk": 2**20, "G": 4}),
    "attention in splits": (SM90, attention, "parallel_scan", {"B": 1, "Tq": 1, "Tk": 2**24, "H": 2}),
    "attention backward": (SM90, attention_backward, "triton_fused", {"B": 2, "Tq": 2**20, "Tk": 2**20 + 64}),
    "attention backward, by a library": (SM90, attention_backward, "triton_fused", {"B": 2, "Tq": 2**20, "Tk": 2**20}),
    "attention backward, grouped": (
        SM80,
        attention_backward,
        "triton_fused",
        {"B": 2, "Tq": 2**18, "Tk": 2**20, "G": 4},
    ),
    "softmax": (SM90, softmax, "triton_fused", {"shape": (2**20, 2**12)}),
    "softmax of long rows": (SM90, softmax, "triton_fused", {"shape": (2**12, 2**20)}),
    "softmax of longest rows": (SM90, softmax, "triton_fused", {"shape": (4, gla_triton_kernels.MAX_LENGTH - 1)}),
    "softmax in splits": (SM90, softmax, "parallel_scan", {"shape": (4, gla_triton_kernels.MAX_LENGTH)}),
    "softmax backward": (SM90, softmax_backward, "triton_fused", {"shape": (2**20, 2**12)}),
    "softmax backward of long rows": (SM90, softmax_backward, "triton_fused", {"shape": (2**12, 2**20)}),
    "softmax backward of longest rows": (
        SM90,
        softmax_backward,
        "triton_fused",
        {"shape": (4, gla_triton_kernels.MAX_LENGTH - 1)},
    ),
    "softmax backward in splits": (
        SM90,
        softmax_backward,
        "parallel_scan",
        {"shape": (4, gla_triton_kernels.MAX_LENGTH)},
    ),
    "softmax of columns": (SM90, softmax, "parallel_scan", {"shape": (gla_triton_kernels.MAX_LENGTH, 4), "dim": 0}),
}
VARIATIONS = {
    "pool, in segments",
    "backward, in segments",
    "forward, TF32",
    "backward, value groups",
    "backward, grouped",
    "scan of Mamba-2",
    "scan of Mamba-2, in segments",
    "gradients of Mamba-2's scan",
    "gradients of Mamba-2's scan, packed",
    "forward, packed",
    "forward, constant",
    "forward, wide",
    "pool, wide",
    "backward, wide",
    "backward, odd",
    "backward, TF32 per head",
    "backward of many rows",
    "backward, many values",
    "backward, many values, packed",
    "forward, grouped",
    "general backward, per head",
    "scan of Mamba-2, gated",
    "general backward",
    "general backward, constant",
    "delta rule, packed",
    "delta rule, packed, per head",
    "delta rule, wide keys",
    "delta rule backward, per head",
    "delta rule steps",
}
"""Calls of kernels that other calls have in the same form of gates, widths and layout; they are thorough tests."""

IN_MEMORY = dict.fromkeys(("cu_seqlens_ptr", "order_ptr", "order", "indices_ptr"), (0, 2**20))
IN_MEMORY |= dict.fromkeys(("counts_ptr", "counts"), (0, 4))
IN_MEMORY |= {
    **dict.fromkeys(("offsets_ptr", "slots_ptr", "slots", "read_ptr", "write_ptr", "kept_ptr"), (0, 2**20)),
    "before_ptr": (0, 2**20),  # of tokens; states, which have the same name in the scan, are no integers
    "has_state_ptr": (0, 1),
    "accepted_ptr": (0, 8),
    "start_ptr": (0, 15),
    "has_ptr": (0, 1),
}
"""Bounds of integers that kernels load, by the name of the pointer to them: rows of tensors, numbers of sequences."""


FLOATS = ("scale", "norm_eps", "dt_min", "dt_max", "eps", "limit", "bound")
"""The parameters of kernels that take the floats of a call."""


@pytest.fixture
def launches_of(monkeypatch):
    """Returns a function from the name of one of `CALLS` to the launches that preparing the call compiles."""

    def lookup(name):
        capability, describe, backend, sizes = CALLS[name]
        device = KnownDevice("absent", 132, divmod(capability, 10))
        precision = "high" if "TF32" in name else "highest"
        return launches_on(device, backend, precision, *describe(**sizes), monkeypatch=monkeypatch)

    return lookup


def modules():
    """Returns the modules that hold kernels or launch them."""
    modules = pkgutil.walk_packages(gla_triton_kernels.__path__, gla_triton_kernels.__name__ + ".")
    return [importlib.import_module(module.name) for module in modules]


def kernels():
    """Returns the names of all kernels: Triton functions that a plain function of the same module refers to."""
    kernels = set()
    for module in modules():
        local = [x for x in vars(module).values() if getattr(x, "__module__", None) == module.__name__]
        named = set(itertools.chain(*(x.__code__.co_names for x in local if inspect.isfunction(x))))
        kernels |= {name_of(x) for x in local if isinstance(x, JITFunction) and x.fn.__name__ in named}
    return kernels


def name_of(kernel):
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


class Compiled(Exception):
    """Leaves Triton's compiler with the IR of a kernel and the types of its arguments by name."""


@pytest.fixture
def ir_of(monkeypatch, tmp_path):
    """Returns a function from a launch to the IR of its kernel and the types of the kernel's arguments by name."""

    def leave_early(make_ir):
        def made(source, *rest):
            raise Compiled(make_ir(source, *rest), source.signature)

        return made

    for source in (ASTSource, GluonASTSource):
        monkeypatch.setattr(source, "make_ir", leave_early(source.make_ir))
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # Triton makes the folder, but stores nothing in it

    def compiled(launch):
        launch.kernel.device_caches.clear()  # an earlier test of this process may have compiled it
        with pytest.raises(Compiled) as raised:
            launch.kernel.warmup(*launch.arguments.values(), grid=launch.grid, **launch.options)
        module, signature = raised.value.args
        manager = ir.pass_manager(module.context)
        passes.common.add_inliner(manager)
        passes.common.add_canonicalizer(manager)
        manager.run(module, "functions are inlined")
        return module.str_nodebug(), signature

    return compiled


# ---- bounds of integers


class Bounds:
    """Finds the least and the greatest value of each integer of a kernel. None means that they are not known.

    Attributes:
        overflows: lines of the IR whose values may need more than 32 bits, each with the bounds of its value.
    """

    def __init__(self, text, arguments, grid):
        self.values, self.grid = ChainMap(), grid
        self.regions, self.shared, self.overflows = [], [], []
        for line in map(str.strip, text.splitlines()):
            if line.startswith("tt.func"):
                names = re.findall(r"(%\w+): ", line)
                assert len(names) == len(arguments), line
                self.values.update(zip(names, arguments, strict=True))
            else:
                self.read(line)

    def read(self, line):
        if line.startswith("}"):
            self.end_region(line)
        if re.match(r"%\w+ = ", line) and not line.endswith("{"):
            self.define(line)
        elif line.startswith("scf.yield"):
            self.regions[-1]["yielded"].append([self.values.get(x) for x in operands(line)])
        elif line.startswith("ttg.warp_specialize("):
            self.shared = [self.values.get(x) for x in operands(line)]
        if line.endswith("{"):
            self.begin_region(line)

    def begin_region(self, line):
        if line.startswith("}"):  # the next region of the same operation
            region = self.regions_ended
        else:
            region = {"line": line, "yielded": [], "before": self.values, "adds": False}
        self.regions.append(region)
        self.values = self.values.new_child()
        if loop := re.search(r"scf\.for (%\w+) = (%\w+) to (%\w+)", line):
            name, first, end = loop.groups()
            if self.values.get(first) and self.values.get(end):
                self.values[name] = self.values[first][0], max(self.values[first][0], self.values[end][1] - 1)
        elif line.startswith("partition"):
            self.values.update(zip(re.findall(r"(%\w+): ", line), self.shared, strict=True))

    def end_region(self, line):
        if not self.regions:
            return
        region = self.regions_ended = self.regions.pop()
        self.values = region["before"]
        result = re.match(r"(%\w+)(?::\d+)? = ", region["line"])
        if result is None or line.endswith("{"):
            return
        self.values[result[1]] = None
        if "scf.if" in region["line"]:
            yielded = [joined(*each) for each in zip(*region["yielded"], strict=True)]
            names = [result[1]] if len(yielded) == 1 else [f"{result[1]}#{i}" for i in range(len(yielded))]
            self.values.update(zip(names, yielded, strict=True))
        elif re.search(r'"tt\.(reduce|scan)"', region["line"]):
            of = self.values.get(operands(region["line"].split(" = ")[1])[0])
            axis = int(re.search(r"axis = (\d+)", region["line"])[1])
            length = int(re.search(r"tensor<([\dx]+)x", line)[1].split("x")[axis]) if region["adds"] else 1
            self.values[result[1]] = of and (min(of[0], of[0] * length), max(of[1], of[1] * length))

    def define(self, line):
        name, rest = line.split(" = ", 1)
        operation = rest.split(" ")[0]
        before, _, kind = rest.rpartition(" : ")
        if operation == "arith.addi" and self.regions and '"tt.' in self.regions[-1]["line"]:
            self.regions[-1]["adds"] = True
        bounds = self.evaluated(operation, before, kind, [self.values.get(x) for x in operands(before)])
        in_32_bits = re.search(r"(\b|x)i32\b", re.split("-> | to ", kind)[-1])
        if bounds is not None and in_32_bits and max(-bounds[0], bounds[1]) > 2**31 - 1:
            self.overflows.append((line, bounds))
            bounds = None
        self.values[name] = bounds

    def evaluated(self, operation, text, kind, inputs):
        """Returns the bounds of an operation's result, or None."""
        if operation == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+)>?$", text)
            return (int(number[1]),) * 2 if number and "f" not in kind.split(",")[0] else None
        if operation == "tt.make_range":
            return int(re.search(r"start = (\d+)", text)[1]), int(re.search(r"end = (\d+)", text)[1]) - 1
        if operation == "tt.get_program_id":
            return 0, self.grid["xyz".index(text[-1])] - 1
        if operation == "tt.get_num_programs":
            return (self.grid["xyz".index(text[-1])],) * 2
        if operation == "tt.load":
            return inputs[0]
        if operation == "tt.elementwise_inline_asm":
            return (0, 0) if '"mov.u32 $0, 0;"' in text else None
        if operation == "arith.extui" and re.match(r".*i1\b.* to ", kind):
            return 0, 1
        if operation == "arith.select":
            return joined(*inputs[1:])
        if operation in ARITHMETIC and None not in inputs:
            return ARITHMETIC[operation](*inputs)
        if operation in SAME and inputs:
            return inputs[0]
        return None


def operands(text):
    return re.findall(r"%\w+(?:#\d+)?", text)


def joined(*all_bounds):
    if None in all_bounds:
        return None
    return min(x[0] for x in all_bounds), max(x[1] for x in all_bounds)


def corners(function):
    """Returns the bounds of a function that takes its extreme values at the bounds of its two arguments."""

    def bounds(a, b):
        corners = [function(x, y) for x, y in itertools.product(a, b)]
        return min(corners), max(corners)

    return bounds


def quotient(a, b):
    return corners(lambda x, y: abs(x) // y * (1 if x > 0 else -1))(a, b) if b[0] > 0 else None


def remainder(a, b):
    if b[0] <= 0:
        return None
    return 0 if a[0] >= 0 else max(a[0], 1 - b[1]), max(0, min(a[1], b[1] - 1))


def common_bits(a, b):
    positive = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(positive)) if positive else None


ARITHMETIC = {
    "arith.addi": corners(lambda x, y: x + y),
    "arith.subi": corners(lambda x, y: x - y),
    "arith.muli": corners(lambda x, y: x * y),
    "arith.minsi": corners(min),
    "arith.maxsi": corners(max),
    "arith.divsi": quotient,
    "arith.remsi": remainder,
    "arith.andi": common_bits,
}
SAME = {"tt.splat", "tt.addptr", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.gather"}
SAME |= {"arith.extsi", "arith.trunci", "ttg.convert_layout"}


def bounds_of_arguments(launch, signature, in_memory):
    """Returns the bounds of the arguments of the IR's function. For a pointer, they bound the integers in memory.

    Constants are left out. A descriptor becomes its pointer, its shape and its strides.
    """
    bounds = []
    for x, (name, kind) in zip(launch.arguments.values(), signature.items(), strict=True):
        if kind == "constexpr":
            continue
        parts = [None, *x.shape, *x.strides] if kind.startswith("tensordesc") else [x]
        bounds += [(part, part) if isinstance(part, int) else in_memory.get(name) for part in parts]
    return bounds


# ---- the tests


def test_every_kernel_is_among_those_of_the_calls(launches_of):
    assert CALLS.keys() > VARIATIONS
    assert {name_of(x.kernel) for name in CALLS.keys() - VARIATIONS for x in launches_of(name)} == kernels()


@pytest.mark.parametrize("name", CALLS)
def test_scratch_is_no_view(name, launches_of):
    """A replay gives each scratch tensor memory of its own, so a view would not have the values of its base."""
    for launch in launches_of(name):
        tensors = {parameter: getattr(x, "base", x) for parameter, x in launch.arguments.items()}
        tensors = {parameter: x for parameter, x in tensors.items() if isinstance(x, torch.Tensor)}
        assert not [parameter for parameter, x in tensors.items() if x._is_view() and not hasattr(x, "_part_of")]


@pytest.mark.parametrize("name", CALLS)
def test_launches_name_the_parameters_of_their_kernels(name, launches_of):
    """Tensors come first, then floats, then values that do not change. A recorded launch relies on this order."""
    from gla_triton_runtime import replay

    for launch in launches_of(name):
        parameters = list(inspect.signature(launch.kernel.fn).parameters)
        assert list(launch.arguments) == parameters, name_of(launch.kernel)
        tensors, floats, fixed = replay._arguments(launch)
        assert tensors
        named = [launch.arguments[name] for name in parameters if name in FLOATS]
        assert floats == [x for x in named if x is not None]
        assert all(map(replay._is_fixed, fixed))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in VARIATIONS else ()) for name in CALLS]
)
def test_32_bits_hold_every_integer(name, launches_of, ir_of):
    for launch in launches_of(name):
        text, signature = ir_of(launch)
        overflows = Bounds(text, bounds_of_arguments(launch, signature, IN_MEMORY), launch.grid).overflows
        assert not overflows, f"{name_of(launch.kernel)}: {overflows}"


def test_lengths_that_32_bits_cannot_count_are_refused():
    most = gla_triton_kernels.MAX_LENGTH
    for op, name in (("chunk_gla_fwd", "T"), ("softmax_attention", "Tk"), ("online_softmax", "columns")):
        call = OpCall(op=op, device=torch.device("cpu"), dtype=torch.bfloat16, dims={name: most + 1})
        assert gla_triton_kernels.refusal(call) == f"computes {name} up to {most}; {name} is {most + 1}"
