"""Tiny random Qwen2.5-VL and Qwen3-VL checkpoints behind HTTP, asked by OpenAI's client."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers_images import data_url, gif, picture, write_text_side
from helpers_runtime import short_dir
from helpers_vision import write_vl

from actorium import Image, SamplingParams, Video
from actorium.actors.client.client import Client
from actorium.actors.gateway import actor as gateway
from actorium.actors.launcher.engine import Engine
from actorium.actors.media.patch_store import patch_folder
from actorium.actors.runtime.rundir import engine_dir

BLUE = (0, 0, 255)
LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)


def image(*args: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture(*args))}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_answers_are_about_the_pictures(tmp_path: Path, kind: str) -> None:
    """The same prompt with another picture has another answer, with the same one the same."""
    write_vl(tmp_path, kind, vocab_size=288, max_position_embeddings=4096, eos_token_id=257)
    write_text_side(tmp_path, kind)
    text = {"type": "text", "text": "what?"}
    with short_dir() as base, Engine(str(tmp_path), port=0, device="cpu", max_num_seqs=4,
                                     max_total_tokens=8192, max_model_len=2048,
                                     run_dir=str(base)) as engine:
        where = gateway.where(engine_dir(engine.name, str(base)))
        assert where is not None
        client = openai.OpenAI(base_url=f"http://{where.host}:{where.port}/v1", api_key="none",
                               max_retries=0)

        def ask(*parts: Any) -> tuple[int, str | None]:
            found = client.chat.completions.create(
                model="default", max_tokens=6, temperature=0,
                messages=[{"role": "user", "content": list(parts)}])
            assert found.usage is not None
            return found.usage.prompt_tokens, found.choices[0].message.content

        red = ask(image(), text)
        assert red[0] == 21 and ask(image(), text) == red
        assert ask(image(32, 24, BLUE), text)[1] != red[1]
        two = ask(image(), image(32, 24, BLUE), text)
        assert two[0] == 21 + 14 and ask(image(32, 24, BLUE), image(), text)[1] != two[1]
        video = {"type": "video_url", "video_url": {"url": data_url(gif(), "image/gif")}}
        assert ask(video, text)[0] > 40
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].image_url: "):
            ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
        assert ask(image(), text) == red


def streams(engine: Engine, then: Callable[[], Any] | None = None) -> list[list[int]]:
    """The tokens of several streams about pictures, some with two, one without; `then` is called
    when half of them have begun."""
    asked: list[list[Any]] = [
        [Image(picture(32 + 8 * (n % 3), 24, (40 * n, 20, 90))), f"what is {n}?"] for n in range(6)]
    asked += [[Image(picture()), Image(picture(32, 24, BLUE)), "both?"], [Video([picture()] * 4)],
              ["no picture"]]
    found: list[list[int]] = [[] for _ in asked]
    begun = threading.Semaphore(0)

    def follow(number: int) -> None:
        with Client(engine.name, run_dir=engine.config.runtime.run_dir,
                    resume_timeout=60.0) as client:
            for delta in client.chat([{"role": "user", "content": asked[number]}], LONG,
                                     stream=True):
                if len(found[number]) < 4 <= len(found[number]) + len(delta.token_ids):
                    begun.release()
                found[number] += delta.token_ids

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=60) for _ in range(len(asked) // 2))
    if then is not None:
        then()
    for thread in threads:
        thread.join(120)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_a_replica_dies_with_images_under_way(tmp_path: Path, kind: str) -> None:
    """Its streams go on at the other replica with the tokens that one engine gives, which reads
    the same patches; and so they do when the router dies with the media actor. Patches are kept
    once, and nothing of them is left behind."""
    write_vl(tmp_path, kind, vocab_size=288, max_position_embeddings=4096, eos_token_id=257)
    write_text_side(tmp_path, kind)
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_total_tokens": 8192,
                                "max_model_len": 2048}
    with short_dir() as base, Engine(str(tmp_path), run_dir=str(base), threads=1,
                                     **settings) as engine:
        whole = streams(engine)
    assert [len(one) for one in whole] == [LONG.max_tokens] * 9
    assert len({tuple(one) for one in whole}) == 9
    with short_dir() as base, Engine(str(tmp_path), run_dir=str(base), threads=2, replicas=2,
                                     restart=True, **settings) as engine:
        assert engine.status is not None
        pids = {one.role: one.pid for one in engine.status.actors}
        assert {"media", "replica-0", "replica-1"} <= set(pids)
        assert streams(engine) == whole

        def routed() -> dict[str, float]:
            return next(one.gauges for one in engine.client.status().actors
                        if one.role == "scheduler")

        assert streams(engine, lambda: os.kill(pids["replica-0"], signal.SIGKILL)) == whole
        assert routed()["migrated_requests"] >= 1
        assert streams(engine, lambda: [os.kill(pids[role], signal.SIGKILL)
                                        for role in ("scheduler", "media")]) == whole
        folder = patch_folder(engine_dir(engine.name, str(base)))
        assert len([*folder.glob("*.rows")]) == 6 + 2 + 1, "asked about three times, kept once"
        shared = folder.resolve()
    assert not folder.exists() and not shared.exists()
