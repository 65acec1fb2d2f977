"""Granite-4 hybrid against transformers: fp32, tiny checkpoints at random, states poisoned."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_hybrid import Held, HybridDriver, hybrid_runner
from helpers_mamba import BASE, GRANITE, write_granite
from helpers_models import CPU, load

from actorium.actors.config import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.errors import BadModel
from actorium.gpu.device import open_device
from actorium.gpu.models.registry import load_model, read_shape
from actorium.gpu.states import row_bytes

NEW, ATOL = 64, 1e-4
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-tied-rope": {
        "tie_word_embeddings": True, "position_embedding_type": "rope", "mamba_n_groups": 2,
        "mamba_proj_bias": True, "attention_bias": True, "mamba_d_conv": 3,
        "layer_types": ["attention", "mamba", "mamba"], "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "experts": {"num_local_experts": 6, "mamba_n_heads": 4, "mamba_d_head": 32,
                "mamba_d_state": 12, "mamba_conv_bias": False},
    "experts-rope": {
        "num_local_experts": 5, "position_embedding_type": "rope", "mamba_n_groups": 2,
        "tie_word_embeddings": True, "mamba_d_conv": 2, "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"], "residual_multiplier": 1.0},
}


@dataclass
class Case:
    model: Any
    oracle: Any
    path: Path

    def check(self, *held: Held) -> None:
        """Every logit as transformers has it, and every token its greedy choice."""
        for s in held:
            with torch.no_grad():
                want = self.oracle(torch.tensor([s.tokens])).logits[0]
            assert len(s.tokens) == s.goal and s.logits
            for length, logits in s.logits.items():
                torch.testing.assert_close(logits, want[length - 1], atol=ATOL, rtol=0)
                assert s.tokens[length] == int(want[length - 1].argmax())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("model")
    oracle = write_granite(path, seed=3, **CASES[request.param])
    return Case(load(path), oracle, path)


def tokens(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 199) for _ in range(count)]


@pytest.mark.parametrize(("chunk", "prompt"), [(1, 9), (7, 100), (64, 130), (513, 600)])
def test_greedy_with_chunks(case: Case, chunk: int, prompt: int) -> None:
    driver = HybridDriver(hybrid_runner(case.model), chunk)
    s = driver.admit(tokens(prompt), prompt + NEW)
    driver.run()
    case.check(s)


def test_the_checkpoint_can_fail_us(case: Case) -> None:
    """Logits differ by much more than what is let pass, and so do the tokens chosen."""
    with torch.no_grad():
        logits = case.oracle(torch.tensor([tokens(100)])).logits[0]
    assert float(logits.std()) > 1000 * ATOL
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_greedy_equals_generate(case: Case) -> None:
    """Transformers' own decode path."""
    ids = torch.tensor([tokens(70)])
    want = case.oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None,
                                pad_token_id=0)
    driver = HybridDriver(hybrid_runner(case.model), 33)
    s = driver.admit(tokens(70), 70 + NEW)
    driver.run()
    assert s.tokens == want[0].tolist()


@pytest.mark.parametrize("chunk", [7, 513])
def test_batched_with_admissions_in_the_middle(case: Case, chunk: int) -> None:
    """Sequences come and go; slots, states and pages are used again at once."""
    driver = HybridDriver(hybrid_runner(case.model, slots=5), chunk)
    held = [driver.admit(tokens(n, n), n + new) for n, new in ((30, 64), (3, 5), (1, 20))]
    driver.run(9)
    held.append(driver.admit(tokens(65, 5), 90))
    while any(not s.finished for s in driver.running) or len(held) < 7:
        driver.run(1)
        for s in [s for s in driver.running if s.finished and s not in driver.over]:
            driver.release(s)
            if len(held) < 7:
                n = (17, 64, 2)[len(held) - 4]
                held.append(driver.admit(tokens(n, len(held)), n + 10))
    case.check(*held)


def test_preemption(case: Case) -> None:
    """A sequence gives up its slot and comes back with all its tokens, beside others."""
    driver = HybridDriver(hybrid_runner(case.model, slots=4), 50)
    a, b = driver.admit(tokens(40), 104), driver.admit(tokens(90, 2), 154)
    driver.run(20)
    driver.release(a)
    c = driver.admit(tokens(30, 3), 60)
    again = driver.admit(a.tokens, a.goal, prompt=40)
    driver.run()
    assert c.slot == a.slot
    case.check(again, b, c)


@pytest.mark.parametrize("chunk", [40, 513])
def test_a_prefix_through_a_checkpoint(case: Case, chunk: int) -> None:
    """Within 1e-4 of the cold run: checkpoints at the ends of chunks and between them, used while
    the donor decodes on, and after it has gone."""
    driver = HybridDriver(hybrid_runner(case.model, slots=6), chunk)
    prompt = tokens(200)
    donor = driver.admit(prompt, 230, saves={48: 1, 160: 2, 192: 4})
    driver.run(8)
    first = driver.admit(prompt[:170] + tokens(9, 4), 220, donor, 160, checkpoint=2)
    driver.run()
    driver.release(donor)
    driver.free_pages = [p for p in driver.free_pages if p not in donor.pages]
    others = [driver.admit(prompt[:n], n + 30, donor, cached, checkpoint)
              for n, cached, checkpoint in ((193, 192, 4), (49, 48, 1))]
    driver.run()
    case.check(donor, first, *others)


def test_states_in_bf16_stay_near(case: Case) -> None:
    driver = HybridDriver(hybrid_runner(case.model, state_dtype=torch.bfloat16), 50)
    s = driver.admit(tokens(120), 140)
    driver.run()
    with torch.no_grad():
        want = case.oracle(torch.tensor([s.tokens])).logits[0]
    error = max(float((logits - want[n - 1]).abs().max()) for n, logits in s.logits.items())
    assert 0 < error < 0.05 * float(want.abs().max())


@pytest.mark.parametrize("experts", [0, 6])
def test_weights_in_bf16(experts: int, tmp_path: Path) -> None:
    """As near to the same weights in fp32 as transformers is in bf16."""
    narrow = write_granite(tmp_path, 4, torch.bfloat16, num_local_experts=experts)
    driver = HybridDriver(hybrid_runner(load(tmp_path)), 90)
    s = driver.admit(tokens(150), 180)
    driver.run()
    ids = torch.tensor([s.tokens])
    with torch.no_grad():
        theirs, want = narrow(ids).logits[0].float(), narrow.float()(ids).logits[0]
    ours = torch.stack([(logits - want[n - 1]).abs().mean() for n, logits in s.logits.items()])
    peers = torch.stack([(theirs[n - 1] - want[n - 1]).abs().mean() for n in s.logits])
    assert float(ours.median()) < 1.5 * float(peers.median())


def test_time_steps_are_limited_in_decode_as_in_extend(tmp_path: Path) -> None:
    """Transformers limits them in chunks only: the oracle is its run over all tokens at once."""
    oracle = write_granite(tmp_path, 5, time_step_limit=(0.3, 0.9))
    driver = HybridDriver(hybrid_runner(load(tmp_path)), 64)
    s = driver.admit(tokens(80), 100)
    driver.run()
    Case(None, oracle, tmp_path).check(s)
    assert read_shape(tmp_path, Config()).recurrence.time_limit == (0.3, 0.9)  # type: ignore[union-attr]


def test_the_worker_tells_of_states(case: Case) -> None:
    config = Config(model=ModelConfig(model=str(case.path)),
                    memory=MemoryConfig(page_size=16, max_total_tokens=1600, checkpoints=3),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
                    device=DeviceConfig(device="cpu", threads=1))
    opened = open_device(config, 1, lambda *_: None, {})
    shape, states = case.model.shape, opened.runner.states
    assert opened.ready.recurrent and opened.ready.checkpoints == 3
    assert states is not None and [len(states.layers), len(opened.runner.pools[0].layers)] == [
        len(shape.recurrent), shape.layers - len(shape.recurrent)]
    assert states.bytes == 8 * row_bytes(shape.state, len(shape.recurrent), torch.float32,
                                         shape.dtype)


@pytest.mark.parametrize("experts", [0, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_at_random_are_numbers(experts: int, dtype: str, tmp_path: Path) -> None:
    fields = {**BASE, "architectures": [GRANITE], "dtype": dtype, "num_local_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = Config(model=ModelConfig(load_format="dummy"))
    model = load_model(tmp_path, config, CPU, lambda *_: None)
    driver = HybridDriver(hybrid_runner(model), 100)
    s = driver.admit(tokens(300), 320)
    driver.run()
    logits = torch.stack(list(s.logits.values()))
    assert torch.isfinite(logits).all() and float(logits.std()) > 0


def test_what_configs_leave_out(tmp_path: Path) -> None:
    """And names and numbers as Granite 4.0's checkpoints have them."""
    kinds = ["mamba"] * 5 + ["attention"] + ["mamba"] * 2
    fields = {"architectures": [GRANITE], "hidden_size": 1536, "num_hidden_layers": 8,
              "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
              "mamba_d_state": 128, "layer_types": kinds, "dtype": "bfloat16",
              "num_local_experts": 62, "num_experts_per_tok": 6, "residual_multiplier": 0.22,
              "embedding_multiplier": 12, "rms_norm_eps": 1e-5, "logits_scaling": 6,
              "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = read_shape(tmp_path, Config())
    assert shape.recurrent == (0, 1, 2, 3, 4, 6, 7) and shape.groups[0].layers == (5,)
    assert shape.state is not None
    assert (shape.state.state, shape.state.columns) == ((48, 64, 128), (3, 3072 + 256))
    assert shape.norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert shape.embed_scale == pytest.approx(12 / 0.22)
    assert (shape.ropes, shape.logit_scale, shape.head_dim) == ((), 1 / 6, 128)
    assert shape.recurrence is not None and shape.experts is not None
    assert shape.recurrence.time_limit == (0, math.inf)  # type: ignore[union-attr]
    assert (shape.experts.number, shape.experts.size, shape.experts.shared) == (62, 11_008, 1024)
    del fields["layer_types"]
    fields["layers_block_type"] = kinds
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_shape(tmp_path, Config()) == shape


@pytest.mark.parametrize(("change", "message"), [
    ({"layer_types": ["mamba"] * 4}, "layer_types: a model without attention"),
    ({"layer_types": ["mamba", "attention"]}, "layer_types: must be 4 times mamba or attention"),
    ({"layer_types": ["mamba", [], 3, "attention"]}, "layer_types: must be 4 times"),
    ({"mamba_n_groups": 3}, "mamba_n_groups: 3 does not divide 8 heads"),
    ({"mamba_n_heads": 7}, "mamba_n_heads: 7 heads of 16 are not mamba_expand * hidden_size, 128"),
    ({"mamba_d_conv": 1}, "mamba_d_conv: must be at least 2"),
    ({"num_local_experts": 2}, "num_experts_per_tok: 3 is more than 2 experts"),
    ({"num_local_experts": "many"}, "num_local_experts: must be a positive integer"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type: must be rope or nope"),
    ({"time_step_limit": [1.0, 0.5]}, "time_step_limit: must be two numbers, the least first"),
    ({"time_step_limit": "none"}, "time_step_limit: must be two numbers"),
    ({"residual_multiplier": 0}, "residual_multiplier: must be a positive number"),
])
def test_what_is_not_served_is_named(tmp_path: Path, change: dict[str, Any],
                                     message: str) -> None:
    fields = {"architectures": [GRANITE], **BASE, **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(BadModel) as caught:
        read_shape(tmp_path, Config())
    assert message in str(caught.value) and "\n" not in str(caught.value)
