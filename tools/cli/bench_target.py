"""Whom `actorium bench serve` asks: an engine of its own, a running one by name, or any server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from actorium.actors.errors import BadConfig
from actorium.tools.bench.backends import CHAT, ENDPOINTS, SDK
from actorium.tools.cli.bench_options import BenchServeOptions

SELF = "self"
"""--base-url of the engine's own HTTP face."""
LOCAL = "127.0.0.1"
PORTS = {"sglang": 30000, "sglang-native": 30000, "sglang-oai": 30000, "sglang-oai-chat": 30000,
         "llama.cpp": 8080}
"""Backend -> the port that its servers listen at; others 8000."""
KNOCK_SECONDS = 1.0


class BenchTarget(NamedTuple):
    """Whom to ask, and how."""

    backend: str
    endpoint: str
    """"" with the client."""
    url: str | None
    """Of a server that is there; None = an engine of ours."""
    own: bool
    """Start one."""
    note: str = ""
    """What the user should know of the choice."""


def target_of(options: BenchServeOptions, written: Mapping[str, str], named: bool,
              answers: Callable[[str], bool]) -> BenchTarget:
    """written: which flags were. named: --name says which engine of ours. answers: whether a server
    of models is at a URL, which is looked at only if a backend was named and no place.

    Raises `BadConfig`.
    """
    url, note = _url(options), ""
    given = options.backend
    if url is None and not named and given not in (None, SDK) and options.base_url != SELF:
        here = f"http://{LOCAL}:{PORTS.get(given or '', 8000)}"
        found = answers(here)
        url = here if found else None
        note = (f"asking the server at {here}" if found else
                f"no server at {here}: an engine of its own is started")
    backend = given or (SDK if url is None and options.base_url != SELF else "openai")
    if backend == SDK and (url is not None or options.base_url == SELF):
        raise BadConfig("--backend: actorium is the client of engines by --name; a URL needs "
                        f"another one: {', '.join(ENDPOINTS)}", "backend")
    if backend == SDK and options.endpoint is not None:
        raise BadConfig("--endpoint: needs --backend openai, or another one that speaks HTTP",
                        "endpoint")
    endpoint = options.endpoint or ENDPOINTS.get(backend, "")
    if options.name == "demo" and options.endpoint is None and backend != SDK:
        endpoint = CHAT
    return BenchTarget(backend, endpoint, url, url is None and not named, note)


def _url(options: BenchServeOptions) -> str | None:
    if options.base_url is not None:
        if options.host is not None or options.port is not None:
            raise BadConfig("--base-url: cannot be combined with --host and --port", "base_url")
        return None if options.base_url == SELF else options.base_url
    if options.host is None and options.port is None:
        return None
    host = {None: LOCAL, "0.0.0.0": LOCAL}.get(options.host, options.host)
    port = options.port or PORTS.get(options.backend or "", 8000)
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def answers_models(url: str) -> bool:
    """Whether a server that lists models is there."""
    try:
        with urlopen(f"{url}/v1/models", timeout=KNOCK_SECONDS) as answer:
            return bool(answer.status == 200 and b'"data"' in answer.read(1 << 20))
    except (URLError, OSError, ValueError):
        return False
