"""Every registered algorithm at its smallest, on a task of points and random episodes of it."""

from __future__ import annotations

import copy
import dataclasses
import io
from functools import cache
from typing import Any

import pytest
import torch
from point_env import PointEnv
from torch import Tensor

from algos.base import Setup
from algos.dsrl import DsrlConfig
from algos.offline.config import TransitionsConfig
from algos.offline.loop import OfflineRun
from algos.training.serialization import from_plain, to_plain
from envs.datasets.episodes import EpisodeDataset
from policies import registry
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, MissingExtraError
from policies.networks.heads import CriticConfig
from policies.policy import Policy, PolicyConfig
from policies.wrappers.noise_policy import Steering

ALGOS = [name for name, part in registry.parts("algo").items() if not hasattr(part, "makes_model")]
"""Algorithms whose result acts in their task; `tests/envs/test_world.py` has the other."""
PROCESSES = list(registry.parts("process"))

SMALL: dict[str, Any] = {
    # on-policy
    "num_envs": 2,
    "steps_per_iteration": 4,
    "iterations": 3,
    "update_epochs": 2,
    "tuned_steps": 2,
    "microbatch_size": 8,
    "stage_steps": 20,
    "refit_rollouts": 1,
    "refit_steps": 2,
    "critic": CriticConfig(width=8),
    # from data
    "steps": 6,
    "log_every": 2,
    "value_steps": 2,
    "ema_every": 1,
    "validation_windows": 4,
    "validation_samples": 2,
    # from a replay
    "total_steps": 36,
    "warmup_steps": 2,
    "updates_per_step": 0.5,
    "actor_every": 1,
    "steering": Steering(hidden_dims=(8,)),
    # anywhere
    "batch_size": 8,
    "buffer_size": 64,
    "width": 8,
    "hidden_dims": (8,),
    "critic_dims": (8,),
    "value_dims": (8,),
    "balance_dims": (8,),
    "vae_width": 8,
    "value_widths": (32,),
    "inverse_dims": (8,),
    "plans": 2,
    "guide_repeats": 1,
    "critic_horizon": 4,
    "num_ascended": 2,
    "ascent_steps": 2,
}
"""Sizes given to every configuration that has a field of this name."""

ONE_STEP: dict[str, dict[str, Any]] = {name: {"tuned_steps": 1} for name in ("consistency", "regression")}
"""Processes that may have one step only, and what fits it."""

NOISY = {"consistency": 1, "diffusion": 2, "energy": 2}
"""Processes whose default sampler draws noise after the start, and steps that do without."""

FROM_SCRATCH = ("diffuser", "decision_diffuser")
"""Algorithms that continue their own policies alone."""

QAMS = ("qam", "qam_edit", "qam_fql", "trqam")
"""Algorithms of adjoint matching."""

LIMIT = 3
"""Steps of an episode, so few that every iteration finishes some."""


def small(part: type, process: str = "") -> Any:
    """Return the smallest configuration of an algorithm, for a policy of a process."""
    known = {field.name for field in dataclasses.fields(part)}
    values = SMALL | ONE_STEP.get(process, {})
    if issubclass(part, DsrlConfig) and process in NOISY:
        values = values | {"denoising_steps": NOISY[process]}
    return part(**{name: copy.deepcopy(value) for name, value in values.items() if name in known})


def dataset(episodes: int = 40, length: int = 5) -> EpisodeDataset:
    """Random episodes of the point task."""
    generator, frames = torch.Generator().manual_seed(0), episodes * length
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    return EpisodeDataset(
        observations=torch.rand(frames, 2, generator=generator) * 2 - 1,
        actions=torch.rand(frames, 2, generator=generator) * 2 - 1,
        rewards=torch.rand(frames, generator=generator),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        episode_start=torch.arange(0, frames + 1, length),
        meta={"source": "random-points"},
    )


def mixed(frames: int = 800) -> EpisodeDataset:
    """Episodes of two steps whose actions are +-0.6 alike; the reward is the first action."""
    sign = torch.randint(0, 2, (frames // 2,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    actions = torch.stack([0.6 * sign.repeat_interleave(2), torch.zeros(frames)], 1)
    return dataclasses.replace(dataset(frames // 2, 2), actions=actions, rewards=actions[:, 0].clone())


def policy_config(process: str) -> PolicyConfig:
    levels = {"num_levels": 4}
    part = registry.lookup("process", process)
    known = {field.name for field in dataclasses.fields(part)}
    return PolicyConfig(
        process=part(**{name: value for name, value in levels.items() if name in known}),
        backbone=MlpConfig(width=8, time_dim=4),
        horizon=3,
        act_steps=2,
    )


def init(process: str) -> Policy:
    return _built(process).clone()


@cache
def _built(process: str) -> Policy:
    one = torch.ones(2)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    statistics = {"state": limits, "action": limits}
    return build_policy(policy_config(process), obs_dim=2, action_dim=2, statistics=statistics, seed=3)


def setup(process: str, **changes: Any) -> Setup:
    """Everything that an algorithm may ask for."""
    values = {
        "policy": policy_config(process),
        "env": PointEnv(limit=LIMIT),
        "seed": 5,
        "num_workers": 0,
        "num_threads": 1,
    }
    values |= {} if "dataset" in changes else {"dataset": dataset()}
    values |= {} if "init" in changes else {"init": init(process)}
    return Setup(**(values | changes))


def start(algo: str, process: str, **changes: Any) -> Any:
    """Build a run; one that needs an extra skips the test and says which."""
    changes = ({"init": None} if algo in FROM_SCRATCH else {}) | changes
    try:
        return small(registry.lookup("algo", algo), process).build(setup(process, **changes))
    except MissingExtraError as error:
        pytest.skip(str(error))


def begin(config: Any, process: str = "flow", **changes: Any) -> Any:
    """Build a run of a configuration for a policy of a process."""
    return config.build(setup(process, **changes))


def finished(run: Any) -> Any:
    """Return a run at its end."""
    while run.progress < run.total:
        run.advance()
    return run


def observed(rows: int = 5) -> Tensor:
    """Return observations (rows, 1, 2) in the unit box."""
    return torch.rand(rows, 1, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


def noise_of(policy: Policy, rows: int = 5) -> Tensor:
    return policy.sample_noise(rows, generator=torch.Generator().manual_seed(1))


@cache
def _shared_dataset() -> EpisodeDataset:
    return dataset()


@cache
def accepts(algo: str, process: str) -> bool:
    """Tell whether an algorithm takes a policy; one of transitions says so before it reads data."""
    part = small(registry.lookup("algo", algo), process)
    try:
        start = None if algo in FROM_SCRATCH else _built(process)
        given = setup(process, dataset=_shared_dataset(), init=start)
        if isinstance(part, TransitionsConfig):
            part.require_trainable(given, algo)
        else:
            part.build(given).close()
    except CapabilityError:
        return False
    except MissingExtraError:
        return True  # skipped, with this reason, where it is used
    return True


def saved(run: OfflineRun) -> dict[str, Any]:
    """Return the state of a run as a file gives it back."""
    file = io.BytesIO()
    torch.save(to_plain(run.state_dict()), file)
    file.seek(0)
    state: dict[str, Any] = from_plain(torch.load(file, weights_only=True))
    return state


def weights(policy: Policy) -> Tensor:
    return torch.cat([value.flatten().double() for value in policy.state_dict().values()])
