"""Divides the chunks of whole sequences evenly among blocks, by McNaughton's wrap-around rule.

A job is what one block computes if there are enough multiprocessors: the L chunks of a sequence, for a head or two
and some columns of v. With a block for each of J jobs, P multiprocessors compute them in ceil(J / P) waves, and most
are idle in the last wave. Here, the chunks of all jobs are numbered through, and block i computes s of them,

    i s .. (i + 1) s - 1    where s = max(L, ceil(J L / P))

A block begins with the last of its jobs, whose rest is left to block i + 1, and ends with the first one, which block
i - 1 has begun. Since s >= L, a job has at most two blocks, and if all blocks are equally fast, its first part ends
before the second one begins; only the last block, whose share is smaller, may wait. The state between them goes through
global memory in float32, so the results have the same bits as with a block for each job.

A block waits for no block but the previous one, and each begins with the part for which another one waits. So blocks
that start in the order of their numbers do not wait for each other forever.

P blocks   J jobs   L chunks of a job   GROUPS state warpgroups of a block   SLICES slices of BK keys of a head
W columns of v of a warpgroup   BF flags of a program
share   the chunks of a block   part   the chunks of a share that belong to one job

Source: McNaughton, "Scheduling with Deadlines and Loss Functions", Management Science 6 (1959).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gla_core.dispatch.tensors import ceil_div
from gla_triton_runtime.launch import Launch


def share_jobs(
    jobs: int, chunks: int, programs: int | None, groups: int, size: int, device: torch.device
) -> tuple[dict[str, Any], int, list[Launch]]:
    """Returns arguments of a kernel that divides jobs among blocks, the number of blocks, and launches before it.

    Args:
        jobs, chunks: J and L.
        programs: P; None stands for a block for each job.
        groups: GROUPS.
        size: the number of float32 numbers that a warpgroup hands over.
    """
    if programs is None:
        return {"handed": None, "flags": None, "jobs": 0}, jobs, []
    share = max(chunks, ceil_div(jobs * chunks, programs))
    blocks = ceil_div(jobs * chunks, share)
    handed = torch.empty((blocks, groups, size), dtype=torch.float32, device=device)
    flags = torch.empty((blocks, groups), dtype=torch.int32, device=device)
    return {"handed": handed, "flags": flags, "jobs": jobs}, blocks, [launch_clear(flags)]


def launch_clear(x: Tensor) -> Launch:
    """Returns the launch that sets the numbers of x to 0."""
    BX = triton.next_power_of_2(x.numel())
    return Launch(_clear_kernel, (1, 1, 1), {"ptr": x, "n": x.numel(), "BX": BX}, {"num_warps": 4})


@gluon.jit(do_not_specialize=["n"])
def _clear_kernel(ptr, n, BX: gl.constexpr):
    """Sets the n numbers from ptr on to 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, BX, layout)  # [BX]
    gl.store(ptr + i, gl.full([BX], 0, ptr.dtype.element_ty, layout), i < n)


@gluon.jit
def share_of_block(jobs, n_chunks):
    """Returns the share of this block: the number of its last job, the number of parts, its first chunk, its end, L."""
    size = gl.maximum(gl.cdiv(jobs * n_chunks, gl.num_programs(0)), n_chunks)
    begin = gl.program_id(0) * size
    end = gl.minimum(begin + size, jobs * n_chunks)
    last = (end - 1) // n_chunks
    return last, last - begin // n_chunks + 1, begin, end, n_chunks


@gluon.jit
def part_of_share(share, p):
    """Returns the p-th part of a share: the job, the first of its chunks, the end, and the chunks of earlier parts.

    The latter are computed for each part, because Triton 3.6 and 3.7 lose a count that is carried from part to part.
    """
    last, _, begin, end, n_chunks = share
    job = last - p
    first, done = job * n_chunks, gl.maximum(end - (job + 1) * n_chunks, 0)
    return job, gl.maximum(begin - first, 0), gl.minimum(end - first, n_chunks), done


@gluon.jit
def parts_of(work):
    """Returns the number of parts of the work of this block; 1 if a segment has a block."""
    _, share, _ = work
    if share is None:
        return 1
    else:  # noqa: RET505 -- one branch is compiled
        return share[1]


@gluon.jit
def part_of(work, part, C: gl.constexpr):
    """Returns the place of a part of the work of this block, and its chunks.

    The place is (batch, head, segment, sequence, first column of v, first token, number of tokens, first token of the
    sequence, whether the state is the initial one). The chunks are (number of the first one, end, number of chunks of
    the segment, number of chunks of the earlier parts).
    """
    place, share, widths = work
    if share is None:
        return place, (0, gl.cdiv(place[6], C), gl.cdiv(place[6], C), 0)
    else:  # noqa: RET505 -- one branch is compiled
        columns, heads, HEADS, BV, T = widths
        job, passed, stop, done = part_of_share(share, part)
        n, h, column = job // columns // heads, job // columns % heads * HEADS, job % columns * BV
        return (n, h, n, n, column, 0, T, 0, passed == 0), (passed, stop, share[4], done)


@gluon.jit
def first_of_part(pointer, offset, work):
    """Returns the pointer to a part's first number, `offset` from the first one of the tensor.

    If a segment has a block, `pointer` is already there: the kernel computes it, which leaves more registers.
    """
    _, share, _ = work
    if share is None:
        return pointer
    else:  # noqa: RET505 -- one branch is compiled
        return pointer + offset


@gluon.jit
def hand_over(handed, flags, number, S, offsets):
    """Writes the state S of a job, a tuple of [BK, W] for each slice, for the block that goes on with the job.

    Args:
        handed: pointer to states [P GROUPS, SLICES BK, W].
        flags: pointer to the flags of the states, [P GROUPS].
        number: the number of the state.
        offsets: offsets of the elements [BK, W] of a slice.
    """
    SIZE: gl.constexpr = S[0].shape[0] * S[0].shape[1]
    for j in gl.static_range(len(S)):
        gl.store(handed + (number * len(S) + j).to(gl.int64) * SIZE + offsets, S[j])
    publish(flags + number)


@gluon.jit
def taken_over(handed, flags, number, j, SLICES: gl.constexpr, offsets):
    """Returns slice j [BK, W] of the state that another block has handed over; see `hand_over`."""
    SIZE: gl.constexpr = offsets.shape[0] * offsets.shape[1]
    wait_for_published(flags + number)
    return gl.load(handed + (number * SLICES + j).to(gl.int64) * SIZE + offsets)


@gluon.jit
def publish(flag):
    """Makes the earlier writes of a thread visible to the threads that wait for the flag. All threads call this."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [$1], 1; // $0",
        "=r,l",
        [flag.to(gl.int64)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_published(flag):
    """Waits until all threads of a warpgroup of another block have called `publish`."""
    gl.inline_asm_elementwise(
        """{
            .reg .pred waits;
            AGAIN:
            ld.acquire.gpu.global.s32 $0, [$1];
            setp.lt.s32 waits, $0, 128;
            @waits bra AGAIN;
        }""",
        "=r,l",
        [flag.to(gl.int64)],
        gl.int32,
        is_pure=False,
        pack=1,
    )
