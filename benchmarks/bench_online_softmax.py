"""Softmax in one running pass: every backend over the shared workloads."""

from __future__ import annotations


def bench_workload(case, run_case):
    run_case(case)
