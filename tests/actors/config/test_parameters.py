"""What a request may ask for, checked where it is written down: by the SDK and by the tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actorium.actors.client.requests import Request, encode_request
from actorium.actors.config.tree import Config, SchedulerConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig, InvalidRequest
from actorium.actors.messages import Generate
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.tokenizer.defaults import ModelFacts, check_params

FACTS = ModelFacts(vocab_size=100, max_model_len=64, eos_ids=(2,), generation={},
                   has_tokenizer=True, max_n=16)


@pytest.mark.parametrize("field, value", [
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [2**31]),
    ("allowed_token_ids", [True]), ("allowed_token_ids", "5"), ("allowed_token_ids", [100]),
    ("bad_words", [""]), ("bad_words", ["x" * 257]), ("bad_words", ["a"] * 257),
    ("bad_words", "word"), ("stop_regex", ["a"] * 17), ("stop_regex", [""]),
    ("stop_regex", "x" * 1025), ("stop_regex", 5), ("logprob_token_ids", []),
    ("logprob_token_ids", list(range(129))), ("logprob_token_ids", [100]),
    ("n", 17), ("n", 1025), ("n", 0)])
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidRequest) as refused:
        encode_request("r", Request(prompt="x", params=params))
        check_params(params, FACTS)
    assert refused.value.param == field
    assert refused.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["stop", "stop_regex", "bad_words"])
def test_texts_need_a_tokenizer(field: str) -> None:
    params = SamplingParams(**{field: ["x"]})
    check_params(params, FACTS)
    with pytest.raises(InvalidRequest, match=f"{field}: the engine runs without a tokenizer"):
        check_params(params, msgspec.structs.replace(FACTS, has_tokenizer=False))


def test_chosen_tokens_are_shown_instead_of_the_likeliest() -> None:
    SamplingParams(logprob_token_ids=[1], logprobs=0).check()
    with pytest.raises(ValueError, match="logprob_token_ids: .* not with logprobs=2"):
        SamplingParams(logprob_token_ids=[1], logprobs=2).check()


@pytest.mark.parametrize("field, value", [
    ("chat_template", ""), ("chat_template", "x" * 65_537), ("chat_template", 5),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", "3"), ("cache_salt", 5), ("cache_salt", "x" * 257)])
def test_a_wrong_field_of_a_request_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_request("r", Request(messages=[{"role": "user", "content": "x"}], **{field: value}))
    assert refused.value.param == field


def test_a_request_carries_how_its_prompt_is_made() -> None:
    frame, _ = encode_request("r", Request(
        messages=[{"role": "user", "content": "x"}], chat_template="{{ messages }}",
        add_generation_prompt=False, continue_final_message=True, truncate_prompt_tokens=-1,
        cache_salt="s"))
    sent = msgspec.msgpack.decode(frame, type=Generate)
    assert sent.cache_salt == "s"
    assert (sent.chat_template, sent.add_generation_prompt, sent.continue_final_message,
            sent.truncate_prompt_tokens) == ("{{ messages }}", False, True, -1)


def test_structured_output_counts_structural_tags_among_its_kinds() -> None:
    Structured(structural_tag="{}").check()
    Structured(json_schema="{}", additional_properties=True).check()
    with pytest.raises(ValueError, match="got regex and structural_tag"):
        Structured(regex="a", structural_tag="{}").check()
    with pytest.raises(ValueError, match="additional_properties is for json_schema alone"):
        Structured(regex="a", additional_properties=True).check()


def test_the_engine_says_how_many_choices_a_request_may_have() -> None:
    assert Config().scheduler.max_n == 128
    for wrong in (0, 1025):
        with pytest.raises(BadConfig, match="max_n: must be between 1 and 1024"):
            validate(Config(scheduler=SchedulerConfig(max_n=wrong)))
