"""benchmarks/serving.py: batches, and the calls of ours and of other engines, whose functions are recurrences here."""

import functools
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error

CPU = torch.device("cpu")
SMALL = {"lightning": (2, 16, 2, 16), "Mamba-2": (1, 16, 4, 8), "GDN": (2, 16, 4, 16)}
V_FIRST = (-1, -2)


@pytest.fixture
def serving(script, monkeypatch):
    """The script with small heads, and with the functions below in the place of vLLM's, SGLang's and FlashInfer's."""
    loaded = script("serving")
    for name, layer in loaded.LAYERS.items():
        monkeypatch.setitem(
            loaded.LAYERS, name, layer._replace(batch=functools.partial(layer.batch, sizes=SMALL[name]))
        )
    monkeypatch.setitem(loaded.attempt.__globals__, "free_memory", lambda: None)  # collecting garbage takes long
    monkeypatch.setattr(loaded, "DECODES", (2,))
    monkeypatch.setattr(loaded, "PREFILLS", ((2, 70),))
    monkeypatch.setattr(loaded, "MIXED", ((3, 2, 70),))
    return loaded


@pytest.fixture
def engines(monkeypatch):
    """Modules of engines with functions that compute recurrences in float64."""
    mamba, fla = "vllm.model_executor.layers.mamba.ops", "vllm.third_party.flash_linear_attention.ops"
    functions = {
        "vllm.model_executor.layers.lightning_attn": (lightning_attention, linear_decode_forward_triton),
        "sglang.kernels.ops.attention.linear.seg_la": (SegLaMeta, seg_la_fwd),
        f"{mamba}.ssd_combined": (mamba_chunk_scan_combined_varlen,),
        f"{mamba}.mamba_ssm": (selective_state_update,),
        "flashinfer.mamba": (selective_state_update,),
        f"{fla}.chunk": (chunk_gated_delta_rule,),
        f"{fla}.fused_recurrent": (fused_recurrent_gated_delta_rule_packed_decode,),
        f"{fla}.fused_sigmoid_gating": (fused_sigmoid_gating_delta_rule_update,),
        f"{fla}.index": (prepare_chunk_indices, prepare_chunk_offsets),
        f"{fla}.utils": (),
        "flashinfer.gdn_prefill": (prefill_of_flashinfer,),
        "flashinfer.gdn_decode": (gated_delta_rule_decode_pretranspose,),
    }
    for name, made in functions.items():
        module = ModuleType(name)
        vars(module).update({function.__name__: function for function in made}, FLA_CHUNK_SIZE=64)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flashinfer.gdn_prefill"].chunk_gated_delta_rule = prefill_of_flashinfer


# ---- lightning attention


def lightning_attention(q, k, v, slopes, block, state):
    """Takes q, k, v [1, H, T, K] and the state [1, H, K, V]; returns outputs, and states of which the last counts."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, after = oracle.chunk_gla(q, k, v, -slopes, 1.0, state)
    return o.transpose(1, 2).to(v.dtype), after.float()[:, :, None]


def linear_decode_forward_triton(q, k, v, pool, slopes, slots, block):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [N, 1, H, K]
    o, after = oracle.chunk_gla(q, k, v, -slopes.flatten(), 1.0, pool[slots])
    pool[slots] = after.float()
    return o[:, 0].flatten(1).to(v.dtype)


class SegLaMeta:
    def __init__(self, batch_size, max_q_length, q_offsets, s_offsets, q_lengths, s_scales):
        self.offsets, self.slots = q_offsets, s_offsets


def seg_la_fwd(q, k, v, pool, slopes, meta):
    packed = (x[None] for x in (q, k, v))
    o, after = oracle.chunk_gla(*packed, -slopes, None, pool[meta.slots], cu_seqlens=meta.offsets)
    pool[meta.slots] = after.float()
    return o[0].to(v.dtype)


# ---- Mamba-2


def mamba_chunk_scan_combined_varlen(
    x, dt, A, B, C, chunk_size, cu_seqlens, *, cu_chunk_seqlens, last_chunk_indices, seq_idx, out, D, dt_bias, **options
):
    assert options["dt_softplus"]
    assert seq_idx.tolist() == [0, 1]  # a chunk of at most 256 tokens belongs to one sequence
    assert cu_chunk_seqlens[last_chunk_indices + 1].tolist() == cu_seqlens[1:].tolist()
    dt = F.softplus(dt.double() + dt_bias.double())
    states = options["initial_states"].transpose(*V_FIRST)
    tokens = (C[None].double(), B[None].double(), (x * dt[..., None])[None], (dt * A)[None])
    o, after = oracle.chunk_gla(*tokens, 1.0, states, cu_seqlens=cu_seqlens)
    out.copy_(o[0] + D.double()[:, None] * x)
    return after.transpose(*V_FIRST).float()


def selective_state_update(state, x, dt, A, B, C, D, *, dt_bias, dt_softplus, state_batch_indices, out):
    assert dt_softplus
    dt = F.softplus(dt.double() + dt_bias.double())[..., :1]  # [N, H, 1]
    S = state[state_batch_indices].double() * torch.exp(dt * A[..., 0])[..., None]
    S = S + (dt * x)[..., None] * B[:, :, None]  # one group
    state[state_batch_indices] = S.float()
    return out.copy_((S * C[:, :, None]).sum(-1) + D * x)


# ---- gated delta rule


def chunk_gated_delta_rule(q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens, **cut):
    assert (cut["chunk_indices"], cut["chunk_offsets"]) == ("indices of 64", "offsets of 64")
    states = initial_state.transpose(*V_FIRST)
    o, after = oracle.chunk_delta(q, k, v, g, beta, None, states, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), after.transpose(*V_FIRST).float()


def prepare_chunk_indices(offsets, size):
    return f"indices of {size}"


def prepare_chunk_offsets(offsets, size):
    return f"offsets of {size}"


def fused_recurrent_gated_delta_rule_packed_decode(
    qkv, a, b, A_log, dt_bias, scale, pool, out, slots, use_qk_l2norm_in_kernel
):
    Hv, V, K = pool.shape[1:]
    q, k, v = qkv.split([2 * K, 2 * K, Hv * V], dim=1)  # two key heads
    q, k, v = (x.unflatten(1, (-1, width)) for x, width in ((q, K), (k, K), (v, V)))
    assert use_qk_l2norm_in_kernel
    assert scale == K**-0.5
    out[:, 0] = _delta_step(q, k, v, a, b, A_log, dt_bias, pool, slots)


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, b, dt_bias, q, k, v, *, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, **options
):
    assert cu_seqlens.tolist() == list(range(len(ssm_state_indices) + 1))
    assert inplace_final_state
    assert options == {"use_qk_l2norm_in_kernel": True}
    return _delta_step(q[0], k[0], v[0], a, b, A_log, dt_bias, initial_state, ssm_state_indices)[None], None


def prefill_of_flashinfer(q, k, v, alpha, beta, *, initial_state, output_state, state_indices, cu_seqlens, **options):
    assert options == {"output_final_state": True, "backend": "flashinfer"}
    packed = [x[None] for x in (q, k, v, alpha.log(), beta)]
    states = initial_state[state_indices].transpose(*V_FIRST)
    o, after = oracle.chunk_delta(*packed, None, states, cu_seqlens=cu_seqlens)
    output_state[state_indices] = after.transpose(*V_FIRST).float()
    return o[0].to(v.dtype), output_state


def gated_delta_rule_decode_pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, *, initial_state, initial_state_indices, backend
):
    assert state is None
    tokens = (x[:, 0] for x in (q, k, v, a, b))
    return _delta_step(*tokens, A_log, dt_bias, initial_state, initial_state_indices)[:, None], initial_state


def _delta_step(q, k, v, a, b, A_log, dt_bias, pool, slots):
    g, beta = -A_log.double().exp() * F.softplus(a.double() + dt_bias), b.double().sigmoid()
    q, k = (F.normalize(x.double(), dim=-1) for x in (q, k))
    tokens = (x[:, None] for x in (q, k, v.double(), g, beta))
    o, after = oracle.chunk_delta(*tokens, None, pool[slots].transpose(*V_FIRST))
    pool[slots] = after.transpose(*V_FIRST).float()
    return o[:, 0].to(v.dtype)


# ---- tests


@pytest.mark.parametrize("layer", SMALL)
def test_engines_compute_what_ours_compute(serving, engines, layer):
    for what, _, make in serving.batches(layer, CPU):
        outputs, pools = {}, {}
        for who, engine in serving.LAYERS[layer].engines.items():
            if hasattr(engine, what):
                torch.manual_seed(0)
                x = make()
                o = getattr(engine(), what)(x)
                outputs[who], pools[who] = F.normalize(o.double().flatten(), dim=0), x.pool
        for who, o in outputs.items():
            assert relative_error(o, outputs["gla-core"]) < 1e-2, (what, who)
            assert relative_error(pools[who], pools["gla-core"]) < 5e-3, (what, who)  # Mamba-2's dt x is rounded


def test_a_mixed_batch_has_decodes_first(serving):
    x = serving.LAYERS["GDN"].batch(CPU, 3, 2, 70)
    assert x.cu_seqlens.tolist() == [0, 1, 2, 3, 73, 143]
    q, _, _, g, offsets, slots = x.prompts()
    assert q.shape[1] == g.shape[1] == 140
    assert (offsets.tolist(), slots.tolist()) == ([0, 70, 140], [4, 5])


def test_verification_counts_the_state_that_is_read_once(serving):
    layers, sizes = serving.layers, SMALL["lightning"]
    ours, drafts = layers.OurLightning(), serving.DRAFTS
    x = layers.lightning_batch(CPU, 4 * drafts, sizes=sizes)
    state, token = 2 * 16 * 16 * 4, 2 * 16 * 2
    assert serving.floor_bytes("verify", x) == 16 * (4 * token + state) + 4 * state
    assert serving.floor_bytes("decode", x) == 16 * (4 * token + 2 * state)
    y = layers.drafts(CPU, 4, sizes)._replace(q=x.q, k=x.k, v=x.v)
    y.pool.zero_()  # from states and rings of 0
    x.pool.zero_()
    assert ours.verify(x).shape == (4, drafts, 2, 16)
    x.pool.zero_()
    torch.testing.assert_close(ours.replay(y), ours.verify(x))
    assert serving.floor_bytes("replay", y) == 16 * 4 * token + 8 * state


def measured(serving, monkeypatch, call):
    """Returns what is measured of a call, by engine, in a time that is made up."""
    monkeypatch.setattr(serving, "measured", lambda what, make, run, device: serving.measure.Timing(1e-3, 1, 0.0))
    return {job.rows[0][1]: job.measure()[0] for job in serving.jobs(CPU, 4e9) if job.rows[0][0] == call}


def test_every_engine_has_a_row(serving, monkeypatch):
    whos, bases = {}, {}
    for job in serving.jobs(CPU, 4e9):
        ((call, who, base),) = job.rows
        whos.setdefault(call, []).append(who)
        bases.setdefault(call, []).append(base)
    assert whos == {
        "lightning, decode: 2 sequences": ["vllm", "sglang", "gla-core"],
        "lightning, verify: 2 sequences": ["gla-core"],
        "lightning, replay: 2 sequences": ["gla-core"],
        "lightning, prefill: 2 sequences, 70 tokens": ["vllm", "sglang", "gla-core"],
        "lightning, mixed: 3 decodes, 2 sequences, 70 tokens": ["vllm", "gla-core"],
        "Mamba-2, decode: 2 sequences": ["vllm", "flashinfer", "gla-core"],
        "Mamba-2, prefill: 2 sequences, 70 tokens": ["vllm", "gla-core"],
        "Mamba-2, mixed: 3 decodes, 2 sequences, 70 tokens": ["vllm", "gla-core"],
        "GDN, decode: 2 sequences": ["vllm", "flashinfer", "gla-core"],
        "GDN, prefill: 2 sequences, 70 tokens": ["vllm", "flashinfer", "gla-core"],
        "GDN, mixed: 3 decodes, 2 sequences, 70 tokens": ["vllm", "flashinfer", "gla-core"],
    }
    assert bases["GDN, decode: 2 sequences"] == [None, "vllm", "vllm"]
    rows = measured(serving, monkeypatch, "GDN, decode: 2 sequences")
    assert rows["vllm"]["error"] == "ModuleNotFoundError: No module named 'vllm'"
    assert "flashinfer" in rows["flashinfer"]["error"]
    assert rows["gla-core"]["seconds"] == 1e-3


def test_facts_say_how_far_an_engine_is_from_ours(serving, engines, monkeypatch):
    rows = measured(serving, monkeypatch, "GDN, decode: 2 sequences")
    assert rows["vllm"]["facts"]["apart"] < 1e-2
    assert list(rows["gla-core"]["facts"]) == ["of floor"]
    monkeypatch.setattr(gla, "recurrent_delta_step", lambda q, k, v, *rest, **options: (2 - v,))
    assert measured(serving, monkeypatch, "GDN, decode: 2 sequences")["vllm"]["facts"]["apart"] > 0.5


def test_shares_run_every_call_of_each_engine_once(serving, monkeypatch):
    ran = []
    monkeypatch.setattr(serving.measure, "synchronize", lambda device: None)
    for layer in serving.LAYERS.values():
        for engine in set(layer.engines.values()):
            for what in {"decode", "verify", "replay", "prefill", "mixed"} & set(dir(engine)):
                monkeypatch.setattr(engine, what, lambda self, x, call=(engine, what): ran.append(call))
            monkeypatch.setattr(engine, "__init__", lambda self: None)
    for share in range(3):
        serving.compile_share(share, 3, CPU)
    rows = [row for job in serving.jobs(CPU, 4e9) for row in job.rows]
    assert len(ran) == len(set(ran)) == len(rows)
