"""Names of pages below the pool: hashes of a whole prefix, so equal names mean equal pages."""

from __future__ import annotations

from hashlib import blake2b

from actorium.actors.scheduler.cache.radix_cache import PrefixKey
from actorium.actors.scheduler.cache.tree_nodes import TreeNode

NAME_BYTES = 16
COPY_KIND = 1 << 16
"""`StepPlan.store` names a part of a page by kind * COPY_KIND + part."""


def page_names(key: PrefixKey, page_size: int) -> list[bytes]:
    """The name of each whole page of a prefix, chained over the salt and all tokens up to its end.
    """
    width, name, names = page_size * 4, key.salt.encode(), list[bytes]()
    for at in range(0, len(key.data) // width * width, width):
        chained = blake2b(name, digest_size=NAME_BYTES).digest()
        name = blake2b(key.data[at:at + width], digest_size=NAME_BYTES, key=chained).digest()
        names.append(name)
    return names


def part_name(name: bytes, unit: int) -> bytes:
    """The name of a part of what belongs to a page's name; unit: see `COPY_KIND`."""
    if not unit:
        return name
    return blake2b(name, digest_size=NAME_BYTES, key=unit.to_bytes(4, "little")).digest()


class NodeNames:
    """Names of the pages of nodes of the tree; those of the last one are kept, since a leaf is
    often trimmed page by page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._last: tuple[TreeNode | None, int, str, list[bytes]] = (None, 0, "", [])

    def of(self, node: TreeNode) -> list[bytes]:
        """At least as many as the node has pages."""
        start = node.end - node.size
        last, at, salt, names = self._last
        path, above = [node.key], node.parent
        while above is not None and above.parent is not None:
            path.append(above.key)
            above = above.parent
        root_salt = "" if above is None else above.salt
        if last is not node or at != start or salt != root_salt or len(names) < node.size:
            key = PrefixKey(root_salt, b"".join(reversed(path)))
            names = page_names(key, self._page_size)[start:]
            self._last = (node, start, root_salt, names)
        return names
