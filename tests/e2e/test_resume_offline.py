"""Learning from a fixed dataset, stopped without warning and continued: the same to the last bit."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import of_each
from test_resume import assert_resumes_bit_exactly

from algos.a2pr import A2prConfig
from algos.base import Setup
from algos.cdsa import CdsaConfig
from algos.iql import IqlConfig
from algos.offline import neighbor_autotune
from algos.prdc import PrdcConfig
from algos.rebrac import RebracConfig
from algos.td3_bc import Td3BcConfig
from algos.training.trainer import TrainerSettings
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CheckpointError
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.deterministic import DeterministicProcess
from policies.wrappers.score_correction import Correction

SMALL: dict[str, Any] = {
    "steps": 12, "log_every": 3, "batch_size": 16, "hidden_dims": (8,), "critic_dims": (8,),
    "value_dims": (8,), "vae_width": 8, "correction": Correction(hidden_dims=(8,), dynamics_dims=(8,)),
}  # fmt: skip
NEW = [Td3BcConfig, RebracConfig, PrdcConfig, A2prConfig, IqlConfig]
STOPS = [3, 9]  # after an odd number of steps, so that the turn of the delayed actor has to come back


def small(config: Any, **options: Any) -> Any:
    known = {f.name for f in fields(config)}
    return config(**{name: value for name, value in SMALL.items() if name in known} | options)


def kind_of(config: Any) -> list[str]:
    return [config.__mro__[1].__name__]


def dataset(frames: int = 120, length: int = 6) -> EpisodeDataset:
    generator = torch.Generator().manual_seed(0)
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    return EpisodeDataset(
        observations=torch.randn(frames, 3, generator=generator),
        actions=torch.rand(frames, 2, generator=generator) * 2 - 1,
        rewards=torch.randn(frames, generator=generator), terminated=ends, truncated=torch.zeros_like(ends),
        episode_start=torch.arange(0, frames + 1, length), meta={"source": "noise"},
    )  # fmt: skip


def cloned(process: Any) -> Policy:
    one = torch.ones(3)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    statistics = {"state": limits, "action": {name: value[:2] for name, value in limits.items()}}
    config = PolicyConfig(process=process, backbone=MlpConfig(width=8, time_dim=4), horizon=2, act_steps=2)
    return build_policy(config, obs_dim=3, action_dim=2, statistics=statistics, seed=1)


def assert_resumes(config: Any, tmp_path: Path, **parts: Any) -> None:
    setup = Setup(dataset=dataset(), seed=3, num_threads=1, **parts)
    settings = TrainerSettings(checkpoint_every=3, log_every=1)
    assert_resumes_bit_exactly(lambda: config.build(setup), tmp_path, settings, stops=STOPS)


@pytest.mark.parametrize("config", of_each(NEW, kind_of), ids=lambda c: c.__name__)
def test_an_actor_from_scratch_resumes_bit_exactly(config: Any, tmp_path: Path) -> None:
    assert_resumes(small(config), tmp_path)


@pytest.mark.parametrize(
    ("config", "process"),
    of_each(
        [
            (A2prConfig, RectifiedFlow()),
            (PrdcConfig, VPDiffusion(num_levels=4)),
            (IqlConfig, RectifiedFlow()),
            (CdsaConfig, VPDiffusion(num_levels=4)),
        ],
        lambda case: kind_of(case[0]),
    ),
)
def test_a_cloned_policy_resumes_bit_exactly(config: Any, process: Any, tmp_path: Path) -> None:
    """Each kind of state on some policy; the contracts go through all policies."""
    assert_resumes(small(config), tmp_path, init=cloned(process))


def test_a_correction_of_a_policy_without_noise_resumes_bit_exactly(tmp_path: Path) -> None:
    assert_resumes(small(CdsaConfig), tmp_path, init=cloned(DeterministicProcess()))


def test_an_average_of_the_weights_resumes_bit_exactly(tmp_path: Path) -> None:
    assert_resumes(small(Td3BcConfig, ema_decay=0.9), tmp_path)


def test_half_precision_resumes_bit_exactly(tmp_path: Path) -> None:
    assert_resumes(small(PrdcConfig, autocast="bfloat16"), tmp_path)


def test_a_run_is_continued_with_more_steps_as_if_it_had_had_them(tmp_path: Path) -> None:
    setup = Setup(dataset=dataset(), seed=3, num_threads=1)
    short, whole = small(PrdcConfig).build(setup), small(PrdcConfig, steps=18).build(setup)
    for run in (short, whole):
        while run.progress < 12:
            run.advance()
    longer = small(PrdcConfig, steps=18).build(setup)
    longer.load_state_dict(copy.deepcopy(short.state_dict()))
    assert timeless(longer.advance()) == timeless(whole.advance())
    assert longer.progress == whole.progress == 15


@pytest.mark.parametrize("config", [IqlConfig, CdsaConfig], ids=lambda c: c.__name__)
def test_a_run_whose_rates_follow_its_length_keeps_it(config: Any) -> None:
    setup = Setup(dataset=dataset(), seed=3, num_threads=1, init=cloned(DeterministicProcess()))
    if config is IqlConfig:
        setup = replace(setup, init=None)
    begun = small(config).build(setup)
    begun.advance()
    with pytest.raises(CheckpointError, match=mentions("algo.steps")):
        small(config, steps=18).build(setup).load_state_dict(begun.state_dict())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 0.9), ("reward_scale", 2.0), ("reward_shift", -1.0), ("normalize_returns", 10.0),
        ("beta", 4.0),
        ("neighbor_rank", 2),
    ],
)  # fmt: skip
def test_what_values_and_neighbours_mean_is_kept(name: str, value: float) -> None:
    setup = Setup(dataset=dataset(), seed=3, num_threads=1)
    begun = small(PrdcConfig).build(setup)
    begun.advance()
    other = small(PrdcConfig, **{name: value}).build(setup)
    with pytest.raises(CheckpointError, match=mentions(f"algo.{name} {value}")):
        other.load_state_dict(begun.state_dict())
    small(PrdcConfig, alpha=1.0, actor_lr=1e-4).build(setup).load_state_dict(begun.state_dict())


def test_a_search_that_was_chosen_by_trying_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is on which the run is continued."""
    monkeypatch.setattr(neighbor_autotune, "TIMED_FROM", 10)
    chosen = iter(["tree", "lists"])

    monkeypatch.setattr(neighbor_autotune, "_fastest", lambda names, rows, *_: rows.search(next(chosen)))
    setup, config = Setup(dataset=dataset(), seed=3, num_threads=1), small(PrdcConfig)
    begun, continued = config.build(setup), config.build(setup)
    assert [way_of(run) for run in (begun, continued)] == ["tree", "lists"]
    begun.advance()
    continued.load_state_dict(copy.deepcopy(begun.state_dict()))
    assert way_of(continued) == "tree"
    assert timeless(begun.advance()) == timeless(continued.advance())


def way_of(run: Any) -> str:
    name: str = run.learner.regulariser.search.name
    return name


def timeless(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if not name.startswith("time/")}
