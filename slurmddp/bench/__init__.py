"""Benchmarks: settings, result files, the comparison of two results, and the page. No module imports torch.

`slurmddp.bench.ranks` holds the code that measures on the ranks.
"""
