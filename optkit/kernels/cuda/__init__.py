"""Our own kernels for NVIDIA GPUs, compiled when needed: 4 or 16-bit weights, and attention."""
