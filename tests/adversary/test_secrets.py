"""Words that must not be written down: what callers say and are told, and keys. An engine with all
its logs, recordings, traces and crash reports on is given words that are nowhere else, its actors
die while they work on them, and then everything that it has written is searched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from helpers_canaries import HUB_TOKENS, KEYS, SAID, files_under, leaks, loose, processes_below
from helpers_cli import Cli, eventually
from helpers_keys import free_ports, key_dir
from helpers_planted import FAILING, TOKENS, WORD
from helpers_runtime import LauncherProcess, make_config, short_dir
from helpers_served import Served
from helpers_tenants import ask, bearer, packed, raw

from actorium.actors.client.client import Client
from actorium.actors.config.tree import DeviceConfig, GatewayConfig
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway import actor
from actorium.actors.gateway.api.response_store import ResponseStore, StoredResponse
from actorium.actors.runtime.roles import roles_of
from actorium.actors.runtime.security import curve_keys as curve

ROLES = ("scheduler", "tokenizer", "detokenizer", "gateway-0", "watchdog", "worker-0")

READY = frozenset({"ready", "idle", "stepping"})
COMMANDS = (("ps", "--json"), ("top", "--once", "--json"), ("ps",), ("top", "--once"))


class Lived(NamedTuple):
    """What an engine has left behind, and what could be seen of it while it lived."""

    terminal: bytes
    run_dir: list[tuple[str, bytes]]
    """Of its run directory, shortly before its end."""
    elsewhere: list[tuple[str, bytes]]
    """Crash reports and traces."""
    ledger: list[tuple[str, bytes]]
    commands: list[tuple[str, bytes]]
    """What `ps`, `top`, `trace` and the like have printed."""
    http: list[tuple[str, bytes]]
    """What anybody with a key may read."""
    processes: list[tuple[str, bytes]]
    loose: list[str]
    """Modes that let others in."""
    secrets: dict[str, str]
    """Secret keys of CURVE."""


@contextlib.contextmanager
def umask(mode: int) -> Iterator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


def live(base: Path, mode: int, form: str, kills: int) -> Lived:
    """A whole life. mode: its umask; form: of its lines; kills: how many actors die."""
    own = base / "own"
    own.mkdir(mode=0o700)
    curves = key_dir(own, "client")
    (own / "api").write_text(f"# of tenants\nann {KEYS['filed']}\n")
    (own / "template").write_text(
        "{#" + SAID["template"] + "#}{% for m in messages %}{{ m.content }}{% endfor %}")
    store, trace, ledger = base / "store", base / "trace", base / "ledger"
    cli = Cli(str(base / "run"))
    env = cli.env | HUB_TOKENS | {"ACTORIUM_ADMIN_KEY": KEYS["admin"],
                                  "ACTORIUM_CRASH_REPORTS": "on"}
    words = ["serve", "--name", "e", "--port", "0", "--api-key", KEYS["flag"], "--api-keys-file",
             str(own / "api"), "--log-level", "debug", "--log-format", form, "--log-interval",
             "0.2", "--trace-dir", str(trace), "--ledger-dir", str(ledger),
             "--listen", f"tcp://127.0.0.1:{free_ports()}", "--keys-dir", str(curves),
             "--responses-store", str(store), "--device", "cpu", "--threads", "1",
             "--chat-template", str(own / "template"), "--probe-port", "0"]
    with umask(mode), (base / "terminal").open("wb") as terminal:
        process = subprocess.Popen(cli.argv(*words), stdin=subprocess.DEVNULL, stdout=terminal,
                                   stderr=subprocess.STDOUT, env=env)
    try:
        assert eventually(lambda: b"ready after:" in (base / "terminal").read_bytes(), 90)
        where = actor.where(base / "run" / "e")
        assert where is not None
        served = Served(None, where.host, where.port)  # type: ignore[arg-type]
        talk(served)
        processes = processes_below(process.pid)
        with Client("e", run_dir=str(base / "run")) as client:
            for role in ROLES[:kills]:
                die(client, served, role)
        commands = [(f"actorium {' '.join(one)}", (done := cli.run(*one)).stdout + done.stderr)
                    for one in COMMANDS[:kills]]
        commands += files_under(base / "run" / "crashes")
        http = [(path, ask(served, "GET", path, KEYS["filed"]).body) for path in (
            "/metrics", "/load", "/server_info", "/startupz", "/v1/models", "/model_info",
            "/health", "/openapi.json", "/readyz", "/nowhere")]
        if kills > 1:
            talk(served)
        run_dir, found = files_under(base / "run" / "e"), loose(base / "run" / "e")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        found += loose(base / "run") + loose(trace) + loose(ledger)
        found += [line for path in base.glob("store*") for line in loose(path)]
        pairs = [curve.read_server(curves), curve.read_pair(own / "client.key")]
        return Lived((base / "terminal").read_bytes(), run_dir,
                     files_under(base / "run") + files_under(trace), files_under(ledger), commands,
                     http, processes, sorted(set(found)),
                     {f"curve{i}": pair.secret for i, pair in enumerate(pairs)})
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def talk(to: Served) -> None:
    """Say every word somewhere."""
    s, key = SAID, KEYS["flag"]
    turn = [{"role": "system", "content": s["system"]}, {"role": "user", "content": s["prompt"]}]
    tool = {"type": "function", "function": {"name": s["tool"], "parameters": {
        "type": "object", "properties": {s["toolargument"]: {"type": "string"}}}}}
    chat, text = "/v1/chat/completions", "/v1/completions"
    more = {"max_tokens": 12, "user": s["user"], "stop": [s["stop"]], "cache_salt": s["salt"],
            "metadata": {s["metadata"]: s["metadata"]}}
    schema = {"type": "json_schema", "json_schema": {"name": s["schema"], "schema": {
        "type": "object", "properties": {s["property"]: {"enum": [s["output"]]}},
        "required": [s["property"]]}}}
    bad = [
        (text, b'{"prompt": "' + s["badjson"].encode()),
        (text, {"prompt": s["prompt"], "max_tokens": s["value"], s["field"]: 1}),
        (text, {"prompt": s["prompt"], "guided_regex": f"(({s['regex']}"}),
        (text, {"prompt": s["prompt"], "guided_grammar": f"start: {s['regex']} ::="}),
        (text, {"prompt": s["prompt"], "guided_json": {"type": s["schema"], "$ref": s["schema"]}}),
        (text, {"prompt": s["prompt"], "model": s["model"]}),
        (text, {"prompt": s["prompt"], "suffix": s["suffix"]}),
        (text, {"prompt": s["prompt"] * 4000, "max_tokens": 3}),
        (chat, {"messages": turn, "chat_template": "{{ raise_exception('" + s["hidden"] + "') }}"}),
        (chat, {"messages": turn, "chat_template": "{% " + s["hidden"]}),
        (chat, {"messages": turn, "chat_template": "{{ '" + s["hidden"] + "'.nope.nope }}"}),
        (chat, {"messages": [{"role": s["value"], "content": {s["field"]: 1}}]}),
        (chat, {"messages": turn, "tools": [{"type": s["tool"]}]}),
        (chat, {"messages": turn, "tools": [tool], "tool_choice": {"name": s["value"]}}),
        ("/generate", {"text": s["prompt"], "sampling_params": {s["field"]: s["value"]}}),
        ("/v1/responses", {"input": [{"type": s["value"]}]}),
        ("/v1/messages", {"messages": turn, "max_tokens": s["value"]}),
        ("/tokenize", {"messages": turn, "chat_template": "{{ " + s["hidden"] + "() }}"}),
        ("/detokenize", {"tokens": [s["value"]]}),
        ("/abort_request", {"rid": s["value"]}),
        (f"/nowhere?key={s['query']}", {})]
    answers = [ask(to, "POST", path, key, body) for path, body in (
        (chat, {"messages": turn} | more),
        (f"{chat}?q={s['query']}", {"messages": turn, "stream": True, "ignore_eos": True} | more),
        (chat, {"messages": turn, "response_format": schema} | more | {"max_tokens": 60}),
        (chat, {"messages": turn, "tools": [tool], "tool_choice": "required"} | more),
        (text, {"prompt": s["prompt"], "guided_choice": [s["output"]]} | more | {"max_tokens": 60}),
        (text, {"prompt": s["prompt"], "guided_regex": s["regex"]} | more),
        (text, {"prompt": [s["prompt"], s["system"]], "logprobs": 2} | more),
        ("/generate", {"text": s["prompt"], "sampling_params": {"max_new_tokens": 9}}),
        ("/v1/responses", {"input": s["prompt"], "max_output_tokens": 9,
                           "instructions": s["system"], "metadata": {s["metadata"]: s["value"]}}),
        ("/v1/messages", {"messages": turn[1:], "max_tokens": 9, "system": s["system"]}),
        ("/tokenize", {"prompt": s["prompt"]}))]
    assert [one.status for one in answers] == [200] * len(answers), answers
    assert s["output"].encode() in b"".join(one.body for one in answers[2:5]), "it was said"
    kept = [("Idempotency-Key", s["idempotency"]), ("X-Strange", s["header"])]
    for _ in range(2):
        ask(to, "POST", text, key, {"prompt": s["prompt"]} | more, kept)
    statuses = [ask(to, "POST", path, key, body).status for path, body in bad]
    assert set(statuses) <= {200, 400, 404}, statuses
    ask(to, "POST", text, SAID["wrongkey"], {"prompt": s["prompt"]})
    ask(to, "GET", f"/v1/models?api_key={KEYS['filed']}")
    raw(to, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + s["header"].encode() + b"\r\n\r\n")
    with socket.create_connection((to.host, to.port), timeout=60) as connection:
        connection.sendall(packed("POST", text, [bearer(key)], {"prompt": s["prompt"]})[:-9])


def die(client: Client, to: Served, role: str) -> None:
    """The actor dies of a signal while it works on what was said; the engine goes on."""
    before = {one.role: one.pid for one in client.status().actors}
    body = {"prompt": f"{SAID['prompt']} {SAID['poison']}", "max_tokens": 400, "ignore_eos": True,
            "stream": True, "stop": [SAID["stop"]]}
    with contextlib.suppress(ConnectionError), \
            socket.create_connection((to.host, to.port), timeout=60) as connection:
        connection.sendall(packed("POST", "/v1/completions", [bearer(KEYS["flag"])], body))
        connection.recv(1000)
        os.kill(before[role], signal.SIGSEGV)

    def back() -> bool:
        try:
            now = client.status(timeout=5.0)
        except ActoriumError:
            return False
        pids = {one.role: one.pid for one in now.actors if one.phase in READY}
        return now.ready and pids.keys() >= before.keys() and pids[role] != before[role]

    assert eventually(back, 60), f"{role} is not back"
    assert eventually(lambda: ask(to, "GET", "/readyz").status == 200, 60)


@pytest.fixture(scope="module")
def lived(request: pytest.FixtureRequest) -> Iterator[list[Lived]]:
    whole = bool(request.config.getoption("--adversary"))
    lives = [(0o000, "json", len(ROLES)), (0o022, "text", len(ROLES))] if whole else \
        [(0o000, "json", 1)]
    found = []
    for mode, form, kills in lives:
        with short_dir() as base:
            found.append(live(base, mode, form, kills))
    yield found


def test_nothing_that_was_said_is_written_down(lived: list[Lived], tried: Any) -> None:
    for one in lived:
        places = [("stderr", one.terminal), *one.run_dir, *one.elsewhere, *one.commands, *one.http,
                  *one.processes]
        wrong = leaks(places, SAID)
        # Who has a key may read the template: it is the operator's.
        assert not set(wrong) - {"template in /server_info"}, wrong
        assert any(name.endswith(".tar.gz") for name, _ in one.elsewhere), "there was a report"
        tried(len(places) * len(SAID))


@pytest.mark.mended("recordings, and so crash reports, had the configuration with its keys")
@pytest.mark.mended("a key given as a flag stayed in the launcher's command line, for all to see")
@pytest.mark.mended("actors inherited variables with keys and hub tokens, of which none needs one")
@pytest.mark.mended("config.json of the run directory had the keys, and outlives a killed launcher")
def test_no_key_is_where_others_could_read_it(lived: list[Lived], tried: Any) -> None:
    for one in lived:
        secret = KEYS | HUB_TOKENS | one.secrets
        del secret["toml"]
        places = [("stderr", one.terminal), *one.elsewhere, *one.commands, *one.http, *one.ledger,
                  *one.run_dir]
        assert not leaks(places, secret)
        seen = [place for place in one.processes if not place[0].startswith("environ of the laun")]
        assert not leaks(seen, secret)
        assert sum(name.startswith("cmdline of the child") for name, _ in seen) >= len(ROLES)
        tried((len(places) + len(seen)) * len(secret))


def test_nothing_is_open_to_others(lived: list[Lived], tried: Any) -> None:
    for one in lived:
        assert not one.loose, one.loose
        tried(len(one.run_dir) + len(one.elsewhere) + len(one.ledger))


@pytest.mark.mended("a store of responses that others could read already was filled all the same")
@pytest.mark.mended("directories above that of the keys were made as the umask had it")
@pytest.mark.parametrize("mode", [0o000, 0o022])
def test_what_is_made_for_secrets_is_private(tmp_path: Path, mode: int, tried: Any) -> None:
    with umask(mode):
        top = tmp_path / "config"
        curve.make_server(top / "actorium" / "keys")
        curve.make_client(top / "actorium" / "keys", "c", top / "c.key")
        store = tmp_path / "store"
        store.touch(0o666)
        kept = ResponseStore(str(store), 1 << 20, 10)
        asyncio.run(kept.put("ann", "resp_1", StoredResponse("completed", "", b"{}", b"[]", b"[]")))
        found = [line for path in (top, *tmp_path.glob("store*")) for line in loose(path)]
        kept.close()
    assert not found, found
    tried(8)


def test_a_key_that_cannot_be_is_not_repeated(tried: Any) -> None:
    """What is wrong with a configuration is told without the keys in it."""
    with short_dir() as base:
        cli = Cli(str(base))
        (base / "bad.toml").write_text(f'[gateway]\napi_key = " {KEYS["toml"]}"\n')
        (base / "list.toml").write_text(f'[gateway]\napi_key = ["{KEYS["toml"]}"]\n')
        (base / "keys").write_text(f"ann {KEYS['filed']} {KEYS['filed']}\n")
        for words, env in (
                (("--api-key", f"{KEYS['flag']} "), {}), (("--config", str(base / "bad.toml")), {}),
                (("--config", str(base / "list.toml")), {}),
                ((), {"ACTORIUM_ADMIN_KEY": f"\t{KEYS['admin']}"}),
                (("--api-keys-file", str(base / "keys"), "--null-worker"), {})):
            done = cli.run("serve", "--port", "0", *words, **env)
            assert done.returncode == 2, done.stderr
            assert not leaks([("stderr", done.stdout + done.stderr)], KEYS), done.stderr
            tried()


# --- exceptions that quote ------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.mended("what ended an actor was told with its text, in the launcher's lines, in "
                    "logs and crash reports, though it may quote a prompt")
@pytest.mark.mended("an exception of a thread was written to stderr with its text")
def test_an_exception_that_quotes_a_request_is_told_without_its_text(tried: Any) -> None:
    with short_dir() as base:
        config = msgspec.structs.replace(
            make_config(base, crash_reports=True, log_level="debug"),
            device=DeviceConfig(null_worker=True), gateway=GatewayConfig(port=0))
        table = roles_of(config) | {role: f"helpers_planted:{role.partition('-')[0]}" for role in (
            "tokenizer", "scheduler", "detokenizer", "gateway-0")}
        with LauncherProcess(config, table) as launcher, Client("t", run_dir=str(base)) as client:
            assert launcher.started()
            client.wait_ready(60)
            bodies = [{"prompt": f"{WORD} {FAILING['tokenizer']}"},
                      {"prompt": WORD, "user": FAILING["gateway"]},
                      {"prompt": WORD, "user": FAILING["task"]},
                      {"prompt": [*TOKENS, 5], "stop": [WORD]},
                      {"prompt": [5, 6], "stop": [WORD, FAILING["detokenizer"]]}]
            answers = []
            for body in bodies:
                assert eventually(lambda: client.status().ready, 60)
                where = actor.where(launcher.dir)
                assert where is not None
                to = Served(None, where.host, where.port)  # type: ignore[arg-type]
                answers.append(ask(to, "POST", "/v1/completions", body=body | {"max_tokens": 4}))
                time.sleep(0.3)
            assert eventually(lambda: deaths(client) >= {"gateway-0", "scheduler", "detokenizer"},
                              60), answers
            places = [(name, data) for name, data in files_under(base)
                      if not name.startswith("t/ledger")]
            os.kill(launcher.pid, signal.SIGTERM)
            _, terminal = launcher.finish()
        places += [("stderr", terminal.encode()), *files_under(base / "crashes"),
                   *[(f"answer {i}", one.body) for i, one in enumerate(answers)]]
        assert not leaks(places, {"word": WORD} | FAILING)
        assert "Quoting" in terminal and "helpers_planted.py" in terminal, "it was told at all"
        assert any("!" in name for name, _ in places), "there were reports"
        tried(len(places) * 5)


def deaths(client: Client) -> set[str]:
    """Who has been started again."""
    try:
        return {one.role for one in client.status().actors if one.epoch > 1}
    except ActoriumError:
        return set()
