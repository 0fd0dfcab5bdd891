"""The program that test_changed_modules.py starts: parts of models as units of FSDP2, on one rank.

python tests/compat/fsdp_units_of_models.py FOLDER
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

import gla_transformers
from gla_core.compat.transformers import accelerate
from tests.compat.test_changed_modules import CLOSE, OWN, RUNS, made
from tests.compat.test_with_transformers import model_of


def check(model, classes):
    """Compares a model of which the modules of these classes are units with itself."""
    other = copy.deepcopy(model)
    for module in reversed(list(other.modules())):
        if type(module).__name__ in classes:
            fully_shard(module)
    fully_shard(other)
    with torch.no_grad():
        torch.testing.assert_close(RUNS.stepped(other), RUNS.stepped(model), **CLOSE)
        assert torch.equal(RUNS.generated(other, True), RUNS.generated(model, False))
    for one in model, other:
        one.zero_grad()
        RUNS.loss(one).backward()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, **CLOSE)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    norms, attention = ["RMSNormGated"], ["GatedLinearAttention", "HGRN2"]
    for kind in OWN:
        for units in (["Block"], norms, attention, ["GatedMLP"], [*norms, "Linear", "Embedding"], ["Block", *norms]):
            check(made(gla_transformers, kind), units)
    with accelerate():
        for units in (["Mamba2Mixer"], ["Mamba2Block", "Mamba2RMSNorm"]):
            check(model_of("Mamba2"), units)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
