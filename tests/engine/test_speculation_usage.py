"""Where the counts of drafts are told: the usage of a choice, server_info, JSON lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from helpers_scheduler import column

from actorium.actors.client.requests import Request
from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.core import Context
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.detokenizer.incremental import NoTextStream
from actorium.actors.health import speculation_of
from actorium.actors.messages import (
    ActorStatus,
    Attach,
    Open,
    SequenceEvent,
    Status,
    Stop,
    TextBatch,
    TokenBatch,
    Usage,
)
from actorium.actors.params import SamplingParams, TextParams
from actorium.tools.cli.jsonl import BatchJob, record

ONE = (1).to_bytes(8, "little")


def detokenizer() -> DetokenizerCore:
    core = DetokenizerCore(Context(Config(model=ModelConfig(skip_tokenizer=True)), Path("/nowhere"),
                                   "detokenizer", 1, 0))
    core.on_wake(0.0)
    core.on_wake(0.0)
    core.on_client(b"c", Attach(), 0.0)
    core.on_wake(0.0)
    return core


def test_the_usage_counts_drafts() -> None:
    core = detokenizer()
    for sid in (1, 2):
        core.on_message(Open(sid=sid, rid=f"r{sid}", index=0, client=b"c", prompt=column([1]),
                             text=TextParams()), 0.0)
    both = ONE + (2).to_bytes(8, "little")
    core.on_message(TokenBatch(step=1, sids=both, starts=column([0, 0]), counts=bytes([1, 1]),
                               tokens=column([5, 6]), drafts=2, firsts=2), 0.0)
    core.on_message(TokenBatch(step=2, sids=both, starts=column([1, 1]), counts=bytes([3, 1]),
                               tokens=column([5, 6, 7, 8]), drafts=2), 0.0)
    live = [(core._sequences[sid].drafted, core._sequences[sid].accepted) for sid in (1, 2)]
    assert live == [(2, 2), (2, 0)]
    core.on_message(TokenBatch(step=3, sids=b"", starts=b"", counts=b"", tokens=b"", events=[
        SequenceEvent(sid=1, finish_reason="abort", draft_tokens=4, accepted_tokens=3)]), 0.0)
    (send,) = core.on_wake(0.0)
    assert isinstance(send.message, TextBatch)
    usage = send.message.deltas[0].usage
    assert usage is not None and (usage.completion_tokens, usage.draft_tokens,
                                  usage.accepted_tokens) == (4, 4, 3)


def test_server_info_describes_speculation() -> None:
    def status(**gauges: float) -> Status:
        actor = ActorStatus("e", "scheduler", 1, 1, "idle", 1, 0.0, 0.0, gauges=gauges)
        return Status("q", True, None, [actor])

    told = speculation_of(status(spec_decode_k=2.0, spec_decode_num_drafts=7.0, free_pages=3.0))
    assert told == {"k": 2.0, "num_drafts": 7.0}
    assert speculation_of(status(free_pages=3.0)) == {}
    told = speculation_of(status(spec_decode_num_drafts=9.0, spec_decode_by_mtp_num_drafts=7.0,
                                 spec_decode_by_draft_num_drafts=2.0))
    assert told == {"num_drafts": 9.0,
                    "methods": {"mtp": {"num_drafts": 7.0}, "draft": {"num_drafts": 2.0}}}


def test_a_json_line_counts_drafts() -> None:
    def line(usage: Usage) -> dict[str, object]:
        done = SimpleNamespace(text="", token_ids=[1], finish_reason="stop", usage=usage)
        return record(BatchJob(0, Request(prompt="a", params=SamplingParams())), [done])

    found = line(Usage(3, 1, 5, 6, 4))
    assert (found["draft_tokens"], found["accepted_tokens"]) == (6, 4)
    assert "draft_tokens" not in line(Usage(3, 1, 5))


class Letters(NoTextStream):
    """Token 5 reads "a", 6 "b", ..."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token - 5)


def test_a_stop_string_inside_a_window_has_its_drafts_counted() -> None:
    """The sequence ends here, before the scheduler knows of it; what lies past the stop is not
    counted as accepted."""
    core = detokenizer()
    core.on_message(Open(sid=1, rid="r", index=0, client=b"c", prompt=column([1]),
                         text=TextParams(stop=("c",))), 0.0)
    core._sequences[1]._stream = Letters()
    core.on_message(TokenBatch(step=1, sids=ONE, starts=column([0]), counts=bytes([1]),
                               tokens=column([5]), drafts=0, firsts=1), 0.0)
    core.on_message(TokenBatch(step=2, sids=ONE, starts=column([1]), counts=bytes([4]),
                               tokens=column([6, 7, 8, 9]), drafts=3), 0.0)
    sent = [send.message for send in core.on_wake(0.0)]
    assert Stop(1, 3) in sent
    (usage,) = [m.deltas[0].usage for m in sent if isinstance(m, TextBatch)]
    assert usage == Usage(1, 0, 3, 3, 1)
