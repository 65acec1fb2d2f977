"""A draft model in an engine's worker: its bytes, what is refused, ranks, graphs and tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_drafting import follow_tokens
from helpers_graphs import told, with_graphs
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import load, write_checkpoint
from helpers_ranks import run_ranks, whole
from helpers_speculation import make_runner
from helpers_worker import Output, Ring

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.plan.memory_plan import demand_of, make_plan
from actorium.gpu.plan.weight_bytes import bytes_by_format, weight_bytes
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker.device import OpenedDevice, open_device
from actorium.gpu.worker.tiers import _kinds

BUDGET = 4 << 20
WINDOWED = {"num_hidden_layers": 4, "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2}
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [150, 20] * 5]


def write(path: Path, architecture: str = "LlamaForCausalLM", seed: int = 2,
          **options: Any) -> Path:
    """A checkpoint whose tokens others of its width follow, too."""
    write_checkpoint(path, architecture, seed, **options)
    return path


def config_of(target: Path, draft: Path, speculative: str = "draft:3", **memory: Any) -> Config:
    return Config(model=ModelConfig(model=str(target), max_model_len=64),
                  memory=MemoryConfig(kv_cache_bytes=BUDGET, **memory),
                  device=DeviceConfig(device="cpu", threads=1),
                  scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
                  speculation=SpeculationConfig(speculative=speculative,
                                                speculative_model=str(draft)))


def opened(config: Config, group: RankGroup = LoneRank()) -> OpenedDevice:
    return open_device(config, 1, lambda *_: None, {}, group)


def outputs(own: OpenedDevice, speculative: str) -> list[Output]:
    ring = Ring(own.runner, budget=32, speculative=speculative)
    for i, prompt in enumerate(PROMPTS):
        ring.submit(prompt, ResolvedParams(max_tokens=20, temperature=0.3 * i), seed=i)
    return ring.run()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_planned_bytes_are_allocated(kv_dtype: str, tmp_path: Path) -> None:
    """Behind a target whose first group is windowed, and whose pages are of another size."""
    target = write(tmp_path / "target", "Gemma3ForCausalLM", **WINDOWED)
    draft = write(tmp_path / "draft", "Gemma3ForCausalLM", 3, num_key_value_heads=4, **WINDOWED)
    config = config_of(target, draft, kv_cache_dtype=kv_dtype)
    own = opened(config)
    shape, runner = own.runner.model.shape, own.runner
    plan = make_plan(shape, demand_of(config), BUDGET)
    assert own.ready.drafts == plan.demand.drafts == 3 and own.ready.draft_methods == {"draft": 3}
    assert [pool.name for pool in plan.pools] == ["window 12", "full attention", "draft model"]
    assert [pool.pages for pool in runner.all_pools] == [pool.pages for pool in plan.pools]
    assert [pool.layers for pool in plan.pools] == [2, 2, 4]
    assert sum(pool.bytes for pool in runner.all_pools) == plan.used
    assert plan.token_bytes * 16 == plan.pools[1].page_bytes + plan.pools[2].page_bytes
    measured, planned = own.footprint.measured, own.footprint.planned
    assert measured["pages"] == planned["pages"] and measured["tables"] == planned["tables"]
    assert shape.draft is not None and planned["weights"] == weight_bytes(shape) == sum(
        (*bytes_by_format(shape).values(), *bytes_by_format(shape.draft).values()))
    off = make_plan(shape, demand_of(config_of(target, draft, "off")), BUDGET)
    assert [pool.name for pool in off.pools] == ["window 12", "full attention"]


def test_pages_of_drafts_go_to_the_host_with_those_of_full_attention(tmp_path: Path) -> None:
    target = write(tmp_path / "target", "Gemma3ForCausalLM", **WINDOWED)
    kinds = _kinds(opened(config_of(target, write(tmp_path / "draft"))).runner)
    assert [[part.shape[0] for part in kind] for kind in kinds] == [[2], [2, 3]]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "recurrent": (write, lambda path: write_hybrid(path, DENSE, 5) and path,
                  "Qwen3_5ForCausalLM cannot draft: it has recurrent layers"),
    "windows alone": (lambda path: write(path, "MistralForCausalLM", sliding_window=12), write,
                      "MistralForCausalLM has not: all of its layers have a window"),
    "several sizes": (write, lambda path: write(
        path, "Gemma4ForCausalLM", head_dim=32, global_head_dim=64, sliding_window=12,
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=0, hidden_size_per_layer_input=32, vocab_size_per_layer_input=199),
        "keys of several sizes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_draft_is_refused(case: str, tmp_path: Path) -> None:
    make_target, make_draft, why = REFUSED[case]
    target, draft = make_target(tmp_path / "target"), make_draft(tmp_path / "draft")
    with pytest.raises(BadConfig, match="^--speculative-model: .*/draft: ") as caught:
        opened(config_of(target, draft))
    assert why in caught.value.message and caught.value.param == "speculation.speculative_model"


def test_a_draft_that_is_no_model_is_named(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft")
    (draft / "config.json").write_text('{"architectures": ["NoneForCausalLM"]}')
    with pytest.raises(BadModel, match="^--speculative-model: .*/draft/config.json: "):
        opened(config_of(target, draft))


@pytest.mark.parametrize("vocab", [170, 400])
def test_a_shorter_draft_with_another_head_serves(vocab: int, tmp_path: Path) -> None:
    """Its table of positions ends before the target's sequences, its vocabulary before or behind
    its ids."""
    target = write(tmp_path / "target")
    draft = write(tmp_path / "draft", max_position_embeddings=24, vocab_size=vocab)
    want = outputs(opened(config_of(target, draft, "off")), "off")
    own = opened(config_of(target, draft, "draft:3,fixed"))
    assert own.runner.model.draft_model.shape.max_model_len == 24
    assert [out.tokens for out in outputs(own, "draft:3,fixed")] == [out.tokens for out in want]


def test_ranks_share_a_draft_model(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft", num_hidden_layers=1)
    for path in (target, draft):
        follow_tokens(path)
    want = outputs(opened(config_of(target, draft, "off")), "off")

    def serve(group: RankGroup) -> list[Output]:
        config = config_of(target, draft, "draft:3,fixed")
        device = DeviceConfig(device="cpu", threads=1, tensor_parallel_size=2)
        own = opened(Config(model=config.model, memory=config.memory, device=device,
                            scheduler=config.scheduler, speculation=config.speculation), group)
        assert own.runner.model.draft_model.shape.heads == 2
        return outputs(own, "draft:3,fixed")

    for got in whole(run_ranks(tmp_path / "group", 2, serve)):
        assert [out.tokens for out in got] == [out.tokens for out in want]


@pytest.mark.usefixtures("as_on_a_device")
def test_drafts_behind_steps_that_are_replayed(tmp_path: Path) -> None:
    """The target's decodes come from graphs, drafts are made behind them."""
    models = []
    for name, layers in (("target", 3), ("draft", 2)):
        follow_tokens(write(tmp_path / name, num_hidden_layers=layers))
        models.append(load(tmp_path / name, max_model_len=96))
    target, draft = models
    params = [ResolvedParams(max_tokens=18, temperature=0.0),
              ResolvedParams(max_tokens=14, temperature=0.8, logprobs=2)]
    seen, counts = [], []
    for captures in (False, True):
        runner = make_runner(target, 2, slots=12, arrays=DeviceArrays, draft=draft)
        if captures:
            graphs = with_graphs(runner, [1, 2, 4, 8], (3, 1))
        ring = Ring(runner, budget=24, speculative="mtp:2,fixed")
        for i, prompt in enumerate(PROMPTS):
            ring.submit(prompt, params[i % 2], i)
        seen.append(told(ring.run()))
        counts.append(ring.core.health().gauges["spec_decode_num_accepted_tokens"])
    assert seen[0] == seen[1] and counts[0] == counts[1] > 20 and graphs.replays > 10
