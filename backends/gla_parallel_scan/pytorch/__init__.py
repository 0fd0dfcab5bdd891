"""The algorithm of this backend in PyTorch, for a CPU and for reading: one file per op."""
