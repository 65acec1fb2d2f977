"""HTTP as a plain client speaks it: the standard library alone, so that nothing is made up for.

`Server` is one engine that `actorium serve` started; `Answer` what came back; `events` a stream cut
up the way that benchmark clients do it. The bodies below are what the cases add their fields to.
"""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from actorium.actors.client.client import Client

TIMEOUT = 120.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/generate"
STORY = "Once upon a time"
"""Both models go on with this one."""
TELL = "Tell me a story about a fox."
"""Both have much to say to that."""
QUESTION = "What is the capital of France?"

Json = dict[str, Any]


class Answer(NamedTuple):
    """What came back. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def ok(self) -> Any:
        """The JSON of a success."""
        assert self.status == 200, (self.status, self.text[:400])
        return self.json

    def error(self, status: int = 400, param: str | None = None) -> Json:
        """The error object, in OpenAI's shape; `param` must be named by it."""
        assert self.status == status, (self.status, self.text[:400])
        found: Json = self.json["error"]
        assert isinstance(found["message"], str) and found["message"], found
        assert isinstance(found["type"], str), found
        assert {"param", "code"} <= set(found), found
        if param is not None:
            named = found["param"] or ""
            assert named == param or named.split(".")[0].split("[")[0] == param, found
            assert param in found["message"], found
        return found


@dataclass(frozen=True)
class Server:
    """An engine that serves, by its short name here (`demo`, `smollm2`)."""

    name: str
    model: str
    """Its served name."""
    path: str
    """The directory it was started with; empty for the packaged model."""
    url: str
    engine: str
    """The engine's name, for the SDK."""
    key: str | None = None
    """What callers show."""

    @property
    def trained(self) -> bool:
        """It answers questions; the demo model tells stories."""
        return self.name == "smollm2"

    @cached_property
    def client(self) -> Client:
        """The SDK, beside HTTP: for one thread."""
        return Client(self.engine)

    @property
    def directory(self) -> Path:
        """Its model directory, for who needs its tokenizer."""
        demo = Path(__file__).parents[2] / "tools" / "demo" / "demo_model"
        return Path(self.path) if self.path else demo

    def connect(self, timeout: float = TIMEOUT) -> http.client.HTTPConnection:
        """A connection; the caller closes it."""
        where = urlsplit(self.url)
        assert where.hostname is not None
        return http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)

    def send(self, method: str, path: str, body: Any = None,
             headers: dict[str, str] | None = None, timeout: float = TIMEOUT) -> Answer:
        """One exchange. body: bytes as they are, anything else as JSON."""
        link = self.connect(timeout)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            given = {"content-type": "application/json"} if data is not None else {}
            if self.key is not None:
                given["authorization"] = f"Bearer {self.key}"
            link.request(method, path, data, given | (headers or {}))
            found = link.getresponse()
            told = {name.lower(): value for name, value in found.getheaders()}
            return Answer(found.status, told, found.read())
        finally:
            link.close()

    def get(self, path: str, **more: Any) -> Answer:
        return self.send("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        return self.send("POST", path, body, **more)

    def complete(self, prompt: Any = STORY, **more: Any) -> Json:
        """A completion's answer: greedy, a few tokens, unless told."""
        found: Json = self.post(COMPLETIONS, completion(prompt, **more)).ok()
        return found

    def chat(self, messages: Any = QUESTION, **more: Any) -> Json:
        """A chat completion's answer."""
        found: Json = self.post(CHAT, chat(messages, **more)).ok()
        return found

    def stream(self, path: str, body: Json, **more: Any) -> list[Json]:
        """The objects of a stream's `data:` events, without the closing [DONE]."""
        answer = self.post(path, body | {"stream": True}, **more)
        assert answer.status == 200, (answer.status, answer.text[:400])
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.body)
        assert found[-1] == "[DONE]", found[-1]
        return [json.loads(one) for one in found[:-1]]

    def together(self, asks: list[tuple[str, Json]]) -> list[Answer]:
        """Many requests at once, each with a connection of its own; answers in order."""
        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(lambda ask: self.post(*ask), asks))

    def tokenize(self, text: str) -> list[int]:
        found: list[int] = self.post("/tokenize", {"prompt": text}).ok()["tokens"]
        return found

    def detokenize(self, ids: list[int]) -> str:
        found: str = self.post("/detokenize", {"tokens": ids}).ok()["prompt"]
        return found


def completion(prompt: Any = STORY, **more: Any) -> Json:
    """A body of `/v1/completions`."""
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0} | more


def chat(messages: Any = QUESTION, **more: Any) -> Json:
    """A body of `/v1/chat/completions`. messages: a list, or what the user says."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0} | more


def generate(**more: Any) -> Json:
    """A body of `/generate`; sampling parameters given are added to the few that stand here."""
    sampling = {"temperature": 0, "max_new_tokens": 6} | more.pop("sampling_params", {})
    given = more if {"text", "input_ids"} & set(more) else {"text": STORY} | more
    return given | {"sampling_params": sampling}


def message(text: Any = QUESTION, /, **more: Any) -> Json:
    """A body of `/v1/messages`."""
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0} | more


def response(text: Any = QUESTION, /, **more: Any) -> Json:
    """A body of `/v1/responses`."""
    return {"input": text, "max_output_tokens": 16, "temperature": 0} | more


def events(body: bytes) -> list[str]:
    """The data of each event, cut as `vllm bench serve` and SGLang's benchmark do: at blank lines,
    the first six characters (`data: `) off. An event with anything else in it fails here."""
    found = []
    for part in body.decode().split("\n\n"):
        line = part.strip()
        if not line or line.startswith(":"):
            continue
        assert line.startswith("data: ") and "\n" not in line, line[:200]
        found.append(line.removeprefix("data: "))
    return found


def deltas(chunks: list[Json], index: int = 0) -> str:
    """The text of one choice of a chat stream."""
    return "".join(choice["delta"].get("content") or "" for chunk in chunks
                   for choice in chunk["choices"] if choice["index"] == index)


def pieces(chunks: list[Json], index: int = 0) -> str:
    """The text of one choice of a completion's stream."""
    return "".join(choice["text"] for chunk in chunks
                   for choice in chunk["choices"] if choice["index"] == index)


def finishes(chunks: list[Json]) -> list[tuple[int, str]]:
    """(choice, reason) of every chunk that ends one."""
    return [(choice["index"], choice["finish_reason"]) for chunk in chunks
            for choice in chunk["choices"] if choice["finish_reason"]]
