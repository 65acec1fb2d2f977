"""Prompts with images: what they share with others, what waits for the worker's tower, and what
becomes of those whose images are lost."""

from __future__ import annotations

import random
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from helpers_scheduler import CLIENT, Ring, cached, column, config, ints

from actorium.actors.messages import MediaItem, StepPlan, Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.scheduler.cache.radix_cache import ALL, media_key, shareable
from actorium.actors.scheduler.prefill_pacing import PrefillAllowance

PAD = 7


def item(name: int, start: int, end: int, video: bool = False, seconds: float = 0.0) -> MediaItem:
    return MediaItem(sha256(bytes([name])).digest(), video, 1, 2, 2 * (end - start), start, end,
                     seconds)


def prompt(*parts: int | list[int]) -> list[int]:
    """Tokens, and as many placeholders as a number says."""
    return [token for part in parts
            for token in (part if isinstance(part, list) else [PAD] * part)]


def ask(ring: Ring, tokens: list[int], media: list[MediaItem], max_tokens: int = 4) -> str:
    submit = Submit(f"r{len(ring.submits)}", CLIENT, column(tokens), 1,
                    ResolvedParams(max_tokens=max_tokens), TextParams(), len(ring.submits),
                    media=media)
    ring.submits[submit.rid] = submit
    ring.tell(submit)
    return submit.rid


# --- keys ----------------------------------------------------------------------------------------

def common_pages(one: bytes, other: bytes, page: int) -> int:
    size = 4 * page
    pages = min(len(one), len(other)) // size
    return next((i for i in range(pages)
                 if one[i * size:(i + 1) * size] != other[i * size:(i + 1) * size]), pages)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32])
def test_a_key_is_that_of_tokens_and_images(page: int) -> None:
    rng = random.Random(page)
    for _ in range(60):
        before, rows = rng.randrange(40), rng.randrange(1, 40)
        tokens = prompt(list(range(10, 10 + before)), rows, list(range(50, 90)))
        data = column(tokens)
        own, other = (media_key(data, [item(name, before, before + rows)], page)
                      for name in (1, 2))
        assert own == media_key(data, [item(1, before, before + rows)], page)
        assert common_pages(own, other, page) == before // page == common_pages(own, data, page)
        assert len(own) == len(data) and own[:before // page * page * 4] == data[
            :before // page * page * 4]
        words = np.frombuffer(own, np.int32)
        for at in range(0, len(tokens) // page * page, page):
            holds = at < before + rows and at + page > before
            assert (words[at] < 0) == holds, "no text has such an id"
        late = -(-(before + rows) // page) * page
        assert own[4 * late:] == data[4 * late:], "text behind it is as it was"


def test_what_else_is_in_a_key() -> None:
    """Text beside the placeholders, which of an item's rows are there, and how a video turns."""
    tokens = prompt([1, 2], 4, [3, 4])
    keys = {media_key(column(own), [media], 8) for own, media in (
        (tokens, item(1, 2, 6)), (prompt([1, 9], 4, [3, 4]), item(1, 2, 6)),
        (tokens, item(1, 1, 5)), (tokens, item(1, 2, 6, True, 1.0)),
        (tokens, item(1, 2, 6, True, 2.0)))}
    assert len(keys) == 5
    two = [item(1, 2, 4), item(2, 4, 6)]
    assert media_key(column(tokens), two, 8) != media_key(
        column(tokens), [item(2, 2, 4), item(1, 4, 6)], 8)


def test_how_far_a_prompt_may_be_shared() -> None:
    media = [item(1, 4, 8), item(2, 10, 20)]
    assert [shareable(media, n) for n in (0, 3, 4, 6, 8, 9, 10, 19, 20, 30)] == [
        4, 4, 4, 6, 10, 10, 10, 19, ALL, ALL]
    assert shareable([], 0) == ALL


# --- sharing -------------------------------------------------------------------------------------

def test_prefixes_are_shared_by_image() -> None:
    ring = Ring(config(page_size=4))
    tokens = prompt([1] * 8, 8, [2] * 9)
    heard = []
    for name in (1, 2, 1):
        rid = ask(ring, tokens, [item(name, 8, 16)])
        ring.run()
        heard.append(ring.of(rid)[0])
    assert [cached(own) for own in heard] == [0, 8, 24]
    assert [own.reason for own in heard] == ["length"] * 3
    ring.assert_at_rest()


def test_pages_of_an_image_are_shared_once_they_are_known_to_be_right() -> None:
    """The text before it at once, even within a step; from the first result on the rest, while the
    first request goes on."""
    ring = Ring(config(page_size=4))
    tokens = prompt([1] * 8, 8, [2] * 9)
    media = [item(1, 8, 16)]
    ask(ring, tokens, media, 40)
    beside = ask(ring, tokens, media)
    ring.wake()
    for _ in range(6):
        ring.work()
        ring.deliver()
    assert cached(ring.of(beside)[0]) == 8
    later = ask(ring, tokens, media)
    ring.run()
    assert cached(ring.of(later)[0]) == 24
    ring.assert_at_rest()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [6, 2048])
def test_nobody_shares_what_was_computed_without_its_image(chunk: int, overlap: bool) -> None:
    """The request ends alone, in whichever chunk it is; the text before its image is right."""
    for failing in range(1, 6):
        ring = Ring(config(page_size=4, chunk=chunk, overlap=overlap))
        tokens = prompt([1] * 8, 8, [2] * 9)
        lost = ask(ring, tokens, [item(1, 8, 16)])
        fine = ask(ring, [5] * 9, [])
        failed, right = False, 0
        ring.wake()
        for _ in range(60):
            if ring.work():
                slot, count = _extended(ring.sent[:ring.worked], tokens)
                right += count * (not failed and ring.worked < failing)
                if ring.worked >= failing and slot:
                    ring.results[-1] = msgspec.structs.replace(
                        ring.results[-1], failed=[(slot, "unavailable", "media: gone")])
                    failed = True
            ring.deliver()
        assert ring.of(fine)[0].reason == "length"
        if failed:
            heard = ring.of(lost)[0]
            assert (heard.reason, heard.error_code) == ("error", "unavailable")
            again = ask(ring, tokens, [item(1, 8, 16)])
            ring.run()
            assert cached(ring.of(again)[0]) <= (24 if right >= 16 else max(8, right // 4 * 4))
            assert ring.of(again)[0].reason == "length"
        ring.assert_at_rest()


def _extended(plans: list[StepPlan], tokens: list[int]) -> tuple[int, int]:
    """The slot in which the last plan extends a prompt of these tokens, and by how many; 0 = it
    does not."""
    owner = {admit.slot: ints(admit.tokens)[:len(tokens)] for plan in plans for admit in plan.admit}
    extends = zip(*[iter(ints(plans[-1].extend))] * 2, strict=True)
    return next((own for own in extends if owner[own[0]] == tokens), (0, 0))


def test_images_come_again_with_preempted_sequences_and_to_a_new_worker() -> None:
    ring = Ring(config(page_size=4, force_preempt=3))
    media = [item(1, 8, 16)]
    rid = ask(ring, prompt([1] * 8, 8, [2] * 9), media, 30)
    ring.wake()
    for _ in range(12):
        ring.work()
        ring.deliver()
    ring.lose_worker()
    ring.run()
    admits = [admit for plan in ring.sent for admit in plan.admit]
    assert len(admits) > 3 and all(admit.media == media for admit in admits)
    assert ring.of(rid)[0].reason == "length" and len(ring.of(rid)[0].tokens) == 30


# --- pacing --------------------------------------------------------------------------------------

def allowance(spare: float = 1000.0, **fields: object) -> PrefillAllowance:
    return PrefillAllowance(page_size=4, tokens=10_000, spare_us=spare, us_per_token=1.0,
                          us_per_position=0.0, **fields)  # type: ignore[arg-type]


def test_chunks_end_before_what_is_not_made() -> None:
    media = [item(1, 10, 20), item(2, 30, 40)]
    given = allowance()
    assert given.take(0, 50, media) == 10 and given.encode == media
    assert given.encode_us == 990
    assert allowance().take(10, 40, media) == 0
    made = {media[0].key: None}
    given = allowance(encoded=made)
    assert given.take(0, 12, media) == 12 and given.encode == [] and given.encode_us == 0
    assert made, "half of it is still to come"
    given = allowance(encoded=made)
    assert given.take(12, 38, media) == 18 and given.encode == media[1:] and not made
    assert allowance().take(40, 10, media) == 10
    assert allowance().take(0, 10, media) == 10, "it does not come to it"
    text = allowance()
    assert text.take(0, 50) == 50 and text.encode_us == 0


def test_images_get_their_share_of_the_time() -> None:
    given = allowance(500.0, reserved_us=400.0)
    media = [item(1, 0, 20)]
    assert given.take(0, 50, media) == 0 and given.take(0, 300) == 300
    assert given.encode_us == 600
    spent = allowance(-50.0, reserved_us=0.0)
    spent.take(0, 50, media)
    assert spent.encode_us == 1, "a slice, at least"


def test_a_stream_goes_on_while_an_image_is_made() -> None:
    """Its chunks come when the worker says that it is made; without a stream they come at once."""
    settings = config(page_size=4)
    scheduler = msgspec.structs.replace(settings.scheduler, target_itl=20.0)
    ring = Ring(msgspec.structs.replace(settings, scheduler=scheduler), cost=lambda *_: 2000)
    alone = ask(ring, prompt([1] * 8, 8, [2] * 9), [item(1, 8, 16)])
    ring.run()
    assert ring.of(alone)[0].reason == "length" and not any(plan.encode for plan in ring.sent)
    ring.submit(9, max_tokens=60)
    ring.wake()
    for _ in range(8):
        ring.work()
        ring.deliver()
    before = len(ring.sent)
    media = [item(2, 8, 16), item(3, 20, 24)]
    paced = ask(ring, prompt([3] * 8, 8, [2] * 4, 4, [2] * 9), media)
    ring.run()
    plans = ring.sent[before:]
    assert [plan.encode for plan in plans if plan.encode][0] == media
    assert all(plan.encode_us > 0 for plan in plans if plan.encode)
    first = next(i for i, plan in enumerate(plans) if plan.encode)
    slot = next(a.slot for plan in plans for a in plan.admit if a.media)
    chunks = [count for plan in plans
              for own, count in zip(*[iter(ints(plan.extend))] * 2, strict=True) if own == slot]
    assert chunks[0] == 8 and sum(chunks) == 33
    assert plans[first].decode and ring.of(paced)[0].reason == "length"
    ring.assert_at_rest()
