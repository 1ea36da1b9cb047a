"""Benchmarks: their settings, their result files, the comparison of two results, and the page. Free of torch.

The ranks measure in `slurmddp.bench.ranks`.
"""
