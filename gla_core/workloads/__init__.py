"""What is run: random inputs, named workloads for kit and benchmarks, and the calls that calibration measures."""
