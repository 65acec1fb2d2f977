"""`/tokenize` and `/detokenize` over a whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from helpers_served import Served, serving

from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.params import SamplingParams
from actorium.actors.tokenizer.chat_template import load

TEXT = "Once upon a time, a fox"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


MOOD = 'A calm "mood" of the engine.'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = load(DEMO_MODEL, None).pick(None, True)
    assert template is not None
    with serving(null_worker=True, chat_template="{{ mood }}" + template.source,
                 default_chat_template_kwargs={"mood": MOOD}) as found:
        yield found


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_or_several(served: Served, http: httpx.Client) -> None:
    ids = served.engine.client.tokenize(TEXT)
    one = post(http, "/tokenize", prompt=TEXT, model="demo", return_token_strs=True)
    assert (one["tokens"], one["count"]) == (ids, len(ids)) and one["max_model_len"] > 100
    assert len(one["token_strs"]) == len(ids)
    both = post(http, "/v1/tokenize", prompt=[TEXT, "A"], return_token_strs=True)
    assert both["tokens"][0] == ids and both["count"] == [len(one) for one in both["tokens"]]
    assert [len(strings) for strings in both["token_strs"]] == both["count"]
    assert "token_strs" not in post(http, "/tokenize", prompt=TEXT)


def test_the_tokens_of_a_conversation(served: Served, http: httpx.Client) -> None:
    client = served.engine.client
    told = post(http, "/tokenize", messages=TURNS[:1])
    assert told["tokens"] == client.tokenize_chat(TURNS[:1])
    plain = post(http, "/tokenize", messages=TURNS[:1], add_generation_prompt=False)
    assert plain["tokens"] == told["tokens"][:plain["count"]] and plain["count"] < told["count"]
    tools = post(http, "/tokenize", messages=TURNS[:1], tools=[TOOL])
    assert tools["tokens"] == client.tokenize_chat(TURNS[:1], tools=[TOOL])
    own = post(http, "/tokenize", messages=TURNS[:1],
               chat_template="{{ messages[0].content }}{{ mark }}",
               chat_template_kwargs={"mark": "!"})
    assert own["tokens"] == client.tokenize("Hi!", add_special_tokens=False)


def test_special_tokens_around_what_the_template_writes(served: Served, http: httpx.Client) -> None:
    client = served.engine.client
    told = post(http, "/tokenize", messages=TURNS[:1], add_special_tokens=True)["tokens"]
    added = len(client.tokenize("a")) - len(client.tokenize("a", False))
    inner = client.tokenize_chat(TURNS[:1])
    assert len(told) == len(inner) + added and " ".join(map(str, inner)) in " ".join(map(str, told))


def test_the_engines_template_arguments(served: Served, http: httpx.Client) -> None:
    """On every API: those that the engine was started with, unless the request names them."""
    client = served.engine.client
    ids = client.tokenize_chat(TURNS[:1])
    calm = client.tokenize_chat(TURNS[:1], {"mood": ""})
    assert client.detokenize(ids).startswith(MOOD) and len(calm) < len(ids)
    long = [{"role": "user", "content": "word " * 4000}]  # rendered in a process of its own
    assert len(client.tokenize_chat(long)) > len(client.tokenize_chat(long, {"mood": ""}))
    for own, wanted in (({}, ids), ({"chat_template_kwargs": {"mood": ""}}, calm)):
        asked = {"messages": TURNS[:1], **own}
        assert post(http, "/tokenize", **asked)["tokens"] == wanted
        chat = post(http, "/v1/chat/completions", max_tokens=1, **asked)
        count = post(http, "/v1/messages/count_tokens", **asked)
        message = post(http, "/v1/messages", max_tokens=1, **asked)
        response = post(http, "/v1/responses", input="Hi", max_output_tokens=1, **own)
        usage = message["usage"]
        assert [chat["usage"]["prompt_tokens"], count["input_tokens"],
                usage["input_tokens"] + usage["cache_read_input_tokens"],
                response["usage"]["input_tokens"]] == [len(wanted)] * 4
    params = SamplingParams(max_tokens=1)
    assert client.chat(TURNS[:1], params).usage.prompt_tokens == len(ids)


def test_a_final_message_that_goes_on(served: Served, http: httpx.Client) -> None:
    told = post(http, "/tokenize", messages=TURNS, continue_final_message=True)
    assert served.engine.client.detokenize(told["tokens"]).endswith("I am")


def test_llama_servers_form_is_accepted(served: Served, http: httpx.Client) -> None:
    ids = served.engine.client.tokenize(TEXT, add_special_tokens=False)
    assert post(http, "/tokenize", content=TEXT) == {"tokens": ids}
    told = post(http, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [one["id"] for one in told] == ids
    assert "".join(one["piece"] for one in told) == TEXT
    assert post(http, "/detokenize", tokens=ids)["content"] == TEXT


def test_detokenize_returns_texts(served: Served, http: httpx.Client) -> None:
    ids = served.engine.client.tokenize(TEXT, add_special_tokens=False)
    told = post(http, "/detokenize", tokens=ids)
    assert told["prompt"] == told["text"] == TEXT
    assert post(http, "/v1/detokenize", tokens=[ids, ids[:2]])["text"][0] == TEXT
    assert post(http, "/detokenize", tokens=[])["text"] == ""


@pytest.mark.parametrize(("path", "body", "word"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": TURNS, "continue_final_message": True,
                   "add_generation_prompt": True}, "continue_final_message"),
    ("/tokenize", {"prompt": ["a"] * 257}, "prompt"),
    ("/tokenize", {"messages": TURNS, "chat_template": "{% if"}, "chat_template"),
    ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens: ")])
def test_refusals_name_the_field(http: httpx.Client, path: str, body: dict[str, Any],
                                 word: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(word), answer.text
