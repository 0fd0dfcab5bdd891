"""Small calls of every op: packed and not, with slots that are skipped, new sequences, drafts, and rows of none."""

import torch

import gla_core as gla
from gla_core.conformance.cases import DRAFTS, PROMPTS, REPLAYS, STEPS, WITH_STATES, relative
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.spec import Role
from gla_core.workloads.inputs import arguments, token_of
from gla_core.workloads.named import Workload

SUMMARY, LAYER_STEP, REPLAY = "chunk_gla_summary", "recurrent_gla_layer_step", "recurrent_gla_replay"
DELTA_SUMMARIES = ("chunk_delta_summary", "chunk_delta_gradient_summary")
OFFSETS = torch.tensor([2, 4, 4, 7, 8])  # rows in front of the first sequence and behind the last; an empty sequence


def ints(*numbers):
    return torch.tensor(numbers)


def tokens(op, B=1, T=10, **options):
    """Returns the tokens of a call of an abstract op, as random as those of the sequences of its family.

    An op on sequences has them with the rates and the skip that all tokens share.
    """
    spec, public = ABSTRACT_OPS[op], ABSTRACT_OPS[op if op in WITH_STATES else relative(op, "initial_state")].public
    x = arguments(Workload("", public, frozenset(), {"B": B, "T": T, "H": 1, "K": 2, "V": 2, **options}))
    inputs = (a.shown for a in spec.arguments if a.dtype is not None and a.role in (Role.INPUT, Role.GATE))
    return {name: x[name] for name in inputs if name in x}


def token(op, B):
    return {name: token_of(x, 0) for name, x in tokens(op, B, 1).items()}


def states(number, *sizes):
    return torch.randn(number, *(sizes or (1, 2, 2)), generator=torch.Generator().manual_seed(0))


def rings(P, L=4):
    return {"ring_k": states(P, L, 1, 2), "ring_v": states(P, L, 1, 2), "ring_g": -states(P, L, 1, 2).abs()}


PACKED = {"cu_seqlens": OFFSETS}
HAS_STATE = {"has_state": torch.tensor([True, True, False, True])}
ONE_SLOT = {"slots": ints(1, 2, 3, -1), "ring_start": ints(3, 0, 1, 2), "num_accepted": ints(2, 0, 1, 2)}
SLOTS = {"slots": ints((1, 2, -1), (3, 9, -1), (4, 0, 5), (-1, 6, 6))}


def sequences(op):
    return {
        "": tokens(op, 2, 3) | {"initial_state": states(2)},
        " without tokens": tokens(op, 2, 0) | {"initial_state": states(2)},
        " packed": tokens(op) | PACKED | {"initial_state": states(4)},
        " final": tokens(op) | PACKED | {"initial_state": states(4), "output_final_state": True},
    }


def prompts(op):
    packed, pool = tokens(op) | PACKED, {"pool": states(8)}
    return {
        "": packed | HAS_STATE | pool | {"read_slots": ints(1, 2, 3, -1)},
        " pad": packed | pool | {"read_slots": ints(1, 2, 3, 9), "pad_slot": 3},
        " copied": packed | pool | {"read_slots": ints(1, 2, 1, 3), "write_slots": ints(4, 5, 6, -1)},
    }


def steps(op):
    in_pool = token(op, 3) | {"state": states(5), "slots": ints(4, -1, 1)}
    return {"": token(op, 3) | {"state": states(3)}, " pool": in_pool, " in place": in_pool | {"inplace": True}}


def drafts(op):
    packed, pool = tokens(op) | PACKED, {"pool": states(8)}
    return {
        "": tokens(op, 4, 3) | HAS_STATE | pool | SLOTS,
        " packed": packed | SLOTS | pool | {"num_accepted": ints(2, 1, 9, 2)},
        " read": packed | SLOTS | pool | {"read_slots": ints(7, 7, -1, 7)},
    }


def replays(op):
    memory = {"pool": states(6)} | rings(6) | ONE_SLOT
    return {
        "": tokens(op, 4, 2) | HAS_STATE | memory,
        " packed": tokens(op) | {"cu_seqlens": ints(2, 4, 4, 6, 8)} | memory,
        " alone": tokens(op, 4, 0) | HAS_STATE | memory,
    }


def delta_summaries(op):
    def call(**options):
        do = {"do": states(options.get("B", 1), options.get("T", 10), 1, 2)} if "gradient" in op else {}
        return tokens(op, **options) | do

    return {"": call(B=2, T=3), " packed": call(gate_form="head") | PACKED}


KINDS = (
    (WITH_STATES, sequences),
    (PROMPTS, prompts),
    (STEPS, steps),
    (DRAFTS, drafts),
    (REPLAYS, replays),
    (DELTA_SUMMARIES, delta_summaries),
)
IN_EACH_FAMILY = {
    f"{ABSTRACT_OPS[op].public}{what}": (getattr(gla, ABSTRACT_OPS[op].public), args)
    for ops, calls in KINDS
    for op in ops
    for what, args in calls(op).items()
}
CALLS = IN_EACH_FAMILY | {
    "chunk_gla constant": (gla.chunk_gla, tokens("chunk_gla_fwd", gate_form="constant") | PACKED),
    "chunk_gla logits": (gla.chunk_gla, tokens("chunk_gla_fwd") | PACKED | {"gate": "logsigmoid"}),
    "chunk_gla_summary": (gla.chunk_gla_summary, tokens(SUMMARY, 2, 3)),
    "chunk_gla_summary packed": (gla.chunk_gla_summary, tokens(SUMMARY, gate_form="head") | PACKED),
    "recurrent_gla_layer_step": (
        gla.recurrent_gla_layer_step,
        token(LAYER_STEP, 3)
        | {"state": states(5), "slots": ints(4, -1, 1), "output_gate": states(3, 1, 2)}
        | {"norm_weight": torch.ones(2)},
    ),
    "recurrent_ssd_step": (
        gla.recurrent_ssd_step,
        token("recurrent_ssd_step", 3)
        | {"state": states(5), "slots": ints(4, -1, 1), "z": states(3, 1, 2)}
        | {"dt": states(3, 1).abs(), "A": -torch.ones(1)},
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
