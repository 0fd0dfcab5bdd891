import pytest

from gla_core.bench.results import Results
from gla_core.bench.suite import Row


@pytest.fixture(autouse=True)
def isolated(fresh_registry, plain_terminal):
    """Isolates every test here from the environment."""


@pytest.fixture
def synthetic():
    """Returns made-up results."""

    def row(workload, backend, direction="forward", op="chunk_gla", **fields):
        return Row(workload=workload, op=op, backend=backend, direction=direction, **fields)

    rows = [
        row("short", "fla", seconds=2e-3, calls=9, gigabytes_per_second=400.0, floor_fraction=0.1),
        row("short", "mine", seconds=5e-4, calls=9, gigabytes_per_second=1600.0, floor_fraction=0.4),
        row("grouped", "mine", error="ValueError: a | b"),
        row("small", "mine", "step", "recurrent_gla_step", seconds=1.5e-5, calls=3),
    ]
    empty = Results(
        device="NVIDIA Pretend",
        driver="1.2.3",
        python="3.12.0",
        torch="2.11.0",
        triton="3.6.0",
        fla=None,
        gla_core="0.1.0",
        commit="0123456789abcdef",
        date="2026-01-02T03:04:05+00:00",
        copy_bandwidth=4e12,
    )
    return empty.with_rows(rows)
