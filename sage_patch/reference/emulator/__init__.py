"""The kernels' arithmetic on a CPU, bit for bit where it can be: what golden arrays and cards are compared with."""
