"""`actorium keys`: who may connect to an engine over tcp."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from actorium.actors.config.sources import suggestion
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import curve_keys as keys
from actorium.tools.cli.command_line import parse

ABOUT = """Keys of engines that listen on tcp (`actorium serve --listen tcp://HOST:PORT`).

  actorium keys server                       make the server's pair of keys
  actorium keys client NAME                  make a client's key file, and let it in
  actorium keys client NAME --server KEY     make one elsewhere: KEY is the server's public key
  actorium keys authorise NAME KEY           let a client in by its public key
  actorium keys revoke NAME                  refuse it from its next connection on
  actorium keys list                         the server's public key, and who is let in

A running engine sees every change at once. A client connects with
Client("tcp://HOST:PORT", key="NAME.key")."""
WORDS = {"server": 0, "client": 1, "authorise": 2, "authorize": 2, "revoke": 1, "list": 0}
"""Action -> how many words follow."""


class KeysOptions(Struct, frozen=True, kw_only=True):
    """What to do."""

    action: str = ""
    """server | client | authorise | revoke | list."""
    client: str | None = None
    """The client's name."""
    public: str | None = None
    """The client's public key."""
    out: str | None = None
    """Where to put a client's key file; default: NAME.key in the present directory."""
    server: str | None = None
    """The server's public key, where its own file is not."""
    replace: bool = False
    """Replace the server's pair: every client needs a new key file then."""


def run(_command: str, argv: list[str]) -> int:
    options = parse("actorium keys", _named(argv), KeysOptions, ABOUT, model=False)
    if not options.options.action:
        raise BadConfig(f"keys: do what? one of {', '.join(WORDS)}", "action")
    where = keys.directory(options.config.runtime.keys_dir)
    _act(options.options, where)
    return 0


def _named(argv: list[str]) -> list[str]:
    words: list[str] = []
    while len(words) < len(argv) and not argv[len(words)].startswith("--"):
        words.append(argv[len(words)])
    if not words:
        return argv
    if words[0] not in WORDS:
        raise BadConfig(f"keys: {words[0]}: no such action{suggestion(words[0], WORDS)}", "action")
    if len(words) != 1 + WORDS[words[0]]:
        want = ("nothing", "a NAME", "a NAME and a public KEY")[WORDS[words[0]]]
        raise BadConfig(f"keys {words[0]}: takes {want}, got {' '.join(words[1:]) or 'nothing'}",
                        "action")
    flags = ("action", "client", "public")
    named = [f"--{flag}={word}" for flag, word in zip(flags, words, strict=False)]
    return named + argv[len(words):]


def _act(options: KeysOptions, where: Path) -> None:
    name = options.client or ""
    if options.action == "server":
        print(f"server: {keys.make_server(where, options.replace).public}")
    elif options.action == "client":
        out = Path(options.out or f"{name}.key")
        pair = keys.make_client(where, name, out, options.server or "")
        print(f"{name}: {pair.public}\nwrote {out}: whoever has it is {name}")
        if options.server:
            print(f"to be let in: actorium keys authorise {name} '{pair.public}'")
    elif options.action == "revoke":
        keys.revoke(where, name)
        print(f"{name} is refused from its next connection on")
    elif options.action == "list":
        _list(where)
    else:
        keys.authorise(where, name, options.public or "")
        print(f"{name} is let in")


def _list(where: Path) -> None:
    """Without the server's secret nothing can listen, so that comes first."""
    print(f"server: {keys.read_server(where).public}")
    for name, public in keys.clients(where).items():
        print(f"{name}: {public}")
