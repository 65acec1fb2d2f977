"""A detokenizer that is away while the scheduler goes on: what waits for it is bounded, and nothing
of it is lost."""

from __future__ import annotations

import os
import signal
import time

import pytest
import zmq
from helpers_runtime import short_dir

from actorium.actors.client.client import Client
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import ActorStatus, Hello, ToScheduler
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.mailbox import Inbox, Outbox, Overflow
from actorium.tools.null.null_worker import VOCAB, next_token

STREAMS, TOKENS, SEED = 8, 2000, 70
PROMPT = [1, 2, 3]


def test_a_stuck_outbox_drops_everything_until_the_peer_reads() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with short_dir() as base:
        address = f"ipc://{base}/inbox"
        outbox = Outbox(context, address, hwm=16)
        with pytest.raises(Overflow, match="inbox: 16 messages wait"):
            for number in range(33):
                outbox.send(Hello("early", number))
        outbox.drop_backlog()
        outbox.send(Hello("late", 33))
        assert (outbox.dropped, outbox.waiting, outbox.flush()) == (18, True, False)
        inbox = Inbox(context, address, ToScheduler, hwm=16)
        got: list[Hello] = []
        while not outbox.flush():
            got += inbox.receive(99)
        outbox.send(Hello("again", 34))
        while not got or got[-1].role != "again":
            got += inbox.receive(99)
        assert [hello.epoch for hello in got] == [*range(16), 34]
        inbox.close()
        outbox.close()
    context.term()


def actor(client: Client, role: str) -> ActorStatus:
    return next(a for a in client.status().actors if a.role == role)


def test_a_scheduler_outlives_a_detokenizer_that_is_away() -> None:
    """20,000 messages by default; 32 here, which is a moment's worth."""
    params = [SamplingParams(max_tokens=TOKENS, seed=SEED + n, ignore_eos=True)
              for n in range(STREAMS)]
    with short_dir() as base, Engine("", null_worker=True, skip_tokenizer=True, run_dir=str(base),
                                     restart=True, queue_messages=16) as engine:
        client = engine.client
        streams = [client.stream(PROMPT, p) for p in params]
        ids = [list(next(stream).token_ids) for stream in streams]
        before = actor(client, "scheduler"), actor(client, "detokenizer")
        os.kill(before[1].pid, signal.SIGKILL)
        for mine, stream in zip(ids, streams, strict=True):
            mine += [token for delta in stream for token in delta.token_ids]
        for n, mine in enumerate(ids):
            assert mine == [next_token(SEED + n, len(PROMPT) + i, VOCAB) for i in range(TOKENS)]
        while actor(client, "detokenizer").epoch == before[1].epoch:
            time.sleep(0.02)
        now = actor(client, "scheduler")
        assert now.epoch == before[0].epoch and now.pid == before[0].pid
        assert now.gauges["missed"] > 0


def test_requests_sent_while_the_scheduler_is_down_are_served() -> None:
    crowd = 60
    with short_dir() as base, Engine("", null_worker=True, skip_tokenizer=True, run_dir=str(base),
                                     restart=True, queue_messages=16) as engine:
        client = engine.client
        before = actor(client, "scheduler"), actor(client, "tokenizer")
        os.kill(before[0].pid, signal.SIGKILL)
        params = [SamplingParams(max_tokens=4, seed=SEED + n, ignore_eos=True)
                  for n in range(crowd)]
        for n, choice in enumerate(client.generate([PROMPT] * crowd, params)):
            assert choice.token_ids == [next_token(SEED + n, len(PROMPT) + i, VOCAB)
                                        for i in range(4)]
        assert actor(client, "scheduler").epoch == before[0].epoch + 1
        assert actor(client, "tokenizer").pid == before[1].pid
