"""Philox4x32-10: random numbers by counter, so that a draw depends on (seed, position) alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; checked
against the known-answer vectors of their Random123 library. The same code serves numpy and torch
(int64 arrays of 32-bit words), on the host or on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
FORCED = 1 << 31
"""Positions from here on draw forced acceptances and nothing else."""
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any],
               rounds: int = 10) -> tuple[Any, Any, Any, Any]:
    """The four output words for each counter and key.

    All are int64 arrays (numpy or torch) of one shape, or broadcastable, with values below 2**32;
    so are the results. Products wrap modulo 2**64, whose low and high words are all that is used.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK,
                          ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK)
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed_low: Any, seed_high: Any, position: Any) -> Any:
    """One uniform number in [0, 1) per row, with 53 random bits.

    `seed_low`, `seed_high`: int64[R], the seed's words; `position`: int64[R] below 2**32.
    Returns float64[R] of the same kind.
    """
    zero = position * 0
    a, b, _, _ = philox4x32((position, zero, zero, zero), (seed_low & _MASK, seed_high & _MASK))
    bits = ((a >> 5) << 26) | (b >> 6)
    return (bits.double() if isinstance(bits, Tensor) else bits.astype(np.float64)) * 2.0**-53
