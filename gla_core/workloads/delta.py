"""Workloads of delta rules: the small ones of gated linear attention, and calls of models."""

import torch

from gla_core.workloads import gla
from gla_core.workloads.rows import IN_BFLOAT16, Row, cut, row


def _small(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Returns the small workloads of an op of GLA, with groups of values where those have groups of queries.

    A delta rule has no bonus.
    """
    return tuple(
        Row(name.replace("queries", "values"), tags, {"R" if n == "G" else n: size for n, size in sizes.items()})
        for name, tags, sizes in rows
        if tags & {"ci", "odd", "packed", "extreme", "narrow"} and "bonus" not in sizes
    )


# fmt: off
CHUNK_DELTA = (
    *_small(gla.CHUNK_GLA),
    row("wide_values", "odd", "B1 T130 H1 R2 K96 V192", gate_form="head", initial_state=True),
    row("model_512", "train", "B1 T512 H4 K128 V128", **IN_BFLOAT16),
    row("train_b8_t4096_h16", "train", "B8 T4096 H16 K128 V128", **IN_BFLOAT16),
    row("train_b8_t4096_h16_per_head", "train", "B8 T4096 H16 K128 V128", gate_form="head", **IN_BFLOAT16),
    row("train_b8_t4096_h16_r2_per_head", "train", "B8 T4096 H16 R2 K128 V128", gate_form="head", **IN_BFLOAT16),
    row("olmo_hybrid_7b", "train", "B4 T4096 H30 K96 V192", gate_form="head", **IN_BFLOAT16),
    row("prefill_b1_t8192_h32", "prefill", "B1 T8192 H32 K128 V128", **IN_BFLOAT16),
    row("packed_16_t8192_h32", "prefill", "H32 K128 V128", lengths=cut(8192, 16), **IN_BFLOAT16),
)
_FOR_SUMMARIES = tuple(
    x for x in gla.CHUNK_GLA_SUMMARY
    if x.name in ("short", "no_token", "last_chunk_partial", "odd_widths", "width_one", "ungated", "minus_infinity",
                  "packed", "padded", "per_head", "per_head_padded", "constant_packed", "grouped_values",
                  "many_sequences")
)
CHUNK_DELTA_SUMMARY = _small(_FOR_SUMMARIES)
CHUNK_DELTA_GRADIENT_SUMMARY = _small(_FOR_SUMMARIES)
CHUNK_DELTA_POOL = (
    *_small(gla.CHUNK_GLA_POOL),
    *(
        row(f"prefill_{N}_t{T}_h32", "prefill", "H32 K128 V128", lengths=(T // N,) * N, pool=4 * N,
            read_slots=tuple(range(N)), has_state=(False,) * N, **IN_BFLOAT16)
        for N, T in ((1, 512), (16, 8192))
    ),
)
RECURRENT_DELTA_STEP = (
    *_small(gla.RECURRENT_GLA_STEP),
    *(row(f"decode_b{B}", "decode", "H16 K128 V128", B=B, **IN_BFLOAT16) for B in (1, 64, 1024)),
    row("decode_b64_per_head", "decode", "B64 H16 R2 K128 V128", gate_form="head", **IN_BFLOAT16),
)
RECURRENT_DELTA_STEPS = (
    *_small(gla.RECURRENT_GLA_STEPS),
    row("verify_b64_h16", "decode", "B64 T8 H16 K128 V128", pool=512, num_accepted=(8,) * 64,
        slots=tuple(tuple(range(8 * n, 8 * n + 8)) for n in range(64)), **IN_BFLOAT16),
)
RECURRENT_DELTA_REPLAY = (
    *_small(gla.RECURRENT_GLA_REPLAY),
    row("verify_b64_h16", "decode", "B64 T8 H16 K128 V128 L16", pool=64, slots=tuple(range(64)),
        ring_start=(6,) * 64, num_accepted=(4,) * 64, ring_dtype=torch.float32, **IN_BFLOAT16),
)
# fmt: on
TABLES = {
    "chunk_delta": CHUNK_DELTA,
    "chunk_delta_pool": CHUNK_DELTA_POOL,
    "chunk_delta_summary": CHUNK_DELTA_SUMMARY,
    "chunk_delta_gradient_summary": CHUNK_DELTA_GRADIENT_SUMMARY,
    "recurrent_delta_step": RECURRENT_DELTA_STEP,
    "recurrent_delta_steps": RECURRENT_DELTA_STEPS,
    "recurrent_delta_replay": RECURRENT_DELTA_REPLAY,
}
