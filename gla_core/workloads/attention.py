"""Workloads of softmax attention and of the online softmax."""

import torch

from gla_core.workloads.rows import row

# fmt: off
ONLINE_SOFTMAX = (
    row("small", "ci", shape=(5, 33)),
    row("one_column", "ci odd", shape=(3, 1)),
    row("odd_columns", "ci odd", shape=(3, 1025)),
    row("other_dimension", "ci odd", shape=(3, 50, 7), dim=1),
    row("nothing", "ci odd", shape=(0, 4)),
    row("minus_infinity", "ci extreme", shape=(4, 3000), masked=True),
    row("many_columns", "narrow", shape=(2, 50_001)),
    *(
        row(f"rows_8192_columns_{n}", "train", shape=(8192, n), dtype=torch.bfloat16)
        for n in (1024, 4096, 16384, 50257, 65536)  # 50257: the vocabulary of GPT-2, whose rows are not aligned
    ),
    row("rows_4_columns_16m", "long", shape=(4, 2**24), dtype=torch.bfloat16),
    row("rows_4096_columns_50257", "timed_only", shape=(4096, 50257), dtype=torch.bfloat16),
    row("rows_131072_columns_128", "timed_only", shape=(131072, 128), dtype=torch.bfloat16),
)
SOFTMAX_ATTENTION = (
    row("small", "ci", "B2 Tq33 Tk33 H2 K16 V16", causal=True),
    row("not_causal", "ci", "B1 Tq20 Tk70 H2 K32 V16"),
    row("odd", "ci odd", "B1 Tq65 Tk131 H1 K19 V37", causal=True),
    row("grouped", "ci", "B2 Tq40 Tk40 H2 G3 K16 V16", causal=True),
    row("one_query", "ci decode", "B2 Tq1 Tk300 H2 K16 V16", causal=True),
    row("many_keys", "narrow", "B1 Tq3 Tk5001 H1 K8 V8", causal=True),
    row("many_queries", "narrow", "B1 Tq2501 Tk20 H1 K8 V8"),
    row("causal_b4_t4096_h16", "train", "B4 Tq4096 Tk4096 H16 K128 V128", causal=True, dtype=torch.bfloat16),
    row("one_query_131072_keys", "decode long", "B1 Tq1 Tk131072 H16 K128 V128", dtype=torch.bfloat16),
    *(
        row(f"causal_b4_t4096_{name}", "timed_only", f"B4 Tq4096 Tk4096 {sizes}", causal=True, dtype=dtype)
        for name, sizes, dtype in (
            ("h8_g4", "H8 G4 K128 V128", torch.bfloat16),
            ("h32_k64", "H32 K64 V64", torch.bfloat16),
            ("h8_k256", "H8 K256 V256", torch.bfloat16),
            ("h16_float16", "H16 K128 V128", torch.float16),
        )
    ),
)
# fmt: on
TABLES = {"online_softmax": ONLINE_SOFTMAX, "softmax_attention": SOFTMAX_ATTENTION}
