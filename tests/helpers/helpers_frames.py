"""Frames that are no message of `helpers_runtime`, by what is wrong with them."""

from __future__ import annotations

import random

from helpers_runtime import Told
from msgspec.msgpack import encode

BAD_FRAMES = {
    "empty": b"",
    "random": random.Random(1).randbytes(300),
    "not msgpack": b"\xc1\xc1\xc1",
    "truncated": encode(Told("x" * 50))[:-7],
    "trailing": encode(Told("x")) + b"\x00",
    "deep nesting": b"\x95\xa3Say\xa1x\x00\xa0" + b"\x91" * 100_000,
    "huge int": b"\x93\xa3Say\xa1x\xcf" + b"\xff" * 8,
    "negative int": encode(["Say", "x", -1]),
    "bad UTF-8": b"\x92\xa3Say\xa2\xc3\x28",
    "unknown tag": encode(["Nope", 1]),
    "wrong type": encode(["Say", 7]),
    "too many fields": encode(["Told", "x", 1, 2, 3]),
    "a map": encode({"text": "x"}),
    "a number": encode(3),
    "a huge claimed length": b"\xdd\xff\xff\xff\xff",
}
