"""Server-sent events, read as the WHATWG standard says. Pure: bytes in, events' data out.

Any cutting of the stream; lines end in CR, LF or both; comments, `id:`, `event:` and `retry:` are
passed over; several `data:` lines make one text; the space after the colon may be missing. One
thing is added: what an ended stream leaves without its blank line counts as well, since some
servers close so early.
"""

from __future__ import annotations

from collections.abc import Iterator

BOM = b"\xef\xbb\xbf"


class EventReader:
    """Reads one stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = self._after_cr = False

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of each event that `part` ends."""
        if not part:
            return
        if self._after_cr and part.startswith(b"\n"):
            part = part[1:]  # the second half of a CRLF that was cut in two
        self._after_cr = part.endswith(b"\r")
        text = self._rest + part
        if not self._begun:
            if BOM.startswith(text) and len(text) < len(BOM):
                self._rest = text
                return
            text = text.removeprefix(BOM)
            self._begun = True
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[bytes]:
        """The data of an event that the stream's end has left open."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from self._line(rest)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
