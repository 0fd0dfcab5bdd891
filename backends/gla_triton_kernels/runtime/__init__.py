"""What launches need of the device and of Triton, whatever the op."""
