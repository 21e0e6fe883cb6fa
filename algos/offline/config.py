"""Settings of offline algorithms, construction of the actor, checks of a setup."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup, dataset_of, goal_dim_of, require_condition_vector, require_one_policy
from algos.offline.loop import (
    THREADS,
    Learner,
    Limits,
    OfflineRun,
    Probes,
    acting,
    limits_of,
    probes_of,
)
from algos.offline.online import OnlineConfig, OnlinePhase
from algos.optim import DelayedDecay, Ema
from algos.training.observations import encoder_module
from algos.transitions import Rewarding, TransitionTable, tabulate
from envs.datasets.action_bounds import actions_for, box_of, clipped_actions
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.bounds import Checked, bounded
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.registry import name_of
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.base import WrappedPolicy

_log = logging.getLogger(__name__)

_BEYOND = 1e-4  # tolerance of normalised actions beyond ±1, for rounding
STD_MARGIN = 1e-3  # added to every state std, as in the released code


Statistics = dict[str, dict[str, Tensor]]  # of observations and actions, by feature, for a normaliser


@dataclass(frozen=True)
class OfflineData:
    """Data shared by the seeds: dataset, statistics (empty with `init`), transitions, probes, limits."""

    dataset: EpisodeDataset
    statistics: Statistics
    table: TransitionTable
    probes: Probes | None
    limits: Limits


@dataclass
class TransitionsConfig(Checked):
    """Settings shared by algorithms that learn from recorded rewards, then from new experience."""

    fixed_length: ClassVar[bool] = False  # whether a schedule depends on `steps`
    splits_batches: ClassVar[bool] = True  # over the processes of a run
    closer: ClassVar[str] = "Lower algo.gamma, take fewer algo.steps, or use another algorithm."
    """How to stay closer to the data, for warnings."""

    steps: int = bounded(1_000_000, ge=1)  # gradient steps of the critic
    batch_size: int = bounded(256, ge=1)  # transitions
    gamma: float = bounded(0.99, ge=0, le=1)  # discount per environment step
    reward_scale: float = bounded(1.0, gt=0)  # rewards become reward_scale r + reward_shift
    reward_shift: float = bounded(0.0, ge=-math.inf)  # see reward_scale
    normalize_returns: float | None = bounded(None, gt=0, was="return_range")  # return span after scaling
    actor_lr: float = bounded(3e-4, gt=0)  # Adam
    critic_lr: float = bounded(3e-4, gt=0)  # Adam
    tau: float = bounded(0.005, gt=0, le=1)  # Polyak coefficient of the target networks
    ema_decay: float = bounded(0.0, ge=0, lt=1)  # EMA decay of the exported weights; 0 disables EMA
    critic_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of a critic; ReLU
    log_every: int = bounded(1000, ge=1, was="block_steps")  # steps between two log rows
    online_steps: int = bounded(0, ge=0)  # control steps in the task after the gradient steps on the dataset
    online: OnlineConfig = field(default_factory=OnlineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_single = self.normalize_returns is None or self.reward_scale == 1
        self.require("normalize_returns", is_single, "null with algo.reward_scale")

    def unused(self) -> dict[str, str]:
        online = {} if self.online_steps else {"online": "without algo.online_steps"}
        return super().unused() | online

    def rewarding(self, dataset: EpisodeDataset) -> Rewarding:
        """Return the reward transform."""
        scale = self.reward_scale
        if self.normalize_returns is not None:
            span = float(dataset.returns.max() - dataset.returns.min())
            if span <= 0:
                raise ConfigError(
                    f"algo.normalize_returns needs episodes of different returns; all {dataset.num_episodes} "
                    f"of {dataset.source} have the same. Use algo.reward_scale."
                )
            scale = self.normalize_returns / span
            _log.info("%s: returns span %.6g; rewards are multiplied by %.6g", dataset.source, span, scale)
        return Rewarding(self.gamma, scale, self.reward_shift)

    def backup_steps(self, policy: Policy) -> int:
        """Return the steps of a transition."""
        return policy.chunk.act_steps

    def resume_invariants(self) -> dict[str, Any]:
        """Return the settings, by key, that must stay equal when a run is resumed."""
        names = ("gamma", "reward_scale", "reward_shift")
        facts = {f"algo.{name}": getattr(self, name) for name in names}
        return facts | {"algo.return_range": self.normalize_returns}  # key in saved training states

    def build(self, setup: Setup) -> OfflineRun:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If the dataset is missing, sizes of dataset, environment and policy differ, or all
                rewards are 0.
            CapabilityError: If `init` does not support this training.
            DatasetError: If the dataset has no transition.
        """
        return self.run(setup, self.prepare(setup))

    def prepare(self, setup: Setup) -> OfflineData:
        """Return the transitions in the policy's encoding; equal for every seed."""
        with torch_threads(setup.threads(THREADS)):
            algo, spec = name_of("algo", self), None if setup.env is None else setup.env.spec
            self.require_trainable(setup, algo)
            if self.online_steps and spec is None:
                raise ConfigError(f"algo.online_steps={self.online_steps} needs a task. Give env=<name>.")
            dataset = dataset_of(setup, algo, "transitions with rewards")
            statistics: Statistics = {}
            if setup.init is not None:
                dataset = actions_for(dataset, setup.init, spec)
            else:
                box = box_of(dataset, spec)
                dataset = clipped_actions(dataset, box)
                statistics = self.statistics(setup, dataset, box)
            rewarding = self.rewarding(dataset)
            _require_rewards(dataset, rewarding, algo)
            policy = self.initial_policy(setup, dataset, statistics)
            on_device = dataset.to(setup.device)
            table = tabulate(on_device, policy, rewarding, steps=self.backup_steps(policy))
            length = None if spec is None else spec.max_episode_steps
            limits = limits_of(table, on_device, rewarding, episode_steps=length, advice=self.closer)
            return OfflineData(dataset, statistics, table, probes_of(table, on_device, rewarding), limits)

    def run(self, setup: Setup, data: OfflineData) -> OfflineRun:
        """Return the run on prepared transitions."""
        with torch_threads(setup.threads(THREADS)):
            policy = self.initial_policy(setup, data.dataset, data.statistics)
            with seeded_weights(derive_seed(setup.seed, "learner")):
                learner = self.learner(policy, data.table, setup)
            rule = DelayedDecay(self.ema_decay, every=1)
            ema = Ema(learner.policy, rule) if self.ema_decay else None  # of all that acts, critics included
            online = None
            if self.online_steps:
                rewarding = self.rewarding(data.dataset)
                parts = (self.online, self.online_steps, setup, policy, data.table, rewarding)
                online = OnlinePhase(*parts, chunks=self.backup_steps(policy) // policy.chunk.act_steps)
                _warn_without_noise(acting(learner), self.online, name_of("algo", self))
            return OfflineRun(
                self, setup, learner, data.table, data.dataset,
                probes=data.probes, limits=data.limits, ema=ema, online=online,
                resume_invariants=self.resume_invariants(),
            )  # fmt: skip

    def require_trainable(self, setup: Setup, algo: str) -> None:
        """Refuse an `init` that is wrapped or composed, or whose condition has tokens."""
        if setup.init is None:
            return
        require_one_policy(setup.init, algo)
        if isinstance(setup.init, WrappedPolicy):
            raise CapabilityError(
                f"algo={algo} trains a policy without wrapper; init has "
                f"'{name_of('wrapper', setup.init.wrapper)}'. Train the policy inside, then wrap it again."
            )
        require_condition_vector(setup.init, algo)

    def statistics(self, setup: Setup, dataset: EpisodeDataset, box: dict[str, Tensor]) -> Statistics:
        """Return what a new policy is scaled by; `box` bounds the actions."""
        return dataset.statistics()

    @abstractmethod
    def initial_policy(self, setup: Setup, dataset: EpisodeDataset, statistics: Statistics) -> Policy:
        """Return a trainable copy of `init`, or a new policy with a normaliser of these statistics."""

    @abstractmethod
    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> Learner:
        """Return the learner; initial weights use torch's global generator, which is seeded here."""


@dataclass
class OfflineConfig(TransitionsConfig):
    """Settings shared by algorithms that make their own actor.

    Without `init` a new MLP actor of `hidden_dims` is trained on states of mean 0 and std 1 (ReBRAC: unscaled
    states); with `init`, a copy of that policy.
    """

    makes_policy: ClassVar[bool] = True  # the algorithm chooses process, backbone etc. of a new policy

    hidden_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of a new actor; ReLU
    autocast: str | None = bounded(None, choices=("bfloat16",))  # autocast dtype; null: float32

    def actor_config(self) -> PolicyConfig:
        """Return the configuration of a new actor."""
        return plain_actor(DeterministicProcess(), self.hidden_dims)

    def prepare(self, setup: Setup) -> OfflineData:
        if self.autocast is not None and setup.device.type == "cpu":
            warn_of_slow_bfloat16()
        return super().prepare(setup)

    def statistics(self, setup: Setup, dataset: EpisodeDataset, box: dict[str, Tensor]) -> Statistics:
        goals = {"goal": dataset.statistics()["goal"]} if goal_dim_of(setup, dataset) else {}
        return {"state": _state_statistics(dataset), "action": box, **goals}

    def initial_policy(self, setup: Setup, dataset: EpisodeDataset, statistics: Statistics) -> Policy:
        """Return a trainable copy of `init`, or a new actor scaled to the action bounds."""
        if setup.init is not None:
            policy = setup.init.clone().to(setup.device).eval().requires_grad_(True)
            encoder_module(policy).requires_grad_(False)
            return policy
        config, goal_dim = self.actor_config(), goal_dim_of(setup, dataset)
        if goal_dim:  # goals are normalised as states are
            mode = config.normalizer["state"]
            config = replace(config, normalizer=config.normalizer | {"goal": mode})
        policy = build_policy(
            config,
            obs_dim=dataset.obs_dim,
            action_dim=dataset.action_dim,
            goal_dim=goal_dim,
            statistics=statistics,
            seed=derive_seed(setup.seed, "actor"),
        )
        return policy.to(setup.device).eval()


def warn_of_slow_bfloat16() -> None:
    """Warn if this processor multiplies matrices slower in bfloat16 than in float32: it is tried."""
    ratio = seconds_of_product(torch.bfloat16) / seconds_of_product(torch.float32)
    if ratio > 1:
        _log.warning(
            "algo.autocast=bfloat16 is slower than float32 on this processor: a product takes %.1f times as "
            "long. Leave algo.autocast out.",
            ratio,
        )


def seconds_of_product(dtype: torch.dtype) -> float:
    """Return the least time [s] of this thread for a product of 256 x 256 matrices on the CPU."""
    a, times = torch.ones(256, 256, dtype=dtype), [math.inf]
    end = time.thread_time() + 5e-3  # other programs on this core do not count
    while len(times) < 3 or time.thread_time() < end:
        start = time.thread_time()
        torch.mm(a, a)
        times.append(time.thread_time() - start)
    return min(times)


def _require_rewards(dataset: EpisodeDataset, rewarding: Rewarding, algo: str) -> None:
    """Refuse rewards that are all 0; warn of constant rewards in a task without termination."""
    least, most = (float(bound) for bound in dataset.rewards.aminmax())
    given = rewarding.scale * least + rewarding.shift
    if least != most or (given and bool(dataset.over.any())):
        return
    changed = f" ({given:g} with algo.reward_scale and algo.reward_shift)" if given != least else ""
    found = f"{dataset.source}: all {len(dataset)} rewards are {least:g}{changed}"
    advice = "Use data with rewards (of OGBench: reader.task=<single task>), or algo=bc, which needs none."
    if given == 0:
        raise ConfigError(f"{found}; algo={algo} learns from rewards. {advice}")
    _log.warning(
        "%s, and the task never ends, so all actions are worth the same to algo=%s. %s", found, algo, advice
    )


def _warn_without_noise(policy: Policy, online: OnlineConfig, algo: str) -> None:
    """Warn of a policy that explores nothing in its task."""
    if not (online.exploration_std or policy.noise_sensitive):
        _log.warning(
            "algo.online.exploration_std=0: this policy of algo=%s acts without noise (a Gaussian by its "
            "mean) and explores nothing in the task. Set it, for example to 0.1.",
            algo,
        )


def warn_of_clipped_actions(table: TransitionTable, setup: Setup, algo: str) -> None:
    """Warn of recorded actions that `init` normalises beyond ±1, where actions are clipped."""
    if setup.init is None or setup.dataset is None:
        return
    beyond = float((table.action.abs() > 1 + _BEYOND).float().mean())
    if beyond:
        _log.warning(
            "%s: %.2g %% of the action entries lie beyond ±1 as the policy of init normalises them (%s); "
            "actions of algo=%s are clipped there. Start from a policy cloned from these data with "
            "policy.normalizer.action=limits.",
            setup.dataset.source, 100 * beyond, setup.init.normalizer.modes["action"], algo,
        )  # fmt: skip


def plain_actor(process: Any, hidden_dims: tuple[int, ...]) -> PolicyConfig:
    """Return the configuration of a single-action policy on standardised states."""
    return PolicyConfig(
        process=process,
        backbone=MlpConfig(residual=False, hidden_dims=hidden_dims),
        horizon=1,
        act_steps=1,
        normalizer={"state": "gaussian", "action": "limits"},
        observation_clip=None,
    )


def _state_statistics(dataset: EpisodeDataset) -> dict[str, Tensor]:
    """Return mean and std of the states of the transitions; a margin is added to the std."""
    frames, moments = dataset.require_transitions(), []
    for column in dataset.observations.unbind(dim=1):  # in float64, one entry at a time
        value = column[frames].double()
        std = value.std(correction=0) + STD_MARGIN
        moments.append(torch.stack([value.mean(), std, *value.aminmax()]).float())
    return dict(zip(("mean", "std", "min", "max"), torch.stack(moments, dim=1), strict=True))
