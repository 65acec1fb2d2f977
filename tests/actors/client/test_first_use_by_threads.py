"""Threads that are the first to use the SDK, at the same time: msgspec 0.22 ends the process where
two of them are the first to decode a type."""

from __future__ import annotations

import subprocess
import sys

FIRST_USERS = """
import sys, threading
from actorium.actors.client.connection import _DECODERS, DETOKENIZER, TOKENIZER, WATCHDOG
from actorium.actors.config.tree import Config, dump, load
from actorium.actors.launcher.crash_reports import _decode_status as of_crashes
from actorium.actors.launcher.engine import _decode_status as of_engines
from actorium.actors.messages import (Accepted, ActorStatus, Delta, Status, TextBatch,
                                      TokenLogprob, Usage)
from actorium.actors.structured.grammar_validator import GrammarVerdict, _decode_verdict
from actorium.actors.tokenizer.template_renderer import Rendered, _decode_rendered
from actorium.tools.cli.status import _decode as of_ps
import msgspec
sys.setswitchinterval(1e-6)
pack = msgspec.msgpack.encode
data = dump(Config())
status = pack(Status("r", True, None, [ActorStatus("e", "w", 1, 1, "idle", 1, 0.0, 0.0)]))
delta = Delta("r", 0, 0, "a", b"1234", [TokenLogprob(1, -1.0, 1, [])], None, "stop", None,
              Usage(1, 2, 3))
uses = [lambda: load(data), lambda: of_ps(status), lambda: of_crashes(status),
        lambda: of_engines(status), lambda: _DECODERS[WATCHDOG](status),
        lambda: _DECODERS[DETOKENIZER](pack(TextBatch([delta]))),
        lambda: _DECODERS[TOKENIZER](pack(Accepted("r", 3))),
        lambda: _decode_rendered(pack(Rendered("a"))),
        lambda: _decode_verdict(pack(GrammarVerdict("a")))]
together = threading.Barrier(4)
done = []
def user():
    for use in uses:
        together.wait()
        use()
    done.append(True)
threads = [threading.Thread(target=user) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(len(done) != 4)
"""


def test_types_are_known_before_threads_use_them() -> None:
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", FIRST_USERS], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
