"""The prefix cache: a radix tree over whole pages of tokens, with one root per tenant's salt.

Keys are the tokens' bytes, so that a node is compared with `bytes.startswith` (no copy, no Python
objects); a child is found by the bytes of its first page; numpy looks for the first page that
differs only where a prompt leaves a node half-way. (The radix tree of pages is that of SGLang,
Zheng et al. 2024, arXiv 2312.07104; holes in windowed groups are like its SWA tombstones.)

The tree holds page numbers only; the page allocator counts who else owns a page. Each group (layers
of one attention window) has a page per index, or, in a windowed group, a hole. A match may end at
index e if every full group has its pages 0..e-1 and every windowed group those of the last window -
1 tokens (what the query at position e * page_size sees), at least one page. See `eviction` for the
order of eviction and for what locks cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from actorium.actors.messages import MediaItem, Submit
from actorium.actors.scheduler.cache.eviction import TreePages
from actorium.actors.scheduler.cache.page_allocator import NO_PAGES, Ints
from actorium.actors.scheduler.cache.tree_nodes import TreeNode, below


class PrefixKey(NamedTuple):
    """The key of a prefix."""

    salt: str
    """Tenant, and a request's own salt if it has one: trees of different salts share nothing."""
    data: bytes
    """Token ids, little-endian i4. Only whole pages count, the tree ignores the rest."""


class PrefixMatch(NamedTuple):
    """The longest usable prefix."""

    length: int
    """Tokens, a multiple of the page size."""
    pages: list[Ints]
    """Per group i4[length / page_size], the caller's own copy. 0 = behind that group's window."""
    node: TreeNode
    """To lock, before anything is evicted."""


class CheckpointMatch(NamedTuple):
    """The longest prefix that a model with recurrent layers can start from."""

    match: PrefixMatch
    branch: int
    """Tokens after which the key leaves the tree where another prefix continues; else 0."""
    pending: bool
    """The plan being made saves a longer one: usable from the next plan on."""


class RadixCache:
    """Prefixes and their pages. See `TreePages` for counters, lock, evict and flush.

    `match` and `insert` cost a dict look-up for each node of the path and one comparison of the
    key's memory. Nodes made by a split are not merged again when the branch was removed: the two
    halves were last used at different times, and merging them would lose that.
    """

    def __init__(self, page_size: int, windows: Sequence[int], policy: str = "lru") -> None:
        """windows[g] in tokens, 0 = full attention. Raises `ValueError` for an unknown policy."""
        self.page_size = page_size
        self.pages = TreePages(page_size, windows, policy)
        self.stats, self._roots = self.pages.stats, self.pages.roots
        self._clock = 0

    def match(self, key: PrefixKey, most: int | None = None) -> PrefixMatch:
        """Returns the longest usable prefix of the key's first `most` tokens (None = all). Splits a
        node when it ends inside; counts as a use."""
        size = self._pages_in(key, most)
        self.stats.lookups += size * self.page_size
        path, last = self._find(key, size)
        if not path:
            return PrefixMatch(0, [NO_PAGES] * self.pages.groups, TreeNode(None, b"", []))
        if last < path[-1].size:
            path[-1] = self._split(path[-1], last)
        for node in path:
            node.hits += 1
        self._touch(path)
        node = path[-1]
        self.stats.hits += node.end * self.page_size
        return PrefixMatch(node.end * self.page_size, self._pages_of(path), node)

    def match_state(self, key: PrefixKey, step: int, most: int | None = None) -> CheckpointMatch:
        """Matches for a model with recurrent layers: up to the last end with a checkpoint that a
        plan before `step` has saved."""
        size = self._pages_in(key, most)
        self.stats.lookups += size * self.page_size
        path, last = self._find(key, size)
        known = (path[-1].end - path[-1].size + last) * self.page_size if path else 0
        branch = known if path and (last < path[-1].size or path[-1].children) else 0
        if path and last < path[-1].size:
            path.pop()
        pending = False
        while path and not (path[-1].checkpoint and path[-1].checkpoint_step < step):
            pending = pending or path[-1].checkpoint > 0
            path.pop()
        if path and self.pages.windowed:
            end = path[-1].end
            path, last = self._find(key, end)
            if not path or path[-1].end != end or last < path[-1].size:
                path = []
        if not path:
            return CheckpointMatch(PrefixMatch(0, [NO_PAGES] * self.pages.groups,
                                               TreeNode(None, b"", [])), branch,
                                   pending)
        for node in path:
            node.hits += 1
        self._touch(path)
        length = path[-1].end * self.page_size
        self.stats.hits += length
        return CheckpointMatch(PrefixMatch(length, self._pages_of(path), path[-1]), branch, pending)

    def known(self, key: PrefixKey) -> int:
        """Returns the pages of the longest usable prefix, states aside. Does not count as a use."""
        path, last = self._find(key, self._pages_in(key))
        return path[-1].end - path[-1].size + last if path else 0

    def nodes(self) -> Iterator[TreeNode]:
        """Yields all nodes, parents before children."""
        for root in self._roots.values():
            yield from below(root)

    def insert(self, key: PrefixKey, pages: Sequence[Ints], priority: int = 0,
               most: int | None = None) -> tuple[TreeNode, list[Ints]]:
        """Adds a prefix, the key's first `most` tokens (None = all). Returns the node at its end
        and, per group, the pages newly kept.

        pages[g]: i4[>= n] for the n full pages; entries that the tree has already keep their
        own page. In windowed groups 0 = the caller has no page there (never the number of a page
        that it has freed), and holes of the tree are filled. Pages at the end that all groups lack
        are cut off. Raises `ValueError` for too few entries or a hole in a full group.
        """
        count = self._pages_to_insert(self._pages_in(key, most), pages)
        root = self._roots.get(key.salt)
        if not count:
            return root or TreeNode(None, b"", []), [NO_PAGES] * self.pages.groups
        if root is None:
            root = self._roots[key.salt] = TreeNode(None, b"", [], salt=key.salt)
        path, last = self._walk(root, key.data, count)
        if path and last < path[-1].size:
            path[-1] = self._split(path[-1], last)
        taken: list[list[Ints]] = [[] for _ in pages]
        if self.pages.windowed:
            self._fill(path, pages, taken)
        at = path[-1].end if path else 0
        if at < count:
            data = key.data[at * self.page_size * 4:count * self.page_size * 4]
            path.append(self._grow(path[-1] if path else root, data,
                                   [own[at:count].astype(np.int32) for own in pages], taken))
        for node in path:
            node.priority = max(node.priority, priority)
        self._touch(path)
        node = path[-1]
        self.pages.leaves.push(node)
        newly = [np.concatenate(arrays) if arrays else NO_PAGES for arrays in taken]
        self.pages.version += any(map(len, newly))
        return node, newly

    def pages_held(self) -> Iterator[tuple[str, list[Ints]]]:
        """Returns, for an audit, a description of each node and its pages per group without the
        holes."""
        for number, root in enumerate(self._roots.values()):
            for node in below(root):
                name = f"cached pages {node.end - node.size}..{node.end - 1} of salt {number}"
                yield name, [pages[pages != 0] for pages in node.pages]

    def _pages_in(self, key: PrefixKey, most: int | None = None) -> int:
        """Returns the number of whole pages of the key's first `most` tokens."""
        return (len(key.data) // 4 if most is None else most) // self.page_size

    def _pages_to_insert(self, count: int, pages: Sequence[Ints]) -> int:
        """Returns how many of a key's `count` pages to insert, after checking `pages`."""
        if len(pages) != self.pages.groups or any(len(own) < count for own in pages):
            raise ValueError(f"pages: {self.pages.groups} arrays of {count} pages needed, "
                             f"got {[len(own) for own in pages]}")
        for g in self.pages.full:
            if not pages[g][:count].all():
                raise ValueError(f"pages: group {g} has full attention, a hole in it at "
                                 f"{int(np.argmin(pages[g][:count]))}")
        if self.pages.full:
            return count
        held = np.flatnonzero(np.any([own[:count] for own in pages], axis=0))
        return int(held[-1]) + 1 if len(held) else 0

    def _walk(self, root: TreeNode, data: bytes, count: int) -> tuple[list[TreeNode], int]:
        """Returns the nodes that agree with the first `count` pages of `data`, and how many pages
        of the last node do."""
        page = self.page_size * 4
        size = count * page
        at, node, path = 0, root, []
        while at < size:
            child = node.children.get(data[at:at + page])
            if child is None:
                break
            path.append(child)
            if at + len(child.key) > size or not data.startswith(child.key, at):
                return path, _common_tokens(child.key, data, at, size) // self.page_size
            at += len(child.key)
            node = child
        return path, node.size

    def _find(self, key: PrefixKey, count: int) -> tuple[list[TreeNode], int]:
        """Returns the path of the longest usable prefix of the key's first `count` pages, and how
        many pages of its last node are in it."""
        root = self._roots.get(key.salt)
        if root is None:
            return [], 0
        path, last = self._walk(root, key.data, count)
        last = self.pages.usable_end(path, last)
        return path, last

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Cuts a node in two. Returns the new upper part; `node` stays the lower one with its end,
        so that locks on it stay valid. The caller is about to touch `upper`."""
        page = self.page_size * 4
        parent, below = node.parent, node.size - at
        assert parent is not None
        upper = TreeNode(parent, node.key[:at * page], [own[:at].copy() for own in node.pages],
                         len(node.parts))
        parent.children[node.key[:page]] = upper
        node.parent = upper
        node.key = node.key[at * page:]
        node.pages = [own[at:].copy() for own in node.pages]
        node.size = below
        upper.children[node.key[:page]] = node
        upper.locks, upper.hits, upper.priority = node.locks, node.hits, node.priority
        upper.seen = self._clock + 1  # as `_touch` will say: queued at its final rank at once
        self.pages.split(upper, node)
        return upper

    def _grow(self, parent: TreeNode, data: bytes, pages: list[Ints],
              taken: list[list[Ints]]) -> TreeNode:
        """Adds a leaf with these tokens and pages."""
        node = TreeNode(parent, data, pages, len(self.pages.windowed))
        node.seen = self._clock + 1
        parent.children[node.key[:self.page_size * 4]] = node
        for g in self.pages.full:
            taken[g].append(pages[g].copy())
        for g in self.pages.windowed:
            taken[g].append(pages[g][pages[g] != 0])
        self.pages.add(node)
        return node

    def _fill(self, path: list[TreeNode], pages: Sequence[Ints], taken: list[list[Ints]]) -> None:
        """Fills holes on a path with the caller's pages."""
        for node in path:
            filled = False
            for g, part in zip(self.pages.windowed, node.parts, strict=True):
                if part.held == node.size:
                    continue
                own, given = node.pages[g], pages[g][node.end - node.size:node.end]
                at = np.flatnonzero((own == 0) & (given != 0))
                if len(at):
                    own[at] = given[at]
                    taken[g].append(own[at])
                    filled = True
            if filled:
                self.pages.recount(node)

    def _touch(self, path: list[TreeNode]) -> None:
        """Records for the policy that a match or insert walked a path and ended there."""
        self._clock += 1
        for node in path:
            node.used = self._clock
        if not self.pages.windowed:
            return
        end = path[-1].end
        for node in reversed(path):
            if end - node.end >= self.pages.furthest:
                break
            node.seen = self._clock

    def _pages_of(self, path: list[TreeNode]) -> list[Ints]:
        """Returns, per group, the pages that a sequence starting at the end of the path needs."""
        end = path[-1].end
        result: list[Ints] = [NO_PAGES] * self.pages.groups
        for g in self.pages.full:
            result[g] = np.concatenate([node.pages[g] for node in path])
        for g, reach in zip(self.pages.windowed, self.pages.reach, strict=True):
            first = max(0, end - reach)
            result[g] = np.zeros(end, np.int32)
            for node in reversed(path):
                if node.end <= first:
                    break
                start = max(first, node.end - node.size)
                result[g][start:node.end] = node.pages[g][start - node.end:]
        return result


def _common_tokens(key: bytes, data: bytes, at: int, size: int) -> int:
    """Returns how many tokens `key` and data[at:size] have in common from their starts."""
    count = min(len(key), size - at) // 4
    differ = np.frombuffer(key, "<i4", count) != np.frombuffer(data, "<i4", count, at)
    first = int(differ.argmax())
    return first if differ[first] else count


# --- images and videos: pages are shared where both tokens and images are the same ----------------

TOKEN = 4
"""Bytes of an id."""
DIGEST = 32
"""Bytes of a SHA-256."""
HASHED = 0x80
"""In the last byte of a page's first id: no id has it, so that no text's page equals an image's."""
ALL = 2**31 - 1


def prompt_key(tokens: bytes, submit: Submit, page_size: int) -> bytes:
    """Returns the bytes of a `PrefixKey`. tokens: i4[n], of a sequence of this request."""
    if submit.embeds is not None:
        return embeds_key(tokens, submit.embeds.digests, page_size)
    return media_key(tokens, submit.media, page_size) if submit.media else tokens


def embeds_key(tokens: bytes, digests: bytes, page_size: int) -> bytes:
    """Returns the same where the prompt is rows with these digests: the ids of a page that holds
    any give way to a hash of them and of its rows' digests."""
    data, size, own = bytearray(tokens), page_size * TOKEN, page_size * DIGEST
    for page in range(min(-(-len(digests) // own), len(data) // size)):
        at = page * size
        _hide_page(data, at, size, sha256(
            data[at:at + size] + digests[page * own:(page + 1) * own]).digest())
    return bytes(data)


def media_key(tokens: bytes, media: Sequence[MediaItem], page_size: int) -> bytes:
    """Returns the bytes of a `PrefixKey`. tokens: i4[n], of a sequence whose prompt has these
    items.

    A placeholder's id says nothing about its image. So the ids of a page that holds placeholders
    give way to a hash of them and of the items they stand for. All that a page holds follows from
    it and from the pages before: which rows of an item are in it depends on the tokens between the
    item's beginning and its own. Of a page of p tokens 32 p - 1 bits are hashed, 255 at most.
    """
    size, data = page_size * TOKEN, bytearray(tokens)
    for page in sorted({page for item in media
                        for page in range(item.start // page_size, -(-item.end // page_size))}):
        first, at = page * page_size, page * size
        if at + size > len(data):
            break  # no whole page: it is never shared
        digest = sha256(data[at:at + size])
        for item in media:
            if item.start < first + page_size and item.end > first:
                about = f"{item.start - first} {item.video} {item.seconds}"
                digest.update(item.key + about.encode())
        _hide_page(data, at, size, digest.digest())
    return bytes(data)


def _hide_page(data: bytearray, at: int, size: int, digest: bytes) -> None:
    """Puts a hash in the place of a page's ids, `size` bytes from `at` on."""
    own = bytearray((digest * -(-size // DIGEST))[:size])
    own[TOKEN - 1] |= HASHED
    data[at:at + size] = own


def shareable(media: Sequence[MediaItem], computed: int) -> int:
    """Returns how many tokens have pages that may be shared when so many are known to be computed
    of their own images: those, and text up to the next item."""
    return next((max(item.start, computed) for item in media if item.end > computed), ALL)
