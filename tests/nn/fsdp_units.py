"""The program that test_changed_modules.py starts: each module of a layer as a unit of FSDP2, on one rank.

python tests/nn/fsdp_units.py FOLDER gla,hgrn2
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.changes import places
from tests.nn.test_changed_modules import CLOSE, RUNS, layer_of


def check(layer, units):
    """Compares a layer of which these modules are units with itself: values, gradients, a prompt and steps."""
    other = copy.deepcopy(layer)
    for path in units:
        fully_shard(other.get_submodule(path))
    fully_shard(other)
    register_fsdp_forward_method(other, "step")
    with torch.no_grad():
        torch.testing.assert_close(RUNS.stepped(other), RUNS.stepped(layer), **CLOSE)
    for model in layer, other:
        model.zero_grad()
        RUNS.loss(model).backward()
    for a, b in zip(other.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, **CLOSE)


def main(folder, names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    for name in names.split(","):
        layer = layer_of(name)
        paths = [path for path in places(layer) if any(True for _ in layer.get_submodule(path).parameters())]
        for units in [*([path] for path in paths), [x for x in paths if not list(layer.get_submodule(x).children())]]:
            check(layer, units)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
