"""The blocking client against real tokenizer and detokenizer cores behind real sockets."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_text import FakeEngine, byte_level, write_model

from actorium.actors.client.client import Client, Completion, Request
from actorium.actors.client.requests import Resumable, encode_request
from actorium.actors.errors import (
    ActoriumError,
    ContextOverflow,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    QueueFull,
)
from actorium.actors.messages import ChatMessage, ToolCall, TurnPart
from actorium.actors.params import SamplingParams

TEXT = "the € day, \U0001f600 é!"
IDS = byte_level().encode(TEXT).ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def engine(model: Path) -> Iterator[FakeEngine]:
    with FakeEngine(model) as engine:
        yield engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[Client]:
    with Client(engine.name, engine.base) as client:
        yield client


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": len(IDS)} | more))


def test_generate_text_and_ids(client: Client) -> None:
    done = client.generate(TEXT, params())
    assert isinstance(done, Completion)
    assert (done.text, done.token_ids, done.finish_reason) == (TEXT, IDS, "length")
    usage = done.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == \
        (len(IDS), 16, len(IDS))
    assert client.generate(IDS, params()).text == TEXT


def test_shapes_of_generate(client: Client) -> None:
    two = client.generate(TEXT, params(n=2))
    assert [c.index for c in two] == [0, 1] and all(c.text == TEXT for c in two)
    assert [c.text for c in client.generate(["ab", IDS], params(max_tokens=2))] == ["ab", "the"]
    assert [[c.text for c in choices] for choices in
            client.generate(["ab", "cd"], [params(max_tokens=2, n=2)] * 2)] == [["ab"] * 2,
                                                                             ["cd"] * 2]
    assert client.generate(["ab"], params(max_tokens=2))[0].text == "ab"
    mixed = client.generate(["ab", IDS], [params(max_tokens=2, n=2), params(max_tokens=1)])
    assert [[c.text for c in choices] for choices in mixed] == [["ab", "ab"], ["th"]]
    with pytest.raises(InvalidRequest, match="params: 1 for 2 prompts"):
        client.generate(["a", "b"], [params(n=2)])


def test_a_wide_batch_keeps_its_order(client: Client) -> None:
    prompts = [f"p{i:04d}" for i in range(2500)]
    done = client.generate(prompts, params(max_tokens=5))
    assert [c.text for c in done] == prompts


def test_run_goes_on_past_errors_and_bounds_what_is_under_way(
        client: Client, engine: FakeEngine) -> None:
    bad = Request(prompt="x", params=SamplingParams(top_p=7.0))
    good = Request(messages=[{"role": "user", "content": "q"}], params=params(max_tokens=3))
    overflow = Request(prompt="x" * 1000)
    most = 0
    results = {}
    for index, result in client.run([bad, good, overflow] + [good] * 20, window=4):
        most = max(most, len(engine.scheduler.live))
        results[index] = result
    assert len(results) == 23 and most <= 4
    assert isinstance(results[0], InvalidRequest) and results[0].param == "top_p"
    assert isinstance(results[2], ContextOverflow)
    assert results[1][0].token_ids == results[22][0].token_ids  # type: ignore[index]


def test_return_errors_or_raise(client: Client, engine: FakeEngine) -> None:
    found = client.generate(["ok", [1, 9999]], params(max_tokens=2), return_errors=True)
    assert found[0].text == "ok" and isinstance(found[1], InvalidRequest)
    with pytest.raises(InvalidRequest, match="9999"):
        client.generate(["ok", [1, 9999]], params(max_tokens=2))
    engine.allow = 0
    with pytest.raises(InvalidRequest):
        client.generate(["ok", [1, 9999], "ok"], params(max_tokens=2))
    client.tokenize("x")
    assert not engine.scheduler.live, "what was under way was aborted"
    engine.allow = math.inf
    assert client.generate("ab", params(max_tokens=2)).text == "ab"


def test_queue_full_is_tried_again_within_a_batch(client: Client, engine: FakeEngine) -> None:
    engine.scheduler.full_at = 3
    prompts = [f"p{i:02d}" for i in range(30)]
    done = client.generate(prompts, params(max_tokens=3))
    assert [c.text for c in done] == prompts
    engine.scheduler.full_at = 0
    with pytest.raises(QueueFull):
        client.generate("p", params())


def test_stream_equals_generate(client: Client) -> None:
    deltas = list(client.stream(TEXT, params()))
    assert "".join(d.text for d in deltas) == TEXT
    assert sum((d.token_ids for d in deltas), []) == IDS
    assert "\ufffd" not in "".join(d.text for d in deltas)
    assert deltas[-1].finish_reason == "length" and deltas[-1].usage is not None
    assert all(d.finish_reason is None for d in deltas[:-1])


def test_stop_string_ends_the_stream_and_tells_the_scheduler(
        client: Client, engine: FakeEngine) -> None:
    done = client.generate("one two three", params(max_tokens=200, stop=["thr", "zzz"]))
    assert (done.text, done.finish_reason, done.stop_reason) == ("one two ", "stop", "thr")
    assert done.usage.completion_tokens == len(done.token_ids)
    assert engine.scheduler.stops[-1].tokens == len(done.token_ids)
    kept = client.generate("one two three", params(max_tokens=200, stop="thr",
                                                   include_stop_str_in_output=True))
    assert kept.text == "one two thr"


def test_breaking_out_of_a_stream_aborts(client: Client, engine: FakeEngine) -> None:
    engine.allow = 1
    for _delta in client.stream(TEXT, params(max_tokens=200)):
        break
    client.tokenize("x")  # an answer from the same queue: the abort was handled before it
    assert len(engine.scheduler.cancels) == 1 and not engine.scheduler.live
    engine.allow = math.inf
    assert client.generate("ab", params(max_tokens=2)).text == "ab"


def test_abort_by_rid_ends_the_stream(client: Client, engine: FakeEngine) -> None:
    engine.allow = 0
    stream = client.stream(TEXT, params(max_tokens=200))
    began = time.monotonic()
    client.abort(stream.rid)
    assert [d.finish_reason for d in stream] == ["abort"]
    assert time.monotonic() - began < 4, "not only when the request would be sent again"


def test_two_streams_side_by_side_with_generate_inside(client: Client) -> None:
    texts = ["", ""]
    for a, b in itertools.zip_longest(client.stream("abcd", params(max_tokens=4)),
                                      client.stream("wxyz", params(max_tokens=4))):
        texts[0] += a.text if a else ""
        texts[1] += b.text if b else ""
        assert client.generate("hi", params(max_tokens=2)).text == "hi"
    assert texts == ["abcd", "wxyz"]


def test_chat_renders_the_template(client: Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    rendered = byte_level().encode("<bos><|user|>hello<|assistant|>").ids
    done = client.chat(messages, params(max_tokens=len(rendered)))
    assert done.token_ids == rendered and done.text == "hello"
    shown = params(max_tokens=len(rendered), skip_special_tokens=False)
    text = "".join(d.text for d in client.chat(messages, shown, stream=True))
    assert text == "<bos><|user|>hello<|assistant|>"


def test_questions(client: Client, engine: FakeEngine) -> None:
    assert client.tokenize(TEXT) == IDS
    assert client.detokenize(IDS) == TEXT and client.detokenize([]) == ""
    info = client.server_info()
    assert info["max_model_len"] == 256 and info["model"] == "m"
    assert info["config"]["scheduler"]["max_num_seqs"] == 256
    client.wait_ready(5)
    assert client.status().actors[0].role == "tokenizer"
    engine.error = "worker-0: out of paper"
    with pytest.raises(EngineFailed, match="out of paper"):
        client.wait_ready(5)


def test_flush_cache_and_the_gauges_of_memory(client: Client, engine: FakeEngine) -> None:
    assert client.flush_cache() == {"pages": 7, "kept": 2}
    done = client.generate(TEXT, params())
    assert done.text == TEXT, "the stream goes on"
    assert client.flush_cache(timeout=5) == {"pages": 7, "kept": 2}
    assert client.server_info()["memory"] == {"free_pages": 90, "held_pages": 6,
                                              "cached_pages": 12}


def test_tenant_of_the_client_and_priority_of_the_call(engine: FakeEngine) -> None:
    with Client(engine.name, engine.base, tenant="acme") as client:
        client.generate(["a", "b"], params(max_tokens=1), priority=3)
        list(client.stream("c", params(max_tokens=1), priority=-2))
        client.chat([{"role": "user", "content": "d"}], params(max_tokens=1), priority=9)
        list(client.run([Request(prompt="e", params=params(max_tokens=1), tenant=""),
                         Request(prompt="f", params=params(max_tokens=1), tenant="other")]))
    assert sorted((s.tenant, s.priority) for s in engine.scheduler.submits) == [
        ("", 0), ("acme", -2), ("acme", 3), ("acme", 3), ("acme", 9), ("other", 0)]


@pytest.mark.parametrize("tenant", ["a b", "x" * 65, "é", "a\n", 5, b"a"])
def test_bad_tenants_name_their_field(engine: FakeEngine, client: Client, tenant: Any) -> None:
    with pytest.raises(InvalidRequest, match="^tenant: must be at most 64 printable") as caught:
        Client(engine.name, engine.base, tenant=tenant)
    assert caught.value.param == "tenant"
    ((_, error),) = client.run([Request(prompt="a", tenant=tenant)])
    assert isinstance(error, InvalidRequest) and error.param == "tenant"


@pytest.mark.parametrize("priority", [2**31, -2**31 - 1, 2**70, "high", True, 1.5, None])
def test_bad_priorities_name_their_field(client: Client, priority: Any) -> None:
    for call in (lambda: client.generate("a", priority=priority),
                 lambda: client.stream("a", priority=priority),
                 lambda: client.chat([{"role": "user", "content": "a"}], priority=priority)):
        with pytest.raises(InvalidRequest, match="^priority: must be a whole number") as caught:
            call()
        assert caught.value.param == "priority"


@pytest.mark.parametrize(("field", "more"), [
    ("temperature", {"temperature": -1.0}), ("temperature", {"temperature": math.nan}),
    ("n", {"n": 1.5}), ("n", {"n": 1025}), ("max_tokens", {"max_tokens": 0}),
    ("top_k", {"top_k": "5"}), ("stop", {"stop": [""]}), ("stop", {"stop": 5}),
    ("stop", {"stop": ["a", 5]}), ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("seed", {"seed": 2**63}), ("seed", {"seed": 2**70}), ("top_p", {"top_p": 0.0}),
])
def test_bad_parameters_name_their_field(client: Client, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate("x", SamplingParams(**more))
    assert caught.value.param == field


@pytest.mark.parametrize("prompt", [
    "", [], [[]], [1.5], [-1], [2**31], [True], None, 5, {"a": 1}, b"x", ["a", 5], [1, [2]],
    "\ud800", [None],
])
def test_bad_prompts_are_refused_here(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt)
    assert caught.value.param == "prompt"


def test_bad_timeouts_and_messages(client: Client) -> None:
    for timeout in (0, -1, math.nan, math.inf, "5", True):
        with pytest.raises(InvalidRequest, match="timeout"):
            client.generate("x", timeout=timeout)  # type: ignore[arg-type]
    for messages in ([], "hi", [{"role": "user"}], [{"role": "user", "content": 5}]):
        with pytest.raises(InvalidRequest, match="messages"):
            client.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(("more", "why"), [
    ({"messages": [ChatMessage(role=5, content="x")]},  # type: ignore[arg-type]
     "messages: Expected `str`, got `int` - at `$[5][0].role`"),
    ({"messages": [ChatMessage("user", [TurnPart("text", 3)])]},  # type: ignore[arg-type]
     "messages: Expected `str`, got `int` - at `$[5][0].content[0].text`"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [ToolCall("", "{}")]}]},
     "messages: Expected `str` of length >= 1 - at `$[5][0].tool_calls[0].name`"),
    ({"prompt": "x", "add_generation_prompt": "no"},
     "prompt: Expected `bool`, got `str` - at `$[13]`"),
    ({"prompt": "x", "resumable": Resumable(rid="a", seconds=5000)},
     "prompt: Expected `float` <= 3600.0 - at `$[11]`")])
def test_what_the_engine_could_not_decode_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_request("r", Request(**more))
    assert caught.value.message == why and caught.value.param == why.partition(":")[0]


def test_a_huge_prompt_is_refused_before_the_socket(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="exceed the limit"):
        client.generate("x" * (100 << 20))
    assert client.generate("ab", params(max_tokens=2)).text == "ab"


def test_deadline_told_by_the_engine(client: Client) -> None:
    with pytest.raises(DeadlineExceeded, match="its deadline passed"):
        client.generate("x", SamplingParams(ignore_eos=True, max_tokens=255), timeout=1e-4)


def test_deadline_when_the_engine_is_silent(client: Client, engine: FakeEngine,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.actors.client.core.GRACE", 0.05)
    engine.allow = 0
    with pytest.raises(DeadlineExceeded):
        client.generate("x", params(), timeout=0.05)
    client.tokenize("x")
    assert len(engine.scheduler.cancels) == 1


def test_skip_tokenizer(model: Path) -> None:
    with FakeEngine(model, skip_tokenizer=True) as engine, \
            Client(engine.name, engine.base) as client:
        done = client.generate([5, 6, 7], params(max_tokens=3))
        assert (done.text, done.token_ids) == ("", [5, 6, 7])
        for call, field in ((lambda: client.generate("x"), "prompt"),
                            (lambda: client.generate([1], params(stop="x")), "stop"),
                            (lambda: client.tokenize("x"), "text"),
                            (lambda: client.chat([{"role": "user", "content": "x"}]), "messages")):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.param == field


def test_a_disconnected_client_gets_an_error(client: Client, engine: FakeEngine,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.actors.client.session.REATTACH", 0.01)
    engine.allow = 0
    stream = client.stream("abc", params(max_tokens=200))
    client.tokenize("x")
    identity = next(iter(engine.scheduler.submits)).client
    engine.detokenizer.on_client_lost(identity, 0.0)
    with pytest.raises(ActoriumError, match="given up"):
        list(stream)


def test_a_client_that_nobody_closes_is_collected(engine: FakeEngine) -> None:
    """Also as a part of a cycle, whose sockets and context are collected together."""
    own: list[Any] = [Client(engine.name, engine.base)]
    own[0].tokenize("abc")
    own.append(own)
    del own
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive()


def test_the_client_imports_nothing_heavy() -> None:
    code = ("import sys, actorium.actors.client.client as c; "
            "bad = {'asyncio', 'torch', 'numpy', 'tokenizers', 'jinja2', 'uvloop', 'rich'}; "
            "print(sorted(bad & set(sys.modules)))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_use_from_a_second_thread_is_an_error(client: Client) -> None:
    """ZMQ ends the process where two threads use a socket at once."""
    texts: list[str] = []
    want = client.generate("hello", SamplingParams(max_tokens=40)).text
    other = threading.Thread(target=lambda: texts.append(
        client.generate("hello", SamplingParams(max_tokens=40)).text))
    session = client._session
    usual, waiting, go_on = session.step, threading.Event(), threading.Event()

    def slowly(now: float, quiet: bool) -> None:
        waiting.set()
        go_on.wait(20)
        usual(now, quiet)

    session.step = slowly  # type: ignore[method-assign]
    other.start()
    assert waiting.wait(20)
    calls: list[Callable[[], Any]] = [
        lambda: client.generate("x"), lambda: client.stream("x"), client.status,
        lambda: client.tokenize("x"), lambda: client.abort("x")]
    for call in calls:
        with pytest.raises(RuntimeError, match="give each thread a Client of its own"):
            call()
    go_on.set()
    other.join(20)
    assert texts == [want] and client.generate("hello", SamplingParams(max_tokens=40)).text == want
