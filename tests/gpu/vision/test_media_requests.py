"""Requests with images and videos through scheduler and runner: the tokens of transformers, however
prompts are cut, cached, preempted and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_media import GREEDY, answers, image, media_ring, oracle_answer, question, video
from helpers_models import load
from helpers_vision import write_vl

from actorium.gpu.models.registry import Model

TEXT, MORE = list(range(3, 12)), [40, 41, 42, 17, 8]
PICTURES: dict[str, list[Any]] = {
    "an image": [TEXT, image(6, 8), MORE],
    "images": [TEXT, image(2, 2), image(8, 4, 1), MORE, image(4, 6, 2), MORE],
    "a video": [TEXT, video(3, 4, 4), MORE],
    "both": [image(4, 4), MORE, video(2, 4, 6, 3), image(2, 6, 4), TEXT]}


@pytest.fixture(scope="module", params=["2.5", "3"])
def served(request: pytest.FixtureRequest,
           tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Model]:
    """A checkpoint as transformers has it, and as we have."""
    path: Path = tmp_path_factory.mktemp("vl")
    oracle = write_vl(path, request.param)
    return request.param, oracle, load(path)


@pytest.mark.parametrize(("budget", "page_size"), [(7, 1), (512, 16), (7, 16), (512, 1)])
def test_tokens_are_those_of_transformers(served: tuple[str, Any, Model], budget: int,
                                          page_size: int) -> None:
    kind, oracle, model = served
    asked = [question(model, *parts) for parts in PICTURES.values()]
    ring = media_ring(model, runner={"page_size": page_size, "pages": 6400 // page_size},
                      budget=budget)
    found = answers(ring, *asked)
    for own, out in zip(asked, found, strict=True):
        assert out.tokens == oracle_answer(oracle, own, kind), out.error
    assert GREEDY.max_tokens == 6
