"""Measurements of what the library claims; each is run as ``python -m benchmarks.NAME``."""
