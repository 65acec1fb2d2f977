"""Memory of page pools that is there before it is written."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.gpu.step.pools import POPULATE_BYTES, KVPagePool, PagePrefault, zeros

PAGE, WIDTH = 16, 2048
ROW = WIDTH * 2
"""Bytes of a token in a layer."""


def pool(tokens: int, layers: int = 2) -> KVPagePool:
    rows = [zeros((tokens, 4, WIDTH // 4), torch.bfloat16, torch.device("cpu"))
            for _ in range(layers)]
    return cast(KVPagePool, SimpleNamespace(tensors=rows, layers=rows, page_size=PAGE))


def appends(*pages: int) -> StepPlan:
    return StepPlan(0, 0, page_appends=np.array([(1, i, p) for i, p in enumerate(pages)],
                                                np.int32).tobytes())


def there(layer: Tensor, first: int, last: int) -> float:
    """The share of these tokens' memory that is mapped."""
    page = (layer.data_ptr() + first * ROW) // mmap.PAGESIZE
    count = (last - first) * ROW // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(8 * page)
        present = np.frombuffer(entries.read(8 * count), np.uint64) >> np.uint64(63)
    return float(present.mean())


@pytest.fixture
def lazy() -> KVPagePool:
    made = pool(4096)
    probe = pool(1024, 1)
    ahead = PagePrefault([probe], 1024)
    ahead.all()
    if not ahead.populates:
        pytest.skip("a kernel without MADV_POPULATE_WRITE")
    return made


def test_the_first_tokens_are_there(lazy: KVPagePool) -> None:
    ahead = PagePrefault([lazy], 1024)
    ahead.all()
    assert not ahead.some()
    for layer in lazy.layers:
        assert there(layer, 0, 1024) == 1
        assert there(layer, 2048, 4096) == 0


def test_memory_keeps_ahead_of_the_pages_in_use(lazy: KVPagePool) -> None:
    ahead = PagePrefault([lazy], 512)
    ahead.all()
    used = 2048 // PAGE
    ahead.note_pages(appends(used, 3))
    ahead.all()
    for layer in lazy.layers:
        assert there(layer, 0, 2560) == 1
        assert there(layer, 3584, 4096) == 0
    ahead.note_pages(appends(5))
    assert not ahead.some()


def test_plans_without_a_pause_take_what_they_use_piece_by_piece(
        lazy: KVPagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a busy engine are queued before the step before them is over, so that nobody asks
    for memory in between: each takes a little, and no step finds that of all layers missing."""
    taken: list[Tensor] = []
    take = PagePrefault._take
    monkeypatch.setattr(PagePrefault, "_take", lambda self, layer: (
        taken.append(layer), take(self, layer))[1])
    ahead = PagePrefault([lazy], 1024)
    ahead.all()
    begun = len(taken)
    for page in range(1, 2048 // PAGE):
        before = len(taken)
        ahead.note_pages(appends(page))
        assert len(taken) - before <= 1
        for layer in lazy.layers:
            assert there(layer, page * PAGE, (page + 1) * PAGE + 512) == 1
    assert 6 <= len(taken) - begun <= 8, "2,048 tokens are four pieces in each of two layers"
    before = len(taken)
    for page in range(1, 2048 // PAGE):  # which were written before
        ahead.note_pages(appends(page))
    assert len(taken) == before


def test_the_pages_of_the_layer_that_drafts_are_there(lazy: KVPagePool) -> None:
    """Plans name no pages of it."""
    ahead = PagePrefault([pool(16)], 512, [lazy])
    ahead.note_pages(appends(2048 // PAGE))
    ahead.all()
    assert there(lazy.layers[0], 0, 2560) == 1
    assert there(lazy.layers[0], 3584, 4096) == 0


def test_a_pool_ends(lazy: KVPagePool) -> None:
    """No byte beyond it is asked for, however far ahead."""
    ahead = PagePrefault([lazy, pool(16)], 1 << 30)
    ahead.all()
    assert not ahead.some()
    assert there(lazy.layers[1], 0, 4096) == 1


def test_a_piece_of_each_layer_is_there_however_little_is_wanted(lazy: KVPagePool) -> None:
    ahead = PagePrefault([lazy], 1)
    ahead.all()
    for layer in lazy.layers:
        assert there(layer, 0, PAGE + POPULATE_BYTES // ROW) == 1


def test_a_kernel_without_it(monkeypatch: pytest.MonkeyPatch, lazy: KVPagePool) -> None:
    monkeypatch.setattr("actorium.gpu.step.pools.POPULATE_WRITE", 9999)
    ahead = PagePrefault([lazy], 1024)
    ahead.all()
    assert not ahead.populates
    assert not ahead.some()
