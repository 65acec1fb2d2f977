"""Philox against the known answers, and its uniform numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actorium.kernels.reference.philox import philox4x32, uniform

# (counter, key, output) of philox4x32 with 10 rounds, from Random123's kat_vectors.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def _numpy(values: Any) -> Any:
    return np.array(values, np.int64)


@pytest.mark.parametrize("make", [_numpy, torch.tensor])
def test_known_answers(make: Any) -> None:
    columns = [make([row[0][i] for row in KNOWN]) for i in range(4)]
    keys = [make([row[1][i] for row in KNOWN]) for i in range(2)]
    words = philox4x32(tuple(columns), tuple(keys))  # type: ignore[arg-type]
    got = [tuple(int(w[i]) for w in words) for i in range(len(KNOWN))]
    assert got == [row[2] for row in KNOWN]


def test_numpy_and_torch_agree_on_every_seed_word() -> None:
    rng = np.random.default_rng(0)
    seeds = np.concatenate((rng.integers(0, 2**63, 500), [0, 2**63 - 1, 2**32, 2**31]))
    words = seeds.astype(np.int64).view(np.int32).reshape(-1, 2).astype(np.int64)
    low, high = words[:, 0], words[:, 1]
    where = rng.integers(0, 2**31, len(seeds))
    host = uniform(low, high, where)
    device = uniform(torch.from_numpy(low), torch.from_numpy(high), torch.from_numpy(where))
    assert host.dtype == np.float64
    assert np.array_equal(host, device.numpy())
    assert host.min() >= 0 and host.max() < 1
    assert len(np.unique(host)) == len(host)


def test_uniform_over_positions_and_over_seeds() -> None:
    many = np.arange(20_000)
    one = np.ones_like(many)
    for u in (uniform(one * 7, one * 0, many), uniform(many, one * 0, one * 5)):
        counts = np.bincount((u * 20).astype(int), minlength=20)
        chi2 = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi2 < 43.8  # 19 degrees of freedom, p = 0.001
