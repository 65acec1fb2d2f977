"""Tiny random Qwen2.5-VL and Qwen3-VL checkpoints behind HTTP, asked by OpenAI's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from helpers_images import data_url, gif, picture, write_text_side
from helpers_runtime import short_dir
from helpers_vision import write_vl

from actorium.actors.gateway import actor as gateway
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir

BLUE = (0, 0, 255)


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
