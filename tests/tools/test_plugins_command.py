"""`actorium plugins`: what is installed, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import Cli, cli
from helpers_plugins import EXAMPLE, write_example, write_package

__all__ = ["cli"]
pytestmark = pytest.mark.usefixtures("real_starts")  # PYTHONPATH is read when Python starts


@pytest.fixture
def site(tmp_path: Path) -> Path:
    write_example(tmp_path)
    return tmp_path


def test_an_example_of_each_kind(cli: Cli, site: Path) -> None:
    done = cli.run("plugins", "--json", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {(one["group"], one["name"], one["fault"]) for one in said["plugins"]} == {
        ("actorium.logits_processors", "no_repeated_ngrams", ""),
        ("actorium.tool_parsers", "example_marks", ""),
        ("actorium.tool_parsers", "example_lines", ""),
        ("actorium.reasoning_parsers", "example_reasons", ""),
        ("actorium.models", "ExampleForCausalLM", "")}
    assert said["torch_imported_by"] is None


def test_a_broken_one_and_one_that_is_heavy(cli: Cli, site: Path) -> None:
    (site / "torch.py").write_text("class Module: pass\n")  # the real one takes seconds
    write_package(site, "broken", {"actorium.models": {"X": "nobody_has_this:X"},
                                   "actorium.logits_processors": {"y": "torch:Module"}})
    lines = cli.run("plugins", PYTHONPATH=str(site))
    assert lines.returncode == 1
    text = lines.stdout.decode()
    assert "cannot be used: ModuleNotFoundError: No module named 'nobody_has_this'" in text
    assert "a plug-in of actorium.logits_processors imports torch" in text
    chosen = cli.run("plugins", "--plugins", "actorium_example", PYTHONPATH=str(site))
    assert chosen.returncode == 0 and b"broken" not in chosen.stdout
    assert b"no plug-ins are installed" in cli.run("plugins", "--plugins=none").stdout


def test_a_start_with_what_is_not_installed_is_refused(cli: Cli) -> None:
    done = cli.run("serve", "--plugins", "a,nobody")
    assert done.returncode == 2
    assert b"plugins: a is not installed" in done.stderr


@pytest.mark.slow
def test_the_example_as_pip_installs_it(cli: Cli, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                    "--no-build-isolation", "--target", str(target), str(source)], check=True)
    done = cli.run("plugins", "--plugins", "actorium-example", PYTHONPATH=str(target))
    assert done.returncode == 0 and done.stdout.count(b" ok\n") == 5
