"""Rows with parameters in tables, as the sampling kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorium.kernels import sampling_tables as columns
from actorium.kernels.reference import sampling
from actorium.kernels.reference.philox import uniform
from actorium.kernels.sampling_tables import SamplingTables

MIXTURES: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 7}, {"top_k": 300},
    {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.97}, {"min_p": 0.02}, {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.6, "top_p": 0.95, "min_p": 0.01}, {"top_k": 3, "top_p": 0.3},
    {"temperature": 2.5, "top_k": 200, "top_p": 0.9}, {"top_p": 0.0},
]


def resident(rows: list[dict[str, Any]], vocab: int, device: str = "cpu", most: int = 0,
             **tables: Tensor) -> SamplingTables:
    """Slot i + 1 has the parameters rows[i]; slot 0 is that of padding."""
    record = torch.zeros(len(rows) + 1, columns.WIDTH, dtype=torch.int32)
    real = record.view(torch.float32)
    for slot, row in enumerate(rows, 1):
        top_k = row.get("top_k", 0)
        for column, value in (("SEED_LOW", slot * -1234567), ("SEED_HIGH", slot + 5),
                              ("TOP_K", 0 if top_k >= vocab else top_k),
                              ("COUNT_ROW", row.get("count_row", 0)),
                              ("MIN_LEN", row.get("min_len", 0))):
            record[slot, getattr(columns, column)] = value
        for column, value in (("TEMPERATURE", row.get("temperature", 1.0)),
                              ("TOP_P", row.get("top_p", 1.0)), ("MIN_P", row.get("min_p", 0.0)),
                              ("REPETITION", row.get("repetition", 1.0)),
                              ("PRESENCE", row.get("presence", 0.0)),
                              ("FREQUENCY", row.get("frequency", 0.0))):
            real[slot, getattr(columns, column)] = value
    slots = len(rows) + 1
    given = {"eos": torch.full((slots, 1), -1, dtype=torch.int32),
             "drafts": torch.zeros(slots, most, dtype=torch.int64)} | tables
    return SamplingTables(record.to(device), **{k: v.to(device) for k, v in given.items()})


def slots_of(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """i32[R] slots 1, 2, ...; i32[R] positions."""
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    return slots, slots * 3 + 2


def possible(logits: Tensor, slot: int, position: int, tables: SamplingTables,
             error: float = 1e-6) -> set[int]:
    """What the reference draws from the row f32[V], were its uniform number, top_p and min_p off
    by a relative error. Of a greedy row: its likeliest token."""
    row, real = tables.record[slot], tables.record[slot].view(torch.float32)
    if real[columns.TEMPERATURE] == 0:
        return {int(logits.argmax())}
    u = float(uniform(row[columns.SEED_LOW].long(), row[columns.SEED_HIGH].long(),
                      torch.tensor(position)))
    out = set()
    for off in (0, -error, error):
        top_p = real[columns.TOP_P] * (1 + off if real[columns.TOP_P] < 1 else 1)
        for other in (0, -error, error):
            shaped = sampling.truncate(
                logits[None].clone(), real[columns.TEMPERATURE][None],
                row[columns.TOP_K].long()[None], top_p[None], real[columns.MIN_P][None])
            at = torch.tensor([min(max(u * (1 + other), 0.0), 1 - 2.0**-53)], dtype=torch.float64)
            out.add(int(sampling.draw(shaped, at)))
    return out


def drawn_as_reference(got: Tensor, logits: Tensor, tables: SamplingTables) -> None:
    """Assert what was chosen for rows in slots 1, 2, ... at the positions of `slots_of`."""
    slots, positions = slots_of(len(logits))
    want = sampling.choose(logits.clone(), slots, positions, tables, True, True)
    for i in np.flatnonzero((got != want).numpy()).tolist():
        assert int(got[i]) in possible(logits[i], int(slots[i]), int(positions[i]), tables), (
            i, int(got[i]), int(want[i]))
