"""The training model of the demo: its mathematics, its files, and that it learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actorium.actors.config.tree import Config
from actorium.gpu.families.architectures import read_shape
from actorium.tools.training import draft_acceptance
from actorium.tools.training.demo_batches import TrainingBatch, part_of
from actorium.tools.training.demo_drafts import Mtp, draft_loss, drafts, load_drafting
from actorium.tools.training.demo_net import (
    ATTENTION,
    DELTA,
    hidden,
    init_copying,
    load,
    logits_at,
    model_loss,
    new_model,
    save,
)
from actorium.tools.training.draft_acceptance import DraftAcceptance, drafted, walk
from actorium.tools.training.trainer import Team, Trainer

EOS = [2, 0]
TINY = {
    "vocab_size": 96, "hidden_size": 64, "layer_types": [DELTA, ATTENTION], "num_hidden_layers": 2,
    "head_dim": 16, "intermediate_size": 96, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-4}
Made = tuple[Any, Mtp]


def random_model(seed: int = 0) -> Made:
    """Both in fp32, every parameter random, norms near their working point."""
    torch.manual_seed(seed)
    model = new_model(**TINY)
    mtp = Mtp(model.config)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *mtp.named_parameters()]:
            if name.endswith("A_log"):
                p.uniform_(-4.0, 0.5)
            elif "norm" in name:
                p.normal_(float("linear_attn.norm" in name), 0.15)
            elif "conv1d" not in name:
                p.normal_(0.0, 0.08)
    return model, mtp


def rounded(folder: Path) -> Made:
    """The same, as a checkpoint in `folder` has it."""
    model, mtp = random_model()
    save(model, dict(mtp.named_parameters()), folder, EOS)
    model, again = load_drafting(folder)
    assert again is not None
    return model, again


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], (rows, length), generator=made)


def batch_of(ids: Tensor) -> TrainingBatch:
    rows, length = ids.shape
    where = torch.arange(ids.numel()).view(rows, length)[:, :-1].flatten()
    return TrainingBatch(ids, where, ids[:, 1:].flatten(), torch.ones(len(where)))


def transformers_of(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3_5ForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager").eval()


def test_transformers_reads_a_checkpoint(tmp_path: Path) -> None:
    model, _ = rounded(tmp_path)
    ids = tokens(2, 100)
    with torch.no_grad():
        got = logits_at(model, ids, torch.arange(ids.numel()))
        want = transformers_of(tmp_path)(ids).logits.flatten(0, 1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def oracle_of(mtp: Mtp, folder: Path) -> Any:
    """transformers' MTP layer with these weights."""
    layers = pytest.importorskip("transformers.modeling_layers")
    main = transformers_of(folder)
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, [ATTENTION]
    oracle = layers.MtpModel(main, 1).eval()
    names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
             "norm": "post_norm", "layers.0": "mtp_block"}
    state = {}
    for name, p in mtp.named_parameters():
        head = next(n for n in names if name.startswith(n + "."))
        state[f"layers.0.{names[head]}{name.removeprefix(head)}"] = p.detach()
    missing, unexpected = oracle.load_state_dict(state, strict=False)
    assert not unexpected and not any(name.startswith("layers.") for name in missing)
    return oracle


def test_drafts_equal_transformers(tmp_path: Path) -> None:
    """First drafts of all positions at once; second and third ones from the cache that an engine
    has by then."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    model, mtp = rounded(tmp_path)
    oracle = oracle_of(mtp, tmp_path)
    t = 12
    ids = tokens(1, t)
    with torch.no_grad():
        of_ids = hidden(model, ids)
        outputs = drafts(model, mtp, ids, of_ids, 3)
        first = oracle.forward_layer(0, of_ids[:, :-1], torch.arange(t - 1)[None], None,
                                     input_ids=ids[:, 1:])
        torch.testing.assert_close(outputs[0][:, :-1], first, atol=1e-4, rtol=0)
        for start in range(t - 3):
            cache = cache_utils.MtpCache()
            at = torch.arange(start + 1)[None]
            chained = oracle.forward_layer(0, of_ids[:, :start + 1], at, cache,
                                           input_ids=ids[:, 1:start + 2])[:, -1:]
            for i, output in enumerate(outputs[1:], 1):
                chained = oracle.forward_layer(0, chained, torch.tensor([[start + i]]), cache,
                                               input_ids=ids[:, start + i + 1:start + i + 2])
                torch.testing.assert_close(output[:, start + i], chained[:, 0], atol=1e-4, rtol=0)


def test_a_checkpoint_is_read_by_the_engine(tmp_path: Path) -> None:
    rounded(tmp_path)
    shape = read_shape(tmp_path, Config())
    assert shape.architecture == "Qwen3_5ForCausalLM"
    assert shape.recurrent == (0,) and shape.tied and shape.head_dim == TINY["head_dim"]


def test_save_and_load_give_the_same(tmp_path: Path) -> None:
    model, mtp = rounded(tmp_path)
    save(model, dict(mtp.named_parameters()), tmp_path / "again", EOS)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    save(model, {}, tmp_path / "alone", EOS)
    assert load(tmp_path / "alone")[1] == {} and load_drafting(tmp_path / "alone")[1] is None
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1


def test_it_begins_with_a_rough_form_of_copying() -> None:
    torch.manual_seed(4)
    model = new_model(vocab_size=1920)
    ids = torch.stack([torch.randperm(1920)[:20] for _ in range(16)]).repeat(1, 2)
    where = torch.arange(ids.numel()).view(16, 40)[:, 20:-1].flatten()

    def right() -> float:
        with torch.no_grad():
            chosen = logits_at(model, ids, where).argmax(-1)
        return float((chosen == ids.flatten()[where + 1]).float().mean())

    assert right() < 0.01
    init_copying(model)
    assert right() > 0.08


def test_forty_steps_lower_both_losses() -> None:
    torch.manual_seed(2)
    batch = batch_of(tokens(2, 64))
    model = new_model(**TINY)
    mtp = Mtp(model.config)
    trainer = Trainer(model, lambda b: model_loss(model, b), lambda _: [batch])
    losses = [trainer.step(0.1)[0] for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]
    model.requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(mtp, lambda b: draft_loss(model, mtp, b), lambda _: [batch], None, 1e-2)
    losses = [trainer.step(0.1)[0] for _ in range(20)]
    assert losses[-1] < 0.97 * losses[0]  # the model itself is still unsure: no draft can be sure
    assert all(map(torch.equal, before, model.parameters()))


def test_the_parts_of_a_batch_are_the_batch() -> None:
    model, mtp = random_model()
    batch = batch_of(tokens(4, 32))
    for loss in (lambda b: model_loss(model, b), lambda b: draft_loss(model, mtp, b)):
        with torch.no_grad():
            parts = [float(loss(part_of(batch, rank, 2))) for rank in range(2)]
            assert sum(parts) == pytest.approx(float(loss(batch)), rel=1e-5)
    alone = part_of(batch, *Team(0, 1))
    assert alone.where[:len(batch.where)].equal(batch.where) and len(alone.where) % 128 == 0
    assert float(alone.weights.sum()) == float(batch.weights.sum())


def test_a_draft_in_the_text_counts_as_right() -> None:
    """Greedy drafts put where the drafted tokens belong are found to be right there alone."""
    model, mtp = random_model()
    ids = tokens(1, 10)[0]
    with torch.no_grad():
        output = drafts(model, mtp, ids[None], hidden(model, ids[None]), 1)[0][0]
        ids[7] = int(model.lm_head(output[5]).argmax())
    right = drafted(model, mtp, ids, 2)
    assert [len(tokens) for tokens in right] == [10, 10] and right[0][7]


@pytest.mark.parametrize(("right", "made", "accepted"), [
    ("1111111", (3, 2), (3, 2)),  # windows of tokens 1, 2; 4, 5; 7
    ("0000000", (7, 6), (0, 0)),
    ("0101010", (4, 4), (3, 0)),
])  # fmt: skip
def test_windows_follow_one_another(
    right: str, made: tuple[int, ...], accepted: tuple[int, ...]
) -> None:
    tokens = [False, *(c == "1" for c in right)]
    if right == "0101010":
        found = walk([tokens, [False] * len(tokens)], 0, 7)
    else:
        found = walk([tokens, tokens], 0, 7)
    assert found == DraftAcceptance(made, accepted)


def test_a_wrong_draft_ends_its_window() -> None:
    found = walk([[False] * 4, [True] * 4], 0, 3)
    assert found == DraftAcceptance((3, 2), (0, 0)) and found.shares == (0.0, 0.0)
    assert found + DraftAcceptance((1, 1), (1, 1)) == DraftAcceptance((4, 3), (1, 1))


@pytest.mark.slow
def test_a_command_trains_a_model_and_then_its_drafts(tmp_path: Path) -> None:
    for model in ("demo", "drafts"):
        done = subprocess.run(
            [sys.executable, "-m", "actorium.tools.training", model, "--out", str(tmp_path),
             "--minutes", "0.02"], capture_output=True, text=True, timeout=200, check=True)
        assert " parameters" in done.stdout and " steps, " in done.stdout
    assert load_drafting(tmp_path)[1] is not None


def test_acceptance_is_measured_of_the_demo_model_unless_another_is_named(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def found(path: Path) -> Any:
        raise LookupError(path)

    monkeypatch.setattr("actorium.tools.training.draft_acceptance.load_drafting", found)
    monkeypatch.setattr(sys, "argv", ["draft_acceptance"])
    with pytest.raises(LookupError) as caught:
        draft_acceptance.main()
    assert (caught.value.args[0] / "model.safetensors").is_file()
