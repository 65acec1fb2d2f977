"""What whoever waits for a download sees."""

from __future__ import annotations

import pytest

from actorium.actors.models import download_bar
from actorium.actors.models.download_bar import DownloadBar, human_bytes


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (999, "999 B"), (1500, "2 KB"), (98_362_432, "98 MB"), (1.5e9, "1.5 GB")])
def test_sizes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_a_terminal_sees_a_bar_that_goes_away(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_bar, "LOOK_SECONDS", 0.0)
    with DownloadBar("org/name", 1000, terminal=True) as bar:
        bar.add(200, received=False)
        bar.add(300)
        bar.add(-500, received=False)
        bar.add(1000)
    shown = capsys.readouterr().err.split("\r\033[K")
    assert shown[1].startswith("fetching org/name: 0 % of 1 KB")
    assert [line.split()[2] for line in shown[1:6]] == ["0", "20", "50", "0", "100"]
    assert " s left" in shown[3] and " s left" not in shown[1]
    assert shown[6].startswith("fetched org/name: 1 KB in ")


def test_elsewhere_there_are_two_lines_and_one_after_an_error() -> None:
    lines: list[str] = []
    with DownloadBar("a", 10, lines.append, terminal=False) as bar:
        bar.add(10)
    assert lines[0] == "fetching a, 10 B" and lines[1].startswith("fetched a: 10 B in ")
    lines.clear()
    with pytest.raises(ValueError), DownloadBar("a", 10, lines.append, terminal=False):
        raise ValueError
    assert lines == ["fetching a, 10 B"]


def test_whoever_asks_is_told_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_bar, "LOOK_SECONDS", 0.0)
    seen: list[tuple[int, int]] = []
    with DownloadBar("a", 10, lambda _: None, False, lambda *bytes_: seen.append(bytes_)) as bar:
        bar.add(4)
        bar.add(6)
    assert seen == [(4, 10), (10, 10)]
