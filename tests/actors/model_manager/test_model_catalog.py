"""Which models are served, with which configuration, and what their engines take by the plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers_configs import SMALL

from actorium.actors.config import sources
from actorium.actors.config.models_settings import parse_keep_alive
from actorium.actors.errors import BadConfig
from actorium.actors.model_manager.engine_plans import EnginePlans, plan_flags, planned_bytes
from actorium.actors.model_manager.model_catalog import ModelCatalog, engine_name
from actorium.actors.runtime.roles import MANAGER_ROLE, roles_of
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions
from actorium.tools.cli.plan_command import PlanOptions, make_report
from actorium.tools.cli.plan_report import plan_json


def write_model(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SMALL, **fields}))
    return folder


def catalog(tmp_path: Path, toml: str | None = None, folder: Path | None = None, **flags: Any
            ) -> ModelCatalog:
    if toml is not None:
        (tmp_path / "models.toml").write_text(toml)
        flags["models"] = str(tmp_path / "models.toml")
    if folder is not None:
        flags["models_dir"] = str(folder)
    return ModelCatalog(sources.from_kwargs(**flags), "server:1:2")


# --- the folder ---

def test_a_folder_has_models_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_model(folder / "qwen")
    for file in ("tiny.Q4_K_M.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf",
                 "mmproj-tiny.gguf", "notes.txt", "single/one.Q8_0.gguf", "both/x.gguf",
                 "both/y.gguf", ".hidden/config.json", "empty/readme.md"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("")
    models = {entry.name: entry.config.model.model for entry in catalog(tmp_path, None,
                                                                        folder).scan()}
    assert models == {
        "qwen": str(folder / "qwen"), "tiny.Q4_K_M": str(folder / "tiny.Q4_K_M.gguf"),
        "big": str(folder / "big-00001-of-00002.gguf"),
        "single": str(folder / "single/one.Q8_0.gguf"),
        "both/x": str(folder / "both/x.gguf"), "both/y": str(folder / "both/y.gguf")}


def test_a_scan_sees_what_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_model(folder / "a")
    models = catalog(tmp_path, None, folder)
    [before] = models.scan()
    write_model(folder / "b")
    (folder / "a" / "model.safetensors").write_bytes(b"x" * 1000)
    after = {entry.name: entry for entry in models.scan()}
    assert after.keys() == {"a", "b"} and after["a"].digest != before.digest
    facts = after["a"].facts
    assert facts.size == before.facts.size + 1000
    assert (facts.architecture, facts.family, facts.quantization, facts.context_length) == (
        "Qwen3ForCausalLM", "qwen3", "bfloat16", 512)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="models_dir: no such folder"):
        catalog(tmp_path, None, tmp_path / "missing")


# --- the file ---

def test_a_table_has_the_engine_s_flags_and_the_rest_is_the_server_s(tmp_path: Path) -> None:
    write_model(tmp_path / "weights" / "q")
    first, second = catalog(tmp_path, """
        [chat]
        model = "weights/q"
        served-model-name = ["gpt", "other"]
        keep_alive = "1h"
        pinned = true
        load_on_start = true
        default = true
        context-length = "2k"
        tool_call_parser = "hermes"
        optimization_level = 1

        ["org/name"]
        """, threads=3, max_num_seqs=5, port=80, api_key="secret", ledger_dir=str(tmp_path),
        keep_alive="30s", probe_port=90, name="srv").scan()
    own = first.config
    assert first.names == ("chat", "gpt", "other") == own.model.served_model_name
    assert (first.keep_alive, first.pinned, first.load_on_start, first.default) == (
        3600.0, True, True, True)
    assert own.model.model == str(tmp_path / "weights" / "q") and own.model.max_model_len == 2048
    assert (own.device.threads, own.scheduler.max_num_seqs) == (3, 5)
    assert own.device.graph_batch_sizes == "off" or own.device.enforce_eager, "of the level"
    assert own.gateway.tool_call_parser == "hermes" and own.gateway.port is None
    assert own.gateway.api_key is None and own.probes.probe_port is None
    assert own.runtime.name == "srv.chat" and own.models.engine_of == "server:1:2"
    assert own.recovery.ledger_dir == str(tmp_path / "srv.chat")
    assert "worker-0" in roles_of(own) and MANAGER_ROLE not in roles_of(own)
    assert (second.name, second.config.model.model, second.keep_alive) == (
        "org/name", "org/name", 30.0)
    assert second.digest == "", "it is not fetched yet"


def test_the_file_wins_over_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / "a").parent
    [entry] = catalog(tmp_path, '[a]\nmodel = "models/a"\nmax_model_len = 64', folder).scan()
    assert entry.config.model.max_model_len == 64


@pytest.mark.parametrize(("toml", "why"), [
    ("[a]\nport = 1", "a: port: is the server's"), ("[a]\nname = 'x'", "a: name: is the server's"),
    ("[a]\nmodels_max = 1", "a: models_max: is the server's"),
    ("[a]\nreplicas = 2", "a: replicas: is the server's"),
    ("[a]\nthreds = 1", "threds: no such setting (did you mean threads"),
    ("[a]\nthreads = 'x'", "threads: must be a whole number"),
    ("[a]\nmax_num_seqs = 0", "max_num_seqs: must be between"),
    ("[a]\nkeep_alive = 'soon'", "keep_alive: must be seconds or a duration"),
    ("[a]\npinned = 1", "pinned: must be true or false"), ("[a]\nmodel = 1", "model: must be"),
    ("a = 1", "a: must be a table"), ("[a", "is not TOML"),
    ("[a]\nserved_model_name = 'b'\n[b]", "'b' is a name of both a and b"),
    ("[a]\ndefault = true\n[b]\ndefault = true", "a and b cannot all be the default")])
def test_a_wrong_table_is_named_with_its_key(tmp_path: Path, toml: str, why: str) -> None:
    with pytest.raises(BadConfig) as caught:
        catalog(tmp_path, toml)
    assert why in caught.value.message and "models.toml" in caught.value.message
    (tmp_path / "models.toml").write_text(toml)
    config = sources.from_kwargs(models=str(tmp_path / "models.toml"))
    assert ModelCatalog(config, "", lenient=True).scan() == [], "a server that runs goes on"


def test_engines_have_names_of_their_own() -> None:
    names = [engine_name(server, model) for server in ("s", "x" * 40) for model in (
        "a", "a/b", "a-b", "A" * 100, "A" * 101, "ä", "Qwen3-0.6B")]
    assert len(set(names)) == len(names) and names[0] == "s.a" and names[6] == "s.Qwen3-0.6B"
    for name in names:
        sources.from_kwargs(name=name)  # it is a valid one


@pytest.mark.parametrize(("value", "seconds"), [
    (0, 0.0), (2.5, 2.5), (-1, -1.0), ("-1", -1.0), ("-5m", -1.0), ("5m", 300.0), ("300", 300.0),
    ("1h30m", 5400.0), (" 10s ", 10.0), ("500ms", 0.5)])
def test_durations_are_ollama_s(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", [True, None, "", "soon", "5 m", "m", [], float("nan"), 1e10])
def test_other_durations_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be seconds or a duration"):
        parse_keep_alive(value)


# --- plans ---

def test_the_plan_s_command_line_gives_the_same_settings(tmp_path: Path) -> None:
    config = sources.from_kwargs(
        "some/model", max_model_len=77, served_model_name=("a", "b"), dtype="float32",
        prefix_cache=False, kv_cache_bytes=1 << 20, optimization_level=0, passes="none",
        enforce_eager=False, null_worker=True, default_chat_template_kwargs={"x": [1]},
        override_generation_config={"top_k": 3.0}, chat_template="{{ messages }}\n-x",
        speculative="off", tenant_weights={"t": 0.5}, host_cache=5)
    read = parse("plan", list(plan_flags(config)), NoOptions).config
    for section in ("model", "memory", "scheduler", "speculation", "device", "media"):
        assert getattr(read, section) == getattr(config, section)


def test_engines_are_planned_by_the_command_once(tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "models" / "a").parent
    monkeypatch.setenv("ACTORIUM_MAX_NUM_SEQS", "0")  # which no command takes
    own = ModelCatalog(sources.resolve(sources.from_mapping(
        {"models_dir": str(folder), "kv_cache_bytes": "2m", "device": "cpu"}), None, {}), "")
    [entry] = own.scan()
    plans = EnginePlans(tmp_path)
    planned = plans.plan(entry, 0)
    assert not planned.reason
    assert planned.bytes == planned_bytes(plan_json(make_report(entry.config, PlanOptions())),
                                          entry.config) > 2 << 20
    (folder / "a" / "config.json").write_text("{")
    assert plans.plan(entry, 0) == planned, "it is known by the files as they were"
    assert EnginePlans(tmp_path).plan(entry, 0) == planned, "also to the next manager"
    [changed] = own.scan()
    refused = plans.plan(changed, 0)
    assert "config.json is not a JSON object" in refused.reason


def test_files_that_cannot_be_models_are_left_out(tmp_path: Path) -> None:
    """Lists could not show a name of other bytes than UTF-8, and a pipe would be read for ever."""
    folder = tmp_path / "models"
    for name in (b"plain", b"no \xff utf-8", b"two\nlines", b"x" * 255):
        write_model(Path(os.fsdecode(bytes(folder) + b"/" + name)))
    os.mkfifo(folder / "pipe.gguf")
    (folder / "folder.gguf").mkdir()
    names = [entry.name for entry in catalog(tmp_path, folder=folder).scan()]
    assert names == ["plain", "x" * 255]
