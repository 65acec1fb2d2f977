"""LoRA adapters of whole engines: the routes, every API, deaths, and many loads and unloads."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_adapter_files import adapter_tensors, write_adapter
from helpers_cli import eventually
from helpers_served import Served, serving

from actorium.actors.errors import BadModel, EngineFailed, InvalidRequest, UnknownAdapter
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.tools.chaos.lora_rows import adapters
from actorium.tools.cli import main
from actorium.tools.null.null_worker import VOCAB, adapted_seed, next_token

PROMPT = [5, 6, 7]
TURN = [{"role": "user", "content": "hello"}]
LIMITS = {"max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(base / name, adapter_tensors(seed))
    return base


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(null_worker=True, debug_memory=True, enable_lora=True, admin_key="root",
                 lora_modules=(f"one={folder / 'one'}",), lora_dir=str(folder)) as made:
        yield made


def call(served: Served, path: str, body: Any = None, key: str = "root"
         ) -> tuple[int, Any]:
    """The status, and the answer, of which JSON is read."""
    request = urllib.request.Request(
        served.url + path, None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, data = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, data = error.code, error.read()
    try:
        return status, json.loads(data)
    except ValueError:
        return status, data.decode()


def tokens(served: Served, **more: Any) -> list[int]:
    """Of /generate."""
    status, answer = call(served, "/generate", {
        "input_ids": PROMPT, "sampling_params": {
            "max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}} | more)
    assert status == 200, answer
    return list(answer["output_ids"])


def expected(served: Served, name: str = "") -> list[int]:
    known = {each["name"]: bytes.fromhex(each["digest"])
             for each in served.engine.client.adapters()}
    seed = adapted_seed(1, known[name] if name else b"")
    return [next_token(seed, len(PROMPT) + i, VOCAB) for i in range(4)]


def test_a_request_names_its_adapter_in_each_way(served: Served) -> None:
    assert tokens(served) == expected(served)
    for way in ({"model": "one"}, {"model": "demo:one"}, {"lora_path": "one"},
                {"model": "demo", "lora_path": "one"}):
        assert tokens(served, **way) == expected(served, "one"), way
    status, several = call(served, "/generate", {
        "input_ids": [PROMPT, PROMPT], "lora_path": [None, "one"],
        "sampling_params": {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}})
    assert status == 200
    assert [one["output_ids"] for one in several] == [expected(served), expected(served, "one")]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": TURN}), ("/v1/completions", {"prompt": "hello"}),
    ("/v1/messages", {"messages": TURN}), ("/v1/responses", {"input": "hello"}),
    ("/api/chat", {"messages": TURN, "stream": False}), ("/completion", {"prompt": "hello"}),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}})])
def test_every_api_serves_adapters_and_says_so(served: Served, path: str, body: Any) -> None:
    limits = LIMITS if path != "/v1/responses" else {"max_output_tokens": 4}
    limits = limits if not path.startswith("/inference") else {}
    status, answer = call(served, path, body | limits | {"model": "one"})
    assert status == 200, answer
    assert answer.get("model", "one") == "one"
    status, answer = call(served, path, body | limits | {"model": "none"})
    assert status == 404 and "'none' is not served here" in json.dumps(answer), answer
    if "stream" in body or path in ("/v1/chat/completions", "/v1/completions"):
        status, _ = call(served, path, body | limits | {"model": "none", "stream": True})
        assert status == 404, "also before the first event of a stream"


def test_adapters_are_listed_with_their_model(served: Served) -> None:
    _, listed = call(served, "/v1/models")
    card = next(each for each in listed["data"] if each["id"] == "one")
    assert card["parent"] == "demo" and card["root"].endswith("/one")
    assert call(served, "/v1/models/one") == (200, card)
    assert call(served, "/v1/models/none")[0] == 404
    _, shown = call(served, "/lora-adapters")
    assert [each["name"] for each in shown] == ["one"]
    status, text = call(served, "/metrics")
    assert status == 200 and "actorium:adapters 1.0" in text and 'max_lora="8"' in text


def test_adapters_are_loaded_and_unloaded_over_http(served: Served, folder: Path) -> None:
    body = {"lora_name": "two", "lora_path": "two"}
    assert call(served, "/v1/load_lora_adapter", body, key="")[0] == 401
    assert call(served, "/v1/load_lora_adapter", body) == (
        200, "Success: LoRA adapter 'two' added successfully.")
    assert tokens(served, model="two") == expected(served, "two")
    assert call(served, "/v1/load_lora_adapter", body)[0] == 400
    before = expected(served, "two")
    status, answer = call(served, "/load_lora_adapter", body | {
        "lora_path": str(folder / "three"), "load_inplace": True})
    assert status == 200 and answer["loaded_adapters"]["two"] == str(folder / "three")
    assert tokens(served, model="two") == expected(served, "two") != before
    assert call(served, "/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    assert call(served, "/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 404
    assert call(served, "/generate", {"input_ids": PROMPT, "model": "two"})[0] == 404


@pytest.mark.parametrize(("path", "why"), [
    ("../one", "must be below --lora-dir"), ("/etc", "must be below --lora-dir"),
    (".", "must be below --lora-dir"), ("nothing", "no such folder or file"),
    ("a\0b", "null byte")])
def test_paths_are_confined(served: Served, path: str, why: str) -> None:
    status, answer = call(served, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert why in answer["error"]["message"]


def test_a_link_out_of_the_folder_is_not_followed(served: Served, folder: Path,
                                                  tmp_path: Path) -> None:
    write_adapter(tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    status, answer = call(served, "/v1/load_lora_adapter",
                          {"lora_name": "x", "lora_path": "link"})
    assert status == 400 and "must be below" in answer["error"]["message"]


def test_the_sdk_and_the_command_line(served: Served, folder: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    client, name = served.engine.client, served.engine.name
    assert client.load_adapter("two", folder / "two")["rank"] == 4
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    assert client.generate(PROMPT, params, adapter="two").token_ids == expected(served, "two")
    with client.stream(PROMPT, params, adapter="two") as stream:
        assert [t for d in stream for t in d.token_ids] == expected(served, "two")
    with pytest.raises(InvalidRequest, match="is loaded already"):
        client.load_adapter("two", folder / "one")
    with pytest.raises(BadModel, match="no such folder"):
        client.load_adapter("x", folder / "nothing")
    with pytest.raises(InvalidRequest, match="lora_name: 'demo' is the model itself"):
        client.load_adapter("demo", folder / "one")
    with pytest.raises(UnknownAdapter, match="model: 'x' is not served here"):
        client.generate(PROMPT, params, adapter="x")
    client.unload_adapter("two")
    assert main(["adapters", name, "--load", f"three={folder / 'three'}"]) == 0
    assert "three" in capsys.readouterr().out
    assert main(["adapters", name, "--unload", "three", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["one"]


def test_an_engine_without_lora_says_so(folder: Path) -> None:
    with serving(null_worker=True) as served:
        for body in ({"model": "demo", "lora_path": "one"}, {"model": "demo:one"}):
            status, answer = call(served, "/v1/completions", {"prompt": "a", **body})
            assert status == (400 if "lora_path" in body else 404), answer
        with pytest.raises(InvalidRequest, match="--enable-lora"):
            served.engine.client.load_adapter("one", folder / "one")


def test_a_wrong_adapter_ends_the_start(folder: Path) -> None:
    with pytest.raises((EngineFailed, BadModel), match="lora_modules: x: adapter: .*no such"):
        Engine("", null_worker=True, enable_lora=True, lora_modules=(f"x={folder / 'nothing'}",),
               restart=False)


@pytest.mark.chaos
def test_streams_keep_their_adapters_through_loads_and_deaths() -> None:
    row = adapters(1, 20, 6, kills=("worker-0", "scheduler"))
    assert row["wrong"] == [] and row["kills"] == 2 and row["adapted"] > 10


@pytest.mark.slow
@pytest.mark.chaos
def test_a_thousand_loads_and_unloads_leave_memory_as_it_was() -> None:
    row = adapters(2, 1000, 6)
    assert row["wrong"] == [] and row["adapted"] > 30
    settled, end = row["memory"]
    assert end < settled + (32 << 20), f"{settled} bytes after 100 cycles, {end} after 1000"


def test_replicas_get_adapters_at_run_time(folder: Path) -> None:
    """All of them, also one that is started again; the router knows no others."""
    with Engine("", null_worker=True, skip_tokenizer=True, replicas=2, enable_lora=True,
                lora_modules=(f"one={folder / 'one'}",)) as engine:
        client, params = engine.client, SamplingParams(max_tokens=4, seed=1, ignore_eos=True)

        def right(name: str) -> bool:
            digest = next(own["digest"] for own in client.adapters() if own["name"] == name)
            seed = adapted_seed(1, bytes.fromhex(digest))
            want = [next_token(seed, len(PROMPT) + i, VOCAB) for i in range(4)]
            several = client.generate([PROMPT] * 8, params, adapter=name)
            return [one.token_ids for one in several] == [want] * 8

        assert right("one")
        with pytest.raises(UnknownAdapter, match="model: 'x' is not served here"):
            client.generate(PROMPT, params, adapter="x")
        assert client.load_adapter("two", folder / "two")["path"] == str(folder / "two")
        assert right("two") and right("one")
        with pytest.raises(InvalidRequest, match="'two' is loaded already"):
            client.load_adapter("two", folder / "three")
        with pytest.raises(BadModel, match="replica [01]: .*adapter_config.json"):
            client.load_adapter("none", folder)
        client.load_adapter("two", folder / "three", replace=True)
        client.unload_adapter("one")
        assert right("two") and [own["name"] for own in client.adapters()] == ["two"]
        with pytest.raises(UnknownAdapter):
            client.unload_adapter("one")
        replica = next(own for own in client.status().actors if own.role == "replica-1")
        os.kill(replica.pid, signal.SIGKILL)
        assert right("two")
        assert eventually(lambda: any(own.role == "replica-1" and own.epoch > replica.epoch
                                      and own.phase == "ready" for own in client.status().actors))
        assert all(right("two") for _ in range(4))
