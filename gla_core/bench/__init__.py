"""Time and memory floor of every op on every backend, over the workloads that the conformance kit checks."""
