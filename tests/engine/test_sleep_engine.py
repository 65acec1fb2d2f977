"""Engines that sleep, are paused, and lose actors meanwhile: every token is as without, and what
was ordered stands."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_deepseek import add_mtp
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint
from helpers_served import Served, serving

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import ActorStatus
from actorium.tools.cli import main

NEW = 300
PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (3, 40, 131)]
EACH = [SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0, **how) for how in (
    {"temperature": 0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0})]
SHORT = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="act"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def told(completions: list[Any]) -> list[Any]:
    return [(list(c.token_ids), [entry.logprob for entry in c.logprobs]) for c in completions]


def actor(client: Client, role: str) -> ActorStatus:
    return next(own for own in client.status().actors if own.role == role)


def eventually(true: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.005)


class Asked:
    """A call by a client of its own, on a thread."""

    def __init__(self, engine: Engine, call: Callable[[Client], Any]) -> None:
        self.answer: Any = None
        self._client = Client(engine.name)
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[Client], Any]) -> None:
        try:
            self.answer = call(self._client)
        except BaseException as error:
            self.answer = error

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def begun(engine: Engine) -> Asked:
    """The prompts, all of which have waited for each other and run now."""
    client = engine.client
    client.pause()
    running = Asked(engine, lambda c: c.generate(PROMPTS, EACH))
    eventually(lambda: actor(client, "scheduler").gauges["waiting"] == len(PROMPTS), "one is lost")
    client.resume()
    time.sleep(0.03)
    return running


@pytest.mark.parametrize("speculative", [
    "mtp:2,fixed", pytest.param("off", marks=pytest.mark.slow)])
def test_answers_go_on_through_pauses_and_sleeps(base: Path, speculative: str) -> None:
    """A hybrid with recurrent layers, an MTP layer and a tier on the host: what is paused, slept
    through at both levels, or computed again has the same tokens and log-probabilities."""
    add_mtp(base, write_hybrid(base, DENSE, 5, torch.bfloat16, mtp_num_hidden_layers=1, head_dim=32,
                               layer_types=["linear_attention", "full_attention"] * 2,
                               num_hidden_layers=4))
    with Engine(base, skip_tokenizer=True, device="cpu", threads=2, exact="on",
                max_num_seqs=4, speculative=speculative, host_cache=32 << 20) as engine:
        client = engine.client
        want = told(client.generate(PROMPTS, EACH))
        client.flush_cache()
        running = begun(engine)
        client.pause("keep")
        assert client.is_paused() and running.waits
        eventually(lambda: actor(client, "scheduler").gauges["running"] > 0, "none has its place")
        client.resume()
        client.pause("retract", clear_cache=True)
        client.resume()
        assert client.sleep(1, "keep") == {"sleeping": 1, "paused": False, "cache_kept": True}
        eventually(lambda: actor(client, "worker-0").phase == "sleeping", "no heartbeat says so")
        pid = actor(client, "worker-0").pid
        assert client.is_sleeping() and client.status().ready and running.waits
        client.wake_up()
        assert actor(client, "worker-0").pid == pid
        client.sleep(2, "keep")
        assert not Path(f"/proc/{pid}").exists()
        assert running.waits, "it was over too early to show anything"
        client.wake_up()
        assert told(running.result()) == want
        worker = actor(client, "worker-0")
        assert worker.epoch == 2 and worker.gauges["restarts"] == 0

        client.flush_cache()
        client.generate(PROMPTS[2], EACH[2])
        client.sleep(1)
        client.wake_up()
        again = client.generate(PROMPTS[2], EACH[2])
        assert told([again]) == want[2:] and again.usage.cached_tokens >= 64, "kept on the host"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(null_worker=True) as own:
        yield own


def kill(client: Client, role: str) -> None:
    before = actor(client, role)
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: any(own.role == role and own.epoch > before.epoch and client.status().ready
                           for own in client.status().actors), f"{role} does not come back")


def test_what_was_ordered_outlives_every_actor(served: Served) -> None:
    client = served.engine.client
    want = client.generate([1, 2, 3], SHORT).token_ids
    for level, roles in ((1, ("scheduler", "worker-0")), (2, ("watchdog", "gateway-0"))):
        client.sleep(level)
        held = Asked(served.engine, lambda c: c.generate([1, 2, 3], SHORT))
        for role in roles:
            kill(client, role)
            assert client.is_sleeping(), role
        if level == 2:
            assert actor(client, "worker-0").phase == "released"
        assert held.waits, "an explicit sleep holds requests back"
        waking = Asked(served.engine, lambda c: c.wake_up())
        if level == 2:
            os.kill(actor(client, "scheduler").pid, signal.SIGKILL)
        waking.result()
        assert held.result().token_ids == want and not client.is_sleeping()

    client.pause()
    held = Asked(served.engine, lambda c: c.generate([1, 2, 3], SHORT))
    kill(client, "scheduler")
    assert client.is_paused() and held.waits
    client.resume()
    assert held.result().token_ids == want
    assert actor(client, "worker-0").gauges["restarts"] == 1, "a wake is none"


def test_an_idle_engine_sleeps_and_the_next_request_wakes_it() -> None:
    with Engine("", null_worker=True, sleep_after=0.2, sleep_level=2) as engine:
        client = engine.client
        want = client.generate([1, 2, 3], SHORT).token_ids
        for _ in range(2):
            eventually(client.is_sleeping, "it does not sleep")
            eventually(lambda: actor(client, "worker-0").phase == "released", "its worker stays")
            assert client.generate([1, 2, 3], SHORT).token_ids == want


@pytest.mark.slow  # one rank runs the same code, and `test_sleep.py` has the counting of ranks
def test_ranks_sleep_and_wake_together(base: Path) -> None:
    write_checkpoint(base, dtype=torch.bfloat16, head_dim=32)
    with Engine(base, skip_tokenizer=True, device="cpu", threads=2, exact="on",
                tensor_parallel_size=2) as engine:
        client = engine.client
        want = told(client.generate(PROMPTS, EACH))
        for level in (1, 2, 1):
            running = begun(engine)
            client.sleep(level, "keep")
            assert running.waits, "it was over too early to show anything"
            client.wake_up()
            assert told(running.result()) == want
        assert [actor(client, f"worker-{rank}").gauges["restarts"] for rank in (0, 1)] == [0, 0]


@pytest.mark.slow  # three launchers and their actors
def test_replicas_sleep_each_by_itself() -> None:
    with Engine("", null_worker=True, replicas=2, sleep_after=0.2, sleep_level=2) as engine:
        client = engine.client
        want = client.generate([1, 2, 3], SHORT).token_ids
        time.sleep(1.0)
        assert client.generate([1, 2, 3], SHORT).token_ids == want and client.status().ready
        with pytest.raises(InvalidRequest, match="a cluster's router cannot"):
            client.sleep()


def test_the_command_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    name = served.engine.name
    assert main(["sleep", name, "--level", "2", "--json"]) == 0
    assert main(["ps", "--json"]) == 0
    assert main(["wake", name]) == 0
    slept, *shown, woke = capsys.readouterr().out.splitlines()
    assert json.loads(slept).items() >= {"level": 2, "cache_kept": False}.items()
    phases = {row["role"]: row["phase"] for row in json.loads("".join(shown))
              if row["name"] == name}
    assert (phases["scheduler"], phases["worker-0"]) == ("sleeping", "released")
    assert woke.startswith(f"engine {name!r} is awake after ")
    assert main(["sleep", name, "--mode", "now"]) == 2
    assert "--mode: must be one of wait, keep, abort" in capsys.readouterr().err

    def health() -> Any:
        with urllib.request.urlopen(f"{served.url}/health") as answer:
            return json.load(answer)

    eventually(lambda: health()["state"] == "running", "as heartbeats have it")


@pytest.mark.slow  # half a minute of random moments
def test_orders_and_deaths_at_random_moments() -> None:
    """Requests without end, while the engine is put to sleep and paused and its actors are killed,
    also on the way: every answer is the one of a quiet engine, and every order is answered."""
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 400) for _ in range(chance.randrange(3, 90))] for _ in range(6)]
    params = [SamplingParams(max_tokens=chance.randrange(20, 200), ignore_eos=True, seed=number,
                             temperature=0.8 * (number % 2)) for number in range(6)]
    with Engine("", threads=2, exact="on", host_cache=16 << 20, max_restarts=1000,
                max_num_seqs=4) as engine:
        client = engine.client
        want = [own.token_ids for own in client.generate(prompts, params)]
        until, answers = time.monotonic() + 25, [0]

        def ask(own: Client) -> None:
            draw = random.Random(threading.get_ident())
            while time.monotonic() < until:
                number = draw.randrange(6)
                found = own.generate(prompts[number], params[number]).token_ids
                assert found == want[number], number
                answers[0] += 1

        def kill_one(*roles: str) -> None:
            running = [own.pid for own in client.status().actors
                       if own.role in roles and own.phase != "released"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(running), signal.SIGKILL)

        asking = [Asked(engine, ask) for _ in range(4)]
        while time.monotonic() < until:
            what = chance.choice(["sleep", "sleep", "pause", "death"])
            if what == "sleep":
                how = chance.choice([1, 2]), chance.choice(["wait", "keep"])
                order = Asked(engine, lambda own, how=how: own.sleep(*how))
                if chance.random() < 0.5:
                    time.sleep(0.3 * chance.random())
                    kill_one("scheduler", "worker-0")
                order.result()
                client.wake_up()
            elif what == "pause":
                client.pause(chance.choice(["wait", "keep", "retract"]))
                client.resume()
            else:
                kill_one("scheduler", "worker-0", "watchdog", "detokenizer")
            time.sleep(0.5 * chance.random())
        for own in asking:
            own.result()
        assert answers[0] > 20
