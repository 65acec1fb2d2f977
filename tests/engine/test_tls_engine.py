"""Streams over TLS, and through a unix socket, outlive gateways that are killed, to the byte."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers_certificates import Authority, signed
from helpers_cli import eventually
from helpers_served import Served, serving
from helpers_upgrade import upgrade

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.cli import bench_session

pytestmark = pytest.mark.slow
TALE = [{"role": "user", "content": "Tell me a story about a fox."}]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": TALE, "max_tokens": 300, "temperature": 0, "ignore_eos": True,
                        "stream": True, "logprobs": True, "top_logprobs": 2}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return signed(tmp_path_factory.mktemp("tls"), "server", "second")


@pytest.fixture(scope="module")
def served(authority: Authority) -> Iterator[Served]:
    folder = authority.folder
    for suffix in ("pem", "key"):
        (folder / f"used.{suffix}").write_bytes((folder / f"server.{suffix}").read_bytes())
    with serving(max_num_seqs=32, max_restarts=50, gateways=2, port=free_port(),
                 uds=str(folder / "http.sock"), ssl_certfile=str(folder / "used.pem"),
                 ssl_keyfile=str(folder / "used.key")) as found:
        yield found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class UnixConnection(http.client.HTTPConnection):
    """A connection through a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=90)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(90)
        self.sock.connect(str(self._path))


def connection(served: Served, authority: Authority, over: str) -> http.client.HTTPConnection:
    if over == "uds":
        return UnixConnection(authority.folder / "http.sock")
    return http.client.HTTPSConnection(
        "localhost", served.port, timeout=90,
        context=ssl.create_default_context(cafile=authority.file))


def deltas(lines: list[bytes]) -> list[Any]:
    """Returns what a stream says, apart from what each request has of its own; it must be whole."""
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    joined: list[Any] = ["", [], None]
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            joined[0] += choice["delta"].get("content") or ""
            joined[1] += (choice.get("logprobs") or {}).get("content") or []
            joined[2] = choice["finish_reason"] or joined[2]
    return joined


def ask(served: Served, authority: Authority, over: str, **more: Any) -> list[Any]:
    call = connection(served, authority, over)
    call.request("POST", CHAT, json.dumps(BODY | more), {"Content-Type": "application/json"})
    answer = call.getresponse()
    assert answer.status == 200
    lines = list(answer)
    call.close()
    return deltas(lines)


def kill(served: Served, role: str) -> None:
    [pid] = [one.pid for one in served.engine.client.status().actors if one.role == role]
    os.kill(pid, signal.SIGKILL)


def test_streams_outlive_both_gateways(served: Served, authority: Authority) -> None:
    expected = ask(served, authority, "tls")
    assert len(expected[1]) == 300 and ask(served, authority, "uds") == expected
    with ThreadPoolExecutor(16) as pool:
        for wait in (0.1, 1.0):
            answers = [pool.submit(ask, served, authority, over, user=f"user {number}")
                       for number in range(8) for over in ("tls", "uds")]
            time.sleep(wait)
            kill(served, "gateway-0")
            kill(served, "gateway-1")
            for answer in answers:
                assert answer.result() == expected


def test_the_official_client_sees_nothing(served: Served, authority: Authority) -> None:
    import httpx2 as httpx

    with httpx.Client(verify=ssl.create_default_context(cafile=authority.file)) as http_client:
        client = openai.OpenAI(base_url=f"https://localhost:{served.port}/v1", api_key="-",
                               max_retries=0, http_client=http_client)  # type: ignore[arg-type]
        parts: list[str] = []
        for event in client.chat.completions.create(
                model="demo", messages=TALE, max_tokens=300, temperature=0,  # type: ignore
                stream=True, extra_body={"ignore_eos": True}):
            if len(parts) == 5:
                kill(served, "gateway-0")
                kill(served, "gateway-1")
            parts.append(event.choices[0].delta.content or "")
    assert "".join(parts) == ask(served, authority, "tls")[0]


def test_other_programs_connect(served: Served, authority: Authority) -> None:
    def answer(*argv: str, text: str = "") -> str:
        return subprocess.run(argv, check=True, capture_output=True, text=True, input=text,
                              timeout=60).stdout

    ca, port = str(authority.file), served.port
    assert '"demo"' in answer("curl", "-sS", "--cacert", ca, f"https://localhost:{port}/v1/models")
    assert '"demo"' in answer("curl", "-sS", "--unix-socket", str(authority.folder / "http.sock"),
                              "http://localhost/v1/models")
    assert "https://" in answer("curl", "-sS", f"http://localhost:{port}/v1/models")
    for version in ("-tls1_2", "-tls1_3"):
        assert '"demo"' in answer(
            "openssl", "s_client", "-connect", f"localhost:{port}", "-CAfile", ca, "-quiet",
            "-verify_return_error", version, text="GET /v1/models HTTP/1.0\r\n\r\n")
    config = served.engine.config
    assert bench_session._own_url(config) == f"https://127.0.0.1:{port}"


def test_the_caller_s_address_is_logged_by_whoever_answers(served: Served, authority: Authority
                                                           ) -> None:
    """A gateway that took the connection over knows it, too; keys and limits go by it."""
    call = connection(served, authority, "tls")
    for _ in range(2):
        call.request("GET", "/version")
        call.getresponse().read()
        client = "{}:{}".format(*call.sock.getsockname())
        for role in ("gateway-0", "gateway-1"):
            kill(served, role)
    call.close()
    logs = b"".join(file.read_bytes()
                    for file in engine_dir(served.engine.name).glob("gateway-*.log"))
    assert logs.count(client.encode()) >= 2


def test_a_new_certificate_under_a_stream(served: Served, authority: Authority) -> None:
    folder, launcher = authority.folder, served.engine.pid
    assert launcher is not None

    def subject() -> Any:
        context = ssl.create_default_context(cafile=authority.file)
        with context.wrap_socket(socket.create_connection(("127.0.0.1", served.port)),
                                 server_hostname="localhost") as sock:
            found: Any = sock.getpeercert()
            return found["subject"][0][0][1]

    assert subject() == "server"
    expected = ask(served, authority, "tls")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, authority, "tls", user="under a stream")
        for suffix in ("pem", "key"):
            (folder / f"used.{suffix}").write_bytes((folder / f"second.{suffix}").read_bytes())
        os.kill(launcher, signal.SIGHUP)
        end = time.monotonic() + 20
        while subject() != "second":
            assert time.monotonic() < end
            time.sleep(0.05)
        assert answer.result() == expected


def test_a_relay_that_is_stopped_for_a_while_loses_nothing(served: Served, authority: Authority
                                                           ) -> None:
    expected = ask(served, authority, "tls")
    [relay] = [one for one in served.engine.client.status().actors if one.role == "relay"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, authority, "tls", user="meanwhile")
        time.sleep(0.1)
        os.kill(relay.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(relay.pid, signal.SIGCONT)
        assert answer.result() == expected
    assert relay.pid in [one.pid for one in served.engine.client.status().actors]


def test_after_the_relay_s_death_callers_connect_again(served: Served, authority: Authority
                                                       ) -> None:
    expected = ask(served, authority, "uds")
    kill(served, "relay")
    assert ask(served, authority, "tls") == expected  # the port was open all the time
    assert ask(served, authority, "uds") == expected


@pytest.mark.parametrize(("settings", "error"), [
    ({"ssl_certfile": "none.pem"}, "ssl_certfile: cannot read"),
    ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key", "ssl_keyfile_password": "x"},
     "ssl_keyfile_password: does not open"),
    ({"uds": "server.pem"}, "uds: cannot listen at .*: it is there"),
    ({"ssl_certfile": "server.pem", "port": None}, "ssl_certfile: there is no port")])
def test_an_engine_says_which_flag_is_wrong(authority: Authority, settings: dict[str, Any],
                                            error: str) -> None:
    files = {name: str(authority.folder / value) if "." in str(value) else value
             for name, value in settings.items()}
    with pytest.raises(BadConfig, match=f"^{error}"), Engine("", **{"port": 0} | files,
                                                             null_worker=True):
        pass


def test_the_key_s_password_is_nowhere_but_in_the_relay(authority: Authority) -> None:
    folder = authority.folder
    with serving(ssl_certfile=str(folder / "locked.pem"), ssl_keyfile=str(folder / "locked.key"),
                 ssl_keyfile_password="secret", null_worker=True) as served:
        call = connection(served, authority, "tls")
        call.request("GET", "/version")
        assert call.getresponse().status == 200
        assert b"secret" not in (engine_dir(served.engine.name) / "config.json").read_bytes()
        for one in served.engine.client.status().actors:
            environ = Path(f"/proc/{one.pid}/environ").read_bytes()
            assert (b"SSL_KEYFILE_PASSWORD=secret" in environ) == (one.role == "relay")


@pytest.mark.parametrize("fault", ["", "loading=worker-0"])
def test_connections_outlive_an_upgrade(authority: Authority, fault: str) -> None:
    """The relay goes on, and can be started again with the key's password afterwards. fault: it
    fails, and goes back."""
    folder = authority.folder
    with serving(ssl_certfile=str(folder / "locked.pem"), ssl_keyfile=str(folder / "locked.key"),
                 ssl_keyfile_password="secret", max_num_seqs=8) as served:
        expected = ask(served, authority, "tls", max_tokens=1000)
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, served, authority, "tls", max_tokens=1000, user=f"{number}")
                       for number in range(4)]
            time.sleep(0.2)
            done = upgrade(served.engine, "--max-num-seqs", "16", "--upgrade-fault", fault)
            assert (done.returncode != 0) == bool(fault), done.stderr
            for answer in answers:
                assert answer.result() == expected
        epochs = dict[str, int]()

        def relay_is_known() -> bool:  # its next beat tells the new watchdog of it
            epochs.update({one.role: one.epoch for one in served.engine.client.status().actors})
            return "relay" in epochs

        assert eventually(relay_is_known)
        assert epochs.pop("relay") == 1 and set(epochs.values()) == {3 if fault else 2}
        kill(served, "relay")
        assert ask(served, authority, "tls", max_tokens=1000) == expected
