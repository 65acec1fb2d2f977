"""Router and replicas without processes: nothing is lost, changed or told twice, whoever dies."""

from __future__ import annotations

import random

import msgspec
import pytest
from helpers_cluster import ClusterBox, settings

from actorium.actors.cluster.cluster_control import AskCluster, ScaleCluster
from actorium.actors.cluster.cluster_messages import launch_of
from actorium.actors.cluster.router_core import GATHERING, UNWRITTEN
from actorium.actors.messages import AbortRequest, Flush, Hello, Reply, ResumeRequest, Stop, Unknown


def gauges(box: ClusterBox) -> dict[str, float]:
    return box.router.health().gauges


def settle(box: ClusterBox, chance: random.Random) -> None:
    """Until the router knows all replicas, and they all that lives."""
    while box.to_router or gauges(box)["router_waiting"] or not all(
            view.synced and launch_of(view.life) == replica.launch and all(
                request.number <= view.seen for request in box.router.book.placed_at(view.index))
            for view, replica in zip(box.router.views, box.replicas, strict=True)):
        box.turn(chance)


def test_requests_are_shared_out_and_come_back() -> None:
    box = ClusterBox(settings())
    for i in range(8):
        box.submit([1 + i, 2, 3], n=1 + i % 2)
    box.run()
    box.assert_whole()
    assert [view.routed for view in box.router.views] == [4, 4]
    assert len({heard.opened.sid for heard in box.heard.values()}) == 12
    assert gauges(box)["router_live"] == gauges(box)["migrated_requests"] == 0


def test_requests_wait_until_a_replica_is_ready() -> None:
    box = ClusterBox(settings())
    box.submit([1, 2])
    for send in box.router.on_wake(box.now):
        assert send.to != "detokenizer"
    box.run()
    box.assert_whole()


@pytest.mark.parametrize("told", [True, False])
def test_a_replica_dies_and_its_streams_go_on_at_another(told: bool) -> None:
    """Also where the router only hears of it from the replica's next life."""
    box = ClusterBox(settings())
    for i in range(6):
        box.submit([1 + i, 2, 3], max_tokens=40, n=1 + i % 3)
    for _ in range(20):
        box.turn()
    begun = sum(len(heard.tokens) for heard in box.heard.values())
    assert begun > 50
    box.kill(0, told)
    box.run()
    box.assert_whole()
    assert gauges(box)["migrated_requests"] == 3 and gauges(box)["migrated_tokens"] > 10


def test_tokens_of_the_former_place_are_dropped() -> None:
    """A replica that was given up for dead goes on talking."""
    box = ClusterBox(settings())
    rid = box.submit([1, 2, 3], max_tokens=60)
    for _ in range(12):
        box.turn()
    (view,) = (view for view in box.router.views if view.sequences)
    held, other = box.replicas[view.index], box.router.views[1 - view.index]
    box.cut_off.add(view.index)
    while box.now < 120.0:
        box.turn()
    assert not view.synced and other.routed == 1
    box.cut_off.clear()
    box.run()
    box.assert_whole()
    for _ in range(20):
        box.turn()
    assert gauges(box)["stale_sequences"] > 0 and box.of(rid)[0].end is not None
    assert not held.bare.state.requests and view.takes_requests


def test_logprobs_go_with_a_request() -> None:
    box = ClusterBox(settings())
    rid = box.submit([1, 2, 3], max_tokens=40, logprobs=2)
    for _ in range(15):
        box.turn()
    box.kill(next(view.index for view in box.router.views if view.sequences))
    box.run()
    box.assert_whole()
    assert len(box.of(rid)[0].logprobs) == 160


def test_a_detokenizer_that_starts_while_requests_are_nowhere_hears_of_them() -> None:
    box = ClusterBox(settings(1))
    for i in range(3):
        box.submit([1 + i, 2, 3], max_tokens=40)
    for _ in range(12):
        box.turn()
    box.kill(0)
    box.cut_off.add(0)
    for _ in range(3):
        box.turn()
    box.heard.clear()
    box.to_router.append(Hello("detokenizer", 2))
    box.turn()
    box.cut_off.clear()
    box.run()
    box.assert_whole()


def test_a_new_router_finds_everything_at_the_replicas() -> None:
    box = ClusterBox(settings())
    for i in range(6):
        box.submit([1 + i, 2, 3], max_tokens=40, n=1 + i % 2)
    for _ in range(20):
        box.turn()
    sids = max(heard.opened.sid for heard in box.heard.values())
    box.new_router()
    late = box.submit([9, 9], max_tokens=8)
    box.run()
    box.assert_whole()
    assert box.of(late)[0].opened.sid > sids
    assert gauges(box)["migrated_requests"] == 0


def test_router_and_replicas_die_at_once() -> None:
    """From the router's ledger, whatever was where; also what waited for a replica."""
    box = ClusterBox(settings(), ledger=True)
    for i in range(6):
        box.submit([1 + i, 2, 3], max_tokens=40, n=1 + i % 2, logprobs=2)
    for _ in range(20):
        box.turn()
    late = box.submit([9, 9], max_tokens=8)
    box.turn()
    told = sum(len(heard.tokens) for heard in box.heard.values())
    for index in range(2):
        box.kill(index)
    box.new_router()
    box.run()
    box.assert_whole()
    assert told > 50 and box.of(late)
    assert gauges(box)["migrated_requests"] == 7


@pytest.mark.parametrize(("ledger", "seconds"), [(True, GATHERING), (False, UNWRITTEN)])
def test_a_new_router_does_not_wait_long_for_a_replica_that_died_too(
        ledger: bool, seconds: float) -> None:
    """With a ledger it knows what it misses, and what ran there goes on at the other one."""
    box = ClusterBox(settings(), ledger=ledger)
    for i in range(4):
        box.submit([1 + i, 2, 3], max_tokens=600)
    for _ in range(20):
        box.turn()
    box.kill(1, told=False)
    box.cut_off.add(1)
    box.new_router()
    began = box.now
    while box.router.health().phase == "starting" or box.now == began:
        box.turn()
    assert seconds - 0.05 < box.now - began < seconds + 0.1
    if ledger:
        box.run(2000)
        box.assert_whole()
        assert gauges(box)["migrated_requests"] == 2


def test_what_has_ended_is_over_for_the_next_router_as_well() -> None:
    """Ended by a replica or by the client; no replica is left to tell. What the router itself has
    refused is nothing that it knows."""
    box = ClusterBox(settings(), ledger=True)
    done = box.submit([1, 2, 3])
    box.run()
    given_up = box.submit([4, 5], max_tokens=500)
    for _ in range(10):
        box.turn()
    box.to_router.append(AbortRequest(given_up, b"client"))
    box.run()
    box.router.drain(box.now)
    refused = box.submit([6, 7])
    box.run()
    end = box.of(refused)[0].end
    assert end is not None and end.error_code == "unavailable"
    tokens = box.of(done)[0].tokens
    for index in range(2):
        box.kill(index)
    box.new_router()
    for _ in range(10):
        box.turn()
    assert not box.router.book.live and not gauges(box)["router_waiting"]
    box.heard.clear()
    box.to_router += [ResumeRequest(rid, b"client") for rid in (done, given_up, refused)]
    for _ in range(20):
        box.turn()
    ends = [box.of(rid)[0].end for rid in (done, given_up)]
    assert [end and end.finish_reason for end in ends] == ["length", "abort"]
    assert box.replies == [Unknown(refused, b"client")]
    assert box.of(done)[0].tokens == tokens


def test_a_compacted_ledger_says_the_same() -> None:
    box = ClusterBox(settings(), ledger=True)
    for i in range(5):
        box.submit([1 + i, 2, 3], max_tokens=30, n=1 + i % 2)
    for _ in range(15):
        box.turn()
    box.ledger = [record for records in box.router.live_records() for record in records]
    for index in range(2):
        box.kill(index)
    box.new_router()
    box.run()
    box.assert_whole()


def test_a_request_that_is_over_is_reported_again_after_its_replica_died() -> None:
    box = ClusterBox(settings())
    rid = box.submit([1, 2, 3])
    box.run()
    tokens = box.of(rid)[0].tokens
    index = next(view.index for view in box.router.views if view.routed)
    box.kill(index)
    for _ in range(10):
        box.turn()
    box.heard.clear()
    box.to_router.append(ResumeRequest(rid, b"client"))
    box.run()
    assert box.of(rid)[0].tokens == tokens
    box.to_router.append(ResumeRequest("unheard-of", b"client"))
    box.turn()
    assert box.replies == [Unknown("unheard-of", b"client")]


def test_another_client_takes_a_request_up() -> None:
    box = ClusterBox(settings())
    box.submit([1, 2, 3], rid="named.x", max_tokens=60, resume_seconds=10.0)
    for _ in range(12):
        box.turn()
    box.to_router.append(ResumeRequest("named.x", b"other", adopt=True))
    for _ in range(4):
        box.turn()
    assert {request.key for request in box.router.book.live.values()} == {(b"other", "named.x")}
    box.kill(next(view.index for view in box.router.views if view.sequences))
    box.run()
    box.assert_whole()
    assert box.of("named.x")[0].opened.client == b"other"


@pytest.mark.parametrize("over", [False, True])
def test_a_router_that_died_before_it_was_told_who_has_taken_a_request_up(over: bool) -> None:
    """Its ledger names the former client, the replica the new one: it is one request."""
    box = ClusterBox(settings(), ledger=True)
    box.submit([1, 2, 3], rid="named.x", max_tokens=24 if over else 60, resume_seconds=10.0, n=2)
    for _ in range(60 if over else 12):
        box.turn()
    box.to_router.append(ResumeRequest("named.x", b"other", adopt=True))
    box.turn()
    for replica in box.replicas:
        replica.step(box.now)
        replica.said.clear()  # on its way to a router that dies
    box.heard.clear()
    box.new_router()
    box.to_router.append(ResumeRequest("named.x", b"other"))
    box.run()
    for _ in range(300):
        box.turn()
    box.assert_whole()
    assert {heard.opened.client for heard in box.heard.values()} == {b"other"}
    assert [*box.router.book.requests] == [(b"other", "named.x")] and not box.router.book.live
    assert not any(isinstance(reply, Unknown) for reply in box.replies)
    assert all(view.sequences == 0 for view in box.router.views)


@pytest.mark.parametrize("over", [False, True])
def test_a_replica_that_has_just_started_does_not_say_what_is_known(over: bool) -> None:
    """Of what runs, and of what has ended and was not received whole."""
    box = ClusterBox(settings())
    rid = box.submit([1, 2, 3], max_tokens=60, resume_seconds=10.0)
    for _ in range(12):
        box.turn()
    place = next(view.index for view in box.router.views if view.sequences)
    if over:
        box.run()
        box.heard.clear()
    box.kill(place, told=False)
    box.to_router.append(ResumeRequest(rid, b"other", adopt=True))
    for _ in range(8):
        box.turn()
    box.to_router.append(ResumeRequest(rid, b"other", adopt=True))  # as clients do
    box.run()
    box.assert_whole()
    assert not any(isinstance(reply, Unknown) for reply in box.replies)
    assert box.of(rid)[0].opened.client == b"other"


def test_ends_are_reported_to_the_next_replica_too() -> None:
    """A cancelled request and a stopped sequence end, though their replica dies with the order."""
    box = ClusterBox(settings())
    rids = [box.submit([1 + i, 2, 3], max_tokens=500) for i in range(4)]
    for _ in range(12):
        box.turn()
    stopped = box.of(rids[0])[0]
    box.to_router += [Stop(stopped.opened.sid, len(stopped.tokens)),
                      *(AbortRequest(rids[i], b"client") for i in (1, 2, 3))]
    for index in range(2):
        box.kill(index)
    box.run()
    reasons = [box.of(rid)[0].end for rid in rids]
    assert [end and end.finish_reason for end in reasons] == ["stop", "abort", "abort", "abort"]
    assert not box.router.book.live and all(v.sequences == 0 for v in box.router.views)


def test_a_flush_has_one_answer() -> None:
    box = ClusterBox(settings(3))
    for i in range(6):
        box.submit([1 + i] * 9)
    box.run()
    box.to_router.append(Flush("f", b"client"))
    for _ in range(5):
        box.turn()
    (reply,) = box.replies
    assert isinstance(reply, Reply) and msgspec.json.decode(reply.json)["pages"] > 6


def test_numbers_of_sequences_and_orders_do_not_end() -> None:
    """Both go on past 32 bits, over the deaths of replicas and of a router."""
    box = ClusterBox(settings(), ledger=True)
    box.router.next_sid = 2**31 - 3
    box.router.assignments._number += 2**34
    for i in range(4):
        box.submit([1 + i, 2, 3], n=2, max_tokens=40, logprobs=1)
        box.turn()
    for _ in range(12):
        box.turn()
    box.kill(0)
    for _ in range(12):
        box.turn()
    orders = box.router.assignments._number
    box.new_router()
    assert box.router.assignments._number > orders, "reports from before an order are known as such"
    box.run()
    box.assert_whole()
    assert len(box.heard) == 8 and max(box.heard) > 2**31


def test_a_refused_request_takes_one_number() -> None:
    box = ClusterBox(settings(max_num_queued_reqs=1))
    first = box.router.next_sid
    refused = [box.submit([1, 2], n=5) for _ in range(4)][1:]
    box.turn()
    assert [box.of(rid)[0].end.error_code for rid in refused if box.of(rid)[0].end is not None] == [
        "queue_full"] * 3
    assert box.router.next_sid == first + 5 + 3 and len(box.router.book.requests) == 1


def test_all_orders_wait_for_a_full_ledger_one_behind_the_other() -> None:
    box = ClusterBox(settings(), ledger=True)
    box.turn()
    box.turn()
    box.router.on_ledger_full("no space", box.now)
    kept, given_up = box.submit([1, 2, 3]), box.submit([4, 5], max_tokens=2000)
    box.turn()
    box.to_router.append(AbortRequest(given_up, b"client"))
    for _ in range(80):
        box.turn()
    assert box.ledger == [] and not box.heard and not any(each.admitted for each in box.replicas)
    assert box.ask(AskCluster("q")).target == 2, "people who ask are answered"
    assert box.ask(ScaleCluster("q", 3)).target == 3, "and the launcher is told what they order"
    box.router.on_ledger_ok(box.now)
    box.run()
    assert [heard.end.finish_reason for heard in box.of(kept) + box.of(given_up)
            if heard.end is not None] == ["length", "abort"]


def test_draining_ends_what_runs_and_refuses_what_comes() -> None:
    box = ClusterBox(settings())
    old = box.submit([1, 2, 3])
    box.turn()
    box.router.drain(box.now)
    new = box.submit([4, 5])
    for _ in range(60):
        box.turn()
    refused, done = box.of(new)[0].end, box.of(old)[0].end
    assert refused is not None and refused.error_code == "unavailable"
    assert done is not None and done.finish_reason == "length" and box.router.done


@pytest.mark.parametrize("ledger", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_deaths_at_any_moment(seed: int, ledger: bool) -> None:
    """Replicas and the router die again and again, with frames under way; without a ledger no
    replica while a new router still asks."""
    chance = random.Random(seed)
    box = ClusterBox(settings(3), ("prefix", "round_robin", "random")[seed % 3], ledger)
    for i in range(20):
        box.submit([1 + i, 2, 3, 4, 5], max_tokens=chance.randint(1, 60), n=chance.randint(1, 3),
                   logprobs=chance.choice([-1, 1]))
        box.turn(chance)
    for _ in range(8):
        for _ in range(chance.randint(1, 12)):
            box.turn(chance)
        what = chance.randrange(4)
        if what < 3:
            box.kill(what, chance.random() < 0.7)
        elif ledger:
            box.new_router()
            box.repeat_unheard()
        else:
            settle(box, chance)
            box.new_router()
            settle(box, chance)
            box.repeat_unheard()
    box.run(3000, chance)
    box.assert_whole()
    assert not box.router.book.live and all(view.sequences == 0 for view in box.router.views)


@pytest.mark.parametrize("seed", range(6))
def test_requests_are_taken_up_while_routers_and_replicas_die(seed: int) -> None:
    """Each is one request at the end, whoever has died between an order and what came of it."""
    chance = random.Random(seed)
    box = ClusterBox(settings(3), ledger=True)
    rids = [box.submit([1 + i, 2, 3], max_tokens=chance.randint(20, 80), n=chance.randint(1, 2),
                       resume_seconds=10.0) for i in range(12)]
    clients = dict.fromkeys(rids, b"client")
    for death in range(10):
        for _ in range(chance.randint(1, 12)):
            box.turn(chance)
        for rid in chance.sample(rids, 4):
            clients[rid] = b"%d of %d" % (death, rids.index(rid))
            box.to_router.append(ResumeRequest(rid, clients[rid], adopt=True))
        for _ in range(chance.randint(0, 4)):
            box.turn(chance)
        if chance.random() < 0.6:
            box.new_router()
            box.repeat_unheard()
        if chance.random() < 0.6:
            box.kill(chance.randrange(3), chance.random() < 0.7)
        box.to_router += [ResumeRequest(rid, client, adopt=True) for rid, client in clients.items()]
    box.run(3000, chance)
    for _ in range(200):
        box.turn(chance)
    box.assert_whole()
    assert sorted(rid for _, rid in box.router.book.requests) == sorted(rids)
    assert not box.router.book.live and all(view.sequences == 0 for view in box.router.views)


def test_orders_that_a_client_repeats_are_kept_once() -> None:
    box = ClusterBox(settings())
    rid = box.submit([4, 5], max_tokens=500)
    for _ in range(50):  # no replica is ready: it is nowhere
        box.to_router.append(ResumeRequest(rid, b"client"))
    while box.to_router:
        box.router.on_message(box.to_router.popleft(), box.now)
    box.router.on_wake(box.now)
    (request,) = box.router.book.requests.values()
    assert request.orders == [ResumeRequest(rid, b"client")]
    for _ in range(10):
        box.turn()
    for _ in range(50):
        box.router.on_message(AbortRequest(rid, b"client"), box.now)
    assert request.orders == [AbortRequest(rid, b"client")]
    box.run()
    assert box.of(rid)[0].end is not None
