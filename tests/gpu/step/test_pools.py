"""The page pool's memory."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from helpers_models import CPU, load, write_checkpoint

from actorium.gpu.step.pools import KVPagePool, page_bytes


def test_a_pool_takes_memory_only_where_it_is_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    shape = load(tmp_path).shape
    size = page_bytes(shape, 16, torch.float32)
    pages = (512 << 20) // size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = KVPagePool(shape, pages, 16, torch.float32, CPU)
    assert pool.bytes == pages * size
    assert all(not bool(layer[-1].any()) and layer.dtype is torch.float32 for layer in pool.layers)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
