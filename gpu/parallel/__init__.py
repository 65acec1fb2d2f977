"""Tensor parallelism: the ranks that share one model, what each of them reads of its weights, and
how they sum what they make."""
