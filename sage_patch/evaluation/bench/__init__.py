"""Time the kernels beside their peers."""
