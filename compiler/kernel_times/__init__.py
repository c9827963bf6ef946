"""What kernels and segments take, measured on this machine."""
