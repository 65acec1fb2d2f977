"""A Hugging Face hub on loopback: the routes that are asked when a model is fetched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LFS = (".safetensors", ".gguf", ".bin", "tokenizer.json")
"""Endings of files that lie outside git."""
INDEX = "model.safetensors.index.json"


def commit_of(text: str) -> str:
    """A commit, made up."""
    return hashlib.sha1(text.encode()).hexdigest()


def file_hash(name: str, data: bytes) -> str:
    """What the hub's ETag says of a file."""
    if name.endswith(LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    """Repositories, and how the hub misbehaves."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        """Repository -> branch or tag -> file -> its bytes."""
        self.tokens: dict[str, str] = {}
        """Repository -> the only token that opens it."""
        self.gated: set[str] = set()
        """Repositories that everybody may list, and nobody read without such a token."""
        self.break_after: dict[str, list[int]] = {}
        """File -> bytes after which each of the next answers breaks off."""
        self.damaged: set[str] = set()
        """Files that come with another byte."""
        self.status: dict[str, int] = {}
        """File, or repository -> the status of every answer."""
        self.ranges = True
        """Whether Range is understood."""
        self.metadata = True
        """Whether listings tell sizes and hashes."""
        self.redirects = False
        """Whether large files lie on another host."""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """(method, path, headers) of each request."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Put files there; returns the commit."""
        self.repositories.setdefault(repo, {})[revision] = files
        return commit_of(f"{repo}@{revision}")

    def sent(self, name: str) -> list[str]:
        """The Range of each GET of a file ("" = all of it)."""
        return [headers.get("range", "") for method, path, headers in self.asked
                if method == "GET" and path.endswith(f"/{name}")]

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeHub]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    # --- answers ---

    def listing(self, repo: str, revision: str) -> dict[str, Any]:
        files = self.repositories[repo][revision]
        siblings: list[dict[str, Any]] = []
        for name, data in files.items():
            one: dict[str, Any] = {"rfilename": name}
            if self.metadata:
                one |= {"size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
                if name.endswith(LFS):
                    one["lfs"] = {"size": len(data), "sha256": file_hash(name, data),
                                  "pointerSize": 130}
                else:
                    one["blobId"] = file_hash(name, data)
            siblings.append(one)
        return {"id": repo, "modelId": repo, "sha": commit_of(f"{repo}@{revision}"),
                "private": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}

    def revision_of(self, repo: str, asked: str) -> str | None:
        known = self.repositories.get(repo, {})
        return next((name for name in known if asked in (name, commit_of(f"{repo}@{name}"))), None)


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class HubHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            hub.asked.append((self.command, path, headers))
            if found := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
                self._listing(found[1], found[2] or "main")
            elif found := re.fullmatch(r"(?:/cdn)?/(.+?)/resolve/([^/]+)/(.+)", path):
                self._file(found[1], found[2], found[3], path.startswith("/cdn/"))
            else:
                self._refuse(404, "")

        do_HEAD = do_GET

        def _refuse(self, status: int, code: str, message: str = "") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message or code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _allowed(self, repo: str, name: str = "") -> bool:
            token = self.headers.get("authorization", "").removeprefix("Bearer ")
            if status := hub.status.get(name) or hub.status.get(repo):
                self._refuse(status, "")
            elif token == "invalid":
                self._refuse(401, "", "Invalid credentials in Authorization header")
            elif repo not in hub.repositories:
                self._refuse(404 if token else 401, "RepoNotFound")
            elif repo in hub.gated and name and token != hub.tokens.get(repo):
                self._refuse(403 if token else 401, "GatedRepo")
            elif repo in hub.tokens and repo not in hub.gated and token != hub.tokens[repo]:
                self._refuse(404 if token else 401, "RepoNotFound")
            else:
                return True
            return False

        def _listing(self, repo: str, asked: str) -> None:
            if not self._allowed(repo):
                return
            revision = hub.revision_of(repo, asked)
            if revision is None:
                self._refuse(404, "RevisionNotFound")
                return
            data = json.dumps(hub.listing(repo, revision)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _file(self, repo: str, commit: str, name: str, cdn: bool) -> None:
            if not (cdn or self._allowed(repo, name)):
                return
            revision = hub.revision_of(repo, commit)
            data = hub.repositories[repo][revision].get(name) if revision else None
            if data is None:
                self._refuse(404, "EntryNotFound")
                return
            if hub.redirects and not cdn and name.endswith(LFS):
                port = hub.url.rpartition(":")[2]
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{port}/cdn{self.path}")
                self.send_header("X-Linked-ETag", f'"{file_hash(name, data)}"')
                self.send_header("X-Linked-Size", str(len(data)))
                self.send_header("X-Repo-Commit", commit)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._send(name, data, commit)

        def _send(self, name: str, data: bytes, commit: str) -> None:
            etag = file_hash(name, data)
            if name in hub.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
            start = int(asked[1]) if asked and hub.ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if self.command == "HEAD":
                return
            breaks = hub.break_after.get(name)
            if breaks:
                self.wfile.write(data[start:start + breaks.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
            else:
                self.wfile.write(data[start:])

    return HubHandler


def model_files(size: int = 5000, shards: int = 1) -> dict[str, bytes]:
    """The files of a model, as a repository holds them: weights are no tensors."""
    files = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "README.md": b"# model",
             "tokenizer.json": b"{}" * 50, "tokenizer_config.json": b"{}",
             "generation_config.json": b"{}", "training_args.bin": b"pickle"}
    if shards == 1:
        return files | {"model.safetensors": bytes(i * 7 % 251 for i in range(size))}
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    index = json.dumps({"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}})
    return files | {INDEX: index.encode()} | {
        name: bytes((i + n) * 7 % 251 for i in range(size)) for n, name in enumerate(names)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process, and those that it starts, ask; the HF cache is an empty one."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr("actorium.actors.models.hub_download.PAUSE_SECONDS", 0.001)
    with FakeHub().running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
