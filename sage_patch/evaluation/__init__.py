"""Measure a policy against the unpatched model: load, run, compare, and show the results."""
