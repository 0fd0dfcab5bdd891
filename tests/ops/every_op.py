"""Small calls of every op: packed and not, with slots that are skipped, new sequences, drafts, and rows of none."""

import torch

import gla_core as gla
from gla_core.workloads.inputs import gla_inputs

OFFSETS = torch.tensor([2, 4, 4, 7, 8])  # rows in front of the first sequence and behind the last; an empty sequence


def ints(*numbers):
    return torch.tensor(numbers)


def tokens(B=1, T=10, **options):
    x = gla_inputs(B=B, T=T, K=2, V=2, H=1, **options)
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g}


def states(number, *sizes):
    return torch.randn(number, *(sizes or (1, 2, 2)), generator=torch.Generator().manual_seed(0))


def token(B, **options):
    return {name: x if x is None or x.ndim == 1 else x[:, 0] for name, x in tokens(B, 1, **options).items()}


def rings(P, L=4):
    return {"ring_k": states(P, L, 1, 2), "ring_v": states(P, L, 1, 2), "ring_g": -states(P, L, 1, 2).abs()}


def no_q(x):
    return {name: y for name, y in x.items() if name != "q"}


PACKED = {"cu_seqlens": OFFSETS}
HAS_STATE = {"has_state": torch.tensor([True, True, False, True])}
ONE_SLOT = {"slots": ints(1, 2, 3, -1), "ring_start": ints(3, 0, 1, 2), "num_accepted": ints(2, 0, 1, 2)}
DRAFTS = {"slots": ints((1, 2, -1), (3, 9, -1), (4, 0, 5), (-1, 6, 6))}
CALLS = {
    "chunk_gla": (gla.chunk_gla, tokens(2, 3) | {"initial_state": states(2)}),
    "chunk_gla without tokens": (gla.chunk_gla, tokens(2, 0) | {"initial_state": states(2)}),
    "chunk_gla packed": (gla.chunk_gla, tokens() | PACKED | {"initial_state": states(4)}),
    "chunk_gla final": (gla.chunk_gla, tokens() | PACKED | {"initial_state": states(4), "output_final_state": True}),
    "chunk_gla constant": (gla.chunk_gla, tokens(gate_form="constant") | PACKED),
    "chunk_gla logits": (gla.chunk_gla, tokens() | PACKED | {"gate": "logsigmoid"}),
    "chunk_gla_summary": (gla.chunk_gla_summary, no_q(tokens(2, 3))),
    "chunk_gla_summary packed": (gla.chunk_gla_summary, no_q(tokens(gate_form="head")) | PACKED),
    "chunk_gla_pool": (
        gla.chunk_gla_pool,
        tokens() | PACKED | HAS_STATE | {"pool": states(8), "read_slots": ints(1, 2, 3, -1)},
    ),
    "chunk_gla_pool pad": (
        gla.chunk_gla_pool,
        tokens() | PACKED | {"pool": states(8), "read_slots": ints(1, 2, 3, 9), "pad_slot": 3},
    ),
    "chunk_gla_pool copied": (
        gla.chunk_gla_pool,
        tokens() | PACKED | {"pool": states(8), "read_slots": ints(1, 2, 1, 3), "write_slots": ints(4, 5, 6, -1)},
    ),
    "recurrent_gla_step": (gla.recurrent_gla_step, token(3) | {"state": states(3)}),
    "recurrent_gla_step pool": (gla.recurrent_gla_step, token(3) | {"state": states(5), "slots": ints(4, -1, 1)}),
    "recurrent_gla_step in place": (
        gla.recurrent_gla_step,
        token(3) | {"state": states(5), "slots": ints(4, -1, 1), "inplace": True},
    ),
    "recurrent_gla_layer_step": (
        gla.recurrent_gla_layer_step,
        token(3)
        | {"state": states(5), "slots": ints(4, -1, 1), "output_gate": states(3, 1, 2)}
        | {"norm_weight": torch.ones(2)},
    ),
    "recurrent_gla_steps": (gla.recurrent_gla_steps, tokens(4, 3) | HAS_STATE | {"pool": states(8)} | DRAFTS),
    "recurrent_gla_steps packed": (
        gla.recurrent_gla_steps,
        tokens() | PACKED | DRAFTS | {"pool": states(8), "num_accepted": ints(2, 1, 9, 2)},
    ),
    "recurrent_gla_steps read": (
        gla.recurrent_gla_steps,
        tokens() | PACKED | DRAFTS | {"pool": states(8), "read_slots": ints(7, 7, -1, 7)},
    ),
    "recurrent_gla_replay": (
        gla.recurrent_gla_replay,
        tokens(4, 2) | HAS_STATE | {"pool": states(6)} | rings(6) | ONE_SLOT,
    ),
    "recurrent_gla_replay packed": (
        gla.recurrent_gla_replay,
        tokens() | {"cu_seqlens": ints(2, 4, 4, 6, 8)} | {"pool": states(6)} | rings(6) | ONE_SLOT,
    ),
    "recurrent_gla_replay alone": (
        gla.recurrent_gla_replay,
        tokens(4, 0) | HAS_STATE | {"pool": states(6)} | rings(6) | ONE_SLOT,
    ),
    "softmax_attention": (
        gla.softmax_attention,
        {"q": states(1, 2, 2, 2), "k": states(1, 3, 1, 2), "v": states(1, 3, 1, 2)},
    ),
    "online_softmax": (gla.online_softmax, {"x": states(3, 2)}),
}
"""The public function and the arguments of each call."""


def copied(args):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
