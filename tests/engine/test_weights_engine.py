"""Engines whose weights change under streams, and that lose actors meanwhile: no stream is lost,
and each token is of the weights that are told for it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import write_checkpoint

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client
from actorium.actors.client.requests import Completion
from actorium.actors.errors import ActoriumError, BadModel

NEW = 200
PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (3, 40, 131)]
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0, temperature=0)


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="act"))
    for seed, name in enumerate("ab"):
        write_checkpoint(path / name, "Qwen3ForCausalLM", seed=seed, dtype=torch.bfloat16,
                         head_dim=32)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def opened(base: Path, **more: Any) -> Engine:
    return Engine(base / "a", skip_tokenizer=True, device="cpu", threads=2, exact="on",
                  max_num_seqs=4, **more)


def told(completion: Completion, first: int = 0) -> Any:
    """Tokens from one on, with their log-probabilities."""
    assert completion.logprobs is not None
    return completion.token_ids[first:], [own.logprob for own in completion.logprobs[first:]]


def kill(client: Client, role: str) -> None:
    os.kill(next(own.pid for own in client.status().actors if own.role == role), signal.SIGKILL)


class Running:
    """The prompts, on a thread."""

    def __init__(self, engine: Engine) -> None:
        self._client, self.found = Client(engine.name), list[Completion]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        time.sleep(0.1)

    def _run(self) -> None:
        self.found = self._client.generate(PROMPTS, GREEDY)

    def whole(self) -> list[Completion]:
        self._thread.join(60)
        self._client.close()
        assert [len(own.token_ids) for own in self.found] == [NEW] * len(PROMPTS)
        return self.found


def test_weights_change_under_streams_and_outlive_deaths(base: Path) -> None:
    with opened(base) as engine:
        client = engine.client

        def ask() -> list[Any]:
            return [told(own) for own in client.generate(PROMPTS, GREEDY)]

        of_a = ask()
        running = Running(engine)
        assert client.update_weights(base / "b")["version"] == 1
        assert [(told(own), own.weight_versions) for own in running.whole()] == [
            (own, []) for own in of_a], "they end before"
        of_b = ask()
        assert of_b != of_a

        running = Running(engine)
        assert client.update_weights(base / "a", "retract")["version"] == 2
        for prompt, own, before in zip(PROMPTS, running.whole(), of_b, strict=True):
            (_, one), (first, two) = own.weight_versions
            assert (one, two) == (1, 2) and own.token_ids[:first] == before[0][:first]
            again = client.generate(prompt + own.token_ids[:first], GREEDY)
            count = NEW - first
            assert told(own, first) == tuple(part[:count] for part in told(again))
        assert ask() == of_a

        found = client.get_weights("model.layers.0.self_attn.q_proj.weight", 2)
        assert (len(found["values"]), found["dtype"]) == (2, "bfloat16")
        assert len(found["values"][0]) == found["shape"][1]
        for name, most, why in (("lm_tail", 1, "no tensor 'lm_tail'"),
                                ("model.norm.weight", 0, "most: ")):
            with pytest.raises(ActoriumError, match=why):
                client.get_weights(name, most)
        with pytest.raises(BadModel, match="has shape"):
            client.update_weights({"model.norm.weight": torch.zeros(3)})
        client.update_weights(base / "b", version=10)
        for role in ("worker-0", "scheduler"):
            kill(client, role)
            assert ask() == of_b and client.weight_version() == 10
        client.sleep(2)
        client.wake_up()
        assert ask() == of_b and client.weight_version() == 10


@pytest.mark.slow
def test_a_worker_that_dies_on_the_way_has_one_of_both(base: Path) -> None:
    """The version that is told is what it computes with."""
    with opened(base) as engine:
        client = engine.client
        versions, each = {}, {}
        for number, name in enumerate("ab"):
            client.update_weights(base / name, version=number + 1)
            each[name] = told(client.generate(PROMPTS[1], GREEDY))
            versions[number + 1] = name
        for delay, name in zip((0.0, 0.05, 0.2, 0.4, 0.8, 1.6), itertools.cycle("ab")):
            timer = threading.Timer(delay, kill, (Client(engine.name), "worker-0"))
            timer.start()
            before = client.weight_version()
            try:
                versions[client.update_weights(base / name)["version"]] = name
            except ActoriumError as error:
                assert "the worker ended" in str(error)
            timer.join()
            made = client.generate(PROMPTS[1], GREEDY)
            now = client.weight_version()
            assert made.usage.weight_version == now in (before, before + 1)
            assert told(made) == each[versions[now]]


@pytest.mark.slow
def test_no_stream_is_lost_while_weights_change_again_and_again(base: Path) -> None:
    """In every mode but abort, by a directory or by tensors, with the cache kept or emptied."""
    with opened(base) as engine:
        client, done, made = engine.client, threading.Event(), list[Completion]()

        def stream() -> None:
            with Client(engine.name) as own:
                while not done.is_set():
                    made.extend(own.generate(PROMPTS, GREEDY))

        threads = [threading.Thread(target=stream) for _ in range(3)]
        for thread in threads:
            thread.start()
        states = [client.get_weights("model.norm.weight")]
        pairs = itertools.product(("keep", "retract", "wait"), (True, False), "ba")
        for mode, clear, name in pairs:
            time.sleep(0.5)
            client.update_weights(base / name, mode, clear)  # type: ignore[arg-type]
        done.set()
        for thread in threads:
            thread.join(60)
        assert len(made) > 20 and all(len(own.token_ids) == NEW for own in made)
        for own in made:
            firsts, versions = zip(*[(-1, 0), *own.weight_versions], strict=True)
            assert [*firsts] == sorted(set(firsts)) and [*versions] == sorted(set(versions))
        assert client.weight_version() == 12
        assert client.get_weights("model.norm.weight") == states[0]
