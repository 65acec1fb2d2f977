"""Orders to sleep, wake, pause and go on at random moments, among deaths of all actors: no token is
lost or wrong, and every order is answered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from helpers_examples import examples
from helpers_lives import Lives
from helpers_scheduler import CLIENT

from actorium.actors.messages import Control, ControlRequest, Order, Reply

SCHEDULES = examples(12, 5000)
MOVES = 300
MODES = ("wait", "keep", "retract")


class SleepyLives(Lives):
    """`Lives`, orders among the moves, and a watchdog that ends the worker at level 2 and starts it
    again, some time after the scheduler has said so."""

    def __init__(self, seed: int) -> None:
        self.orders: dict[str, Control] = {}
        self.answered: dict[str, Any] = {}
        self.ended = False
        self.slept: Counter[int] = Counter()
        super().__init__(seed)

    def order(self) -> None:
        chance = self.chance
        control = Control(f"order{len(self.orders)}", chance.choice(
            ["sleep", "sleep", "wake", "wake", "pause", "resume", "resume", "state"]),
            chance.choice([1, 1, 2]), chance.choice(MODES), chance.random() < 0.3)
        self.orders[control.rid] = control
        self.to_scheduler.append(ControlRequest(CLIENT, control))

    def look(self) -> None:
        """The watchdog reads a heartbeat."""
        level = self.scheduler.health().gauges["sleep_level"]
        self.slept[int(level)] += 1
        if level == 2 and not self.ended:
            self.ended = True
        elif level != 2 and self.ended:
            self.ended = False
            self.new_worker()

    def work(self) -> None:
        if not self.ended:
            super().work()
        else:
            self.to_worker.clear()

    def kill_worker(self) -> None:
        if not self.ended:
            super().kill_worker()

    def detokenize(self) -> None:
        if self.to_detokenizer and isinstance(self.to_detokenizer[0], Reply):
            reply = self.to_detokenizer.popleft()
            self.answered[reply.rid] = msgspec.json.decode(reply.json)
        else:
            super().detokenize()

    def play(self, moves: int) -> None:
        for _ in range(moves):
            if self.chance.random() < 0.02:
                self.order()
            if self.chance.random() < 0.1:
                self.look()
            super().play(1)

    def _settle(self) -> None:
        for _ in range(3):
            super()._settle()
            self.look()

    def ask(self, rid: str, order: Order, *how: Any) -> Any:
        """The answer to an order that nothing comes in the way of; it may be lost with an actor:
        then clients repeat it."""
        for _ in range(10):
            if rid not in self.answered:
                self.to_scheduler.append(ControlRequest(CLIENT, Control(rid, order, *how)))
                self._settle()
        return self.answered[rid]

    def finish(self) -> None:
        self.fills = 0
        chance = self.chance
        self.ask("begin", chance.choice(["sleep", "wake"]), chance.choice([1, 2]),
                 chance.choice(MODES))
        told = self.ask("then", chance.choice(["pause", "resume"]), 1, chance.choice(MODES))
        self.kill_scheduler()
        assert self.ask("now", "state") == told, "the next scheduler goes on from there"
        assert self.ask("end1", "wake")["sleeping"] == 0
        assert not self.ask("end2", "resume")["paused"]
        super().finish()


def test_schedules_of_orders_and_deaths() -> None:
    slept: Counter[int] = Counter()
    for seed in range(SCHEDULES):
        lives = SleepyLives(seed)
        try:
            lives.play(MOVES)
            lives.finish()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert not (bad := list(lives.violations())), f"seed {seed}: {bad}"
        slept += lives.slept
    assert min(slept[level] for level in (0, 1, 2)) > SCHEDULES
