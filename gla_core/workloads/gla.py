"""Workloads of gated linear attention and of Mamba-2. A workload is a row of its op's table, on a line or two."""

import torch

from gla_core.workloads.rows import IN_BFLOAT16, cut, row

# fmt: off
CHUNK_GLA = (
    row("short", "ci", "B2 T17 H2 K16 V16", initial_state=True),
    row("one_token", "ci odd", "B1 T1 H1 K16 V16"),
    row("no_token", "ci odd", "B2 T0 H2 K16 V16", initial_state=True),
    row("one_chunk", "ci", "B2 T64 H2 K32 V32"),
    row("one_more_than_a_chunk", "ci odd", "B1 T65 H2 K32 V16"),
    row("last_chunk_partial", "ci odd", "B2 T203 H1 K32 V32", initial_state=True),
    row("odd_widths", "ci odd", "B1 T77 H3 K19 V37", initial_state=True),
    row("width_one", "ci odd", "B1 T70 H1 K1 V1"),
    row("wide", "odd", "B1 T130 H1 K256 V200"),
    row("grouped", "ci", "B2 T100 H2 G3 K16 V32", initial_state=True),
    row("ungated", "ci", "B1 T150 H2 K32 V32", gates="none", initial_state=True),
    row("strong", "ci", "B1 T150 H2 K32 V32", gates="strong", initial_state=True),
    row("extreme", "ci extreme", "B1 T150 H1 K64 V64", gates="extreme", initial_state=True),
    row("minus_infinity", "ci extreme", "B1 T150 H1 K64 V64", gates="-inf", initial_state=True),
    row("packed", "ci packed odd", "H2 K16 V16", lengths=(0, 65, 1, 0, 130, 3, 0), initial_state=True),
    row("padded", "packed odd", "H2 K16 V16", lengths=(20, 0, 66), leading=9, padding=40, initial_state=True),
    row("packed_grouped", "ci packed", "H2 G2 K40 V40", lengths=(40, 64, 90), gates="-inf"),
    row("per_head", "ci", "B2 T150 H2 K32 V32", gate_form="head", initial_state=True),
    row("per_head_closed", "ci extreme", "B1 T150 H2 K32 V32", gate_form="head", gates="-inf"),
    row("per_head_grouped", "ci odd packed", "H1 R3 K19 V37", lengths=(0, 65, 1, 130), gate_form="head",
        gates="extreme", initial_state=True),
    # of several heads: the gradient of one constant gate is one number, and errors are relative
    row("constant", "ci", "B2 T70 H8 G2 K16 V16", gate_form="constant", gates="strong", initial_state=True),
    row("per_head_padded", "packed odd", "H1 R2 K16 V16", lengths=(20, 0, 66), padding=40, gate_form="head",
        initial_state=True),
    row("constant_packed", "packed", "H2 R4 K16 V32", lengths=(40, 64, 90), padding=30, gate_form="constant"),
    row("grouped_values", "ci", "B2 T100 H2 R3 K16 V32", initial_state=True),
    row("many_sequences", "packed odd", "H2 R2 K16 V16", lengths=(3, 0, 1, 5) * 5, leading=3, padding=2, gates="none",
        initial_state=True),
    row("ungated_queries", "odd", "B2 T70 H1 G3 K16 V16", gates="none", initial_state=True),
    row("per_head_queries", "odd", "B2 T70 H1 G3 K16 V16", gate_form="head", initial_state=True),
    row("narrow_mild", "narrow", "B1 T2600 H1 K8 V8", initial_state=True),
    row("narrow_strong", "narrow", "B1 T2600 H1 K8 V8", gates="strong", initial_state=True),
    row("narrow_per_head", "narrow", "B1 T2600 H1 K8 V8", gate_form="head", initial_state=True),
    row("model_512", "train", "B1 T512 H4 K128 V128", **IN_BFLOAT16),
    row("train_b8_t4096_h16", "train", "B8 T4096 H16 K128 V128", **IN_BFLOAT16),
    row("train_b8_t4096_h16_per_head", "train", "B8 T4096 H16 K128 V128", gate_form="head", **IN_BFLOAT16),
    row("train_b8_t4096_h16_constant", "train", "B8 T4096 H16 K128 V128", gate_form="constant", **IN_BFLOAT16),
    row("granite_4_small", "train", "B4 T8192 H1 R128 K128 V64", gate_form="head", **IN_BFLOAT16),
    row("train_b16_t4096_h16", "train", "B16 T4096 H16 K128 V128", **IN_BFLOAT16),
    row("train_b32_t2048_h4_k256_v512", "train", "B32 T2048 H4 K256 V512", **IN_BFLOAT16),
    row("train_b16_t1024_h8", "train", "B16 T1024 H8 K128 V128", **IN_BFLOAT16),
    row("train_b4_t2048_h16_k64_v64", "train", "B4 T2048 H16 K64 V64", **IN_BFLOAT16),
    row("prefill_b1_t8192_h16", "prefill", "B1 T8192 H16 K128 V128", **IN_BFLOAT16),
    row("prefill_b2_t2048_h8", "prefill", "B2 T2048 H8 K128 V128", **IN_BFLOAT16),
    row("long_b1_t65536_h8", "prefill long", "B1 T65536 H8 K128 V128", **IN_BFLOAT16),
    row("packed_64_t65536_h8", "prefill", "H8 K128 V128", lengths=cut(65536, 64), **IN_BFLOAT16),
    *(
        row(f"train_b8_t4096_h16_{str(dtype).removeprefix('torch.')}", "timed_only", "B8 T4096 H16 K128 V128",
            dtype=dtype, gate_dtype=torch.float32)
        for dtype in (torch.float16, torch.float32)
    ),
    *(
        row(f"{name}_per_head", "timed_only", "H8 K128 V128", **sizes, gate_form="head", **IN_BFLOAT16)
        for name, sizes in (
            ("long_b1_t65536_h8", {"B": 1, "T": 65536}),
            ("packed_64_t65536_h8", {"lengths": cut(65536, 64)}),
        )
    ),
)
CHUNK_GLA_SUMMARY = tuple(x for x in CHUNK_GLA if "G" not in x.sizes)  # the op has no grouped queries
CHUNK_GLA_POOL = (
    row("small", "ci packed", "H2 K16 V16", lengths=(17, 40), pool=5, read_slots=(3, 0)),
    row("scattered_slots", "ci packed", "H2 K16 V16", lengths=(17, 70, 5), pool=8, read_slots=(3, -1, 2),
        write_slots=(1, 4, -1), has_state=(True, True, False)),
    row("checkpoints", "ci packed", "H2 K16 V16", lengths=(130, 64, 0, 70), pool=9, read_slots=(8, 1, 2, 3),
        pad_slot=0, checkpoint_offsets=(128, 64, 64, 64), checkpoint_slots=(4, 5, 6, 7)),
    row("padded", "ci packed odd", "H2 K16 V16", lengths=(20, 0, 66, 0, 0), leading=5, padding=30, pool=7,
        read_slots=(2, 5, 6, 0, 0), pad_slot=0),
    row("constant", "ci", "H2 G2 K19 V16", lengths=(33, 20), gate_form="constant", gates="strong", pool=4,
        read_slots=(3, 1)),
    row("grouped", "ci", "H2 G3 K16 V32", lengths=(33, 20), pool=4, read_slots=(1, 3), page=13),
    row("per_head", "ci", "H1 R3 K16 V16", lengths=(33, 70), gate_form="head", gates="-inf", pool=4,
        pool_dtype=torch.float16, read_slots=(3, 1)),
    row("odd_widths", "ci odd", "H1 R3 K19 V37", lengths=(30, 1), gates="extreme", pool=3, page=1, read_slots=(2, 0),
        has_state=(False, True)),
    row("ungated", "ci", "H2 G2 K16 V32", lengths=(40, 25), gates="none", pool=4, pool_dtype=torch.bfloat16,
        read_slots=(0, 1), write_slots=(2, 1)),
    row("no_token", "ci odd", "H2 K16 V16", lengths=(0, 0), pool=5, read_slots=(1, 2), write_slots=(0, 3),
        has_state=(True, False)),
    row("empty_batch", "ci odd", "H2 K16 V16", lengths=(), pool=3, read_slots=()),
    row("many_sequences", "packed odd", "H2 R2 K16 V16", lengths=(3, 0, 1, 5) * 4 + (70, 0, 1, 5), gates="none",
        pool=60, read_slots=tuple(range(20)), write_slots=tuple(range(39, 19, -1)),
        has_state=(True, True, False) * 6 + (True, True), checkpoint_offsets=(0,) * 16 + (64, 0, 0, 0),
        checkpoint_slots=tuple(range(40, 60)), pad_slot=21),
    row("constant_values", "packed odd", "H1 R3 K16 V16", lengths=(70, 5), gate_form="constant", gates="strong",
        pool=7, read_slots=(5, 1), write_slots=(2, 3), has_state=(True, False), checkpoint_offsets=(64, 0),
        checkpoint_slots=(4, 0), pad_slot=0),
    row("per_head_queries", "packed odd", "H1 G3 K16 V16", lengths=(5, 70), gate_form="head", pool=7,
        read_slots=(5, 1), write_slots=(2, 3), has_state=(False, True), checkpoint_offsets=(0, 64),
        checkpoint_slots=(0, 6), pad_slot=4),
    row("narrow", "narrow", "H1 K8 V8", lengths=(2000, 600), pool=3, read_slots=(2, 0)),
    *(
        row(f"prefill_{N}_t{T}_h64", "prefill", "H64 K128 V128", lengths=(T // N,) * N, pool=4 * N,
            read_slots=tuple(range(N)), has_state=(False,) * N, **IN_BFLOAT16)
        for N, T in ((1, 512), (1, 8192), (16, 8192))
    ),
)
CHUNK_SSD = (
    # of several heads, as constant gates are: the gradients of A and dt_bias are a number a head
    row("short", "ci", "B2 T17 H8 K16 V16", dt_softplus=True, without=("z",), initial_state=True),
    row("no_token", "ci odd", "B2 T0 H2 R4 K16 V16", dt_softplus=True, without=("z",), initial_state=True),
    row("last_chunk_partial", "ci odd", "B2 T203 H1 R8 K32 V16", dt_softplus=True, weight_dtype=torch.float32,
        without=("z",), initial_state=True),
    row("odd_widths", "ci odd", "B1 T77 H3 R3 K19 V37", dt_softplus=True, dt_min=0.3, dt_max=0.9,
        without=("z",)),
    row("grouped", "odd", "B2 T100 H4 R2 K16 V32", without=("D", "z"), initial_state=True),
    row("without_bias", "odd", "B1 T70 H8 K16 V16", dt_softplus=True, dt_max=1.0, D_form="channel",
        without=("dt_bias", "z")),
    row("extreme", "ci extreme", "B1 T150 H1 R8 K16 V16", rate=100.0, dt_softplus=True, without=("z",),
        initial_state=True),
    row("packed", "ci packed odd", "H2 R4 K16 V16", lengths=(0, 65, 1, 130, 3, 0), dt_softplus=True,
        dt_min=0.2, dt_max=1.5, without=("z",), initial_state=True),
    row("many_sequences", "packed odd", "H2 R4 K16 V16", lengths=(3, 0, 1, 5) * 5, leading=3, padding=2,
        without=("z",)),
    row("padded", "packed odd", "H8 K16 V16", lengths=(20, 0, 66), leading=9, padding=40, dt_softplus=True,
        D_form="channel", without=("z",), initial_state=True),
    row("gated", "ci", "B2 T203 H1 R8 K32 V16", dt_softplus=True, initial_state=True),
    row("gated_padded", "packed odd", "H2 R8 K16 V16", lengths=(20, 0, 130, 66), leading=9, padding=40,
        dt_softplus=True, D_form="channel", initial_state=True),
    row("gated_alone", "odd", "B1 T230 H3 R3 K24 V40", dt_softplus=True, dt_min=0.3, dt_max=0.9,
        without=("D", "dt_bias")),
    row("narrow_mild", "narrow", "B1 T2600 H1 K8 V8", dt_softplus=True, without=("z",), initial_state=True),
    row("mamba2_b2_t4096", "train", "B2 T4096 H1 R48 K128 V64", dt_softplus=True, weight_dtype=torch.float32,
        without=("z",), dtype=torch.bfloat16),
)
RECURRENT_GLA_STEP = (
    row("small", "ci", "B3 H2 K16 V16"),
    row("odd_widths", "ci odd", "B2 H1 R3 K19 V37", gates="extreme"),
    row("grouped", "ci", "B2 H2 G4 K32 V16", gates="-inf"),
    row("ungated", "ci", "B2 H2 G2 K16 V32", gates="none"),
    row("pool", "ci packed", "B4 H2 K16 V16", rows=(5, -1, 0, 2), pool=6),
    row("per_head", "ci", "B3 H2 R3 K16 V16", gate_form="head", gates="-inf"),
    row("constant", "ci", "B2 H2 G2 K19 V16", gate_form="constant", rows=(3, 0), pool=4),
    row("ungated_values", "odd", "B2 H2 R2 K16 V16", gates="none", rows=(3, 0), pool=4),
    row("constant_values", "odd", "B2 H1 R3 K16 V16", gate_form="constant", rows=(1, 2), pool=4),
    row("per_head_queries", "odd", "B2 H1 G3 K16 V16", gate_form="head", rows=(2, -1), pool=4),
    row("bonus", "ci", "B3 H2 G2 K16 V16", bonus=True),
    *(
        row(name, "odd", "B3 H2 K19 V37", rows=(3, -1, 0), pool=4, bonus=True, weight_dtype=torch.float32, **sizes)
        for name, sizes in (
            ("bonus_values", {"R": 3, "gate_form": "head", "gates": "-inf"}),
            ("bonus_constant", {"G": 3, "gate_form": "constant"}),
            ("bonus_ungated", {"gates": "none"}),
        )
    ),
    row("empty_batch", "ci odd", "B0 H2 K16 V16"),
    *(
        row(f"decode_b{B}", "decode", "H16 K128 V128", B=B, **IN_BFLOAT16)
        for B in (1, 8, 64, 256, 1024)
    ),
    row("decode_b64_per_head", "decode", "B64 H16 K128 V128", gate_form="head", **IN_BFLOAT16),
    row("decode_b64_bonus", "decode", "B64 H64 K64 V64", bonus=True, **IN_BFLOAT16),
)
RECURRENT_GLA_LAYER_STEP = (
    row("small", "ci", "B3 H2 K16 V16"),
    row("odd_widths", "ci odd", "B2 H1 R3 K19 V37", gates="extreme", weight_dtype=torch.float32),
    row("grouped", "ci", "B2 H2 G4 K32 V16", gates="-inf", activation="sigmoid", norm_eps=0.1),
    row("ungated", "ci", "B2 H2 G2 K16 V32", gates="none"),
    row("pool", "ci packed", "B4 H2 K16 V16", rows=(5, -1, 0, 2), pool=6, without=("norm_weight",)),
    row("per_head", "ci", "B3 H2 R3 K16 V16", gate_form="head", gates="-inf"),
    row("constant", "ci", "B2 H2 G2 K19 V16", gate_form="constant", rows=(3, 0), pool=4, without=("output_gate",)),
    *(
        row(name, "odd", "B2 H1 K16 V16", rows=(3, 1), pool=4, activation="sigmoid", norm_eps=0.1, **sizes)
        for name, sizes in (
            ("ungated_values", {"R": 3, "gates": "none"}),
            ("constant_values", {"R": 2, "gate_form": "constant"}),
            ("per_head_queries", {"G": 3, "gate_form": "head"}),
        )
    ),
    row("empty_batch", "ci odd", "B0 H2 K16 V16"),
    *(
        row(f"decode_b{B}", "decode", "H4 K128 V256", B=B, **IN_BFLOAT16)
        for B in (1, 64, 256)
    ),
)
RECURRENT_SSD_STEP = (
    row("small", "ci", "B3 H2 K16 V16", dt_softplus=True),
    row("odd_widths", "ci odd", "B2 H1 R3 K19 V37", dt_softplus=True, A_is_log=True, other_dtype=torch.float32),
    row("grouped_values", "ci", "B2 H2 R2 K32 V16", dt_softplus=True),
    row("pool", "ci packed", "B4 H2 R2 K16 V16", rows=(5, -1, 0, 2), pool=6),
    row("plain", "ci", "B2 H2 K19 V16", rows=(3, 0), pool=4, dt_softplus=True, A_is_log=True,
        without=("dt_bias", "D", "z")),
    row("empty_batch", "ci odd", "B0 H2 K16 V16"),
    *(
        row(f"{model}_b{B}", "decode", sizes, B=B, dt_softplus=True, without=("z",), other_dtype=torch.float32,
            **IN_BFLOAT16)
        for model, sizes in (("granite_4_small", "H1 R128 K128 V64"), ("zamba2_7b", "H2 R56 K64 V64"))
        for B in (1, 64, 256)
    ),
)
RECURRENT_GLA_STEPS = (
    row("small", "ci", "B2 T3 H2 K16 V16", pool=8, slots=((3, 0, 5), (6, 2, 1))),
    row("accepted", "ci", "B4 T3 H2 K16 V16", pool=14, slots=((3, 0, 5), (6, 2, 1), (7, 8, 9), (10, 11, 12)),
        num_accepted=(3, 2, 0, 9)),
    row("packed", "ci packed", "H2 K16 V16", lengths=(1, 4, 0, 2), leading=2, padding=3, pool=18,
        slots=((3, 0, 5, 6), (1, 2, 4, 7), (8, 9, 10, 11), (12, 13, 14, 15)), num_accepted=(1, 4, 2, 3), pad_slot=17),
    row("scattered_slots", "ci packed", "H2 K16 V16", lengths=(2, 2, 1), pool=9, slots=((3, 0), (1, -1), (7, 8)),
        read_slots=(5, 4, -1), has_state=(True, True, False)),
    row("grouped", "ci", "B3 T2 H2 G3 K16 V32", pool=7, page=13, slots=((1, 3), (0, 2), (6, 5))),
    row("per_head", "ci", "B2 T2 H1 R3 K16 V16", gate_form="head", gates="-inf", pool=5, pool_dtype=torch.float16,
        slots=((3, 1), (0, 4))),
    row("constant", "ci", "B2 T4 H2 G2 K19 V16", gate_form="constant", gates="strong", pool=9,
        slots=((3, 1, 2, 4), (0, 5, 8, 7))),
    row("odd_widths", "ci odd", "B2 T8 H1 R3 K19 V37", gates="extreme", pool=17, page=1,
        slots=(tuple(range(8)), tuple(range(8, 16))), has_state=(False, True)),
    row("ungated", "ci", "B2 T2 H2 G2 K16 V32", gates="none", pool=5, pool_dtype=torch.bfloat16,
        slots=((3, 1), (0, 4))),
    row("one_token", "ci", "B3 T1 H2 K16 V16", pool=6, slots=((3,), (-1,), (0,)), read_slots=(1, -1, 0)),
    row("many_sequences", "packed odd", "H2 R2 K16 V16", lengths=(1, 2, 0, 2) * 5, gates="none", pool=61,
        slots=tuple((n, 20 + n) for n in range(20)), num_accepted=(2, 1) * 10, read_slots=tuple(range(59, 39, -1)),
        has_state=(True, True, False) * 6 + (True, True), pad_slot=60),
    *(
        row(name, "packed odd", "H1 K16 V16", lengths=(2, 1), pool=7, slots=((3, 0), (1, 5)), num_accepted=(2, 1),
            read_slots=(4, 2), has_state=(True, False), pad_slot=6, **sizes)
        for name, sizes in (
            ("constant_values", {"R": 3, "gate_form": "constant", "gates": "strong"}),
            ("per_head_queries", {"G": 3, "gate_form": "head"}),
        )
    ),
    row("empty_batch", "ci odd", "H2 K16 V16", lengths=(), padding=2, pool=3, slots=()),
    *(
        row(f"verify_b{B}_h64", "decode", "T4 H64 K128 V128", B=B, pool=4 * B,
            slots=tuple(tuple(range(4 * n, 4 * n + 4)) for n in range(B)), num_accepted=(4,) * B, **IN_BFLOAT16)
        for B in (1, 16, 64)
    ),
)
RECURRENT_GLA_REPLAY = (
    row("small", "ci", "B2 T3 H2 K16 V16 L6", pool=4, slots=(3, 0), ring_start=(4, 1), num_accepted=(3, 0)),
    row("ungated", "ci packed", "H2 G2 K16 V32 L4", lengths=(2, 0, 1), padding=1, gates="none", pool=4,
        pool_dtype=torch.bfloat16, slots=(2, 0, 1), ring_start=(3, 1, 0), num_accepted=(2, 1, 0),
        has_state=(True, True, False), pad_slot=3),
    row("packed", "ci packed", "H2 K16 V16 L9", lengths=(1, 4, 0, 2), leading=2, padding=3, pool=7, slots=(5, 0, 4, 1),
        ring_start=(8, 0, 3, 7), num_accepted=(1, 0, 4, 3), has_state=(True, False, True, False), pad_slot=3),
    row("constant", "ci", "B2 T4 H2 G2 K19 V16 L8", gate_form="constant", gates="strong", pool=3,
        ring_dtype=torch.float32, slots=(2, 0), ring_start=(5, 0), num_accepted=(4, 2)),
    row("per_head", "ci", "B2 T2 H1 R3 K16 V16 L5", gate_form="head", gates="-inf", pool=3, pool_dtype=torch.float16,
        slots=(2, 1), ring_start=(4, 2), num_accepted=(2, 1)),
    row("odd_widths", "ci odd", "B2 T8 H1 R3 K19 V37 L16", gates="extreme", pool=3, page=1, slots=(1, 2),
        ring_start=(0, 15), num_accepted=(8, 3), has_state=(False, True)),
    row("grouped", "ci", "B3 T2 H2 G3 K16 V32 L4", pool=4, page=13, slots=(1, -1, 2), ring_start=(3, 0, 2),
        num_accepted=(2, 1, 1)),
    row("many_sequences", "packed odd", "H2 R2 K16 V16 L4", lengths=(1, 2, 0, 2) * 5, gates="none", pool=21,
        slots=tuple(range(20, 0, -1)), ring_start=(3, 0, 1, 2, 7) * 4, num_accepted=(2, 1, 0, 2) * 5,
        has_state=(True, True, False) * 6 + (True, True), pad_slot=0),
    *(
        row(name, "packed odd", "H1 K16 V16 L4", lengths=(2, 1), pool=4, slots=(3, 1), ring_start=(3, 2),
            num_accepted=(2, 1), has_state=(True, False), pad_slot=2, **sizes)
        for name, sizes in (
            ("constant_values", {"R": 3, "gate_form": "constant", "gates": "strong"}),
            ("per_head_queries", {"G": 3, "gate_form": "head"}),
        )
    ),
    row("no_tokens", "ci odd", "B2 T0 H2 K16 V16 L4", pool=3, slots=(2, 0), ring_start=(3, 1), num_accepted=(2, 0)),
    row("empty_batch", "ci odd", "H2 K16 V16 L2", lengths=(), padding=2, pool=3, slots=(), ring_start=(),
        num_accepted=()),
    *(
        row(f"verify_b{B}_h64", "decode", "T4 H64 K128 V128 L8", B=B, pool=B, slots=tuple(range(B)),
            ring_start=(6,) * B, num_accepted=(4,) * B, **IN_BFLOAT16)
        for B in (1, 16, 64)
    ),
)
# fmt: on
TABLES = {
    "chunk_gla": CHUNK_GLA,
    "chunk_gla_pool": CHUNK_GLA_POOL,
    "chunk_gla_summary": CHUNK_GLA_SUMMARY,
    "chunk_ssd": CHUNK_SSD,
    "recurrent_gla_step": RECURRENT_GLA_STEP,
    "recurrent_gla_layer_step": RECURRENT_GLA_LAYER_STEP,
    "recurrent_ssd_step": RECURRENT_SSD_STEP,
    "recurrent_gla_steps": RECURRENT_GLA_STEPS,
    "recurrent_gla_replay": RECURRENT_GLA_REPLAY,
}
