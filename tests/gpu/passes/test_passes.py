"""Layers are written plainly and joined by passes: what is found, what is refused, and that both
give the same tokens."""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import CONFIGS, SMALL
from helpers_hybrid import hybrid_runner
from helpers_models import CPU
from helpers_ranks import run_ranks, whole
from helpers_worker import complete, make_runner
from torch.fx import Graph

from actorium.actors.config.parsed_values import PASSES, parse_passes
from actorium.actors.config.tree import Config, DeviceConfig, MemoryConfig, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.attention import Attention
from actorium.gpu.models.decoder import Decoder, Layer
from actorium.gpu.models.mlp import Mixture
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.passes import canonical_ops as ops
from actorium.gpu.passes.fusions import ALL
from actorium.gpu.passes.layer_graph import Lines
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.kernels.inputs import InputForm
from actorium.kernels.reference.kv import raw
from actorium.tools.cli import main
from actorium.tools.cli.backends_command import columns

PROMPTS = [[5, 9, 31, 7, 100, 8, 3], [11] * 20, [1, 2]]
GREEDY = ResolvedParams(max_tokens=12, temperature=0.0)
LLAMA, QWEN3, GEMMA, MOE = (next(raw for raw in CONFIGS if raw["architectures"][0] == name)
                            for name in ("LlamaForCausalLM", "Qwen3ForCausalLM",
                                         "Gemma3ForCausalLM", "Qwen3NextForCausalLM"))
DEEPSEEK = next(raw for raw in CONFIGS if raw["architectures"] == ["DeepseekV3ForCausalLM"])
SOME = (0, 3, 5, 6, 8, 10, 15, 16, 17)
EACH = [pytest.param(raw, id=f"{raw['architectures'][0]}-{place}",
                     marks=() if place in SOME else pytest.mark.slow)
        for place, raw in enumerate(CONFIGS)]


def loaded(path: Path, raw: dict[str, Any], dtype: str = "float32",
         memory: MemoryConfig = MemoryConfig(), **device: Any) -> Decoder:
    """A model of random weights."""
    whole = raw if "text_config" in raw else {**SMALL, **raw}
    (path / "config.json").write_text(json.dumps(whole))
    config = Config(model=ModelConfig(load_format="dummy", dtype=dtype, seed=3),
                    memory=memory, device=DeviceConfig(**device))
    return load_model(path, config, CPU, lambda *_: None)


def counts(model: Decoder, on: str = "all") -> dict[str, int]:
    """How often each pass matched, of those that did."""
    return {name: n for name, n in PassManager(model, parse_passes(on)).install().matches.items()
            if n}


def test_the_names_are_those_of_the_passes() -> None:
    assert tuple(own.name for own in ALL) == PASSES


@pytest.mark.parametrize(("text", "on"), [
    ("all", PASSES), ("none", ()), ("none,add_norm", ("add_norm",)),
    ("gated_product", ("gated_product",)),
    ("-add_norm", PASSES[:3] + PASSES[4:]), ("auto", PASSES), ("auto,-reduce_norm", PASSES[1:]),
    (" all , -product_add,-norm_add", PASSES[:1] + PASSES[3:])])
def test_which_are_on(text: str, on: tuple[str, ...]) -> None:
    assert parse_passes(text) == on


@pytest.mark.parametrize("text", ["", "some", "all,-norms", "add_norm,all", "all,auto"])
def test_unknown_names_are_refused_with_the_list(text: str) -> None:
    with pytest.raises(BadConfig, match="norm_quant, act_quant") as caught:
        parse_passes(text)
    assert "passes" in str(caught.value)


@pytest.mark.parametrize("raw", EACH)
def test_the_same_tokens_without_passes(raw: dict[str, Any], tmp_path: Path) -> None:
    fused, plain = loaded(tmp_path, raw), loaded(tmp_path, raw, passes="none")
    runner = hybrid_runner if plain.shape.recurrent else make_runner
    want = complete(runner(plain), PROMPTS, GREEDY, budget=16)
    assert complete(runner(fused), PROMPTS, GREEDY, budget=16) == want


@pytest.mark.parametrize("raw", [LLAMA, QWEN3, GEMMA, MOE])
def test_each_pass_can_be_left_out(raw: dict[str, Any], tmp_path: Path) -> None:
    model = loaded(tmp_path, raw, "bfloat16")
    everything = counts(model)
    for name in everything:
        left = counts(model, f"all,-{name}")
        assert name not in left
    assert counts(model, "none") == {}


def test_how_often_they_match(tmp_path: Path) -> None:
    assert counts(loaded(tmp_path, LLAMA)) == {"product_add": 8, "qk_rope_kv": 4}
    native = loaded(tmp_path, QWEN3, "bfloat16")
    fuses = native.layers[0].mlp.gate_up.fuses  # type: ignore[attr-defined]
    gated = {"gated_product": 4} if fuses else {}
    assert counts(native) == {"product_add": 8, "qk_rope_kv": 4, **gated}
    assert counts(loaded(tmp_path, GEMMA)) == {"norm_add": 8, "qk_rope_kv": 4}
    # Three layers with experts leave a sum to the norm behind them.
    found = counts(loaded(tmp_path, MOE))
    assert found["product_add"] == 5 and found["gate_add"] == 3 and found["add_norm"] == 2
    assert counts(native, "all,-product_add") == {"add_norm": 7, "qk_rope_kv": 4, **gated}, \
        "the last sum is before the final norm, which is not the layer's"


def swapped_sum(self: Layer, hidden: Any, step: Any) -> Any:
    hidden = ops.add(hidden, self.mixer.forward(
        ops.norm(hidden, self.mixer_norm, self.eps), step))
    return ops.add(self.mlp.forward(ops.norm(hidden, self.mlp_norm, self.eps)), hidden)


def swapped_norm(self: Layer, hidden: Any, step: Any) -> Any:
    y = self.mixer.forward(ops.norm(hidden, self.mixer_norm, self.eps), step)
    hidden = ops.add(hidden, ops.norm(y, self.mixer_out_norm, self.eps))
    y = self.mlp.forward(ops.norm(hidden, self.mlp_norm, self.eps))
    return ops.add(ops.norm(y, self.mlp_out_norm, self.eps), hidden)


def swapped_kv(self: Attention, x: Any, step: Any) -> Any:
    q, k, v = ops.split(ops.linear(x, self.qkv), self.shape.heads, self.shape.head_dim)
    turn = step.ropes[self.rope]
    q, k = ops.rope(q, turn), ops.rope(k, turn)
    ops.write_kv(v, k, self, step)
    return ops.linear(ops.attend(q, self, step), self.o)


def unturned(self: Attention, x: Any, step: Any) -> Any:
    q, k, v = ops.split(ops.linear(x, self.qkv), self.shape.heads, self.shape.head_dim)
    ops.write_kv(ops.rope(k, step.ropes[self.rope]), v, self, step)
    return ops.linear(ops.attend(q, self, step), self.o)


def ungated(self: Mixture, x: Any) -> Any:
    logits = ops.linear(x, self.router)
    out = ops.route(x, logits, self)
    assert self.shared is not None
    gate = ops.shared_gate(logits, self.shape.number)
    return ops.add(out, ops.sigmoid_scale(self.shared.forward(x), gate))


@pytest.mark.parametrize(("raw", "kind", "forward", "at", "name", "node"), [
    (LLAMA, Layer, swapped_sum, "model.layers.0", "product_add", "add"),
    (GEMMA, Layer, swapped_norm, "model.layers.0", "norm_add", "add"),
    (LLAMA, Attention, swapped_kv, "model.layers.0", "qk_rope_kv", "write_kv"),
    (LLAMA, Attention, unturned, "model.layers.0", "qk_rope_kv", "write_kv"),
    (MOE, Mixture, ungated, "model.layers.0", "gate_add", "sigmoid_scale")])
def test_a_broken_pattern_ends_the_start(
    raw: dict[str, Any], kind: type, forward: Any, at: str, name: str, node: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operands the wrong way round: found, and named by layer, pass and operation."""
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(BadModel, match=rf"^{at}: the pass {name} .*found its pattern [01] times, "
                                       rf"not [12]: what is left of it: .*{node}"):
        loaded(tmp_path, raw)


def test_one_odd_layer_is_named(tmp_path: Path) -> None:
    """Every layer is looked at, not only the first of its class."""
    model = loaded(tmp_path, LLAMA)
    odd = model.layers[2]

    class OddLayer(Layer):
        forward = swapped_sum

    model.layers[2] = OddLayer(odd.mixer, odd.mlp, odd.eps, odd.mixer_norm, odd.mlp_norm)
    with pytest.raises(BadModel, match=r"^model\.layers\.2: the pass product_add"):
        PassManager(model, PASSES).install()


def test_a_wrong_fusion_is_caught_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded(tmp_path, QWEN3)
    monkeypatch.setattr(type(model.ops), "rotate_write", lambda *_: None)
    with pytest.raises(BadModel, match=r"^model\.layers\.0: the pass qk_rope_kv .* made "
                                       r"%rotate_write.*results differ by"):
        PassManager(model, PASSES).install()
    PassManager(model, parse_passes("all,-qk_rope_kv")).install()


@pytest.mark.parametrize("kept", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_of_8_bits_are_checked_as_they_are_kept(
    kept: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault in the write of such pages alone ends the start: values that lie where keys do."""
    memory = MemoryConfig(kv_cache_dtype=kept)
    model = loaded(tmp_path, QWEN3, dtype, memory)
    report = PassManager(model, PASSES).install()
    assert report.matches["qk_rope_kv"] == 4 and report.error < 0.02
    whole, bad = type(model.ops).rotate_write, TORCH_DTYPES[kept]

    def swapped(own: Any, qkv: Any, heads: int, norm: Any, eps: float, turns: Any, pages: Any,
                index: Any, scales: Any = None) -> None:
        whole(own, qkv, heads, norm, eps, turns, pages, index, scales)
        if pages.dtype is bad:
            raw(pages)[index] = raw(pages)[index].flip(1)

    monkeypatch.setattr(type(model.ops), "rotate_write", swapped)
    with pytest.raises(BadModel, match=r"^model\.layers\.0: the pass qk_rope_kv .* made "
                                       r"%rotate_write.*results differ by"):
        loaded(tmp_path, QWEN3, dtype, memory)
    loaded(tmp_path, QWEN3, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_check_what_each_does_itself(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that loads does not wait for the sums of one that has not begun to."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **QWEN3}))
    config = Config(model=ModelConfig(load_format="dummy", dtype=dtype, seed=3))

    def body(group: RankGroup) -> float:
        if group.place.rank == 1:  # behind the other in any case
            group.barrier()
        model = load_model(tmp_path, config, CPU, lambda *_: None, group)
        if group.place.rank == 0:
            group.barrier()
        return PassManager(model, PASSES).install().error

    errors = whole(run_ranks(tmp_path / "a", 2, body))
    assert all(error < 0.02 for error in errors) and any(errors) == (dtype == "bfloat16")
    monkeypatch.setattr(type(loaded(tmp_path, QWEN3, dtype).ops), "rotate_write", lambda *_: None)
    for error in run_ranks(tmp_path / "b", 2, lambda group: load_model(
            tmp_path, config, CPU, lambda *_: None, group)):
        assert "model.layers.0: the pass qk_rope_kv" in str(error)


@pytest.mark.parametrize(("raw", "matches", "without"), [
    # The mixer's sum meets the MLP's norm, the MLP's that of the next layer; the last one is added.
    (LLAMA, {"reduce_norm": 7, "product_add": 1}, {"product_add": 8}),
    (GEMMA, {"norm_add": 8}, {"norm_add": 8}),
    (MOE, {"reduce_norm": 7, "gate_add": 3}, {"product_add": 5, "gate_add": 3, "add_norm": 2}),
    (DEEPSEEK, {"reduce_norm": 7, "product_add": 3}, {"product_add": 8, "add_norm": 2})],
    ids=["llama", "gemma", "moe", "deepseek"])
def test_sums_over_ranks_are_joined_with_the_norm_behind_them(
    raw: dict[str, Any], matches: dict[str, int], without: dict[str, int], tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **raw}))
    config = Config(model=ModelConfig(load_format="dummy", dtype="bfloat16", seed=3))

    def body(group: RankGroup) -> list[dict[str, int]]:
        model = load_model(tmp_path, config, CPU, lambda *_: None, group)
        return [{name: n for name, n in counts(model, on).items()
                 if name not in ("qk_rope_kv", "gated_product")}
                for on in ("all", "all,-reduce_norm")]

    for joined, apart in whole(run_ranks(tmp_path / "a", 2, body)):
        assert joined == matches
        assert apart == without


def test_a_broken_sum_over_ranks_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **LLAMA}))
    config = Config(model=ModelConfig(load_format="dummy", dtype="bfloat16", seed=3),
                    device=DeviceConfig(passes="all"))
    monkeypatch.setattr(Layer, "forward", swapped_sum)
    for error in run_ranks(tmp_path / "a", 2, lambda group: load_model(
            tmp_path, config, CPU, lambda *_: None, group)):
        assert isinstance(error, BadModel)
        assert re.match(r"model\.layers\.0: the pass reduce_norm .*found its pattern 0 times, "
                        r"not 1: what is left of it: .*norm", str(error)), error


def test_layers_share_what_is_made(tmp_path: Path) -> None:
    model = loaded(tmp_path, LLAMA)
    code = {run.whole.__func__ for run in model.runs}  # type: ignore[attr-defined]
    assert len(code) == 1
    assert PassManager(loaded(tmp_path, GEMMA), PASSES).install().structures == 2, "by their ropes"


def test_graphs_are_written_before_and_after_each(tmp_path: Path) -> None:
    loaded(tmp_path, QWEN3, dump_passes=str(tmp_path / "graphs"))
    at = tmp_path / "graphs" / "model.layers.0"
    assert [path.name for path in sorted(at.iterdir())] == [
        "0_traced.py", "2_product_add.py", "5_qk_rope_kv.py"]
    before, after = ((at / name).read_text() for name in ("0_traced.py", "5_qk_rope_kv.py"))
    assert "ops.write_kv(rope_1" in before and "ops.rotate_write(linear, mixer, step)" in after
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match="dump_passes: .*file"):
        loaded(tmp_path, QWEN3, dump_passes=str(tmp_path / "file"))


def test_operations_mean_what_they_say_without_a_graph() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(ops.add(x, x), 2 * x)
    torch.testing.assert_close(ops.norm(x, torch.ones(8), 0.0).square().mean(-1), torch.ones(3))


def test_every_pass_tells_what_it_joins() -> None:
    for own in ALL:
        assert own.about and own.anchors and own.__doc__


def test_columns_stay_apart_however_long_they_are() -> None:
    cells = ("87403 -> 96944", "1284032 -> 1248535", "47502482 -> 59102200")
    assert re.split(r"\s{2,}", columns("product_add", *cells).strip()) == ["product_add", *cells]


def test_the_command_tells_what_each_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actorium.tools.cli.backends_command.TOKENS", (2,))
    monkeypatch.setattr("actorium.gpu.passes.pass_choice.TOKENS", (1,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded(tmp_path, MOE)
    assert main(["passes", str(tmp_path), "--load-format", "dummy", "--dtype", "float32",
                 "--skip-tokenizer", "--passes", "all,-norm_quant"]) == 0
    assert len(list((tmp_path / "actorium").glob("passes-*.json"))) <= 1
    lines = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines()
             if (words := line.split())}
    assert lines["gate_add"][:2] == ["3", "3"] and lines["gate_add"][3] == "->"
    assert lines["--passes"][0] == "auto:"
    assert lines["norm_quant"] == ["off"] and lines["norm_add"] == ["0", "0"]


def test_functions_hold_named_tuples_and_let_go_of_what_is_read_for_the_last_time() -> None:
    """Where a graph has one as an argument, the function is given one of the same kind."""
    class Part:
        scale = 3.0

    graph = Graph()
    x = graph.placeholder("x")
    form = InputForm(columns=8)
    y = graph.call_function(operator.mul, (x, graph.get_attr("scale")))
    graph.output((y, graph.call_function(lambda own, many: (own, many), (form, [1, (2, None)]))))
    lines = Lines(graph)
    source = lines.whole("run")
    (run,) = lines.compiled({"run": source}, "<test>")
    product, (found, many) = run(Part(), 2.0)
    assert product == 6.0 and type(found) is InputForm and found == form and many == [1, (2, None)]
    assert "mul = mul__0(x, scale);  x = None;  scale = None" in source
