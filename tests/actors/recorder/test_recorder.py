"""The flight recorder: what it keeps, what it must not, and that the same plans come out again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_scheduler import CLIENT, Ring, column, config, ints

from actorium.actors.config.tree import Config, RecoveryConfig
from actorium.actors.core import Context
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import META, LedgerMeta
from actorium.actors.messages import Admit, StepPlan, StepResult, Submit
from actorium.actors.params import ResolvedParams, ResolvedPooling, TextParams
from actorium.actors.recorder import recording as files
from actorium.actors.recorder.recorder import plan_checksum
from actorium.actors.recorder.recording import BadRecording, Recording
from actorium.actors.recorder.redaction import Redactor
from actorium.actors.recorder.replay import load_recording, replay
from actorium.actors.scheduler.scheduler_actor import SchedulerActor
from actorium.tools.cli.replay_command import plan_line

replace = msgspec.structs.replace
PAGE = 16


def with_recorder(settings: Config, prompts: bool = False, limit: int = 1 << 22) -> Config:
    return replace(settings, runtime=replace(settings.runtime, record_prompts=prompts,
                                             recorder_bytes=limit))


class Taped(Ring):
    """A ring whose scheduler is recorded, and asked for its timer after each wake, as a shell
    does."""

    def __init__(self, where: Path, settings: Config, **more: Any) -> None:
        self.taped = False
        super().__init__(settings, start=False, **more)
        context = Context(settings, where, "scheduler", 3, 0)
        self.scheduler = SchedulerActor(self.scheduler, context)
        self.taped = True
        self.start()

    def wake(self) -> None:
        super().wake()
        if self.taped:
            self.scheduler.next_timer()


def recording(where: Path) -> Recording:
    return load_recording(where / "scheduler.tape0")


def assert_replays(where: Path, sent: list[StepPlan]) -> list[StepPlan]:
    """The same plans come out again; they are returned."""
    found = recording(where)
    assert found.complete and not found.damaged
    again: list[StepPlan] = []
    for played in replay(found):
        again += played.plans
        assert played.same and not played.error
    assert [plan_checksum(plan) for plan in again] == [plan_checksum(plan) for plan in sent]
    return again


def bare(plan: StepPlan) -> StepPlan:
    """A plan without tokens."""
    return replace(plan, admit=[replace(a, tokens=bytes(len(a.tokens))) for a in plan.admit])


def busy_day(ring: Taped, dice: random.Random, requests: int) -> None:
    """Prompts that share beginnings, conversations that go on, cancels, stops, deadlines."""
    texts = [[dice.randrange(500) for _ in range(dice.randrange(20, 90))] for _ in range(4)]
    for number in range(requests):
        heard = [h for h in ring.heard.values() if h.tokens and h.reason]
        if heard and dice.random() < 0.4:  # the next turn of a conversation
            last = dice.choice(heard)
            prompt = ints(last.submit.prompt) + last.tokens + [7, 8, 9]
        else:
            prompt = dice.choice(texts)[:dice.randrange(1, 90)] + [dice.randrange(500)]
        deadline = ring.now + 0.5 if dice.random() < 0.1 else None
        rid = ring.submit(prompt, max_tokens=dice.randrange(1, 60), n=dice.choice([1, 1, 2]),
                          deadline=deadline, eos_ids=(5, 6))
        ring.now += dice.random()
        if dice.random() < 0.1:
            ring.cancel(rid)
        if dice.random() < 0.1 and ring.heard:
            ring.stop(dice.choice(list(ring.heard)), 1)
        if dice.random() < 0.05:
            ring.flush()
        if number % 5 == 4:
            ring.run(dice)
    ring.run(dice)


KINDS: dict[str, Callable[[], tuple[Config, dict[str, Any]]]] = {
    "plain": lambda: (config(), {}),
    "tight": lambda: (config(pool_tokens=640, chunk=64), {}),
    "forced": lambda: (config(force_preempt=5), {}),
    "lpm": lambda: (config(policy="lpm", pool_tokens=1024), {}),
    "page of 1": lambda: (config(page_size=1, pool_tokens=512), {}),
    "checkpoints": lambda: (config(), {"checkpoints": 8}),
    "drafts": lambda: (config(speculative="mtp:2"), {"acceptance": (0.8, 0.6)}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_plans_come_out_again(tmp_path: Path, kind: str, seed: int) -> None:
    settings, more = KINDS[kind]()
    ring = Taped(tmp_path, with_recorder(settings), **more)
    busy_day(ring, random.Random(seed), 40)
    again = assert_replays(tmp_path, ring.sent)
    assert [bare(plan) for plan in again] == [bare(plan) for plan in ring.sent]
    assert sum(a.cached_len for plan in again for a in plan.admit) > 0, "prefixes were shared"


def test_vectors_are_left_out_and_plans_come_out_again(tmp_path: Path) -> None:
    """Beside completions, whose rows are told apart from prompts that are pooled."""
    ring = Taped(tmp_path, with_recorder(config(chunk=40, force_preempt=7)))
    for number in range(40):
        own = None if number % 3 else ResolvedPooling("embed", every_row=number % 2 > 0)
        ring.submit([7] * 20 + list(range(3 * number)), max_tokens=1 if own else 9, pooling=own)
        if number % 8 == 7:
            ring.run(random.Random(number))
    ring.run()
    assert_replays(tmp_path, ring.sent)
    pooled = [heard.pooled for heard in ring.heard.values() if heard.pooled is not None]
    written = (tmp_path / "scheduler.tape0").read_bytes()
    assert len(pooled) == 14 and not any(own.data in written for own in pooled)


def test_numbers_of_sequences_go_on_from_the_ledger(tmp_path: Path) -> None:
    """Past 32 bits, and where the ledger has no request but the next number."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(META, LedgerMeta("boot", "", 2**31 - 5, ledger.id))
    ledger.commit()
    ledger.close()
    settings = replace(config(), recovery=RecoveryConfig(ledger_dir=str(tmp_path / "ledger")))
    ring = Taped(tmp_path, with_recorder(settings))
    ring.submit(5, max_tokens=300, n=8)
    while not ring.heard or not all(heard.tokens for heard in ring.heard.values()):
        ring.wake()
        assert ring.work() and ring.deliver()
    for sid in ring.heard:  # what ends by its number ends at the same step again
        ring.stop(sid, 1)
        ring.wake()
        assert ring.work() and ring.deliver()
    ring.run()
    assert min(ring.heard) == 2**31 - 5 and len(ring.heard) == 8
    assert_replays(tmp_path, ring.sent)


def test_with_prompts_the_plans_are_equal_to_the_byte(tmp_path: Path) -> None:
    ring = Taped(tmp_path, with_recorder(config(), prompts=True))
    busy_day(ring, random.Random(3), 30)
    assert assert_replays(tmp_path, ring.sent) == ring.sent


def test_a_conversation_is_in_the_cache_again(tmp_path: Path) -> None:
    """What was emitted is part of what later prompts are compared with."""
    ring = Taped(tmp_path, with_recorder(config()))
    ring.submit(list(range(40)), max_tokens=60)
    ring.run()
    ring.submit(list(range(40)) + ring.heard[1].tokens, max_tokens=2)
    ring.run()
    again = assert_replays(tmp_path, ring.sent)
    cached = [a.cached_len for plan in again for a in plan.admit]
    assert cached == [0, 96], "40 and 59 tokens were computed: six pages"


def test_no_text_is_in_a_recording(tmp_path: Path) -> None:
    secret = [300 + i * 7 % 150 for i in range(64)]
    bias = {431: 1.25}

    def bytes_of(where: Path, prompts: bool) -> tuple[bytes, list[int]]:
        where.mkdir()
        ring = Taped(where, with_recorder(config(), prompts=prompts))
        ring.tell(Submit(rid="r", client=CLIENT, prompt=column(secret), n=1, seed=5,
                         params=ResolvedParams(max_tokens=70, logit_bias=bias, logprobs=2),
                         text=TextParams(stop=("swordfish",))))
        ring.submits["r"] = Submit(rid="r", client=CLIENT, prompt=column(secret), n=1, seed=5,
                                   params=ResolvedParams(max_tokens=70), text=TextParams())
        ring.run()
        return (where / "scheduler.tape0").read_bytes(), ring.heard[1].tokens

    for prompts in (True, False):
        data, emitted = bytes_of(tmp_path / str(prompts), prompts)
        assert (column(secret[:3]) in data) is prompts
        assert (b"swordfish" in data) is prompts
        assert (msgspec.msgpack.encode(bias)[1:] in data) is prompts
        found = load_recording(tmp_path / str(prompts) / "scheduler.tape0")
        told = [t for turn in found.turns for event in turn.events
                if isinstance(event.message, StepResult) for t in ints(event.message.tokens)]
        assert (told == emitted) is prompts
        if not prompts:
            assert sum(t != 0 for t in told) == (64 + 70) // PAGE - 64 // PAGE
            assert not set(told) & set(emitted) - {0}


# --- the redactor ---------------------------------------------------------------------------------

def test_equal_beginnings_and_nothing_else_stay_equal() -> None:
    redactor = Redactor(4, 8)
    one, two = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 0, 8, 9]
    a, b = ints(redactor.redact_tokens(column(one))), ints(redactor.redact_tokens(column(two)))
    assert len(a) == 9 and a[:4] == b[:4] and a[7] != b[7]
    assert [i for i, token in enumerate(a) if token] == [3, 7]
    repeated = ints(redactor.redact_tokens(column([1, 2, 3, 4] * 50)))
    assert len({t for t in repeated if t}) == 50, "the same page is another one elsewhere"
    other = ints(Redactor(4, 8).redact_tokens(column(one)))
    assert other[3] != a[3], "each recording has its own secret"
    assert redactor.redact_tokens(b"abc") == bytes(3)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_what_is_emitted_continues_the_prompt(page: int) -> None:
    """In random steps of 0 to 3 tokens, over slots that change hands while results are due."""
    dice, redactor = random.Random(page), Redactor(page, 4)
    whole: dict[int, list[int]] = {}
    redacted: dict[int, list[int]] = {}
    seat: dict[int, int] = {}
    due: list[tuple[int, list[int]]] = []
    for step in range(1, 200):
        admits = []
        if dice.random() < 0.3 or not seat:
            slot, name = dice.randrange(1, 5), len(whole)
            prompt = [dice.randrange(1000) for _ in range(dice.randrange(1, 40))]
            whole[name], seat[slot] = prompt, name
            redacted[name] = ints(redactor.redact_tokens(column(prompt)))
            admits = [Admit(slot, column(prompt), len(prompt), 0, b"", ResolvedParams(max_tokens=9),
                            0)]
        new = {a.slot for a in admits}
        decode = [s for s in seat if s not in new]
        extend = [[a.slot, len(a.tokens) // 4] for a in admits]
        redactor.on_plan(StepPlan(1, step, admit=admits, decode=column(decode),
                           extend=np.array(extend, np.int32).tobytes()))
        due.append((step, [seat[s] for s in (*new, *decode)]))
        if len(due) == 2:
            number, names = due.pop(0)
            counts = [dice.randrange(4) for _ in names]
            tokens = [[dice.randrange(1000) for _ in range(c)] for c in counts]
            result = redactor.redact_result(StepResult(
                1, number, bytes(counts), column(sum(tokens, [])), bytes(len(names))))
            told = iter(ints(result.tokens))
            for name, mine in zip(names, tokens, strict=True):
                whole[name] += mine
                redacted[name] += [next(told) for _ in mine]
    assert len(whole) > 20
    for name, tokens in whole.items():
        assert ints(redactor.redact_tokens(column(tokens))) == redacted[name]


# --- the tape ------------------------------------------------------------------------------------

def test_the_ring_buffer_keeps_the_latest(tmp_path: Path) -> None:
    limit = 1 << 17
    ring = Taped(tmp_path, with_recorder(config(), limit=limit))
    turns = []
    for _ in range(60):
        ring.submit(40, max_tokens=30)
        ring.run()
        found = recording(tmp_path)
        turns.append(found.header.turn + len(found.turns))
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    assert turns == sorted(set(turns)), "the latest turn is always there"
    assert not found.complete and len(list(tmp_path.iterdir())) == 2
    assert len(found.turns) * 2 > found.header.turn // 100
    assert found.turns[-1].now == ring.now
    both = {(p, files.decode(p.read_bytes(), "x").header.turn) for p in tmp_path.iterdir()}
    assert found.header.turn == min(turn for _, turn in both)
    with pytest.raises(BadRecording, match="mid-life"):
        next(replay(found))


def test_both_files_make_a_whole(tmp_path: Path) -> None:
    ring = Taped(tmp_path, with_recorder(config(), limit=1 << 17))
    while not (tmp_path / "scheduler.tape1").exists():
        ring.submit(40, max_tokens=30)
        ring.run()
    ring.submit(40, max_tokens=30)
    ring.run()
    assert_replays(tmp_path, ring.sent)
    assert load_recording(tmp_path / "scheduler.tape1").complete
    (tmp_path / "scheduler.tape0").unlink()
    assert not load_recording(tmp_path / "scheduler.tape1").complete


def test_a_torn_end_and_other_files(tmp_path: Path) -> None:
    ring = Taped(tmp_path, with_recorder(config()))
    ring.submit(20)
    ring.run()
    path = tmp_path / "scheduler.tape0"
    data, turns = path.read_bytes(), len(recording(tmp_path).turns)
    end = len(data)
    assert len(files.decode(data[:end - 3], "x").turns) == turns - 1
    broken = bytearray(data)
    broken[end - 20:end] = b"\xc1" * 20
    assert files.decode(bytes(broken), "x").damaged
    for bad in (b"", b"\0" * 100, b"hello, world", b"\xff" * 64, data[:8]):
        path.write_bytes(bad)
        with pytest.raises(BadRecording, match=r"scheduler\.tape0 is no recording"):
            recording(tmp_path)
    with pytest.raises(BadRecording, match="cannot read"):
        load_recording(tmp_path / "none.tape0")


def test_a_full_disk_ends_the_recording_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              caplog: pytest.LogCaptureFixture) -> None:
    ring = Taped(tmp_path, with_recorder(config(), limit=1 << 20))
    left, write, before = [50], os.write, len(recording(tmp_path).turns)

    def filling(fd: int, data: bytes) -> int:
        left[0] -= 1
        return write(fd, data) if left[0] > 0 else write(fd, data[:5])

    monkeypatch.setattr(os, "write", filling)
    for _ in range(30):
        ring.submit(200, max_tokens=20)
        ring.run()
    assert all(len(heard.tokens) == 20 for heard in ring.heard.values())
    assert [r.message for r in caplog.records if "flight recorder stops" in r.message]
    assert len(recording(tmp_path).turns) == before + 49
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    context = Context(with_recorder(config()), tmp_path, "scheduler", 4, 0)
    bare = Ring(config(), start=False).scheduler
    assert SchedulerActor(bare, context).recorder is None


def test_nothing_is_recorded_without_being_asked_for(tmp_path: Path) -> None:
    ring = Ring(config(), start=False)
    context = Context(with_recorder(config(), limit=0), tmp_path, "scheduler", 1, 0)
    assert SchedulerActor(ring.scheduler, context).recorder is None
    assert not list(tmp_path.iterdir())


def test_the_message_that_kills_the_scheduler_is_recorded(tmp_path: Path) -> None:
    ring = Taped(tmp_path, with_recorder(config()))
    ring.submit(20, max_tokens=10)
    ring.wake()
    bad = StepResult(3, ring.sent[0].step, b"\1" * 7, column([1] * 7), bytes(7))
    with pytest.raises(Exception, match=r".") as raised:
        ring.tell(bad)
    *before, last = replay(recording(tmp_path))
    assert all(played.same for played in before)
    assert last.turn.now is None and last.same
    assert last.error == f"{type(raised.value).__name__}: {raised.value}"


# --- the command ---------------------------------------------------------------------------------

def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "actorium.tools.cli", "replay", *words],
                          capture_output=True, text=True, timeout=60)


def test_the_command(tmp_path: Path) -> None:
    ring = Taped(tmp_path, with_recorder(config(), limit=1 << 17))
    ring.submit(20, max_tokens=10)
    ring.run()
    path = tmp_path / "scheduler.tape0"
    done = command(str(path), "--show", "3")
    assert done.returncode == 0, done.stderr
    head, *lines, last = done.stdout.splitlines()
    assert "epoch 3" in head and "tokens redacted" in head
    assert lines == [plan_line(plan) for plan in ring.sent[-3:]]
    assert last == f"{len(ring.sent)} plans, all as they were"
    early = command(str(path), "--until", "4").stdout.splitlines()
    assert early[-2] == plan_line(ring.sent[3]) and early[-1].startswith("4 plans")

    found = recording(tmp_path)  # one token more to compute than there was: other plans
    at = next(i for i, turn in enumerate(found.turns)
              if any(isinstance(e.message, Submit) for e in turn.events))
    submit = found.turns[at].events[-1]
    assert isinstance(submit.message, Submit)
    longer = replace(submit.message, prompt=submit.message.prompt + bytes(64))
    found.turns[at] = replace(found.turns[at], events=[replace(submit, message=longer)])
    _write(path, found)
    done = command(str(path))
    assert done.returncode == 1
    assert "the plans differ from those of then" in done.stderr

    (tmp_path / "x").write_bytes(b"x")
    done = command(str(tmp_path / "x"))
    assert done.returncode == 2 and "is no recording" in done.stderr
    path.unlink()
    for _ in range(40):
        ring.submit(40, max_tokens=60)
        ring.run()
    done = command(str(path), "--show", "2")
    assert done.returncode == 0 and "begins in mid-life" in done.stdout
    assert len(done.stdout.splitlines()) == 4 and "StepResult" in done.stdout


def _write(path: Path, found: Recording) -> None:
    frames = [msgspec.msgpack.encode(part) for part in (found.header, *found.turns)]
    path.write_bytes(b"".join(files.LENGTH.pack(len(f)) + f for f in frames))
