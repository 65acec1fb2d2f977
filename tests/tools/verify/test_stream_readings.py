"""How `actorium verify` reads streams: over HTTP, cut anywhere, taken up."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import msgspec
import pytest

from actorium.actors.gateway.api.completions import CompletionBody
from actorium.actors.gateway.http.replies import encode_json
from actorium.tools.bench.http_client import EventReader
from actorium.tools.verify.conditions import PLAIN, Condition
from actorium.tools.verify.http_readers import choices_of, cut_of, gateway_body
from actorium.tools.verify.verify_cases import SCHEMA, VerifyCase

CASE = VerifyCase(prompt=(5, 6), max_tokens=20, seed=11, schema=SCHEMA, stop=("e", "ing"),
                  allowed=(9, 10), top_k=7)


def test_cuts_fall_anywhere() -> None:
    """Before the first token, behind all but the last, and in between; and stay where they are."""
    cuts = [cut_of(CASE, Condition(reading="http-cut", position_seed=place, choices=2))
            for place in range(400)]
    tokens = Counter(cut.tokens for cut in cuts if cut)
    assert len(cuts) == tokens.total() and set(tokens) == set(range(40))
    assert tokens[0] > 50 and tokens[39] > 50
    assert 0 < sum(cut.anew for cut in cuts if cut) < 200
    assert cut_of(CASE, Condition(reading="cut", position_seed=3, choices=2)) == cuts[3]
    one = msgspec.structs.replace(CASE, max_tokens=1)
    assert {cut_of(one, Condition(reading="cut", position_seed=place)).tokens  # type: ignore[union-attr]
            for place in range(50)} == {0}
    assert cut_of(CASE, PLAIN) is None and cut_of(CASE, Condition(reading="http")) is None


def test_a_body_says_what_the_case_does() -> None:
    body = gateway_body(CASE, Condition(choices=2), "salt", 60.0)
    read = msgspec.json.decode(msgspec.json.encode(body), type=CompletionBody)
    assert set(body) <= set(CompletionBody.__struct_fields__), "none is passed over"
    assert read.guided_json == SCHEMA and read.stop == ["e", "ing"] and read.n == 2
    assert read.allowed_token_ids == [9, 10] and read.top_k == 7 and not read.ignore_eos
    assert "logprobs" not in gateway_body(CASE, Condition(logprobs=False), "salt", 60.0)


def events(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, **part}]} for part in parts]


def test_events_make_an_answer() -> None:
    [answer, other] = choices_of([
        *events({"text": "a", "token_ids": [3], "logprobs": {
            "tokens": ["token_id:3"], "token_logprobs": [-0.5],
            "top_logprobs": [{"token_id:3": -0.5, "token_id:9": None}]}}),
        {"choices": [{"index": 1, "text": "", "token_ids": [4]}]},
        *events({"text": "", "token_ids": [], "finish_reason": "stop"}), {"choices": []}], 2)
    assert answer.tokens == (3,) and answer.text == "a" and answer.finish == "stop"
    assert answer.logprobs == (-0.5,) and answer.tops == ({3: -0.5, 9: float("-inf")},)
    assert other.tokens == (4,) and other.logprobs is None and other.finish == ""


@pytest.mark.parametrize("bits", [1, 0x80000001, 0x3DCCCCCD, 0xC2C80001, 0xBF7FFFFF, 0xFF7FFFFF])
def test_decimal_text_gives_the_bits_back(bits: int) -> None:
    """Of float32, as log-probabilities are."""
    [value] = struct.unpack("<f", struct.pack("<I", bits))
    [back] = msgspec.json.decode(encode_json([value]))
    assert struct.pack("<d", back) == struct.pack("<d", value)


def test_the_last_id_is_that_of_the_event_that_was_told() -> None:
    """However the stream is cut."""
    stream = b"id: a:1\ndata: x\n\nid: a:2\ndata: y\n\ndata: z\n\nid: a:3\n"
    for size in (1, 2, 7, len(stream)):
        reader, told = EventReader(), []
        for at in range(0, len(stream), size):
            told += [(data, reader.last_id) for data in reader.feed(stream[at:at + size])]
        assert told == [(b"x", b"a:1"), (b"y", b"a:2"), (b"z", b"a:2")]
