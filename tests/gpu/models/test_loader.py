"""Reading checkpoints: shards, casts, dummy weights, and one clear line for each kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import CPU, Seq, Stepper, load, same_logits, write_checkpoint
from safetensors.torch import load_file, save_file

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.model_files import INDEX, SINGLE
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.tensor_specs import TensorSpec
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.pools import KVPagePool, page_bytes
from actorium.gpu.weights.random_weights import random_tensors
from actorium.gpu.weights.safetensors_reader import DeviceReader, by_file, mapped


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def retensor(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def refused(path: Path, *words: str, **model: Any) -> None:
    with pytest.raises(BadModel) as failure:
        load(path, **model)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def logits(model: Any) -> torch.Tensor:
    return Stepper(model, pages=8).step([(Seq([5, 9, 30, 2]), 4)])


def test_shards_and_progress(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one")
    write_checkpoint(tmp_path / "many", max_shard_size="60KB")
    seen: list[tuple[str, int, int]] = []
    many = load_model(tmp_path / "many", Config(), CPU, lambda *at: seen.append(at))
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert seen == [(s.name, i, len(shards)) for i, s in enumerate(shards, 1)]
    assert same_logits(logits(many), logits(load(tmp_path / "one")))


def test_dtype_cast(checkpoint: Path) -> None:
    assert load(checkpoint).dtype is torch.float32
    half = load(checkpoint, dtype="bfloat16")
    assert half.embed.dtype is torch.bfloat16
    assert torch.allclose(logits(half), logits(load(checkpoint)), atol=0.25)


def test_dummy_weights_need_config_alone(checkpoint: Path) -> None:
    (checkpoint / SINGLE).unlink()
    one, same = (load(checkpoint, load_format="dummy", seed=3) for _ in range(2))
    other = load(checkpoint, load_format="dummy", seed=4)
    assert same_logits(logits(one), logits(same))
    assert not same_logits(logits(one), logits(other))
    assert logits(one).isfinite().all()


def test_missing_files(checkpoint: Path) -> None:
    refused(checkpoint / "nowhere", "nowhere", "no such directory")
    (checkpoint / SINGLE).rename(checkpoint / "other.bin")
    refused(checkpoint, SINGLE, INDEX)
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "config.json", "missing")


def test_shards_without_an_index_and_a_file_of_another_name(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    write_checkpoint(one)
    write_checkpoint(many, max_shard_size="60KB")
    want = logits(load(one))
    (one / SINGLE).rename(one / "weights.safetensors")
    (many / INDEX).unlink()
    assert same_logits(logits(load(one)), want) and same_logits(logits(load(many)), want)
    parts = sorted(many.glob("*.safetensors"))
    parts[1].unlink()
    refused(many, parts[1].name, "a part of the checkpoint is missing")
    shutil.copy(one / "weights.safetensors", one / "others.safetensors")
    refused(one, SINGLE, INDEX, "no one other checkpoint")
    for name in ("weights", "others"):
        (one / f"{name}.safetensors").unlink()
    (one / "a-Q4_K_M.gguf").touch()
    refused(one, f"name {one / 'a-Q4_K_M.gguf'} itself")


@pytest.mark.parametrize("named", [
    lambda name: name.removeprefix("model."),
    lambda name: f"base_model.model.{name}",
    lambda name: f"base_model.model.{name.removeprefix('model.')}",
    lambda name: f"_orig_mod.{name}", lambda name: f"module.{name}",
], ids=["headless", "peft", "peft-headless", "compiled", "distributed"])
def test_other_names_of_tensors(checkpoint: Path, named: Callable[[str], str]) -> None:
    want = logits(load(checkpoint))
    tensors = load_file(checkpoint / SINGLE)
    save_file({named(name): own for name, own in tensors.items()}, checkpoint / SINGLE)
    assert same_logits(logits(load(checkpoint)), want)


def test_a_class_without_a_head(tmp_path: Path) -> None:
    """As embedding models are published, whose head is the embedding."""
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    want = logits(load(tmp_path))
    retensor(tmp_path, lambda t: [t.update({name.removeprefix("model."): t.pop(name)})
                                  for name in list(t)])
    for names in (["Qwen3Model"], None, []):
        edit(tmp_path, lambda c, names=names: c.update(architectures=names))
        assert same_logits(logits(load(tmp_path)), want)


def test_an_adapter_that_is_not_merged(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    retensor(checkpoint, lambda t: t.update({
        f"base_model.model.{name}.base_layer.weight": t.pop(f"{name}.weight"),
        f"base_model.model.{name}.lora_A.default.weight": torch.zeros(2, 64)}))
    refused(checkpoint, f"{name}.weight is missing", "adapter", "merged")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_more_rows_than_the_vocabulary_has(tmp_path: Path, tied: bool, quantization: str,
                                           caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=tied)
    want = logits(load(tmp_path, quantization=quantization))
    outer = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    retensor(tmp_path, lambda t: t.update(
        {name: torch.cat((t[name], torch.full((9, 64), torch.nan))) for name in outer}))
    assert same_logits(logits(load(tmp_path, quantization=quantization)), want)
    for name in outer:
        assert f"{name} has 208 rows, of which the first 199" in caplog.text
    retensor(tmp_path, lambda t: t.update({outer[0]: t[outer[0]][:150].clone()}))
    refused(tmp_path, outer[0], "[150, 64]", "[199, 64]")


def test_shard_named_in_the_index_is_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    refused(tmp_path, gone.name, "missing")


def test_index_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(tmp_path, INDEX, "../model.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.9])
def test_truncated(checkpoint: Path, keep: float) -> None:
    data = (checkpoint / SINGLE).read_bytes()
    (checkpoint / SINGLE).write_bytes(data[:int(keep * len(data)) if keep < 1 else int(keep)])
    refused(checkpoint, SINGLE, "not a readable safetensors file")


def test_corrupt_header(checkpoint: Path) -> None:
    data = bytearray((checkpoint / SINGLE).read_bytes())
    data[8:40] = b"\xff" * 32
    (checkpoint / SINGLE).write_bytes(bytes(data))
    refused(checkpoint, SINGLE, "not a readable safetensors file")


def test_missing_tensor(checkpoint: Path) -> None:
    retensor(checkpoint, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(checkpoint, "model.layers.1.mlp.up_proj.weight", "missing")


def test_wrong_shape_and_type(checkpoint: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    retensor(checkpoint, lambda t: t.update({name: torch.zeros(3, 5)}))
    refused(checkpoint, name, "[3, 5]", "[32, 64]")
    retensor(checkpoint, lambda t: t.update({name: torch.zeros(32, 64, dtype=torch.int8)}))
    refused(checkpoint, name, "torch.int8")


def test_unsupported_architecture(checkpoint: Path) -> None:
    edit(checkpoint, lambda c: c.update(architectures=["RwkvForCausalLM"]))
    refused(checkpoint, "RwkvForCausalLM", "supported are Llama, Mistral", "names that class")
    edit(checkpoint, lambda c: c.update(architectures=["Qwen4ForCausalLM"]))
    refused(checkpoint, "Qwen4ForCausalLM", "near it is Qwen3ForCausalLM")


@pytest.mark.parametrize(("change", "words"), [
    ({"architectures": None, "model_type": None}, ["architectures", "model_type"]),
    ({"architectures": ["RwkvModel"], "model_type": "qwen3"}, ["RwkvModel"]),
    ({"hidden_size": "64"}, ["hidden_size"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
    ({"dtype": "int4"}, ["dtype", "int4"]),
    ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, ["rope_type", "ntk"]),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["short_factor"]),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["factor"]),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, ["partial_rotary"]),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0,
                          "attention_factor": "big"}}, ["attention_factor"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
])
def test_bad_config_fields(checkpoint: Path, change: dict[str, Any], words: list[str]) -> None:
    edit(checkpoint, lambda c: c.update(change))
    refused(checkpoint, "config.json", *words)


def test_config_that_is_not_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_bytes(b"\xff\xfe{")
    refused(checkpoint, "config.json", "JSON")


def test_old_config_fields(checkpoint: Path) -> None:
    def old(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config.update(rope_theta=5e5, torch_dtype="float16", dtype=None,
                      rope_scaling={"type": "linear", "factor": 2.0})

    edit(checkpoint, old)
    shape = read_shape(checkpoint, Config())
    (rope,) = shape.ropes
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)
    assert shape.dtype == "float16"


def test_max_model_len(checkpoint: Path) -> None:
    assert load(checkpoint).shape.max_model_len == 512
    assert load(checkpoint, max_model_len=100).shape.max_model_len == 100
    with pytest.raises(BadConfig, match="max_model_len: 513 exceeds the model's own limit of 512"):
        load(checkpoint, max_model_len=513)


def test_page_bytes_are_what_a_pool_takes(checkpoint: Path) -> None:
    shape = read_shape(checkpoint, Config(model=ModelConfig()))
    pool = KVPagePool(shape, 7, 16, torch.bfloat16, CPU)
    assert pool.bytes == 7 * page_bytes(shape, 16, torch.bfloat16) == 7 * 3 * 16 * 2 * 2 * 16 * 2


def every(*_: Any) -> bool:
    return True


@pytest.mark.parametrize("piece", [7, 1000, 1 << 20])
def test_carried_in_pieces_as_mapped(tmp_path: Path, piece: int) -> None:
    write_checkpoint(tmp_path, max_shard_size="60KB", dtype=torch.bfloat16)
    files = sorted(tmp_path.glob("*.safetensors"))
    if piece < 10:
        files = files[:1]
        save_file({"a": torch.randn(13, 3), "none": torch.empty(0, 4), "one": torch.tensor(2.5)},
                  files[0])
    with DeviceReader(CPU, 3, piece) as reader:
        carried = list(reader.read(files, every))
    assert len(carried) == len(files)
    for file, (source, own) in zip(files, carried, strict=True):
        assert source == file
        want = dict(mapped(file, every))
        assert {name for name, _ in own} == set(want)
        assert all(torch.equal(tensor, want[name]) for name, tensor in own)


def test_carried_models_have_equal_outputs_and_reports(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actorium.gpu.weights import loader

    def carried(files: list[Path], device: torch.device, wanted: Any) -> Any:
        with DeviceReader(device, 2, 4096) as reader:
            yield from by_file(reader.read(files, wanted))

    write_checkpoint(tmp_path, max_shard_size="60KB")
    want = logits(load(tmp_path))
    monkeypatch.setattr(loader, "read_files", carried)
    assert same_logits(logits(load(tmp_path)), want)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[:-5])
    refused(tmp_path, last.name, "not a readable safetensors file")


def test_few_bytes_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a file is: a batch in the reader's hands and one on its way, a larger tensor
    alone; and a file of which nothing is wanted is told of as well."""
    from actorium.gpu.weights import safetensors_reader as reading

    monkeypatch.setattr(reading, "BATCH", 4000)
    sizes = [100, 300, 800, 5000, 10, 990, 1]
    tensors = {f"{i}": torch.full((n,), float(i)) for i, n in enumerate(sizes)}
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "c.safetensors"]
    for file, own in zip(files, (tensors, {"none": torch.zeros(3)}, tensors), strict=True):
        save_file(own, file)
    sent: list[int] = []
    plain = DeviceReader._send
    monkeypatch.setattr(DeviceReader, "_send", lambda own, file, batch: (
        sent.append(sum(s.bytes for s in batch)), plain(own, file, batch))[1])
    with DeviceReader(CPU, 2, 512) as reader:
        taken = 0
        for _, own in reader.read(files, lambda file, name, *_: name != "none"):
            taken += 1
            assert len(sent) <= taken + 1, "no more than one ahead"
            assert sum(t.nbytes for _, t in own) <= 4000 or len(own) == 1
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in own)
    assert taken == len(sent) > 8 and sum(sent) == 2 * 4 * sum(sizes)
    with DeviceReader(CPU, 2, 512) as reader:
        read = [(file, dict(own)) for file, own in by_file(
            reader.read(files, lambda file, name, *_: name != "none"))]
    assert [file for file, _ in read] == files
    assert [len(own) for _, own in read] == [len(sizes), 0, len(sizes)]


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    from actorium.gpu.weights import safetensors_reader as reading

    save_file({"a": torch.randn(100)}, tmp_path / SINGLE)
    found = reading.stored(tmp_path / SINGLE)
    monkeypatch.setattr(reading, "stored", lambda file: found)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:200])
    with DeviceReader(CPU, 1) as reader, pytest.raises(BadModel, match="ends early"):
        list(reader.read([tmp_path / SINGLE], every))


def test_dummy_weights_repeat_what_was_drawn() -> None:
    """The numbers of a seed are those that they always were."""
    wants = [TensorSpec("a", (3, 5)), TensorSpec("big", (1031, 4099)),
             TensorSpec("norm.weight", (7,), "float32")]
    found = random_tensors(wants, torch.bfloat16, CPU, 4, lambda *_: None)
    gen = torch.Generator().manual_seed(4)
    first = torch.empty(15).normal_(0.0, 0.02, generator=gen)
    block = torch.empty(1 << 22).normal_(0.0, 0.02, generator=gen).bfloat16()
    norm = torch.empty(7).normal_(0.0, 0.02, generator=gen) + 1
    assert torch.equal(found["a"].flatten(), first.bfloat16())
    big = found["big"].flatten()
    assert torch.equal(big[:1 << 22], block)
    assert torch.equal(big[1 << 22:], block[:len(big) - (1 << 22)])
    assert torch.equal(found["norm.weight"], norm)
    assert found["big"].untyped_storage().nbytes() == found["big"].nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dummy_weights_are_drawn_where_they_are_to_lie() -> None:
    wants = [TensorSpec("big", (1031, 4099)), TensorSpec("x_norm.weight", (500_000,), "float32")]
    device = torch.device("cuda")
    one, two = (random_tensors(wants, torch.bfloat16, device, 4, lambda *_: None) for _ in "ab")
    assert all(torch.equal(one[want.name], two[want.name]) for want in wants)
    assert all(one[want.name].is_cuda for want in wants)
    assert one["big"].float().std().item() == pytest.approx(0.02, rel=0.01)
    assert one["x_norm.weight"].mean().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_carried_to_a_device(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        save_file({f"{i}.{j}": torch.randn(1000 * j + 1, 33).bfloat16() for j in range(20)}, file)
    with DeviceReader(torch.device("cuda"), 4, 1 << 16) as reader:
        for file, (_, own) in zip(files, reader.read(files, every), strict=True):
            want = dict(mapped(file, every))
            assert len(own) == len(want)
            assert all(torch.equal(tensor.cpu(), want[name]) for name, tensor in own)
