"""Paired benchmarks: arms alternate within one run, and ratios come from that run."""
