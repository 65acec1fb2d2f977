"""What actors keep of requests that are over takes no more than `retention` says."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actorium.actors.config import retention
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.detokenizer.client_connections import ClientConnections
from actorium.actors.detokenizer.ended_sequences import EndedSequences, QuarantinedRequests
from actorium.actors.errors import InvalidRequest, Quarantined
from actorium.actors.gateway.api.response_store import ResponseStore, StoredResponse
from actorium.actors.gateway.served_model import TokenTexts
from actorium.actors.messages import AbortRequest, Open
from actorium.actors.params import Structured, TextParams
from actorium.actors.runtime.client_endpoint import ClientEndpoint
from actorium.actors.runtime.inflight_journal import InflightJournal, name_of
from actorium.actors.scheduler.queue_policies import VirtualTokenCounter
from actorium.actors.structured.grammar_validator import GrammarValidator
from actorium.actors.structured.schemas import checked_schema
from actorium.actors.tokenizer.core import TokenizerCore

SMALLER = 16
"""Bounds that are numbers are tried at this part of them."""
Fill = Callable[[pytest.MonkeyPatch], Any]


def client(number: int) -> bytes:
    """An identity of the largest size."""
    return number.to_bytes(8, "big") + bytes(247)


def rid(number: int) -> str:
    return f"{number:064d}"


def fewer(monkeypatch: pytest.MonkeyPatch, where: str, name: str) -> int:
    """Divide a bound by `SMALLER`; what it is then."""
    bound = int(getattr(retention, name)) // SMALLER
    monkeypatch.setattr(f"actorium.actors.{where}.{name}", bound)
    return bound


def names_of_requests(monkeypatch: pytest.MonkeyPatch) -> Any:
    core = SimpleNamespace(_known={})
    for number in range(3 * fewer(monkeypatch, "tokenizer.core", "KNOWN_REQUESTS")):
        TokenizerCore._remember(core, (client(number), rid(number)), 1000 + number,
                                # type: ignore[arg-type]
                                0.5 + number)
    return core


def checked_grammars(monkeypatch: pytest.MonkeyPatch) -> Any:
    bound = fewer(monkeypatch, "structured.grammar_validator", "CHECKED_BYTES")
    grammars = GrammarValidator(Path(), None)  # type: ignore[arg-type]
    for number in range(2 * bound // 1000):
        key = msgspec.msgpack.encode(Structured(regex=f"{number}" + 900 * "x"))
        grammars._keep(key, f"{number}" + 900 * "y" if number % 2
                       else InvalidRequest(f"{number}" + 900 * "z", "structured"))
    return grammars


def ended_sequences(monkeypatch: pytest.MonkeyPatch) -> Any:
    departed = EndedSequences()
    for number in range(3 * fewer(monkeypatch, "detokenizer.ended_sequences", "ENDED_SEQUENCES")):
        departed.ended(SimpleNamespace(sid=1 << 40 | number, seen=1000 + number,
                                       # type: ignore[arg-type]
                                       stop_reason="x",
                                       key=(client(number), rid(number), 1000 + number)))
    return departed


def lost_clients(monkeypatch: pytest.MonkeyPatch) -> Any:
    bound = fewer(monkeypatch, "detokenizer.ended_sequences", "LOST_REQUESTS")
    clients = fewer(monkeypatch, "detokenizer.ended_sequences", "LOST_CLIENTS")
    departed = EndedSequences()
    for number in range(3 * bound):
        departed.give_up_requests(client(number % (2 * clients)), [rid(number)])
    return departed


def one_lost_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    bound = fewer(monkeypatch, "detokenizer.ended_sequences", "LOST_REQUESTS")
    departed = EndedSequences()
    for number in range(0, 3 * bound, 64):
        departed.give_up_requests(client(1), [rid(number + i) for i in range(64)])
    return departed


def clients_reached(monkeypatch: pytest.MonkeyPatch) -> Any:
    readers = ClientConnections()
    for number in range(3 * fewer(monkeypatch, "detokenizer.client_connections",
                                  "REACHED_CLIENTS")):
        readers.connected(client(number))
    return readers


def refused_sequences(monkeypatch: pytest.MonkeyPatch) -> Any:
    refusals = QuarantinedRequests(InflightJournal(actor="detokenizer"))
    for number in range(3 * fewer(monkeypatch, "detokenizer.ended_sequences", "REFUSED_SEQUENCES")):
        refusals._keep(name_of(client(number)), Quarantined(rid(number) + 100 * "x"))
    return refusals


def tenants_shares(monkeypatch: pytest.MonkeyPatch) -> Any:
    shares = VirtualTokenCounter(keep=retention.IDLE_TENANTS // SMALLER)
    for number in range(3 * retention.IDLE_TENANTS):
        shares.arrive(rid(number))
        shares.admit(rid(number))
        shares.charge(rid(number), 10 + number, 5)
        shares.leave(rid(number), running=True)
    return shares


def clients_given_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    front = SimpleNamespace(_given_up={})
    for number in range(3 * fewer(monkeypatch, "runtime.client_endpoint", "GIVEN_UP_CLIENTS")):
        ClientEndpoint._give_up(front, client(number))  # type: ignore[arg-type]
    return front


def tokens_texts(monkeypatch: pytest.MonkeyPatch) -> Any:
    bound = fewer(monkeypatch, "gateway.served_model", "TOKEN_TEXTS")
    pieces = TokenTexts(Config())
    for token in range(1 << 20, (1 << 20) + 2 * bound - 1):
        pieces.bytes_of(token)
    return pieces


def checked_schemas(monkeypatch: pytest.MonkeyPatch) -> Any:
    check = lru_cache(retention.CHECKED_SCHEMAS // SMALLER)(checked_schema.__wrapped__)
    for number in range(2 * retention.CHECKED_SCHEMAS // SMALLER):
        check(json.dumps({"properties": {
            f"{number}{place}" + 10_000 * "ü": {"uniqueItems": True} for place in "uvwxyz"}},
            ensure_ascii=False))
    return check


ROWS: dict[str, list[Fill]] = {
    "names of requests": [names_of_requests], "checked grammars": [checked_grammars],
    "ended sequences": [ended_sequences], "lost clients": [lost_clients, one_lost_client],
    "clients reached": [clients_reached], "refused sequences": [refused_sequences],
    "tenants' shares": [tenants_shares], "clients given up": [clients_given_up],
    "tokens' texts": [tokens_texts], "checked schemas": [checked_schemas]}
ELSEWHERE = {"finished requests": "test_retained", "compiled grammars": "test_grammar",
             "requests' templates": "test_prompt_options", "dashboard": "test_gateway_page",
             "stored responses": "here, by SQLite's own count"}
SERVING = Config(gateway=GatewayConfig(port=0))


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Bytes that Python has taken since."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    yield lambda: (gc.collect(), tracemalloc.get_traced_memory()[0] - before)[1]
    tracemalloc.stop()


def test_every_row_is_tried() -> None:
    assert {row.what for row in retention.retention_bounds(SERVING)} == {*ROWS, *ELSEWHERE}


@pytest.mark.parametrize("what, fill", [(what, fill) for what in ROWS for fill in ROWS[what]])
def test_retention_stays_within_the_table(what: str, fill: Fill, traced: Callable[[], int],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    row, *_ = [row for row in retention.retention_bounds(SERVING) if row.what == what]
    filled = fill(monkeypatch)
    taken = traced()
    assert 10_000 < taken < row.bytes / SMALLER
    del filled


def test_the_response_store_stays_within_the_table() -> None:
    limit = 4 << 20
    store = ResponseStore(None, limit, 1 << 20)
    for number in range(6000):
        with store._db:
            store._put(f"t{number % 7}", rid(number),
                       StoredResponse("completed", "", 600 * b"r", 300 * b"c", 100 * b"i"))
    pages, size = (store._db.execute(f"PRAGMA {name}").fetchone()[0]
                   for name in ("page_count", "page_size"))
    assert limit < pages * size < retention.STORE_FACTOR * limit
    store.close()


def test_events_of_a_vanished_client_are_bounded() -> None:
    departed = EndedSequences()
    departed.give_up_requests(b"c", [rid(1), rid(2)])
    departed.give_up_requests(b"c", [rid(2), rid(3)])
    open_ = Open(sid=1, client=b"c", rid=rid(3), index=0, prompt=b"", text=TextParams())
    assert departed.reply_if_over(open_) == [AbortRequest(rid(3), b"c")]
    assert departed.pop_lost(b"c") == [rid(1), rid(2), rid(3)] and departed.pop_lost(b"c") == []
    departed.give_up_requests(b"c", [rid(number) for number in range(2 * retention.LOST_REQUESTS)])
    departed.give_up_requests(b"d", [rid(7)])
    assert departed.pop_lost(b"c") == [], "the oldest, which had all"
    assert departed.pop_lost(b"d") == [rid(7)] and departed._lost_requests == 0


def test_gateways_keep_responses_in_memory_only_where_they_do() -> None:
    def stored(**fields: Any) -> int:
        rows = retention.retention_bounds(Config(gateway=GatewayConfig(port=0, **fields)))
        return sum(row.bytes for row in rows if row.what == "stored responses")

    assert stored() == 2 * (64 << 20) and stored(responses_max_bytes=0) == 0
    assert stored(gateways=2) == stored(responses_store="/tmp/x") == 0
    of_all = retention.max_retained_bytes(SERVING, "gateway")
    assert retention.max_retained_bytes(SERVING, "gateway-1") == of_all > 0
    assert retention.max_retained_bytes(SERVING, "worker-0") == 0
