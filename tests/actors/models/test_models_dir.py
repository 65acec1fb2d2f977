"""Finding model directories and reading their JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import model_dir as models
from actorium.actors.models.encoders import encoder_family
from actorium.actors.models.model_classes import MODEL_TYPES, WITH_UNUSED
from actorium.actors.models.model_dir import known_eos_ids
from actorium.actors.models.model_names import ModelName, parse_name, repository_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def snapshot(cache: Path, name: str, sha: str, main: str | None = None) -> Path:
    repo = cache / f"models--{name.replace('/', '--')}"
    path = repo / "snapshots" / sha
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    if main is not None:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(main + "\n")
    return path


def test_a_directory_and_the_demo_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == tmp_path
    assert models.resolve("").name == "demo_model"
    assert models.vocab_size(models.read_config(models.resolve(""))) > 0


def test_the_hub_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot(cache, "org/name", "aaa")
    right = snapshot(cache, "org/name", "bbb", main="bbb")
    assert models.resolve("org/name") == right
    alone = snapshot(cache, "gpt2", "ccc")
    assert models.resolve("gpt2") == alone
    snapshot(cache, "org/half", "ddd", main="eee")
    with pytest.raises(BadModel, match="no usable snapshot"):
        models.resolve("org/half")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    there = snapshot(tmp_path / "other", "org/name", "fff", main="fff")
    assert models.resolve("org/name") == there


def test_a_name_is_read_as_it_is_written() -> None:
    assert parse_name("gpt2") == ModelName("gpt2")
    assert parse_name("org/name@refs/pr/1:Q4_K_M") == ModelName("org/name", "refs/pr/1", "Q4_K_M")
    for path in ("", "/org/name", "./name", "a/b/c", "org/na--me", "org/..", "~/x", "model.gguf",
                 "org/name@", "org/name:", "org/name@../x", "a b", "org/config.json"):
        assert parse_name(path) is None, path
    for name in ("gpt2", "org/name@v1:f.gguf"):
        assert str(parse_name(name)) == name


def test_names_and_revisions_in_the_cache(cache: Path) -> None:
    main = snapshot(cache, "org/name", "a" * 40, main="a" * 40)
    other = snapshot(cache, "org/name", "b" * 40)
    (cache / "models--org--name" / "refs" / "v1").write_text("b" * 40)
    assert models.resolve("org/name@v1") == models.resolve("org/name@" + "b" * 40) == other
    assert models.resolve("org/name@main") == main
    with pytest.raises(BadModel, match="'org/name@v2' has no usable snapshot"):
        models.resolve("org/name@v2")
    assert repository_of(main) == repository_of(main / "model.gguf") == "org/name"
    assert repository_of(cache) == repository_of(Path("org/name")) == ""


def test_files_that_all_repositories_of_the_cache_share(cache: Path) -> None:
    folder = snapshot(cache, "org/name", "aaa", main="aaa")
    shared = cache / "blobs" / "ab" / "abc"
    shared.parent.mkdir(parents=True)
    shared.write_text('{"vocab_size": 5}')
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(shared)
    assert models.read_config(models.resolve("org/name")) == {"vocab_size": 5}
    outside = cache.parent / "secret.json"
    outside.write_text("{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(outside)
    with pytest.raises(BadModel, match="leads out of the model's directory"):
        models.resolve("org/name")


@pytest.mark.parametrize("model", ["org/missing", "./missing", "/no/such/dir", "a/b/c", "../x y"])
def test_a_missing_model_is_a_one_line_error(cache: Path, model: str) -> None:
    with pytest.raises(BadModel) as caught:
        models.resolve(model)
    assert "\n" not in str(caught.value) and model.strip("./") in str(caught.value)


def test_directories_and_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"no config\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(BadModel, match="is a file"):
        models.resolve(str(tmp_path / "model.bin"))
    for content in ("{", "[]", '"x"', "[" * 5000, "\xff"):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(BadModel, match="not a JSON object"):
            models.read_config(tmp_path)
    with pytest.raises(BadModel, match="is missing"):
        models.read_config(tmp_path / "nowhere")


def test_generation_defaults_and_eos(tmp_path: Path) -> None:
    assert models.generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(
        {"temperature": 0.6, "top_k": 20, "top_p": True, "do_sample": True, "max_new_tokens": 9,
         "eos_token_id": [5, 6, 5]}))
    found = models.generation_defaults(tmp_path)
    assert found == {"temperature": 0.6, "top_k": 20, "max_tokens": 9, "eos_token_id": [5, 6, 5]}
    assert models.eos_ids({"eos_token_id": 1}, found) == (5, 6)
    assert models.eos_ids({"eos_token_id": 1}, {}) == (1,)
    assert models.eos_ids({"text_config": {"eos_token_id": 3}}, {}) == (3,)
    assert models.eos_ids({}, {}) == ()
    for bad in ("x", [1, None], 2**40, [True]):
        with pytest.raises(BadModel, match="eos_token_id"):
            models.eos_ids({"eos_token_id": bad}, {})
    own = {"eos_token_id": 1}
    for config, generation, ids in ((own, {"eos_token_id": [5, 99, -1]}, (5,)),
                                    (own, {"eos_token_id": 99}, (1,)), (own, {}, (1,)),
                                    ({"eos_token_id": 9}, {}, ())):
        assert known_eos_ids(tmp_path, config, generation, 9) == ids



@pytest.mark.parametrize(("folder", "gguf", "name"), [
    ("SmolLM2-135M-Instruct", "", "SmolLM2-135M-Instruct"),
    ("models--HuggingFaceTB--SmolLM2-1.7B-Instruct/snapshots/" + "a" * 40, "",
     "SmolLM2-1.7B-Instruct"),
    ("3f2a", "/cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
    ("TinyLlama-1.1B-Chat-v1.0", "", "TinyLlama-1.1B-Chat"), ("SmolLM2-135M", "", ""),
    ("mySmolLM2-135M-Instruct", "", ""), ("smollm2", "", ""), ("Qwen3-0.6B", "", "")])
def test_sampling_that_a_models_maker_recommends(tmp_path: Path, folder: str, gguf: str,
                                                 name: str) -> None:
    """Where the files name none; whatever else is said, by file or flag, wins."""
    own = tmp_path / folder
    own.mkdir(parents=True)
    (own / "config.json").write_text(json.dumps({"gguf": {"file": gguf}} if gguf else {}))
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    if not name:
        assert models.recommended_sampling(own) is None
        assert models.sampling_defaults(own, "auto", {}) == {"eos_token_id": 5}
        return
    found = models.recommended_sampling(own)
    assert found is not None and found[0] == name and found[1]["temperature"] < 1
    assert models.sampling_defaults(own, "auto", {}) == {**found[1], "eos_token_id": 5}
    assert models.sampling_defaults(own, "vllm", {}) == {"eos_token_id": 5}
    assert models.sampling_defaults(own, "auto", {"temperature": 0.7})["temperature"] == 0.7
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert models.recommended_sampling(own) is None
    assert models.sampling_defaults(own, "auto", {}) == {"temperature": 0.6}


def test_sampling_defaults_of_the_model_of_a_folder_or_neutral(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, values in ((own, {"temperature": 0.6, "eos_token_id": 5}), (other, {"top_k": 3})):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps(values))
    assert models.sampling_defaults(own, "auto", {}) == {"temperature": 0.6, "eos_token_id": 5}
    assert models.sampling_defaults(own, "vllm", {}) == {"eos_token_id": 5}
    assert models.sampling_defaults(own, str(other), {}) == {"top_k": 3, "eos_token_id": 5}
    found = models.sampling_defaults(own, "auto", {"temperature": 0.5, "top_k": 4.0})
    assert found == {"temperature": 0.5, "top_k": 4, "eos_token_id": 5}
    assert type(found["top_k"]) is int


@pytest.mark.parametrize(("config", "limit"), [
    ({"max_position_embeddings": 4096}, 4096),
    ({"n_positions": 1024}, 1024),
    ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 9}, 512),
    ({"max_position_embeddings": 131072,
      "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                       "original_max_position_embeddings": 8192}}, 131072),
    ({"max_position_embeddings": 32768,
      "rope_scaling": {"type": "yarn", "factor": 4.0,
                       "original_max_position_embeddings": 32768}}, 131072),
    ({"max_position_embeddings": 40960,
      "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 40960),
    ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
    ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2}},
     8192),
    ({"max_position_embeddings": 8192, "rope_scaling": {
        "type": "linear", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
    ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 0.5}}, 4096),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
        "max_position_embeddings": 131_072, "rope_scaling": {"type": "linear", "factor": 8.0}}},
     131_072),
    ({"model_type": "gemma3_text", "max_position_embeddings": 32_768,
      "rope_scaling": {"type": "linear", "factor": 8.0}}, 32_768),
    ({"architectures": ["LlamaForCausalLM"], "max_seq_len": 700}, 700),
    ({"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": None}, 32_768),
    ({"architectures": ["NobodyForCausalLM"]}, 2048),
    ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
])
def test_context_length(config: dict[str, Any], limit: int) -> None:
    assert models.max_model_len(config) == limit
    assert models.max_model_len(config, 100) == 100
    with pytest.raises(BadConfig, match="max_model_len"):
        models.max_model_len(config, limit + 1)


def test_missing_numbers_are_named() -> None:
    for call, name, absent in ((models.max_model_len, "max_position_embeddings", ()),
                               (models.vocab_size, "vocab_size", (None,))):
        for value in (*absent, 0, -1, "x", True, 1.5):
            with pytest.raises(BadModel, match=name):
                call({name: value})


@pytest.mark.parametrize(("config", "name"), [
    ({"architectures": None, "model_type": "llama"}, "LlamaForCausalLM"),
    ({"architectures": [], "model_type": "qwen3_moe"}, "Qwen3MoeForCausalLM"),
    ({"architectures": ["LlamaModel"], "model_type": "llama"}, "LlamaForCausalLM"),
    ({"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
    ({"architectures": ["LlamaModel"]}, "LlamaModel"),
    ({"architectures": ["GPT2Model"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
    ({"architectures": ["MPTForCausalLM"], "model_type": "mpt"}, "MptForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
     "LlamaForSequenceClassification"),
    ({"architectures": ["BertModel"], "model_type": "llama"}, "BertModel"),
    ({"model_type": "bert"}, "BertModel"), ({"model_type": "t5"}, ""),
    ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
])
def test_the_class_that_a_config_means(config: dict[str, Any], name: str) -> None:
    assert models.architecture(config) == name


def test_classes_and_their_longest_sequences_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    for kind, own in MODEL_TYPES.items():
        if encoder_family(own.name):
            assert own.name == MODEL_MAPPING_NAMES.get(kind, "NewModel")
            most = CONFIG_MAPPING["gte" if kind == "new" else kind]().max_position_embeddings
            assert own.positions == most - 2 * own.name.startswith(WITH_UNUSED)
            continue
        runs = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)  # InternLM3 by Llama's class
        assert own.name in ("InternLM3ForCausalLM" if kind == "internlm3" else runs,
                            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind))
        text = CONFIG_MAPPING[kind]().get_text_config()
        # A model of recurrent layers alone has no longest sequence there, nor has BLOOM, which was
        # trained on 2,048 tokens.
        most = getattr(text, "max_seq_len", 2048 if kind == "bloom" else 32_768)
        assert own.positions == getattr(text, "max_position_embeddings", most), kind


def test_defaults_of_gemma_3s_text_config_are_filled_in() -> None:
    config = {"text_config": {"model_type": "gemma3_text", "hidden_size": 8}}
    assert models.vocab_size(config) == 262_208
    assert models.max_model_len(config) == 131_072
    config["text_config"]["vocab_size"] = 300
    assert models.vocab_size(config) == 300


def test_a_folder_of_gguf_files_names_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "a-Q4_0.gguf").touch()
    with pytest.raises(BadModel) as error:
        models.resolve(str(tmp_path))
    assert error.value.message.endswith(f"; name one of its GGUF files: {tmp_path}/a-Q4_0.gguf")
    (tmp_path / "a-Q4_0.gguf").unlink()
    with pytest.raises(BadModel, match=r"`actorium models FOLDER` lists the models below"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.gguf"])
def test_a_pointer_of_git_lfs_is_not_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9")
    with pytest.raises(BadModel, match=f"{name} is a pointer of Git LFS.*`git lfs pull`"):
        models.resolve(str(tmp_path if name == "config.json" else tmp_path / name))
