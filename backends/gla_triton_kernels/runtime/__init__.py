"""Launches, and the parts of the device and of Triton that they depend on, for every op."""
