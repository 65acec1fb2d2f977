"""Which hosts and addresses media may be fetched from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052)."""
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""Of IPv6 all that is given to networks of the internet (RFC 4291)."""
NOT_PUBLIC = tuple(map(ipaddress.ip_network, (
    "168.63.129.16/32",  # Azure's platform, as each of its machines sees it
    "192.0.0.0/24",  # protocol assignments, RFC 6890; metadata of a cloud at .192
    "192.88.99.0/24",  # relays of 6to4, which are no more, RFC 7526
    "3fff::/20")))  # documentation, RFC 9637
"""Ranges that `ipaddress` takes for global, in one version of Python or all."""
ISATAP = (0x5EFE, 0x2005EFE)
"""The third quarter of an IPv6 address whose last one is an IPv4 address (RFC 5214)."""


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
        if found not in GLOBAL_UNICAST:
            return False
        own = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) \
            if int(found) >> 32 & 0xFFFFFFFF in ISATAP else None
        inner = (own, found.sixtofour, *(found.teredo or ()))
        if not all(is_public(str(one)) for one in inner if one is not None):
            return False
    if any(found in network for network in NOT_PUBLIC):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_loopback
                                    or found.is_link_local or found.is_unspecified)
