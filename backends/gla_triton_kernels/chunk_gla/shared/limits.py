"""Two limits on decay that keep exponentials in range, in nats; kernels say what they do beyond them."""

from __future__ import annotations

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# A chunk is mild if no channel decays by more in it: its queries and keys are then decayed from the middle of the
# chunk's decay, by exponents within half of this limit.
#
# 60 in the general kernel: exponents within +-30 keep the largest score that the mask discards, q k K exp(60), finite
# for |q| and |k| up to 1e4 and K up to 512 (float32 and bfloat16 reach 3.4e38), keep what the mask leaves far above the
# least normal number, and sums of gates are then good to 2^-18 in float32.
MILD_DECAY = tl.constexpr(60.0)
# 80 in the kernels for SM90: exp(40) = 2e17 is the largest factor of a mild chunk. Sums of products of inputs from 1e-9
# to 1e9 stay in range with it; scores above the diagonal may not, but are dropped before they are used.
MILD_DECAY_SM90 = tl.constexpr(80.0)

# The exp of a gate below this one is 0 in float32, so where gates are summed it counts as this one: the sums stay
# finite and, over a chunk of 64, exact to 5e-4, an eighth of bfloat16's rounding.
LEAST_GATE = tl.constexpr(-120.0)

# The base-2 logarithm of float32's least normal number: what gates decay by more than to this counts as forgotten.
LEAST_NORMAL = tl.constexpr(-126.0)
