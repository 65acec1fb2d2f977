"""Hypothesis profiles: state machines take their number of examples from them.

The quick one walks the same ways each time; the battery looks for new ones.

Without a CUDA device Triton's kernels run in its interpreter, which is chosen before its import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("quick", max_examples=120, derandomize=True, database=None)
settings.register_profile("battery", max_examples=5000)
settings.load_profile("quick")


# Operations of tiny models gain nothing from threads, and wait for one another at each: all the
# longer where other files are tested at the same time.
THREADS = torch.get_num_threads()
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, since pytest reads options of a folder below too late."""
    parser.addoption("--adversary", metavar="FILE", default="",
                     help="tests/adversary in full size; counts go to FILE")


@pytest.fixture
def all_threads() -> Iterator[None]:
    """For kernels that share out their work themselves."""
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not look at how many drafts were accepted."""
    monkeypatch.setattr("actorium.kernels.reference.window.most_accepted",
                        lambda accepted, most: most)
