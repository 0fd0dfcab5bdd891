"""Named workloads, one list for both the conformance kit and the benchmarks.

A workload is an op, the sizes of its arguments, and tags that say its purpose:

    ci        small enough for an interpreter on a CPU     odd       sizes that no kernel likes
    train     as in training a model                       packed    sequences of several lengths in one row
    prefill   as in absorbing prompts                      extreme   gates that break factored forms
    decode    one token at a time                          long      sequences or rows longer than a tile by far
    narrow    thousands of tokens, keys or columns, and small otherwise: for errors that appear only after many of them
    compared  a workload of models in another dtype or form of gates, for times beside the first; not in the kit
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

TAGS = ("ci", "train", "prefill", "decode", "long", "odd", "packed", "extreme", "narrow", "compared")

IN_BFLOAT16 = {"dtype": torch.bfloat16, "gate_dtype": torch.float32}
"""The dtypes of models: inputs are bfloat16, gates stay float32."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One call, by name.

    Attributes:
        name: unique among the workloads of its op.
        op: a public op. chunk_gla stands for chunk_gla_fwd, and for chunk_gla_bwd if gradients are computed.
        sizes: the sizes from which `gla_core.workloads.inputs.arguments` makes the arguments.
        tags: a subset of `TAGS`.
    """

    name: str
    op: str
    tags: frozenset[str]
    sizes: dict = field(hash=False)


def _workload(op: str, name: str, tags: str, **sizes: object) -> Workload:
    return Workload(name, op, frozenset(tags.split()), sizes)


def _cut(tokens: int, sequences: int) -> tuple[int, ...]:
    """Cuts a row of tokens into sequences at random places, and returns their lengths."""
    cuts = [0, *sorted(random.Random(0).sample(range(1, tokens), sequences - 1)), tokens]
    return tuple(end - start for start, end in itertools.pairwise(cuts))


CHUNK_GLA = (
    _workload("chunk_gla", "short", "ci", B=2, T=17, H=2, K=16, V=16, initial_state=True),
    _workload("chunk_gla", "one_token", "ci odd", B=1, T=1, H=1, K=16, V=16),
    _workload("chunk_gla", "no_token", "ci odd", B=2, T=0, H=2, K=16, V=16, initial_state=True),
    _workload("chunk_gla", "one_chunk", "ci", B=2, T=64, H=2, K=32, V=32),
    _workload("chunk_gla", "one_more_than_a_chunk", "ci odd", B=1, T=65, H=2, K=32, V=16),
    _workload("chunk_gla", "last_chunk_partial", "ci odd", B=2, T=203, H=1, K=32, V=32, initial_state=True),
    _workload("chunk_gla", "odd_widths", "ci odd", B=1, T=77, H=3, K=19, V=37, initial_state=True),
    _workload("chunk_gla", "width_one", "ci odd", B=1, T=70, H=1, K=1, V=1),
    _workload("chunk_gla", "wide", "odd", B=1, T=130, H=1, K=256, V=200),
    _workload("chunk_gla", "grouped", "ci", B=2, T=100, H=2, G=3, K=16, V=32, initial_state=True),
    _workload("chunk_gla", "ungated", "ci", B=1, T=150, H=2, K=32, V=32, gates="none", initial_state=True),
    _workload("chunk_gla", "strong", "ci", B=1, T=150, H=2, K=32, V=32, gates="strong", initial_state=True),
    _workload("chunk_gla", "extreme", "ci extreme", B=1, T=150, H=2, K=32, V=32, gates="extreme", initial_state=True),
    _workload(
        "chunk_gla", "minus_infinity", "ci extreme", B=1, T=150, H=2, K=32, V=32, gates="-inf", initial_state=True
    ),
    _workload(
        "chunk_gla", "packed", "ci packed odd", lengths=(0, 65, 1, 0, 130, 3, 0), H=2, K=16, V=16, initial_state=True
    ),
    _workload(
        "chunk_gla", "padded", "packed odd", lengths=(20, 0, 66), padding=40, H=2, K=16, V=16, initial_state=True
    ),
    _workload("chunk_gla", "packed_grouped", "ci packed", lengths=(40, 64, 90), H=2, G=2, K=16, V=32, gates="-inf"),
    _workload("chunk_gla", "per_head", "ci", B=2, T=150, H=2, K=32, V=32, gate_form="head", initial_state=True),
    _workload(
        "chunk_gla", "per_head_closed", "ci extreme", B=1, T=150, H=2, K=32, V=32, gate_form="head", gates="-inf"
    ),
    _workload(
        "chunk_gla",
        "per_head_grouped",
        "ci odd packed",
        lengths=(0, 65, 1, 130),
        H=1,
        R=3,
        K=19,
        V=37,
        gate_form="head",
        gates="extreme",
        initial_state=True,
    ),
    _workload(
        "chunk_gla",
        "constant",  # of several heads: the gradient of one constant gate is one number, and errors are relative
        "ci",
        B=2,
        T=70,
        H=8,
        G=2,
        K=16,
        V=16,
        gate_form="constant",
        gates="strong",
        initial_state=True,
    ),
    _workload(
        "chunk_gla",
        "per_head_padded",
        "packed odd",
        lengths=(20, 0, 66),
        padding=40,
        H=1,
        R=2,
        K=16,
        V=16,
        gate_form="head",
        initial_state=True,
    ),
    _workload(
        "chunk_gla",
        "constant_packed",
        "packed",
        lengths=(40, 64, 90),
        padding=30,
        H=2,
        R=4,
        K=16,
        V=32,
        gate_form="constant",
    ),
    _workload("chunk_gla", "grouped_values", "ci", B=2, T=100, H=2, R=3, K=16, V=32, initial_state=True),
    _workload("chunk_gla", "narrow_mild", "narrow", B=1, T=2600, H=1, K=8, V=8, initial_state=True),
    _workload("chunk_gla", "narrow_strong", "narrow", B=1, T=2600, H=1, K=8, V=8, gates="strong", initial_state=True),
    _workload(
        "chunk_gla", "narrow_per_head", "narrow", B=1, T=2600, H=1, K=8, V=8, gate_form="head", initial_state=True
    ),
    _workload("chunk_gla", "model_512", "train", B=1, T=512, H=4, K=128, V=128, **IN_BFLOAT16),
    _workload("chunk_gla", "train_b8_t4096_h16", "train", B=8, T=4096, H=16, K=128, V=128, **IN_BFLOAT16),
    _workload(
        "chunk_gla",
        "train_b8_t4096_h16_per_head",
        "train",
        B=8,
        T=4096,
        H=16,
        K=128,
        V=128,
        gate_form="head",
        **IN_BFLOAT16,
    ),
    _workload(
        "chunk_gla",
        "train_b8_t4096_h16_constant",
        "train",
        B=8,
        T=4096,
        H=16,
        K=128,
        V=128,
        gate_form="constant",
        **IN_BFLOAT16,
    ),
    _workload(
        "chunk_gla", "granite_4_small", "train", B=4, T=8192, H=1, R=128, K=128, V=64, gate_form="head", **IN_BFLOAT16
    ),
    _workload("chunk_gla", "train_b16_t4096_h16", "train", B=16, T=4096, H=16, K=128, V=128, **IN_BFLOAT16),
    _workload("chunk_gla", "train_b32_t2048_h4_k256_v512", "train", B=32, T=2048, H=4, K=256, V=512, **IN_BFLOAT16),
    _workload("chunk_gla", "train_b16_t1024_h8", "train", B=16, T=1024, H=8, K=128, V=128, **IN_BFLOAT16),
    _workload("chunk_gla", "train_b4_t2048_h16_k64_v64", "train", B=4, T=2048, H=16, K=64, V=64, **IN_BFLOAT16),
    _workload("chunk_gla", "prefill_b1_t8192_h16", "prefill", B=1, T=8192, H=16, K=128, V=128, **IN_BFLOAT16),
    _workload("chunk_gla", "prefill_b2_t2048_h8", "prefill", B=2, T=2048, H=8, K=128, V=128, **IN_BFLOAT16),
    _workload("chunk_gla", "long_b1_t65536_h8", "prefill long", B=1, T=65536, H=8, K=128, V=128, **IN_BFLOAT16),
    _workload("chunk_gla", "packed_64_t65536_h8", "prefill", lengths=_cut(65536, 64), H=8, K=128, V=128, **IN_BFLOAT16),
    *(
        _workload(
            "chunk_gla",
            f"train_b8_t4096_h16_{str(dtype).removeprefix('torch.')}",
            "compared",
            B=8,
            T=4096,
            H=16,
            K=128,
            V=128,
            dtype=dtype,
            gate_dtype=torch.float32,
        )
        for dtype in (torch.float16, torch.float32)
    ),
    *(
        _workload(
            "chunk_gla", f"{name}_per_head", "compared", **sizes, H=8, K=128, V=128, gate_form="head", **IN_BFLOAT16
        )
        for name, sizes in (
            ("long_b1_t65536_h8", {"B": 1, "T": 65536}),
            ("packed_64_t65536_h8", {"lengths": _cut(65536, 64)}),
        )
    ),
)
CHUNK_GLA_SUMMARY = tuple(  # the same sizes, without grouped queries, which this op does not have
    dataclasses.replace(workload, op="chunk_gla_summary") for workload in CHUNK_GLA if "G" not in workload.sizes
)
CHUNK_GLA_POOL = (
    _workload("chunk_gla_pool", "small", "ci packed", lengths=(17, 40), H=2, K=16, V=16, pool=5, read_slots=(3, 0)),
    _workload(
        "chunk_gla_pool",
        "apart",
        "ci packed",
        lengths=(17, 70, 5),
        H=2,
        K=16,
        V=16,
        pool=8,
        read_slots=(3, -1, 2),
        write_slots=(1, 4, -1),
        has_state=(True, True, False),
    ),
    _workload(
        "chunk_gla_pool",
        "checkpoints",
        "ci packed",
        lengths=(130, 64, 0, 70),
        H=2,
        K=16,
        V=16,
        pool=9,
        read_slots=(8, 1, 2, 3),
        pad_slot=0,
        checkpoint_offsets=(128, 64, 64, 64),
        checkpoint_slots=(4, 5, 6, 7),
    ),
    _workload(
        "chunk_gla_pool",
        "padded",
        "ci packed odd",
        lengths=(20, 0, 66, 0, 0),
        padding=30,
        H=2,
        K=16,
        V=16,
        pool=7,
        read_slots=(2, 5, 6, 0, 0),
        pad_slot=0,
    ),
    _workload(
        "chunk_gla_pool",
        "constant",
        "ci",
        lengths=(33, 20),
        H=2,
        G=2,
        K=19,
        V=16,
        gate_form="constant",
        gates="strong",
        pool=4,
        read_slots=(3, 1),
    ),
    _workload(
        "chunk_gla_pool", "grouped", "ci", lengths=(33, 20), H=2, G=3, K=16, V=32, pool=4, read_slots=(1, 3), page=13
    ),
    _workload(
        "chunk_gla_pool",
        "per_head",
        "ci",
        lengths=(33, 70),
        H=1,
        R=3,
        K=16,
        V=16,
        gate_form="head",
        gates="-inf",
        pool=4,
        pool_dtype=torch.float16,
        read_slots=(3, 1),
    ),
    _workload(
        "chunk_gla_pool",
        "odd_widths",
        "ci odd",
        lengths=(30, 1),
        H=3,
        K=19,
        V=37,
        gates="extreme",
        pool=3,
        page=1,
        read_slots=(2, 0),
        has_state=(False, True),
    ),
    _workload(
        "chunk_gla_pool",
        "ungated",
        "ci",
        lengths=(40, 25),
        H=2,
        K=16,
        V=32,
        gates="none",
        pool=4,
        pool_dtype=torch.bfloat16,
        read_slots=(0, 1),
        write_slots=(2, 1),
    ),
    _workload(
        "chunk_gla_pool",
        "no_token",
        "ci odd",
        lengths=(0, 0),
        H=2,
        K=16,
        V=16,
        pool=5,
        read_slots=(1, 2),
        write_slots=(0, 3),
        has_state=(True, False),
    ),
    _workload("chunk_gla_pool", "nobody", "ci odd", lengths=(), H=2, K=16, V=16, pool=3, read_slots=()),
    _workload("chunk_gla_pool", "narrow", "narrow", lengths=(2000, 600), H=1, K=8, V=8, pool=3, read_slots=(2, 0)),
    *(
        _workload(
            "chunk_gla_pool",
            f"prefill_{N}_t{T}_h64",
            "prefill",
            lengths=(T // N,) * N,
            H=64,
            K=128,
            V=128,
            pool=4 * N,
            read_slots=tuple(range(N)),
            has_state=(False,) * N,
            **IN_BFLOAT16,
        )
        for N, T in ((1, 512), (1, 8192), (16, 8192))
    ),
)
RECURRENT_GLA_STEP = (
    _workload("recurrent_gla_step", "small", "ci", B=3, H=2, K=16, V=16),
    _workload("recurrent_gla_step", "odd_widths", "ci odd", B=2, H=3, K=19, V=37, gates="extreme"),
    _workload("recurrent_gla_step", "grouped", "ci", B=2, H=2, G=4, K=32, V=16, gates="-inf"),
    _workload("recurrent_gla_step", "ungated", "ci", B=2, H=2, K=16, V=32, gates="none"),
    _workload("recurrent_gla_step", "pool", "ci packed", B=4, H=2, K=16, V=16, rows=(5, -1, 0, 2), pool=6),
    _workload("recurrent_gla_step", "per_head", "ci", B=3, H=2, R=3, K=16, V=16, gate_form="head", gates="-inf"),
    _workload(
        "recurrent_gla_step", "constant", "ci", B=2, H=2, G=2, K=19, V=16, gate_form="constant", rows=(3, 0), pool=4
    ),
    _workload("recurrent_gla_step", "nobody", "ci odd", B=0, H=2, K=16, V=16),
    *(
        _workload("recurrent_gla_step", f"decode_b{B}", "decode", B=B, H=16, K=128, V=128, **IN_BFLOAT16)
        for B in (1, 8, 64, 256, 1024)
    ),
    _workload(
        "recurrent_gla_step", "decode_b64_per_head", "decode", B=64, H=16, K=128, V=128, gate_form="head", **IN_BFLOAT16
    ),
)
RECURRENT_GLA_LAYER_STEP = (
    _workload("recurrent_gla_layer_step", "small", "ci", B=3, H=2, K=16, V=16),
    _workload(
        "recurrent_gla_layer_step",
        "odd_widths",
        "ci odd",
        B=2,
        H=3,
        K=19,
        V=37,
        gates="extreme",
        weight_dtype=torch.float32,
    ),
    _workload(
        "recurrent_gla_layer_step", "grouped", "ci", B=2, H=2, G=4, K=32, V=16, gates="-inf", activation="sigmoid"
    ),
    _workload("recurrent_gla_layer_step", "ungated", "ci", B=2, H=2, K=16, V=32, gates="none"),
    _workload(
        "recurrent_gla_layer_step",
        "pool",
        "ci packed",
        B=4,
        H=2,
        K=16,
        V=16,
        rows=(5, -1, 0, 2),
        pool=6,
        without=("norm_weight",),
    ),
    _workload("recurrent_gla_layer_step", "per_head", "ci", B=3, H=2, R=3, K=16, V=16, gate_form="head", gates="-inf"),
    _workload(
        "recurrent_gla_layer_step",
        "constant",
        "ci",
        B=2,
        H=2,
        G=2,
        K=19,
        V=16,
        gate_form="constant",
        rows=(3, 0),
        pool=4,
        without=("output_gate",),
    ),
    _workload("recurrent_gla_layer_step", "nobody", "ci odd", B=0, H=2, K=16, V=16),
    *(
        _workload("recurrent_gla_layer_step", f"decode_b{B}", "decode", B=B, H=4, K=128, V=256, **IN_BFLOAT16)
        for B in (1, 64, 256)
    ),
)
RECURRENT_GLA_STEPS = (
    _workload(
        "recurrent_gla_steps",
        "small",
        "ci",
        B=2,
        T=3,
        H=2,
        K=16,
        V=16,
        pool=8,
        slots=((3, 0, 5), (6, 2, 1)),
    ),
    _workload(
        "recurrent_gla_steps",
        "accepted",
        "ci",
        B=4,
        T=3,
        H=2,
        K=16,
        V=16,
        pool=14,
        slots=((3, 0, 5), (6, 2, 1), (7, 8, 9), (10, 11, 12)),
        num_accepted=(3, 2, 0, 9),
    ),
    _workload(
        "recurrent_gla_steps",
        "packed",
        "ci packed",
        lengths=(1, 4, 0, 2),
        padding=3,
        H=2,
        K=16,
        V=16,
        pool=18,
        slots=((3, 0, 5, 6), (1, 2, 4, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
        num_accepted=(1, 4, 2, 3),
        pad_slot=17,
    ),
    _workload(
        "recurrent_gla_steps",
        "apart",
        "ci packed",
        lengths=(2, 2, 1),
        H=2,
        K=16,
        V=16,
        pool=9,
        slots=((3, 0), (1, -1), (7, 8)),
        read_slots=(5, 4, -1),
        has_state=(True, True, False),
    ),
    _workload(
        "recurrent_gla_steps",
        "grouped",
        "ci",
        B=3,
        T=2,
        H=2,
        G=3,
        K=16,
        V=32,
        pool=7,
        page=13,
        slots=((1, 3), (0, 2), (6, 5)),
    ),
    _workload(
        "recurrent_gla_steps",
        "per_head",
        "ci",
        B=2,
        T=2,
        H=1,
        R=3,
        K=16,
        V=16,
        gate_form="head",
        gates="-inf",
        pool=5,
        pool_dtype=torch.float16,
        slots=((3, 1), (0, 4)),
    ),
    _workload(
        "recurrent_gla_steps",
        "constant",
        "ci",
        B=2,
        T=4,
        H=2,
        G=2,
        K=19,
        V=16,
        gate_form="constant",
        gates="strong",
        pool=9,
        slots=((3, 1, 2, 4), (0, 5, 8, 7)),
    ),
    _workload(
        "recurrent_gla_steps",
        "odd_widths",
        "ci odd",
        B=2,
        T=8,
        H=3,
        K=19,
        V=37,
        gates="extreme",
        pool=17,
        page=1,
        slots=(tuple(range(8)), tuple(range(8, 16))),
        has_state=(False, True),
    ),
    _workload(
        "recurrent_gla_steps",
        "ungated",
        "ci",
        B=2,
        T=2,
        H=2,
        K=16,
        V=32,
        gates="none",
        pool=5,
        pool_dtype=torch.bfloat16,
        slots=((3, 1), (0, 4)),
    ),
    _workload(
        "recurrent_gla_steps",
        "one_token",
        "ci",
        B=3,
        T=1,
        H=2,
        K=16,
        V=16,
        pool=6,
        slots=((3,), (-1,), (0,)),
        read_slots=(1, -1, 0),
    ),
    _workload(
        "recurrent_gla_steps",
        "nobody",
        "ci odd",
        lengths=(),
        padding=2,
        H=2,
        K=16,
        V=16,
        pool=3,
        slots=(),
    ),
    *(
        _workload(
            "recurrent_gla_steps",
            f"verify_b{B}_h64",
            "decode",
            B=B,
            T=4,
            H=64,
            K=128,
            V=128,
            pool=4 * B,
            slots=tuple(tuple(range(4 * n, 4 * n + 4)) for n in range(B)),
            num_accepted=(4,) * B,
            **IN_BFLOAT16,
        )
        for B in (1, 16, 64)
    ),
)
RECURRENT_GLA_REPLAY = (
    _workload(
        "recurrent_gla_replay",
        "small",
        "ci",
        B=2,
        T=3,
        H=2,
        K=16,
        V=16,
        pool=4,
        L=6,
        slots=(3, 0),
        ring_start=(4, 1),
        num_accepted=(3, 0),
    ),
    _workload(
        "recurrent_gla_replay",
        "ungated",
        "ci packed",
        lengths=(2, 0, 1),
        padding=1,
        H=2,
        K=16,
        V=32,
        gates="none",
        pool=4,
        pool_dtype=torch.bfloat16,
        L=4,
        slots=(2, 0, 1),
        ring_start=(3, 1, 0),
        num_accepted=(2, 1, 0),
        has_state=(True, True, False),
        pad_slot=3,
    ),
    _workload(
        "recurrent_gla_replay",
        "packed",
        "ci packed",
        lengths=(1, 4, 0, 2),
        padding=3,
        H=2,
        K=16,
        V=16,
        pool=7,
        L=9,
        slots=(5, 0, 4, 1),
        ring_start=(8, 0, 3, 7),
        num_accepted=(1, 0, 4, 3),
        has_state=(True, False, True, False),
        pad_slot=3,
    ),
    _workload(
        "recurrent_gla_replay",
        "constant",
        "ci",
        B=2,
        T=4,
        H=2,
        G=2,
        K=19,
        V=16,
        gate_form="constant",
        gates="strong",
        pool=3,
        L=8,
        ring_dtype=torch.float32,
        slots=(2, 0),
        ring_start=(5, 0),
        num_accepted=(4, 2),
    ),
    _workload(
        "recurrent_gla_replay",
        "per_head",
        "ci",
        B=2,
        T=2,
        H=1,
        R=3,
        K=16,
        V=16,
        gate_form="head",
        gates="-inf",
        pool=3,
        pool_dtype=torch.float16,
        L=5,
        slots=(2, 1),
        ring_start=(4, 2),
        num_accepted=(2, 1),
    ),
    _workload(
        "recurrent_gla_replay",
        "odd_widths",
        "ci odd",
        B=2,
        T=8,
        H=3,
        K=19,
        V=37,
        gates="extreme",
        pool=3,
        page=1,
        L=16,
        slots=(1, 2),
        ring_start=(0, 15),
        num_accepted=(8, 3),
        has_state=(False, True),
    ),
    _workload(
        "recurrent_gla_replay",
        "grouped",
        "ci",
        B=3,
        T=2,
        H=2,
        G=3,
        K=16,
        V=32,
        pool=4,
        page=13,
        L=4,
        slots=(1, -1, 2),
        ring_start=(3, 0, 2),
        num_accepted=(2, 1, 1),
    ),
    _workload(
        "recurrent_gla_replay",
        "no_tokens",
        "ci odd",
        B=2,
        T=0,
        H=2,
        K=16,
        V=16,
        pool=3,
        L=4,
        slots=(2, 0),
        ring_start=(3, 1),
        num_accepted=(2, 0),
    ),
    _workload(
        "recurrent_gla_replay",
        "nobody",
        "ci odd",
        lengths=(),
        padding=2,
        H=2,
        K=16,
        V=16,
        pool=3,
        L=2,
        slots=(),
        ring_start=(),
        num_accepted=(),
    ),
    *(
        _workload(
            "recurrent_gla_replay",
            f"verify_b{B}_h64",
            "decode",
            B=B,
            T=4,
            H=64,
            K=128,
            V=128,
            pool=B,
            L=8,
            slots=tuple(range(B)),
            ring_start=(6,) * B,
            num_accepted=(4,) * B,
            **IN_BFLOAT16,
        )
        for B in (1, 16, 64)
    ),
)
ONLINE_SOFTMAX = (
    _workload("online_softmax", "small", "ci", shape=(5, 33)),
    _workload("online_softmax", "one_column", "ci odd", shape=(3, 1)),
    _workload("online_softmax", "odd_columns", "ci odd", shape=(3, 1025)),
    _workload("online_softmax", "other_dimension", "ci odd", shape=(3, 50, 7), dim=1),
    _workload("online_softmax", "nothing", "ci odd", shape=(0, 4)),
    _workload("online_softmax", "minus_infinity", "ci extreme", shape=(4, 3000), masked=True),
    _workload("online_softmax", "many_columns", "narrow", shape=(2, 50_001)),
    *(
        _workload("online_softmax", f"rows_8192_columns_{n}", "train", shape=(8192, n), dtype=torch.bfloat16)
        for n in (1024, 4096, 16384, 50257, 65536)  # 50257: the vocabulary of GPT-2, whose rows are not aligned
    ),
    _workload("online_softmax", "rows_4_columns_16m", "long", shape=(4, 2**24), dtype=torch.bfloat16),
)
SOFTMAX_ATTENTION = (
    _workload("softmax_attention", "small", "ci", B=2, Tq=33, Tk=33, H=2, K=16, V=16, causal=True),
    _workload("softmax_attention", "not_causal", "ci", B=1, Tq=20, Tk=70, H=2, K=32, V=16),
    _workload("softmax_attention", "odd", "ci odd", B=1, Tq=65, Tk=131, H=1, K=19, V=37, causal=True),
    _workload("softmax_attention", "grouped", "ci", B=2, Tq=40, Tk=40, H=2, G=3, K=16, V=16, causal=True),
    _workload("softmax_attention", "one_query", "ci decode", B=2, Tq=1, Tk=300, H=2, K=16, V=16, causal=True),
    _workload("softmax_attention", "many_keys", "narrow", B=1, Tq=3, Tk=5001, H=1, K=8, V=8, causal=True),
    _workload("softmax_attention", "many_queries", "narrow", B=1, Tq=2501, Tk=20, H=1, K=8, V=8),
    _workload(
        "softmax_attention",
        "causal_b4_t4096_h16",
        "train",
        B=4,
        Tq=4096,
        Tk=4096,
        H=16,
        K=128,
        V=128,
        causal=True,
        dtype=torch.bfloat16,
    ),
    _workload(
        "softmax_attention",
        "one_query_131072_keys",
        "decode long",
        B=1,
        Tq=1,
        Tk=131072,
        H=16,
        K=128,
        V=128,
        dtype=torch.bfloat16,
    ),
)
WORKLOADS = (
    *CHUNK_GLA,
    *CHUNK_GLA_POOL,
    *CHUNK_GLA_SUMMARY,
    *RECURRENT_GLA_STEP,
    *RECURRENT_GLA_LAYER_STEP,
    *RECURRENT_GLA_STEPS,
    *RECURRENT_GLA_REPLAY,
    *ONLINE_SOFTMAX,
    *SOFTMAX_ATTENTION,
)


def select(op: str | None = None, tags: Iterable[str] = ()) -> list[Workload]:
    """Returns the workloads of an op (by default of all ops) that have all of `tags`."""
    wanted = frozenset(tags)
    return [w for w in WORKLOADS if (op is None or w.op == op) and wanted <= w.tags]
