"""Messages lost, repeated, reordered; actors killed: each client is told each token once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_delivery import ACTORS, World, script
from helpers_examples import examples
from helpers_text import write_model
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[tuple[str, int], Any]:
    world = World(model)
    world.finish()
    found = world.results()
    for (rid, index), (text, ids, _, stop, probs, *_) in found.items():
        said = script(rid, index)[:len(ids)]
        assert bytes(ids) == said
        whole = said.decode(errors="replace")
        assert text == whole or (stop and whole.startswith(text))
        assert probs is None or [p.logprob for p in probs] == [
            -0.5 * (i + 1) for i in range(len(ids))]
    assert {found[k][3] for k in found} == {None, "STOP", "nd. ", "OP"}
    return found


LINKS = [("a", "tokenizer"), ("b", "tokenizer"), ("a", "detokenizer"), ("b", "detokenizer"),
         ("tokenizer", "a"), ("tokenizer", "b"), ("tokenizer", "scheduler"),
         ("detokenizer", "a"), ("detokenizer", "b"), ("detokenizer", "scheduler"),
         ("scheduler", "detokenizer")]
EVENTS = st.one_of(
    st.tuples(st.just("deliver"), st.sampled_from(LINKS), st.integers(1, 40)),
    st.tuples(st.just("deliver"), st.sampled_from(LINKS), st.integers(1, 40)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("all"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["drop", "repeat", "swap"]), st.sampled_from(LINKS),
              st.integers(0, 6)),
    st.tuples(st.just("kill"), st.sampled_from(ACTORS)),
    st.tuples(st.just("time"), st.sampled_from([0.05, 0.6, 1.1, 5.1])),
)


def happen(world: World, event: tuple[Any, ...]) -> None:
    match event:
        case ("deliver", link, count):
            world.deliver(link, count)
        case ("step", most):
            world.step(most)
        case ("all", most):
            for link in LINKS:
                world.deliver(link, 1 << 30)
            world.step(most)
        case ("kill", role):
            world.kill(role)
        case ("time", seconds):
            world.pass_time(seconds)
        case (fault, link, at):
            queue = world.queues.get(link, [])
            if at + (fault == "swap") < len(queue):
                if fault == "drop":
                    del queue[at]
                elif fault == "repeat":
                    queue.append(queue[at])
                else:
                    queue[at], queue[at + 1] = queue[at + 1], queue[at]


@settings(max_examples=examples(60), deadline=None)
@given(events=st.lists(EVENTS, max_size=60))
def test_every_fault_leaves_every_stream_whole(
        model: Path, undisturbed: dict[tuple[str, int], Any], events: list[Any]) -> None:
    world = World(model)
    for event in events:
        happen(world, event)
    world.finish()
    found = world.results()
    assert found.keys() == undisturbed.keys()
    for key, result in found.items():
        for mine, other in zip(result, undisturbed[key], strict=True):
            assert mine == other, key
