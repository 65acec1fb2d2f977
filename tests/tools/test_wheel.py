"""The wheel and the source distribution: what is in them, and what the wheel alone can do. Clean
environments, with nothing else installed: `make install-check`."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import msgspec
import pytest
import zmq
from helpers_code_facts import PACKAGES, ROOT

import actorium

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "actorium", *PACKAGES)
NOT_INSTALLED = ("tools/training/", "tools/deploy/Dockerfile", "tools/deploy/compose.yaml",
                 "tools/docs/", "tools/gpu_check.sh", "tools/gpu_wheels.sh",
                 "tools/setup_venv.sh")
"""Of a checkout alone."""
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('dist'))"
INFO = f"actorium_llm-{actorium.__version__}.dist-info"


def built(folder: Path, what: str) -> Path:
    """`build_wheel` or `build_sdist` of the sources in a folder."""
    (folder / "dist").mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-I", "-c", BUILD, what], cwd=folder, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without anything that was built."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
        else:
            shutil.copytree(ROOT / name, folder / name, symlinks=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    return built(sources, "build_wheel")


def record(wheel: Path) -> dict[str, str]:
    """File -> hash, as the wheel lists them."""
    with zipfile.ZipFile(wheel) as archive:
        rows = csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode()))
        return {name: digest for name, digest, _ in rows}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())


def test_every_file_of_the_code_is_in_it(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for package in PACKAGES
             for path in (ROOT / package).rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}
    expected = {f"actorium/{name}" for name in files if not name.startswith(NOT_INSTALLED)}
    expected |= {"actorium/__init__.py", "actorium/py.typed"}
    contained = {name for name in record(wheel) if not name.startswith(INFO)}
    assert contained == expected
    assert {name.rpartition(".")[2] for name in contained} >= {"c", "h", "safetensors", "html"}


def test_its_record_is_right(wheel: Path) -> None:
    listed = record(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == set(listed)
        for name in set(listed) - {f"{INFO}/RECORD"}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest())
            assert listed[name] == f"sha256={digest.decode().rstrip('=')}"


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, sources: Path,
                                                       tmp_path: Path) -> None:
    with tarfile.open(built(sources, "build_sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked, = tmp_path.iterdir()
    assert record(built(unpacked, "build_wheel")) == record(wheel)


def test_its_metadata(wheel: Path) -> None:
    told = metadata(wheel)
    assert (told["Name"], told["Version"]) == ("actorium-llm", actorium.__version__)
    assert told["License-Expression"] == "Apache-2.0" and told["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in (told.get_all("Classifier") or [])
    required = told.get_all("Requires-Dist") or []
    client = {re.match(r"[\w-]+", each)[0] for each in required  # type: ignore[index]
              if "extra ==" not in each}
    assert client == {"pyzmq", "msgspec"}
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.read(f"{INFO}/entry_points.txt").decode()
    assert entries.split() == ["[console_scripts]", "actorium", "=", "actorium.tools.cli:main"]


CLIENT = """
import sys
sys.path += [sys.argv.pop(1), sys.argv.pop(1)]
import actorium
for name in actorium.__all__:
    getattr(actorium, name)
from actorium.tools.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with the wheel's packages and with the two that its client needs."""
    whole, needed = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("needed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(whole)
    for package in (msgspec, zmq):
        site = Path(package.__file__).parents[1]
        for path in (*site.glob(f"{package.__name__}"), *site.glob("pyzmq.libs")):
            if not (needed / path.name).exists():
                (needed / path.name).symlink_to(path)
    return whole, needed


@pytest.mark.parametrize("words, code, output", [
    (["version"], 0, actorium.__version__), (["ps"], 0, "no engine is running"),
    (["serve"], 2, "an engine needs")])
def test_the_client_needs_two_packages(client: tuple[Path, Path], tmp_path: Path,
                                       words: list[str], code: int, output: str) -> None:
    """All public names, and commands that need no engine; what needs one says what it lacks."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", CLIENT, *client, *words],
                          capture_output=True, text=True, cwd=tmp_path,
                          env={"ACTORIUM_RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == code, done.stderr
    assert output in done.stdout + done.stderr
