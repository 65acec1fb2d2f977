"""How pytest-xdist, where it is installed, shares tests out among its workers."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/house/", *(f"tests/actors/gateway/test_{page}" for page in (
    "page", "playground", "status")))
"""Beginnings of files that share what takes long to make: the parsed source, or a browser with the
engine's pages."""


class FilesOrRooms(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests go to one worker, and so do those of files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        shared = next((start for start in TOGETHER if nodeid.startswith(start)), None)
        return str(super()._split_scope(nodeid)) if shared is None else shared.split("test_")[0]
