"""The processes that torchrun starts to train together: each one's part of the model, of a batch and of a mean.

They are in groups, of one or of --context-parallel, and each group reads windows of its own: process r of a group of n
the r-th of n equal parts of each. Weights are sharded over all processes, for those of a group need the same ones just
as those of different groups do, and the gradients of both are summed: fewer shares would only take more memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gla_core.demo.model import LanguageModel


@dataclass(frozen=True, slots=True)
class Processes:
    """Which of how many processes this one is, its device, and the meshes that it is in.

    Attributes:
        mesh: of all processes; None where torchrun did not start them.
        context: of its group, which reads windows together; None where each process reads its own.
    """

    rank: int
    number: int
    device: torch.device
    mesh: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @property
    def groups(self) -> int:
        """How many groups read windows of their own."""
        return self.number if self.context is None else self.number // self.context.size()

    def share(self, windows: Tensor) -> Tensor:
        """Of windows [B, T + 1] that all processes hold, those of this group and the part [.., t + 1] of this process.

        B is a multiple of the number of groups, T of the processes in one. Of each part the first byte is only read and
        the last one only predicted.
        """
        n = self.number // self.groups
        group, place = divmod(self.rank, n)
        t = (windows.shape[1] - 1) // n
        return windows[group :: self.groups, place * t : (place + 1) * t + 1].to(self.device)

    def mean(self, value: float) -> float:
        """The mean of a number over all processes."""
        if self.mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.mesh.get_group())
        return float(total) / self.number


def start(device: torch.device, context: int) -> Processes:
    """Join the processes that torchrun started, each on a GPU of its own if `device` is one; alone without torchrun.

    Args:
        context: how many processes read a window together.

    Raises:
        ValueError: more processes than GPUs, or no multiple of `context`.
    """
    number = int(os.environ.get("WORLD_SIZE", "1"))
    if number % context:
        raise ValueError(f"--context-parallel is {context}; expected a divisor of the number of processes, {number}")
    if "RANK" not in os.environ:
        return Processes(0, 1, device)
    if device.type == "cuda":
        here, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if here >= gpus:
            raise ValueError(
                f"--nproc-per-node is above {gpus}, the GPUs here; start one process for each, or --device cpu"
            )
        device = torch.device("cuda", here)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (number,))
    if context == 1:
        return Processes(dist.get_rank(), number, device, mesh)
    groups = init_device_mesh(device.type, (number // context, context), mesh_dim_names=("data", "context"))
    return Processes(dist.get_rank(), number, device, mesh, groups["context"])


def finish(processes: Processes) -> None:
    """Leave the other processes, at the same time as they: gloo may abort one that ends long before another."""
    if processes.mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


def distribute(model: LanguageModel, processes: Processes, dtype: torch.dtype) -> None:
    """Compute in `dtype`, with weights in float32: under autocast alone, sharded by FSDP2 under torchrun.

    Each process has its part of the windows of its group, and the states between them pass in the layers.
    """
    for block in model.blocks:
        block.attention.context_parallel = processes.context
    if processes.mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=processes.mesh, mp_policy=policy)
    elif dtype != torch.float32:
        model.forward = torch.autocast(processes.device.type, dtype)(model.forward)
