"""The checksum that pages carry: zlib's CRC-32, at the memory's speed where there are C kernels."""

from __future__ import annotations

import zlib

import numpy as np

from actorium.kernels.cpu.native_library import library


def native_crc32(data: memoryview) -> int:
    """`zlib.crc32` of contiguous bytes, by the C kernels if they can be had."""
    lib = library()
    if lib is None:
        return zlib.crc32(data)
    found = np.zeros(1, np.uint32)
    lib.crc_of(np.frombuffer(data, np.uint8).ctypes.data, len(data), found.ctypes.data)
    return int(found[0])
