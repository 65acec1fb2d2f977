"""Which hosts and addresses media may be fetched from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052)."""


def is_allowed_host(host: str, allowed: Iterable[str]) -> bool:
    """Whether a host is one of the names: `images.example` is that host alone, as in vLLM,
    `*.example` any below it, `*` any."""
    host = host.lower().rstrip(".")
    return any(name == "*" or host == name or name.startswith("*.") and host.endswith(name[1:])
               for name in (name.lower().rstrip(".") for name in allowed))


def is_public(address: str) -> bool:
    """Whether an address is one of the internet at large: not of this machine, a private or local
    network, a group, or a reserved range; nor an IPv6 form of such an IPv4 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        inner = (found.sixtofour, *(found.teredo or ()))
        if not all(is_public(str(one)) for one in inner if one is not None):
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_loopback
                                    or found.is_link_local or found.is_unspecified)
