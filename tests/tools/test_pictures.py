"""Drawn pictures and their questions: exact, true, told apart; and who is asked about them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_bench import Scripted, plain

from actorium.tools.cli import main
from actorium.tools.evaluation.picture_scores import is_answer, picture_messages
from actorium.tools.pictures import PICTURE_MODEL
from actorium.tools.pictures.drawn_pictures import (
    CELL,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Figure,
    Picture,
    draw,
    png,
)
from actorium.tools.pictures.picture_questions import (
    CORNERS,
    PictureItem,
    held_out,
    is_held_out,
    pair_questions,
    questions,
)

RED = Figure("circle", "red")
SCENE = Picture(((RED, None, Figure("arrow", "navy", "left")),
                 (Figure("bar", "red"), Figure("circle", "teal"), Figure("arrow", "red", "up"))))
"""A scene of two rows."""


@pytest.fixture(scope="module")
def items() -> list[PictureItem]:
    return held_out()


def test_the_items_are_the_same_to_the_bit_everywhere(items: list[PictureItem]) -> None:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item.question).encode())
        for picture in item.pictures:
            digest.update(draw(picture).tobytes())
    assert digest.hexdigest()[:16] == "41a701fcf47793bb"
    assert held_out(9) == items[:9] and held_out(9, seed=1) != items[:9]


def test_the_items_ask_for_what_an_engine_can_get_wrong(items: list[PictureItem]) -> None:
    kinds = [item.question.kind for item in items]
    assert len(items) == 100 and set(kinds) == {
        "row", "column", "neighbour", "corner", "arrow", "colour", "shape", "count", "odd", "which"}
    assert sum(len(item.pictures) == 2 for item in items) == 20
    assert any(p.rows != p.columns for item in items for p in item.pictures)
    assert all(is_held_out(item.pictures) for item in items)


def test_questions_of_a_scene() -> None:
    said = {one.text: one.answer for one in questions(SCENE)}
    assert said == {
        "How many shapes are red?": "three", "How many shapes are navy?": "one",
        "How many shapes are teal?": "one",
        "What shape is navy?": "arrow", "Where does navy point?": "left",
        "Which row has navy?": "top", "Which column has navy?": "east",
        "Which corner has navy?": "northeast", "Which colour is below navy?": "red",
        "What colour is the bar?": "red",
        "Which row has the bar?": "bottom", "Which column has the bar?": "west",
        "Which corner has the bar?": "southwest", "Which shape is right of the bar?": "circle",
        "Which shape is above the bar?": "circle",
        "What shape is teal?": "circle", "Which row has teal?": "bottom",
        "Which column has teal?": "centre",
        "Which colour is left of teal?": "red", "Which colour is right of teal?": "red"}


def test_an_odd_square_is_asked_for() -> None:
    one, other = Figure("square", "blue"), Figure("square", "cyan")
    said = {each.text: each.answer for each in questions(Picture(((one, one), (other, one))))}
    assert said["Which row has the odd square?"] == "bottom"
    assert said["Which column has the odd square?"] == "west"
    assert said["What colour is the odd square?"] == "cyan"


def test_of_two_pictures_the_order_decides_or_one_alone_has_it(items: list[PictureItem]) -> None:
    which = 0
    for item in items:
        if len(item.pictures) == 2:
            first, second = item.pictures
            own = {one.text: one.answer for one in pair_questions((first, second))}
            other = {one.text: one.answer for one in pair_questions((second, first))}
            assert own[item.question.text] == item.question.answer and own.keys() == other.keys()
            assert all((own[text] == other[text]) == (not text.startswith("Which picture"))
                       for text in own)
            which += item.question.kind == "which"
    assert which > 10


def cell(figure: Figure) -> np.ndarray[Any, Any]:
    return draw(Picture(((figure,),))).astype(int)


def test_shapes_are_told_apart_and_turn_into_others() -> None:
    drawn = [cell(Figure(shape, "red")) for shape in SHAPES if shape != "arrow"]
    drawn += [cell(Figure("arrow", "red", way)) for way in DIRECTIONS]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert (one != other).any(2).sum() > 50
    turned = {"bar": ("post", "", ""), "arrow": ("arrow", "up", "left")}
    for shape, (into, points, then) in turned.items():
        assert (cell(Figure(shape, "red", points)).transpose(1, 0, 2)
                == cell(Figure(into, "red", then))).all()
    levels = {name: colour[::-1] for name, colour in COLOURS.items()}
    assert all(levels[name] != COLOURS[name] and levels[name] in COLOURS.values()
               for name in COLOURS)


def test_every_corner_lies_where_its_name_says() -> None:
    for i, name in enumerate(CORNERS):
        cells: list[list[Figure | None]] = [[None] * 3 for _ in range(2)]
        cells[i // 2][2 * (i % 2)] = RED
        picture = Picture(tuple(map(tuple, cells)))
        assert f"'{name}'" in str(list(questions(picture)))
        found = np.argwhere(draw(picture)[..., 0] > 200)
        assert (found // CELL == (i // 2, 2 * (i % 2))).all() and len(found)


def test_files_hold_the_pixels(items: list[PictureItem]) -> None:
    image = pytest.importorskip("PIL.Image")
    for item in items[:6]:
        for picture in item.pictures:
            read = image.open(io.BytesIO(png(draw(picture))))
            assert read.mode == "RGB" and (np.array(read) == draw(picture)).all()


def test_what_counts_as_an_answer() -> None:
    assert is_answer(" Red.\n", "red") and is_answer("2", "two") and is_answer("zero", "none")
    assert not is_answer("reddish", "red") and not is_answer("red circle", "red")
    assert not is_answer("", "red")


class Seer(Scripted):
    """A server that knows the answers to some questions by heart, and the pictures they came with.
    """

    def __init__(self, known: list[PictureItem], error: bool = False) -> None:
        super().__init__("vllm")
        self.known = {json.dumps(picture_messages(item)): item.question.answer for item in known}
        self.error = error

    def answer(self, path: str, body: dict[str, Any]) -> list[bytes]:
        self.seen.append((path, body))
        if path == "/v1/models":
            return plain(b'{"data": [{"id": "org/seer"}]}')
        if self.error:
            return plain(b'{"error": "no images"}', b"400 Bad Request")
        said = self.known.get(json.dumps(body["messages"]), "green")
        return plain(json.dumps({"choices": [{"message": {"content": said}}]}).encode())


def test_a_run_at_another_makers_server(tmp_path: Path, items: list[PictureItem],
                                        capsys: pytest.CaptureFixture[str]) -> None:
    server = Seer(items[:15])
    with server.running() as url:
        argv = ["eval", "pictures", "--base-url", url, "--count", "20", "--json",
                str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
        assert main([*argv, "--min-score", "0.75"]) == 0
        assert main([*argv, "--min-score", "0.76"]) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["right"], result["count"], result["errors"]) == (15, 20, 0)
    assert result["model"] == "org/seer" and result["categories"]["two pictures"]["count"] == 4
    assert "75.0%" in capsys.readouterr().out
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/png") == sum(len(item.pictures) for item in items[15:20])
    sent = next(body for path, body in server.seen if path == "/v1/chat/completions")
    url = sent["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]).startswith(b"\x89PNG")


def test_a_server_without_images_fails_the_run(tmp_path: Path) -> None:
    with Seer([], error=True).running() as url:
        assert main(["eval", "pictures", "--base-url", url, "--count", "3", "--json",
                     str(tmp_path / "r.json")]) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["errors"] == 3 and "400" in result["items"][0]["error"]


@pytest.mark.parametrize(("flag", "value"), [("--count", "0"), ("--min-score", "1.5")])
def test_bad_options_are_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "pictures", "--base-url", "http://127.0.0.1:1", flag, value]) == 2
    assert f"{flag}:" in capsys.readouterr().err


def test_the_packaged_model_is_small_and_whole() -> None:
    files = {each.name: each.stat().st_size for each in PICTURE_MODEL.iterdir()}
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors",
                          "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert sum(files.values()) < 3_000_000
