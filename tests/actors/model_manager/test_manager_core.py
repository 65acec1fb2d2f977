"""Which uses are granted and which engines run for them, with pretended engines and drawn
schedules."""

from __future__ import annotations

import random

import pytest
from helpers_model_manager import PretendedEngines, entry

from actorium.actors.model_manager.manager_core import SCAN_SECONDS
from actorium.actors.model_manager.manager_messages import (
    LEASE_SECONDS,
    KeepUses,
    ListModels,
    ModelList,
    ModelUnloaded,
    ModelUse,
    PullModel,
    PullProgress,
    UnloadModel,
    UseModel,
)
from actorium.actors.model_manager.manager_orders import StopEngine
from actorium.actors.model_manager.model_record import (
    DEATHS_SECONDS,
    FIRST_RETRY,
    MAX_DEATHS,
    STEADY_SECONDS,
    EngineLimits,
)

GB = 1 << 30
ABC = {"a": GB, "b": GB, "c": GB}


def listed(world: PretendedEngines) -> ModelList:
    """The answer with a catalog that is fresh."""
    world.advance(SCAN_SECONDS)
    world.core.on_client(b"lister", ListModels("l"), world.now)
    world.settle()
    return world.lists[-1]


def states(world: PretendedEngines) -> dict[str, str]:
    return {model.name: model.state for model in world.core.models}


# --- grants ---

def test_an_engine_is_started_once_for_all_its_uses() -> None:
    world = PretendedEngines(ABC, EngineLimits(2 * GB))
    uses = [world.use("a") for _ in range(3)]
    assert list(world.held) == uses and world.started == ["a"]


def test_a_use_that_is_sent_again_is_answered_again_and_counts_once() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    use = world.use("a")
    world.core.on_client(world.client, UseModel(ModelUse(use, "a")), world.now)
    [send] = world.core.on_wake(world.now)
    assert send.message.id == use and listed(world).models[0].in_use == 1


@pytest.mark.parametrize("name", ["a", "a:latest", "alias", "alias:latest"])
def test_a_model_has_several_names(name: str) -> None:
    world = PretendedEngines(ABC, EngineLimits(), [entry("a", aliases=("alias",)), entry("b")])
    assert world.held[world.use(name)] == "a"


def test_an_unknown_name_is_looked_for_in_a_fresh_catalog_and_refused_with_those_served() -> None:
    world = PretendedEngines(ABC, EngineLimits(), [entry("a"), entry("b")])
    use = world.use("c")
    world.advance(2)
    refused = world.refused[use]
    assert refused.code == "model_not_found" and "'c' is not served" in refused.message
    assert refused.message.endswith("a, b")
    world.entries.append(entry("c"))
    use = world.use("c")
    world.advance(2)
    assert world.held[use] == "c"


@pytest.mark.parametrize(("entries", "model"), [
    ([entry("a")], "a"), ([entry("a"), entry("b", default=True)], "b"),
    ([entry("a"), entry("b")], None)])
def test_no_name_means_the_default_or_the_only_model(entries: list[object], model: str | None
                                                     ) -> None:
    world = PretendedEngines(ABC, EngineLimits(), entries)
    use = world.use("")
    assert world.held.get(use) == model
    assert model is not None or world.refused[use].code == "model_required"


# --- memory ---

def test_the_least_recently_used_engine_ends_for_another_one() -> None:
    world = PretendedEngines(ABC | {"d": GB}, EngineLimits(3 * GB))
    for name in ("a", "b", "c", "a"):
        world.release(world.use(name))
        world.advance(1)
    world.use("d")
    assert world.stopped == ["b"]


def test_no_engine_ends_that_need_not() -> None:
    world = PretendedEngines({"small": 1, "large": 6, "wanted": 5}, EngineLimits(8))
    for name in ("small", "large"):
        world.release(world.use(name))
        world.advance(1)
    world.use("wanted")
    assert world.stopped == ["large"]


def test_a_number_of_engines_is_a_limit_as_well() -> None:
    world = PretendedEngines(ABC, EngineLimits(engines=1))
    for name in "abc":
        world.release(world.use(name))
    assert world.stopped == ["a", "b"]


def test_engines_in_use_stay_and_what_waits_for_them_goes_first() -> None:
    world = PretendedEngines(ABC, EngineLimits(GB))
    first, late = world.use("a"), world.use("b")
    later = world.use("a")
    assert world.progress[late].detail == "for the end of a"
    assert later in world.asked, "or the use of b might wait for ever"
    world.release(first)
    assert world.held == {late: "b"} and later in world.asked
    world.release(late)
    assert world.held == {later: "a"}


def test_an_engine_takes_uses_again_when_nobody_waits_for_its_memory_any_more() -> None:
    world = PretendedEngines(ABC, EngineLimits(GB))
    world.use("a")
    waits, again = world.use("b"), world.use("a")
    world.release(waits)
    assert again in world.held and not world.stopped


@pytest.mark.parametrize(("limits", "memory"), [
    (EngineLimits(GB), 2 * GB), (EngineLimits(3 * GB), 2.5 * GB), (EngineLimits(engines=1), 1)])
def test_what_can_never_fit_is_refused_at_once(limits: EngineLimits, memory: float) -> None:
    world = PretendedEngines({"p": GB, "large": int(memory)}, limits,
                             [entry("p", pinned=True), entry("large")])
    world.release(world.use("p"))
    refused = world.refused[world.use("large")]
    assert refused.code == "does_not_fit" and "--models-m" in refused.message
    assert states(world)["p"] == "ready"


def test_pinned_engines_neither_expire_nor_give_way() -> None:
    world = PretendedEngines(ABC, EngineLimits(2 * GB), [
        entry("a", keep_alive=0, pinned=True), entry("b"), entry("c")])
    for name in "abc":
        world.release(world.use(name))
    world.advance(1000)
    assert world.stopped == ["b", "c"] and states(world)["a"] == "ready"


# --- how long engines stay ---

@pytest.mark.parametrize(("model", "request_", "stays"), [
    (300.0, None, 300.0), (300.0, 10.0, 10.0), (0.0, None, 0.0), (300.0, 0.0, 0.0),
    (-1.0, None, None), (300.0, -1.0, None), (0.0, 60.0, 60.0)])
def test_an_engine_stays_for_keep_alive(model: float, request_: float | None, stays: float | None
                                        ) -> None:
    world = PretendedEngines(ABC, EngineLimits(), [entry("a", keep_alive=model)])
    use = world.use("a", request_)
    world.advance(1000)
    assert not world.stopped, "it is in use"
    world.release(use)
    if stays:
        world.advance(stays - 0.01)
        assert not world.stopped
        world.advance(0.02)
    assert bool(world.stopped) == (stays is not None)
    if stays is not None:
        assert listed(world).models[0].keep_alive == model, "the request's own is forgotten"


def test_unload_waits_for_the_last_use_and_a_new_one_keeps_the_engine() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    use = world.use("a")
    world.core.on_client(b"x", UnloadModel("r", "a"), world.now)
    assert [s.message for s in world.core.on_wake(world.now)] == [ModelUnloaded("r", "a", "ready")]
    other = world.use("a")
    world.release(use)
    world.release(other)
    assert not world.stopped
    world.core.on_client(b"x", UnloadModel("r", "a"), world.now)
    [send] = world.core.on_wake(world.now)
    assert send.message.state == "stopping"
    assert world.core.pop_orders() == [StopEngine("a")]


def test_models_are_loaded_at_the_start_where_that_is_wanted() -> None:
    world = PretendedEngines(ABC, EngineLimits(), [entry("a", load_on_start=True), entry("b")])
    world.core.load_on_start(world.now)
    world.settle()
    world.advance(60)
    assert world.started == ["a"] and not world.stopped


def test_a_model_that_cannot_be_loaded_at_the_start_is_logged() -> None:
    world = PretendedEngines({"a": 2 * GB}, EngineLimits(GB), [entry("a", load_on_start=True)])
    world.core.load_on_start(world.now)
    world.settle()
    assert len(world.logged) == 1 and "a does not fit" in world.logged[0]


# --- failures ---

def test_a_start_that_fails_is_told_and_tried_again_at_a_bounded_rate() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    world.faulty = {"a"}
    for _ in range(50):
        refused = world.refused[world.use("a")]
        assert refused.code == "model_failed" and "no such file" in refused.message
        world.advance(1)
    assert len(world.started) <= 6
    assert listed(world).models[0].state == "failed"
    world.faulty.clear()
    world.advance(60)
    assert world.use("a") in world.held
    assert world.use("b") in world.held, "others are not touched"


def test_changed_files_are_tried_at_once_and_planned_anew() -> None:
    world = PretendedEngines(ABC, EngineLimits(2 * GB))
    world.faulty = {"a"}
    world.use("a")
    world.faulty.clear()
    world.memory["a"] = GB // 2
    world.entries[0] = world.entries[0]._replace(digest="changed")
    listed(world)
    assert world.use("a") in world.held
    assert listed(world).memory == GB // 2


def test_an_engine_that_ends_while_it_is_used_is_started_again_for_its_uses() -> None:
    world = PretendedEngines(ABC, EngineLimits(2 * GB))
    use = world.use("a")
    world.use("b")
    waits = world.use("c")
    for _ in range(5):
        world.advance(DEATHS_SECONDS / (MAX_DEATHS - 1) + 1)
        world.crash("a", "worker-0 was started again 5 times")
        assert use in world.held and world.running["a"] == "ready"
    assert world.started == ["a", "b", *["a"] * 5] and world.continued == ["a"] * 5
    assert waits in world.asked, "the memory is that of the engine before"
    world.release(use)
    assert waits in world.held and world.continued == ["a"] * 5


@pytest.mark.parametrize("reason", ["", "no memory left"])
def test_an_engine_that_ends_again_and_again_fails_its_uses(reason: str) -> None:
    world = PretendedEngines(ABC, EngineLimits())
    use = world.use("a")
    for _ in range(MAX_DEATHS - 1):
        world.crash("a", reason)
        assert use in world.held
    world.crash("a", reason)
    refused = world.refused[use]
    assert refused.code == "engine_failed" and (reason or "SIGKILL") in refused.message
    assert world.refused[world.use("a")].code == "model_failed", "it ended too soon"
    world.advance(FIRST_RETRY)
    use = world.use("a")
    assert use in world.held and len(world.continued) == MAX_DEATHS - 1, "nothing is left of them"
    world.advance(DEATHS_SECONDS)
    world.crash("a")
    assert use in world.held


def test_an_engine_that_is_killed_while_it_starts_is_started_again_for_who_waits() -> None:
    world = PretendedEngines(ABC, EngineLimits(), delays=random.Random(3))
    for deaths in range(1, MAX_DEATHS + 1):
        waits = world.use("a")
        assert world.running["a"] == "starting"
        world.crash("a")
        assert (waits in world.asked) == (deaths < MAX_DEATHS)
    assert "killed by SIGKILL" in world.refused[waits].message


def test_an_engine_that_ends_and_is_not_used_stays_away() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    world.release(world.use("a"))
    world.advance(STEADY_SECONDS)
    world.crash("a")
    assert not world.running and world.use("a") in world.held and not world.continued


def test_an_engine_whose_files_have_changed_meanwhile_does_not_go_on() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    use = world.use("a")
    world.entries[0] = world.entries[0]._replace(digest="changed")
    listed(world)
    world.crash("a")
    assert world.refused[use].code == "engine_failed" and not world.continued
    world.advance(FIRST_RETRY)
    assert world.use("a") in world.held


def test_an_engine_that_dies_with_its_manager_goes_on_for_the_uses_that_clients_renew() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    world.asked["old"] = "a"
    world.advance(0.1)
    assert world.held == {"old": "a"} and world.continued == ["a"]


@pytest.mark.parametrize("later", [0.0, LEASE_SECONDS])
def test_an_engine_that_died_with_its_manager_goes_on_though_a_new_use_is_heard_first(
        later: float) -> None:
    """Its clients renew their uses every two seconds; until then nobody knows of them."""
    world = PretendedEngines(ABC, EngineLimits())
    world.core.uses_known_at = world.now + LEASE_SECONDS
    world.advance(later)
    fresh = world.use("a")
    assert world.held == {fresh: "a"} and world.started == ["a"]
    assert world.continued == ([] if later else ["a"])


def test_a_use_waits_no_longer_than_it_may() -> None:
    world = PretendedEngines(ABC, EngineLimits(GB), wait=100)
    world.use("a")
    soon, late = world.use("b", wait=5), world.use("c")
    world.advance(6)
    assert world.refused[soon].code == "deadline" and late in world.asked
    world.advance(100)
    assert world.refused[late].code == "deadline"


# --- clients and managers that die ---

def test_a_silent_client_loses_its_uses() -> None:
    world = PretendedEngines(ABC, EngineLimits(GB))
    world.use("a")
    world.abandon()
    waits = world.use("b")
    world.advance(LEASE_SECONDS - 1)
    assert waits in world.asked
    world.advance(2)
    assert waits in world.held


def test_a_client_that_cannot_be_reached_keeps_what_it_was_granted_for_its_successor() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    world.use("a", 0.0)
    client = world.client
    world.abandon()
    world.core.on_client_lost(client, world.now)
    world.settle()
    assert world.stopped == []
    world.use("a", 0.0)  # the successor's
    world.advance(LEASE_SECONDS + 1)
    assert world.stopped == []


def test_a_client_that_cannot_be_reached_and_has_no_successor() -> None:
    world = PretendedEngines(ABC, EngineLimits(engines=1))
    world.use("a", 0.0)
    world.use("b")
    client = world.client
    world.abandon()
    world.core.on_client_lost(client, world.now)
    world.settle()
    assert world.core.uses.waiting_count == 0 and world.stopped == []
    world.advance(LEASE_SECONDS + 1)
    assert world.stopped == ["a"]


def test_uses_that_a_client_does_not_list_have_ended() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    kept, lost = world.use("a"), world.use("b", 0.0)
    del world.held[lost]
    world.core.on_client(world.client, KeepUses([ModelUse(kept, "a")]), world.now)
    world.settle()
    assert world.stopped == ["b"]


def test_a_new_manager_goes_on_with_engines_and_uses() -> None:
    world = PretendedEngines(ABC, EngineLimits(2 * GB), [entry("a", 0.0), entry("b", 0.0),
                                                         entry("c")])
    for name, ready in (("a", True), ("b", False)):
        world.running[name] = "ready" if ready else "starting"
        world.core.adopt(world.entries["ab".index(name)], f"/run/{name}", ready, world.now)
    world.settle()
    waits = world.use("c")
    world.advance(LEASE_SECONDS - 1)
    assert not world.stopped, "clients have not said yet what they use"
    world.asked |= {"old": "a"}
    world.keep_at = world.now
    world.advance(0.1)
    world.running["b"] = "ready"
    world.core.engine_ready("b", "/run/b", world.now)
    world.settle()
    assert world.held == {"old": "a"}
    world.advance(2)
    assert world.stopped == ["b"] and world.held == {"old": "a", waits: "c"}


def test_nothing_is_started_until_the_engines_of_the_manager_before_are_known() -> None:
    world = PretendedEngines(ABC, EngineLimits(2 * GB))
    world.core.adopting = True
    use = world.use("a")
    assert not world.started and not world.held
    for known in world.entries[1:]:
        world.running[known.name] = "ready"
        world.core.adopt(known, f"/run/{known.name}", True, world.now)
    world.core.adopting = False
    world.advance(LEASE_SECONDS + 1)
    assert world.started == ["a"] and list(world.held) == [use], "in the place of one of them"


def test_an_adopted_engine_that_was_about_to_end_is_started_again() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    world.running["a"] = "stopping"
    world.core.adopt(world.entries[0], "/run/a", False, world.now)
    use = world.use("a")
    world.crash("a")
    assert world.held == {use: "a"} and world.started == ["a"]


def test_a_model_that_is_gone_stays_while_it_runs() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    use = world.use("a", 0.0)
    del world.entries[0]
    assert "a" in {model.name for model in listed(world).models}
    world.release(use)
    assert "a" not in {model.name for model in listed(world).models}


def test_a_server_that_stops_refuses_and_ends_all() -> None:
    world = PretendedEngines(ABC, EngineLimits(GB))
    world.use("a", 0.0)
    world.use("b")
    world.abandon()
    world.core.drain(world.now)
    assert not world.core.done
    world.settle()
    assert world.core.done and not world.running
    assert world.refused[world.use("a")].code == "unavailable"


def test_models_are_fetched_only_where_that_is_allowed() -> None:
    world = PretendedEngines(ABC, EngineLimits())
    world.core.on_client(b"x", PullModel("r", "org/name"), world.now)
    [send] = world.core.on_wake(world.now)
    assert isinstance(send.message, PullProgress)
    assert send.message.done and "--models-allow-pull" in send.message.error


# --- drawn schedules ---

@pytest.mark.parametrize("seed", range(60))
def test_drawn_schedules(seed: int) -> None:
    """Never more memory or engines than allowed, no engine ends while it is used, engines are
    started in the order of the uses that wait for them, and every use is answered."""
    draw = random.Random(seed)
    names = [f"m{i}" for i in range(draw.randint(2, 8))]
    memory = {name: draw.randint(1, 10) for name in names}
    limits = EngineLimits(draw.choice((0, 10, 12, 20)), draw.choice((0, 1, 2, 3)))
    entries = [entry(name, draw.choice((0.0, 5.0, 60.0, -1.0)), pinned=draw.random() < 0.08)
               for name in names]
    world = PretendedEngines(memory, limits, entries, draw)
    uses: list[str] = []
    for _ in range(150):
        match draw.choice(("use", "use", "use", "release", "release", "time", "crash", "fault")):
            case "use":
                uses.append(world.use(draw.choice(names), draw.choice((None, None, 0.0, 9.0))))
            case "release" if uses:
                world.release(uses.pop(draw.randrange(len(uses))))
            case "time":
                world.advance(draw.choice((0.05, 0.5, 3.0, 20.0)))
            case "crash":
                if ready := [name for name, state in world.running.items() if state == "ready"]:
                    world.crash(draw.choice(ready))
            case "fault":
                world.faulty = {draw.choice(names)} if draw.random() < 0.5 else set()
    for _ in range(2000):
        if not world.asked:
            break
        for use in list(world.held):
            world.release(use)
        world.advance(5.0)
    assert not world.asked
    for use in list(world.held):
        world.release(use)
    world.advance(120.0)
    for model in world.core.models:
        stays = model.entry.pinned or model.keep_alive < 0
        assert model.state != "ready" or stays


def test_a_constant_stream_of_uses_starves_nobody() -> None:
    """Two busy models have all the memory, and new uses of them never end."""
    world = PretendedEngines(ABC, EngineLimits(2 * GB))
    draw = random.Random(1)
    held = [world.use(draw.choice("ab")) for _ in range(6)]
    waits = world.use("c")
    for _ in range(40):
        held.append(world.use(draw.choice("ab")))
        world.release(held.pop(0))
        world.advance(0.5)
        if waits in world.held:
            break
    assert waits in world.held


def test_a_tenant_that_fills_the_queue_leaves_places_for_others() -> None:
    world = PretendedEngines({"a": GB, "b": GB}, EngineLimits(GB))
    world.use("a")  # and stays: all others wait

    def asks(tenant: str, count: int) -> int:
        """Returns how many of its uses are refused."""
        for number in range(count):
            world.core.on_client(b"gateway", UseModel(ModelUse(f"{tenant}{number}", "b",
                                                               tenant=tenant)), world.now)
        return sum(getattr(send.message, "code", "") == "queue_full"
                   for send in world.core.on_wake(world.now))

    assert asks("ann", 130) == 30
    assert asks("bob", 60) == 10 and asks("eve", 40) == 7
    assert asks("ann", 1) == 0  # the same use again
