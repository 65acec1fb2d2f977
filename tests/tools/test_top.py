"""`actorium top`: rates from two readings, what is shown, and a real engine's snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_cli import NULL, Cli, read_until
from helpers_runtime import short_dir

from actorium.actors.messages import ActorStatus, Status
from actorium.actors.runtime.process import ProcessUsage
from actorium.tools.cli.top_command import EngineReading, bar, figures, rates, screen, view


@pytest.fixture
def cli() -> Iterator[Cli]:
    with short_dir() as base:
        yield Cli(str(base))


def reading(at: float, gauges: dict[str, float], cpu: float = 1.0, epoch: int = 1,
            ready: bool = True, beat_age: float = 0.1, **more: Any) -> EngineReading:
    actors = [ActorStatus("e", "scheduler", 11, epoch, "stepping", 5, 0.2, beat_age, "",
                          gauges | {"restarts": float(epoch - 1)}),
              ActorStatus("e", "worker-0", 12, 1, "idle", 5, 0.2, 0.1)]
    status = Status("r", ready, more.get("error"), actors)
    return EngineReading(at, status, {"scheduler": ProcessUsage(cpu, 8 << 20)},
                         {"model": "some/model"})


def rendered(shown: list[dict[str, Any]], width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(screen(shown))
    return capture.get()


def test_rates_are_of_the_time_between_two_readings() -> None:
    before = reading(10.0, {"tokens": 100.0, "busy_us": 0.0, "finished_stop": 1.0})
    now = reading(12.0, {"tokens": 700.0, "busy_us": 1.5e6, "idle_us": 0.5e6, "late_us": 0.1e6,
                         "finished_stop": 2.0,
                         "finished_length": 3.0, "running": 4.0, "waiting": 2.0}, cpu=2.0)
    shown = view("e", before, now)
    assert shown["rates"]["tokens"] == 300 and shown["rates"]["finished"] == 2
    assert shown["rates"]["device_busy"] == 0.75
    assert shown["rates"]["device_idle_ratio"] == pytest.approx(0.3)
    assert (shown["running"], shown["waiting"], shown["state"]) == (4, 2, "ready")
    scheduler, worker = shown["actors"]
    assert (scheduler["cpu"], scheduler["resident_bytes"]) == (0.5, 8 << 20)
    assert (worker["cpu"], worker["resident_bytes"]) == (None, None)


def test_a_scheduler_of_another_life_has_no_rates_yet() -> None:
    before, now = reading(10.0, {"tokens": 900.0}), reading(11.0, {"tokens": 50.0}, epoch=2)
    shown = view("e", before, now)
    assert shown["rates"]["tokens"] == 0 and shown["actors"][0]["cpu"] is None
    assert shown["actors"][0]["restarts"] == 1
    assert set(rates(None, None).values()) == {0.0}


def test_why_an_engine_is_not_ready() -> None:
    now = reading(1.0, {}, ready=False, beat_age=2.5)
    assert view("e", now, now)["state"] == "scheduler is silent"
    assert view("e", now, now._replace(status=None))["state"] == "no answer"
    failed = reading(1.0, {}, ready=False, error="worker-0 was killed")
    assert view("e", failed, failed)["state"] == "worker-0 was killed"


def test_the_screen_shows_the_engine() -> None:
    gauges = {"free_pages": 60.0, "held_pages": 10.0, "cached_pages": 30.0,
              "cache_hit_tokens": 1.0, "cache_lookup_tokens": 4.0, "suspects": 2.0,
              "spec_decode_k": 2.0, "spec_decode_acceptance_length": 2.4}
    shown = view("e", reading(0.0, {}), reading(1.0, gauges))
    text = rendered([shown])
    for part in ("e  some/model  ready", "2 drafts, 2.40 tokens a window",
                 "2 suspected of killing the worker", "10 held, 30 cached, 60 free; 25 % hits",
                 "scheduler", "8 MiB", "stepping"):
        assert part in text, part
    assert rendered([]) == "no engine is running\n"


def test_eighty_columns_are_enough() -> None:
    """A line each, nothing cut off, for a busy engine of long standing."""
    gauges = {"free_pages": 4e5, "held_pages": 1e5, "cached_pages": 2e5, "tokens": 98_765.0,
              "cache_hit_tokens": 1.0, "prompt_tokens": 123_456.0, "steps": 876.0,
              "running": 1024.0, "waiting": 20_000.0, "finished_stop": 345.0, "busy_us": 1e6}
    shown = view("e", reading(0.0, {}), reading(1.0, gauges))
    for actor, memory in zip(shown["actors"], (200 << 30, 999 << 20), strict=True):
        actor |= {"pid": 4_194_303, "restarts": 12, "phase": "stepping", "step": 123_456_789,
                  "step_age": 99.9, "beat_age": 40_000.0, "cpu": 15.9, "resident_bytes": memory,
                  "detail": "HTTP at http://127.0.0.1:46881", "causes": {"killed": 12}}
    shown["actors"][0]["role"] = "detokenizer"
    lines = rendered([shown], 80).splitlines()
    assert len(lines) == 1 + len(figures(shown)) + 3 + 2 + 1
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in lines)
    told = next(line for line in lines if line.startswith("detokenizer  "))
    assert told == ("detokenizer  4194303     12  stepping  123.5 M  99.9 s   11 h  1590%"
                    "  200.0 GiB")
    assert "detokenizer: HTTP at http://127.0.0.1:46881; started again: killed 12" in lines


@pytest.mark.parametrize(("pages", "drawn"), [
    ((100, 0, 0), "." * 10), ((0, 100, 0), "#" * 10), ((50, 25, 25), "###++....."),
    ((1, 98, 1), "#" * 10), ((0, 0, 0), "." * 10)])
def test_the_bar_of_pages(pages: tuple[int, int, int], drawn: str) -> None:
    free, held, cached = pages
    assert bar({"free": free, "held": held, "cached": cached}, 10) == drawn


def test_no_pages_no_bar() -> None:
    shown = view("e", reading(0.0, {}), reading(1.0, {}))
    assert not any("pages" in line for line in figures(shown))


def test_a_snapshot_of_a_real_engine(cli: Cli) -> None:
    with cli.serve("--name", "one", *NULL, "--probe-port", "0") as served:
        report = served.report.decode()  # type: ignore[attr-defined]
        assert "engine 'one'" in report
        rest = read_until(served, b"probes: ")
        assert b"  probes: http://127.0.0.1:" in rest
        address = rest.decode().split("probes: ")[1].split()[0]
        watchdog = next(row for row in cli.actors() if row["role"] == "watchdog")
        assert watchdog["detail"] == f"probes: {address}"
        assert not any("|" in gauge for row in cli.actors() for gauge in row["gauges"])
        done = cli.run("top", "--interval", "0.2")
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode()
        assert "one  demo  ready" in text and "0 running  0 waiting" in text
        assert address in text
        views = json.loads(cli.run("top", "one", "--json", "--interval", "0.1").stdout)
        assert [v["name"] for v in views] == ["one"]
        assert {a["role"] for a in views[0]["actors"]} == {
            "tokenizer", "scheduler", "worker-0", "detokenizer", "watchdog"}
        assert all(a["resident_bytes"] > 1 << 20 for a in views[0]["actors"])


def test_bad_words_are_named(cli: Cli) -> None:
    done = cli.run("top", "nobody")
    assert (done.returncode, done.stderr) == (
        1, b"actorium: error: no engine named 'nobody' is running; `actorium ps` lists those that "
        b"do, `actorium serve --name nobody` starts one\n")
    done = cli.run("top", "--interval", "0")
    assert (done.returncode, done.stderr) == (
        2, b"actorium: error: --interval: must be between 0.05 and 3600, got 0\n")
    assert cli.run("top", "--once").stdout == b"no engine is running\n"
