"""Measurements that support the library's claims; run one by ``python -m benchmarks.NAME``."""
