"""Workloads: random inputs, named workloads for the kit and the benchmarks, and the calls that calibration measures."""
