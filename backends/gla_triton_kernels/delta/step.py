"""Computes one token, or several tokens, of a delta rule by the kernels of gated linear attention (../gla/step/).

    u = beta (v - k diag(exp g) S)        S' = diag(exp g) S + k^T u        o = scale * q S'

A delta rule adds u at its keys where gated linear attention adds v. A program holds all keys of its columns of a state,
so it can compute the read k diag(exp g) S itself. Rings hold u, so accepted tokens are replayed as in gated linear
attention. The kernels take what a layer projects, and compute unit vectors, gates and betas.
"""

from __future__ import annotations

from gla_core.dispatch.backend import Prepared
from gla_triton_kernels.gla import step

STEP = step.DELTA_STEP
STEPS = Prepared(step.STEPS.prepare, (*step.STEPS.takes, *step.DELTA))
"""Several tokens: one kernel reads the state of every sequence once, and writes it after each token."""
REPLAY = Prepared(step.REPLAY.prepare, (*step.REPLAY.takes, *step.DELTA))
"""Several tokens after those accepted: one kernel reads the state of every sequence once and writes it once."""
