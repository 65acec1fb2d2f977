"""Requests that want to break something."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TURN = {"role": "user", "content": "hi"}


class Hostile(NamedTuple):
    """A request that must be refused with a 4xx."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str] = {}


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": [TURN], "max_tokens": 1} | more).encode()


def text(**more: Any) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 1} | more).encode()


def raw(field: str, value: str) -> bytes:
    """A chat body with a value that `json.dumps` would not write."""
    return b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "%b": %b}' % (
        field.encode(), value.encode())


def deep() -> Iterator[Hostile]:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth in (2_000, 100_000):
            for end in ("", closing * depth):
                nested = opening * depth + ("1" if end else "") + end
                yield Hostile(f"body {opening}{depth}{bool(end)}", CHAT, nested.encode())
                yield Hostile(f"kwargs {opening}{depth}{bool(end)}", CHAT,
                              raw("chat_template_kwargs", f'{{"x": {nested}}}'))
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    nested = "{" + '"properties":{"x":{' * 20_000 + "}}" * 20_000 + "}"
    yield Hostile("schema too deep", CHAT, raw("guided_json", nested))
    yield Hostile("tools too deep", CHAT, raw("tools", "[" * 5_000 + "]" * 5_000))


def numbers() -> Iterator[Hostile]:
    fields = ("temperature", "top_p", "max_tokens", "n", "top_k", "seed", "presence_penalty",
              "repetition_penalty", "min_p", "top_logprobs", "priority", "timeout")
    for field in fields:
        for value in ("1e400", "-1e400", "NaN", "Infinity", "1" * 5_000, '"1"', "[]", "{}"):
            if (field, value[:9]) != ("seed", "111111111"):
                yield Hostile(f"{field}={value[:9]}", CHAT, raw(field, value))
    for field, wrong in (("n", (0, -1, 129, 2**31, 2**63)), ("max_tokens", (-2, 0, 2**31, 10**18)),
                         ("top_logprobs", (21, -1, 2**40)), ("top_k", (-2, 2**40)),
                         ("min_tokens", (-1, 2**40)), ("priority", (2**31, -2**32)),
                         ("timeout", (0, -1)), ("temperature", (-0.1, 1e300)),
                         ("top_p", (0, 1.1)), ("repetition_penalty", (0, -1))):
        for value in wrong:
            yield Hostile(f"{field}={value}", CHAT,
                          chat(logprobs=True, **{field: value}) if field == "top_logprobs"
                          else chat(**{field: value}))
    for value in (21, -1, 2**40):
        yield Hostile(f"logprobs={value}", TEXT, text(logprobs=value))
        yield Hostile(f"prompt_logprobs={value}", TEXT, text(prompt_logprobs=value))
    yield Hostile("best_of", TEXT, text(best_of=10**9))


def tokens() -> Iterator[Hostile]:
    for ids in ([-1], [2**31], [2**63], [2**200], [1.5], [True], [None], ["a", 1], [[]], [[-5]],
                [10**6], [[1], "x", 3]):
        yield Hostile(f"prompt={ids}", TEXT, text(prompt=ids))
        if ids not in ([[]],):
            yield Hostile(f"input_ids={ids}", GENERATE, json.dumps({"input_ids": ids}).encode())
    yield Hostile("a million ids", TEXT, b'{"prompt": [' + b"1," * 999_999 + b"1]}")
    yield Hostile("a million prompts", TEXT, b'{"prompt": [' + b'"",' * 999_999 + b'""]}')
    yield Hostile("300 prompts", TEXT, text(prompt=["a"] * 300))
    yield Hostile("a long prompt", TEXT, text(prompt="word " * 400_000))
    for ids in ([-1], [2**40], [10**8], ["x"], list(range(100_000))):
        yield Hostile(f"stop_token_ids={str(ids)[:20]}", CHAT, chat(stop_token_ids=ids))
    for bias in ({"-1": 1}, {"x": 1}, {"1e3": 1}, {str(2**40): 1}, {"1": 1000}, {"1": None},
                 {str(i): 1 for i in range(50_000)}, {"9" * 5_000: 1}, {"\u0661" * 5_000: 1}):
        yield Hostile(f"logit_bias={str(bias)[:20]}", CHAT, chat(logit_bias=bias))
    for ids in ([-1], [2**40], [10**8]):
        yield Hostile(f"detokenize {ids}", "/detokenize", json.dumps({"tokens": ids}).encode())


def conversations() -> Iterator[Hostile]:
    yield Hostile("a hundred thousand messages", CHAT,
                  b'{"messages": [' + b'{"role":"user","content":""},' * 100_000
                  + b'{"role":"user","content":""}]}')
    for turn in ({}, {"role": "user", "content": 5}, {"role": "", "content": "x"},
                 {"role": "u" * 5_000, "content": "x"}, {"content": "x"}, "hi", None, 7,
                 {"role": "user", "content": [{"type": "image_url",
                                               "image_url": {"url": "http://169.254.169.254/"}}]},
                 {"role": "user", "content": [{"type": "text"}]},
                 {"role": "user", "content": [{"type": "input_audio", "data": "x"}]},
                 {"role": "user", "content": [{"type": "video_url",
                                               "video_url": {"url": "file:///etc/passwd"}}]}):
        yield Hostile(f"turn {str(turn)[:40]}", CHAT, chat(messages=[turn]))
    yield Hostile("no messages", CHAT, chat(messages=[]))
    yield Hostile("a surrogate", CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    yield Hostile("half a pair", TEXT, b'{"prompt": "x\\udfff\\ud83d", "max_tokens": 1}')
    yield Hostile("bad UTF-8", TEXT, b'{"prompt": "\xed\xa0\x80\xff"}')
    yield Hostile("UTF-16", TEXT, '{"prompt": "hi"}'.encode("utf-16"))
    yield Hostile("a long context of marks", TEXT, text(prompt="e" + "\u0301" * 500_000))
    for name in ("messages", "tools", "bos_token", "raise_exception", "_actorium_tick", "a b", ""):
        yield Hostile(f"kwargs {name}", CHAT, chat(chat_template_kwargs={name: "x"}))
    yield Hostile("a tensor for a prompt", TEXT, b'{"prompt_embeds": "gAJ9cQAu", "max_tokens": 1}')
    for value in ("x", [], 1, "{{ 7 }}"):
        yield Hostile(f"kwargs={value}", CHAT, chat(chat_template_kwargs=value))


def shapes() -> Iterator[Hostile]:
    """Small by the byte, and long to decode."""
    for name, part, count in (("lists", "[]", 1_300_000), ("objects", "{}", 1_300_000),
                              ("fractions", "1.1111111111111111e-300", 170_000),
                              ("short fractions", "0.1", 900_000), ("powers", "1e300", 600_000),
                              ("texts", '""', 1_300_000), ("escapes", '"\\\\"', 650_000),
                              ("brackets", '"["', 1_000_000)):
        listed = f'{{"x": [{",".join([part] * count)}]}}'
        yield Hostile(f"kwargs of {name}", CHAT, raw("chat_template_kwargs", listed))
    names = ",".join(f'"{number}":1' for number in range(380_000))
    for field in ("chat_template_kwargs", "logit_bias", "guided_json", "metadata"):
        path = "/v1/responses" if field == "metadata" else CHAT
        yield Hostile(f"{field} of names", path, raw(field, f"{{{names}}}"))
    yield Hostile("prompts of one token", TEXT, b'{"prompt": [' + b"[1]," * 999_999 + b"[1]]}")
    yield Hostile("a million tokens", GENERATE, b'{"input_ids": [' + b"1," * 999_999 + b"1]}")
    yield Hostile("a million words", "/detokenize", b'{"tokens": [' + b"1," * 999_999 + b"1]}")
    part = b'{"type":"text","text":""}'
    for path, field in ((CHAT, b"messages"), ("/v1/messages", b"messages"),
                        ("/v1/responses", b"input")):
        turn = b'{"role":"user","content":%b}'
        yield Hostile(f"{path} of turns", path, b'{"max_tokens":1,"%b":[' % field
                      + b",".join([turn % b'""'] * 120_000) + b"]}")
        yield Hostile(f"{path} of parts", path, b'{"max_tokens":1,"%b":[' % field
                      + turn % (b"[" + b",".join([part] * 140_000) + b"]") + b"]}")
        yield Hostile(f"{path} of too many turns", path, b'{"max_tokens":1,"%b":[' % field
                      + b",".join([turn % b'"x"'] * 4097) + b"]}")


def patterns() -> Iterator[Hostile]:
    for regex in ("(", "[", "a{2,1}", "(?=a)b", r"(a)\1", "(?<!x)y", "*", "(" * 5_000,
                  "(a{1000}){1000}", "((a{100}){100}){100}", "\\p{Nope}", "x" * 70_000,
                  "(?:a?){5000}a{5000}"):
        yield Hostile(f"regex {regex[:20]}", CHAT, chat(guided_regex=regex))
    for grammar in ("", "root ::= root", "start: nope", "start: /(/", "%import evil", "x" * 70_000,
                    "start: " + "(" * 5_000):
        yield Hostile(f"grammar {grammar[:20]}", CHAT, chat(structured_outputs={
            "grammar": grammar} if grammar else {}))
    for schema in ('{"$ref": "#"}', '{"$ref": "http://169.254.169.254/x"}', "{", "3", "[]",
                   '{"type": "nope"}', '{"$ref": "file:///etc/passwd"}',
                   '{"type": "string", "pattern": "("}',
                   '{"type": "array", "minItems": 5, "maxItems": 2}', "x" * 70_000):
        yield Hostile(f"schema {schema[:30]}", CHAT, chat(guided_json=schema))
    for stop in ([""], ["a"] * 17, ["a" * 300], [1], {"a": 1}, "a" * 300, ["a"] * 100_000):
        yield Hostile(f"stop {str(stop)[:20]}", CHAT, chat(stop=stop))
    for form in ({"type": "xml"}, {}, {"type": "json_schema"}, "json", {"type": 3},
                 {"type": "json_schema", "json_schema": {"schema": 7}}):
        yield Hostile(f"format {form}", CHAT, chat(response_format=form))
    yield Hostile("choices", CHAT, chat(guided_choice=["x"] * 100_000))
    yield Hostile("no choices", CHAT, chat(guided_choice=[]))
    for tools in ([{}], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}],
                  [{"type": "function", "function": {"name": "f"}}] * 5_000, "all"):
        yield Hostile(f"tools {str(tools)[:30]}", CHAT, chat(tools=tools))
    yield Hostile("a choice without tools", CHAT, chat(tool_choice="required"))


def envelopes() -> Iterator[Hostile]:
    good = chat()
    yield Hostile("gzip", CHAT, zlib.compress(good), {"Content-Encoding": "gzip"})
    yield Hostile("a bomb", CHAT, zlib.compress(b" " * (32 << 20)), {"Content-Encoding": "deflate"})
    yield Hostile("brotli", CHAT, good, {"Content-Encoding": "br, gzip"})
    yield Hostile("too large", CHAT, b" " * ((4 << 20) + 1))
    yield Hostile("nothing", CHAT, b"")
    yield Hostile("two documents", CHAT, good + good)
    yield Hostile("a form", CHAT, b"prompt=hi")
    yield Hostile("null", CHAT, b"null")
    yield Hostile("NUL", CHAT, b"\0" * 1000)
    yield Hostile("a long URL", "/v1/models/" + "x" * 10_000, b"")
    yield Hostile("another model", CHAT, chat(model="../../etc/passwd"))
    yield Hostile("a path upwards", "/v1/../../etc/passwd", b"")
    yield Hostile("a key of spaces", CHAT, good, {"Idempotency-Key": "a b"})
    yield Hostile("no event", CHAT, good, {"Last-Event-ID": "x" * 5_000})
    yield Hostile("an event of nobody", CHAT, good, {"Last-Event-ID": "s1.2:1:0.1.1:0.1.1:1"})
    yield Hostile("many headers", CHAT, good, {f"X-{i}": "y" * 500 for i in range(140)})


def hostile() -> Iterator[Hostile]:
    """All of them; some are megabytes."""
    for kind in (deep, numbers, tokens, conversations, shapes, patterns, envelopes):
        yield from kind()
