"""What bodies may say: nulls, fields of other engines, and errors that name the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from actorium.actors.gateway.api import sampling_fields as unsupported
from actorium.actors.gateway.api.anthropic_body import MessagesBody
from actorium.actors.gateway.api.chat_body import ChatBody
from actorium.actors.gateway.api.completions import CompletionBody
from actorium.actors.gateway.api.responses_body import ResponsesBody
from actorium.actors.gateway.api.sampling_fields import sampling
from actorium.actors.gateway.api.sglang_body import GenerateBody
from actorium.actors.gateway.api.tokens import TokenizeBody
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.params import ProcessorCall

MESSAGES = [{"role": "user", "content": "?"}]
SMALLEST: tuple[tuple[Any, dict[str, Any]], ...] = (
    (ChatBody, {"messages": MESSAGES}), (CompletionBody, {"prompt": "a"}),
    (ResponsesBody, {"input": "a"}), (MessagesBody, {"messages": MESSAGES, "max_tokens": 3}),
    (GenerateBody, {"text": "a"}), (TokenizeBody, {"prompt": "a"}))


def decode(kind: Any, body: Any) -> Any:
    return bodies.decode(msgspec.json.encode(body), kind)


@pytest.mark.parametrize(("kind", "least"), SMALLEST)
def test_null_for_any_optional_field_is_its_absence(kind: Any, least: dict[str, Any]) -> None:
    names = {name for name in kind.__struct_encode_fields__ if name not in least}
    assert decode(kind, least | dict.fromkeys(names)) == decode(kind, least)


@pytest.mark.parametrize("field", ["stream", "n", "logprobs", "skip_special_tokens", "tools",
                                   "chat_template_kwargs", "response_format"])
def test_one_null_alone(field: str) -> None:
    assert decode(ChatBody, {"messages": MESSAGES, field: None}) == \
        decode(ChatBody, {"messages": MESSAGES})


def integers(kind: Any) -> Iterator[tuple[str, Any]]:
    """(name, a value) of the fields of a body that are integers, or lists of them."""
    for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for one in kinds:
            if isinstance(one, inspect.IntType) and inspect.FloatType not in map(type, kinds):
                yield field.encode_name, 4.0
            if isinstance(one, inspect.ListType) and isinstance(one.item_type, inspect.IntType):
                yield field.encode_name, [4.0, 5]


@pytest.mark.parametrize(("kind", "least"), SMALLEST)
def test_a_whole_number_is_an_integer_however_it_is_written(kind: Any, least: dict[str, Any]
                                                            ) -> None:
    found = [*integers(kind)]
    assert kind is TokenizeBody or len(found) > 3
    for name, value in found:
        body = decode(kind, least | {name: value})
        written = msgspec.json.encode(msgspec.to_builtins(body)[name])
        assert written in (b"4", b"[4,5]"), name
        with pytest.raises(HttpError) as caught:
            decode(kind, least | {name: 4.5})
        assert caught.value.param == name
    nested = decode(GenerateBody, {"text": "a", "sampling_params": {"max_new_tokens": 4.0}})
    assert nested.sampling_params.max_new_tokens == 4


@pytest.mark.parametrize(("text", "half"), [
    (r"\ud83d", r"\ud83d"), (r"a\\\uDE00b", r"\uDE00"),
    (r"\ud83d\ud83d\ude00 and more", r"\ud83d")])
def test_half_a_character_is_told_as_such(text: str, half: str) -> None:
    with pytest.raises(HttpError, match="half of a character") as caught:
        bodies.decode(b'{"prompt": "%b"}' % text.encode(), CompletionBody)
    assert half in caught.value.message


@pytest.mark.parametrize("text", [r"\ud83d\ude00 \\ud83d", r"\\\\ud83d",
                                  r"\ud83d\ude00\ud83d\ude00"])
def test_whole_characters_are_taken(text: str) -> None:
    assert bodies.decode(b'{"prompt": "%b"}' % text.encode(), CompletionBody).prompt
    with pytest.raises(HttpError) as caught:
        bodies.decode(b'{"prompt": "%b"' % text.encode(), CompletionBody)
    assert "half" not in caught.value.message


def test_nested_nulls() -> None:
    body = decode(ChatBody, {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [
            {"id": None, "function": {"name": "f", "arguments": None}}]}],
        "stream": True, "stream_options": {"include_usage": None, "resumable": True},
        "response_format": {"type": "json_schema",
                            "json_schema": {"name": None, "schema": {"const": None}}}})
    assert body.stream_options.include_usage is False and body.stream_options.resumable
    assert body.messages[0].tool_calls[0].id == ""
    assert body.response_format.json_schema.schema_ == {"const": None}  # the caller's own
    params = decode(GenerateBody, {"text": "a", "sampling_params": {"n": None, "max_tokens": 3,
                                                                    "logit_bias": {"5": 1}}})
    assert params.sampling_params.n == 1 and params.sampling_params.logit_bias == {5: 1.0}


@pytest.mark.parametrize(("kind", "body", "param"), [
    (ChatBody, {"messages": None}, "messages"),
    (ChatBody, {"messages": MESSAGES, "stream": None, "n": "two"}, "n"),
    (ChatBody, {"messages": MESSAGES, "stream": "yes"}, "stream"),
    (ChatBody, {"messages": [{"role": None}]}, "messages"),
    (CompletionBody, {"prompt": "a", "stream": None, "stop": [None]}, "stop"),
    (CompletionBody, {"prompt": "a", "logit_bias": {"1": None}}, "logit_bias")])
def test_wrong_fields_are_named(kind: Any, body: Any, param: str) -> None:
    with pytest.raises(HttpError) as caught:
        decode(kind, body)
    assert (caught.value.status, caught.value.param) == (400, param)


NEUTRAL = [("use_beam_search", False), ("length_penalty", 1.0), ("typical_p", 1), ("mirostat", 0),
           ("modalities", ["text"]), ("logits_processors", []), ("lora_path", None)]
REFUSED = [("use_beam_search", True), ("length_penalty", 0.5), ("typical_p", 0.9), ("mirostat", 2),
           ("modalities", ["text", "audio"]), ("web_search_options", {}), ("audio", {"voice": "x"}),
           ("return_hidden_states", True)]


@pytest.mark.parametrize(("field", "value"), NEUTRAL)
def test_fields_that_change_nothing_are_accepted(field: str, value: Any) -> None:
    sampling(decode(ChatBody, {"messages": MESSAGES, field: value, "unheard_of": 1}), None)


@pytest.mark.parametrize(("field", "value"), REFUSED)
@pytest.mark.parametrize(("kind", "least"), SMALLEST[:4])
def test_unsupported_fields_are_refused_by_name(kind: Any, least: dict[str, Any], field: str,
                                                value: Any) -> None:
    assert field in unsupported.UNSUPPORTED
    with pytest.raises(HttpError) as caught:
        sampling(decode(kind, least | {field: value}), None)
    assert (caught.value.status, caught.value.param) == (400, field)
    assert field in caught.value.message


@pytest.mark.parametrize(("fields", "calls"), [
    ({"logits_processors": ["a", {"qualname": "b", "kwargs": {"k": 1}}]},
     [ProcessorCall("a"), ProcessorCall("b", {"k": 1})]),
    ({"vllm_xargs": {"k": 1}}, [ProcessorCall("", {"k": 1})]), ({"vllm_xargs": {}}, None),
    ({"custom_logit_processor": "a", "custom_params": {"k": 1}}, [ProcessorCall("a", {"k": 1})])])
def test_logits_processors_by_the_names_of_others(fields: Any, calls: Any) -> None:
    body = decode(ChatBody, {"messages": MESSAGES} | fields)
    assert sampling(body, None).logits_processors == calls


@pytest.mark.parametrize(("fields", "param"), [
    ({"logits_processors": [{"qualname": "a", "args": [1]}]}, "logits_processors"),
    ({"logits_processors": [""]}, "logits_processors"),
    ({"logits_processors": ["x" * 257]}, "logits_processors"),
    ({"custom_logit_processor": '{"callable": "8004"}'}, "custom_logit_processor"),
    ({"custom_params": {"k": 1}}, "custom_params")])
def test_logits_processors_that_are_no_plugins(fields: Any, param: str) -> None:
    with pytest.raises(HttpError) as caught:
        sampling(decode(ChatBody, {"messages": MESSAGES} | fields), None)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_seeds_beyond_64_bits(seed: int) -> None:
    """No other seed is taken in their place."""
    body = b'{"messages": [{"role": "user", "content": "x"}], "seed": %d}'
    with pytest.raises(HttpError, match="seed: ") as caught:
        bodies.decode(body % seed, ChatBody)
    assert caught.value.status == 400 and caught.value.param == "seed"
    assert bodies.decode(body % (2**63 - 1), ChatBody).seed == 2**63 - 1
    assert bodies.decode(body % -1, ChatBody).seed == -1
