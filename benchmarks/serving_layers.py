"""Layers of served models, and what runs them: gla_core, and functions of vLLM, SGLang and FlashInfer.

    lightning  Ling-2.5: 64 heads of 128 x 128, a constant gate for each
    Mamba-2    Granite-4-small: one group of queries and keys (C, B) of 128, 128 heads of 64 values, dt and D
    GDN        Qwen3-Next: 16 key heads and 32 value heads of 128 x 128, a gate and a delta rule for each

Tokens are bfloat16, states float32. Engines are imported by their names when they are measured. vLLM's files of Triton
kernels and SGLang's seg_la.py suffice, beside modules that stand in for the few others that they import.

A batch is what a layer has after its projections and convolutions. Offsets and what follows from them are computed
beforehand, as engines compute them once for all layers. Prefills of a delta rule take q and k of length 1, log gates
and betas, which engines compute in a kernel of their own; decodes take what the projections give.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from record import imported
from torch import Tensor

import gla_core as gla

DRAFTS, CHUNK = 4, 256
"""The drafts of a sequence, and the tokens of a chunk of Granite's scan."""


class Batch(NamedTuple):
    """Tokens of packed sequences whose states are in a pool; each sequence reads and writes slot n + 1.

    Attributes:
        q, k: [1, T, H, K]. v: [1, T, Hv, V]. g: log gates, [Hv] or [1, T, Hv], float32; of Mamba-2, dt [1, T, Hv].
        pool: states, float32; [P, Hv, K, V] for lightning attention, else [P, Hv, V, K].
        cu_seqlens: [N+1], int32. slots: [N], int32.
        decodes: the number of sequences of one token, which come first.
        layer: what else a layer has, by name, such as "prompts", the offsets of the prefills.
        rings: ring_k and ring_v [N+1, 2 DRAFTS, H, 128], ring_start and num_accepted [N]; empty without a replay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    pool: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    decodes: int
    layer: dict[str, Tensor]
    rings: tuple[Tensor, ...] = ()

    def prompts(self) -> tuple[Tensor, ...]:
        """Returns q, k, v and g of the prefills, their offsets and their slots."""
        tokens = (x[:, self.decodes :] if x.ndim > 1 else x for x in (self.q, self.k, self.v, self.g))
        return (*tokens, self.layer["prompts"], self.slots[self.decodes :])


def _packed(
    device: torch.device, decodes: int, prefills: int, tokens: int, sizes: tuple[int, ...], v_first: bool
) -> Batch:
    """Returns a batch of `sizes` (H, K, Hv, V) whose g is random, as are the states."""
    H, K, Hv, V = sizes
    lengths = [1] * decodes + [tokens] * prefills
    T, N = sum(lengths), len(lengths)
    random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, k, v, g = random(1, T, H, K), random(1, T, H, K), random(1, T, Hv, V), random(1, T, Hv)
    pool = torch.randn(N + 1, Hv, *((V, K) if v_first else (K, V)), device=device)
    prompts = _offsets(lengths[decodes:], device)
    layer = {"prompts": prompts, "prompts in int64": prompts.long()}
    slots = torch.arange(1, N + 1, device=device, dtype=torch.int32)
    return Batch(q, k, v, g, pool, _offsets(lengths, device), slots, decodes, layer)


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=torch.int32)


def decodes_first(self: Any, x: Batch) -> Tensor:
    """Returns the outputs of a mixed batch by an engine that takes two functions for it."""
    return torch.cat([self.decode(x), self.prefill(x)])


# ---- lightning attention

LIGHTNING = (64, 128, 64, 128)


def lightning_batch(
    device: torch.device,
    decodes: int,
    prefills: int = 0,
    tokens: int = 0,
    sizes: tuple[int, ...] = LIGHTNING,
) -> Batch:
    """Returns a batch of `decodes` sequences of one token and `prefills` sequences of `tokens` tokens."""
    x = _packed(device, decodes, prefills, tokens, sizes, v_first=False)
    return x._replace(g=-torch.logspace(-6, -0.5, sizes[2], 2.0, device=device))


def drafts(device: torch.device, N: int, sizes: tuple[int, ...] = LIGHTNING) -> Batch:
    """Returns DRAFTS tokens of each of N sequences, with one state and a ring for each."""
    x = lightning_batch(device, DRAFTS * N, sizes=sizes)
    ring = (N + 1, 2 * DRAFTS, *x.q.shape[2:])
    keys, values = (torch.zeros(ring, device=device, dtype=torch.bfloat16) for _ in range(2))
    start, accepted = (torch.full((N,), n, device=device, dtype=torch.int32) for n in (0, DRAFTS // 2))
    return x._replace(pool=x.pool[: N + 1].clone(), slots=x.slots[:N], rings=(keys, values, start, accepted))


class OurLightning:
    """The ops of gla_core. A mixed batch is one call."""

    def decode(self, x: Batch) -> Tensor:
        token = (x.q[0], x.k[0], x.v[0], x.g, x.pool)
        return gla.recurrent_gla_step(*token, slots=x.slots, inplace=True)[0]

    def verify(self, x: Batch) -> Tensor:
        """Returns outputs for rows of drafts; the pool has DRAFTS slots for each sequence."""
        N = len(x.slots) // DRAFTS
        q, k, v = (y[0].unflatten(0, (N, DRAFTS)) for y in (x.q, x.k, x.v))
        return gla.recurrent_gla_steps(q, k, v, x.g, x.pool, x.slots.view(N, DRAFTS))

    def replay(self, x: Batch) -> Tensor:
        q, k, v = (y[0].unflatten(0, (len(x.slots), DRAFTS)) for y in (x.q, x.k, x.v))
        keys, values, start, accepted = x.rings
        return gla.recurrent_gla_replay(q, k, v, x.g, x.pool, keys, values, None, x.slots, start, accepted)

    def prefill(self, x: Batch) -> Tensor:
        return gla.chunk_gla_pool(x.q, x.k, x.v, x.g, x.pool, x.cu_seqlens, x.slots)

    mixed = prefill


class VllmLightning:
    """vLLM's functions of lightning_attn.py, and its loop over prefills, written anew.

    It reads the offsets on the host, copies q, k and v of a sequence, and launches four kernels on float32 tensors.
    Its functions take q that is scaled.
    """

    def __init__(self) -> None:
        self.module = importlib.import_module("vllm.model_executor.layers.lightning_attn")

    def decode(self, x: Batch) -> Tensor:
        q, k, v = (y[0, : x.decodes, :, None] for y in (x.q, x.k, x.v))  # [N, H, 1, 128]
        return self.module.linear_decode_forward_triton(q, k, v, x.pool, -x.g[:, None, None], x.slots[: x.decodes], 32)

    def prefill(self, x: Batch) -> Tensor:
        outputs = []
        for n in range(x.decodes, len(x.slots)):
            start, end, slot = x.cu_seqlens[n], x.cu_seqlens[n + 1], x.slots[n]
            # Copies [1, H, T, 128] in float32, the only dtype that the functions compile for
            rows = (y[0, start:end].transpose(0, 1) for y in (x.q, x.k, x.v))
            q, k, v = (y.new_empty(1, *y.shape, dtype=torch.float32).copy_(y) for y in rows)
            state = x.pool[slot]
            o, after = self.module.lightning_attention(q, k, v, -x.g, 256, state[None].contiguous())
            state.copy_(after[0, :, -1])
            outputs.append(o[0].transpose(0, 1).flatten(1).contiguous())
        return torch.cat(outputs)

    mixed = decodes_first


class SglangLightning:
    """SGLang's seg_la.py."""

    def __init__(self) -> None:
        self.module = importlib.import_module("sglang.kernels.ops.attention.linear.seg_la")

    def prefill(self, x: Batch) -> Tensor:
        lengths, N = x.cu_seqlens.diff(), len(x.slots)
        meta = self.module.SegLaMeta(N, 0, x.cu_seqlens, x.slots, lengths, torch.ones_like(lengths))
        return self.module.seg_la_fwd(x.q[0], x.k[0], x.v[0], x.pool, -x.g, meta)

    decode = prefill


# ---- Mamba-2


def mamba2_batch(
    device: torch.device,
    decodes: int,
    prefills: int = 0,
    tokens: int = 0,
    sizes: tuple[int, ...] = (1, 128, 128, 64),
) -> Batch:
    """Returns a batch as `lightning_batch` does; the layer has A, D, dt_bias, and the chunks of vLLM's scan."""
    x = _packed(device, decodes, prefills, tokens, sizes, v_first=True)
    Hv = sizes[2]
    A = -torch.linspace(1.0, 16.0, Hv, device=device)
    D, dt_bias = torch.ones(Hv, device=device), torch.linspace(-6.0, -2.0, Hv, device=device)
    D, dt_bias = D.to(x.v.dtype), dt_bias.to(x.v.dtype)
    ends = [n * tokens + min(end, tokens) for n in range(prefills) for end in range(CHUNK, tokens + CHUNK, CHUNK)]
    per_prefill = -(-tokens // CHUNK)
    numbers = torch.arange(prefills, device=device, dtype=torch.int32)
    chunks = {
        "cu_chunk_seqlens": torch.tensor([0, *ends], device=device, dtype=torch.int32),
        "last_chunk_indices": (numbers + 1) * per_prefill - 1,
        "seq_idx": numbers.repeat_interleave(per_prefill),
    }
    return x._replace(layer={**x.layer, "A": A, "D": D, "dt_bias": dt_bias, **chunks})


class OurMamba2:
    """gla_core, as gla_vllm's mamba2.py computes the layer."""

    def decode(self, x: Batch) -> Tensor:
        q, k, v, dt = (y[0, : x.decodes] for y in (x.q, x.k, x.v, x.g))
        layer: dict[str, Any] = {name: x.layer[name] for name in ("A", "D", "dt_bias")}
        options = {"slots": x.slots[: x.decodes], "scale": 1.0, "state_v_first": True}
        return gla.recurrent_ssd_step(q, k, v, x.pool, dt, dt_softplus=True, **layer, **options)

    def prefill(self, x: Batch) -> Tensor:
        q, k, v, dt, prompts, slots = x.prompts()
        dt = F.softplus(dt.float() + x.layer["dt_bias"].float())
        values = (v * dt[..., None]).to(v.dtype)
        g = dt * x.layer["A"]
        o = gla.chunk_gla_pool(q, k, values, g, x.pool, prompts, slots, scale=1.0, state_v_first=True)
        return o.copy_(o.float() + x.layer["D"].float()[:, None] * v)[0]

    mixed = decodes_first


def _step_arguments(x: Batch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Returns the arguments of `selective_state_update` of vLLM and FlashInfer: positional ones, and others by name."""
    q, k, v, dt = (y[0, : x.decodes] for y in (x.q, x.k, x.v, x.g))
    V, K = x.pool.shape[2:]
    A, D, dt_bias = (x.layer[name] for name in ("A", "D", "dt_bias"))
    wide = (v, dt[..., None].expand(-1, -1, V), A[:, None, None].expand(-1, V, K), k, q, D[:, None].expand(-1, V))
    named = {"dt_bias": dt_bias[:, None].expand(-1, V), "dt_softplus": True}
    return (x.pool, *wide), {**named, "state_batch_indices": x.slots[: x.decodes], "out": torch.empty_like(v)}


class VllmMamba2:
    """vLLM's Triton kernels, as its MambaMixer2 calls them."""

    def __init__(self) -> None:
        ops = "vllm.model_executor.layers.mamba.ops"
        self.scan = imported(f"{ops}.ssd_combined", "mamba_chunk_scan_combined_varlen")
        self.step = imported(f"{ops}.mamba_ssm", "selective_state_update")

    def decode(self, x: Batch) -> Tensor:
        arguments, named = _step_arguments(x)
        self.step(*arguments, **named)
        return named["out"]

    def prefill(self, x: Batch) -> Tensor:
        q, k, v, dt, prompts, slots = x.prompts()
        out = torch.empty_like(v[0])
        names = ("D", "dt_bias", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx")
        layer: dict[str, Any] = {name: x.layer[name] for name in names}
        states = self.scan(
            *(v[0], dt[0], x.layer["A"], k[0], q[0], CHUNK, prompts),
            **layer,
            out=out,
            initial_states=x.pool[slots],
            dt_softplus=True,
            state_dtype=x.pool.dtype,
        )
        x.pool[slots] = states
        return out

    mixed = decodes_first


class FlashinferMamba2:
    """FlashInfer's step. Its scan is for Blackwell alone."""

    def __init__(self) -> None:
        self.step = imported("flashinfer.mamba", "selective_state_update")

    def decode(self, x: Batch) -> Tensor:
        arguments, named = _step_arguments(x)
        return self.step(*arguments, **named)


# ---- gated delta rule


def gdn_batch(
    device: torch.device,
    decodes: int,
    prefills: int = 0,
    tokens: int = 0,
    sizes: tuple[int, ...] = (16, 128, 32, 128),
) -> Batch:
    """Returns a batch as `lightning_batch` does; the layer has logits a and b, A_log, dt_bias, beta and exp(g)."""
    x = _packed(device, decodes, prefills, tokens, sizes, v_first=True)
    q, k = (F.normalize(y.float(), dim=-1).to(y.dtype) for y in (x.q, x.k))
    A_log = torch.linspace(0.0, 2.8, sizes[2], device=device)
    dt_bias = torch.linspace(-6.0, -2.0, sizes[2], device=device)
    a, b = x.g, torch.randn_like(x.g)
    g, beta = -A_log.exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()
    n = decodes
    qkv = torch.cat([y[0, :n].flatten(1) for y in (q, k, x.v)], dim=1)
    layer = {"a": a[0, :n], "b": b[0, :n], "A_log": A_log, "dt_bias": dt_bias, "qkv": qkv}
    later = {"beta": beta[:, n:], "exp(g)": g[:, n:].exp()}
    return x._replace(q=q, k=k, g=g, layer={**x.layer, **layer, **later})


class OurGdn:
    """The ops of gla_core."""

    def decode(self, x: Batch) -> Tensor:
        q, k, v = (y[0, : x.decodes] for y in (x.q, x.k, x.v))
        a, b, A_log, dt_bias = (x.layer[name] for name in ("a", "b", "A_log", "dt_bias"))
        options: dict[str, Any] = {"slots": x.slots[: x.decodes], "inplace": True, "state_v_first": True}
        logits: dict[str, Any] = {"normalize": 1e-6, "gate": ("softplus", A_log, dt_bias), "beta_limit": 1.0}
        return gla.recurrent_delta_step(q, k, v, a, b, x.pool, **options, **logits)[0]

    def prefill(self, x: Batch) -> Tensor:
        q, k, v, g, prompts, slots = x.prompts()
        return gla.chunk_delta_pool(q, k, v, g, x.layer["beta"], x.pool, prompts, slots, state_v_first=True)[0]

    mixed = decodes_first


class VllmGdn:
    """vLLM's copy of FLA's kernels, as its Qwen3-Next layer calls them."""

    def __init__(self) -> None:
        ops = "vllm.third_party.flash_linear_attention.ops"
        self.chunks = imported(f"{ops}.chunk", "chunk_gated_delta_rule")
        self.packed = imported(f"{ops}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode")
        self.steps = imported(f"{ops}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update")
        index, size = importlib.import_module(f"{ops}.index"), imported(f"{ops}.utils", "FLA_CHUNK_SIZE")
        self.indices = functools.cache(lambda offsets: index.prepare_chunk_indices(offsets, size))
        self.offsets = functools.cache(lambda offsets: index.prepare_chunk_offsets(offsets, size))

    def decode(self, x: Batch) -> Tensor:
        out = torch.empty_like(x.v[0, : x.decodes, None])
        a, b, A_log, dt_bias, qkv = (x.layer[name] for name in ("a", "b", "A_log", "dt_bias", "qkv"))
        scale, slots = x.q.shape[-1] ** -0.5, x.slots[: x.decodes]
        self.packed(qkv, a, b, A_log, dt_bias, scale, x.pool, out, slots, use_qk_l2norm_in_kernel=True)
        return out[:, 0]

    def prefill(self, x: Batch) -> Tensor:
        q, k, v, g, prompts, slots = x.prompts()
        cut = {"chunk_indices": self.indices(prompts), "chunk_offsets": self.offsets(prompts)}
        options = {"initial_state": x.pool[slots], "output_final_state": True, "cu_seqlens": prompts, **cut}
        o, states = self.chunks(q, k, v, g, x.layer["beta"], **options)
        x.pool[slots] = states
        return o[0]

    def mixed(self, x: Batch) -> Tensor:
        q, k, v = (y[:, : x.decodes] for y in (x.q, x.k, x.v))
        a, b, A_log, dt_bias = (x.layer[name] for name in ("a", "b", "A_log", "dt_bias"))
        o, _ = self.steps(
            *(A_log, a, b, dt_bias, q, k, v),
            initial_state=x.pool,
            inplace_final_state=True,
            cu_seqlens=x.cu_seqlens[: x.decodes + 1],
            ssm_state_indices=x.slots[: x.decodes],
            use_qk_l2norm_in_kernel=True,
        )
        return torch.cat([o[0], self.prefill(x)])


class FlashinferGdn:
    """FlashInfer's functions over states in a pool. Its prefill takes exp(g), which is computed beforehand."""

    def __init__(self) -> None:
        self.chunks = imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
        self.step = imported("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")

    def decode(self, x: Batch) -> Tensor:
        q, k, v = (y[0, : x.decodes, None] for y in (x.q, x.k, x.v))
        a, b, A_log, dt_bias = (x.layer[name] for name in ("a", "b", "A_log", "dt_bias"))
        states = {"initial_state": x.pool, "initial_state_indices": x.slots[: x.decodes]}
        o, _ = self.step(q, k, v, None, A_log, a[:, None], dt_bias, b[:, None], **states, backend="flashinfer")
        return o[:, 0]

    def prefill(self, x: Batch) -> Tensor:
        q, k, v, _, _, slots = x.prompts()
        states: dict[str, Any] = {"initial_state": x.pool, "output_state": x.pool, "state_indices": slots}
        offsets = x.layer["prompts in int64"]
        tokens = (q[0], k[0], v[0], x.layer["exp(g)"][0], x.layer["beta"][0])
        o, _ = self.chunks(*tokens, output_final_state=True, cu_seqlens=offsets, backend="flashinfer", **states)
        return o

    mixed = decodes_first
