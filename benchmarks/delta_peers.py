"""`chunk_delta` forward beside FLA, attention-gym, cuDNN, FlashInfer and FlashQLA, with errors beside times.

    KDA    a gate for each key; H = Hv
    GDN    a gate for each value head

Keys and queries have length 1, q, k and v are bfloat16, g and beta float32, and widths are 128. The gates are

    -5 sigmoid     -5 sigma(x), as models with a bounded gate have them
    softplus       -exp(A_log) softplus(x + dt_bias) with parameters as FLA initialises them; as strong as they come
    alternating    half of the keys decay by -5 a token and the others do not, and the halves swap every 8 tokens, with
                   keys and betas that move what one half holds into the other before. No key forgets everything, though
                   a bound by the slowest key of each 16 tokens says so. Of KDA alone

The error is that of o against the recurrence in float64, for the first key head of the first row, with its value heads.
Calls are replayed from CUDA graphs, or eager where the fact "eager" says so. Every peer has a row, with the reason if
it is not there or refuses. Peers get their inputs in the form that they take, such as exp(g), which is not timed.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import selection
import torch
import torch.nn.functional as F
from record import Job, attempt, imported, tune_anew
from torch import Tensor

import gla_core as gla
from gla_core.bench import measure
from gla_core.conformance.tolerances import relative_error

OURS, WIDTH, PERIOD = "gla-core", 128, 8
Fields = dict[str, Any]
Run = Callable[[], Tensor]


class Shape(NamedTuple):
    """B rows of T tokens with H key and Hv value heads; N packed sequences of T tokens in all, unless N is 0."""

    B: int
    T: int
    H: int
    Hv: int
    N: int = 0


SHAPES = {
    "KDA": (Shape(8, 4096, 16, 16), Shape(1, 8192, 16, 16), Shape(1, 65536, 8, 8), Shape(1, 32768, 16, 16, 64)),
    "GDN": (
        *(Shape(8, 4096, 16, Hv) for Hv in (16, 32, 64)),
        *(Shape(1, 8192, 16, 16), Shape(1, 65536, 8, 8), Shape(1, 32768, 16, 16, 64)),
    ),
}
ON_A_CPU = {"KDA": (Shape(2, 40, 2, 2),), "GDN": (Shape(1, 70, 2, 4, 3),)}
GATES = {"KDA": ("-5 sigmoid", "softplus", "alternating"), "GDN": ("-5 sigmoid", "softplus")}


class Inputs(NamedTuple):
    """The arguments of `chunk_delta`; cu_seqlens [N+1] in int32 also for rows of equal lengths, and the longest."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    longest: int
    packed: bool

    def offsets(self, dtype: torch.dtype) -> Tensor | None:
        """Returns cu_seqlens if the sequences are packed; None if they are rows."""
        return self.cu_seqlens.to(dtype) if self.packed else None

    def flat(self) -> list[Tensor]:
        """Returns q, k, v, g and beta with one row of all tokens [B T, ..]."""
        return [x.flatten(0, 1) for x in self[:5]]


def inputs(form: str, shape: Shape, gates: str, device: torch.device) -> Inputs:
    """Returns random inputs; equal arguments give equal inputs on a device."""
    B, T, H, Hv, N = shape
    torch.manual_seed(0)
    random = functools.partial(torch.randn, device=device)
    lengths = selection.lengths("log-uniform", T, N) if N else [T] * B
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    q, k, v = random(B, T, H, WIDTH), random(B, T, H, WIDTH), random(B, T, Hv, WIDTH)
    x, beta = random(B, T, Hv, *((WIDTH,) if form == "KDA" else ())), random(B, T, Hv).sigmoid()
    if gates == "alternating":
        half = F.normalize(random(WIDTH // 2), dim=0)
        k = torch.cat([half, half]).expand_as(k)
        t = torch.arange(T, device=device)
        strong = ((t // PERIOD) % 2 == 0)[:, None, None] ^ (torch.arange(WIDTH, device=device) < WIDTH // 2)
        g = (-5.0 * strong).expand_as(x).contiguous()
        beta = torch.where(t % PERIOD == PERIOD - 1, 0.98, 0.02)[:, None].expand_as(beta).contiguous()
    else:
        g = -5 * x.sigmoid() if gates == "-5 sigmoid" else _softplus(x, form)
    q, k = (F.normalize(y, dim=-1).bfloat16() for y in (q, k))
    return Inputs(q, k, v.bfloat16(), g, beta, ends, max(lengths), packed=bool(N))


def _softplus(x: Tensor, form: str) -> Tensor:
    """Returns gates as FLA's layers initialise them: exp(A_log) is 1 to 16, and softplus(dt_bias) is 0.001 to 0.1."""
    rate = torch.empty(x.shape[2], device=x.device).uniform_(1, 16)
    dt = torch.empty(x.shape[2:], device=x.device).uniform_(math.log(1e-3), math.log(0.1)).exp()
    bias = dt + torch.log(-torch.expm1(-dt))
    return -(rate[:, None] if form == "KDA" else rate) * F.softplus(x + bias)


# ---- who is measured: each returns a function without arguments that computes o and the last states


def ours(form: str, x: Inputs) -> Run:
    """Returns a call of `chunk_delta`."""
    options: dict[str, Any] = {"output_final_state": True, "max_seqlen": x.longest}
    return lambda: gla.chunk_delta(*x[:5], cu_seqlens=x.offsets(torch.int32), **options)[0]


def fla(form: str, x: Inputs) -> Run:
    """Returns a call of FLA's Triton kernels; of KDA with its faster "safe gate" where gates are at least -5."""
    os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="0")  # else FLA calls FlashQLA, which has rows of its own
    options = {"output_final_state": True, "cu_seqlens": x.offsets(torch.int64)}
    if form == "GDN":
        run = imported("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    else:
        run = functools.partial(imported("fla.ops.kda", "chunk_kda"), safe_gate=bool(x.g.min() >= -5))
    return lambda: run(*x[:5], **options)[0]


def attn_gym(form: str, x: Inputs) -> Run:
    """Returns a call of attention-gym's function."""
    run = imported("attn_gym.linear", "chunk_kda" if form == "KDA" else "chunk_gdn")
    return lambda: run(*x[:5], cu_seqlens=x.offsets(torch.int32), output_final_state=True)[0]


def cudnn(form: str, x: Inputs) -> Run:
    """Returns a call of cuDNN frontend's operation."""
    run = imported("cudnn.linear_attention", "kimi_delta_attention" if form == "KDA" else "gated_delta_net")
    tokens, shape = x.flat(), x.v.shape
    return lambda: run(*tokens, x.cu_seqlens, output_final_state=True)[0].view(shape)


def flashinfer(form: str, x: Inputs) -> Run:
    """Returns a call of FlashInfer's GDN."""
    run = imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    q, k, v, g, beta = x.flat()
    options = {"output_final_state": True, "max_seqlen": x.longest, "backend": "flashinfer"}
    tokens, offsets, shape = (q, k, v, g.exp(), beta), x.cu_seqlens.long(), x.v.shape
    return lambda: run(*tokens, cu_seqlens=offsets, **options)[0].view(shape)


def flash_qla(form: str, x: Inputs) -> Run:
    """Returns a call of FlashQLA's forward."""
    run, offsets = imported("flash_qla", "chunk_gated_delta_rule_fwd"), x.offsets(torch.int64)
    return lambda: run(*x[:5], cu_seqlens=offsets, output_final_state=True)[2]


WHO = {
    "KDA": {"fla": fla, "attn_gym": attn_gym, "cudnn": cudnn, OURS: ours},
    "GDN": {
        "fla": fla,
        "attn_gym": attn_gym,
        "cudnn": cudnn,
        "flashinfer": flashinfer,
        "flash_qla": flash_qla,
        OURS: ours,
    },
}


# ---- measurements


def calls(device: torch.device) -> list[tuple[str, Shape, str]]:
    """Returns the form, shape and gates of each call; those of a shape follow each other."""
    shapes = SHAPES if device.type == "cuda" else ON_A_CPU
    return [(form, shape, gates) for form in shapes for shape in shapes[form] for gates in GATES[form]]


def call_in_words(form: str, shape: Shape, gates: str) -> str:
    """Returns the words of a call, such as "GDN: 8 x 4096 tokens, 16 heads, 32 value heads, softplus"."""
    B, T, H, Hv, N = shape
    tokens = f"{N} packed sequences, {T} tokens" if N else f"{B} x {T} tokens"
    return f"{form}: {tokens}, {H} heads, " + (f"{Hv} value heads, " if Hv != H else "") + gates


def jobs(device: torch.device, bandwidth: float, seconds: float) -> list[Job]:
    """Returns a job for each call by each peer and by gla-core, so that a peer that breaks its process breaks no other.

    Args:
        bandwidth: bytes per second of a copy on the device.
        seconds: of timed calls for each row.
    """
    return [
        Job(
            [(call_in_words(*call), who, None if who == "fla" else "fla")],
            functools.partial(_measure, who, *call, device, bandwidth, seconds),
        )
        for call in calls(device)
        for who in WHO[call[0]]
    ]


def _measure(
    who: str, form: str, shape: Shape, gates: str, device: torch.device, bandwidth: float, seconds: float
) -> list[Fields]:
    if gates == GATES[form][0]:
        tune_anew()  # the other gates of a shape take the same kernels

    @torch.no_grad()
    def time() -> Fields:
        x = inputs(form, shape, gates, device)
        run = WHO[form][who](form, x)
        error = relative_error(_first(run(), shape), reference(form, shape, gates, device))
        timing, facts = _timed(run, device, seconds)
        facts = {"error": error, "of floor": _floor_bytes(x) / timing.seconds / bandwidth, **facts}
        return {"seconds": timing.seconds, "spread": timing.spread, "facts": facts}

    return [attempt(time)]  # a peer may not run here


def _timed(run: Run, device: torch.device, seconds: float) -> tuple[measure.Timing, Fields]:
    try:
        return measure.time_graph([run], device, seconds), {}
    except RuntimeError:  # it waits for the device, or this is a CPU
        return measure.time_calls([run], device, seconds), {"eager": True}


@functools.lru_cache(maxsize=1)
def reference(form: str, shape: Shape, gates: str, device: torch.device) -> Tensor:
    """Returns o of the first key head of the first row in float64."""
    x = inputs(form, shape, gates, device)
    heads = (1, 1, *[shape.Hv // shape.H] * 3)
    q, k, v, g, beta = (y[:1, :, :n].double() for y, n in zip(x[:5], heads, strict=True))
    return gla.chunk_delta(q, k, v, g, beta, cu_seqlens=x.offsets(torch.int32), backend="reference")[0]


def _first(o: Tensor, shape: Shape) -> Tensor:
    return o[:1, :, : shape.Hv // shape.H]


def _floor_bytes(x: Inputs) -> int:
    """Returns the bytes of inputs, outputs and last states, each counted once."""
    states = 4 * (len(x.cu_seqlens) - 1) * x.v.shape[2] * WIDTH * WIDTH
    return sum(y.nbytes for y in (*x[:5], x.v)) + states


def compile_share(share: int, shares: int, device: torch.device) -> None:
    """Runs a share of the calls of all but FLA once, and compiles a share of FLA's kernels without launching any."""
    for form, shape, gates in calls(device)[share::shares]:
        for who in WHO[form]:
            if who != "fla":
                attempt(functools.partial(_run, who, form, shape, gates, device))
    importlib.import_module("gla_fla.tune").compile_only(share, shares)
    for form, shape, gates in calls(device):  # without launches, code that reads results may fail
        attempt(functools.partial(_run, "fla", form, shape, gates, device))


@torch.no_grad()
def _run(who: str, form: str, shape: Shape, gates: str, device: torch.device) -> Fields:
    WHO[form][who](form, inputs(form, shape, gates, device))()
    measure.synchronize(device)
    return {}
