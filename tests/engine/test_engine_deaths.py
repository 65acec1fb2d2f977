"""The command line when something dies: engines that are served, and those of a command's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from helpers_cli import NULL, ROLES, Cli, alive, cli, eventually, read_until

from actorium.actors.client.client import Client, SamplingParams

__all__ = ["cli"]


def test_an_actor_that_dies_is_a_fault_where_none_is_started_again(cli: Cli) -> None:
    """One that merely does not answer is shown as such."""
    with cli.serve("--name", "one", *NULL, "--no-restart") as process:
        pids = {row["role"]: row["pid"] for row in cli.actors()}
        os.kill(pids["watchdog"], signal.SIGSTOP)
        try:
            rows = cli.actors()
        finally:
            os.kill(pids["watchdog"], signal.SIGCONT)
        assert [(row["name"], row["role"], row["phase"]) for row in rows] == [
            ("one", "watchdog", "no answer")]
        assert eventually(lambda: len(cli.actors()) == len(ROLES))
        os.kill(pids["scheduler"], signal.SIGKILL)
        assert process.wait(20) == 1
    assert not [pid for pid in pids.values() if alive(pid)]
    assert cli.entries() == []


def test_an_actor_that_dies_is_started_again(cli: Cli) -> None:
    with cli.serve("--name", "one", *NULL) as process, Client("one", cli.run_dir) as client:
        pids = {row["role"]: row["pid"] for row in cli.actors()}
        os.kill(pids["scheduler"], signal.SIGKILL)
        assert client.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids
        rows = {row["role"]: row for row in cli.actors()}
        assert rows.keys() == ROLES
        now = rows["scheduler"]
        assert (now["epoch"], now["restarts"]) == (2, 1) and now["pid"] != pids["scheduler"]
        assert rows["worker-0"]["restarts"] == 0
        shown = next(line for line in cli.run("ps").stdout.decode().splitlines()
                     if "scheduler" in line)
        assert shown.split()[:5] == ["one", "scheduler", str(now["pid"]), "2", "1"]
        assert "started again: killed 1" in shown
        (view,) = json.loads(cli.run("top", "one", "--json", "--interval", "0.1").stdout)
        seen = next(actor for actor in view["actors"] if actor["role"] == "scheduler")
        assert (seen["epoch"], seen["restarts"], seen["causes"]) == (2, 1, {"killed": 1})
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert cli.entries() == []


def test_streams_continue_in_the_next_engine_of_a_ledger(cli: Cli, tmp_path: Path) -> None:
    """The launcher is killed, and all with it; `serve` says what it goes on with."""
    words = ("--name", "one", "--ledger-dir", str(tmp_path / "ledger"), *NULL)
    prompts = [[1, 2], [3], [4, 5, 6]]
    params = SamplingParams(max_tokens=2500, seed=7, ignore_eos=True)
    got: list[list[int]] = [[] for _ in prompts]
    begun = [threading.Event() for _ in prompts]

    def follow(client: Client, number: int) -> None:
        for delta in client.stream(prompts[number], params):
            got[number] += delta.token_ids
            if len(got[number]) > 100:
                begun[number].set()

    with contextlib.ExitStack() as stack:
        process = stack.enter_context(cli.serve(*words))
        assert b"unfinished" not in process.report  # type: ignore[attr-defined]
        pids = [row["pid"] for row in cli.actors()]
        threads = []
        for number in range(len(prompts)):
            client = stack.enter_context(Client("one", cli.run_dir, resume_timeout=60.0))
            threads.append(threading.Thread(target=follow, args=(client, number)))
            threads[-1].start()
        assert all(event.wait(20) for event in begun)
        process.kill()
        process.wait()
        assert eventually(lambda: not any(alive(pid) for pid in pids))
        assert all(len(tokens) < 2500 for tokens in got), "in mid-stream"
        again = stack.enter_context(cli.serve(*words))
        said = read_until(again, b"  resumed ")
        assert b"  resumed 3 unfinished requests from the ledger, with " in said
        for thread in threads:
            thread.join(60)
        whole = [done.token_ids for done in stack.enter_context(
            Client("one", cli.run_dir)).generate(prompts, params)]
        assert got == whole and all(len(tokens) == 2500 for tokens in whole)
        again.send_signal(signal.SIGTERM)
        assert again.wait(20) == 0


def long_batch(cli: Cli, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """A batch whose worker is killed in the middle: exit code, lines, stderr."""
    line = b'{"prompt_token_ids": [1], "max_tokens": %d, "ignore_eos": true, "seed": 3}\n'
    process = cli.start("generate", *NULL, "--input", "-", *words, env=cli.env,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line % 8 + line % 1500 * 24)
    process.stdin.close()
    process.stdin = None
    first = process.stdout.readline()
    os.kill(next(row["pid"] for row in cli.actors() if row["role"] == "worker-0"), signal.SIGKILL)
    rest, said = process.communicate(timeout=60)
    lines = [json.loads(line) for line in (first + rest).splitlines()]
    return process.returncode, lines, said.decode()


def test_a_batch_outlives_its_worker(cli: Cli) -> None:
    code, lines, said = long_batch(cli)
    assert code == 0, said
    assert [line["index"] for line in lines] == list(range(25))
    assert len(lines[1]["token_ids"]) == 1500
    assert all(line["token_ids"] == lines[1]["token_ids"] for line in lines[1:])
    assert "worker-0 is started again" in said
    assert cli.entries() == []


def test_a_batch_whose_engine_gives_up_is_a_fault(cli: Cli) -> None:
    code, lines, said = long_batch(cli, "--max-restarts", "0")
    assert code == 1 and len(lines) == 1, said
    assert ") was killed by SIGKILL; it was started again 0 times" in said
    assert "Traceback" not in said and said.splitlines()[-1].startswith("actorium: error: ")
    assert cli.entries() == []
