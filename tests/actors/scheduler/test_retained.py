"""What a scheduler keeps of requests that are over is bounded by bytes, whatever they asked for."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array

import msgspec
import numpy as np
import pytest

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.messages import RowLogprobs, Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.scheduler.recovery import recovery_log as recovery
from actorium.actors.scheduler.recovery.recovery_log import RecoveryLog, joined_rows
from actorium.actors.scheduler.request_state import RequestState, new_request_state

LIMIT, MANY = 1 << 17, 100


def logprobs(draw: random.Random, count: int, k: int, start: int = 0) -> RowLogprobs:
    floats = array("f", [draw.random() for _ in range(count)]).tobytes()
    ints = array("i", [draw.randrange(1000) for _ in range(count)]).tobytes()
    return RowLogprobs(0, start, floats, ints, ints * k, floats * k)


def ended(number: int, kind: str, draw: random.Random) -> RequestState:
    """A request of many tokens, choices, stop strings, ..., as the scheduler has it at its end."""
    prompt = np.arange(draw.randrange(20, 400), dtype=np.int32).tobytes()
    params, text, n, k = ResolvedParams(max_tokens=64), TextParams(), 1, 0
    if kind == "choices":
        n = 32
    elif kind == "bias":
        params = ResolvedParams(max_tokens=64, logit_bias={i: 0.5 + i for i in range(800)})
    elif kind == "stops":
        text = TextParams(stop=tuple(f"{number} {i}" + 200 * "x" for i in range(16)))
    elif kind == "logprobs":
        k = 20
    submit = Submit(rid=f"{kind}-{number}", client=b"c", prompt=prompt, n=n, params=params,
                    text=text, seed=1,
                    grammar=f"{number}" + 3000 * "g" if kind == "grammar" else "")
    # As it comes: decoded, so that nothing is shared.
    submit = msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit)
    request = new_request_state(submit, 100 * number)
    for choice in request.choices:
        choice.emitted = np.arange(64, dtype=np.int32)
        if k:
            choice.logprobs = [logprobs(draw, 1, k) for _ in range(64)]
    request.live.clear()
    return request


KINDS = ["plain", "choices", "bias", "stops", "grammar", "logprobs"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_bounded_and_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is what Python has taken, by half as much again at the most."""
    monkeypatch.setattr(recovery, "RETAINED_BYTES", LIMIT)
    history, draw = RecoveryLog(RecoveryConfig()), random.Random(0)
    history.finished([ended(0, kind, draw)], 0.0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, MANY):
            history.finished([ended(number, kind, draw)], 0.0)
            assert history.retained.bytes <= LIMIT
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < len(history.retained) < MANY - 1, "the limit was met"
    assert taken < 1.5 * LIMIT
    assert taken > LIMIT / 6, "not so careful that nothing is kept"


def test_finished_requests_leave_no_counted_bytes() -> None:
    history, draw = RecoveryLog(RecoveryConfig(retain=10.0)), random.Random(1)
    for number in range(300):
        history.finished([ended(number, draw.choice(KINDS), draw)], float(number) / 10)
    assert len(history.retained) and history.retained.bytes
    history.finished([], 1e6)
    assert not len(history.retained) and history.retained.bytes == 0


def test_rows_are_joined_where_they_have_as_many_alternatives() -> None:
    draw = random.Random(2)
    rows = [logprobs(draw, 3, 2, 5), logprobs(draw, 1, 2, 8), logprobs(draw, 2, 0, 9)]
    first, second = joined_rows(rows)
    assert first.start == 5 and second == rows[2]
    assert first.chosen == rows[0].chosen + rows[1].chosen
    assert first.top_ids == rows[0].top_ids + rows[1].top_ids
    assert first.ranks == rows[0].ranks + rows[1].ranks
    assert first.top_logprobs == rows[0].top_logprobs + rows[1].top_logprobs
    assert joined_rows([]) == []
