"""Images in `actorium chat`: with the first turn, and with any other by /image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_images import picture

from actorium.actors.client.media import Image, Video
from actorium.actors.client.requests import StreamDelta
from actorium.actors.errors import InvalidRequest
from actorium.actors.params import SamplingParams
from actorium.tools.cli import chat_command


class Recording:
    """A client that answers "yes"."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    @contextmanager
    def chat(self, history: list[Any], params: SamplingParams, stream: bool, adapter: str
             ) -> Iterator[Iterator[StreamDelta]]:
        self.asked.append([turn["content"] for turn in history])
        yield iter([StreamDelta(text="yes", token_ids=[1])])


def test_images_go_with_the_next_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.gif"):
        (tmp_path / name).write_bytes(picture())
    lines = iter(["first", "/image /nowhere.png", f"/image {tmp_path / 'b.gif'}", "second",
                  "third", "/exit"])
    monkeypatch.setattr(chat_command, "_read", lambda: next(lines))
    client: Any = Recording()
    chat_command.talk(client, SamplingParams(), images=[str(tmp_path / "a.png")])
    first, second, third = client.asked
    assert isinstance(first[0][0], Image) and first[0][1] == "first"
    assert isinstance(second[2][0], Video) and second[2][1] == "second"
    assert third[4] == "third" and len(third) == 5
    said = capsys.readouterr().err
    assert "error: cannot read '/nowhere.png'" in said and "goes with your next turn" in said
    with pytest.raises(InvalidRequest, match="cannot read"):
        chat_command.talk(client, SamplingParams(), images=["/nowhere.png"])
