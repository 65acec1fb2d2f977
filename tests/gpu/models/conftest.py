"""Models of transformers in ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

TIES = PreTrainedModel.tie_weights


@pytest.fixture(autouse=True, scope="session")
def _one_maker_at_a_time() -> Iterator[None]:
    """While transformers makes a model it has replaced methods of its classes and torch's default
    dtype: of two threads that do so at once the later one puts back what the other had replaced,
    for all tests that follow."""
    lock = threading.RLock()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("from_pretrained", "_from_config"):
            make = getattr(PreTrainedModel, name).__func__

            def alone(kind: Any, *args: Any, make: Any = make, **options: Any) -> Any:
                with lock:
                    return make(kind, *args, **options)

            patch.setattr(PreTrainedModel, name, classmethod(alone))
        yield


@pytest.fixture(autouse=True)
def _classes_stay() -> Iterator[None]:
    yield
    assert PreTrainedModel.tie_weights is TIES
