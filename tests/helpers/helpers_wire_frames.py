"""Frames that are no messages, and some that are, but of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from actorium.actors import messages as m
from actorium.actors.params import PoolingParams, ResolvedPooling, SamplingParams

encode = msgspec.msgpack.Encoder().encode


def good_frames() -> list[bytes]:
    """Real messages, of every actor."""
    params, resolved = SamplingParams(stop=["x"],
                                      logit_bias={3: 1.0}), m.ResolvedParams(max_tokens=3)
    pooling, pooled = ResolvedPooling("embed"), m.Pooled([1], b"1234")
    return [encode(message) for message in (
        m.Generate("r", SamplingParams(), text="a", pooling=PoolingParams(task="classify"),
                   text_pair="b"),
        m.Submit("r", b"c", b"1234", 1, resolved, m.TextParams(), 7, pooling=pooling),
        m.StepResult(1, 2, b"", b"", b"", pooled=[(1, pooled)]),
        m.StepPlan(1, 2, admit=[m.Admit(1, b"1234", 1, 0, b"", resolved, 7, pooling=pooling)]),
        m.TokenBatch(1, b"", b"", b"", b"", [m.SequenceEvent(1, "stop", pooled=pooled)]),
        m.Generate("r", params, text="hello"), m.Abort("r"), m.Attach(), m.GetStatus("r", True),
        m.Submit("r", b"c", b"1234", 1, resolved, m.TextParams(), 7), m.Kill("r", 1, "why"),
        m.StepResult(1, 2, b"\1", b"1234", b"\0"), m.Beat("r", 1, 1, "ready", 5, 1.0, {"a": 1.0}),
        m.StepPlan(1, 2, admit=[m.Admit(1, b"1234", 1, 0, b"1234", resolved, 7)], decode=b"1234"),
        m.Open(1, "r", 0, b"c", b"1234", m.TextParams()), m.Children([m.Child("r", 1, 1)]),
        m.TokenBatch(1, b"12345678", b"1234", b"\1", b"1234"))]


FIXED = (
    b"", b"\xc1", b"\0", b"\x91" * 100_000, b"\x81" * 5000, b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\x93\xa3Say\xa1x\xcf" + b"\xff" * 8, b"\x92\xa3Say\xa2\xc3\x28",
    encode({"rid": "x"}), encode([None] * 1000), encode(["Generate", "r", {"temperature": "hot"}]),
    encode(["Generate", 2**63, {}]), encode(["Beat", "r", -1, -1, "x", -1, -1.0]),
    encode(["StepResult", "x"]), encode(["Nope", 1]), encode(["\x1b[31m\n" * 50]),
    encode(["x" * 300_000]), encode([["Kill", "worker-0", 1, "x"]]))


def bad_frames(union: Any, rng: random.Random, count: int) -> Iterator[bytes]:
    """So many that are no messages of the union: odd ones, mutations of real ones, and those that
    belong to others."""
    decode, good, made = msgspec.msgpack.Decoder(union).decode, good_frames(), 0
    while made < count:
        match rng.randrange(4):
            case 0:
                frame = rng.choice(FIXED) if rng.random() < 0.2 else rng.randbytes(
                    rng.randrange(1, 300))
            case 1:
                frame = rng.choice(good)
            case _:
                data = bytearray(rng.choice(good))
                for _ in range(rng.randint(1, 3)):
                    place = rng.randrange(len(data)) if data else 0
                    match rng.randrange(3):
                        case 0 if data:
                            data[place] = rng.randrange(256)
                        case 1:
                            data[place:place] = rng.randbytes(rng.randint(1, 4))
                        case _:
                            del data[place:place + rng.randint(1, 40)]
                frame = bytes(data)
        try:
            decode(frame)
        except Exception:  # deep nesting and bad UTF-8 are no msgspec errors
            made += 1
            yield frame
