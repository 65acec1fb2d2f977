"""Requests with images and videos through scheduler and runner: the tokens of transformers, however
prompts are cut, cached, preempted and verified."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_graphs import with_segments
from helpers_media import (
    MediaRing,
    Patches,
    Question,
    answers,
    image,
    media_ring,
    oracle_answer,
    question,
    video,
    with_images,
)
from helpers_models import load
from helpers_pairs import pairs
from helpers_ranks import run_ranks, whole
from helpers_speculation import Guess, make_runner
from helpers_vision import write_vl

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.messages import StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.decode_programs import DecodePrograms
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.plan.graph_memory import program_sizes
from actorium.gpu.plan.memory_plan import Demand
from actorium.kernels.cpu.native_library import library

TEXT, MORE = list(range(3, 12)), [40, 41, 42, 17, 8]
PARTS: list[list[Any]] = [
    [TEXT, image(6, 8), MORE],
    [TEXT, image(2, 2), image(8, 4, 1), MORE, image(4, 6, 2), MORE],
    [TEXT, video(3, 4, 4), MORE],
    [image(4, 4), MORE, video(2, 4, 6, 3), image(2, 6, 4), TEXT]]
PICTURES, PARTS_ENCODED = 8, 8


class Served(NamedTuple):
    """A checkpoint as transformers has it, and as we have; questions, and its answers."""

    kind: str
    oracle: Any
    model: Decoder
    path: Path
    asked: list[Question]
    want: list[list[int]]


VERSIONS = ("2.5", "3")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Served:
        path = tmp_path_factory.mktemp("vl")
        oracle, model = write_vl(path, kind), None
        model = load(path)
        asked = [question(model, *parts) for parts in PARTS]
        want = [oracle_answer(oracle, own, kind) for own in asked]
        assert len({tuple(own) for own in want}) == len(want)
        return Served(kind, oracle, model, path, asked, want)

    return cached


@pytest.fixture(scope="module", params=VERSIONS)
def served(request: pytest.FixtureRequest, make: Callable[[str], Served]) -> Served:
    return make(request.param)


def check(found: list[Any], want: list[list[int]]) -> None:
    assert [(out.tokens, out.error) for out in found] == [(own, None) for own in want]


def with_text(model: Decoder, own: Question) -> Question:
    """Another question about the same pictures."""
    return own._replace(tokens=[*own.tokens[:-2], 77, 78])


@pytest.mark.parametrize(("served", "budget", "page_size"), pairs(
    VERSIONS, [(7, 1), (512, 16), (512, 1), (7, 16)]), indirect=["served"])
def test_tokens_are_those_of_transformers(served: Served, budget: int, page_size: int) -> None:
    """And a second question about the same pictures finds them in the prefix cache, or half of one:
    nothing is encoded again."""
    ring = media_ring(served.model, budget=budget,
                      runner={"page_size": page_size, "pages": 6400 // page_size})
    check(answers(ring, *served.asked), served.want)
    assert ring.images.encodings == PARTS_ENCODED
    again = [with_text(served.model, own) for own in served.asked]
    found = answers(ring, *again)
    assert ring.images.encodings == PARTS_ENCODED and all(out.cached > 8 for out in found)
    for own, out in zip(again, found, strict=True):
        assert out.tokens == oracle_answer(served.oracle, own, served.kind)


def test_it_is_the_image_that_a_prefix_is_shared_by(served: Served) -> None:
    asked = [question(served.model, TEXT, image(6, 8, seed), MORE) for seed in (1, 2, 1)]
    assert asked[0].tokens == asked[1].tokens
    ring = media_ring(served.model, runner={"page_size": 2})
    first, other, same = (answers(ring, own)[0] for own in asked)
    assert first.tokens == same.tokens != other.tokens
    assert other.cached == 10 == (len(TEXT) + 1) // 2 * 2, "the pages before it"
    assert same.cached == (len(asked[0].tokens) - 1) // 2 * 2
    assert ring.images.encodings == 2


@pytest.mark.parametrize(("served", "rows"), pairs(VERSIONS, [0, 10, 16]), indirect=["served"])
def test_what_cannot_be_kept_is_made_again(served: Served, rows: int) -> None:
    """The most that a picture has are 12 rows."""
    ring = media_ring(served.model, rows=rows, budget=7)
    check(answers(ring, *served.asked), served.want)
    assert ring.images.pool.used <= rows
    assert (ring.images.encodings > PARTS_ENCODED) == (rows < 16), "one after the other, all fit"


def test_a_video_is_encoded_some_frames_at_a_time(served: Served,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.gpu.vision.media_steps.PART_PATCHES", 32)
    ring = media_ring(served.model, budget=5)
    check(answers(ring, *served.asked), served.want)
    assert ring.images.encodings == PARTS_ENCODED + 2, "two videos are in two parts"


def test_preemption_changes_nothing(served: Served) -> None:
    ring = media_ring(served.model, force_preempt_every=3, budget=24, runner={"pages": 60})
    check(answers(ring, *served.asked, *served.asked), served.want * 2)
    assert ring.preemptions > 3


def test_a_new_worker_begins_anew(served: Served) -> None:
    """It has none of the pictures; prompts and what was emitted come again."""
    ring = media_ring(served.model, budget=24)
    for own in served.asked:
        ring.ask(own)
    for _ in range(9):
        ring.step()
    assert any(out.tokens for out in ring.outputs.values())
    runner = with_images(make_runner(served.model, 0, slots=9), ring.patches)
    ring.replace_worker(runner)
    check(ring.run(), served.want)


@pytest.mark.parametrize(("served", "how"), pairs(
    VERSIONS, ["segments", "wrong drafts", "drafts"]), indirect=["served"])
def test_other_ways_to_run_steps(served: Served, how: str) -> None:
    drafts = 2 * how.endswith("drafts")
    guess = Guess(lambda seed, at: how == "drafts" or at % 3 > 0)
    patches = Patches()
    runner = with_images(make_runner(served.model, drafts, guess if drafts else None, slots=9),
                         patches)
    guess.tables = runner.tables
    if how == "segments":
        with_segments(runner, [4, 8, 24, 32])
    for own, want in zip(served.asked, served.want, strict=True):
        guess.wholes[1] = own.tokens + want
        ring = MediaRing(runner, patches, speculative=f"mtp:{drafts},fixed" if drafts else "off")
        check(answers(ring, own), [want])
        if how == "drafts":
            assert ring.core.health().gauges["spec_decode_num_accepted_tokens"] > 2
    if how == "segments":
        assert runner.served["piecewise_graph"] > 8


def half(served: Served, **model: Any) -> Decoder:
    """In bf16, where C kernels are."""
    return load(served.path, dtype="bfloat16", **model)


def test_decode_programs_turn_rows_as_the_model_does(served: Served) -> None:
    if library() is None:
        pytest.skip("no compiler")
    model, found = half(served), []
    for programs in (False, True):
        ring = media_ring(model)
        runner = ring.runner
        if programs:
            demand = Demand(8, runner.tables.page_size, 64, 0)
            runner.segments = DecodePrograms(runner.model, runner.pools, runner.states,
                                             program_sizes(runner.model.shape, demand, 8))
        found.append([out.tokens for out in answers(ring, *served.asked)])
        assert (runner.served["program"] > 0) == programs
    assert found[0] == found[1]


@pytest.mark.parametrize("how", [{"quantization": "int8"}, {"pages": torch.int8}])
def test_quantised_weights_and_pages_run(served: Served, how: dict[str, Any]) -> None:
    """And what they say depends on the pictures."""
    pages = how.pop("pages", None)
    model = half(served, **how)
    ring = media_ring(model, runner={"kv_dtype": pages} if pages else None)
    asked = [question(model, TEXT, image(6, 8, seed), MORE) for seed in range(4)]
    found = [out.tokens for out in answers(ring, *asked)]
    assert len({tuple(own) for own in found}) > 1 and all(len(own) == 6 for own in found)


# --- what goes wrong -----------------------------------------------------------------------------

def test_a_lost_picture_ends_its_request_alone(served: Served) -> None:
    """Nobody shares what was computed without it; when it is there again, all is well."""
    lost, fine, *_ = served.asked
    ring = media_ring(served.model, runner={"page_size": 2})
    ring.ask(lost, known=False)
    ring.ask(fine)
    first, second = ring.run()
    assert first.finish == "error" and first.error and "patches" in first.error
    assert second.tokens == served.want[1]
    check(answers(ring, lost), [served.want[0]])
    assert ring.core.health().gauges["held_pages"] == 0


@pytest.mark.parametrize("broken", [np.zeros((47, 96), np.float32), np.zeros((48, 90), np.float32)])
def test_a_broken_picture_ends_its_request_alone(served: Served, broken: Any) -> None:
    ring = media_ring(served.model)
    lost = served.asked[0]
    ring.patches.found[lost.pictures[0].key] = broken
    ring.ask(lost, known=False)
    ring.ask(served.asked[1])
    first, second = ring.run()
    assert first.error and "48 patches" in first.error or "(1, 6, 8)" in str(first.error)
    assert second.tokens == served.want[1]


def test_positions_that_rope_has_no_rows_for_are_refused(served: Served) -> None:
    """A long video reaches beyond its tokens; of one that fits the completion ends in time."""
    model, seconds = load(served.path, max_model_len=80), 40.0
    ring = media_ring(model)
    asked = question(model, TEXT, video(3, 4, 4, seconds=seconds), MORE)
    (out,) = answers(ring, asked)
    if served.kind == "2.5":
        assert out.error and "max_model_len=80" in out.error
        near = question(model, TEXT, video(3, 4, 4, seconds=14.0), MORE)
        (out,) = answers(ring, near, params=ResolvedParams(max_tokens=60, temperature=0.0))
        delta = ring.images.admit(ring.admitted[-1]).delta
        assert delta > 0 and len(near.tokens) + len(out.tokens) == 80 - delta
    assert out.finish == "length"


def test_what_does_not_fit_its_placeholders_is_refused(served: Served) -> None:
    ring = media_ring(served.model, frame_tokens=11)
    large, bad = question(served.model, image(6, 8)), served.asked[1]
    ring.ask(large)
    ring.ask(bad._replace(tokens=[*bad.tokens[:11], 5, *bad.tokens[12:]]))
    ring.ask(served.asked[2])
    first, second, third = ring.run()
    assert first.error and "max_encoder_tokens=11" in first.error
    assert second.error and "media" in second.error
    assert third.tokens == served.want[2]


# --- several ranks -------------------------------------------------------------------------------

def tp_model(path: Path, group: RankGroup) -> Decoder:
    config = Config(model=ModelConfig(), device=DeviceConfig(tensor_parallel_size=2))
    return load_model(path, config, torch.device("cpu"), lambda *_: None, group)


def test_two_ranks(served: Served, tmp_path: Path) -> None:
    """Each makes what it needs; a picture that one of them cannot read is none for both."""
    plans: list[StepPlan] = []
    patches = Patches()
    ring = MediaRing(with_images(make_runner(served.model, 0, slots=9), patches), patches)
    ring.plans_seen = plans
    check(answers(ring, *served.asked), served.want)

    def rank(group: RankGroup) -> list[Any]:
        own = Patches(dict(patches.found))
        if group.place.rank:
            del own.found[served.asked[3].pictures[0].key]
        runner = with_images(make_runner(tp_model(served.path, group), 0, slots=9), own,
                             group=group)
        return [runner.run(plan) for plan in plans]

    first, second = whole(run_ranks(tmp_path, 2, rank))
    assert [r.failed for r in first if r.failed][0][0][1] == "unavailable"
    assert [[(s, c) for s, c, _ in r.failed] for r in first] == [
        [(s, c) for s, c, _ in r.failed] for r in second]
    assert [r.tokens for r in first] == [r.tokens for r in second]
