"""The machine of `test_scheduler_machine.py` with LoRA adapters among its moves: whichever way they
are loaded, replaced, unloaded and evicted, each request gets the tokens of the adapter that its
name stood for when it was accepted, and no page of another one."""

from __future__ import annotations

import pytest
from helpers_examples import walk, walks
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_scheduler_machine import SchedulerMachine

from actorium.actors.config.adapter_settings import AdapterConfig

NAMES = ("a", "b", "c", "d")


class AdapterMachine(SchedulerMachine):
    adapters = AdapterConfig(enable_lora=True, max_loras=2, max_cpu_loras=3)
    adapted = 0
    """Sequences with an adapter that have ended by themselves, in all examples."""

    @rule(name=st.sampled_from(NAMES), content=st.integers(0, 5), replace=st.booleans())
    def load(self, name: str, content: int, replace: bool) -> None:
        self.ring.load(name, content, replace=replace)
        self.ring.wake()

    @rule(name=st.sampled_from(NAMES))
    def load_a_bad_one(self, name: str) -> None:
        self.ring.load(name, 9, path="/refused", replace=True)
        self.ring.wake()

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.ring.unload(name)
        self.ring.wake()

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
          kind=st.integers(0, 1), count=st.integers(1, 40), max_tokens=st.integers(1, 30),
          n=st.integers(1, 2), tenant=st.sampled_from(["", "a"]),
          priority=st.sampled_from([0, 0, 0, 1, -1]))
    def submit_adapted(self, names: list[str], kind: int, count: int, max_tokens: int, n: int,
                       tenant: str, priority: int) -> None:
        """The same prompt with several adapters: their pages must stay apart."""
        for name in names:
            if name not in self.ring.names:
                self.ring.load(name, NAMES.index(name))
        self.ring.wake()
        for _ in range(4 * len(names)):
            self.ring.work()
            self.ring.deliver()
        for name in names:
            self.ring.submit([100 * kind + i for i in range(count)], max_tokens=max_tokens, n=n,
                             tenant=tenant, priority=priority, adapter=name)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "ring"):
            AdapterMachine.adapted += sum(bool(heard.digest) and heard.reason == "length"
                                          for heard in self.ring.heard.values())


class NarrowMachine(AdapterMachine):
    """One place: every other adapter waits for it."""

    adapters = AdapterConfig(enable_lora=True, max_loras=1, max_cpu_loras=1)


@pytest.mark.parametrize("number", walks(2))
def test_any_schedule_with_adapters(number: int) -> None:
    walk(AdapterMachine if number % 2 else NarrowMachine, number, 40)


def test_enough_adapters_have_run() -> None:
    assert SchedulerMachine.worked == 0 or AdapterMachine.adapted >= 40
