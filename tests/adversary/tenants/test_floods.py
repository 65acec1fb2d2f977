"""One tenant's flood, and what kills: nobody else suffers from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, ScriptedStream
from helpers_runtime import short_dir
from helpers_scheduler import Ring, config
from helpers_served import Served
from helpers_tenants import (
    ADMIN,
    ANN,
    BOB,
    CANARY,
    bearer,
    key_file,
    packed,
    parsed,
    tenants,
)

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.runtime.inflight_journal import SIZE, InflightJournal

PLACES = 4


@pytest.mark.mended("under the fair policy one tenant's flood filled the queue, and all others "
                    "were refused with queue_full")
def test_a_full_queue_has_a_place_for_each_tenant(amount: Any, tried: Any) -> None:
    """Under the fair policy; and never are there twice as many places as there should be."""
    for queued in range(2, amount(10, 30)):
        for policy in ("fair", "fcfs"):
            ring = Ring(config(seqs=1, queued=queued, policy=policy))
            names = ["ann"] * 3 * queued + ["bob", "bob", "ann"] + \
                [f"t{number}" for number in range(3 * queued)]
            rids = [ring.submit(4, max_tokens=2, tenant=name) for name in names]
            ring.run()
            codes = [ring.of(rid)[0].error_code for rid in rids]
            assert codes[:queued + 1] == [None] * (queued + 1)
            assert set(codes[queued + 1:3 * queued]) == {"queue_full"}
            owed = codes[3 * queued] is None
            assert owed == (policy == "fair") and codes[3 * queued + 2] == "queue_full"
            assert codes.count(None) <= 2 * queued + 1
            tried(len(names))


def test_a_flood_of_one_tenant_does_not_keep_another_waiting(amount: Any, tried: Any) -> None:
    """Its request is served while most of the flood that came before still waits."""
    with short_dir() as where, tenants(where, schedule_policy="fair",
                                       max_num_seqs=PLACES) as served:
        flood = amount(100, 300)
        for _ in range(amount(1, 5)):
            assert asyncio.run(flooded(served, flood)) < flood / 2, "bob waited for it"
            tried(flood + 1)


async def flooded(served: Served, size: int) -> int:
    """How many of ann's were answered while bob waited."""
    count = 0
    begun = asyncio.Event()

    async def one(key: str, tokens: int) -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection(served.host, served.port)
        body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
        writer.write(packed("POST", "/v1/completions", [bearer(key)], body))
        assert parsed(await reader.read()).status == 200
        writer.close()
        if key == ANN:
            count += 1
            begun.set()

    flood = [asyncio.ensure_future(one(ANN, 40)) for _ in range(size)]
    await begun.wait()
    before = count
    await one(BOB, 4)
    meanwhile = count - before
    await asyncio.gather(*flood)
    return meanwhile


def test_a_tenants_poison_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     tried: Any) -> None:
    """What has killed a gateway is refused to who sent it, and to nobody else."""
    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", ScriptedStream)
    settings = Config(gateway=GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    buffer = bytearray(SIZE)

    def start() -> Any:
        gateway = GatewayState(settings, Path("none"), InflightJournal(buffer, actor="gateway"))
        gateway.engine.client = Scripted(["hello there"])  # type: ignore[assignment]
        return gateway, build_app(gateway)

    def post(app: Any, key: str, path: str = "/v1/completions") -> httpx.Response:
        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app),
                                         base_url="http://gateway") as client:
                return await client.post(path, json={"prompt": f"poison {CANARY}"},
                                         headers=dict([bearer(key)]))

        return asyncio.run(run())

    for _ in range(2):  # two deaths with this body in hand
        gateway, app = start()
        seen: list[bytes] = []

        def never(place: int = 0, seen: list[bytes] = seen) -> None:
            seen.append(bytes(buffer))

        gateway.journal.clear = never
        post(app, ANN)
        buffer[:] = next(state for state in seen if state != bytes(SIZE))
    _, app = start()
    refused = post(app, ANN)
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "quarantined"
    assert CANARY not in refused.text
    for key in (BOB, ADMIN):
        for path in ("/v1/completions", "/completions", "/invocations"):
            assert post(app, key, path).status_code == 200
            tried()
