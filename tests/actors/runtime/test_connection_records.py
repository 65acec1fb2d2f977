"""What a gateway leaves of its connections, at whichever moment it dies."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from actorium.actors.runtime.http import connection_records
from actorium.actors.runtime.http.connection_records import (
    COMPLETE,
    INTERIM,
    MAX_TRIES,
    PAGE,
    ConnectionRecord,
    ConnectionRecords,
    bytes_taken,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: the process's and the caller's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, \
            socket.create_connection(listener.getsockname()) as caller:
        process, _ = listener.accept()
        with process:
            yield process, caller


def next_process(records: ConnectionRecords, number: int = 0) -> ConnectionRecord:
    """The record as the process after this one has it."""
    return ConnectionRecords(os.dup(records.fd), 4).reopen(number)


def receive(record: ConnectionRecord, pair: tuple[socket.socket, socket.socket],
            data: bytes) -> None:
    process, caller = pair
    caller.sendall(data)
    left = len(data)
    while left:
        part = process.recv(left)
        record.received(part)
        left -= len(part)


def opened() -> tuple[ConnectionRecords, ConnectionRecord]:
    records = ConnectionRecords.create(4)
    record = records.open()
    assert record is not None
    return records, record


def test_the_kernel_counts_what_it_has_taken(pair: tuple[socket.socket, socket.socket]) -> None:
    process, caller = pair
    process.setblocking(False)
    sent = 0
    for size in (1, 1000, 70_000, 3_000_000, 3_000_000):
        try:
            sent += process.send(b"x" * size)
        except BlockingIOError:
            break
        assert bytes_taken(process) == (sent, 0)
    caller.recv(50_000)
    caller.sendall(b"y" * 5000)
    while bytes_taken(process)[1] or len(process.recv(100_000, socket.MSG_PEEK)) < 5000:
        pass
    process.recv(3000)
    assert bytes_taken(process) == (sent, 3000)
    caller.shutdown(socket.SHUT_WR)
    assert bytes_taken(process) == (sent, 3000)
    while process.recv(1000):
        pass
    assert bytes_taken(process) == (sent, 5000)


@pytest.mark.parametrize("size", [1, 300, PAGE, PAGE + 1, 200_000])
def test_the_rest_of_a_write_is_left(pair: tuple[socket.socket, socket.socket],
                                     size: int) -> None:
    data, process = os.urandom(size), pair[0]
    for taken in sorted({0, 1, size // 2, size}):
        records, record = opened()
        record.written = bytes_taken(process)[0]
        record.position = b"somewhere"
        record.writing(data, unsent=False)
        process.sendall(data[:taken])
        left = next_process(records).restore(process)
        assert left is not None
        assert (left[0].data, left[0].position, left[0].flags) == (data[taken:], b"somewhere", 0)


def test_writes_that_wait_in_the_process_are_recorded_together(
        pair: tuple[socket.socket, socket.socket]) -> None:
    records, record = opened()
    record.writing(b"one", unsent=False)
    pair[0].sendall(b"o")
    record.position = b"behind two"
    record.writing(b"two", unsent=True)
    left = next_process(records).restore(pair[0])
    assert left is not None and (left[0].data, left[0].position) == (b"netwo", b"behind two")


def test_a_request_keeps_its_name_until_it_is_answered(
        pair: tuple[socket.socket, socket.socket]) -> None:
    records, record = opened()
    receive(record, pair, b"a" * 10_000)
    first = record.identity()
    assert not first.again and record.identity() == first._replace(again=True)
    other = next_process(records)
    left = other.restore(pair[0])
    assert left is not None and left[0].flags == COMPLETE and left[1] == b"a" * 10_000
    other.response = left[0].number + 1
    assert other.identity() == first._replace(again=True)
    other.next_response()
    other.answered()
    assert other.identity().token != first.token
    left = next_process(records).restore(pair[0])
    assert left is not None and left[1:] == (b"", 1)


def test_a_record_in_doubt_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    process, caller = pair
    records, record = opened()
    caller.sendall(b"lost")
    process.recv(10)
    after = next_process(records)
    assert after.restore(process) is None and "4 bytes were received" in after.doubt
    record.received(b"lost")
    assert next_process(records).restore(process) is not None
    process.sendall(b"unknown")
    after = next_process(records)
    assert after.restore(process) is None and "7 bytes were written" in after.doubt


def test_input_that_processes_die_of_is_given_up(pair: tuple[socket.socket, socket.socket]
                                                 ) -> None:
    records, record = opened()
    receive(record, pair, b"deadly")
    for _ in range(MAX_TRIES):
        assert next_process(records).restore(pair[0]) is not None
    after = next_process(records)
    assert after.restore(pair[0]) is None and "died" in after.doubt
    after.identity()  # one has lived to name its request
    assert next_process(records).restore(pair[0]) is not None


def test_input_beyond_the_bound_is_not_recorded(pair: tuple[socket.socket, socket.socket],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_records, "INPUT_BYTES", 100)
    records, record = opened()
    receive(record, pair, b"a" * 90)
    other = records.open()
    assert other is not None
    other.received(b"b" * 20)
    assert next_process(records).restore(pair[0]) is not None
    receive(record, pair, b"a" * 20)
    assert next_process(records).restore(pair[0]) is None
    record.next_response()
    record.answered()
    assert next_process(records).restore(pair[0]) is not None


def test_where_a_connection_comes_from_is_known_to_the_next_process() -> None:
    records = ConnectionRecords.create(4)
    record = records.open(b"from afar")
    assert record is not None and next_process(records).origin() == b"from afar"
    record.release()
    assert records.open() is not None and next_process(records).origin() == b""


class Torn:
    """Memory that remembers its states after each store."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.states = memory, list[bytes]()

    def __getitem__(self, at: Any) -> Any:
        return self.memory[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, slice) and len(value) > 8:  # a longer store may be cut anywhere
            half = len(value) // 2
            self.memory[at.start:at.start + half] = value[:half]
            self.states.append(bytes(self.memory))
        self.memory[at] = value
        self.states.append(bytes(self.memory))


def test_a_death_within_a_record_leaves_the_one_before(
        pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    records, record = opened()
    record.position = b"first"
    record.writing(b"one", unsent=False)
    pair[0].sendall(b"one")
    torn = Torn(records.memory)
    monkeypatch.setattr(record, "_memory", torn)
    record.position, record.ends = b"second", True
    record.writing(b"two", unsent=False)
    seen = set()
    for state in torn.states:
        records.memory[:] = state
        left = next_process(records).restore(pair[0])
        assert left is not None
        seen.add((left[0].data, left[0].position, left[0].flags))
    assert seen == {(b"", b"first", 0), (b"two", b"second", COMPLETE)}


def test_an_interim_answer_is_told_from_an_answer(pair: tuple[socket.socket, socket.socket]
                                                  ) -> None:
    records, record = opened()
    record.writing(b"HTTP/1.1 100 Continue\r\n\r\n", unsent=False)
    left = next_process(records).restore(pair[0])
    assert left is not None and left[0].flags == INTERIM


def test_records_are_used_again_and_are_bounded() -> None:
    records = ConnectionRecords.create(2)
    one, two = records.open(), records.open()
    assert one is not None and two is not None and records.open() is None
    one.received(b"x" * 100_000)
    one.writing(b"y" * 100_000, unsent=False)
    before = os.fstat(records.fd).st_blocks
    one.release()
    assert os.fstat(records.fd).st_blocks < before - 300 and records.input_bytes == 0
    again = records.open()
    assert again is not None and again.number == one.number and not again.identity().again
