"""What steps bring to the device, gathered and written at once, whatever arrays are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers_worker import CPU
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.gpu.step.staging import DeviceArrays, HostArrays, Upload

SHAPES = ((6, 4), (6, 1), (6,), (6, 7))
OTHER = (5, 3)
Write = tuple[int, list[int], bool]
"""(table, rows, cell by cell)"""

writes = st.lists(st.tuples(st.integers(0, len(SHAPES)), st.lists(
    st.integers(1, 4), min_size=1, max_size=4, unique=True), st.booleans()), max_size=6,
    unique_by=lambda write: write[0])


def _play(arrays: HostArrays | DeviceArrays, script: list[Write],
          sizes: list[int]) -> tuple[Any, ...]:
    """The tables after these writes, and the arrays as the device has them."""
    tables = [*arrays.resident(*SHAPES), arrays.full(OTHER, 9, "int64")]
    up, number = arrays.upload(), 0
    wanted = [up.add(np.arange(size, dtype=np.int32).reshape(2, -1)) for size in sizes]
    for table, rows, single in script:
        width = int(np.prod(tables[table].shape[1:]))
        size = len(rows) * width
        values = np.arange(number, number + size, dtype=np.int32)
        number += size
        at = np.array(rows, np.int32)
        if single:
            places = at[:, None] * width + np.arange(width, dtype=np.int32)
            up.cells(tables[table], places.reshape(-1), values)
        else:
            up.rows(tables[table], at, values.reshape(len(rows), *tables[table].shape[1:]))
    up.send()
    found = [np.asarray(up[n]) for n in wanted]
    assert all(array.dtype == np.int32 for array in found)
    return [np.asarray(t).tolist() for t in tables], [array.tolist() for array in found]


@settings(max_examples=60, deadline=None)
@given(writes, st.lists(st.sampled_from([0, 2, 6]), max_size=3))
def test_both_kinds_of_arrays_end_alike(script: list[Write], sizes: list[int]) -> None:
    device = DeviceArrays(CPU)
    assert _play(HostArrays(CPU), script, sizes) == _play(device, script, sizes)
    assert device.uploads == (1 if script or sizes else 0)


def test_on_a_cpu_nothing_is_copied() -> None:
    up: Upload = HostArrays(CPU).upload()
    array = np.arange(3, dtype=np.int32)
    number = up.add(array)
    up.send()
    assert up[number] is array


def test_tables_are_distinguished_from_views_and_others() -> None:
    device = DeviceArrays(CPU)
    first, second = device.resident((2, 3), (4,)), device.resident((5,))
    assert [device.table_of(t) for t in (*first, first[0][1], *second)] == [0, 0, 0, 1]
    assert device.table_of(torch.zeros(2, dtype=torch.int32)) is None
    up = device.upload()
    up.rows(second[0], np.array([4], np.int32), np.array([7], np.int32))
    up.cells(first[1], np.array([1, 3], np.int32), np.array([8, 9], np.int32))
    up.send()
    assert second[0].tolist() == [0, 0, 0, 0, 7] and first[1].tolist() == [0, 8, 0, 9]
    assert first[0].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_rare_arrays_go_apart() -> None:
    for arrays in (HostArrays(CPU), DeviceArrays(CPU)):
        a, b = arrays.stage(np.array([[1, 2]], np.int32), np.array([], np.int32))
        assert np.asarray(a).tolist() == [[1, 2]] and len(b) == 0


@pytest.mark.parametrize("kind", [HostArrays, DeviceArrays])
def test_fetched_values_equal_the_source(kind: type[HostArrays] | type[DeviceArrays]) -> None:
    """Also when the device goes on with the same memory, and cut to the rows that are real."""
    arrays = kind(CPU)
    rows = arrays.full((3, 4), 2, "int64")
    fetched = [arrays.fetch(rows).unstack(3), arrays.fetch_rows(rows[0], rows[1])]
    arrays.wait_for_fetches()
    if kind is DeviceArrays:
        rows[:] = 5
    assert [[row.tolist() for row in each.wait()] for each in fetched] == [
        [[2, 2, 2]] * 3, [[2] * 4] * 2]


# --- on a CUDA device ----------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_uploads_and_landings_under_load() -> None:
    """Buffers are used again only when what they held has gone: the device is far behind."""
    device = DeviceArrays(torch.device("cuda", 0))
    (table,) = device.resident((64, 512))
    busy = torch.randn(4096, 4096, device="cuda")
    waiting: list[tuple[int, Any]] = []
    for step in range(1, 200):
        busy = (busy @ busy).clamp_(-1, 1)
        up = device.upload()
        number = up.add(np.full(1000 + step, step, np.int32))
        up.rows(table, np.array([1 + step % 63], np.int32), np.full((1, 512), step, np.int32))
        up.send()
        waiting.append((step, device.fetch(up[number].long().sum(), table[1 + step % 63])))
        if len(waiting) > 2:
            then, fetched = waiting.pop(0)
            total, row = fetched.wait()
            assert int(total) == then * (1000 + then) and set(row.tolist()) == {then}
