"""The program that test_ranks.py starts: its processes are the ranks of a group, and run checks together.

    python tests/distributed/start.py FOLDER 2,4 cpu     groups of two and of four ranks with gloo, one after the other;
                                                         forked, so that the package is imported once
    python tests/distributed/start.py FOLDER 2 cuda      with NCCL and a GPU each; spawned, as CUDA requires

A check is a function of a `Ranks`. All ranks call the same checks in the same order. A check that fails ends all
processes, and its traceback is shown.
"""

import datetime
import sys
import time

import chunk_gla_checks
import delta_rule_checks
import dtensor_checks
import exchange_checks
import gpu_checks
import layer_checks
import tensor_parallel_checks
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.multiprocessing.spawn import start_processes

MODULES = (exchange_checks, delta_rule_checks, chunk_gla_checks, layer_checks, tensor_parallel_checks, dtensor_checks)
ON_CPU = [function for module in MODULES for name, function in vars(module).items() if name.startswith("check_")]
NUMBERS = chunk_gla_checks.NUMBERS | layer_checks.NUMBERS | tensor_parallel_checks.NUMBERS | dtensor_checks.NUMBERS
"""Checks for a fixed number of ranks; the others work with any number."""


def be(rank, number, folder, kind):
    torch.set_num_threads(1)
    where = {
        "init_method": f"file://{folder}/{kind}-{number}",
        "rank": rank,
        "world_size": number,
        "timeout": datetime.timedelta(seconds=60),
    }
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **where)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **where)
    for check in gpu_checks.CHECKS if kind == "cuda" else ON_CPU:
        if NUMBERS.get(check, number) == number:
            begin = time.monotonic()
            check(Ranks(rank, number, device))
            if rank == 0:
                print(f"{check.__name__}: {time.monotonic() - begin:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, numbers, kind = sys.argv[1:]
    for number in map(int, numbers.split(",")):
        start_processes(be, (number, folder, kind), number, start_method="spawn" if kind == "cuda" else "fork")
