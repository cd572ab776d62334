"""Other people's ALiBi, run as it is installed and held to the laws of :mod:`alibi_core.conformance`.

``python -m benchmarks.ecosystem`` prints who agrees with the paper, who with the contract of its own checkpoints, and
where each departs, by how much.
"""
