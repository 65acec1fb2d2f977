"""How long threads wait for each other awake."""

from __future__ import annotations

from actorium.actors.config.tree import Config, ModelConfig
from actorium.gpu.worker.preload import LEAST, MOST, rounds_of, spin_rounds


def test_threads_of_tiny_models_hardly_spin() -> None:
    assert spin_rounds(Config()) == LEAST


def test_a_larger_model_has_its_threads_wait_longer_within_bounds() -> None:
    assert LEAST < rounds_of(100_000_000) < rounds_of(200_000_000) < MOST
    assert rounds_of(10**12) == MOST


def test_a_model_that_is_not_there_is_for_others_to_report() -> None:
    assert spin_rounds(Config(model=ModelConfig(model="/no/such/model"))) == LEAST
