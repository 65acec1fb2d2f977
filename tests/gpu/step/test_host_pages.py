"""Copies of pages in the host's memory, and their checksums."""

from __future__ import annotations

import random

import numpy as np
import torch

from actorium.gpu.step.host_pages import HostPages

PAGES, SIZE = 50, 4


def column(rows: list[tuple[int, int]]) -> bytes:
    """rows: page and slot."""
    return np.array([(0, page, slot) for page, slot in rows], np.int32).tobytes()


def test_a_thousand_flips_are_found_and_no_page_with_one_is_copied() -> None:
    torch.manual_seed(3)
    tensors = [torch.randn(PAGES * SIZE, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    tensors.append(torch.randint(-9, 9, (PAGES * SIZE, 6), dtype=torch.int8))
    width = SIZE * (3 * 32 + 6)
    host = HostPages([[own.view(PAGES, -1) for own in tensors]], width * PAGES + 1)
    assert host.slots == PAGES and host.data.shape == (PAGES, width)
    before = [own.clone() for own in tensors]
    everything = [(i, PAGES - 1 - i) for i in range(PAGES)]
    assert host.copy(column(everything), b"") == b""
    back = everything
    dice = random.Random(5)
    for _ in range(20):  # of 50 flips each
        for own in tensors:
            own.zero_()
        flips = [(slot, dice.randrange(width), 1 << dice.randrange(8)) for slot in range(PAGES)]
        for slot, at, bit in flips:
            host.data[slot, at] ^= bit
        lost = np.frombuffer(host.copy(b"", column(back)), np.int32)
        assert sorted(lost.tolist()) == list(range(PAGES))
        assert not any(own.any() for own in tensors)
        for slot, at, bit in flips:
            host.data[slot, at] ^= bit
    assert host.copy(b"", column(back)) == b""
    assert all(torch.equal(own, old) for own, old in zip(tensors, before, strict=True))
