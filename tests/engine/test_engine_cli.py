"""The command line with real processes: engines without a model, and the demo model."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import NULL, ROLES, Cli, alive, cli, eventually, one_line

from actorium.actors.client.client import Client, Request, SamplingParams
from actorium.actors.config.retention import max_retained_bytes
from actorium.actors.config.tree import Config
from actorium.actors.health import MEMORY_GAUGES
from actorium.tools.demo.demo_tasks import TASKS

__all__ = ["cli"]
DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo" / "demo_model" / "model.safetensors"
needs_demo = pytest.mark.skipif(not DEMO.is_file(), reason="the demo model is not there")


def records(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_serve_ps_stop(cli: Cli) -> None:
    with cli.serve("--name", "one", *NULL) as process:
        report = process.report.decode()  # type: ignore[attr-defined]
        assert "engine 'one' serves the demo model; ready after:" in report
        rows = cli.actors()
        assert {row["role"] for row in rows} == ROLES
        for row in rows:
            assert row["name"] == "one"
            assert row["epoch"] == 1
            assert row["phase"] in ("ready", "idle", "stepping")
            assert row["step_age"] >= 0
            assert row["launcher"] == process.pid
            assert alive(row["pid"])
        table = cli.run("ps").stdout.decode().splitlines()
        assert table[0].split() == ["name", "role", "pid", "epoch", "restarts", "phase", "step",
                                    "step", "age", "memory", "keeps"]
        assert len(table) == 1 + len(ROLES)

        second = cli.run("serve", "--name", "one", *NULL)
        assert second.returncode != 0
        assert "'one' is already running" in one_line(second.stderr)
        assert len(cli.actors()) == len(ROLES)

        assert cli.run("stop", "one").returncode == 0
        assert process.wait(20) == 0
    assert not [row["pid"] for row in rows if alive(row["pid"])]
    assert cli.entries() == []
    assert cli.actors() == []


def drains(cli: Cli, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """A signal ends it, and nothing is left."""
    pids = [row["pid"] for row in cli.actors()]
    assert len(pids) == len(ROLES)
    process.send_signal(number)
    assert process.wait(20) == 0
    assert not [pid for pid in pids if alive(pid)]
    assert cli.entries() == []


def test_settings_reach_the_engine(cli: Cli, tmp_path: Path) -> None:
    """From a file, a variable and flags; without a prefix cache nothing is kept."""
    file = tmp_path / "engine.toml"
    file.write_text('[scheduler]\nmax_num_seqs = 5\n[runtime]\nname = "from-file"\n')
    short = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    with cli.serve("--config", str(file), "--block-size", "32", "--disable-radix-cache", *NULL,
                   ACTORIUM_MAX_TOTAL_TOKENS="1k") as process:
        config = json.loads((Path(cli.run_dir) / "from-file" / "config.json").read_text())
        with Client("from-file", cli.run_dir) as client:
            for _ in range(2):
                assert client.generate(list(range(64)), short).usage.cached_tokens == 0
            assert client.flush_cache() == {"pages": 0, "kept": 0}
        drains(cli, process, signal.SIGTERM)
    assert config["scheduler"]["max_num_seqs"] == 5
    assert config["memory"]["page_size"] == 32
    assert config["memory"]["max_total_tokens"] == 1024


def test_the_prefix_cache_from_outside(cli: Cli) -> None:
    """Hits are told in the usage, gauges by ps and server_info; flush-cache forgets."""
    prompt = list(range(64))
    short = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    with (cli.serve("--name", "one", "--debug-memory", "--block-size", "16", *NULL) as process,
          Client("one", cli.run_dir, tenant="acme") as client):
        assert client.generate(prompt, short).usage.cached_tokens == 0
        assert client.generate(prompt, short, priority=5).usage.cached_tokens == 48
        ((_, other),) = client.run([Request(prompt=prompt, params=short, tenant="other")])
        assert other[0].usage.cached_tokens == 0, "prefixes are a tenant's own"
        told = cli.run("flush-cache", "one", "--json")
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout) == {"pages": 8, "kept": 0}
        assert client.generate(prompt, short).usage.cached_tokens == 0
        assert client.flush_cache() == {"pages": 4, "kept": 0}

        def gauges() -> dict[str, float]:
            (row,) = (row for row in cli.actors() if row["role"] == "scheduler")
            return row["gauges"]

        assert eventually(lambda: (found := gauges()).get("cache_hit_tokens") == 48
                          and found["cached_pages"] == 0)
        found = gauges()
        assert set(MEMORY_GAUGES) <= set(found)
        assert found["cached_pages"] == found["held_pages"] == found["quarantined_pages"] == 0
        assert client.server_info()["memory"] == {name: found[name] for name in MEMORY_GAUGES}
        for actor in json.loads(cli.run("ps", "--json").stdout):
            assert 10e6 < actor["memory"] < 4e9
            assert actor["keeps"] == max_retained_bytes(Config(), actor["role"])
        assert "pages: " in cli.run("ps").stdout.decode()
        drains(cli, process, signal.SIGINT)


@pytest.mark.parametrize("policy", [
    "fair", *(pytest.param(other, marks=pytest.mark.slow) for other in ("fcfs", "lpm", "priority"))
])
def test_tenants_and_priorities_of_a_batch(cli: Cli, tmp_path: Path, policy: str) -> None:
    """Whatever the policy, every line is served, and a prefix is shared within a tenant."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({
        "prompt_token_ids": list(range(40)), "max_tokens": 3, "ignore_eos": True,
        "tenant": "ab"[i % 2], "priority": i % 3}) + "\n" for i in range(24))
        + '{"prompt_token_ids": [1], "tenant": "a b"}\n{"prompt_token_ids": [1], "priority": 0.5}')
    done = cli.run("generate", *NULL, "--input", str(source), "--scheduling-policy", policy,
                   "--tenant-weights", "a=2", "--max-num-seqs", "4", "--debug-memory")
    assert done.returncode == 0, done.stderr
    lines = records(done.stdout)
    assert [len(line["token_ids"]) for line in lines[:24]] == [3] * 24
    cached = sorted(line["cached_tokens"] for line in lines[:24])
    assert cached == [0, 0] + [32] * 22
    assert lines[24]["error"].startswith("tenant: must be at most 64")
    assert lines[25]["error"].startswith("priority: must be a whole number")


BATCH = [
    b'{"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "seed": 7, "ignore_eos": true}',
    b"not json",
    b'{"prompt_token_ids": [1, 2, 3], "seed": 7, "ignore_eos": true}',
    b'{"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "sed": 7}',
    b'{"prompt_token_ids": [2000000000], "max_tokens": 4}',
    b'{"prompt_token_ids": [], "max_tokens": 4}',
    b'{"prompt": "text", "max_tokens": 4}',
    b'{"prompt_token_ids": [5], "max_tokens": 3, "n": 2, "seed": 1, "ignore_eos": true}',
    b'{"prompt_token_ids": [5], "prompt": "\xff"}',
]


def test_a_batch_by_token_ids(cli: Cli, tmp_path: Path) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(BATCH))
    done = cli.run("generate", *NULL, "--input", str(source), "--output", str(sink),
                   "--max-tokens", "6", "--max-running-requests", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    lines = records(sink.read_bytes())
    assert [line["index"] for line in lines] == list(range(len(BATCH)))
    first, third = lines[0], lines[2]
    assert first["prompt_tokens"] == 3
    assert first["completion_tokens"] == len(first["token_ids"]) == 4
    assert first["finish_reason"] == "length"
    assert third["token_ids"][:4] == first["token_ids"]
    assert third["completion_tokens"] == 6
    assert len(lines[7]["choices"]) == 2
    assert [len(choice["token_ids"]) for choice in lines[7]["choices"]] == [3, 3]
    errors = {line["index"]: line["error"] for line in lines if "error" in line}
    assert set(errors) == {1, 3, 4, 5, 6, 8}
    assert "sed: no such field" in errors[3]
    assert "2000000000" in errors[4]
    assert cli.entries() == []


def test_a_batch_through_pipes_leaves_order_and_memory_alone(cli: Cli) -> None:
    """And with a seed of all, equal lines have equal answers."""
    line = b'{"prompt_token_ids": [%d, 9], "max_tokens": 8, "ignore_eos": true}\n'
    lines = b"".join(line % (i % 199) for i in range(200))
    done = cli.run("generate", *NULL, "--input", "-", "--max-num-seqs", "16", "--seed", "11",
                   "--max-num-queued-reqs", "8", stdin=lines)
    assert done.returncode == 0, done.stderr
    found = records(done.stdout)
    assert [record["index"] for record in found] == list(range(200))
    assert all(record["completion_tokens"] == 8 for record in found)
    assert found[0]["token_ids"] == found[199]["token_ids"]


@pytest.mark.slow
def test_a_model_of_an_unknown_kind(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["MysteryForCausalLM"], "vocab_size": 100, "hidden_size": 8,
        "max_position_embeddings": 64}))
    done = cli.run("generate", str(tmp_path), "--prompt", "x", "--skip-tokenizer",
                   "--device", "cpu")
    assert done.returncode == 2, done.stderr
    assert "MysteryForCausalLM" in done.stderr.decode().splitlines()[-1]
    assert cli.entries() == []


@needs_demo
@pytest.mark.usefixtures("real_starts")
def test_the_demo_model_answers(cli: Cli) -> None:
    with cli.serve("--name", "demo", "--device", "cpu") as process:
        assert "importing torch" in process.report.decode()  # type: ignore[attr-defined]
        talk = cli.run("chat", "--name", "demo", "--temperature", "0", "--max-tokens", "12",
                       stdin=b"Hello!\n/new\nHello!\n")
        assert talk.returncode == 0, talk.stderr
        first, second = talk.stdout.decode().splitlines()
        assert first == second != ""
    assert cli.entries() == []


@needs_demo
@pytest.mark.slow
def test_the_demo_model_is_scored(cli: Cli) -> None:
    scored = cli.run("eval", "demo", "--count", "2", "--json", "--device", "cpu")
    assert scored.returncode == 0, scored.stderr
    result = json.loads(scored.stdout)
    assert set(result["tasks"]) == set(TASKS)
    assert result["count"] == 2 * len(TASKS)
    assert not any(task["errors"] for task in result["tasks"].values())
    assert cli.entries() == []


@needs_demo
def test_prompts_on_the_command_line(cli: Cli) -> None:
    done = cli.run("generate", "--prompt", "Once upon", "Once upon", "--max-tokens", "5",
                   "--seed", "3", "--null-worker")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.decode().splitlines()
    assert first.startswith("[0] ") and second.startswith("[1] ")
    assert first[4:] == second[4:] != ""


def test_prompts_that_cannot_be_served_are_a_fault(cli: Cli) -> None:
    done = cli.run("generate", *NULL, "--prompt", "text needs a tokenizer")
    assert done.returncode == 1
    assert done.stdout == b""
    assert "actorium: prompt 0: prompt: " in one_line(done.stderr)


def test_an_interrupted_batch_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a long batch: 130, and no process or file of the engine is left."""
    source = tmp_path / "in.jsonl"
    line = b'{"prompt_token_ids": [1], "max_tokens": %d, "ignore_eos": true}\n'
    source.write_bytes(line % 8 + line % 4_000 * 600)  # no machine is done before the signal
    process = cli.start("generate", *NULL, "--max-num-seqs", "4", "--input", str(source),
                        env=cli.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    pids = [row["pid"] for row in cli.actors()]
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert not [pid for pid in pids if alive(pid)]
    assert cli.entries() == []


def _read_until(fd: int, text: bytes, timeout: float = 60.0) -> bytes:
    """What a terminal shows up to `text`."""
    seen = b""
    while text not in seen:
        ready, _, _ = select.select([fd], [], [], timeout)
        assert ready, seen
        try:
            data = os.read(fd, 65536)
        except OSError:
            data = b""
        assert data, seen
        seen += data
    return seen


@needs_demo
def test_chat_on_a_terminal(cli: Cli) -> None:
    """Ctrl-C stops the answer and nothing else; Ctrl-D leaves."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, cli.argv("chat", "--null-worker", "--ignore-eos",
                                           "--run-dir", cli.run_dir), cli.env)
    try:
        _read_until(fd, b"> ")
        os.write(fd, b"Hello\n")
        _read_until(fd, b"Hello\r\n")
        os.read(fd, 1)
        os.write(fd, b"\x03")
        _read_until(fd, b"\n> ")
        assert len(cli.actors()) == len(ROLES)
        os.write(fd, b"\x04")
        while True:
            try:
                if not os.read(fd, 65536):
                    break
            except OSError:
                break
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(fd)
    assert cli.entries() == []
