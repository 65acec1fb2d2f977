"""How pytest-xdist, where it is installed, shares tests out among its workers."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling


class FilesOrRooms(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests go to one worker, and all that ask about the source: it is parsed once."""

    def _split_scope(self, nodeid: str) -> str:
        return "house" if nodeid.startswith("tests/house/") else str(super()._split_scope(nodeid))
