"""The dtypes that kernels are tested in, which depend on whether they are interpreted."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
