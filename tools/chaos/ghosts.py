"""What the dead still say: messages of a scheduler's earlier life, pushed into the inboxes.

Batches of wrong tokens for the streams that run, plans and resets for the worker, results of the
plans of an earlier life. Nobody may listen: epochs fence them off.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import zmq

from actorium.actors.messages import Message, Reset, StepPlan, StepResult, TokenBatch
from actorium.actors.runtime.rundir import address

WRONG = 510
"""The token that they tell."""
REACH = 150
"""Tokens into a stream."""
SEND_TIMEOUT = 2000


def haunt(run_dir: Path, epoch: int, sids: range, step: int) -> int:
    """Speak as the scheduler of `epoch`, about those sequences; returns the number of messages."""
    batches: list[Message] = [_batch(epoch, sids, start) for start in range(REACH)]
    plans: list[Message] = [Reset(epoch), *(
        StepPlan(epoch, step + i, decode=np.arange(1, 9, dtype=np.int32).tobytes())
        for i in range(20))]
    results: list[Message] = [StepResult(epoch, step + i, b"\1", np.int32(WRONG).tobytes(), b"\2")
                              for i in range(-20, 20) if step + i >= 0]
    with zmq.Context() as context:
        return sum(_push(context, run_dir, role, messages) for role, messages in (
            ("detokenizer", batches), ("worker-0", plans), ("scheduler", results)))


def _batch(epoch: int, sids: range, start: int) -> TokenBatch:
    count = len(sids)
    return TokenBatch(step=1, sids=np.array(sids, np.int32).tobytes(),
                      starts=np.full(count, start, np.int32).tobytes(), counts=b"\1" * count,
                      tokens=np.full(count, WRONG, np.int32).tobytes(), epoch=epoch)


def _push(context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, role: str,
          messages: list[Message]) -> int:
    with context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT)
        socket.setsockopt(zmq.LINGER, SEND_TIMEOUT)
        socket.connect(address(run_dir, f"{role}.inbox"))
        for message in messages:
            socket.send(msgspec.msgpack.encode(message))
    return len(messages)
