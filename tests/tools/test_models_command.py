"""`actorium pull` and `actorium models`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers_hub import FakeHub, commit_of, hub, model_files

from actorium.actors.models import model_dir
from actorium.actors.models.model_names import WHEEL_MODELS, hub_cache, wheel_model_file
from actorium.tools.cli import main

__all__ = ["hub"]


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, Any]]:
    """What `models --json` says, by name."""
    capsys.readouterr()
    assert main(["models", "--json", "--device", "cpu", *argv]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def demo_files() -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in model_dir.DEMO_MODEL.iterdir()}


def test_pull_prints_where_the_model_lies_and_brings_it_up_to_date(
        hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    first = hub.add("org/name", model_files())
    assert main(["pull", "org/name"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(hub_cache() / "models--org--name" / "snapshots" / first)
    assert err.splitlines()[0] == "actorium: fetching org/name (5 files), 5 KB"
    assert main(["pull", "org/name"]) == 0
    assert capsys.readouterr().err == "", "nothing is fetched twice"
    hub.repositories["org/name"] = {"main ": {}, "main": model_files(6000)}
    real = hub.listing
    moved = commit_of("moved")
    hub.listing = lambda *of: real(*of) | {"sha": moved}  # type: ignore[method-assign]
    hub.revision_of = lambda repo, asked: "main"  # type: ignore[method-assign]
    assert main(["pull", "org/name"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.name == moved and (folder / "model.safetensors").stat().st_size == 6000
    assert model_dir.resolve("org/name") == folder


def test_pull_wants_a_name(hub: FakeHub, capsys: pytest.CaptureFixture[str],
                           tmp_path: Path) -> None:
    assert main(["pull"]) == main(["pull", str(tmp_path)]) == main(["pull", "./x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "actorium: error: pull: which model? ORG/NAME of the hub, or smollm2"
    assert all("is a path, not a name" in line for line in lines[1:])


def test_models_of_the_cache_with_what_the_plan_says(
        hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    files = demo_files()
    hub.add("org/demo", files)
    hub.add("org/demo", files, "v1")
    hub.add("org/half", model_files())
    hub.add("org/gguf", {"m-Q4_0.gguf": b"q" * 10, "m-Q8_0.gguf": b"q" * 20})
    for name in ("org/demo", "org/demo@v1", "org/half", "org/gguf:Q8_0"):
        assert main(["pull", name]) == 0
    (model_dir.resolve("org/half") / "model.safetensors").unlink()
    old = hub_cache() / "models--org--old" / "snapshots" / ("c" * 40)
    old.mkdir(parents=True)
    (old / "config.json").write_text("{}")
    (old / "pytorch_model.bin").write_bytes(b"pickle")
    found = listed(capsys)
    demo = found["org/demo"]
    assert demo["format"] == "safetensors bfloat16" and demo["fits"] is True
    assert demo["bytes"] == len(files["model.safetensors"]) and demo["kv_tokens"] > 1000
    assert {"org/demo@v1", "(the demo model)", "org/gguf:Q8_0"} <= set(found)
    assert found["org/gguf:Q8_0"]["format"] == "GGUF Q8_0"
    assert found["org/half"]["note"].startswith("incomplete: `actorium pull`")
    assert found[f"org/old@{'c' * 40}"]["note"] == "pickle is never read"
    assert all(one["fits"] is None for name, one in found.items() if "demo" not in name)


def test_what_does_not_fit(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    demo = listed(capsys, "--memory", "100MB")["(the demo model)"]
    assert demo["fits"] is False and demo["note"].endswith("100 MB are free")
    small = listed(capsys, "--memory", "300MB", "--kv-cache-bytes", "64m", "--max-num-seqs", "4")
    assert small["(the demo model)"]["fits"] is True
    gpu = listed(capsys, "--device", "cuda", "--memory", "100MB")["(the demo model)"]
    assert gpu["fits"] is False and "too few" in gpu["note"]
    assert listed(capsys, "--device", "cuda", "--memory", "8GB")["(the demo model)"]["fits"] is True


def test_folders_that_are_given(hub: FakeHub, capsys: pytest.CaptureFixture[str],
                                tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        shutil.copytree(model_dir.DEMO_MODEL, tmp_path / "models" / name)
    (tmp_path / "models" / "tiny-Q4_K_M.gguf").write_bytes(b"x" * 7)
    own = WHEEL_MODELS["smollm2"]
    wheel_model_file("smollm2").parent.mkdir(parents=True)
    with wheel_model_file("smollm2").open("wb") as file:
        file.truncate(own.member_bytes)
    found = listed(capsys, str(tmp_path / "models" / "a"), "--folder", str(tmp_path / "models"))
    assert found[str(tmp_path / "models" / "a")]["fits"] is True
    assert found[str(tmp_path / "models" / "tiny-Q4_K_M.gguf")]["format"] == "GGUF Q4_K_M"
    assert found["smollm2"]["bytes"] == own.member_bytes
    assert main(["models", str(tmp_path / "none")]) == 2
    assert main(["models", "--device", "cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["MODEL", "FORMAT", "SIZE", "FITS"]
    assert any(line.startswith("(the demo model)") and "  yes, " in line for line in out)
