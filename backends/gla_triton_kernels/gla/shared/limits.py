"""Limits on decay that keep exponentials in range. The docstring of each kernel says what it computes beyond them.

`MILD_DECAY`, `MILD_DECAY_SM90`, `MILD_DECAY_HALF` and `LEAST_GATE` are in nats.
"""

from __future__ import annotations

import triton.language as tl

# A chunk is mild if no channel decays by more than this limit from its first token to its last. Queries and keys are
# then decayed relative to half of the decay of the chunk, so exponents are within half of the limit.
#
# The limit of the general kernels is 60, so exponents are within +-30. The largest score that the mask discards,
# q k K exp(60), is then finite for |q| and |k| up to 1e4 and K up to 1024 (float32 and bfloat16 reach 3.4e38). The
# scores that the mask keeps are far above the least normal number. The error of sums of gates is at most 2^-18 in
# float32.
MILD_DECAY = tl.constexpr(60.0)
# The limit of the kernels for SM90 is 80, so the largest factor of a mild chunk is exp(40) = 2e17. With this factor,
# sums of products of inputs from 1e-9 to 1e9 stay in range. Scores above the diagonal may overflow; the mask discards
# them.
MILD_DECAY_SM90 = tl.constexpr(80.0)
# With float16 inputs the limit is 12, so factors are between 1 / 403 and exp(6) = 403. A chunk whose |q| or |k| exceeds
# MILD_INPUT_HALF is not mild: its product with the factor could exceed 65504, the largest number of float16.
MILD_DECAY_HALF = tl.constexpr(12.0)
MILD_INPUT_HALF = tl.constexpr(160.0)

# The exp of a gate below this limit is 0 in float32, so sums of gates replace such a gate by the limit. The sums then
# stay finite. Over a chunk of 64 tokens their error is at most 5e-4, which is an eighth of the rounding of bfloat16.
LEAST_GATE = tl.constexpr(-120.0)

# The base-2 logarithm of the least normal number of float32. A product that gates decay below this number counts as 0.
LEAST_NORMAL = tl.constexpr(-126.0)
