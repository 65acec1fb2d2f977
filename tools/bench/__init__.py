"""Benchmarks: serving under load, of any server; throughput of a batch; runs compared."""
