"""The recording of the README: what is drawn of a run, and the one that is there."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from actorium.tools.kill_recording import ASKED, KILLED, PLAYED, Death, Piece, RecordedRun, draw

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = Path(__file__).parents[2] / "docs" / "kills.svg"
MOST = 200_000
"""Bytes of a picture at the top of a README."""


def words(number: int) -> list[Piece]:
    return [Piece(0.25 * n, f"<{number}.{n}> & ") for n in range(100)]


def test_every_word_and_kill_is_seen_from_its_moment_on() -> None:
    run = RecordedRun([words(number) for number in range(len(ASKED))], [
        Death(role, 100 + n, 2.0 * n, 200 + n, 2.0 * n + 0.5)
        for n, role in enumerate(KILLED)], 26.0)
    root = ElementTree.fromstring(draw(run, "a model"))
    shown = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for number in range(len(ASKED)):
        lines = [line for line in shown if line.startswith(f"<{number}.")]
        assert "".join(lines).split() == "".join(piece.text for piece in words(number)).split()
    for number, role in enumerate(KILLED):
        assert any(line.startswith(f"$ kill -9 {100 + number}") for line in shown)
        assert any(f"started again as {200 + number}, 0.5 s later" in line for line in shown)
        assert f"# {role}" in shown
    [last] = [span for span in root.iter(f"{SVG}tspan") if (span.text or "").startswith("<0.99>")]
    [hidden] = last.iter(f"{SVG}set")
    assert hidden.get("dur") == f"{round(0.25 * 99 * PLAYED / 26, 1):g}s"
    assert "a real run of 26.0 s" in " ".join(shown)


def test_the_committed_one_is_small_and_needs_nothing_else() -> None:
    text = COMMITTED.read_text()
    root = ElementTree.fromstring(text)
    assert len(text) < MOST and "<script" not in text and "href" not in text
    kills = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    assert sum(line.startswith("$ kill -9 ") for line in kills) == len(KILLED)
    assert any("no error: each answer is what it is undisturbed" in line for line in kills)
