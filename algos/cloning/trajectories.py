"""Trajectories that a diffusion imagines, near the actions of a policy: data for offline learning.

Legend: H rows of a window, O and A widths of state and action, D = O + A + 2, a action in the task's box as
[-1, 1], u noisy rows in deviations of the data, K denoising steps, k step, c weight of the guide::

    row       [s, atanh(a), r, done], a clipped at 0.999
    train     cloning of windows; the observation is a single zero
    guide     before step k < K - 1: u <- u + c / K (1 - k / K + 0.3 sin(pi (k + 1) / K)) g
              g = slope of log pi(tanh(row) | s) along the rows' actions, s held constant; 0 elsewhere
    episode   the rows up to the first with done > 1/2, or all; the last of these is a successor only

log pi is that of a Gaussian policy, or the normal distribution of deviation 1 around the action of any other
policy that acts without noise. The Jacobian of tanh is left out: g pushes, it is no density.

Source: policy-guided diffusion, arXiv 2404.06356, and its released code. Deviations: c is divided by K, so
that c means the same for any number of steps; the samplers of this package in place of Heun with churn; any
window inside an episode is learned, and the row that ends a task is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup, dataset_of
from algos.bc import THREADS, Bc, BcConfig
from envs.datasets.curation import SAMPLING_WEIGHT
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.spec import EnvSpec
from policies.bounds import Checked, bounded
from policies.build import build_policy, complete
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy
from policies.processes.gaussian import GaussianPolicy
from policies.protocols import Hook, Step
from policies.registry import name_of, register
from policies.samplers.step_table import StepRules
from policies.seeds import derive_seed, seeded_generator
from policies.threads import torch_threads
from policies.wrappers.planner import denoises_plans

MOST = 0.999  # largest |a| of a row, whose atanh is finite
NOTHING = 1  # width of the observation of a model
BESIDE = 2  # entries of a row behind state and action: reward, done
COSINE = 0.3  # weight of the sine in the guide
TOGETHER = 256  # windows that are sampled at once


@register("algo", "trajectories")
@dataclass
class TrajectoriesConfig(Checked):
    """A diffusion of recorded trajectories, of which `burnish collect model=` draws data.

    Source:
        Policy-guided diffusion (arXiv 2404.06356).
    """

    makes_model: ClassVar[bool] = True  # its result is no policy of the task

    steps: int = bounded(20_000, ge=1)  # gradient steps
    batch_size: int = bounded(64, ge=1)  # windows
    lr: float = bounded(1e-3, gt=0)  # AdamW, peak
    log_every: int = bounded(100, ge=1)  # gradient steps between two log rows

    def build(self, setup: Setup) -> Bc:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If task or dataset are missing, the task gives goals beside the state, a policy is
                given to start from, or windows do not begin with their first row.
            CapabilityError: If the process does not denoise along a path with a plain loss.
            DatasetError: If no episode holds a window.
        """
        name = name_of("algo", self)
        if setup.env is None or setup.env.spec.goal_dim:
            raise ConfigError(f"algo={name} learns states; give env=<the task of the data>, without goals.")
        if setup.init is not None:
            raise ConfigError(f"algo={name} learns a new model; leave init out.")
        rows = rows_of(dataset_of(setup, name, "episodes with rewards"), setup.env.spec)
        with torch_threads(setup.threads(THREADS)):
            model = build_policy(
                _of_rows(setup.policy, name),
                obs_dim=NOTHING,
                action_dim=rows.action_dim,
                statistics=rows.statistics(),
                seed=derive_seed(setup.seed, "trajectories"),
            )
            cloning = BcConfig(
                steps=self.steps,
                batch_size=self.batch_size,
                lr=self.lr,
                min_lr=0.1 * self.lr,
                log_every=self.log_every,
                pad_end=False,
                validation_fraction=0.0,
            )
            return Bc(cloning, replace(setup, init=model, dataset=rows, env=None))


def _of_rows(policy: Any, name: str) -> Any:
    """Return the configuration of a model: rows in deviations, unbounded."""
    policy = complete(policy)
    if not denoises_plans(policy.process) or not isinstance(policy.sampler, StepRules):
        raise CapabilityError(
            f"algo={name} denoises trajectories; got process={name_of('process', policy.process)} and "
            f"sampler={name_of('sampler', policy.sampler)}. Use process=diffusion, flow or edm."
        )
    if policy.obs_steps != 1 or policy.action_start != 0:
        raise ConfigError(
            f"algo={name} has no history: policy.obs_steps=1 and policy.action_start=0; got "
            f"{policy.obs_steps} and {policy.action_start}."
        )
    if policy.horizon < 2:
        raise ConfigError(
            f"algo={name} needs a row and its successor: policy.horizon of 2 or more; got {policy.horizon}."
        )
    unbounded = replace(policy.sampler, clip_x0=None, clip_action=None)
    modes = {"state": "identity", "action": "gaussian"}
    return replace(policy, sampler=unbounded, normalizer=modes, observation_clip=None, act_steps=1)


def rows_of(dataset: EpisodeDataset, spec: EnvSpec) -> EpisodeDataset:
    """Return the data as the model sees them: observations (N, 1) of zeros, and rows (N, D) as actions."""
    low, high = _box(spec, dataset.actions)
    action = (2 * (dataset.actions - low) / (high - low) - 1).clamp(-MOST, MOST)
    ended = dataset.terminated.to(dataset.rewards)
    rows = [dataset.observations, action.atanh(), dataset.rewards[:, None], ended[:, None]]
    nothing = dataset.observations.new_zeros(dataset.num_frames, NOTHING)
    return replace(
        dataset,
        observations=nothing,
        actions=torch.cat(rows, dim=1),
        next_observations=None,
        extras={key: dataset.extras[key] for key in (SAMPLING_WEIGHT,) if key in dataset.extras},
        images={},
    )


def _box(spec: EnvSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_tensor(spec.action_low), like.new_tensor(spec.action_high)


@dataclass(frozen=True, eq=False)
class PolicyGuide(Hook):
    """Push noisy rows towards what a policy would do in their states; see the module."""

    model: Policy  # of rows
    policy: Policy  # the target, which acts without noise
    spec: EnvSpec  # the task
    weight: float  # c; 0: no guide

    def before_prediction(self, step: Step, x: Tensor) -> Tensor:
        if step.k == step.num_steps - 1 or not step.alpha:  # pure noise tells no state
            return x
        done = step.k / step.num_steps
        sine = math.sin(math.pi * (step.k + 1) / step.num_steps)
        pushed = self.weight / step.num_steps * (1 - done + COSINE * sine)
        return x + step.alpha * pushed * self.slope(x / step.alpha)

    @torch.no_grad()
    def slope(self, rows: Tensor) -> Tensor:
        """Return g (B, H, D) at rows (B, H, D), in deviations of the data."""
        policy, (states, actions) = self.policy, (self.spec.obs_dim, self.spec.action_dim)
        physical = self.model.physical(rows)
        cond = policy.encode({"state": physical[..., :states].reshape(-1, 1, states)})
        row, std = policy.chunk.action_start, torch.ones(())
        if isinstance(policy, GaussianPolicy):
            density = policy.density(cond)
            mean, std = density.mean[:, row], density.std[:, row]
        else:
            mean = policy.decode(cond, torch.zeros(len(cond), *policy.noise_shape))[:, row]
        taken = physical[..., states : states + actions].tanh().reshape(-1, actions)
        low, high = _box(self.spec, taken)
        half, units = (high - low) / 2, policy.normalizer.get_buffer("action_scale")
        there = policy.normalize_action(low + half * (taken + 1))
        along = (mean - there) / std**2 * units * half * (1 - taken**2)
        scale = self.model.normalizer.get_buffer("action_scale")[states : states + actions]
        found = torch.zeros_like(rows)
        found[..., states : states + actions] = (along / scale).view(*rows.shape[:2], actions)
        return found


def require_model(model: Any, spec: EnvSpec, name: str) -> None:
    """Refuse what is no model of a task (ConfigError), or cannot be guided (CapabilityError)."""
    width = spec.obs_dim + spec.action_dim + BESIDE
    if not isinstance(model, DenoisingPolicy) or (model.obs_dim, model.chunk.action_dim) != (NOTHING, width):
        raise ConfigError(f"{name} is no result of algo=trajectories on {spec.name}.")
    if model.table.memory is not None:
        raise CapabilityError(
            f"{name} has sampler={name_of('sampler', model.sampler)}, whose steps evaluate twice. Train it "
            "with sampler=ancestral or euler."
        )


def require_target(policy: Any, name: str) -> None:
    """Refuse a policy that cannot guide (CapabilityError)."""
    reads = not isinstance(policy, Policy) or policy.chunk.obs_steps > 1 or policy.goal_dim or policy.images
    if reads or policy.noise_sensitive:
        raise CapabilityError(
            f"{name} guides by its action in a state: a policy of one state, without goals and images, that "
            "acts without noise, such as the actor of td3_bc or iql."
        )


def imagined_episodes(
    model: DenoisingPolicy, spec: EnvSpec, *, policy: Policy | None, weight: float, seed: int, skip: int = 0
) -> Iterator[Episode]:
    """Yield windows of the model as episodes, without end.

    Args:
        model: Result of `algo=trajectories`; see `require_model`.
        spec: Its task.
        policy: The target of the guide; None: no guide. See `require_target`.
        weight: c.
        seed: Seed of the noise.
        skip: Number of first episodes to leave out; the others are the same.
    """
    hooks = [PolicyGuide(model, policy, spec, weight)] if policy is not None and weight else []
    cond = model.condition(torch.zeros(TOGETHER, NOTHING))
    for part in count(skip // TOGETHER):
        noise = model.sample_noise(TOGETHER, generator=seeded_generator(seed, "imagined", part))
        rows = model.physical(model.decode(cond, noise, hooks=hooks))
        for number, window in enumerate(rows, part * TOGETHER):
            if number >= skip:
                yield episode_of(window, spec, seed + number)


def episode_of(rows: Tensor, spec: EnvSpec, seed: int) -> Episode:
    """Return the episode of rows (H, D), physical: at least one step."""
    states, actions, rewards, done = rows.split((spec.obs_dim, spec.action_dim, 1, 1), dim=-1)
    ends = (done[:, 0] > 0.5).nonzero().flatten().tolist()
    length = ends[0] + 1 if ends else len(rows) - 1
    low, high = _box(spec, rows)
    return Episode(
        observations=states[[*range(length), min(length, len(rows) - 1)]].numpy(),
        actions=(low + (high - low) / 2 * (actions[:length].tanh() + 1)).numpy(),
        rewards=rewards[:length, 0].numpy(),
        terminated=bool(ends),
        truncated=not ends,
        seed=seed,
    )
