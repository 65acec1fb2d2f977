"""Drafting layers against transformers' `MtpModel`: logits, chains, windows, what is loaded."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers_deepseek import DEEPSEEK, YARN, add_mtp, write_deepseek
from helpers_gguf import own_cache, write_model
from helpers_gguf_rows import drafting
from helpers_hybrid import DENSE, NEXT, SPARSE, HybridDriver, hybrid_runner, write_hybrid
from helpers_models import CPU, Seq, Stepper, generated, write_checkpoint
from helpers_nemotron import NEMOTRON, write_nemotron
from helpers_pairs import pairs
from helpers_parity import ATOL, tokens
from torch import Tensor

from actorium.actors.config.tree import Config, ModelConfig, SpeculationConfig
from actorium.actors.errors import BadModel
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.models.model_dir import resolve
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.sizes import page_table_width
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool, make_draft_pool, make_pools
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.speculation import make_proposers
from actorium.gpu.step.staging import HostArrays
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.weights.dtypes import TORCH_DTYPES

__all__ = ["own_cache"]
GLM = "Glm4MoeForCausalLM"
GLM, V32 = "Glm4MoeForCausalLM", "DeepseekV32ForCausalLM"
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": (DEEPSEEK, {}),
    "deepseek-yarn": (DEEPSEEK, {"rope_parameters": YARN, "rope_interleave": False,
                                 "q_lora_rank": None, "first_k_dense_replace": 3}),
    "glm4-moe": (GLM, {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 24, "use_qk_norm": True, "num_nextn_predict_layers": 1}),
    "deepseek-v3.2": (V32, {
        **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 24, "num_nextn_predict_layers": 1,
        "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"],
        "num_mtp_layers": 1, "index_topk": 9, "index_head_dim": 12, "index_n_heads": 16}),
    "qwen3.5": (DENSE, {}),
    "qwen3.5-moe": (SPARSE, {}),
    "qwen3-next": (NEXT, {}),
    "nemotron-h": (NEMOTRON, {}),
}


def load(path: Path, speculative: str = "auto", **model: Any) -> Decoder:
    config = Config(model=ModelConfig(**model), speculation=SpeculationConfig(
        speculative=speculative))
    return load_model(path, config, CPU, lambda *_: None)


def promise(path: Path, **fields: Any) -> None:
    """Fields of config.json changed."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def write(path: Path, architecture: str, **options: Any) -> tuple[Any, Any]:
    """A checkpoint with its MTP layer; transformers' model and its `MtpModel`."""
    if architecture == DEEPSEEK:
        oracle = write_deepseek(path, 3, **options)
    elif architecture == NEMOTRON:
        return write_nemotron(path, **options)
    elif architecture in (GLM, V32):
        oracle = write_checkpoint(path, architecture, 3, **options)
        oracle.set_attn_implementation("eager")  # only then is the MTP layer given a mask
    else:
        oracle = write_hybrid(path, architecture, 3, **options)
        promise(path, mtp_num_hidden_layers=1)
    return oracle, add_mtp(path, oracle)


@dataclass
class Case:
    model: Any
    oracle: Any
    mtp: Any
    path: Path

    def hidden(self, tokens: list[int]) -> Tensor:
        """f32[n, hidden]: of the model, after its final norm."""
        with torch.no_grad():
            return self.oracle.model(torch.tensor([tokens])).last_hidden_state[0]

    def drafts(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer gives, [n, hidden], and its logits, of `tokens[1:]` and hidden [n, ...]
        all at once."""
        n = len(hidden)
        with torch.no_grad():
            out = self.mtp.forward_layer(0, hidden[None], torch.arange(n)[None], None,
                                         input_ids=torch.tensor([tokens[1:n + 1]]))[0]
            return out, self.mtp._project_to_logits(out)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        architecture, options = CASES[kind]
        path = tmp_path_factory.mktemp("model")
        oracle, mtp = write(path, architecture, **options)
        return Case(load(path), oracle, mtp, path)

    return cached


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


class Driver(Stepper):
    """Steps of a drafter: rows of sequences whose hiddens a test brings. Pages are full of NaN."""

    def __init__(self, model: Any, page_size: int = 16) -> None:
        super().__init__(model, 2048 // page_size, page_size)
        shape = model.shape
        self.pool = make_draft_pool(shape, self.pages, page_size, TORCH_DTYPES[shape.dtype], CPU)
        for layer in self.pool.tensors:
            layer.fill_(math.nan)

    def batch(self, extends: list[tuple[Seq, int]], decodes: list[Seq],
              q_len: int = 1) -> ForwardBatch:
        """Of chunks, and of the q_len rows that follow on what is done of others."""
        rows = [*extends, *((seq, q_len) for seq in decodes)]
        for seq, count in rows:
            self._grow(seq, seq.done + count)
            seq.tokens += [-1] * (seq.done + count - len(seq.tokens))  # drafters do not read them
        batch = self._batch(rows, len(extends), q_len, True, 0)
        for seq, count in rows:
            seq.done += count
        return batch

    def run(self, batch: ForwardBatch, after: list[int], hidden: Tensor,
            rows: list[int] | None = None) -> Tensor:
        """The drafter's output; after: the token after each row's."""
        return self.model.drafter.forward(
            torch.tensor(after), hidden, batch, self.pool,
            None if rows is None else torch.tensor(rows, dtype=torch.int64))


@pytest.mark.parametrize(("case", "chunk", "page_size"), pairs(
    CASES, [(1, 16), (7, 1), (64, 64), (513, 16)]), indirect=["case"])
def test_logits_of_a_prompt_in_chunks(case: Case, chunk: int, page_size: int) -> None:
    ids = tokens(131 if chunk > 1 else 20)
    hidden = case.hidden(ids[:-1])
    want, logits = case.drafts(ids, hidden)
    driver, seq, got = Driver(case.model, page_size), Seq(ids), []
    while seq.done < len(hidden):
        at, count = seq.done, min(chunk, len(hidden) - seq.done)
        got.append(driver.run(driver.batch([(seq, count)], []), ids[at + 1:at + count + 1],
                              hidden[at:at + count]))
    out = torch.cat(got)
    torch.testing.assert_close(out, want, atol=ATOL, rtol=0)
    torch.testing.assert_close(case.model.drafter.logits(out), logits, atol=ATOL, rtol=0)


def test_rows_alone(case: Case) -> None:
    """Those asked for, of extends and windows in one step, are what all rows would have."""
    ids = [tokens(n, n) for n in (40, 25, 33)]
    hidden = [case.hidden(own[:-1]) for own in ids]
    want = [case.drafts(own, h)[0] for own, h in zip(ids, hidden, strict=True)]
    driver, seqs = Driver(case.model), [Seq(list(own)) for own in ids]
    for seq, own, h in zip(seqs[1:], ids[1:], hidden[1:], strict=True):
        driver.run(driver.batch([(seq, len(h) - 3)], []), own[1:-3], h[:-3], [])
    batch = driver.batch([(seqs[0], 39)], seqs[1:], 3)
    after = [*ids[0][1:], *ids[1][-3:], *ids[2][-3:]]
    got = driver.run(batch, after, torch.cat((hidden[0], hidden[1][-3:], hidden[2][-3:])),
                     [38, 40, 44])
    torch.testing.assert_close(got, torch.stack((want[0][-1], want[1][-2], want[2][-1])),
                               atol=ATOL, rtol=0)


def test_chained_drafts(case: Case) -> None:
    """Each draft's own output goes on, for two sequences side by side; then tokens were accepted
    and the true hiddens overwrite what drafts had written."""
    ids = [tokens(30, 5), tokens(19, 6)]
    hidden = [case.hidden(own[:-1]) for own in ids]
    driver, seqs, lasts = Driver(case.model), [Seq(list(own)) for own in ids], []
    for seq, own, h in zip(seqs, ids, hidden, strict=True):
        lasts.append(driver.run(driver.batch([(seq, len(h))], []), own[1:], h, [len(h) - 1]))
    last = torch.cat(lasts)
    longer, chained = [list(own) for own in ids], list(hidden)
    for _ in range(3):
        drafts = case.model.drafter.logits(last).argmax(-1).tolist()
        for i, own in enumerate(longer):
            want, logits = case.drafts(own, chained[i])
            torch.testing.assert_close(last[i], want[-1], atol=ATOL, rtol=0)
            assert drafts[i] == int(logits[-1].argmax())
            own.append(drafts[i])
            chained[i] = torch.cat((chained[i], want[-1:]))
        last = driver.run(driver.batch([], seqs), drafts, last)
    for i, seq in enumerate(seqs):
        seq.done, more = len(ids[i]) - 1, longer[i][-3:]
        true = case.hidden(longer[i])[len(ids[i]) - 1:-1]
        got = driver.run(driver.batch([], [seq], 3), more, true, [2])
        want, _ = case.drafts(longer[i], case.hidden(longer[i][:-1]))
        torch.testing.assert_close(got, want[-1:], atol=ATOL, rtol=0)


def test_the_hidden_before_the_norm_is_another(case: Case) -> None:
    """Feeding what comes before the final norm would only lower acceptance: here it shows."""
    ids, before = tokens(20), []
    hook = case.oracle.model.norm.register_forward_pre_hook(
        lambda _, inputs: before.append(inputs[0][0]))
    want, _ = case.drafts(ids, case.hidden(ids[:-1]))
    hook.remove()
    driver = Driver(case.model)
    batch = driver.batch([(Seq(ids), 19)], [])
    got = driver.run(batch, ids[1:], before[0])
    assert (got - want).abs().max() > 1e-2
    right = driver.run(batch, ids[1:], case.model.norm_rows(before[0]))
    torch.testing.assert_close(right, want, atol=ATOL, rtol=0)


def test_a_model_gives_all_rows(case: Case) -> None:
    """In steps with extends and decodes: every row, and those wanted are the same as ever."""
    driver = HybridDriver(hybrid_runner(case.model), 33)
    model, inner, seen = case.model, case.model.forward, []

    def forward(batches: Any, pools: Any, recurrent: Any = None) -> Tensor:
        for batch in batches:
            batch.all_rows = True
        hidden = inner(batches, pools, recurrent)
        assert len(hidden) == len(batches[0].tokens)
        seen.append((batches[0].positions, model.norm_rows(hidden)))
        return hidden.index_select(0, batches[0].logit_rows)

    model.forward = forward
    try:
        a = driver.admit(tokens(50), 70)
        driver.run()
    finally:
        del model.forward
    positions = torch.cat([at for at, _ in seen])
    hidden = torch.cat([h for _, h in seen])
    want = case.hidden(a.tokens)
    real = positions < 69
    torch.testing.assert_close(hidden[real], want[positions[real]], atol=ATOL, rtol=0)
    for length, logits in a.logits.items():
        row = want[length - 1]
        torch.testing.assert_close(logits, model.head_logits(row[None])[0], atol=ATOL, rtol=0)


def test_one_draft_as_transformers_speculates(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate(use_mtp=True)` drafts what this layer drafts: its own checkpoint, its own loop.
    Where it finds the layer's names is written for the one model of 61 layers."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    oracle, _ = write(tmp_path, DEEPSEEK)
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected",
                        [r"model\.layers\.3.*"])
    theirs = DeepseekV3ForCausalLM.from_pretrained(str(tmp_path))
    drafted: list[tuple[list[int], Tensor]] = []
    inner = MtpModel.forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, *args, **kwargs)
        drafted.append((kwargs["full_input_ids"][0].tolist(), out[1][0, 0]))
        return out

    monkeypatch.setattr(MtpModel, "forward", spy)
    ids = torch.tensor([tokens(12)])
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), use_mtp=True,
                          do_sample=False, max_new_tokens=6, eos_token_id=None)[0].tolist()
    assert len(drafted) >= 4 and len(out) == 18
    model = load(tmp_path)
    case = Case(model, oracle, None, tmp_path)
    for seen, logits in drafted:
        driver = Driver(model)
        last = driver.run(driver.batch([(Seq(seen), len(seen) - 1)], []), seen[1:],
                          case.hidden(seen[:-1]), [len(seen) - 2])
        torch.testing.assert_close(model.drafter.logits(last)[0], logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_in_the_workers_steps(drafts: int, tmp_path: Path) -> None:
    """The first drafts are those of transformers, chained; the tokens are those without any."""
    oracle, mtp = write(tmp_path, DEEPSEEK)
    model, ids = load(tmp_path), tokens(21)
    case, shape = Case(model, oracle, mtp, tmp_path), model.shape
    tables = SlotTables(HostArrays(CPU), 3, page_table_width(256, 4), 4, 199, 256, drafts=drafts)
    dtype = TORCH_DTYPES[shape.dtype]
    proposers = make_proposers(model.drafter, shape, KVPagePool(shape, 40, 4, dtype, CPU, 1),
                               tables)
    runner = ModelRunner(model, make_pools(shape, [40], 4, dtype, CPU), tables,
                         proposers=proposers)
    pages = np.array([[1, i, 5 + i] for i in range(20)], np.int32)
    admit = Admit(1, np.array(ids, np.int32).tobytes(), 21, 0, b"",
                  ResolvedParams(max_tokens=24, temperature=0.0), 1)
    runner.run(StepPlan(1, 1, admit=[admit], page_appends=pages.tobytes(),
                        extend=np.array([1, 13], np.int32).tobytes(), drafts=drafts))
    result = runner.run(StepPlan(1, 2, extend=np.array([1, 8], np.int32).tobytes(),
                                 drafts=drafts))
    own = [*ids, *np.frombuffer(result.tokens, np.int32).tolist()]
    hidden, longer = case.hidden(ids), list(own)
    for _ in range(drafts):
        out, logits = case.drafts(longer, hidden)
        longer.append(int(logits[-1].argmax()))
        hidden = torch.cat((hidden, out[-1:]))
    assert tables.drafts.tokens[1].tolist() == longer[22:]
    step = 3
    while len(own) < 45:
        result = runner.run(StepPlan(1, step, decode=np.array([1], np.int32).tobytes(),
                                     drafts=drafts))
        own += np.frombuffer(result.tokens, np.int32).tolist()
        step += 1
    assert own == ids + generated(oracle, ids, 24)


# --- what is loaded ------------------------------------------------------------------------------

@pytest.mark.parametrize("architecture", [DEEPSEEK, DENSE])
def test_loaded_where_asked_for_or_there(architecture: str, tmp_path: Path) -> None:
    write(tmp_path, architecture)
    assert load(tmp_path).drafter is not None and load(tmp_path).shape.mtp_layers == 1
    assert load(tmp_path, "mtp:3,fixed").drafter is not None
    off = load(tmp_path, "off")
    assert off.drafter is None and off.shape.mtp_layers == 0
    assert load(tmp_path, load_format="dummy").drafter is None
    assert load(tmp_path, "mtp:1", load_format="dummy").drafter is not None


@pytest.mark.parametrize("kind", ["glm4-moe", "qwen3.5"])
def test_out_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """What the layer gives is what that of the checkpoint gives, to the bit; without it, all else
    is read as ever, biases too."""
    architecture, options = CASES[kind]
    more = {"attention_bias": True} if architecture == GLM else {
        "layer_types": ["linear_attention", "full_attention"] * 2}
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", architecture, **options, **more)
    layers, file = 3 if architecture == GLM else 4, tmp_path / "m.gguf"

    def drafter(writer: gguf.GGUFWriter) -> None:
        at = writer.arch
        writer.kv_data[0].pop(f"{at}.block_count")
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
        for name, weight in drafting(tmp_path / "model", layers):
            writer.add_tensor(name, weight.numpy())

    write_model(file, architecture, "F32", 3, drafter, **options, **more)
    models = [load(tmp_path / "model"), load(resolve(str(file)))]
    ids, hidden = tokens(40), torch.randn(39, 64)
    found = []
    for model in models:
        driver = Driver(model)
        found.append(driver.run(driver.batch([(Seq(list(ids)), 39)], []), ids[1:], hidden))
    assert torch.equal(*found) and float(found[0].abs().max()) > 0.1
    off = load(resolve(str(file)), "off")
    assert off.drafter is None and off.shape.mtp_layers == 0


@pytest.mark.parametrize("architecture", [DEEPSEEK, NEXT])
def test_a_promise_that_is_not_kept(architecture: str, tmp_path: Path,
                                    caplog: pytest.LogCaptureFixture) -> None:
    if architecture == DEEPSEEK:
        write_deepseek(tmp_path)
    else:
        write_hybrid(tmp_path, architecture)
    with caplog.at_level(logging.INFO, "actorium.model"):
        assert load(tmp_path).drafter is None
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        f"no tensor {'mtp.fc' if architecture == NEXT else 'model.layers.3.eh_proj'}.weight, so "
        "nothing is drafted"]
    with pytest.raises(BadModel, match=r"tensor (mtp|model\.layers\.3)\.\S+ is missing"):
        load(tmp_path, "mtp:2")


def test_several_layers_are_one_chained(tmp_path: Path) -> None:
    write(tmp_path, DEEPSEEK)
    promise(tmp_path, num_nextn_predict_layers=3)
    model = load(tmp_path)
    assert model.shape.mtp_layers == 1 and model.drafter is not None


def test_sharded_checkpoints(tmp_path: Path) -> None:
    """The index tells whether the layer is there."""
    from safetensors.torch import load_file, save_file

    write(tmp_path, DENSE)
    file = tmp_path / "model.safetensors"
    parts: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in load_file(str(file)).items():
        parts[f"{'ab'[name.startswith('mtp.')]}.safetensors"][name] = tensor
    file.unlink()
    for name, part in parts.items():
        save_file(part, str(tmp_path / name))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {
        tensor: name for name, part in parts.items() for tensor in part}}))
    assert load(tmp_path).drafter is not None
    index.write_text(json.dumps({"weight_map": dict.fromkeys(parts["a.safetensors"],
                                                             "a.safetensors")}))
    assert load(tmp_path).drafter is None
