"""The blocks of README.md and docs/ that are marked `run` do what a reader expects: they end well.

A page's blocks are run in its order, in a folder of its own. Port 8000 stands for a free one.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_cli import Cli, read_until
from helpers_code_facts import ROOT
from helpers_documents import ENGINE, PAGES, Block, ForkedCommands, blocks
from helpers_zygote import ForkedPython

SECONDS, SLOW_SECONDS = 60.0, 220.0
"""For a block."""


class Shell:
    """Runs blocks with `actorium` in the path, engines in a run directory of its own, and port 8000
    replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = ForkedCommands(folder)
        with socket.create_server(("127.0.0.1", 0)) as held:
            self.port = held.getsockname()[1]
        (folder / ".curlrc").write_text("fail-with-body\n")
        self.env = Cli(str(folder / "run")).env | {
            "ACTORIUM_PORT": str(self.port), "CURL_HOME": str(folder),
            "PATH": f"{folder}:{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "OPENAI_API_KEY": "", "HF_HUB_OFFLINE": "1"}
        self.servers: list[subprocess.Popen[bytes]] = []

    def run(self, block: Block) -> str:
        """What a block writes. Raises `AssertionError` if it fails."""
        text = block.text.replace("8000", str(self.port))
        if block.language == "python":
            process: subprocess.Popen[bytes] = ForkedPython(
                ["-c", text], self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)
        else:
            process = self._bash(text, subprocess.STDOUT)
        with process:
            limit = SLOW_SECONDS if "slow" in block.mark else SECONDS
            said = process.communicate(timeout=limit)[0].decode()
        assert process.returncode == 0, f"{text}\n{said}"
        return said

    def serve(self, block: Block) -> None:
        """Start what a block starts; returns when it is ready."""
        process = self._bash(f"exec {block.text}", subprocess.PIPE)
        self.servers.append(process)
        read_until(process, b"ready after:")
        read_until(process, b"HTTP at ")

    def _bash(self, text: str, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-euo", "pipefail", "-c", text], env=self.env,
                                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=stderr)

    def close(self) -> list[int]:
        """End the servers that still run. Returns the exit codes of all."""
        for process in self.servers:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        codes = []
        for process in self.servers:
            with process:
                process.communicate(timeout=30)
                codes.append(process.returncode)
        self.commands.close()
        return codes


def new_shell() -> Iterator[Shell]:
    folder = Path(tempfile.mkdtemp(prefix="doc", dir="/tmp"))
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    at = os.getcwd()
    os.chdir(folder)  # where what is forked begins
    shell = Shell(folder)
    try:
        yield shell
        codes = shell.close()
        assert set(codes) <= {0}
    finally:
        os.chdir(at)
        shutil.rmtree(folder, ignore_errors=True)


shell = pytest.fixture(new_shell)


@pytest.fixture(scope="module")
def served() -> Iterator[Shell]:
    """A shell beside an engine with the packaged model, for all pages that ask for one."""
    for shell in new_shell():
        shell.serve(Block("sh", "run server", "actorium serve"))
        yield shell


def marked(*marks: str) -> list[Path]:
    return [page for page in PAGES if any(block.mark in marks for block in blocks(page))]


@pytest.mark.parametrize("page", marked("run", "run server"), ids=lambda page: page.stem)
def test_commands_of_a_page(page: Path, request: pytest.FixtureRequest) -> None:
    engine = ENGINE in page.read_text()
    shell = request.getfixturevalue("served" if engine else "shell")
    for block in blocks(page):
        if block.mark == "run":
            shell.run(block)
        elif block.mark == "run server":
            shell.serve(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", marked("run slow"), ids=lambda page: page.stem)
def test_slow_commands_of_a_page(page: Path, shell: Shell) -> None:
    for block in blocks(page):
        if block.mark == "run slow":
            shell.run(block)


def test_a_command_that_fails_is_seen(shell: Shell) -> None:
    for text in ("actorium plan --no-such-flag", "actorium no-such-command", "false\ntrue"):
        with pytest.raises(AssertionError, match="no-such|false"):
            shell.run(Block("sh", "run", text))
    with pytest.raises(AssertionError, match="nonsense"):
        shell.run(Block("python", "run", "import nonsense"))
    assert shell.run(Block("sh", "run", "actorium --version | tr -d '\\n'; echo 1")).endswith("1\n")
