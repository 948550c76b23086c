"""The compiled library: build.py finds or builds it, library.py calls it, ops.py registers the operator."""
