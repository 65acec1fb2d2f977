"""An engine with tenants."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from helpers_runtime import short_dir
from helpers_served import Served
from helpers_tenants import tenants


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two gateways, so that half of all calls go to the other one."""
    with short_dir() as where, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        with tenants(where, port=port, gateways=2, responses_store=str(where / "store"),
                     tenant_weights={"ann": 2.0, "bob": 1.0}) as made:
            yield made
