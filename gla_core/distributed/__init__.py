"""Sequences spread over several GPUs: each rank holds a shard of the tokens, and the ranks exchange states.

    shard.py        cuts the tokens into the ranks' shards; a `Shard` is made once per batch
    over_ranks.py   runs an op on a shard, forward and backward
    chunk_gla.py    runs `chunk_gla` by it
    chunk_delta.py  runs `chunk_delta` by it
    exchange.py     exchanges the ranks' summaries and computes the states that enter this rank's pieces
    history.py      fetches the rows before a piece, for the short convolutions of a layer

`tensor_parallel.py` spreads the heads of a layer over ranks, instead of the tokens or in addition to them.

`import gla_core` imports neither this package nor torch.distributed; `import gla_core.distributed` imports both.
"""

from gla_core.distributed.chunk_delta import chunk_delta
from gla_core.distributed.chunk_gla import chunk_gla
from gla_core.distributed.shard import Shard, shard
from gla_core.distributed.tensor_parallel import tensor_parallel_plan

__all__ = ["Shard", "chunk_delta", "chunk_gla", "shard", "tensor_parallel_plan"]
