"""Addresses of an engine beyond its machine: `tcp://HOST:PORT` stands for four ports in a row.

The fronts sit in processes of their own, so each has a port: PORT, PORT + 1 and PORT + 2, and for
images and videos, where the model takes them, PORT + 3.
They are fixed rather than asked for, so that an actor that is started again is found where its
predecessor was, and a firewall needs one rule.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEME = "tcp://"
FRONTS = ("tokenizer", "detokenizer", "watchdog", "media")
"""Roles in the order of their ports."""
LAST_PORT = 65535


class Endpoint(NamedTuple):
    """A parsed `tcp://HOST:PORT`."""

    host: str
    """IPv6 addresses in brackets."""
    port: int

    @property
    def ipv6(self) -> bool:
        return self.host.startswith("[")

    def address(self, role: str) -> str:
        """ZMQ address of the front of one role. Raises `ValueError` if the role has none."""
        return f"{SCHEME}{self.host}:{self.port + FRONTS.index(role)}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.host}:{self.port}"


def parse(text: str) -> Endpoint:
    """Read `tcp://HOST:PORT`. Raises `ValueError` with what is wanted ("must be ...")."""
    host, colon, port = text.removeprefix(SCHEME).rpartition(":")
    highest = LAST_PORT - len(FRONTS) + 1
    ok = text.startswith(SCHEME) and colon and host and port.isascii() and port.isdecimal()
    if ok and (":" in host) == (host.startswith("[") and host.endswith("]")) and "/" not in host:
        if 1 <= int(port) <= highest:
            return Endpoint("127.0.0.1" if host == "localhost" else host, int(port))
        raise ValueError(f"the port must be between 1 and {highest}: it and the next three are "
                         "used")
    raise ValueError("must be tcp://HOST:PORT ([...] around an IPv6 address)")
