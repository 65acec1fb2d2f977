"""Requests with images behind a router: who holds their patches, how long, and where they go."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers_cluster import ClusterBox, settings
from helpers_images import write_text_side

from actorium.actors.cluster.routing.routing_policy import pages_of
from actorium.actors.config.cluster_settings import ClusterConfig, client_run_dir
from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_replicas
from actorium.actors.messages import AbortRequest, Hello, MediaItem, ResumeRequest, Submit
from actorium.actors.params import ResolvedParams, TextParams

PAD = 7


def item(name: int, start: int, end: int) -> MediaItem:
    return MediaItem(key(name), False, 1, 2, 2 * (end - start), start, end)


def key(name: int) -> bytes:
    return sha256(bytes([name])).digest()


def prompt(first: int = 1) -> list[int]:
    """Eight tokens, eight placeholders, nine tokens."""
    return [first] * 8 + [PAD] * 8 + [2] * 9


def items(name: int) -> list[MediaItem]:
    """The items of such a prompt."""
    return [item(name, 8, 16)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a cluster whose model takes images."""
    model = ModelConfig(model=str(write_text_side(tmp_path / "m")))
    return msgspec.structs.replace(settings(), model=model)


def held(box: ClusterBox) -> dict[bytes, str]:
    """What a media actor knows of items, from all that it was told: whether they are in use. Each
    is freed once for all of the requests that have named it."""
    known: dict[bytes, str] = {}
    epoch = 0
    for told in box.holds:
        assert told.epoch >= epoch
        epoch = told.epoch
        if told.reset:
            known = {name: "free" for name in known}
        known |= dict.fromkeys(told.held, "held")
        for name in told.free:
            assert known[name] == "held", "freed twice"
            known[name] = "free"
    return known


def test_patches_are_held_by_the_router_alone_and_freed_once(config: Config) -> None:
    """Replicas say nothing to the media actor; two requests for one item free it when both end."""
    box = ClusterBox(config)
    for at in range(4):
        box.submit(prompt(1 + at), 8 + 8 * at, n=1 + at % 2, media=items(at % 2))
    box.turn()
    assert held(box) == {key(0): "held", key(1): "held"} and box.holds[0].reset
    box.run()
    box.assert_whole()
    assert held(box) == {key(0): "free", key(1): "free"}
    assert sum(view.routed > 0 for view in box.router.views) == 2
    # The media actor starts again: it hears that nothing is in use, and the replicas nothing.
    box.to_router.append(Hello("media", 2))
    before = [len(replica.inbox) for replica in box.replicas]
    box.turn()
    assert box.holds[-1].reset and not box.holds[-1].held
    assert [len(replica.inbox) for replica in box.replicas] == before


def test_a_request_takes_its_images_to_another_replica(config: Config) -> None:
    box = ClusterBox(config)
    rids = [box.submit(prompt(1 + at), 40, media=items(at)) for at in range(4)]
    for _ in range(15):
        box.turn()
    assert all(len(box.of(rid)[0].tokens) > 3 for rid in rids)
    box.kill(0)
    box.run()
    box.assert_whole()
    moved = Counter(admit.media[0].key for admit in box.replicas[1].admitted)
    assert set(moved) == {key(at) for at in range(4)}
    assert all(admit.media == items(at) for at in range(4) for admit in box.replicas[1].admitted
               if admit.media[0].key == key(at))
    assert set(held(box).values()) == {"free"}


@pytest.mark.parametrize("ledger", [True, False])
def test_the_next_router_holds_what_lives(config: Config, ledger: bool) -> None:
    """From its ledger, or from what the replicas tell; not before it knows all does it say a word,
    since what nobody names may go."""
    box = ClusterBox(config, ledger=ledger)
    done = box.submit(prompt(9), 2, media=items(9))
    box.run()
    for at in range(3):
        box.submit(prompt(1 + at), 60, media=items(at))
    for _ in range(10):
        box.turn()
    box.cut_off |= {0, 1}
    box.new_router()
    said = len(box.holds)
    box.turn()
    assert len(box.holds) == said and box.of(done)[0].end is not None
    box.cut_off.clear()
    for _ in range(5):
        box.turn()
    assert box.holds[said].reset and box.holds[said].epoch == 2
    assert set(box.holds[said].held) == {key(at) for at in range(3)}
    box.run()
    box.assert_whole()
    assert set(held(box).values()) == {"free"}


def test_whatever_ends_a_request_frees_its_images(config: Config) -> None:
    """The client, before it was placed and after; the deadline; another client that takes it up
    and gives it up."""
    box = ClusterBox(config)
    nowhere = box.submit(prompt(1), 500, media=items(1))  # no replica is ready yet
    box.to_router.append(AbortRequest(nowhere, b"client"))
    late = box.submit(prompt(2), 500, media=items(2))
    box.to_router[-1] = msgspec.structs.replace(box.submits[late], deadline=box.now + 0.02)
    resumable = box.submit(prompt(3), 500, rid="named.x", resume_seconds=10.0, media=items(3))
    placed = box.submit(prompt(4), 500, media=items(4))
    for _ in range(10):
        box.turn()
    assert held(box)[key(3)] == held(box)[key(4)] == "held"
    box.to_router += [ResumeRequest(resumable, b"other", adopt=True)]
    for _ in range(4):
        box.turn()
    assert held(box)[key(3)] == "held"
    box.to_router += [AbortRequest(placed, b"client"), AbortRequest(resumable, b"other")]
    box.run()
    assert {name: how for name, how in held(box).items() if how != "free"} == {}
    assert not box.router.book.live


def pages(media: list[MediaItem]) -> list[int]:
    """The numbers of such a prompt's pages of four tokens, as the router has them."""
    data = b"".join(token.to_bytes(4, "little") for token in prompt())
    return pages_of(Submit("r", b"c", data, 1, ResolvedParams(max_tokens=4), TextParams(), 1,
                           media=media), 4).tolist()


def test_prompts_with_other_images_have_other_prefixes(config: Config) -> None:
    """The same placeholders, another picture: only the text before it is counted as cached; the
    same picture goes where its pages are, as the replicas tell."""
    text, one_, two = pages([]), pages(items(1)), pages(items(2))
    assert one_ == pages(items(1)) and text[:2] == one_[:2] == two[:2] and len(one_) == 6
    assert not set(text[2:]) & set(one_[2:]) and not set(one_[2:]) & set(two[2:])
    box = ClusterBox(config)
    for name in (1, 2):
        box.submit(prompt(), 4, media=items(name))
        box.run()
    for _ in range(40):
        box.turn()
    index = box.router.assignments._index
    for name in (1, 2, 3):
        told = index.match(np.array(pages(items(name)), np.uint64), [0, 1], box.now + 60)
        assert max(told.values()) == (2 if name == 3 else 6), "what was only expected is forgotten"
    before = box.router.health().gauges
    box.submit(prompt(), 4, media=items(1))
    for _ in range(20):
        box.turn()
    after = box.router.health().gauges
    assert after["routed_cached_tokens"] - before["routed_cached_tokens"] == 24


@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_any_moment_free_each_image_once(config: Config, seed: int) -> None:
    chance = random.Random(seed)
    box = ClusterBox(config, ledger=True)
    for at in range(12):
        box.submit(prompt(1 + at), chance.randint(1, 60), n=chance.randint(1, 2),
                   media=items(chance.randrange(5)) if chance.random() < 0.8 else [])
        box.turn(chance)
    for _ in range(8):
        for _ in range(chance.randint(1, 12)):
            box.turn(chance)
        what = chance.randrange(4)
        if what < 2:
            box.kill(what, chance.random() < 0.7)
        elif what == 2:
            box.new_router()
            box.repeat_unheard()
        else:
            box.to_router.append(Hello("media", 2))
        live = {own.key for request in box.router.book.live.values()
                if not request.entry.finished for own in request.submit.media}
        assert all(held(box).get(name) != "free" for name in live), "freed under way"
    box.run(3000, chance)
    box.assert_whole()
    box.turn()
    assert set(held(box).values()) == {"free"}


def test_where_a_replica_finds_patches() -> None:
    own = Path("/run/x/c.1")
    assert client_run_dir(ClusterConfig(replica_of="c:1:1"), own) == Path("/run/x/c")
    assert client_run_dir(ClusterConfig(), own) == own


def test_images_are_refused_where_replicas_are_on_other_machines(config: Config) -> None:
    """And only there."""
    nodes = ClusterConfig(nodes={"a": 1.0}, cluster_listen="tcp://127.0.0.1:7400",
                          cluster_keys="keys")
    with pytest.raises(BadConfig, match="takes images.*--replicas N.*--language-model-only"):
        check_replicas(msgspec.structs.replace(config, cluster=nodes))
    check_replicas(config)
    text = msgspec.structs.replace(config.model, language_model_only=True)
    check_replicas(msgspec.structs.replace(config, cluster=nodes, model=text))
