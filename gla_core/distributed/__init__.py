"""One sequence over several GPUs: each rank holds a part of the tokens, and states pass between the ranks.

    shard.py        how tokens are cut into the ranks' shards, as a value that is made once per batch
    chunk_gla.py    `chunk_gla` on a shard, forward and backward
    exchange.py     what is gathered from all ranks, and how it is folded to what enters a part
    history.py      the rows before a part, for the short convolutions of a layer

Instead of tokens, or together with them, `tensor_parallel.py` spreads the heads of a layer over ranks.

The core does not import this package, nor torch.distributed by itself; `import gla_core.distributed` does.
"""

from gla_core.distributed.chunk_gla import chunk_gla
from gla_core.distributed.shard import Shard, shard
from gla_core.distributed.tensor_parallel import tensor_parallel_plan

__all__ = ["Shard", "chunk_gla", "shard", "tensor_parallel_plan"]
