"""What test_ranks.py starts: processes that are the ranks of a group on a CPU, and go through checks together.

    python tests/distributed/start.py FOLDER RANKS

A check is a function of a `Ranks`; all ranks call the same ones in the same order, and one that fails ends the process
with its traceback. The package is imported once, before the processes are forked.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback

import of_chunk_gla
import of_dtensors
import of_layers
import of_tensor_parallel
import torch
import torch.distributed as dist
from ranks import Ranks

CHECKS = [
    function
    for module in (of_chunk_gla, of_layers, of_tensor_parallel, of_dtensors)
    for name, function in vars(module).items()
    if name.startswith("check_")
]
OF_NUMBER = of_chunk_gla.OF_NUMBER | of_layers.OF_NUMBER | of_tensor_parallel.OF_NUMBER | of_dtensors.OF_NUMBER
"""Checks of one number of ranks; the others are of any."""


def be(rank: int, number: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/{number}"
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=number, timeout=timeout)
    for check in CHECKS:
        if OF_NUMBER.get(check, number) == number:
            begin = time.monotonic()
            check(Ranks(rank, number))
            if rank == 0:
                print(f"{check.__name__}: {time.monotonic() - begin:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, number: int) -> int:
    """Fork the ranks; returns how many of them failed."""
    children = []
    for rank in range(number):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                be(rank, number, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
