"""The thread that reads adapters: numbers, digests, schedulers that follow each other, and files
that it cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_adapters import open_with_adapters, toy_adapter
from helpers_models import write_checkpoint

from actorium.actors.messages import AdapterAnswer, AdapterRef, DropAdapter, LoadAdapter
from actorium.actors.models.adapter_files import read_adapter
from actorium.gpu.worker.adapter_thread import AdapterThread


class Ended(Exception):
    """There is no more to read."""


class Asked:
    """A thread's body, run by the test until all is answered."""

    def __init__(self, reader: Any) -> None:
        self.answers: list[AdapterAnswer] = []
        self.thread = AdapterThread(1, 16, self.answer)
        self.thread.reader, self.wanted = reader, 0

    def answer(self, answer: AdapterAnswer) -> None:
        self.answers.append(answer)
        if len(self.answers) == self.wanted:
            raise Ended

    def load(self, epoch: int, number: int, path: Path, digest: bytes) -> str:
        self.wanted = len(self.answers) + 1
        self.thread.submit(LoadAdapter(epoch, AdapterRef(number, str(path), digest)))
        with pytest.raises(Ended):
            self.thread.run()
        found = self.answers[-1]
        assert (found.epoch, found.rank, found.number) == (epoch, 1, number)
        return found.error


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    for name, rank in (("one", 4), ("other", 2), ("large", 32)):
        toy_adapter(oracle, tmp_path / name, rank=rank)
    return Asked(open_with_adapters(tmp_path / "model").reader)


def digest(path: Path) -> bytes:
    return read_adapter(path, 64).digest


def test_what_is_read_once_serves_all_numbers_and_schedulers(asked: Asked, tmp_path: Path) -> None:
    thread, one, other = asked.thread, tmp_path / "one", tmp_path / "other"
    named = digest(one)
    assert asked.load(3, 1, one, named) == asked.load(3, 2, other, digest(other)) == ""
    (one / "adapter_config.json").unlink()  # what was read is not read again
    assert asked.load(3, 5, one, named) == ""
    assert thread.known[3, 1] is thread.known[3, 5] is not thread.known[3, 2]
    thread.reset(4)
    assert not thread.known and asked.load(4, 1, one, named) == ""
    thread.drop(DropAdapter(4, 1))
    thread.drop(DropAdapter(4, 77))
    assert not thread.known and "adapter_config.json is missing" in asked.load(4, 2, one, named)


def test_what_it_cannot_read(asked: Asked, tmp_path: Path) -> None:
    assert "its files have changed" in asked.load(3, 1, tmp_path / "one", bytes(32))
    assert "--max-lora-rank, which is 16" in asked.load(3, 2, tmp_path / "large", bytes(32))
    assert "no such folder" in asked.load(3, 3, tmp_path / "none", bytes(32))
    asked.thread.reader = None
    assert "--enable-lora" in asked.load(3, 4, tmp_path / "one", bytes(32))
    assert not asked.thread.known
