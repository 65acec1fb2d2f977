"""EAGLE-3 heads against the paper's description in plain torch, and what is read of checkpoints."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from helpers_eagle import EagleOracle, eagle_config, load_with_head, write_eagle
from helpers_gguf import own_cache, write_model
from helpers_hybrid import DENSE, MOE, write_hybrid
from helpers_models import CPU, Seq, Stepper, generated, write_checkpoint
from helpers_parity import ATOL, tokens
from helpers_speculation import Hand, make_runner
from helpers_worker import complete
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from actorium.actors.config.tree import Config, SpeculationConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.model_dir import resolve
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.eagle_config import eagle_shape
from actorium.gpu.plan.memory_plan import Demand, make_plan
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.step.eagle import eagle_pool
from actorium.gpu.step.pools import KVPagePool

__all__ = ["own_cache"]
SPECULATORS = {"architectures": ["Eagle3Speculator"], "norm_before_residual": True,
               "transformer_layer_config": {"num_attention_heads": 4, "num_key_value_heads": 4}}
WINDOWS = ["sliding_attention", "full_attention"] * 2
HEADS: dict[str, dict[str, Any]] = {
    "published": {}, "layers.0": {"layer": "layers.0.", **SPECULATORS},
    "of another width": {"hidden_size": 32, "target_hidden_size": 64},
    "with rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 1.0}}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_checkpoint(path, "LlamaForCausalLM", 5, num_hidden_layers=4)
    return path


@pytest.fixture(params=HEADS)
def pair(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> tuple[Any, EagleOracle]:
    """A model with a head, and the same head by the paper."""
    write_eagle(tmp_path, target, **HEADS[request.param])
    model = load_with_head(target, tmp_path)
    return model, EagleOracle(tmp_path, model.embed)


class HeadSteps(Stepper):
    """Steps of a head; its pages are full of NaN."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, 40, 8)
        self.pool = KVPagePool(model.eagle.shape.layer, self.pages, 8, torch.float32, CPU)
        self.pool.layers[0].fill_(math.nan)

    def run(self, extends: list[tuple[Seq, int]], decodes: list[Seq], after: list[int],
            hidden: Tensor, rows: list[int] | None = None, q_len: int = 1) -> Tensor:
        """What the head gives for chunks, and for the q_len rows that follow on other sequences."""
        each = [*extends, *((seq, q_len) for seq in decodes)]
        for seq, count in each:
            self._grow(seq, seq.done + count)
        batch = self._batch(each, len(extends), q_len, True, 0)
        for seq, count in each:
            seq.done += count
        return self.model.eagle.forward(torch.tensor(after), hidden, batch, self.pool,
                                        None if rows is None else torch.tensor(rows))


def test_a_prompt_in_chunks_and_a_chain_behind_it(pair: tuple[Any, EagleOracle]) -> None:
    model, oracle = pair
    ids, width = tokens(30), model.shape.hidden
    tapped = {i: torch.randn(29, width) for i in (0, 1, 2)}
    hidden = model.eagle.joined(tapped)
    torch.testing.assert_close(hidden, oracle.joined(list(tapped.values())), atol=ATOL, rtol=0)
    want = oracle.forward(ids[1:], hidden)
    steps, seq, beside = HeadSteps(model), Seq(ids + [0] * 3), Seq([0] * 8)
    parts = [steps.run([(seq, 13)], [], ids[1:14], hidden[:13]),
             steps.run([(beside, 3), (seq, 16)], [], [*ids[1:4], *ids[14:]],
                       torch.cat((hidden[:3], hidden[13:])), [3, 18])]
    torch.testing.assert_close(torch.cat(parts), want[[*range(13), 13, 28]], atol=ATOL, rtol=0)
    torch.testing.assert_close(model.eagle.logits(parts[1]), oracle.logits(want[[13, 28]]),
                               atol=ATOL, rtol=0)
    out, more = parts[1][1:], list(ids)
    for _ in range(3):
        more.append(oracle.chain(more, hidden, 1)[0])
        hidden = torch.cat((hidden, oracle.forward(more[1:-1], hidden)[-1:]))
        out = steps.run([], [seq], more[-1:], out)
        torch.testing.assert_close(out, oracle.forward(more[1:], hidden)[-1:], atol=ATOL, rtol=0)


@pytest.mark.parametrize(("architecture", "options"), [
    ("LlamaForCausalLM", {}), ("CohereForCausalLM", {}), (MOE, {}),
    ("Gemma3ForCausalLM", {"sliding_window": 9, "layer_types": WINDOWS}),
    (DENSE, {"layer_types": ["linear_attention", "full_attention"] * 2})])
def test_a_model_gives_what_goes_into_layers(architecture: str, options: dict[str, Any],
                                             tmp_path: Path) -> None:
    write = write_hybrid if architecture in (DENSE, MOE) else write_checkpoint
    oracle = write(tmp_path / "model", architecture, 5, num_hidden_layers=4, **options)
    write_eagle(tmp_path / "head", tmp_path / "model", eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    model, ids = load_with_head(tmp_path / "model", tmp_path / "head"), tokens(23)
    inner, seen = model.forward, list[dict[int, Tensor]]()

    def forward(batches: Any, *others: Any) -> Tensor:
        out = inner(batches, *others)
        seen.append(batches[0].tapped)
        return out

    model.forward = forward
    complete(make_runner(model, 1), [ids], ResolvedParams(max_tokens=1), budget=10)
    with torch.no_grad():
        states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in (0, 2, 3):
        found = torch.cat([own[layer] for own in seen])
        torch.testing.assert_close(found, states[layer][0], atol=ATOL, rtol=0)


def test_of_a_model_out_of_a_gguf_file(tmp_path: Path) -> None:
    """Whose embedding is in codes: the head looks its tokens up there, too."""
    file = tmp_path / "m.gguf"
    write_model(file, "LlamaForCausalLM", "Q4_0", 4)
    write_checkpoint(tmp_path / "model", "LlamaForCausalLM", 5, num_hidden_layers=4)
    write_eagle(tmp_path / "head", tmp_path / "model")
    path, params = resolve(str(file)), ResolvedParams(max_tokens=12, temperature=0.0)
    with_drafts = load_with_head(path, tmp_path / "head")
    assert not isinstance(with_drafts.embed, Tensor)
    prompts = [tokens(20), tokens(7)]
    assert complete(make_runner(with_drafts, 3), prompts, params) == complete(
        make_runner(load_with_head(path, None), 0), prompts, params)
    looked_up = with_drafts.eagle.embed(torch.tensor([3, 7]))
    assert torch.equal(looked_up, with_drafts.embeddings(torch.tensor([3, 7])))


@pytest.mark.parametrize("drafts", [1, 4])
def test_drafts_of_a_step_are_the_papers(target: Path, tmp_path: Path, drafts: int) -> None:
    """A prompt in chunks, then windows: whatever was accepted, drafts are those of the tokens."""
    write_eagle(tmp_path, target)
    model, params = load_with_head(target, tmp_path, drafts), ResolvedParams(
        max_tokens=20, temperature=0.0)
    oracle = EagleOracle(tmp_path, model.embed)
    twin = LlamaForCausalLM.from_pretrained(str(target))
    hand = Hand(make_runner(model, drafts))
    seqs = [hand.admit(tokens(count, count), params, drafts) for count in (21, 9)]
    table, random = hand.runner.tables.drafts.tokens, Random(4)
    for step in range(6):
        for seq in seqs:
            with torch.no_grad():
                states = twin(torch.tensor([seq.tokens[:-1]]),
                              output_hidden_states=True).hidden_states
            hidden = oracle.joined([states[i][0] for i in (0, 1, 2)])
            assert table[seq.slot].tolist() == oracle.chain(seq.tokens, hidden, drafts), step
            known = generated(twin, seq.tokens, drafts)
            for i in range(random.randrange(drafts + 1)):
                table[seq.slot, i] = known[i]
        hand.decode(drafts)
    assert max(max(seq.emitted) for seq in seqs) > 1


# --- what is read --------------------------------------------------------------------------------

def shape_of(target: Path, head: Path) -> Any:
    return read_shape(target, Config(speculation=SpeculationConfig(
        speculative="eagle3:2", speculative_model=str(head))))


@pytest.mark.parametrize(("fields", "taps"), [
    ({"eagle_aux_hidden_state_layer_ids": None}, (2, 6, 9)),
    ({"eagle_aux_hidden_state_layer_ids": [1, 5, 11]}, (1, 5, 11)),
    ({"eagle_aux_hidden_state_layer_ids": None,
      "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, (2, 6, 9))])
def test_layers_are_counted_as_the_config_counts_them(
        target: Path, fields: dict[str, Any], taps: tuple[int, ...]) -> None:
    model = replace(read_shape(target, Config()), layers=12)
    raw = eagle_config(target, **fields)
    assert eagle_shape(raw, Path("config.json"), model).taps == taps


@pytest.mark.parametrize(("fields", "why"), [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures: must be one of LlamaForCausalLMEagle3"
     ),
    ({"num_hidden_layers": 2}, "num_hidden_layers: only 1 is supported, got 2"),
    ({"vocab_size": 150}, "vocab_size: the head is of another model: 150, where this one has 199"),
    ({"hidden_size": 32}, "hidden_size: the head is of another model: 32, where this one has hidden"
     ),
    ({"target_hidden_size": 96}, "target_hidden_size: the head is of another model: 96"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "must list layers of the model's 4, got"),
    ({"eagle_aux_hidden_state_layer_ids": None,
      "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "layers of the model's 4"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: only heads over"),
])
def test_a_config_that_does_not_fit_is_refused(target: Path, tmp_path: Path,
                                               fields: dict[str, Any], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle_config(target, **fields)))
    with pytest.raises((BadConfig, BadModel), match=re.escape(why)):
        shape_of(target, tmp_path)


def test_what_no_head_can_serve_is_refused(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "head", target)
    with pytest.raises(BadConfig, match="eagle3 needs --speculative-model"):
        read_shape(target, Config(speculation=SpeculationConfig(speculative="eagle3")))
    write_checkpoint(tmp_path / "windows", "MistralForCausalLM", sliding_window=9)
    with pytest.raises(BadConfig, match="has no layer that attends to all tokens"):
        shape_of(tmp_path / "windows", tmp_path / "head")


@pytest.mark.parametrize(("change", "why"), [
    (lambda own: own.pop("fc.weight"), "tensor fc.weight is missing"),
    (lambda own: own.update({"fc.weight": own["fc.weight"][:, :64].clone()}),
     r"tensor fc.weight has shape \[64, 64\], the config asks for \[64, 192\]"),
    (lambda own: own.update(d2t=own["d2t"] + 180), "d2t: must name 60 of the model's 199 tokens"),
    (lambda own: own.update(d2t=own["d2t"][:9].clone()), "d2t: must name 60")])
def test_tensors_that_do_not_fit_are_refused(target: Path, tmp_path: Path, change: Any,
                                             why: str) -> None:
    write_eagle(tmp_path, target)
    file = str(tmp_path / "model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises((BadConfig, BadModel), match=why):
        load_with_head(target, tmp_path)


def test_the_plan_counts_weights_and_pages(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, target)
    shape, demand = shape_of(target, tmp_path), Demand(4, 8, other_drafts=2, drafts=2, auto=True)
    plan, alone = make_plan(shape, demand, 1 << 20), make_plan(shape, Demand(4, 8), 1 << 20)
    assert [pool.name for pool in plan.pools] == ["full attention", "EAGLE-3 head"]
    assert plan.pools[0].pages == plan.pools[1].pages < alone.pools[0].pages
    model = load_with_head(target, tmp_path)
    own = eagle_pool(model, plan.pools[1].pages, 8, torch.float32)
    assert own is not None and own.bytes == plan.pools[1].bytes
    floats = [own for name, own in load_file(str(tmp_path / "model.safetensors")).items()
              if name not in ("d2t", "t2d")]
    assert weight_bytes(plan.shape) - weight_bytes(alone.shape) == 4 * sum(
        own.numel() for own in floats)
