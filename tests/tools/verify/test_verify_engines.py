"""`actorium verify` on engines: a tiny model in float32 keeps its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from helpers_cli import Cli, cli
from helpers_kinds import write_bf16_kind
from helpers_models import write_checkpoint

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import Config, DeviceConfig, GatewayConfig
from actorium.actors.errors import EngineFailed, EngineUnavailable
from actorium.gpu.families.architectures import read_shape
from actorium.tools.verify.conditions import PLAIN, Condition, over_ranks, varied
from actorium.tools.verify.own_engines import DEATHS, OwnEngines
from actorium.tools.verify.verify_run import EngineNotStartedError

__all__ = ["cli"]


@pytest.mark.slow
def test_a_tiny_model_in_float32(cli: Cli, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "LlamaForCausalLM", seed=3)
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    done = cli.run("verify", str(tmp_path / "m"), "--skip-tokenizer", "--device", "cpu",
                   "--comparisons", "40", "--engines", "1", "--cases", "6", "--answer-tokens", "5",
                   "--axes", "neighbours,order,cache,choices,logprobs,reading,neighbours_leave",
                   "--logprobs", "close", "--json", str(report), "--html", str(page))
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert result["comparisons"] >= 40 and result["contradictions"] == 0
    assert not result["unanswered"] and result["engines"] == ["plain"]
    assert "<svg" in page.read_text() and b"together" in done.stdout


@pytest.mark.slow
def test_two_ranks_whose_vocabulary_is_padded(cli: Cli, tmp_path: Path) -> None:
    """It found penalties that were put into a copy of the rows: with two ranks, several rows, and a
    vocabulary of an odd number of tokens."""
    write_checkpoint(tmp_path / "m", "LlamaForCausalLM", seed=3)
    done = cli.run("verify", str(tmp_path / "m"), "--skip-tokenizer", "--device", "cpu",
                   "--tensor-parallel-size", "2", "--comparisons", "150", "--engines", "1",
                   "--axes", "neighbours,choices", "--cases", "16", "--logprobs", "close",
                   timeout=300.0)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen35", "deepseek"])
def test_drafts_of_tiny_models_are_accepted_now_and_then(cli: Cli, tmp_path: Path, kind: str
                                                         ) -> None:
    """Else windows of which some is accepted would hardly ever be tried."""
    write_bf16_kind(tmp_path / "m", kind)
    report = tmp_path / "report.json"
    done = cli.run("verify", str(tmp_path / "m"), "--device", "cpu", "--exact", "on",
                   "--comparisons", "60", "--engines", "2", "--cases", "16", "--axes",
                   "neighbours,drafts", "--json", str(report), timeout=300.0)
    assert done.returncode == 0, done.stdout
    counts = json.loads(report.read_text())["counts"]
    assert counts["drafts"] > 200 and 0.2 < counts["accepted"] / counts["drafts"] < 0.8
    assert b"tokens drafted: " in done.stdout


def test_an_engine_that_does_not_start(cli: Cli, tmp_path: Path) -> None:
    done = cli.run("verify", str(tmp_path), "--skip-tokenizer", "--device", "cpu")
    assert done.returncode == 2 and b"config.json" in done.stderr


@pytest.mark.slow
def test_what_exact_refuses_is_left_out_and_named(cli: Cli, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "LlamaForCausalLM", seed=3, dtype=torch.bfloat16, head_dim=32,
                     intermediate_size=97)
    report = tmp_path / "report.json"
    done = cli.run("verify", str(tmp_path / "m"), "--skip-tokenizer", "--device", "cpu", "--exact",
                   "on", "--comparisons", "40", "--engines", "4", "--cases", "6",
                   "--answer-tokens", "5", "--axes", "ranks,neighbours,threads,worker", "--json",
                   str(report), timeout=200.0)
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert result["comparisons"] >= 40 and result["engines"] == ["plain", "threads=1"]
    assert list(result["not_started"]) == ["ranks"]
    assert b"is held: 2 parts of MLPs of 97 are not equal" in done.stdout


def test_an_engine_is_asked_while_another_starts() -> None:
    held, started = threading.Event(), list[int]()

    class Fake:
        name = "none"

    @contextlib.contextmanager
    def start(config: Config) -> Iterator[Any]:
        threads = config.device.threads
        if threads == 3:
            raise EngineFailed("three are too many")
        if threads == 2:
            assert held.wait(60)
        started.append(threads)
        yield Fake()
        started.remove(threads)

    async def work() -> None:
        asker = OwnEngines(Config(), {}, (), start, values={"threads": (1, 2, 3, 4)})
        for condition in (PLAIN, Condition(threads=1)):
            assert await asker.ask((), condition) == []
        starting = asyncio.ensure_future(asker.ask((), Condition(threads=2)))
        assert await asker.ask((), Condition(threads=1)) == [] and not starting.done()
        held.set()
        await starting
        with pytest.raises(EngineNotStartedError, match="three are too many"):
            await asker.ask((), Condition(threads=3))
        assert started == [0, 2], "who was not asked for longest made room"
        async with asker._locks[Condition(threads=2)]:
            for threads in (4, 1):
                await asker.ask((), Condition(threads=threads))
        assert started == [0, 2, 1], "who is asked does not"
        await asker.close()
        assert not started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncClient, "wait_ready", AsyncMock())
        patch.setattr(AsyncClient, "status", AsyncMock(side_effect=EngineUnavailable("none")))
        asyncio.run(work())


def test_with_exact_on_ranks_vary_where_they_can_have_the_same_bits(tmp_path: Path) -> None:
    for width, ranks, words in ((96, 2, ""), (97, 1, "2 parts of MLPs of 97 are not equal")):
        write_checkpoint(tmp_path, dtype=torch.bfloat16, intermediate_size=width)
        shape = read_shape(tmp_path, config := Config(device=DeviceConfig(exact="on")))
        found, held = over_ranks(config, shape, {})
        assert found.device.exact_ranks == ranks and held.endswith(words) and bool(held) == bool(
            words)
        assert over_ranks(config, shape, {"tensor_parallel_size": "2"}) == (config, "")
        assert over_ranks(Config(), shape, {}) == (Config(), "")
        assert over_ranks(config, shape, {"exact_ranks": "1"})[1]
        theirs = replace(shape, by_transformers=1)
        assert over_ranks(Config(), theirs, {})[1] and over_ranks(config, theirs, {})[1]


def test_gateways_are_at_free_ports_and_without_keys() -> None:
    asked = Config(gateway=GatewayConfig(port=8000, host="0.0.0.0", gateways=2, api_key="k"))
    gateway = varied(asked, PLAIN, 100, http=True).gateway
    assert (gateway.port, gateway.host, gateway.gateways, gateway.api_key) == (
        0, "127.0.0.1", 1, None)
    assert varied(asked, PLAIN, 100).gateway.port is None


def test_who_owes_an_answer_or_died_often_is_started_anew(tmp_path: Path) -> None:
    """A silent engine must not make later rounds silent, nor delays of restarts rounds slow."""
    started: list[Config] = []

    class Fake:
        name = "none"

    @contextlib.contextmanager
    def start(config: Config) -> Iterator[Any]:
        started.append(config)
        yield Fake()

    async def work() -> None:
        asker = OwnEngines(Config(), {}, (), start, values={"threads": (1, 2, 3, 4)})
        first = await asker._for(PLAIN)
        other = await asker._for(Condition(threads=1))
        assert await asker._for(PLAIN) is first and await asker._for(Condition(threads=1)) is other
        other.deaths = DEATHS
        assert await asker._for(Condition(threads=1)) is not other and len(started) == 3
        first.silent = True
        assert await asker._for(PLAIN) is not first and len(started) == 4
        for threads in (2, 3, 4):
            await asker._for(Condition(threads=threads))
        assert list(asker._running) == [PLAIN, Condition(threads=3), Condition(threads=4)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncClient, "wait_ready", AsyncMock())
        patch.setattr(AsyncClient, "status", AsyncMock(side_effect=EngineUnavailable("none")))
        asyncio.run(work())
