"""The processes that torchrun starts to train together: their shards of the model, shares of a batch, and means.

They form groups of one process, or of --context-parallel processes. Each group reads its own windows, and process r of
a group of n reads the r-th of n equal slices of each window. Weights are sharded over all processes, because all of
them need the same weights and sum their gradients; fewer shards would only take more memory.
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
    """The rank of this process, the number of processes, its device, and its meshes.

    Attributes:
        mesh: mesh of all processes; None without torchrun.
        context: mesh of its group, which reads windows together; None if each process reads its own windows.
    """

    rank: int
    number: int
    device: torch.device
    mesh: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @property
    def groups(self) -> int:
        """Returns the number of groups that read windows of their own."""
        return self.number if self.context is None else self.number // self.context.size()

    def share(self, windows: Tensor) -> Tensor:
        """Returns this process's slice [.., t + 1] of each window of its group, out of all windows [B, T + 1].

        B is a multiple of the number of groups, and T of the number of processes in a group. The first byte of a slice
        is only read, and the last one only predicted.
        """
        n = self.number // self.groups
        group, place = divmod(self.rank, n)
        t = (windows.shape[1] - 1) // n
        return windows[group :: self.groups, place * t : (place + 1) * t + 1].to(self.device)

    def mean(self, value: float) -> float:
        """Returns the mean of a number over all processes."""
        if self.mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.mesh.get_group())
        return float(total) / self.number


def start(device: torch.device, context: int) -> Processes:
    """Joins the processes that torchrun started, each on a GPU of its own if `device` is a GPU; alone without torchrun.

    Args:
        context: number of processes that read a window together.

    Raises:
        ValueError: there are more processes than GPUs, or their number is not a multiple of `context`.
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
    """Leaves the process group at the same time as all others: gloo may abort one that ends long after another."""
    if processes.mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


def distribute(model: LanguageModel, processes: Processes, dtype: torch.dtype) -> None:
    """Sets up computation in `dtype` with float32 weights: autocast, and under torchrun sharding by FSDP2.

    Each process reads its slice of its group's windows, and the layers exchange the states between the slices.
    """
    for block in model.blocks:
        block.attention.context_parallel = processes.context
    if processes.mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=processes.mesh, mp_policy=policy)
    elif dtype != torch.float32:
        model.forward = torch.autocast(processes.device.type, dtype)(model.forward)
