"""Images and videos through a whole engine, up to the worker: SDK, HTTP, deaths of the media actor,
and files that nobody sends in good faith."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import eventually
from helpers_hostile_media import crafted, mutated
from helpers_images import data_url, gif, picture, write_text_side
from helpers_runtime import short_dir
from PIL import Image as Pillow

from actorium import Image, InvalidRequest, SamplingParams, Video
from actorium.actors.client import calls
from actorium.actors.client.client import Client
from actorium.actors.client.media import load_media
from actorium.actors.errors import MediaExpired
from actorium.actors.gateway import actor as gateway
from actorium.actors.launcher.engine import Engine
from actorium.actors.media.patch_store import patch_folder
from actorium.actors.models.model_dir import MEDIA_BODY
from actorium.actors.runtime.rundir import engine_dir

SHORT = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
KILLS, LIVES, HOSTILE = 7, 3, 200


@pytest.fixture(scope="module", params=["2.5", "3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[Engine]:
    model = write_text_side(tmp_path_factory.mktemp("vl") / "m", request.param)
    with short_dir() as base, Engine(str(model), null_worker=True, device="cpu", port=0,
                                     run_dir=str(base), restart=True,
                                     allowed_local_media_path=str(model)) as engine:
        (model / "cat.png").write_bytes(picture(16, 16))
        yield engine


def folder(engine: Engine) -> Path:
    return patch_folder(engine_dir(engine.name, engine.config.runtime.run_dir))


def post(engine: Engine, path: str, **body: Any) -> tuple[int, Any]:
    where = gateway.where(folder(engine).parent)
    assert where is not None
    asked = urllib.request.Request(f"http://{where.host}:{where.port}{path}",
                                   json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(engine: Engine, *parts: Any, **more: Any) -> tuple[int, Any]:
    return post(engine, "/v1/chat/completions", messages=[{"role": "user", "content": parts}],
                max_tokens=3, **more)


def part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), "detail": "low"}}


def test_the_sdk_takes_paths_bytes_urls_and_pillows_images(engine: Engine, tmp_path: Path) -> None:
    """All of the same picture, so that all prompts are the same but for the last."""
    path = tmp_path / "a.png"
    path.write_bytes(picture())
    images = [Image(path), Image(str(path)), Image(picture()), Image(data_url(picture())),
              Image(Pillow.new("RGB", (32, 24), (200, 30, 30)))]
    ids = [engine.client.tokenize_chat([{"role": "user", "content": [image, "what?"]}])
           for image in images]
    assert len(set(map(tuple, ids))) == 1 and len(ids[0]) == 4 + 12 + 5
    found = engine.client.chat([{"role": "user", "content": [images[0], "what?"]}], SHORT)
    assert found.usage.prompt_tokens == len(ids[0])
    both = [Image(picture()), "and", Video([picture(16, 16), picture(16, 16)])]
    text = "".join(delta.text for delta in engine.client.chat(
        [{"role": "user", "content": both}], SHORT, stream=True))
    assert isinstance(text, str)
    with pytest.raises(InvalidRequest, match=r"^messages\[0\].content\[0\]: is PDF"):
        engine.client.chat([{"role": "user", "content": [Image(b"%PDF-1.4")]}], SHORT)
    with pytest.raises(InvalidRequest, match="cannot read '/nowhere/x.png'"):
        Image("/nowhere/x.png")


def test_chat_completions(engine: Engine) -> None:
    status, one = chat(engine, part(picture()), {"type": "text", "text": "what?"})
    assert status == 200 and one["usage"]["prompt_tokens"] == 4 + 12 + 5
    status, two = chat(engine, part(picture()), part(picture(16, 16)),
                       {"type": "text", "text": "what?"})
    assert status == 200 and two["usage"]["prompt_tokens"] == 21 + 2 + 4
    video = {"type": "video_url", "video_url": {"url": data_url(gif(), "image/gif")}}
    status, three = chat(engine, video)
    assert status == 200 and three["usage"]["prompt_tokens"] > 2 + 3 * 12
    frames = {"type": "video", "video": [data_url(picture(16, 16))] * 4}
    assert chat(engine, frames)[0] == 200
    status, small = chat(engine, part(picture(64, 64)), mm_processor_kwargs={"max_pixels": 256})
    assert status == 200 and small["usage"]["prompt_tokens"] == 4 + 4
    status, told = chat(engine, part(picture()), return_token_ids=True)
    assert len(told["prompt_token_ids"]) == told["usage"]["prompt_tokens"] == 16
    local = {"type": "image_url", "image_url": f"file://{engine.config.model.model}/cat.png"}
    assert chat(engine, local)[0] == 200
    status, counted = post(engine, "/tokenize", messages=[
        {"role": "user", "content": [part(picture())]}])
    assert counted["count"] == 16


@pytest.mark.parametrize("wrong, words, param", [
    (part(b"%PDF"), "is declared as image/png and is PDF", "image_url"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "must be a data:, http",
     "image_url"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "", "image_url"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}, "is none of the hosts",
     "image_url"),
    ({"type": "image_url"}, "must be a URL", "image_url"),
    ({"type": "video_url", "video_url": {"url": data_url(picture())}}, "", "video_url"),
], ids=range(6))
def test_bad_parts_are_named(engine: Engine, wrong: Any, words: str, param: str) -> None:
    status, said = chat(engine, {"type": "text", "text": "x"}, wrong)
    assert status == 400 and said["error"]["param"] == f"messages[0].content[1].{param}", said
    assert said["error"]["message"].startswith(said["error"]["param"] + ": ")
    assert words in said["error"]["message"]


def test_what_else_is_refused(engine: Engine) -> None:
    status, said = chat(engine, {"type": "text", "text": "a <|image_pad|>"})
    assert status == 400 and "placeholders" in said["error"]["message"]
    status, said = chat(engine, *[part(picture(8, 8))] * 17)
    assert status == 400 and "17 images; 16 are allowed" in said["error"]["message"]
    status, said = chat(engine, part(picture()), mm_processor_kwargs={"shape": 3})
    assert status == 400 and said["error"]["param"] == "mm_processor_kwargs.shape"
    status, said = chat(engine, part(picture()), truncate_prompt_tokens=5)
    assert status == 400 and said["error"]["param"] == "truncate_prompt_tokens"


def test_messages_and_responses(engine: Engine) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": data_url(picture()).partition(",")[2]}}
    turns = [{"role": "user", "content": [image, {"type": "text", "text": "hi"}]}]
    status, said = post(engine, "/v1/messages", max_tokens=3, messages=turns)
    assert status == 200 and said["usage"]["input_tokens"] + said["usage"][
        "cache_read_input_tokens"] == 18
    assert post(engine, "/v1/messages/count_tokens", messages=turns)[1] == {"input_tokens": 18}
    image["source"]["data"] = "JVBERi0="
    status, said = post(engine, "/v1/messages", max_tokens=3, messages=turns)
    assert status == 400 and "messages[0].content[0].source.data: " in said["error"]["message"]
    items = [{"role": "user", "content": [
        {"type": "input_image", "image_url": data_url(picture()), "detail": "auto"},
        {"type": "input_text", "text": "hi"}]}]
    status, said = post(engine, "/v1/responses", max_output_tokens=3, input=items)
    assert status == 200 and said["usage"]["input_tokens"] == 18
    items[0]["content"][0]["image_url"] = data_url(b"%PDF")  # type: ignore[index]
    status, said = post(engine, "/v1/responses", max_output_tokens=3, input=items)
    assert status == 400 and said["error"]["param"] == "input[0].content[0].image_url"


def test_a_text_model_says_so() -> None:
    with short_dir() as base, Engine("", null_worker=True, device="cpu", port=0,
                                     run_dir=str(base)) as engine:
        assert "media" not in {one.role for one in engine.client.status().actors}
        status, said = chat(engine, part(picture()))
        assert status == 400 and said["error"]["message"] == (
            "messages[0].content[0].image_url: the model takes text alone")


def test_items_whose_files_are_gone_are_loaded_again(engine: Engine) -> None:
    """Somebody has emptied the folder: the same pictures are prepared anew."""
    ask = [{"role": "user", "content": [Image(picture(40, 40)), "what?"]}]
    engine.client.chat(ask, SHORT)
    gone = [*folder(engine).glob("*.rows")]
    for path in gone:
        path.unlink()
    engine.client.chat(ask, SHORT)
    assert gone and any(path.exists() for path in gone)


@pytest.mark.parametrize("batch", [False, True])
def test_items_that_go_before_their_request_comes_are_loaded_again_once(
        engine: Engine, monkeypatch: pytest.MonkeyPatch, batch: bool) -> None:
    """Between the media actor's answer and the tokenizer's look at it."""
    losses, loads = 1, []

    async def lossy(*args: Any) -> Any:
        request = await load_media(*args)
        loads.append(request)
        if len(loads) <= losses:
            for path in folder(engine).glob("*.rows"):
                path.unlink()
        return request

    monkeypatch.setattr(calls, "load_media", lossy)
    ask = [{"role": "user", "content": [Image(picture(56, 40, (losses, batch, 9))), "what?"]}]

    def chat_once() -> None:
        if batch:
            engine.client.chat(ask, SHORT)
        else:
            list(engine.client.chat(ask, SHORT, stream=True))

    chat_once()
    assert len(loads) == 2
    loads.clear()
    losses = 2
    with pytest.raises(MediaExpired):
        chat_once()
    assert len(loads) == 2


def test_pictures_may_be_larger_than_texts(engine: Engine) -> None:
    """A photo of noise, as large as those of telephones, in base64."""
    noise = Pillow.frombytes("RGB", (1600, 1200), random.Random(1).randbytes(3 * 1600 * 1200))
    out = io.BytesIO()
    noise.save(out, "PNG")
    url = data_url(out.getvalue())
    assert 6 << 20 < len(url) < MEDIA_BODY
    status, said = chat(engine, {"type": "image_url", "image_url": {"url": url}})
    assert status == 200, said


@pytest.mark.slow
@pytest.mark.parametrize("life", range(LIVES))
def test_the_media_actor_dies_under_load_and_nothing_is_lost(tmp_path: Path, life: int) -> None:
    """Ten clients ask about pictures, some of them new, while the actor is killed whenever it is
    back. (Its restarts come later and later, so that one engine is killed a few times only.)"""
    model = write_text_side(tmp_path / "m", "3" if life % 2 else "2.5")
    over, done, faults = threading.Event(), [0] * 10, []

    def ask(engine: Engine, number: int) -> None:
        try:
            with Client(engine.name, run_dir=engine.config.runtime.run_dir) as client:
                while not over.is_set():
                    shade = (number, done[number] % 7, 5)
                    image = Image(picture(32 + 8 * (done[number] % 5), 24, shade))
                    found = client.chat([{"role": "user", "content": [image, "what?"]}], SHORT)
                    assert len(found.token_ids) == 4
                    done[number] += 1
        except Exception as error:
            faults.append(error)

    with short_dir() as base, Engine(str(model), null_worker=True, device="cpu", restart=True,
                                     run_dir=str(base), max_restarts=100) as engine:
        threads = [threading.Thread(target=ask, args=(engine, n)) for n in range(len(done))]
        for thread in threads:
            thread.start()
        killed: set[int] = set()
        try:
            while len(killed) < KILLS and not faults:
                time.sleep(0.3)
                pid = next((one.pid for one in engine.client.status().actors
                            if one.role == "media" and one.phase == "ready"), 0)
                if pid and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            eventually(lambda: bool(faults) or min(done) > 2, 60)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert not faults and len(killed) == KILLS and min(done) > 2, (faults, done)
        others = {one.role: one.epoch for one in engine.client.status().actors}
        assert {role for role, epoch in others.items() if epoch > 1} == {"media"}


@pytest.mark.slow
def test_hostile_files_over_http_are_refused_and_end_nothing(engine: Engine) -> None:
    """200 files as images, a third of them also as videos: no 5xx, no actor is started again."""
    rng = random.Random(21)
    files = [*crafted(rng), *mutated(rng, HOSTILE)][:HOSTILE]
    before = {one.role: one.pid for one in engine.client.status().actors}
    statuses: dict[int, int] = {}
    for at, (name, data) in enumerate(files):
        url = "data:;base64," + data_url(data).partition(",")[2]
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}]
        if at % 3 == 0:
            parts = [{"type": "video_url", "video_url": {"url": url}}]
        if len(url) > MEDIA_BODY - 1000:
            continue
        status, said = chat(engine, *parts)
        statuses[status] = statuses.get(status, 0) + 1
        assert status in (200, 400), (name, said)
        if status == 400:
            assert said["error"]["param"].startswith("messages[0].content[0]."), said
    assert statuses[400] > HOSTILE // 3 and sum(statuses.values()) > HOSTILE * 0.9, statuses
    assert {one.role: one.pid for one in engine.client.status().actors} == before
    assert chat(engine, part(picture()))[0] == 200
