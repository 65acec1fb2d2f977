"""More requests than the tokenizer comes to: bounded by number and bytes, and nobody shut out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_text import Asked, context, loaded, write_model

from actorium.actors.config.tree import SchedulerConfig
from actorium.actors.core import Context
from actorium.actors.errors import QueueFull
from actorium.actors.messages import (
    Abort,
    AbortRequest,
    Accepted,
    ChatMessage,
    Generate,
    Info,
    Rejected,
    Resume,
    ResumeRequest,
    ServerInfo,
    Submit,
    Tokenize,
    Tokenized,
)
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.mailbox import encode
from actorium.actors.tokenizer.core import SUBMIT_AGAIN, TokenizerCore
from actorium.actors.tokenizer.prompt_encoder import SHORT_CHARS, PromptEncoder
from actorium.actors.tokenizer.request_queue import PendingMessage, RequestQueue

CLIENT, NOW = Asked.CLIENT, Asked.NOW
SEQS, QUEUED = 3, 5
MOST = SEQS + QUEUED
LONG = "hello wörld " * (SHORT_CHARS // 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=1 << 16)


def small(model: Path, **scheduler: Any) -> Context:
    made = context(model)
    config = msgspec.structs.replace(made.config, scheduler=SchedulerConfig(
        max_num_seqs=SEQS, max_num_queued_reqs=QUEUED, **scheduler))
    return made._replace(config=config)


@pytest.fixture
def asked(model: Path) -> Iterator[Asked]:
    made = Asked(model)
    made.core = loaded(TokenizerCore(small(model)))
    made.core.on_start(made.woken.release)
    yield made
    assert made.core._prompts is not None
    made.core._prompts.close()


def generate(rid: str, text: str = "hello", tenant: str = "") -> Generate:
    return Generate(rid, SamplingParams(max_tokens=4), text=text, tenant=tenant)


def test_a_flood_is_refused_and_what_was_taken_is_answered(asked: Asked) -> None:
    core, told = asked.core, dict[str, Any]()
    for number in range(1000):
        core.on_client(b"flood", generate(str(number)), NOW)
        assert len(core._queue) <= MOST
    while not core.done:
        told |= {send.message.rid: send.message for send in core.on_wake(NOW)
                 if send.to == "client"}
    assert all(isinstance(told[str(i)], Accepted) for i in range(MOST)) and len(told) == 1000
    refused = told[str(MOST)]
    assert isinstance(refused, Rejected) and refused.code == QueueFull.code
    assert refused.message == f"{MOST} requests are waiting already"
    assert [type(each) for each in asked.tell(generate("later"))] == [Submit, Accepted]


def test_what_concerns_earlier_requests_does_not_wait_behind_others(asked: Asked) -> None:
    core = asked.core
    for number in range(2 * MOST):
        core.on_client(b"flood", generate(str(number)), NOW)
    core._out.clear()
    core.on_client(CLIENT, Abort("mine"), NOW)
    core.on_client(CLIENT, Resume("mine"), NOW)
    core.on_client(CLIENT, ServerInfo("i"), NOW)
    assert [type(send.message) for send in core._out] == [AbortRequest, ResumeRequest, Info]


def test_a_request_that_was_submitted_is_never_refused(asked: Asked) -> None:
    """Its client sends it again until it is in the ledger; a refusal would end it there, and the
    scheduler would compute it for nobody."""
    assert [type(each) for each in asked.tell(generate("known"))] == [Submit, Accepted]
    for number in range(MOST):
        asked.core.on_client(b"flood", generate(str(number)), NOW)
    asked.core.on_client(CLIENT, generate("known"), NOW + SUBMIT_AGAIN)
    assert asked.core._out == [] and len(asked.core._queue) == MOST


def test_one_that_is_sent_again_has_one_place(asked: Asked) -> None:
    core = asked.core
    for again in range(3 * MOST):
        core.on_client(CLIENT, generate("one"), NOW + again)
    assert len(core._queue) == 1
    core.on_client(CLIENT, generate("one", "other text"), NOW)
    assert len(core._queue) == 1, "what the client waits for is the last that it has asked for"
    submit, _ = asked.wake()
    (wanted,) = asked.tell(Tokenize("ids", "other text"))
    assert submit.prompt == wanted.tokens and core.done


def test_bytes_are_bounded_too() -> None:
    queue = RequestQueue(SchedulerConfig(), most_bytes=100_000)
    for number in range(20):
        full = queue.add(PendingMessage(CLIENT, generate(str(number), 30_000 * "x"), NOW))
        assert (full is None) == (number < 3)
    assert full is not None and full.code == "queue_full" and "bytes are waiting" in full.message
    size = len(encode(generate("0", 30_000 * "x")))
    assert queue._bytes == 3 * size and queue.drop(CLIENT, "1") is not None
    assert queue._bytes == 2 * size and queue.drop(CLIENT, "1") is None
    while queue.waiting:
        queue.park(queue.take())
    assert len(queue) == 2 and queue._bytes == 2 * size
    queue.unpark(lambda entry: False)
    assert [queue.take().message.rid for _ in range(2)] == ["0", "2"]
    assert (len(queue), queue._bytes, queue._shares) == (0, 0, {})


def test_tenants_take_turns_and_keep_a_share_of_the_places(model: Path) -> None:
    core: TokenizerCore = loaded(TokenizerCore(small(model, schedule_policy="fair")))
    for number in range(100):
        core.on_client(b"flood", generate(f"a{number}", tenant="a"), NOW)
    for number in range(100):
        core.on_client(CLIENT, generate(f"b{number}", tenant="b"), NOW)
    refused = [send.message.rid for send in core._out]
    assert len(refused) == 200 - MOST - MOST // 2 and len(core._queue) <= 2 * MOST
    order = [send.message.rid for send in core.on_wake(NOW) if isinstance(send.message, Submit)]
    assert order[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert sum(rid.startswith("b") for rid in order) == MOST // 2


def test_the_prompt_of_an_aborted_request_is_not_encoded(asked: Asked,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = list[str](), threading.Event()
    usual = PromptEncoder.encode_slow

    def encode_slow(self: PromptEncoder, message: Any) -> Any:
        begun.append(message.rid)
        assert go.wait(60)
        return usual(self, message)

    monkeypatch.setattr(PromptEncoder, "encode_slow", encode_slow)
    for number in range(6):
        assert asked.tell(Tokenize(str(number), LONG)) == []
    for number in range(2, 5):
        ended, order = asked.tell(Abort(str(number)))
        assert isinstance(order, AbortRequest)
        assert isinstance(ended, Rejected) and ended.code == "aborted"
    assert len(asked.core._queue) == 3
    go.set()
    told: list[Any] = []
    while len(told) < 3:
        told += asked.later()
    assert all(isinstance(each, Tokenized) for each in told)
    assert sorted(each.rid for each in told) == ["0", "1", "5"] == sorted(begun)
    assert asked.core.done


def test_a_conversation_counts_with_all_that_it_has(asked: Asked) -> None:
    turns = [ChatMessage("user", 1000 * "x") for _ in range(100)]
    asked.core.on_client(CLIENT, Generate("r", SamplingParams(), messages=turns), NOW)
    assert 100_000 < asked.core._queue._bytes < 110_000
