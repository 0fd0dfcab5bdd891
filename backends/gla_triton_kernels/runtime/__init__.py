"""Launches, and all they need of the device and of Triton, whatever the op."""
