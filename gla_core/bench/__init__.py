"""Measures every op on every backend against its memory floor, over the workloads that the conformance kit checks."""
