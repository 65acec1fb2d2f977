"""Which flags may change while requests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from actorium.actors.config import sources as settings
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.upgrade_command import (
    MAY_CHANGE,
    UpgradeOptions,
    _other_python,
    with_changes,
)

BEFORE = settings.from_kwargs("", port=8123, gateways=2, max_num_seqs=8, page_size=32)


def changed(*flags: str, before: Config = BEFORE) -> Config:
    parsed = parse("actorium upgrade [NAME]", flags, UpgradeOptions, model=False)
    config, names = with_changes(before, parsed)
    assert config == before or names
    return config


def test_what_is_not_given_stays(tmp_path: Path) -> None:
    assert changed() == changed("--name", "other", "--run-dir", "/tmp/x") == BEFORE
    assert changed("--block-size", "32", "--port", "8123") == BEFORE
    after = changed("--max-num-seqs", "16", "--api-server-count", "3")
    assert after == replace(BEFORE, scheduler=replace(BEFORE.scheduler, max_num_seqs=16),
                            gateway=replace(BEFORE.gateway, gateways=3))
    file = tmp_path / "engine.toml"
    file.write_text("[scheduler]\nmax_num_seqs = 4\n[gateway]\nport = 8123\n")
    assert changed("--config", str(file)).scheduler.max_num_seqs == 4
    assert changed("--config", str(file), "--max-num-seqs", "5").scheduler.max_num_seqs == 5


@pytest.mark.parametrize(("flags", "why"), [
    (["--block-size", "16"], "--block-size: cannot change while requests run (it is 32)"),
    (["--exact", "on"], "--exact: cannot change"), (["--model", "x"], "--model: cannot change"),
    (["--api-key", "k"], "--api-key: cannot change"),
    (["--gateways", "1"], "--gateways: cannot become less than the 2"),
    (["--max-connections", "9"], "--max-connections: cannot become less than the 4096")])
def test_what_must_stay_is_named(flags: list[str], why: str) -> None:
    with pytest.raises(BadConfig) as caught:
        changed(*flags)
    assert caught.value.message.startswith(why)


def test_a_key_is_not_shown() -> None:
    before = settings.from_kwargs("", port=8123, api_key="secret-before")
    with pytest.raises(BadConfig) as caught:
        changed("--api-key", "other", before=before)
    assert "secret" not in caught.value.message


def test_the_table_names_settings() -> None:
    assert set(settings.fields()) >= MAY_CHANGE


def test_an_interpreter_without_actorium(tmp_path: Path) -> None:
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho 'No module named actorium' >&2\nexit 1\n")
    false.chmod(0o700)
    with pytest.raises(BadConfig, match="runs no actorium: No module named actorium"):
        _other_python(["NAME", "--python", str(false)])
    with pytest.raises(BadConfig, match="--python: /nowhere: No such file"):
        _other_python(["--python=/nowhere"])
    assert _other_python(["NAME", "--max-num-seqs", "4"]) == (None, ["NAME", "--max-num-seqs", "4"])
