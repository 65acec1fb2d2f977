"""The datasets of `actorium bench`, and when their requests are sent."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.load import filter_of, length_range, load_dataset
from actorium.tools.bench.datasets.options import DatasetOptions, unused
from actorium.tools.bench.datasets.sample import SampleRequest, Tokens, TokenVocabulary
from actorium.tools.bench.load_driver import RampUp, arrivals

WITH = Tokens("", TokenVocabulary(1 << 20))
"""The demo model's tokenizer."""
WITHOUT = Tokens(None, TokenVocabulary(300))


def load(tokens: Tokens = WITHOUT, style: str = "vllm", chat: bool = False,
         **values: Any) -> list[SampleRequest]:
    return load_dataset(DatasetOptions(**values), tokens, style, chat)


def test_range_ratio_in_both_worlds() -> None:
    assert length_range(100, None, "vllm") == length_range(100, None, "sglang") == (100, 100)
    assert length_range(128, 0.5, "vllm") == (64, 192)
    assert length_range(128, 0.5, "sglang") == (64, 128)
    assert length_range(128, 1.0, "sglang") == (128, 128)
    assert length_range(128, 0.0, "sglang") == (1, 128)
    for style, ratio in (("vllm", 1.0), ("sglang", 1.1), ("vllm", -0.1)):
        with pytest.raises(BadConfig, match="--random-range-ratio"):
            length_range(128, ratio, style)


def test_random_prompts_keep_to_their_lengths() -> None:
    found = load(num_prompts=200, random_input_len=50, random_output_len=20,
                 random_range_ratio=0.2, random_prefix_len=7, seed=3)
    lengths = [len(request.prompt or ()) - 7 for request in found]
    assert min(lengths) >= 40 and max(lengths) <= 60 and len(set(lengths)) > 5
    assert all(16 <= request.output_len <= 24 for request in found)
    assert all(0 <= token < 300 for request in found for token in request.prompt or ())
    assert len({tuple((request.prompt or [])[:7]) for request in found}) == 1
    assert len({tuple((request.prompt or [])[7:12]) for request in found}) > 190


def test_the_seed_is_the_loads() -> None:
    first = load(num_prompts=5, random_input_len=9, seed=1)
    assert first == load(num_prompts=5, random_input_len=9, seed=1)
    assert first != load(num_prompts=5, random_input_len=9, seed=2)


def test_random_text_has_the_tokens_asked_for() -> None:
    found = load(WITH, chat=True, num_prompts=8, random_input_len=60)
    tokenizer = WITH.need("test")
    assert all(isinstance(request.prompt, str) for request in found)
    counts = [len(tokenizer.encode(str(request.prompt))) for request in found]
    assert counts == [request.prompt_len for request in found]
    assert statistics.fmean(counts) == pytest.approx(60, abs=1)
    text = load(WITH, num_prompts=2, random_input_len=20, tokenize_prompt=False)
    assert isinstance(text[0].prompt, str)


def test_random_ids_leave_special_tokens_out() -> None:
    special = WITH.need("test").vocabulary.special
    found = load(WITH, num_prompts=20, random_input_len=400)
    assert special and not special & {token for request in found for token in request.prompt or ()}


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(BadConfig, match="--tokenizer"):
        load(chat=True, num_prompts=1)
    with pytest.raises(BadConfig, match="no such directory"):
        load(Tokens("/nowhere/at/all", TokenVocabulary(9)), num_prompts=1, dataset_name="sonnet")


def talk(*texts: str, key: str = "conversations") -> dict[str, Any]:
    return {key: [{"from": "human", "value": text} for text in texts]}


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([
        talk("What is the capital of France?", "The capital of France is the city of Paris."),
        talk("How far is the moon from the earth?", "About four hundred thousand kilometres.",
             key="conversation"),
        talk("Only a question, and nobody answered it."), talk("x", "y"), {"other": 1},
        talk("word " * 3000, "An answer that is long enough for any rule.")]))
    given: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": str(file)}
    found = load(WITH, **given)
    assert {request.prompt for request in found} == {
        "What is the capital of France?", "How far is the moon from the earth?"}
    tokenizer = WITH.need("test")
    for request in found:
        assert request.prompt_len == len(tokenizer.encode(str(request.prompt), special=True))
    paris = next(r for r in found if "France" in str(r.prompt))
    assert paris.output_len == len(tokenizer.encode("The capital of France is the city of Paris."))
    assert {r.output_len for r in load(WITH, sharegpt_output_len=3, **given)} == {3}
    assert len(load(WITH, style="sglang", **given)) == 3
    assert len(load(WITH, style="sglang", sharegpt_context_len=100, **given)) == 2
    assert len(load(WITH, num_prompts=7, **given)) == 7
    assert len(load(WITH, num_prompts=7, oversample=False, **given)) == 2
    orders = {tuple(r.prompt for r in load(WITH, seed=seed, **given)) for seed in range(20)}
    assert len(orders) == 2
    assert len({tuple(r.prompt for r in load(WITH, seed=seed, disable_shuffle=True, **given))
                for seed in range(20)}) == 1


def test_sharegpt_filters() -> None:
    vllm, sglang = filter_of("vllm", None), filter_of("sglang", None)
    for prompt, output, given, theirs, ours in (
            (4, 4, False, True, True), (3, 9, False, False, True), (9, 3, False, False, True),
            (9, 3, True, True, True), (1025, 9, False, False, True),
            (1000, 1049, False, False, True), (1, 9, True, False, False)):
        assert vllm.keeps(prompt, output, given) is theirs, (prompt, output)
        assert sglang.keeps(prompt, output, given) is ours, (prompt, output)
    assert not filter_of("vllm", 100).keeps(90, 20, False)


def test_files_that_are_of_no_use(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    for text, what in (("{", "no JSON"), ("{}", "JSON list"), ("[]", "none of its 0")):
        file.write_text(text)
        with pytest.raises(BadConfig, match=what):
            load(WITH, dataset_name="sharegpt", dataset_path=str(file))
    for text, what in (("", "no line"), ("[1]", "line 1: must be a JSON object"),
                       ('{"prompt": "a"}\n{"text": "b"}', "line 2: one of prompt"),
                       ('{"prompt": "a", "output_tokens": 0}', "output_tokens")):
        file.write_text(text)
        with pytest.raises(BadConfig, match=what):
            load(dataset_name="custom", dataset_path=str(file))
    with pytest.raises(BadConfig, match="No such file"):
        load(dataset_name="custom", dataset_path=str(tmp_path / "none"))


def test_custom_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    turns = [{"role": "user", "content": "Hi"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "one", "output_tokens": 5}, {"prompt": [1, 2, 3]}, {"messages": turns},
        {"conversations": [{"content": "asked"}, {"content": "answered"}]}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    found = load(dataset_name="custom", dataset_path=str(file), disable_shuffle=True,
                 custom_output_len=40)
    assert found == [SampleRequest("one", None, 5), SampleRequest([1, 2, 3], None, 40, 3),
                     SampleRequest(None, turns, 40), SampleRequest("asked", None, 40)]
    assert len(load(dataset_name="custom", dataset_path=str(file), num_prompts=9)) == 9


def test_sonnets_are_made_here() -> None:
    given: dict[str, Any] = {"dataset_name": "sonnet", "num_prompts": 6, "sonnet_input_len": 220,
                             "sonnet_prefix_len": 100, "sonnet_output_len": 30}
    found = load(WITH, **given)
    tokenizer = WITH.need("test")
    texts = [str(request.prompt) for request in found]
    assert all(190 <= len(tokenizer.encode(text)) <= 220 for text in texts)
    assert {request.output_len for request in found} == {30}
    same = len([1 for letters in zip(*texts, strict=False) if len(set(letters)) == 1])
    assert same > 100 and len(set(texts)) == 6
    assert found == load(WITH, **given) != load(WITH, seed=1, **given)
    with pytest.raises(BadConfig, match="--sonnet-input-len"):
        load(WITH, dataset_name="sonnet", sonnet_input_len=50, sonnet_prefix_len=50)


def test_groups_share_their_prefix() -> None:
    given: dict[str, Any] = {"dataset_name": "generated-shared-prefix", "gsp_num_groups": 3,
                             "gsp_prompts_per_group": 4, "gsp_system_prompt_len": 30,
                             "gsp_question_len": 5, "gsp_output_len": 7}
    found = load(gsp_ordered=True, **given)
    assert [request.prompt_len for request in found] == [35] * 12
    prefixes = [tuple((request.prompt or [])[:30]) for request in found]
    assert len(set(prefixes)) == 3 and all(len(set(prefixes[i:i + 4])) == 1 for i in (0, 4, 8))
    assert len({tuple(request.prompt or ()) for request in found}) == 12
    assert {request.output_len for request in found} == {7}
    shuffled = load(**given)
    assert sorted(map(str, shuffled)) == sorted(map(str, found)) and shuffled != found
    assert len(load(num_prompts=5, **given)) == 5
    assert {r.prompt_len for r in load(gsp_range_ratio=0.5, **given)} <= set(range(17, 36))
    texts = [str(request.prompt) for request in load(WITH, chat=True, gsp_ordered=True, **given)]
    assert texts[0][:20] == texts[1][:20] != texts[4][:20]


def test_demo_chats() -> None:
    found = load(dataset_name="demo", num_prompts=20, output_len=32)
    assert len(found) == 20 and {request.output_len for request in found} == {32}
    assert len({request.messages[0]["content"] for request in found if request.messages}) == 20
    assert len(load(dataset_name="demo")) == 100
    with pytest.raises(BadConfig, match="--num-prompts"):
        load(dataset_name="demo", num_prompts=20_000)


@pytest.mark.parametrize(("values", "named"), [
    ({"dataset_name": "wiki"}, "--dataset-name"), ({"dataset_style": "x"}, "--dataset-style"),
    ({"dataset_name": "sharegpt"}, "--dataset-path"), ({"dataset_path": "x"}, "--dataset-path"),
    ({"num_prompts": 0}, "--num-prompts"), ({"random_input_len": 0}, "--random-input-len"),
    ({"gsp_range_ratio": 2.0}, "--gsp-range-ratio")])
def test_bad_options(values: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        load(**values)


def test_flags_of_other_datasets_are_named() -> None:
    def named(dataset: str, *fields: str) -> list[str]:
        return unused(DatasetOptions(dataset_name=dataset),
                      {field: f"--{field}" for field in fields})

    assert named("random", "random_input_len", "input_len", "output_len", "seed", "model") == []
    assert named("sonnet", "random_input_len", "sonnet_input_len", "oversample", "input_len") == [
        "--random_input_len", "--oversample"]
    assert named("sharegpt", "dataset_style", "input_len", "gsp_ordered", "dataset_path") == [
        "--input_len", "--gsp_ordered"]


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = arrivals(4000, 10.0, burstiness, 1)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        assert times[-1] == pytest.approx(400)
        variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
        assert variation == pytest.approx(burstiness ** -0.5, rel=0.1)
    assert arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    assert arrivals(9, 2.0, 1.0, 5) == arrivals(9, 2.0, 1.0, 5) != arrivals(9, 2.0, 1.0, 6)
    assert arrivals(4, 2.0, math.inf, 0) == [0.5, 1.0, 1.5, 2.0]


def test_a_rate_that_grows() -> None:
    linear, growing = RampUp("linear", 2.0, 10.0), RampUp("exponential", 2.0, 8.0)
    assert [linear.rate(share) for share in (0, 0.5, 1)] == [2, 6, 10]
    assert [growing.rate(share) for share in (0, 0.5, 1)] == [2, 4, 8]
    times = arrivals(5, math.inf, math.inf, 0, linear)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert gaps == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 10])
    for bad in (RampUp("square", 1, 2), RampUp("linear", 3, 2), RampUp("exponential", 0, 2)):
        with pytest.raises(BadConfig, match="--ramp-up"):
            bad.check()
