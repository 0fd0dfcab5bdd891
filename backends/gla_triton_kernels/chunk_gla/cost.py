"""Predicts the seconds of chunk_gla_fwd, chunk_gla_bwd and chunk_gla_summary: the price of the plan of a call.

price.py holds the formula for a kernel, ../cost.py the formula for a call, and the value of a kernel its price. The
constants are in seconds unless their line says otherwise:

    host, host_launch          host time of a call, and additional host time of each launch
    launch                     between the starts of two kernels
    bandwidth                  bytes per second
    start, hopper_start        before the first step of a block, in general kernels and in kernels for SM90
    build_step                 64 tokens in sm90/states.py
    build_start                before the first step of a block in general/states.py
    scan_step                  a segment in shared/scan.py
    ragged                     an incomplete chunk of a packed sequence

For chunk_gla_fwd alone:

    host_hopper, host_packed   additional host time with kernels for SM90, and with packed sequences
    gap                        device time between two calls outside of a CUDA graph
    hopper_step, hopper_tile   64 tokens in sm90/forward.py: a step, and additional time for every 64 columns of keys
    hopper_narrow              a step of sm90/forward.py with 64 columns of v, as a share of a step with 128 columns
    tile_step, query_step      64 tokens in general/forward.py with bfloat16 products and K = 128, in proportion to K;
                               additional time for every further query head of a group
    wide_step                  16 tokens in general/forward.py with bfloat16 products and K = 256
    wide_packed_step           the same for packed sequences, which are loaded without TMA
    tf32_step                  16 tokens in general/forward.py with TF32 products and K = 128
    token_step                 one token in general/forward.py without tensor cores and K = 128
    gate_rate                  elements of k per second in the first kernel of sm90/forward_wide.py
    state_step                 64 tokens in the second kernel of sm90/forward_wide.py
    shared                     number of blocks with tile_step that share a multiprocessor at no cost to each other
    build                      a step of general/states.py, as a share of a step of the outputs
    idle                       time of the kernels before the outputs if no packed sequence is long enough to be cut

For chunk_gla_bwd alone:

    hopper_step, hopper_tile   64 tokens in sm90/backward.py: a step, and additional time for every tile of 64 keys by
                               64 values
    hopper_shared              number of blocks of one such tile that share a multiprocessor at no cost to each other
    wide_state_step            64 tokens in the first kernel of sm90/backward_wide.py
    wide_keys, wide_tile       a chunk of a head in the second kernel: 64 keys of the chunk, and additional time for
                               each tile
    step, tile, shared         in general/backward.py with bfloat16 products, as hopper_step, hopper_tile, hopper_shared
    bf16x3, bf16x6             time of general kernels as a multiple of their time with bfloat16 products, by precision
    query                      share of such a step that every further query head of a group takes
    build                      64 tokens of a head in general/states.py with bfloat16 products

For chunk_gla_summary alone:

    build                      64 tokens in general/states.py with bfloat16 products, of a block of 64 keys and values
    tf32, tokenwise            time with TF32 products, and token by token, as multiples of the time with bfloat16

The constants of chunk_gla_summary that are shipped for an H200 were not fitted to this op. They are the constants of
the forward of parallel_scan, whose first kernels compute a summary: 64 tokens of states take half the time of their
outputs, and a launch takes twice that time (`FORWARD_CUT`).
"""

from __future__ import annotations

from gla_core.dispatch.backend import CHUNK, Constants, OpCall, checkpoint_dtype
from gla_triton_kernels.chunk_gla import backward, forward, summary
from gla_triton_kernels.chunk_gla.general.kernels import slower
from gla_triton_kernels.chunk_gla.kernel import BackwardPlan, ForwardPlan, SegmentPlan
from gla_triton_kernels.chunk_gla.price import (
    BlockTime,
    checkpoint_bytes,
    cut,
    gate_itemsize,
    host_seconds,
    kernel_seconds,
    moved_bytes,
    states_seconds,
    token_bytes,
    whole,
)
from gla_triton_kernels.chunk_gla.seen import seen_by_kernels
from gla_triton_kernels.cost import gpu_of_constants, in_all

# ---- chunk_gla_fwd


def forward_seconds(plan: forward.Plan, call: OpCall, c: Constants) -> float:
    """Returns the predicted seconds of a chunk_gla_fwd call under a plan."""
    gpu = gpu_of_constants(c)
    seen = seen_by_kernels(call, gpu)
    plans = plan(seen, gpu, forward.KERNELS)
    return _copying(call, seen, c) + sum(_forward(rows, planned, c) for rows, planned in plans)


def _forward(call: OpCall, plan: ForwardPlan, c: Constants) -> float:
    before = plan.outputs.before(call, c)
    packed = call.variable_length
    host = 0.0 if plan.outputs.host is None else c[plan.outputs.host]
    host += c["host_packed"] * packed
    laid_out = (1 + len(before)) * packed  # number of launches that lay out packed sequences
    block = plan.outputs.time(call, plan.parameters, c)
    if plan.segments is None:
        outputs = kernel_seconds(call, block, whole(call), moved_bytes(call), c)
        return in_all(call, sum(before) + outputs, host_seconds(1 + len(before) + laid_out, c) + host, c["gap"])
    length, uncut, time = plan.segments.length, plan.segments.uncut, plan.segments.states.time
    outputs = kernel_seconds(call, block, cut(call, length, uncut), moved_bytes(call), c)
    built = block._replace(start=c["build_start"], step=c["build"] * block.step)
    built = built if time is None else time(plan.segments.parameters, c)
    # Each element of a state is written, read and written by the scan, and read, in float32: 16 bytes.
    final = bool(call.scalars.get("output_final_state"))
    states = states_seconds(call, length, uncut, call.dims["H"], built, 16, final, c)
    device = sum(states) + sum(before) + outputs + c["idle"] * packed
    return in_all(call, device, host_seconds(3 + len(before) + laid_out, c) + host, c["gap"])


def _copying(call: OpCall, seen: OpCall, c: Constants) -> float:
    """Returns the seconds of the launches that copy tensors to and from the widths that kernels see."""
    B, T, H, Hq, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V"))
    of_keys = 0 if seen.dims["K"] == K else B * T * K * ((H + Hq) * call.dtype.itemsize + H * gate_itemsize(call))
    of_values = 0 if seen.dims["V"] == V else B * T * V * (H + Hq) * call.dtype.itemsize
    launches = 3 * (of_keys > 0) + 2 * (of_values > 0)
    twice = 2 if call.op == "chunk_gla_bwd" else 1
    return twice * (launches * c["launch"] + 2 * (of_keys + of_values) / c["bandwidth"])


# ---- chunk_gla_bwd


def backward_seconds(plan: backward.Plan, call: OpCall, c: Constants) -> float:
    """Returns the predicted seconds of a chunk_gla_bwd call under a plan."""
    gpu = gpu_of_constants(c)
    seen = seen_by_kernels(call, gpu)
    plans = plan(seen, gpu, backward.KERNELS)
    return _copying(call, seen, c) + sum(_backward(rows, planned, c) for rows, planned in plans)


def _backward(call: OpCall, plan: BackwardPlan, c: Constants) -> float:
    H, Hq = call.dims["H"], call.dims["Hq"]
    layouts = plan.gradients.layouts + (plan.entering is not None)
    laid_out = [c["launch"]] * layouts if call.variable_length else []
    kernels = [
        *laid_out,
        *_states(call, plan.entering, plan, H, checkpoint_dtype(call.dtype).itemsize, c),
        *_states(call, plan.leaving, plan, Hq, 4, c),
        *_gradients(call, plan, c),
    ]
    return in_all(call, sum(kernels), host_seconds(len(kernels), c))


def _states(
    call: OpCall, segments: SegmentPlan | None, plan: BackwardPlan, heads: int, itemsize: int, c: Constants
) -> list[float]:
    """Returns the seconds of the kernels that compute entering states, or gradients of leaving states.

    Args:
        heads: number of heads of the tokens that are read.
        itemsize: bytes of an element of the result.
    """
    if segments is None:
        return []
    if segments.states.time is None:
        step = c["build"] * slower(plan.parameters, c) * heads / max(call.dims["H"], 1)
        block = BlockTime(CHUNK, segments.parameters.BV, c["build_start"], step, keys=segments.parameters.BK)
    else:
        block = segments.states.time(segments.parameters, c)
    moved, ends = 4 + 4 + itemsize, call.state_dtype is not None  # each element is written and scanned in float32
    return states_seconds(call, segments.length, segments.uncut, heads, block, moved, ends, c)


def _gradients(call: OpCall, plan: BackwardPlan, c: Constants) -> list[float]:
    """Returns the seconds of the kernels that compute gradients, sum partial results, add pairs and clear padding."""
    B, T, H, Hq, K, V = (call.dims[name] for name in ("B", "T", "H", "Hq", "K", "V"))
    kernel, heads = plan.gradients, Hq // max(H, 1) if plan.gradients.heads_apart else 1
    of_keys, of_values = kernel.partials(call, plan.parameters)
    size, gate = call.dtype.itemsize, gate_itemsize(call)
    found = [  # for dq, dk, dv, dg: number of elements, bytes of an element, number of partial results
        (B * T * Hq * K, size, of_keys),
        (B * T * H * K, size, of_keys * heads),
        (B * T * H * V, size, of_values * heads),
        *([(B * T * H * K, gate, of_keys * heads)] if gate else []),
    ]
    written = sum(number * (4 * parts if parts > 1 else itemsize) for number, itemsize, parts in found)
    moved = moved_bytes(call) + checkpoint_bytes(call, CHUNK) + written
    through = whole(call) if plan.leaving is None else cut(call, plan.leaving.length, plan.leaving.uncut)
    through = through._replace(number=through.number * heads)
    gradients = kernel.seconds(call, plan.parameters, through, moved, c)
    summed = [
        c["launch"] + number * (4 * parts + itemsize) / c["bandwidth"] for number, itemsize, parts in found if parts > 1
    ]
    # Nearly all chunks are mild and leave no pairs to add.
    pairs = [c["launch"]] if kernel.adds_pairs and gate else []
    padding = [c["launch"]] if call.variable_length else []
    return [gradients, *summed, *pairs, *padding]


# ---- chunk_gla_summary


def summary_seconds(plan: summary.Plan, call: OpCall, c: Constants) -> float:
    """Returns the predicted seconds of a chunk_gla_summary call under a plan."""
    T, H, Hq, K, V, N = (call.dims[name] for name in ("T", "H", "Hq", "K", "V", "N"))
    planned = plan(call, gpu_of_constants(c))
    block, state = _summary_block(call, planned, c), 4 * H * K * V  # bytes
    read = token_bytes(call, Hq)
    if planned.length >= T:
        return in_all(call, kernel_seconds(call, block, whole(call), read + N * state, c), host_seconds(1, c))
    pieces = cut(call, planned.length, planned.uncut)
    built = kernel_seconds(call, block, pieces, read + pieces.number * state, c)
    scanned = c["launch"] + pieces.number / max(N, 1) * c["scan_step"] + (pieces.number + N) * state / c["bandwidth"]
    laid_out = c["launch"] if call.variable_length else 0
    return in_all(call, laid_out + built + scanned, host_seconds(3 if call.variable_length else 2, c))


def _summary_block(call: OpCall, plan: SegmentPlan, c: Constants) -> BlockTime:
    if plan.states.time is not None:
        return plan.states.time(plan.parameters, c)
    x, heads = plan.parameters, call.dims["Hq"] / max(call.dims["H"], 1)
    times = c["tokenwise"] if x.tokenwise else 1 if x.operand == call.dtype else c["tf32"]
    return BlockTime(64, x.BV, c["build_start"], c["build"] * times * heads * x.BK * x.BV / 64**2, keys=x.BK)
