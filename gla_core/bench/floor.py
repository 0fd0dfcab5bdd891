"""The memory floor: the least bytes that an op can move, and the time that a device needs to move them.

    forward    every input read once, every output written once
    backward   every input read again, the gradient of every output read, the gradient of every input written

A forward with its backward is the sum of both. For chunk_gla in bfloat16 with float32 gates and K = V = 128, per token
and head: q k v g in and o out are 1536 bytes; q k v g do in and dq dk dv dg out are 2816 more, 4352 together.
Offsets, indices, and data that an implementation keeps between the two do not count. Softmax attention is bound by
arithmetic and not by this floor, except with few queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gla_core.ops import PUBLIC_OPS
from gla_core.workloads.inputs import describe


def floor_bytes(op: str, sizes: Mapping[str, Any], backward: bool = False) -> int:
    """Returns the least number of bytes that a call can move.

    Args:
        op: a public op, as in `gla_core.ops.PUBLIC_OPS`.
        sizes: as in `Workload.sizes`. A chunk_gla with an initial state also returns the final state.
        backward: count the forward and its backward. Some ops, such as a step, have none.

    Raises:
        ValueError: the op does not exist, or `backward` is set and the op has no backward.

    Example:
        >>> sizes = {"shape": (8, 1024), "dtype": torch.bfloat16}
        >>> floor_bytes("online_softmax", sizes)
        32768
    """
    if op not in PUBLIC_OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(PUBLIC_OPS)}")
    spec = PUBLIC_OPS[op]
    if backward and not spec.differentiable:
        raise ValueError(f"{op} has no backward; leave out backward=True")
    if sizes.get("rows") is not None:  # of a pool, only the states of served rows count
        sizes = {**sizes, "B": sum(row >= 0 for row in sizes["rows"])}
    inputs, outputs = spec.floor_bytes(describe(spec.name, sizes, torch.device("cpu")))
    # backward: inputs again, gradients of the outputs, and gradients that are as large as the inputs
    return inputs + outputs + (backward and 2 * inputs + outputs)


def floor_seconds(op: str, sizes: Mapping[str, Any], bandwidth: float, backward: bool = False) -> float:
    """Returns the seconds to move `floor_bytes` at `bandwidth` bytes per second, read and written together."""
    return floor_bytes(op, sizes, backward) / bandwidth
