"""The processes that torchrun starts to train together: each one's part of the model, of a batch and of a mean."""

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
    """Which of how many processes this one is, its device, and their mesh; none where torchrun did not start it."""

    rank: int
    number: int
    device: torch.device
    mesh: DeviceMesh | None

    def share(self, windows: Tensor) -> Tensor:
        """Of windows [B, ...] that all processes hold, those of this one; B is a multiple of their number."""
        return windows[self.rank :: self.number].to(self.device)

    def mean(self, value: float) -> float:
        """The mean of a number over all processes."""
        if self.mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.mesh.get_group())
        return float(total) / self.number


def start(device: torch.device) -> Processes:
    """Join the processes that torchrun started, each on a GPU of its own if `device` is one; alone without torchrun.

    Raises:
        ValueError: more processes than GPUs.
    """
    if "RANK" not in os.environ:
        return Processes(0, 1, device, None)
    if device.type == "cuda":
        here, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if here >= gpus:
            raise ValueError(
                f"--nproc-per-node is above {gpus}, the GPUs here; start one process for each, or --device cpu"
            )
        device = torch.device("cuda", here)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    return Processes(dist.get_rank(), dist.get_world_size(), device, mesh)


def finish(processes: Processes) -> None:
    """Leave the other processes."""
    if processes.mesh is not None:
        dist.destroy_process_group()


def distribute(model: LanguageModel, processes: Processes, dtype: torch.dtype) -> None:
    """Compute in `dtype`, with weights in float32: under autocast alone, sharded by FSDP2 under torchrun."""
    if processes.mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=processes.mesh, mp_policy=policy)
    elif dtype != torch.float32:
        model.forward = torch.autocast(processes.device.type, dtype)(model.forward)
