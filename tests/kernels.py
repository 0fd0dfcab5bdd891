"""Whether kernels are interpreted, and the dtypes that they are tested in."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
