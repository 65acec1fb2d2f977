"""Pooled requests in the tokenizer: special tokens, truncation, pairs, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_pooling_files import write_modules
from helpers_text import Asked, byte_fallback, byte_level, i4, ints, write_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import Accepted, Generate, Rejected, Submit
from actorium.actors.models.pooling_shape import PoolingShape
from actorium.actors.params import PoolingParams, PoolingTask, ResolvedPooling, SamplingParams
from actorium.actors.tokenizer.defaults import ModelFacts, resolve
from actorium.actors.tokenizer.pooling_requests import check_task

LONGEST = 24
NUMBERS = itertools.count()


def with_ends() -> Tokenizer:
    """Texts stand between <bos> and <eos>, the second one of a pair ends so as well."""
    tokenizer = byte_level()
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<bos>", "<eos>")]
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=ends)
    return tokenizer


def asked(tmp_path: Path, architecture: str = "Qwen3ForSequenceClassification",
          tokenizer: Tokenizer | None = None, **config: Any) -> Asked:
    return Asked(write_model(tmp_path, tokenizer or with_ends(), architectures=[architecture],
                             max_position_embeddings=LONGEST, hidden_size=16, **config))


def pooled(task: PoolingTask = "classify", **more: Any) -> Generate:
    params = more.pop("params", SamplingParams())
    names = {name: more.pop(name) for name in ("dimensions", "use_activation", "instruction")
             if name in more}
    return Generate(f"r{next(NUMBERS)}", params, pooling=PoolingParams(task=task, **names), **more)


def submitted(core: Asked, message: Generate) -> Submit:
    submit, accepted = core.tell(message)
    assert isinstance(submit, Submit) and isinstance(accepted, Accepted), submit
    return submit


def refusal(core: Asked, message: Generate) -> str:
    (rejected,) = core.tell(message)
    assert isinstance(rejected, Rejected)
    return f"{rejected.code}: {rejected.message}"


def test_a_text_is_pooled_with_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    core, own = asked(tmp_path), with_ends()
    submit = submitted(core, pooled(text="the heron"))
    assert ints(submit.prompt) == own.encode("the heron").ids
    assert submit.pooling == ResolvedPooling("classify") and submit.n == 1
    assert submit.params.max_tokens == 1 and submit.rules is None


def test_a_text_may_fill_the_context(tmp_path: Path) -> None:
    core = asked(tmp_path)
    assert len(submitted(core, pooled(tokens=i4([3] * LONGEST))).prompt) == 4 * LONGEST
    assert refusal(core, pooled(tokens=i4([3] * (LONGEST + 1)))).startswith("context_overflow")
    assert refusal(core, pooled(text="x" * 2000)).startswith("context_overflow")


def test_the_end_of_a_text_is_cut_and_special_tokens_stay(tmp_path: Path) -> None:
    core, own = asked(tmp_path), with_ends()
    text = "one two three four five six seven"
    for keep in (1, 2, 3, 9, 500):
        message = pooled(text=text, truncate_prompt_tokens=min(keep, LONGEST))
        own.enable_truncation(max(min(keep, LONGEST), 2))
        assert ints(submitted(core, message).prompt) == own.encode(text).ids[:keep]
        assert ints(submitted(core, pooled(tokens=i4(list(range(20))), truncate_prompt_tokens=min(
            keep, LONGEST))).prompt) == list(range(20))[:keep]
    own.enable_truncation(LONGEST)
    assert ints(submitted(core, pooled(text=text, truncate_prompt_tokens=-1)).prompt) == \
        own.encode(text).ids


def test_pairs_are_joined_and_cut_as_the_library_does(tmp_path: Path) -> None:
    core, own = asked(tmp_path), with_ends()
    for first, second, keep in itertools.product(
            ("ab", "a longer text of many"), ("cd", "the other one, no less long"), (6, 11, 24)):
        own.enable_truncation(keep, strategy="longest_first")
        want = own.encode(first, second)
        submit = submitted(core, pooled(text=first, text_pair=second, truncate_prompt_tokens=keep))
        assert ints(submit.prompt) == want.ids and submit.pooling is not None
        assert submit.pooling.pair_start == want.type_ids.index(1)


def test_an_end_that_only_the_settings_ask_for_is_added(tmp_path: Path) -> None:
    for file, adds in ((byte_level(), True), (with_ends(), False)):
        write_model(tmp_path, file)
        settings = tmp_path / "tokenizer_config.json"
        given = {**json.loads(settings.read_text()), "add_eos_token": True}
        folder = tmp_path / str(adds)
        write_model(folder, file, hidden_size=16)
        (folder / "tokenizer_config.json").write_text(json.dumps(given))
        core = Asked(folder)
        ids = ints(submitted(core, pooled("embed", text="the end")).prompt)
        eos = file.token_to_id("<eos>")
        assert ids == [*file.encode("the end").ids, *[eos] * adds] and ids.count(eos) == 1
        completed = submitted(core, Generate("g", SamplingParams(), text="the end"))
        assert ints(completed.prompt) == file.encode("the end").ids, "completions stay as they were"
        cut = submitted(core, pooled("embed", text="the end", truncate_prompt_tokens=3))
        assert len(cut.prompt) == 12 and ints(cut.prompt)[-1] == eos


@pytest.mark.parametrize(("message", "why"), [
    (Generate("r", SamplingParams(), text="a"), "task: the model does not generate; it serves cla"),
    (pooled("embed", text="a"), "task: the model does not serve embed, but classify"),
    (pooled(text="a", params=SamplingParams(n=2)), "params: nothing is sampled where a prompt is"),
    (pooled(text="a", dimensions=3), "dimensions: for embed alone, the task is classify"),
    (pooled(tokens=i4([1]), text_pair="b"), "text_pair: with a prompt of text"),
    (pooled(), "prompt: exactly one of text, tokens, messages and embeds")])
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, message: Generate,
                                                  why: str) -> None:
    assert refusal(asked(tmp_path), message).startswith(f"invalid_request: {why}")


def test_dimensions_are_within_the_width(tmp_path: Path) -> None:
    core = asked(tmp_path, "Qwen3ForCausalLM")
    submit = submitted(core, pooled("embed", text="a", dimensions=16, use_activation=False))
    assert submit.pooling == ResolvedPooling("embed", dimensions=16, activation=False)
    for wrong, why in ((17, "17 are more than the model's vectors have, 16"), (0, "between 1 and"),
                       (-3, "between 1 and")):
        assert why in refusal(core, pooled("embed", text="a", dimensions=wrong))
    every = submitted(core, pooled("token_embed", text="a")).pooling
    assert every is not None and every.every_row


def test_hidden_states_of_a_completion_need_the_flag() -> None:
    params = SamplingParams(hidden_states=(0, -1))
    message = Generate("r", params, text="a")
    facts = ModelFacts(9, LONGEST, (), {}, True, pooling=PoolingShape(
        tasks=("embed",), width=16, generates=True))
    with pytest.raises(InvalidRequest, match="without --enable-return-hidden-states") as refused:
        check_task(message, facts)
    assert refused.value.param == "hidden_states"
    assert facts.pooling is not None
    check_task(message, msgspec.structs.replace(facts, pooling=msgspec.structs.replace(
        facts.pooling, tasks=("embed", "hidden_states"))))
    assert resolve(params, facts, 3).hidden_states == (0, -1)


# --- instructions that are not pooled -------------------------------------------------------------

FIND = "Find the heron: "


def skipping(path: Path, tokenizer: Tokenizer, **settings: Any) -> Asked:
    """The tokenizer of a model whose mean leaves instructions out."""
    write_modules(path, "mean_tokens", **{"include_prompt": False, **settings})
    return Asked(write_model(path, tokenizer, hidden_size=64))


def skipped(core: Asked, **more: Any) -> int:
    pooling = submitted(core, pooled("embed", **more)).pooling
    assert pooling is not None and pooling.every_row
    return pooling.skipped


def test_an_instruction_s_tokens_are_counted_without_the_special_one_at_its_end(
        tmp_path: Path) -> None:
    core, own = skipping(tmp_path, with_ends()), with_ends()
    alone = own.encode(FIND, add_special_tokens=False).ids
    assert skipped(core, text=f"{FIND}here", instruction=FIND) == 1 + len(alone)
    assert skipped(core, text=f"{FIND}here") == 0, "it is not guessed"
    assert skipped(core, tokens=i4([*alone, 7]), instruction=FIND) == len(alone)
    every = submitted(core, pooled("token_embed", text=FIND)).pooling
    assert every is not None and every.skipped == 0
    assert refusal(core, pooled("embed", text=FIND * 999, instruction=FIND * 999,
                                truncate_prompt_tokens=9)).startswith("context_overflow")
    assert refusal(core, pooled("embed", text="Where?", instruction=FIND)).endswith(
        "instruction: the prompt's text does not begin with it")
    for wrong in ({"tokens": i4(alone)}, {"text": f"{FIND}here", "truncate_prompt_tokens": 9}):
        assert refusal(core, pooled("embed", instruction=FIND, **wrong)).endswith(
            "prompt: nothing is left to pool behind the instruction")


def test_models_that_pool_all_of_a_prompt_skip_nothing(tmp_path: Path) -> None:
    core = skipping(tmp_path, with_ends(), include_prompt=True)
    assert skipped(core, text=f"{FIND}here", instruction=FIND) == 0
    assert refusal(asked(tmp_path / "other"), pooled(text="a", instruction="a")).endswith(
        "instruction: for embed alone, the task is classify")


def with_mark_at_a_beginning() -> Tokenizer:
    """As Llama 2: where a text begins, `<` is one token with the space before it."""
    raw = json.loads(byte_fallback().to_str())
    for piece in ("<", "▁<"):
        raw["model"]["vocab"][piece] = len(raw["model"]["vocab"])
    raw["model"]["merges"].append(["▁", "<"])
    raw["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_special_tokens(["<bos>"])
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B",
                                                  special_tokens=[("<bos>", bos)])
    return tokenizer


def test_a_gritlm_s_instruction_ends_with_its_mark(tmp_path: Path) -> None:
    own = with_mark_at_a_beginning()
    core = Asked(write_model(tmp_path, own, architectures=["GritLM"], hidden_size=64))
    assert own.encode("<").ids[-1] != own.encode("\n<").ids[-1], "it is another token within"
    for begin in ("<|embed|>\n", "<|user|>\nFind it.\n<|embed|>\n"):
        text = f"{begin}the <|embed|>\nheron"
        count = len(own.encode(begin).ids)
        assert skipped(core, text=text) == skipped(core, text=text, instruction=begin) == count
        assert skipped(core, tokens=i4(own.encode(text).ids)) == count
    assert skipped(core, text="the heron") == 0
    assert refusal(core, pooled("embed", text="<|embed|>\n")).endswith("behind the instruction")
