"""Other weights for an opened device: the same bits as one that was opened with them, or nothing
has changed at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import AdapterDriver, open_with_adapters, toy_adapter, with_adapters
from helpers_deepseek import add_mtp
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint
from helpers_ranks import GREEDY, asked, opened_config, run_ranks, whole
from helpers_toys import write_toy
from helpers_worker import Ring
from safetensors.torch import load_file, save_file

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel
from actorium.actors.messages import WeightsSource
from actorium.actors.models.encoders import encoder_family
from actorium.gpu.families.architectures import ARCHITECTURES
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker import weights_update
from actorium.gpu.worker.device import open_device
from actorium.gpu.worker.weights_update import WeightsUpdate, kept_source

Bits = list[tuple[list[int], bytes]]


def noisy(path: Path, other: Path, seed: int = 5, names: Callable[[str], bool] = bool) -> Path:
    """A copy of a checkpoint, of which the tensors of these names have other numbers."""
    shutil.copytree(path, other)
    draw = torch.Generator().manual_seed(seed)
    for file in other.glob("*.safetensors"):
        tensors = load_file(file)
        for name, own in tensors.items():
            if own.is_floating_point() and names(name):
                noise = torch.randn(own.shape, generator=draw) * 0.05
                tensors[name] = (own.float() + noise).to(own.dtype).contiguous()
        save_file(tensors, file, {"format": "pt"})
    return other


def bits_of(runner: ModelRunner) -> Bits:
    """Tokens and log-probabilities of some prompts, served together."""
    runner.reset()
    ring = Ring(runner, budget=48)
    for prompt in asked()[:3]:
        ring.submit(prompt, GREEDY)
    return [(out.tokens, b"".join(part.chosen + part.top_logprobs for part in out.logprobs))
            for out in ring.run()]


def update_to(update: WeightsUpdate, path: str, over: tuple[Path, ...] = ()) -> WeightsSource:
    made = update.prepare(1, WeightsSource(path, [str(own) for own in over]))
    assert update.take(1) == made
    return made


class Updated:
    """A device, opened with a checkpoint."""

    def __init__(self, config: Config, run_dir: Path, group: RankGroup | None = None) -> None:
        self.opened = open_device(config, 1, lambda *_: None, {}, group or LoneRank(), run_dir)
        self.runner = self.opened.runner
        self.update = WeightsUpdate(config, self.opened, run_dir)

    def __call__(self, path: Path | None = None, *over: Path) -> WeightsSource:
        return update_to(self.update, str(path or ""), over)


def fresh(path: Path, **model: Any) -> Bits:
    return bits_of(open_device(opened_config(path, **model), 1, lambda *_: None, {}).runner)


def check_there_and_back(tmp_path: Path, **model: Any) -> None:
    """The bits of a device that was opened with the other weights; then those of before again."""
    path, other = tmp_path / "model", noisy(tmp_path / "model", tmp_path / "other")
    device = Updated(opened_config(path, **model), tmp_path)
    before, want = bits_of(device.runner), fresh(other, **model)
    assert before != want
    made = device(other)
    assert bits_of(device.runner) == want and made.digest
    assert kept_source(tmp_path, opened_config(path, **model)) == made
    assert device() == WeightsSource()
    assert bits_of(device.runner) == before


@pytest.mark.parametrize("architecture, model", [
    ("Qwen3ForCausalLM", {"dtype": "bfloat16"}),
    ("Qwen3ForCausalLM", {"dtype": "float32"}),
    ("Qwen3ForCausalLM", {"dtype": "bfloat16", "quantization": "int8"}),
    pytest.param("Qwen3ForCausalLM", {"dtype": "float32", "quantization": "fp8"},
                 marks=pytest.mark.slow),
    pytest.param("Qwen3ForCausalLM", {"dtype": "bfloat16", "quantization": "int4"},
                 marks=pytest.mark.slow),
], ids=str)
def test_the_bits_are_those_of_the_new_weights(
        tmp_path: Path, architecture: str, model: dict[str, str]) -> None:
    write_toy(tmp_path / "model", architecture)
    check_there_and_back(tmp_path, **model)


@pytest.mark.slow
def test_the_layer_that_drafts_changes_too(tmp_path: Path) -> None:
    """Of a hybrid, whose states stay: as many drafts are accepted as of a new device."""
    path = tmp_path / "model"
    add_mtp(path, write_hybrid(path, DENSE, 5, torch.bfloat16, mtp_num_hidden_layers=1,
                               head_dim=32, num_hidden_layers=2,
                               layer_types=["linear_attention", "full_attention"]))
    other = noisy(path, tmp_path / "other", names=lambda name: "mtp" in name)
    device = Updated(opened_config(path), tmp_path)
    bits_of(device.runner)
    device(other)
    new = open_device(opened_config(other), 1, lambda *_: None, {}).runner
    assert bits_of(device.runner) == bits_of(new)
    for one, two in zip(device.runner.proposers.values(), new.proposers.values(), strict=True):
        drafts = [own._drafter for own in (one, two)]  # type: ignore[attr-defined]
        assert drafts[0].model is device.runner.model
        assert torch.equal(drafts[0].token_norm, drafts[1].token_norm)
    assert device.runner.proposers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", [
    name for name in ARCHITECTURES if not encoder_family(name)])
def test_of_every_class(tmp_path: Path, architecture: str, dtype: str) -> None:
    write_toy(tmp_path / "model", architecture)
    check_there_and_back(tmp_path, dtype=dtype)


def test_a_file_may_be_written_anew_behind_it(tmp_path: Path) -> None:
    """What is served lies in memory of its own, in float32 as well."""
    write_toy(tmp_path / "model", "Qwen3ForCausalLM")
    other = noisy(tmp_path / "model", tmp_path / "other")
    device = Updated(opened_config(tmp_path / "model"), tmp_path)
    device(other)
    before, file = bits_of(device.runner), other / "model.safetensors"
    with file.open("r+b") as own:  # in place, as most writers do
        own.write(bytes(file.stat().st_size))
    assert bits_of(device.runner) == before


def test_tensors_of_a_part_of_the_model(tmp_path: Path) -> None:
    """They lie over the checkpoint, and over each other; what is covered wholly is left out."""
    path = tmp_path / "model"
    write_toy(path, "Qwen3ForCausalLM")

    def norms(name: str) -> bool:
        return "norm" in name

    def queries(name: str) -> bool:
        return ".0.self_attn.q_proj" in name

    files = []
    for number, chosen in enumerate((norms, queries, norms)):
        whole = noisy(path, tmp_path / f"n{number}", number, chosen)
        found = {name: own for name, own in load_file(whole / "model.safetensors").items()
                 if chosen(name)}
        files.append(tmp_path / f"{number}.safetensors")
        save_file(found, files[-1])
    merged = noisy(path, tmp_path / "merged", 0, lambda name: False)
    save_file(load_file(path / "model.safetensors") | load_file(files[1]) | load_file(files[2]),
              merged / "model.safetensors", {"format": "pt"})
    device = Updated(opened_config(path), tmp_path)
    made = device(None, *files)
    assert made.over == [str(own) for own in files[1:]]
    assert bits_of(device.runner) == fresh(merged)


def test_what_is_wrong_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    """Found before, on the way, or at the very end of the reading."""
    path = tmp_path / "model"
    write_toy(path, "Qwen3ForCausalLM")
    device = Updated(opened_config(path), tmp_path)
    before, count = bits_of(device.runner), [0]

    def broken(change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        count[0] += 1
        other = noisy(path, tmp_path / f"bad{count[0]}")
        tensors = load_file(other / "model.safetensors")
        change(tensors)
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        return other

    def cut(path: Path) -> Path:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        return path

    def other_config(path: Path) -> Path:
        file = path / "config.json"
        file.write_text(file.read_text().replace('"rope_theta": ', '"rope_theta": 1'))
        return path

    last = sorted(load_file(path / "model.safetensors"))[-1]
    stray = tmp_path / "stray.safetensors"
    save_file({"model.layers.0.nothing": torch.zeros(3)}, stray)
    cases = [
        ((broken(lambda own: own.pop(last)),), f"tensor {last} is missing"),
        ((broken(lambda own: own.update({last: own[last][:-1].clone()})),), "has shape"),
        ((broken(lambda own: own.update({last: own[last].long()})),), "not a float type"),
        ((cut(noisy(path, tmp_path / "cut")),), "not a readable safetensors file"),
        ((other_config(noisy(path, tmp_path / "config")),), "another model than the one"),
        ((tmp_path / "nothing",), "No such file or directory"),
        ((path, stray), "'model.layers.0.nothing': no part of the model reads"),
        ((path, *[stray] * 17), "tensors of 16 updates are in use")]
    for given, why in cases:
        with pytest.raises(BadModel, match=why):
            device(*given)
        assert bits_of(device.runner) == before, why
    good = noisy(path, tmp_path / "good")

    def at_last(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(weights_update, "set_exact", at_last)
        with pytest.raises(BadModel, match="there is no memory"):
            device(good)
    with monkeypatch.context() as patched:
        patched.setattr(weights_update, "available_memory", lambda: 100)
        with pytest.raises(BadModel, match="they take .* bytes, and 100 are free"):
            device(good)
    assert bits_of(device.runner) == before and kept_source(
        tmp_path, opened_config(path)) == WeightsSource()
    device(good)
    assert bits_of(device.runner) == fresh(good)
    device.update.prepare(2, WeightsSource(str(path)))
    with pytest.raises(BadModel, match="not prepared"):
        device.update.take(3)
    assert bits_of(device.runner) == fresh(good)


def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    path = tmp_path / "model"
    write_toy(path, "Qwen3ForCausalLM")
    other, load = noisy(path, tmp_path / "other"), weights_update.load_model
    device = Updated(opened_config(path), tmp_path)
    before = bits_of(device.runner)

    def meanwhile(*given: Any) -> Any:
        made = load(*given)
        (other / "model.safetensors").touch()
        return made

    monkeypatch.setattr(weights_update, "load_model", meanwhile)
    with pytest.raises(BadModel, match="changed while they were read"):
        device(other)
    assert bits_of(device.runner) == before


def test_adapters_stay(tmp_path: Path) -> None:
    """They add to the new weights what they added to the old ones."""
    oracle = write_checkpoint(tmp_path / "model", seed=3)
    other = noisy(tmp_path / "model", tmp_path / "other")
    toy_adapter(oracle, tmp_path / "adapter")

    def logits(path: Path, update: Path | None) -> torch.Tensor:
        opened = open_with_adapters(path, seqs=2)
        driver = AdapterDriver(opened)
        driver.load(1, tmp_path / "adapter")
        prompts = [[5, 9, 100, 3], [8, 9, 10]]
        if update is not None:
            driver.generate(prompts, [1, 0], 2)  # it fills a slot
            opened.runner.reset()
            update_to(WeightsUpdate(with_adapters(path, seqs=2), opened, tmp_path), str(update))
            fresh = AdapterDriver(opened)
            fresh.slots.known = driver.slots.known
            driver = fresh
        driver.generate(prompts, [1, 0], 3)
        return torch.stack([torch.cat(list(step)) for step in driver.seen[-2:]])

    assert torch.equal(logits(tmp_path / "model", other), logits(other, None))


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    """All change, or none: where one of them has not read, the others keep what they have."""
    path = tmp_path / "model"
    write_toy(path, "Qwen3ForCausalLM")
    other = noisy(path, tmp_path / "other")

    def body(group: RankGroup) -> tuple[Bits, Bits, str, Bits]:
        device = Updated(opened_config(path), tmp_path, group)
        before, why = bits_of(device.runner), ""
        device.update.prepare(1, WeightsSource(str(other)))
        if group.place.rank:
            device.update.drop()
        try:
            device.update.take(1)
        except BadModel as error:
            why = error.message
        kept = bits_of(device.runner)
        device(other)
        return before, kept, why, bits_of(device.runner)

    def opened(group: RankGroup) -> Bits:
        return bits_of(open_device(opened_config(other), 1, lambda *_: None, {}, group).runner)

    found = whole(run_ranks(tmp_path / "one", 2, body))
    want = whole(run_ranks(tmp_path / "two", 2, opened))
    assert [own[2] for own in found] == ["another rank cannot serve them",
                                          "the weights were not prepared"]
    for (before, kept, _, after), new in zip(found, want, strict=True):
        assert before == kept != after == new
