"""Fetching models by name, from a hub on loopback."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_hub import INDEX, FakeHub, commit_of, file_hash, hub, model_files
from helpers_imports import loaded_by

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import hub_download, model_dir
from actorium.actors.models.model_names import ModelName, hub_cache, parse_name
from actorium.actors.models.obtain import is_whole, obtain, with_model_path
from actorium.actors.tokenizer.chat_template import load
from actorium.tools.cli import main

__all__ = ["hub"]
WEIGHTS = "model.safetensors"


def fetched(model: str, **how: Any) -> Path:
    name = parse_name(model)
    assert name is not None
    return obtain(name, hub_cache(), **how)


def refused(model: str, **how: Any) -> str:
    """The one line that a fetch fails with."""
    with pytest.raises(BadModel) as caught:
        fetched(model, **how)
    assert "\n" not in caught.value.message and caught.value.message.startswith("model: ")
    return caught.value.message


def test_a_model_comes_into_the_hf_cache_with_what_an_engine_reads(
        hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    files = model_files()
    commit = hub.add("org/name", files)
    folder = fetched("org/name")
    assert folder == hub_cache() / "models--org--name" / "snapshots" / commit
    assert {one.name for one in folder.iterdir()} == set(files) - {"README.md", "training_args.bin"}
    for one in folder.iterdir():
        assert one.is_symlink() and one.read_bytes() == files[one.name]
        assert os.readlink(one) == f"../../blobs/{file_hash(one.name, files[one.name])}"
    assert (folder.parents[1] / "refs" / "main").read_text() == commit
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching org/name (5 files), 5 KB" and lines[1].startswith("fetched org/na")
    asked = len(hub.asked)
    assert fetched("org/name") == model_dir.resolve("org/name") == folder
    assert len(hub.asked) == asked, "what is there needs no hub"


def test_all_chat_templates_come(hub: FakeHub) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    hub.add("org/name", model_files() | {name: b"{{ tools }}"})
    templates = load(fetched("org/name"), None).info()["chat_templates"]
    assert templates["tool_use"] == "{{ tools }}"


def test_huggingface_hub_finds_what_was_fetched(hub: FakeHub) -> None:
    from huggingface_hub import hf_hub_download

    hub.add("org/name", model_files())
    folder = fetched("org/name")
    found = hf_hub_download("org/name", WEIGHTS, cache_dir=hub_cache(), local_files_only=True)
    assert Path(found) == folder / WEIGHTS


def test_what_huggingface_hub_fetched_is_not_fetched_again(hub: FakeHub) -> None:
    from huggingface_hub import hf_hub_download

    hub.add("org/name", model_files())
    for name in (WEIGHTS, "config.json", "tokenizer.json"):
        file = hf_hub_download("org/name", name, cache_dir=hub_cache(), endpoint=hub.url)
    hub.asked.clear()
    assert fetched("org/name") == Path(file).parent
    assert hub.asked == []


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    files = model_files(shards=3)
    hub.add("org/big", files | {"consolidated.safetensors": b"x" * 99})
    folder = fetched("org/big")
    assert sorted(one.name for one in folder.glob("*.safetensors")) == sorted(
        one for one in files if one.endswith(".safetensors"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert not is_whole(folder)
    assert is_whole(fetched("org/big"))


def test_plans_and_random_weights_need_no_weights(hub: FakeHub) -> None:
    hub.add("org/name", model_files())
    folder = fetched("org/name", weights=False)
    assert not (folder / WEIGHTS).exists() and (folder / "config.json").exists()
    assert hub.sent(WEIGHTS) == []
    assert fetched("org/name", weights=False) == folder
    assert (fetched("org/name") / WEIGHTS).exists()


def test_plans_of_a_model_in_parts_need_its_index_alone(hub: FakeHub) -> None:
    hub.add("org/big", model_files(shards=3))
    folder = fetched("org/big", weights=False)
    assert [one.name for one in folder.glob("model*")] == [INDEX]


@pytest.mark.parametrize("names", [
    ("weights.safetensors",),
    ("pytorch_model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.safetensors"),
])
def test_weights_of_another_name_and_without_an_index(hub: FakeHub, names: tuple[str, ...]) -> None:
    files = model_files()
    content = files.pop(WEIGHTS)
    hub.add("org/name", files | dict.fromkeys(names, content))
    folder = fetched("org/name")
    assert sorted(one.name for one in folder.glob("*.safetensors")) == sorted(names)
    (folder / names[-1]).unlink()
    assert not is_whole(folder)


def test_a_plan_is_that_of_what_is_served(hub: FakeHub) -> None:
    """A config.json beside GGUF files does not say which of them is meant."""
    files = {name: content for name, content in model_files().items() if name != WEIGHTS}
    hub.add("org/both", files | {"a-Q4_K_M.gguf": b"4", "a-Q8_0.gguf": b"8"})
    assert refused("org/both") == refused("org/both", weights=False)
    assert "has several GGUF files" in refused("org/both", weights=False)
    hub.add("org/one", files | {"a-Q4_K_M.gguf": b"4"})
    assert fetched("org/one", weights=False) == fetched("org/one")
    assert fetched("org/one").name == "a-Q4_K_M.gguf"


def test_revisions(hub: FakeHub) -> None:
    hub.add("org/name", model_files())
    hub.add("org/name", model_files(100), "refs/pr/1")
    hub.add("org/name", model_files(200), "v2")
    sizes = {name: (fetched(name) / WEIGHTS).stat().st_size for name in (
        "org/name", "org/name@refs/pr/1", f"org/name@{commit_of('org/name@v2')}")}
    assert list(sizes.values()) == [5000, 100, 200]
    found = with_model_path(Config(model=ModelConfig(model="org/name", revision="v2")))
    assert found.model.model.endswith(commit_of("org/name@v2"))
    assert refused("org/name@v3") == f"model: 'org/name' has no revision 'v3' at {hub.url}"
    with pytest.raises(BadConfig, match="revision: 'v2' is not that of 'org/name@v3'"):
        with_model_path(Config(model=ModelConfig(model="org/name@v3", revision="v2")))


def test_a_branch_that_moved_is_fetched_when_it_is_asked_for(hub: FakeHub) -> None:
    hub.add("org/name", model_files())
    folder = fetched("org/name")
    (folder.parents[1] / "refs" / "main").write_text("0" * 40)
    assert hub_download.fetch(ModelName("org/name"), hub_cache()) == folder
    assert (folder.parents[1] / "refs" / "main").read_text() == folder.name
    assert len(hub.sent(WEIGHTS)) == 1, "its files are there"


# --- breaks ---------------------------------------------------------------------------------------

def test_a_connection_that_breaks_is_taken_up_again(hub: FakeHub) -> None:
    files = model_files(300_000)
    hub.add("org/name", files)
    hub.break_after[WEIGHTS] = [100_000, 50_000, 0]
    assert (fetched("org/name") / WEIGHTS).read_bytes() == files[WEIGHTS]
    ranges = hub.sent(WEIGHTS)
    assert ranges == ["", "bytes=100000-", "bytes=150000-", "bytes=150000-"]


def test_what_came_before_the_end_is_not_fetched_again(
        hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model_files(300_000)
    hub.add("org/name", files)
    hub.break_after[WEIGHTS] = [100_000] + [0] * hub_download.ATTEMPTS
    message = refused("org/name")
    assert "broke off in model.safetensors after 100,000 of 300,000 bytes" in message
    assert message.endswith("the same command goes on from there")
    assert not (hub_cache() / "models--org--name" / "refs").exists()
    hub.asked.clear()
    whole = [one.name for one in hub_cache().glob("models--org--name/snapshots/*/*")]
    assert (fetched("org/name") / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert hub.sent(WEIGHTS) == ["bytes=100000-"]
    assert whole and not any(hub.sent(name) for name in whole)
    assert not list(hub_cache().rglob("*.incomplete"))


def test_a_server_without_ranges_begins_anew(hub: FakeHub) -> None:
    files = model_files(300_000)
    hub.add("org/name", files)
    hub.ranges = False
    hub.break_after[WEIGHTS] = [100_000]
    assert (fetched("org/name") / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_a_wrong_file_is_thrown_away(hub: FakeHub) -> None:
    for wrong, repo in ((WEIGHTS, "org/one"), ("config.json", "org/two")):
        hub.add(repo, model_files())
        hub.damaged = {wrong}
        assert refused(repo).startswith(f"model: {wrong} of {repo!r} came with the hash ")
        hub.damaged.clear()
        assert is_whole(fetched(repo))


def test_a_file_of_another_size_is_thrown_away(hub: FakeHub) -> None:
    files = model_files()
    hub.add("org/name", files)
    real, hub.listing = hub.listing, lambda *of: lied(real(*of))  # type: ignore[method-assign]

    def lied(listing: dict[str, Any]) -> dict[str, Any]:
        for one in listing["siblings"]:
            if one["rfilename"] == WEIGHTS:
                one["lfs"]["size"] = 4000
        return listing

    assert "came with 5,000 bytes instead of 4,000" in refused("org/name")


def test_a_partial_file_of_something_else_does_not_stay(hub: FakeHub) -> None:
    files = model_files()
    hub.add("org/name", files)
    blobs = hub_cache() / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{file_hash(WEIGHTS, files[WEIGHTS])}.incomplete"
    partial.write_bytes(b"?" * 9000)
    assert is_whole(fetched("org/name"))
    assert hub.sent(WEIGHTS) == [""]


def test_two_who_fetch_the_same_fetch_it_once(hub: FakeHub) -> None:
    hub.add("org/name", model_files(200_000))
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetched("org/name")))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1 and is_whole(folders[0])
    assert len(hub.sent(WEIGHTS)) == 1


# --- refusals -------------------------------------------------------------------------------------

class Case(NamedTuple):
    """A token, and what is said of a repository."""

    token: str
    words: str


@pytest.mark.parametrize("case", [
    Case("", "is gated (status 401): accept its terms at {hub}/org/gated, then give a token of "
             "that account: none is there: set HF_TOKEN, or log in with `hf auth login`"),
    Case("other", "is gated (status 403): accept its terms at {hub}/org/gated; the token in "
                  "HF_TOKEN is not of an account that has"),
    Case("invalid", "(status 401): the token in HF_TOKEN is not valid, or may not read it")])
def test_gated_models_tell_which_token_is_missing(
        hub: FakeHub, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", model_files())
    hub.gated, hub.tokens = {"org/gated"}, {"org/gated": "right"}
    if case.token:
        monkeypatch.setenv("HF_TOKEN", case.token)
    message = refused("org/gated")
    assert case.words.format(hub=hub.url) in message and "other" not in message
    monkeypatch.setenv("HF_TOKEN", "right")
    assert is_whole(fetched("org/gated"))


def test_the_token_of_a_login_is_sent_and_never_to_another_host(
        hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/private", model_files())
    hub.tokens, hub.redirects = {"org/private": "right"}, True
    assert "no such repository, or a private one (status 401)" in refused("org/private")
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text("wrong\n")
    message = refused("org/private")
    assert f"the token in {tmp_path}/hf/token does not open it" in message
    (tmp_path / "hf" / "token").write_text("right\n")
    assert is_whole(fetched("org/private"))
    elsewhere = [headers for _, path, headers in hub.asked if path.startswith("/cdn/")]
    assert elsewhere and not any("authorization" in headers for headers in elsewhere)


@pytest.mark.parametrize(("status", "words"), [
    (403, "(status 403): a token is needed, and none is there"),
    (500, "answers for 'org/name' with status 500"), (429, "with status 429")])
def test_other_refusals(hub: FakeHub, status: int, words: str) -> None:
    hub.add("org/name", model_files())
    hub.status["org/name"] = status
    assert words in refused("org/name")


def test_a_file_that_the_hub_cannot_serve(hub: FakeHub) -> None:
    hub.add("org/name", model_files())
    hub.status[WEIGHTS] = 503
    assert "after 0 of 5,000 bytes (status 503)" in refused("org/name")
    hub.status[WEIGHTS] = 404
    assert "with status 404" in refused("org/name")


def test_no_such_repository(hub: FakeHub) -> None:
    assert refused("org/missing").startswith(
        f"model: 'org/missing' is no directory here, and {hub.url} has no such repository")


def test_a_name_with_a_slip_gets_a_hint(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what is fetched by another way, and from what lies here."""
    hub.add("org/name", model_files())
    fetched("org/name")
    for wrong, right in (("smolm2", "smollm2"), ("org/nmae", "org/name"), ("SmolLM2", "smollm2")):
        assert refused(wrong).endswith(f" (did you mean {right}?)"), refused(wrong)
    assert "did you mean" not in refused("somebody/else")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("smolm2").endswith("forbids to fetch it (did you mean smollm2?)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    told = refused("smolm2")
    assert "cannot be reached" in told and told.endswith(" (did you mean smollm2?)")


def test_pickles_are_never_fetched(hub: FakeHub) -> None:
    hub.add("org/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "has its weights in pickle alone (pytorch_model.bin)" in refused("org/old")
    hub.add("org/data", {"config.json": b"{}", "readme.txt": b""})
    assert "has neither model.safetensors nor a GGUF file" in refused("org/data")
    hub.add("org/none", {})
    assert "has neither config.json nor a GGUF file" in refused("org/none")
    assert hub.sent("pytorch_model.bin") == []


def test_no_space(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", model_files())
    free = type("Usage", (), {"free": hub_download.SPARE_BYTES + 4999})
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda _: free)
    message = refused("org/name")
    assert message.startswith("model: no space for 'org/name': 5 KB are still to come, and 67 MB")
    assert hub.sent(WEIGHTS) == []


def test_a_disk_that_fills_up_meanwhile(hub: FakeHub,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", model_files())

    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: FullDisk()
                        if path.name.endswith(".incomplete") else real(path, *how, **more))
    assert refused("org/name") == ("model: 'org/name' cannot be written into the HF cache: no "
                                   "space is left; what has come is kept")


def test_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", model_files())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("org/name") == (
        f"model: 'org/name' is neither a directory nor, as a whole, in the HF cache {hub_cache()}, "
        "and HF_HUB_OFFLINE forbids to fetch it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    folder = fetched("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert fetched("org/name") == folder and hub.asked == []
    (folder / WEIGHTS).unlink()
    assert "as a whole" in refused("org/name")


def test_no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "and http://127.0.0.1:1 cannot be reached: " in refused("org/name")


@pytest.mark.parametrize("change", [
    {"sha": "../../x"}, {"sha": None}, {"siblings": [{"rfilename": 7}]}, {"siblings": "x"}])
def test_an_answer_that_is_none_of_a_hub(hub: FakeHub,
                                         change: dict[str, Any]) -> None:
    hub.add("org/name", model_files())
    real = hub.listing
    hub.listing = lambda *of: real(*of) | change  # type: ignore[method-assign]
    refused("org/name")
    assert not (hub_cache() / "models--org--name").exists()


def test_files_outside_the_repository_are_not_fetched(hub: FakeHub) -> None:
    files = model_files() | {"../../evil.gguf": b"x", "/etc/evil.gguf": b"x"}
    files[INDEX] = b'{"weight_map": {"a": "../model.safetensors"}}'
    hub.add("org/name", files)
    assert "names '../model.safetensors', which the repository does not hold" in refused("org/name")
    assert not list(hub_cache().rglob("evil*"))


def test_a_mirror_that_tells_neither_sizes_nor_hashes(hub: FakeHub) -> None:
    hub.add("org/name", model_files())
    hub.metadata = False
    assert is_whole(fetched("org/name"))
    hub.add("org/other", model_files())
    hub.damaged = {WEIGHTS}
    assert "came with the hash" in refused("org/other")


# --- GGUF -----------------------------------------------------------------------------------------

KINDS = {"Model-1B-Q4_K_M.gguf": b"k" * 100, "Model-1B-Q8_0.gguf": b"8" * 200,
         "Model-1B-f16.gguf": b"f" * 300, "mmproj-f16.gguf": b"m", "config.json": b"{}"}


def test_one_gguf_file_is_chosen_by_its_quantisation(hub: FakeHub) -> None:
    hub.add("org/gguf", KINDS)
    for wanted in ("Q4_K_M", "q4_k_m", "Model-1B-Q4_K_M.gguf"):
        file = fetched(f"org/gguf:{wanted}")
        assert file.name == "Model-1B-Q4_K_M.gguf" and file.read_bytes() == b"k" * 100
    assert hub.sent("Model-1B-Q8_0.gguf") == [] and len(hub.sent("Model-1B-Q4_K_M.gguf")) == 1
    found = refused("org/gguf:Q2_K")
    assert found == ("model: 'org/gguf:Q2_K' has no such GGUF file; name one as org/gguf:KIND, of "
                     "F16, Q4_K_M, Q8_0")


def test_gguf_files_of_which_none_was_chosen(hub: FakeHub) -> None:
    hub.add("org/gguf", KINDS)
    assert refused("org/gguf") == ("model: 'org/gguf' has several GGUF files; name one as "
                                   "org/gguf:KIND, of F16, Q4_K_M, Q8_0")
    hub.add("org/alone", {"README.md": b"", "tiny.gguf": b"g" * 10})
    assert fetched("org/alone").name == "tiny.gguf"
    hub.add("org/alike", {"a-Q4_0.gguf": b"a", "b-Q4_0.gguf": b"b"})
    assert refused("org/alike:Q4_0").endswith("of a-Q4_0.gguf, b-Q4_0.gguf")
    hub.add("org/folder", {"Q6_K/m-Q6_K.gguf": b"6" * 50})
    assert fetched("org/folder:Q6_K").read_bytes() == b"6" * 50
    hub.add("org/tensors", model_files())
    assert "has no GGUF files" in refused("org/tensors:Q4_0")


def test_a_gguf_model_in_several_files(hub: FakeHub) -> None:
    parts = {f"Q8_0/m-Q8_0-0000{i}-of-00003.gguf": b"p" * i for i in (1, 2, 3)}
    hub.add("org/parts", parts | {"m-Q4_0.gguf": b"q"})
    file = fetched("org/parts:Q8_0")
    assert file.name == "m-Q8_0-00001-of-00003.gguf"
    assert [len(one.read_bytes()) for one in sorted(file.parent.iterdir())] == [1, 2, 3]
    (file.parent / "m-Q8_0-00002-of-00003.gguf").unlink()
    assert fetched("org/parts:Q8_0") == file and is_whole(file)
    assert hub.sent("m-Q4_0.gguf") == []
    parts.pop("Q8_0/m-Q8_0-00002-of-00003.gguf")
    hub.add("org/lost", parts)
    assert refused("org/lost") == \
        f"model: 'org/lost' lacks m-Q8_0-00002-of-00003.gguf at {hub.url}"


def test_a_gguf_file_that_is_there_needs_no_hub(hub: FakeHub) -> None:
    hub.add("org/gguf", KINDS)
    file = fetched("org/gguf@main:Q8_0")
    hub.asked.clear()
    assert fetched("org/gguf:Q8_0") == file
    assert hub.asked == []


# --- who asks -------------------------------------------------------------------------------------

def test_a_path_wins_over_a_name(hub: FakeHub, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    config = Config(model=ModelConfig(model="org/name"))
    assert with_model_path(config) is config
    assert hub.asked == []


def test_actors_get_a_path_and_clients_see_the_name(hub: FakeHub,
                                                    tmp_path: Path) -> None:
    hub.add("org/name", model_files())
    config = with_model_path(Config(model=ModelConfig(model="org/name@main")))
    assert config.model.served_model_name == ("org/name@main",)
    assert model_dir.resolve(config.model.model) == Path(config.model.model)
    mine = with_model_path(Config(model=ModelConfig(
        model="org/name", served_model_name=("mine",), download_dir=str(tmp_path / "elsewhere"))))
    assert mine.model.served_model_name == ("mine",)
    assert mine.model.model.startswith(str(tmp_path / "elsewhere" / "models--org--name"))


def test_the_command_line(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "org/name"]) == main(["plan", "org/name@v1"]) == 2
    assert all(line.startswith("actorium: error: model: 'org/name") and "no such repository" in line
               for line in capsys.readouterr().err.splitlines())
    files = {one.name: one.read_bytes() for one in model_dir.DEMO_MODEL.iterdir()}
    hub.add("org/demo", files)
    assert main(["plan", "org/demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "org/demo"
    assert hub.sent(WEIGHTS) == []


def test_nothing_is_loaded_for_a_path_or_for_what_is_in_the_cache(
        hub: FakeHub) -> None:
    hub.add("org/name", model_files())
    folder = fetched("org/name")
    for model in (str(folder), "org/name", ""):
        loaded = loaded_by(
            "from actorium.actors.models.obtain import with_model_path\n"
            "from actorium.actors.config.tree import Config, ModelConfig\n"
            f"with_model_path(Config(model=ModelConfig(model={model!r})))")
        assert not loaded & {"huggingface_hub", "httpx", "httpx2", "ssl", "asyncio"}


def test_a_fetch_that_is_interrupted_ends_soon(hub: FakeHub,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", model_files(200_000))
    hub.break_after[WEIGHTS] = [1] * 10_000
    monkeypatch.setattr(hub_download, "PAUSE_SECONDS", 0.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_download, "as_completed", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetched("org/name")
    assert time.monotonic() - began < 5
    assert not (hub_cache() / "models--org--name" / "refs").exists()
