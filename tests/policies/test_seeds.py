"""Streams of a seed: distinct, repeatable, and the same tomorrow."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from policies.seeds import derive_seed, seeded_generator, seeded_weights


def test_streams_repeat_and_differ() -> None:
    def draw(*arguments: int | str) -> torch.Tensor:
        return torch.rand(4, generator=seeded_generator(*arguments))  # type: ignore[arg-type]

    assert torch.equal(draw(0, "a", 1), draw(0, "a", 1))
    places = [
        (seed, name, *key) for seed in (0, 1) for name in "ab" for key in ((), (0,), (1,), (0, 0), (0, 1))
    ]
    assert len({tuple(draw(*place).tolist()) for place in places}) == len(places)


def test_many_seeds_rarely_meet() -> None:
    seeds = [derive_seed(*place) for place in product(range(10), ("a", "b"), range(10), range(10))]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)


def test_a_seed_means_the_same_in_every_version() -> None:
    assert derive_seed(0, "episode", 3, 7) == 882650996
    assert derive_seed(12, "critic") == 1081799111


def test_drawing_weights_leaves_every_global_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError(f"the generators of accelerators were seeded with {seed}")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    monkeypatch.setattr(torch.cuda, "manual_seed", refuse)
    before = torch.get_rng_state()
    with seeded_weights(3):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
