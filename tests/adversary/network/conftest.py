"""An engine without a model, whose peers have little time, few places and small bodies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_network import BODY, BYTES, MAX_PEERS, NAME, POSTS, RECEIVE, SEND, ask
from helpers_served import Served, serving

from actorium.actors.runtime.rundir import engine_dir
from actorium.actors.watchdog import probe_server


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(null_worker=True, max_num_seqs=64, body_timeout=RECEIVE, send_timeout=SEND,
                 max_body_bytes=BYTES, max_connections=MAX_PEERS, probe_port=0, resume_grace=0,
                 served_model_name=(NAME,)) as found:
        for path in ("/livez", "/v1/completions", "/openapi.json"):
            ask(found, path, BODY if path in POSTS else None)
        yield found


@pytest.fixture(scope="session")
def probe_port(served: Served) -> int:
    run_dir = engine_dir(served.engine.name)
    assert isinstance(run_dir, Path)
    where = probe_server.where(run_dir)
    assert where is not None
    return where.port
