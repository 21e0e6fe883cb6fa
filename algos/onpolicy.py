"""The loop of on-policy algorithms: collect, appraise, update; and what of it is saved."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from algos.base import Metrics, Setup
from algos.buffers import Appraisal, Experience
from algos.continuity import digest_of, require_unchanged
from algos.functional import RewardScaler, explained_variance
from algos.ratios import ChainRatio, CloningTerm
from algos.surrogate import GeneratorDraws, PpoLearner
from envs.fit import require_fit
from envs.rollout import Rollout, RolloutPool
from policies.errors import ConfigError
from policies.policy import Policy
from policies.seeds import derive_seed, seeded_generator
from policies.threads import torch_threads

if TYPE_CHECKING:
    from algos.ppo import PpoConfig

_log = logging.getLogger(__name__)

THREADS = 2  # that share a gradient, unless `num_threads` says otherwise; results do not depend on it


def check_setup(setup: Setup, algo: str) -> Policy:
    """Return the initial policy, checked against the environment.

    Raises:
        ConfigError: If either is missing, or their sizes disagree.
    """
    if setup.init is None:
        raise ConfigError(f"algo={algo} fine-tunes a policy and got none. Give init=<policy directory>.")
    if setup.env is None:
        raise ConfigError(f"algo={algo} learns in an environment and got none. Give env=<name>.")
    spec, advice = setup.env.spec, "Choose a policy of this task."
    require_fit(f"env={spec.name}", spec, "the policy of init", setup.init, advice=advice)
    return setup.init


def warn_of_a_long_iteration(config: PpoConfig, act_steps: int) -> None:
    """Warn where the first iteration alone exceeds the budget: iterations are executed whole."""
    steps = config.num_envs * config.steps_per_iteration * act_steps
    if config.env_steps is not None and steps > config.env_steps:
        _log.warning(
            "algo.env_steps=%d is less than one iteration, which is executed whole: up to %d steps "
            "(algo.num_envs=%d x algo.steps_per_iteration=%d x %d actions of a chunk). "
            "Lower algo.num_envs or algo.steps_per_iteration.",
            config.env_steps,
            steps,
            config.num_envs,
            config.steps_per_iteration,
            act_steps,
        )


class OnPolicy:
    """A run of PPO in progress; see `algos.base.Algorithm`.

    Args:
        config: Hyper-parameters.
        ratio: Acts and scores; holds the policy in training with its exploration sampler.
        learner: Updates actor and critic.
        pool: Where experience comes from.
        draws: Source of the permutations and the noise of updates.
        shipped: Returns an independent copy of the policy with its evaluation sampler.
        origin: Digest of the policy that the run started from, compared on resuming; None: not compared.
    """

    unit = "env_steps"

    def __init__(
        self,
        config: PpoConfig,
        *,
        ratio: ChainRatio,
        learner: PpoLearner,
        pool: RolloutPool,
        draws: GeneratorDraws,
        shipped: Callable[[], Policy],
        origin: str | None = None,
    ) -> None:
        self.config, self.ratio, self.learner, self.pool = config, ratio, learner, pool
        self.draws, self.shipped, self._origin = draws, shipped, origin
        gamma, clip = config.reward_scale_gamma, config.reward_scale_clip
        self.scaler = RewardScaler(config.num_envs, gamma=gamma, clip=clip) if config.reward_scaling else None
        self.appraise = Appraisal(
            config.gamma, config.gae_lambda, config.reward_scale_const, config.paper_compat
        )
        self.iteration = 0
        self.progress = 0

    @classmethod
    def assemble(
        cls,
        config: PpoConfig,
        setup: Setup,
        *,
        ratio: ChainRatio,
        trained: nn.Module,
        frozen: Any | None,
        shipped: Callable[[], Policy],
    ) -> Self:
        """Add critic, optimisers, environments and random numbers to a checked policy.

        Args:
            config: Hyper-parameters.
            setup: Environment, seed, threads, workers, device.
            ratio: Estimator around the policy in training.
            trained: The part of it that is trained.
            frozen: Policy to stay near, with the exploration sampler; None without that term.
            shipped: See the class.
        """
        policy: Policy = ratio.policy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(setup.seed, "critic"))
            critic = config.critic.build(policy.encoder.cond_dim).to(setup.device, policy.dtype)
        learner = PpoLearner(
            config,
            ratio=ratio,
            actor=list(trained.parameters()),
            critic=critic,
            cloning=None if frozen is None else CloningTerm(frozen, ratio),
            num_threads=setup.threads(THREADS),
        )
        warn_of_a_long_iteration(config, policy.chunk.act_steps)
        assert setup.env is not None
        pool = RolloutPool(
            setup.env,
            num_envs=config.num_envs,
            num_workers=setup.num_workers,
            obs_steps=policy.chunk.obs_steps,
            seed=setup.seed,
        )
        draws = GeneratorDraws(seeded_generator(setup.seed, "updates"))
        origin = digest_of(setup.init)
        return cls(
            config, ratio=ratio, learner=learner, pool=pool, draws=draws, shipped=shipped, origin=origin
        )

    @property
    def policy(self) -> Policy:
        """The policy in training, exploring."""
        return self.ratio.policy

    @property
    def total(self) -> int:
        """Environment steps to execute; counted in iterations, an estimate until the last one is done."""
        if self.config.env_steps is not None:
            return self.config.env_steps
        left = max(0, self.config.iterations - self.iteration)
        return (
            self.progress
            + left * self.config.steps_per_iteration * self.config.num_envs * self.policy.chunk.act_steps
        )

    def advance(self) -> Metrics:
        """Run one iteration: collect, appraise, update."""
        with torch_threads(1):
            return self._iterate()

    def _iterate(self) -> Metrics:
        started = time.perf_counter()
        rollout = self.collect()
        collected = time.perf_counter()
        experience = self.appraise(rollout, self.policy, self.learner.critic, self.scaler)
        metrics: Metrics = dict(self.learner.update(experience, iteration=self.iteration, draws=self.draws))
        metrics |= rollout_metrics(rollout, experience)
        self.iteration += 1
        executed = int(rollout.length.sum())
        self.progress += executed
        finished = time.perf_counter()
        return metrics | {
            "time/rollout_s": collected - started,
            "time/update_s": finished - collected,
            "time/env_steps_per_s": executed / (finished - started),
        }

    def collect(self) -> Rollout:
        """Collect the chunk steps of one iteration; workers act on the CPU."""
        ratio = copy.copy(self.ratio)
        ratio.policy = self.policy.on_cpu()
        config = self.config
        return self.pool.collect(ratio, config.steps_per_iteration, reset=config.reset_each_iteration)

    def snapshot(self) -> Policy:
        """Return an independent copy of the policy as it would be shipped now."""
        return self.shipped().eval().requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-exact continuation needs."""
        return {
            "iteration": self.iteration,
            "progress": self.progress,
            "policy": {name: value.detach().clone() for name, value in self.policy.state_dict().items()},
            "learner": self.learner.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "draws": self.draws.generator.get_state(),
            "pool": self.pool.state_dict(),
            **self._lasting(),
        }

    def _lasting(self) -> dict[str, Any]:
        """Return what must not change when the run is continued."""
        facts: dict[str, Any] = {
            "inner_steps": self.ratio.inner_steps,
            "switch_time": getattr(getattr(self.policy, "field", None), "switch_time", None),
        }
        return facts if self._origin is None else facts | {"init": self._origin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: If the run started from another policy or divides its denoising steps otherwise.
        """
        require_unchanged(state, self._lasting())
        self.policy.load_state_dict(state["policy"])
        self.learner.load_state_dict(state["learner"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.draws.generator.set_state(state["draws"])
        self.pool.load_state_dict(state["pool"])
        self.iteration, self.progress = int(state["iteration"]), int(state["progress"])

    def close(self) -> None:
        """End workers and threads."""
        self.pool.close()
        self.learner.close()


def rollout_metrics(rollout: Rollout, experience: Experience) -> Metrics:
    """Summarise the episodes that ended during an iteration; NaN where none did."""
    rows = rollout.episodes
    metrics: Metrics = {
        "rollout/episodes": float(len(rows)),
        "rollout/return": _mean([row.return_ for row in rows]),
        "rollout/success": _mean([float(row.success) for row in rows]),
        "rollout/episode_length": _mean([float(row.length) for row in rows]),
        "rollout/chunk_reward": rollout.rewards.sum(dim=-1).mean(),
        "value/explained_variance": explained_variance(experience.value, experience.target),
    }
    return metrics


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
