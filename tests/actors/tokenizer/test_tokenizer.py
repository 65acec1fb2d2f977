"""The tokenizer actor's core: every request gets one answer, good ones one Submit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import thread_time
from typing import Any

import msgspec
import pytest
from helpers_speed import slowness
from helpers_text import byte_level, context, i4, ints, loaded, write_model

from actorium.actors.client.requests import encode_raw
from actorium.actors.config.cluster_settings import ClusterConfig
from actorium.actors.config.tree import Config, RecoveryConfig
from actorium.actors.errors import BadConfig, BadModel, InvalidRequest
from actorium.actors.messages import (
    Abort,
    AbortRequest,
    Accepted,
    ChatMessage,
    Control,
    ControlRequest,
    Detokenize,
    Detokenized,
    Flush,
    FlushCache,
    Generate,
    Info,
    Rejected,
    Resume,
    ResumeRequest,
    ServerInfo,
    Submit,
    Tokenize,
    Tokenized,
    ToolCall,
    ToTokenizerFront,
)
from actorium.actors.models import model_dir as models
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.mailbox import describe_bad_frame
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.actors.tokenizer import core as tokenizer_core
from actorium.actors.tokenizer.core import SUBMIT_AGAIN, TokenizerCore, check_control
from actorium.actors.tokenizer.defaults import Seeds

CLIENT = b"client"
NOW = 1000.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def core(model: Path) -> TokenizerCore:
    return loaded(TokenizerCore(context(model)))


def ask(core: TokenizerCore, message: Any, client: bytes = CLIENT) -> list[Any]:
    """The messages one request leads to; all to its client or the scheduler."""
    core.on_client(client, message, NOW)
    sends = core.on_wake(NOW)
    assert all(s.client == client for s in sends if s.to == "client")
    return [s.message for s in sends]


def generate(core: TokenizerCore, rid: str = "r", params: dict[str, Any] | None = None,
             **more: Any) -> list[Any]:
    if not more:
        more = {"text": "hello"}
    if "template_args" in more:
        more["template_args"] = encode_raw(more["template_args"], dict, "template_args")
    return ask(core, Generate(rid, SamplingParams(**(params or {})), **more))


def rejected(messages: list[Any]) -> Rejected:
    assert len(messages) == 1 and isinstance(messages[0], Rejected)
    return messages[0]


def test_loading_is_reported_before_it_begins(model: Path) -> None:
    core = TokenizerCore(context(model))
    assert core.health().phase == "loading" and core.next_timer() == 0.0
    core.on_client(CLIENT, Tokenize("t", "a"), NOW)
    assert core.on_wake(NOW) == [] and core.health().phase == "loading" and not core.done
    assert [s.message for s in core.on_wake(NOW)] == [Tokenized("t", i4([97]))]
    assert core.health().phase == "ready" and core.next_timer() is None and core.done


def test_text_becomes_a_submit(core: TokenizerCore) -> None:
    submit, accepted = generate(core, text="the day", timeout=5.0)
    assert isinstance(submit, Submit) and accepted == Accepted("r", len(submit.prompt) // 4)
    assert ints(submit.prompt) == byte_level().encode("the day").ids
    assert (submit.rid, submit.client, submit.n) == ("r", CLIENT, 1)
    assert (submit.deadline, submit.arrival) == (NOW + 5.0, NOW)
    msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit)


def test_defaults_request_then_generation_config_then_builtin(core: TokenizerCore) -> None:
    eos = byte_level().token_to_id("<eos>")
    submit = generate(core)[0]
    p = submit.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (0.5, 7, 1, 0, 1)
    assert (p.max_tokens, p.eos_ids, p.logprobs, p.prompt_logprobs) == (256 - 4, (eos,), -1, -1)
    assert submit.deadline == NOW + 3600.0
    q = generate(core, "q", {"temperature": 0.0, "top_k": -1, "max_tokens": 9, "logprobs": 0,
                             "ignore_eos": True, "stop_token_ids": [3, 4, 3], "stop": "end",
                             "min_tokens": 2, "logit_bias": {5: -100.0}})[0]
    assert (q.params.temperature, q.params.top_k, q.params.max_tokens) == (0.0, 0, 9)
    assert (q.params.eos_ids, q.params.logprobs) == ((3, 4), 0)
    assert q.params.logit_bias == {5: -100.0}
    assert (q.text.stop, q.text.min_tokens, q.text.include_stop) == (("end",), 2, False)


def test_defaults_that_the_engine_is_started_with(model: Path) -> None:
    core = loaded(TokenizerCore(context(model, generation_config="vllm",
                                        override_generation_config={"top_p": 0.9})))
    p = generate(core)[0].params
    assert (p.temperature, p.top_k, p.top_p) == (1.0, 0, 0.9)
    assert p.eos_ids == (byte_level().token_to_id("<eos>"),)
    assert generate(core, "q", {"top_p": 0.2})[0].params.top_p == 0.2


def test_prompts_by_ids_and_by_messages(core: TokenizerCore) -> None:
    assert ints(generate(core, tokens=i4([5, 6]))[0].prompt) == [5, 6]
    submit = generate(core, "m", messages=[ChatMessage("user", "hi")])[0]
    bos = byte_level().token_to_id("<bos>")
    assert ints(submit.prompt) == byte_level().encode("<bos><|user|>hi<|assistant|>").ids
    assert ints(submit.prompt).count(bos) == 1
    more = generate(core, "n", messages=[ChatMessage("user", "hi")],
                    template_args={"add_generation_prompt": False})[0]
    assert ints(more.prompt) == byte_level().encode("<bos><|user|>hi").ids


def folder_of(path: Path, most: int) -> str:
    path.mkdir()
    (path / "generation_config.json").write_text(json.dumps({"max_new_tokens": most}))
    return str(path)


@pytest.mark.parametrize(("own", "settings", "unnamed", "named"), [
    (None, {}, 252, 50), (20, {}, 20, 50), (900, {}, 252, 50),
    (20, {"generation_config": "vllm"}, 252, 50),
    (None, {"override_generation_config": {"max_new_tokens": 30.0}}, 30, 30),
    (20, {"override_generation_config": {"max_new_tokens": 30.0}}, 30, 30),
    (20, {"override_generation_config": {"max_new_tokens": 30.0}, "generation_config": "vllm"},
     30, 30),
    (20, {"generation_config": 40}, 40, 40),
    (20, {"generation_config": 40, "override_generation_config": {"max_new_tokens": 60.0}}, 60, 50),
], ids=str)
def test_how_many_new_tokens(tmp_path: Path, own: int | None, settings: dict[str, Any],
                             unnamed: int, named: int) -> None:
    """Of a request that names no max_tokens, and of one that names 50: as vLLM, the model's own
    is a default, an override or another folder's a limit. A number is such a folder's."""
    if isinstance(settings.get("generation_config"), int):
        settings = settings | {"generation_config":
                               folder_of(tmp_path / "other", settings["generation_config"])}
    path = write_model(tmp_path / "model", generation={"max_new_tokens": own, "max_length": 9})
    core = loaded(TokenizerCore(context(path, **settings)))
    assert generate(core, text="word")[0].params.max_tokens == unnamed
    assert generate(core, "q", {"max_tokens": 50}, text="word")[0].params.max_tokens == named


def test_more_tokens_than_the_engine_gives(model: Path) -> None:
    core = loaded(TokenizerCore(context(
        model, override_generation_config={"max_new_tokens": 30.0})))
    assert generate(core, "a", {"max_tokens": 9999})[0].params.max_tokens == 30
    wrong = rejected(generate(core, "b", {"min_tokens": 31}))
    assert (wrong.code, wrong.param) == ("invalid_request", "min_tokens")
    assert "the 30 tokens that the engine gives" in wrong.message
    whole = rejected(generate(core, "c", {"min_tokens": 25}, text="x" * 240))
    assert (whole.code, whole.param) == ("context_overflow", "min_tokens")


def test_the_engines_template_arguments_stand_beneath_the_requests(model: Path) -> None:
    source = "{{ mood }}{{ who }}{{ messages[0].content }}"
    core = loaded(TokenizerCore(context(
        model, chat_template=source, default_chat_template_kwargs={"mood": "a", "who": "b"})))
    said = [ChatMessage("user", "x")]
    for args, text in (({}, "abx"), ({"who": "c"}, "acx"), ({"mood": "", "who": None}, "Nonex")):
        ids = i4(byte_level().encode(text).ids)
        assert generate(core, text, messages=said, template_args=args)[0].prompt == ids
        assert ask(core, Tokenize(f"t{text}", "", messages=said,
                                  template_args=encode_raw(args, dict, "template_args"))) == \
            [Tokenized(f"t{text}", ids)]
    assert generate(core, "p", text="x")[0].prompt == i4(byte_level().encode("x").ids)


def test_arguments_that_cannot_be_read_are_told_in_the_log(
        model: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = loaded(TokenizerCore(context(model, chat_template="{{ messages[0].tool_calls }}")))
    for name, arguments in (("fine", "{}"), ("none", ""), ("cut", '{"a')):
        said = [ChatMessage("assistant", "", tool_calls=[ToolCall(name, arguments)])]
        assert not isinstance(generate(core, name, messages=said)[0], Rejected)
    assert "messages[0].tool_calls[0] (cut)" in caplog.text
    assert "fine" not in caplog.text and "none" not in caplog.text


@pytest.mark.parametrize(("more", "code", "param", "words"), [
    ({"text": ""}, "invalid_request", "prompt", "empty"),
    ({"tokens": b""}, "invalid_request", "prompt", "empty"),
    ({"tokens": b"abc"}, "invalid_request", "prompt", "int32"),
    ({"tokens": i4([1, 300])}, "invalid_request", "prompt", "300"),
    ({"tokens": i4([-1])}, "invalid_request", "prompt", "-1"),
    ({"tokens": i4([1] * 256)}, "context_overflow", "prompt", "256 tokens"),
    ({"text": "x" * 300}, "context_overflow", "prompt", "300 tokens"),
    ({"text": "a", "tokens": i4([1])}, "invalid_request", "prompt", "text and tokens"),
    ({"messages": []}, "invalid_request", "messages", "needed"),
    ({"messages": [ChatMessage("user", "x" * 999)]}, "context_overflow", "messages", "999"),
    ({"messages": [ChatMessage("user", "x")], "template_args": {"messages": "y"}},
     "invalid_request", "template_args", "messages"),
])
def test_bad_prompts(core: TokenizerCore, more: dict[str, Any], code: str, param: str,
                     words: str) -> None:
    answer = rejected(generate(core, **more))
    if code != "context_overflow":
        assert words in answer.message
    assert (answer.code, answer.param) == (code, param) and "\n" not in answer.message
    assert len(generate(core)) == 2


def test_exactly_one_prompt(core: TokenizerCore) -> None:
    assert "none" in rejected(ask(core, Generate("r", SamplingParams()))).message


@pytest.mark.parametrize(("params", "code", "param"), [
    ({"temperature": math.nan}, "invalid_request", "temperature"),
    ({"top_p": -0.5}, "invalid_request", "top_p"),
    ({"min_tokens": 255}, "context_overflow", "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "invalid_request", "min_tokens"),
    ({"logit_bias": {999: 1.0}}, "invalid_request", "logit_bias"),
    ({"stop_token_ids": [999]}, "invalid_request", "stop_token_ids"),
    ({"stop": ["x"] * 17}, "invalid_request", "stop"),
    ({"n": 0}, "invalid_request", "n"),
])
def test_bad_parameters(core: TokenizerCore, params: dict[str, Any], code: str,
                        param: str) -> None:
    answer = rejected(generate(core, "r", params))
    assert (answer.code, answer.param) == (code, param)


def test_max_tokens_beyond_the_context_are_cut_to_it(core: TokenizerCore, model: Path) -> None:
    """Clients ask for the most that some other model gives; with a flag that is refused."""
    cut = generate(core, "r", {"max_tokens": 32_000}, text="x" * 200)
    assert cut[0].params.max_tokens == 56 and len(cut[0].prompt) == 4 * 200
    strict = loaded(TokenizerCore(context(model, strict_max_tokens=True)))
    answer = rejected(generate(strict, "r", {"max_tokens": 57}, text="x" * 200))
    assert (answer.code, answer.param) == ("context_overflow", "max_tokens")
    assert generate(strict, "q", {"max_tokens": 56}, text="x" * 200)[0].params.max_tokens == 56


def test_a_prompt_is_not_truncated_away_for_max_tokens(core: TokenizerCore) -> None:
    answer = rejected(ask(core, Generate("r", SamplingParams(max_tokens=256), text="x" * 200,
                                         truncate_prompt_tokens=-1)))
    assert (answer.code, answer.param) == ("context_overflow", "max_tokens")


def test_resent_requests_are_accepted_once(core: TokenizerCore,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    first = generate(core)
    assert generate(core) == [first[1]], "at once: it only had to queue"
    request = Generate("r", SamplingParams(), text="hello")
    for later in (NOW + SUBMIT_AGAIN, NOW + SUBMIT_AGAIN + 0.1):
        core.on_client(CLIENT, request, later)
        sent = [send.message for send in core.on_wake(later)]
        assert sent[-1] == first[1]
        assert [type(m) for m in sent[:-1]] == ([Submit] if later == NOW + SUBMIT_AGAIN else [])
    other = Generate("r", SamplingParams(), text="hello")
    assert len(ask(core, other, b"another client")) == 2
    monkeypatch.setattr(tokenizer_core, "KNOWN_REQUESTS", 2)
    generate(core, "r3")
    assert len(generate(core, "r4")) == 2 and len(core._known) <= 3
    assert len(generate(core)) == 2, "forgotten, so it counts as new"


def test_a_resent_request_is_accepted_while_draining(core: TokenizerCore) -> None:
    generate(core)
    core.drain(NOW)
    request = Generate("r", SamplingParams(), text="hello")
    core.on_client(CLIENT, request, NOW + 1)
    assert [type(send.message) for send in core.on_wake(NOW + 1)] == [Submit, Accepted]
    assert rejected(generate(core, "new")).code == "unavailable"


def test_resume_goes_to_the_scheduler(core: TokenizerCore) -> None:
    assert ask(core, Resume("r"), b"me") == [ResumeRequest("r", b"me")]


def test_seeds(model: Path, core: TokenizerCore) -> None:
    assert generate(core, "a", {"seed": 7})[0].seed == 7
    same = generate(core, "d", {"deterministic": True})[0]
    assert (same.seed, same.deterministic) == (0, True)
    assert generate(core, "e", {"deterministic": True, "seed": 7})[0].seed == 7
    fresh = [generate(core, f"s{i}")[0].seed for i in range(50)]
    assert len(set(fresh)) == 50 and all(0 <= s < 2**63 for s in fresh)
    again = loaded(TokenizerCore(context(model)))
    assert generate(again, "s0")[0].seed == fresh[0], "a function of entropy and order alone"
    assert [Seeds(5, e).next() for e in (1, 2)] == [Seeds(5, 3).next()] * 2
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the reference implementation's first output


def test_the_other_questions(core: TokenizerCore) -> None:
    ids = byte_level().encode("día €<eos>").ids
    assert ask(core, Tokenize("t", "día €<eos>")) == [Tokenized("t", i4(ids))]
    literal = ask(core, Tokenize("t", "día €<eos>", parse_special=False))
    assert literal == [Tokenized("t", i4([*ids[:-1], *b"<eos>"]))], "an added token stays one"
    assert ask(core, Detokenize("d", i4(ids))) == [Detokenized("d", "día €<eos>")]
    assert ask(core, Detokenize("d", i4(ids), True)) == [Detokenized("d", "día €")]
    assert rejected(ask(core, Detokenize("d", i4([999])))).param == "tokens"
    assert ask(core, Abort("zzz")) == [AbortRequest("zzz", CLIENT)]
    info = ask(core, ServerInfo("i"))[0]
    assert isinstance(info, Info)
    facts = msgspec.json.decode(info.json)
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["generation_defaults"]["top_k"] == 7


def test_flush_cache_goes_to_the_scheduler(core: TokenizerCore) -> None:
    (send,) = (core.on_client(CLIENT, FlushCache("f"), NOW), core.on_wake(NOW))[1]
    assert (send.to, send.message) == ("scheduler", Flush("f", CLIENT))


@pytest.mark.parametrize(("config", "level", "why"), [
    (Config(), 2, ""), (Config(recovery=RecoveryConfig(restart=False)), 1, ""),
    (Config(recovery=RecoveryConfig(restart=False)), 2, "level: 2 ends"),
    (Config(cluster=ClusterConfig(replicas=2)), 1, "sleep: a cluster's router cannot")])
def test_an_order_to_sleep_goes_to_the_scheduler_or_is_refused(config: Config, level: int,
                                                               why: str) -> None:
    control = Control("c", "sleep", level)
    if why:
        with pytest.raises(InvalidRequest, match=why):
            check_control(control, config)
    else:
        check_control(control, config)


def test_control_goes_to_the_scheduler(core: TokenizerCore) -> None:
    control = Control("c", "pause", mode="keep")
    (send,) = (core.on_client(CLIENT, control, NOW), core.on_wake(NOW))[1]
    assert (send.to, send.message) == ("scheduler", ControlRequest(CLIENT, control))


def test_tenant_and_priority_reach_the_scheduler(core: TokenizerCore) -> None:
    submit = generate(core, text="a", tenant="acme", priority=-7)[0]
    assert (submit.tenant, submit.priority) == ("acme", -7)
    submit = generate(core, "s", text="a")[0]
    assert (submit.tenant, submit.priority) == ("", 0)


@pytest.mark.parametrize(("more", "why"), [
    ({"tenant": "a b"}, "tenant: Expected `str` matching regex"),
    ({"tenant": "a\n"}, "tenant: Expected `str` matching regex"),
    ({"tenant": "x" * 65}, "tenant: Expected `str` of length <= 64"),
    ({"tenant": 5}, "tenant: Expected `str`, got `int`"),
    ({"priority": 2**31}, "priority: Expected `int` <= 2147483647"),
    ({"priority": -2**31 - 1}, "priority: Expected `int` >= -2147483648"),
    ({"priority": "high"}, "priority: Expected `int`, got `str`"),
])
def test_out_of_range_messages_are_refused(more: dict[str, Any], why: str) -> None:
    frame = msgspec.msgpack.encode(Generate("r", SamplingParams(), text="a", **more))
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.msgpack.decode(frame, type=ToTokenizerFront)
    assert describe_bad_frame(frame, ToTokenizerFront, caught.value).startswith(why)


def test_a_bad_frame_and_a_bug_are_answered(core: TokenizerCore,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    core.on_bad_client(CLIENT, "Expected `int`, got `str` - at `$.params.n`")
    assert core.on_wake(NOW)[0].message.rid == "-"

    def broken(*_: Any) -> None:
        raise RuntimeError("oh no: the prompt was xyzzy")

    monkeypatch.setattr(core._model, "encode", broken)
    answer = rejected(generate(core))
    assert answer.code == "quarantined" and "xyzzy" not in answer.message
    assert "tokenizer" in answer.message and "RuntimeError" in answer.message


def test_draining_refuses(core: TokenizerCore) -> None:
    core.drain(NOW)
    assert rejected(generate(core)).code == "unavailable" and core.done


def test_a_long_text_is_refused_by_a_prefix(core: TokenizerCore) -> None:
    begin = thread_time()
    answer = rejected(generate(core, text="many words " * 350_000))
    assert answer.code == "context_overflow" and "3850000 characters" in answer.message
    assert thread_time() - begin < slowness()
    long_but_fitting = "a" * 255
    assert len(generate(core, "fits", text=long_but_fitting)) == 2


def test_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(BadModel, match="skip-tokenizer"):
        loaded(TokenizerCore(context(path)))
    core = loaded(TokenizerCore(context(path, skip_tokenizer=True)))
    assert len(generate(core, tokens=i4([1]))) == 2
    assert rejected(generate(core, "a", text="x")).param == "prompt"
    assert rejected(generate(core, "b", {"stop": "x"}, tokens=i4([1]))).param == "stop"
    assert rejected(generate(core, "c", messages=[ChatMessage("user", "x")])).param == "messages"


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer.json", "{"), ("config.json", '{"vocab_size": "x"}'),
    ("tokenizer_config.json", "[]"),
    ("generation_config.json", '{"eos_token_id": "x"}'), ("config.json", "nonsense"),
])
def test_broken_model_files(tmp_path: Path, file: str, content: str) -> None:
    path = write_model(tmp_path)
    (path / file).write_text(content)
    with pytest.raises(BadModel) as caught:
        loaded(TokenizerCore(context(path)))
    assert "\n" not in str(caught.value)


def test_what_a_model_s_files_say_that_cannot_be_used_is_a_line_of_the_log(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    eos = byte_level().token_to_id("<eos>")
    path = write_model(tmp_path, max_position_embeddings=None, generation={
        "temperature": 0.5, "top_p": 0, "repetition_penalty": 0, "top_k": -7,
        "eos_token_id": 99_999})
    core = loaded(TokenizerCore(context(path)))
    p = generate(core)[0].params
    assert (p.temperature, p.top_p, p.repetition_penalty, p.top_k) == (0.5, 1, 1, 0)
    assert p.eos_ids == (eos,) and p.max_tokens == 32_768 - 4
    for word in ("top_p", "repetition_penalty", "top_k", "eos_token_id: 99999",
                 "max_position_embeddings"):
        assert sum(word in line for line in caplog.messages) == 1, word


def test_max_model_len_of_the_configuration(model: Path) -> None:
    core = loaded(TokenizerCore(context(model, max_model_len=10)))
    assert generate(core)[0].params.max_tokens == 6
    with pytest.raises(BadConfig, match="257 exceeds"):
        loaded(TokenizerCore(context(model, max_model_len=257)))


def test_the_demo_model(tmp_path: Path) -> None:
    core = loaded(TokenizerCore(context(models.resolve(""))))
    submit = generate(core, messages=[ChatMessage("user", "3+4")])[0]
    text = ask(core, Detokenize("d", submit.prompt))[0].text
    assert "3+4" in text and text.rstrip().endswith("assistant")


def test_a_grammar_is_checked_and_sent_on(core: TokenizerCore) -> None:
    from actorium.actors.params import Structured

    submit = generate(core, text="a", params={"structured": Structured(regex="[ab]+"),
                                              "ignore_eos": True})[0]
    assert submit.params.masked and "[ab]+" in submit.grammar
    assert submit.params.eos_ids, "a grammar ends by the end token, whatever else is ignored"
    plain = generate(core, "p", text="a")[0]
    assert not plain.params.masked and plain.grammar == ""
    refused = rejected(generate(core, "q", {"structured": Structured(regex="(")}))
    assert (refused.code, refused.param) == ("invalid_request", "structured")
