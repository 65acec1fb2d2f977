"""Ollama's API by its own clients for Python and Node, by langchain-ollama, and by the requests of
programs that speak it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from wire import CHAT, QUESTION, TELL, Json, Server

ollama = pytest.importorskip("ollama")
langchain = pytest.importorskip("langchain_ollama")
pytestmark = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("ollama_node.mjs")
MODULES = Path(__file__).parents[2] / "build" / "node"
TRIES = [quoted or plain for quoted, plain in
         re.findall(r'^  async (?:"([^"]+)"|(\w+))\(', SCRIPT.read_text(), re.MULTILINE)]
GREEDY = {"temperature": 0, "num_predict": 24}
TURN = [{"role": "user", "content": TELL}]


def wanted(server: Server) -> str:
    """What OpenAI's route says."""
    answer = server.post(CHAT, {"messages": TURN, "temperature": 0, "max_tokens": 24}).ok()
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.fixture
def client(server: Server) -> Any:
    return ollama.Client(host=server.url)


def test_a_chat_and_its_stream(server: Server, client: Any) -> None:
    want = wanted(server)
    whole = client.chat(server.model, TURN, options=GREEDY)
    assert whole.message.content == want and whole.done_reason == "length"
    *parts, last = client.chat(server.model, TURN, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == want and len(parts) > 2
    for end in (whole, last):
        assert (end.eval_count, end.prompt_eval_count > 5) == (24, True)
        assert end.total_duration >= end.load_duration + end.prompt_eval_duration + \
            end.eval_duration - 5 > 0


def test_prompts(server: Server, client: Any) -> None:
    want = wanted(server)
    assert client.generate(server.model, TELL, options=GREEDY).response == want
    parts = client.generate(server.model, TELL, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == want
    raw = client.generate(server.model, "Once upon a time", raw=True, options=GREEDY)
    assert raw.eval_count == 24 and raw.prompt_eval_count < 10


def test_asynchronous(server: Server) -> None:
    async def run() -> str:
        client = ollama.AsyncClient(host=server.url)
        return "".join([part.message.content async for part in await client.chat(
            server.model, TURN, options=GREEDY, stream=True)])

    assert asyncio.run(run()) == wanted(server)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def test_a_schema(server: Server, client: Any) -> None:
    for schema in (Person.model_json_schema(), "json"):
        answer = client.chat(server.model, TURN, format=schema,
                             options={"temperature": 0, "num_predict": 200, "seed": 1})
        if schema != "json":
            Person.model_validate_json(answer.message.content)
        elif answer.done_reason == "stop":
            assert isinstance(json.loads(answer.message.content), dict)


def test_logprobs(server: Server, client: Any) -> None:
    answer = client.chat(server.model, TURN, logprobs=True, top_logprobs=2, options=GREEDY)
    assert len(answer.logprobs) == 24
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in answer.logprobs)


def test_thoughts(thinking_server: Server) -> None:
    client, model = ollama.Client(host=thinking_server.url), thinking_server.model
    whole = client.chat(model, TURN, think=True, options=GREEDY)
    assert whole.message.thinking and not whole.message.content
    parts = list(client.chat(model, TURN, think=True, options=GREEDY, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking


def test_models(server: Server, client: Any) -> None:
    card, = client.list().models
    name = f"{server.model}:latest"
    assert card.model == name and len(card.digest) == 64 and card.size > 0
    loaded, = client.ps().models
    assert loaded.model == name and loaded.size >= card.size and loaded.context_length > 0
    shown = client.show(name)
    assert "completion" in shown.capabilities and shown.template
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == loaded.context_length
    assert client.chat(name, [], keep_alive="5m").done_reason == "load"
    assert [one.status for one in client.pull(name, stream=True)][-1] == "success"


def test_what_is_not_here(server: Server, client: Any) -> None:
    model = server.model
    for status, call in (
            (404, lambda: client.chat("llama3", TURN)), (403, lambda: client.pull("llama3")),
            (501, lambda: client.delete(model)), (501, lambda: client.copy(model, "b")),
            (501, lambda: client.create("b", from_=model)),
            (501, lambda: client.generate(model, keep_alive=0)),
            (400, lambda: client.generate(model, "a", suffix="b")),
            (400, lambda: client.generate(model, "a", context=[1])),
            (400, lambda: client.chat(model, TURN, options={"mirostat": 2}))):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status and len(caught.value.error) > 10


def test_langchain(server: Server) -> None:
    model = langchain.ChatOllama(model=server.model, base_url=server.url, temperature=0,
                                 num_predict=24, num_ctx=2048, validate_model_on_init=True)
    answer, want = model.invoke(TELL), wanted(server)
    assert answer.content == want and answer.usage_metadata["output_tokens"] == 24
    assert "".join(part.content for part in model.stream(TELL)) == want
    assert langchain.OllamaLLM(model=server.model, base_url=server.url, temperature=0,
                               num_predict=24).invoke(TELL) == want
    person = langchain.ChatOllama(
        model=server.model, base_url=server.url, temperature=0, num_predict=200
    ).with_structured_output(Person).invoke(TELL)
    assert isinstance(person, Person)


TOOL = {"type": "function", "function": {
    "name": "look", "description": "Looks", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
PROGRAMS: dict[str, tuple[str, Json]] = {
    "Open WebUI": ("/api/chat", {
        "messages": TURN, "stream": True, "keep_alive": "5m", "think": False, "tools": [],
        "options": {"temperature": 0.8, "num_ctx": 2048, "num_predict": 8, "seed": 42,
                    "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "top_k": 40,
                    "top_p": 0.9, "min_p": 0.0, "use_mmap": True, "num_thread": 4}}),
    "Continue's chat": ("/api/chat", {
        "messages": [{"role": "system", "content": "Be brief."}, *TURN], "stream": True,
        "keep_alive": 1800, "options": {
            "temperature": 0.5, "num_predict": 8, "num_ctx": 8192, "stop": ["\n\n\n"],
            "num_thread": 8, "use_mmap": True, "top_p": 0.9, "top_k": 20, "min_p": 0.1}}),
    "Continue's completion": ("/api/generate", {
        "prompt": "def add(a, b):\n", "raw": True, "stream": True, "keep_alive": 1800,
        "options": {"temperature": 0.01, "num_predict": 8, "stop": ["\n\n", "/src/"],
                    "num_ctx": 8192}}),
    "Zed": ("/api/chat", {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION, "images": None},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "function": {"name": "look", "arguments": {"place": "Paris"}}}],
             "images": None, "thinking": None},
            {"role": "tool", "tool_name": "look", "content": "It is Paris."}],
        "stream": True, "keep_alive": -1, "think": None, "tools": [TOOL],
        "options": {"num_ctx": 4096, "num_predict": 8, "stop": [], "temperature": 1.0}}),
    "Home Assistant": ("/api/chat", {
        "messages": TURN, "stream": True, "format": "", "keep_alive": "-1s", "think": False,
        "tools": [TOOL], "options": {"num_ctx": 8192, "num_predict": 8}}),
    "an old client": ("/api/generate", {
        "prompt": TELL, "system": "", "template": "", "context": [], "raw": False, "format": "",
        "images": [], "options": {"num_predict": 8, "penalize_newline": True, "typical_p": 1.0,
                                  "repeat_last_n": 64, "tfs_z": 1.0, "vocab_only": False}}),
}
"""Routes and bodies as programs send them, shortened to a few tokens."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_requests_of_programs(server: Server, program: str) -> None:
    path, body = PROGRAMS[program]
    answer = server.post(path, {"model": f"{server.model}:latest", **body})
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    *parts, last = [json.loads(line) for line in answer.text.splitlines()]
    assert last["done"] and last["done_reason"] in ("stop", "length") and last["eval_count"] <= 8
    assert not any(one["done"] for one in parts)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags", "/api/ps"])
def test_what_clients_probe(server: Server, method: str, path: str) -> None:
    assert server.send(method, path).status == 200


@pytest.mark.parametrize("name", TRIES)
def test_ollama_for_node(server: Server, name: str) -> None:
    node = shutil.which("node")
    assert node and (MODULES / "node_modules" / "ollama").exists(), "see setup.sh node"
    done = subprocess.run([node, str(SCRIPT), server.url, server.model, str(MODULES), name],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1500:]
