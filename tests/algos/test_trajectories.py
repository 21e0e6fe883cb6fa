"""Imagined trajectories: rows and back, a guide that pushes as far in any number of steps, and datasets."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from small_algorithms import SMALL, dataset, init, policy_config, setup
from torch import Tensor

import burnish
from algos.cloning.trajectories import (
    PolicyGuide,
    TrajectoriesConfig,
    episode_of,
    imagined_episodes,
    require_model,
    require_target,
    rows_of,
)
from burnish.commands.collect import CollectConfig, record
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from envs.datasets.curation import SAMPLING_WEIGHT
from envs.tasks.avoid.task import Avoid
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes import Edm
from policies.protocols import Cond, Hook, Step
from policies.samplers.ode import Ancestral, Euler, Heun
from policies.storage.policy_folder import save_policy

POINT = setup("regression").env
NORMAL = Edm(data_std=1.0, noise_min=0.002, noise_max=80.0)


def model(sampler: Any, spec: Any = POINT.spec) -> Any:
    """Return a model of standard normal rows, which it denoises exactly: a network that says 0 does."""
    config = PolicyConfig(
        process=NORMAL, backbone=MlpConfig(width=8, time_dim=4), sampler=sampler, horizon=6, act_steps=1,
        normalizer={"state": "identity", "action": "gaussian"},
    )  # fmt: skip
    width = spec.obs_dim + spec.action_dim + 2
    one = torch.ones(width)
    rows = {"mean": 0 * one, "std": one, "min": -one, "max": one}
    policy = build_policy(config, obs_dim=1, action_dim=width, statistics={"action": rows})
    for weight in policy.parameters():
        weight.data.zero_()
    return policy.eval()


def drawn(rows: Any, *, weight: float | None, steps: int) -> Tensor:
    """Return windows from the same start, guided by a policy or (None) by a hook that does nothing."""
    bounds: dict[str, Any] = {"clip_x0": None, "clip_action": None}
    made = rows.with_sampler(Euler(steps=steps, **bounds))
    hook = Hook() if weight is None else PolicyGuide(made, init("regression"), POINT.spec, weight)
    noise = torch.randn(64, *made.noise_shape, generator=torch.Generator().manual_seed(0))
    found: Tensor = made.decode(Cond(torch.zeros(64, 1)), noise, hooks=[hook])
    return found


def recorded(spec: Any) -> EpisodeDataset:
    """Return two random episodes of six steps with successors."""
    generator = torch.Generator().manual_seed(0)
    states, actions = (torch.rand(12, n, generator=generator) for n in (spec.obs_dim, spec.action_dim))
    arrays = (states, actions, torch.rand(12, generator=generator), torch.zeros(12), None, [0, 6, 12])
    return EpisodeDataset.from_arrays(*arrays, next_observations=states + 0.1)


def distance(windows: Tensor) -> float:
    """Return the mean distance of actions to those of the policy in their states."""
    policy: Policy = init("regression")
    states, actions = windows[..., :2].reshape(-1, 1, 2), windows[..., 2:4].tanh().reshape(-1, 2)
    wanted = policy.act({"state": states}, noise=torch.zeros(len(states), *policy.noise_shape))[:, 0]
    return float((actions - wanted).norm(dim=1).mean())


def test_a_guide_of_weight_zero_is_none_and_others_push_as_far_in_any_number_of_steps() -> None:
    rows = model(Euler())
    plain = drawn(rows, weight=None, steps=16)
    assert torch.equal(drawn(rows, weight=0.0, steps=16), plain)
    far, near, nearer = (distance(drawn(rows, weight=weight, steps=64)) for weight in (0.0, 8.0, 32.0))
    assert nearer < near - 0.2 < far - 0.4
    assert abs(distance(drawn(rows, weight=8.0, steps=128)) - near) < 0.02
    kept = [0, 1, 4, 5]
    assert torch.equal(drawn(rows, weight=4.0, steps=16)[..., kept], plain[..., kept]), "only actions move"


def test_a_guide_without_bounds_of_observations_leaves_pure_noise_alone() -> None:
    unbounded = dataclasses.replace(policy_config("regression"), observation_clip=None)
    policy = build_policy(unbounded, obs_dim=2, action_dim=2, seed=3)
    rows = model(Euler(clip_x0=None))
    guide, x = PolicyGuide(rows, policy, POINT.spec, 1.0), torch.randn(4, 6, 6)
    noise = Step(k=0, num_steps=4, t=0.0, t_next=0.25, cond=Cond(torch.zeros(4, 1)), alpha=0.0, sigma=1.0)
    assert torch.equal(guide.before_prediction(noise, x), x)
    later = guide.before_prediction(dataclasses.replace(noise, k=1, t=0.25, alpha=0.25, sigma=0.75), x)
    assert later.isfinite().all() and not torch.equal(later, x)


def test_rows_are_states_actions_rewards_and_ends_and_become_steps_again() -> None:
    spec = dataclasses.replace(POINT.spec, action_low=(-1.0, 0.0), action_high=(1.0, 4.0))
    data = dataset(episodes=1)
    actions = data.actions.clone()
    actions[:, 1], actions[0, 0] = 2 + 1.5 * actions[:, 1], 1.0
    extras = {SAMPLING_WEIGHT: torch.full((5,), 0.2), "goal": torch.zeros(5, 2)}
    rows = rows_of(dataclasses.replace(data, actions=actions, extras=extras), spec)
    assert list(rows.extras) == [SAMPLING_WEIGHT], "episodes are drawn as curation decides"
    assert rows.actions.shape == (5, 6) and not rows.observations.any()
    found = episode_of(rows.actions, spec, seed=3)
    assert found.terminated and not found.truncated and len(found) == 5, "the row that ends is a step"
    actions[0, 0] = 0.999
    for value, expected in ((found.actions, actions), (found.rewards, data.rewards)):
        torch.testing.assert_close(torch.from_numpy(value), expected)
    cut = episode_of(rows.actions[:4], spec, seed=3)
    assert cut.truncated and len(cut) == 3, "the last of others is a successor"
    torch.testing.assert_close(torch.from_numpy(cut.observations), data.observations[:4])
    early = rows.actions.clone()
    early[1, -1] = 0.6
    assert len(episode_of(early, spec, seed=3)) == 2


def test_a_model_is_learned_saved_and_drawn_from_with_its_provenance(tmp_path: Path) -> None:
    task, demos = Avoid(), tmp_path / "demos.hdf5"
    write_dataset(demos, recorded(task.spec))
    plan = PolicyConfig(
        process=NORMAL, backbone=MlpConfig(width=8, time_dim=4), sampler=Ancestral(steps=3), horizon=4
    )
    given = setup("edm", policy=plan, init=None, env=task, dataset=read_dataset(demos))
    run = TrajectoriesConfig(**{key: SMALL[key] for key in ("steps", "batch_size", "log_every")}).build(given)
    run.advance()
    assert run.progress == 2 and run.total == 6
    save_policy(run.snapshot(), tmp_path / "model", provenance={})
    config = CollectConfig(
        env=task, model=str(tmp_path / "model"), episodes=3, out=str(tmp_path / "imagined.hdf5"),
        allow_other_task=True,
    )  # fmt: skip
    first = record(config)
    found = read_dataset(config.out)
    assert torch.equal(first.observations, found.observations)
    assert found.meta["env_args"]["env_name"] == "avoid"
    assert found.meta["imagined"]["model"].keys() == {"name", "sha256"}
    assert found.meta["imagined"]["guidance"] == 0 and found.next_observations is not None
    joined = read_dataset(burnish.convert_data([demos, config.out], tmp_path / "joined.hdf5"))
    assert joined.num_episodes == 5 and joined.next_observations is not None
    assert [part["episodes"] for part in joined.meta["parts"]] == [2, 3]
    assert joined.meta["parts"][1]["imagined"] == found.meta["imagined"]


def test_what_cannot_be_learned_or_guided_is_refused() -> None:
    config = TrajectoriesConfig()
    for changes, error, words in (
        ({"init": init("flow")}, ConfigError, "init"),
        ({"init": None, "env": None}, ConfigError, "env"),
        ({"init": None, "policy": PolicyConfig(process=NORMAL, obs_steps=2)}, ConfigError, "obs_steps"),
        (
            {"init": None, "policy": PolicyConfig(process=NORMAL, horizon=1, act_steps=1)},
            ConfigError,
            "horizon",
        ),
    ):
        with pytest.raises(error, match=mentions(words)):
            config.build(setup("flow", **changes))
    with pytest.raises(CapabilityError, match=mentions("process=regression")):
        config.build(setup("regression", init=None))
    with pytest.raises(ConfigError, match=mentions("algo=trajectories point")):
        require_model(init("flow"), POINT.spec, "model=x")
    with pytest.raises(CapabilityError, match=mentions("sampler=heun ancestral")):
        require_model(model(Heun(clip_x0=None)), POINT.spec, "model=x")
    with pytest.raises(CapabilityError, match=mentions("policy=x noise")):
        require_target(init("flow"), "policy=x")
    for name in ("noise", "expert"):
        with pytest.raises(ConfigError, match=mentions(f"{name} model")):
            CollectConfig(model="runs/model", **{name: 1.0})  # type: ignore[arg-type]


def test_imagined_episodes_follow_from_their_seed() -> None:
    rows = model(Ancestral(steps=3, clip_x0=None))
    one, again, other = (
        next(imagined_episodes(rows, POINT.spec, policy=None, weight=0, seed=seed)) for seed in (1, 1, 2)
    )
    assert (one.observations == again.observations).all() and (one.actions != other.actions).any()
    episodes, later = (
        imagined_episodes(rows, POINT.spec, policy=None, weight=0, seed=1, skip=skip) for skip in (0, 300)
    )
    for known, here in zip(islice(episodes, 300, 302), later, strict=False):
        assert known.seed == here.seed and (known.actions == here.actions).all()
