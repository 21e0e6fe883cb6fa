"""Training loop of on-policy algorithms: collect a rollout, estimate advantages, update."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from algos.base import Metrics, Setup, dataset_of
from algos.onpolicy.advantages import AdvantageEstimator, Experience
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.demonstrations import Demonstrations, RecordedValues
from algos.onpolicy.losses import RewardScaler, explained_variance
from algos.onpolicy.polychromic import LABEL, Sets
from algos.onpolicy.ppo_update import GeneratorDraws
from algos.onpolicy.props import AdaptiveSampling
from algos.onpolicy.ratios import BcTerm, RatioEstimator
from algos.onpolicy.running_normalizer import RunningMeanStd
from algos.onpolicy.short_update import update_of
from algos.onpolicy.trust_region import UPDATES
from algos.training.experience import led
from algos.training.observations import EncodingCritic, encode, mapped, shifted, trained_encoder
from algos.training.ranks import current
from algos.training.resume_checks import init_facts, require_unchanged
from envs.datasets.episodes import EpisodeDataset
from envs.fit import require_fit
from envs.rollouts.rollout import Rollout
from envs.spec import EnvConfig
from policies.backbones.switched import SwitchedField
from policies.errors import ConfigError
from policies.policy import Policy
from policies.registry import name_of
from policies.seeds import derive_seed, seeded_generator, seeded_weights
from policies.threads import torch_threads

_log = logging.getLogger(__name__)

NO_STATE = "the observation of this task is the simulator's state, or the task does not give it"
SATURATED_SHARE = 0.1  # fraction of terms without gradient above which a run warns, once
THREADS = 2  # gradient threads, unless `num_threads` is set; results are equal for any number


def check_setup(setup: Setup, algo: str) -> Policy:
    """Return the initial policy, checked against the environment (else ConfigError)."""
    if setup.init is None:
        raise ConfigError(f"algo={algo} fine-tunes a policy and got none. Give init=<policy directory>.")
    if setup.env is None:
        raise ConfigError(f"algo={algo} learns in an environment and got none. Give env=<name>.")
    spec, advice = setup.env.spec, "Choose a policy of this task."
    require_fit(f"env={spec.name}", spec, "the policy of init", setup.init, advice=advice)
    return setup.init


def steps_within_budget(config: OnPolicyConfig, act_steps: int) -> int:
    """Return the chunk steps of an iteration: `steps_per_iteration`, or fewer if the budget is below one."""
    steps = config.steps_per_iteration
    per_iteration = config.num_envs * steps * act_steps
    if config.env_steps is None or per_iteration <= config.env_steps:
        if config.env_steps is not None and config.env_steps % per_iteration:
            _log.info(
                "the run ends with the iteration that reaches algo.env_steps=%d; an iteration has up to %s "
                "control steps.", config.env_steps, f"{per_iteration:,}",
            )  # fmt: skip
        return steps
    steps = math.ceil(config.env_steps / (config.num_envs * act_steps))
    _log.info(
        "algo.steps_per_iteration is %d: algo.env_steps=%d is less than an iteration of %d.",
        steps, config.env_steps, config.steps_per_iteration,
    )  # fmt: skip
    return steps


def warn_of_saturation(share: float) -> bool:
    """Warn if clamps remove the gradient of too many terms; return whether they do."""
    if share <= SATURATED_SHARE:
        return False
    _log.warning(
        "policy/saturated_fraction is %.2f: these terms of ratios are beyond a bound, without gradient. "
        "Widen or leave out algo.log_prob_range, or algo.difference_range and algo.max_loss of FPO.",
        share,
    )
    return True


def warn_of_warmup(config: OnPolicyConfig, chunks: int, act_steps: int) -> None:
    """Warn of a run that ends before its policy begins to learn; an iteration has `chunks`.

    A budget of control steps lasts for more iterations where episodes end within chunks.
    """
    budget, control_steps = config.env_steps, chunks * act_steps
    count = config.iterations if budget is None else math.ceil(budget / control_steps)
    if count <= config.critic_warmup_iterations:
        may_last = budget is not None and act_steps > 1
        _log.warning(
            "the policy %s learn: the run has %d iterations of %s control steps%s, and "
            "algo.critic_warmup_iterations=%d of them train the critic alone.",
            "may not" if may_last else "will not", count, f"{control_steps:,}",
            " (more where episodes end within chunks)" if may_last else "", config.critic_warmup_iterations,
        )  # fmt: skip


class OnPolicy:
    """A run of PPO in progress; see `algos.base.Algorithm`.

    Args:
        config: Hyper-parameters.
        setup: Environment, seed, threads, workers, device.
        ratio: Acts and scores; holds the policy in training with its exploration sampler.
        trainable: Trained part of the policy.
        bc_term: Behaviour-cloning term towards the initial policy; None: off.
        export_policy: Returns an independent copy of the policy with its evaluation sampler.
        moments: Running observation statistics, if the normaliser is fitted during training.
        sampling: Collects in parts, with a policy that corrects sampling errors (PROPS); None: `ratio` acts.
    """

    policy: Policy
    unit = "env_steps"

    def __init__(
        self,
        config: OnPolicyConfig,
        setup: Setup,
        *,
        ratio: RatioEstimator,
        trainable: nn.Module,
        bc_term: BcTerm | None,
        export_policy: Callable[[], Policy],
        moments: Mapping[str, RunningMeanStd] | None = None,
        sampling: AdaptiveSampling | None = None,
    ) -> None:
        assert setup.env is not None
        policy = self.policy = ratio.policy.eval()  # dropped features would move the ratio
        self.config, self.ratio, self.moments, self.export_policy = config, ratio, moments, export_policy
        self.sampling = sampling
        self._bc_term = bc_term
        self._init_facts = {"seed": setup.seed, **init_facts(setup.init, policy)}
        gamma, clip = config.reward_scale_gamma, config.reward_scale_clip
        self.scaler = RewardScaler(config.num_envs, gamma=gamma, clip=clip) if config.reward_scaling else None
        self.learner = UPDATES.get(config.surrogate, update_of)(
            config,
            ratio=ratio,
            actor=list(trainable.parameters()),
            critic=self._critic(setup),
            encoder=self._encoder_weights(),
            cloning=bc_term,
            demonstrations=self._demonstrations(setup),
            recorded=self._recorded_values(setup),
            num_threads=setup.threads(THREADS),
        )
        sets = self._sets(setup.env)
        self.steps_per_iteration = steps_within_budget(config, policy.chunk.act_steps)
        warn_of_warmup(config, self.steps_per_iteration * config.num_envs, policy.chunk.act_steps)
        self.pool = setup.pool(
            policy,
            config.num_envs,
            records_simulator=config.critic_input == "simulator",
            shared_by=current(),
            same_starts=1 if sets is None else sets.group,
        )
        self.draws = GeneratorDraws(seeded_generator(setup.seed, "updates"))
        self.estimate_advantages = AdvantageEstimator(
            config.gamma, config.gae_lambda, config.reward_scale_const, config.paper_compat,
            config.critic_input, trains_encoder=config.encoder == "trained", sets=sets,
        )  # fmt: skip
        self.iteration, self.progress = 0, 0
        self.executed: int | None = None  # chunks of the iteration so far, while it is collected
        self._warned = False

    @property
    def budget(self) -> str:
        return "algo.iterations" if self.config.env_steps is None else "algo.env_steps"

    @property
    def total(self) -> int:
        """Environment steps to execute; an estimate until the last iteration ends."""
        if self.config.env_steps is not None:
            return self.config.env_steps
        left = max(0, self.config.iterations - self.iteration)
        return self.progress + left * self._longest_iteration

    @property
    def expected(self) -> int:
        """Environment steps after which the run will end, by iterations as long as those so far."""
        if self.config.env_steps is None:
            return self.total
        mean = self.progress / self.iteration if self.progress else self._longest_iteration
        return round(math.ceil(self.total / mean) * mean)

    @property
    def _longest_iteration(self) -> int:
        """Environment steps of an iteration in which no episode ends within a chunk."""
        return self.steps_per_iteration * self.config.num_envs * self.policy.chunk.act_steps

    @property
    def stage(self) -> str:
        """Where the present iteration is, e.g. `4,000 of 20,000 chunks`."""
        if self.executed is None:
            return self.learner.stage
        return f"{self.executed:,} of {self.config.num_envs * self.steps_per_iteration:,} chunks"

    @torch_threads(1)
    def advance(self) -> Metrics:
        """Run one iteration: collect, estimate advantages, update."""
        self.ratio.set_progress(self._completed_fraction())
        started = time.perf_counter()
        rollout = self.collect()
        collected = time.perf_counter()
        experience = self.experience(rollout)
        metrics: Metrics = dict(self.learner.update(experience, iteration=self.iteration, draws=self.draws))
        self._warned = self._warned or warn_of_saturation(float(metrics["policy/saturated_fraction"]))
        metrics |= rollout_metrics(rollout, experience, self.pool.env)
        if self.moments is not None:  # last: collection and updates of an iteration share their normaliser
            for name, moments in self.moments.items():
                moments.update(rollout.obs[name][:, :, -1] if name == "state" else rollout.obs[name])
                moments.apply(self.policy.normalizer, name)
        self.iteration += 1
        executed = int(rollout.length.sum())
        self.progress += executed
        finished = time.perf_counter()
        return metrics | {
            "time/rollout_s": collected - started,
            "time/update_s": finished - collected,
            "time/env_steps_per_s": executed / (finished - started),
        }

    def experience(self, rollout: Rollout) -> Experience:
        """Return the data of an iteration; images of a trained encoder are shifted, once per iteration."""
        trains = self.config.encoder == "trained"
        if trains and self.config.image_shift:
            flat = mapped(rollout.obs, lambda part: part.flatten(0, 1))
            obs = shifted(self.policy, flat, self.config.image_shift, self.draws.generator)
            shape = rollout.length.shape  # (T, N)
            rollout = replace(rollout, obs=mapped(obs, lambda part: part.unflatten(0, shape)))
        experience = self.estimate_advantages(rollout, self.policy, self.learner.critic, self.scaler)
        if not trains or self._bc_term is None:
            return experience
        frozen, obs = self._bc_term.frozen, mapped(rollout.obs, lambda part: part.flatten(0, 1))
        return replace(experience, initial_cond=encode(frozen, obs))

    def _sets(self, env: EnvConfig) -> Sets | None:
        """Return the sets of rollouts that are judged together; None: every step by itself."""
        if not self.config.set_size:
            return None
        rule = f"0 in env={env.spec.name}, whose episodes have no metric '{LABEL}', their kind"
        self.config.require("set_size", LABEL in env.spec.episode_metrics, rule)
        return Sets(self.config.set_size)

    def _demonstrations(self, setup: Setup) -> Demonstrations | None:
        weight = self.config.demo_weight
        if not weight:
            return None
        return Demonstrations(self._dataset(setup, f"demo_weight={weight:g}"), self.policy)

    def _recorded_values(self, setup: Setup) -> RecordedValues | None:
        config = self.config
        if not config.demo_value_weight:
            return None
        rule = "0 without init, for a new policy's normaliser changes while it trains"
        config.require("demo_value_weight", self.moments is None, rule)
        dataset = self._dataset(setup, f"demo_value_weight={config.demo_value_weight:g}")
        return RecordedValues(dataset, self.policy, config.gamma, self._scaled_reward)

    def _dataset(self, setup: Setup, setting: str) -> EpisodeDataset:
        """Return the demonstrations of the update; ConfigError if they are missing or of another task."""
        needs = f"demonstrations with algo.{setting}"
        dataset = dataset_of(setup, name_of("algo", self.config), needs)
        self._init_facts |= {"dataset": dataset.digest()}
        return dataset

    def _scaled_reward(self, reward: Tensor) -> Tensor:
        """Return rewards of chunks as the critic learns them."""
        scaled = reward if self.scaler is None else self.scaler.scaled(reward.double().cpu()).to(reward)
        return self.config.reward_scale_const * scaled

    def _critic(self, setup: Setup) -> nn.Module:
        config, policy = self.config, self.policy
        width = policy.encoder.cond_dim
        if config.critic_input == "simulator":
            assert setup.env is not None
            width = setup.env.spec.simulator_dim
            config.require("critic_input", width > 0, f"policy or own: {NO_STATE}")
        with seeded_weights(derive_seed(setup.seed, "critic")):
            critic: nn.Module = config.critic.build(width)
        if config.critic_input == "own":
            critic = EncodingCritic(policy, critic)
        return critic.to(setup.device, policy.dtype)

    def _encoder_weights(self) -> list[nn.Parameter]:
        """Return the weights of a trained encoder; none of a frozen one."""
        if self.config.encoder == "frozen":
            return []
        switched = isinstance(getattr(self.policy, "field", None), SwitchedField)
        rule = (
            "frozen unless algo.tuned_steps is the number of denoising steps: frozen steps would change too"
        )
        self.config.require("encoder", not switched, rule)
        return trained_encoder(self.policy)

    def _completed_fraction(self) -> float:
        """Return the completed fraction of the run, 0 to 1."""
        if self.config.env_steps is not None:
            return min(1.0, self.progress / self.config.env_steps)
        return min(1.0, self.iteration / self.config.iterations)

    def collect(self) -> Rollout:
        """Collect the chunk steps of one iteration."""
        self.executed = 0

        def count(chunks: int) -> None:
            self.executed = chunks * current().world

        steps, reset = self.steps_per_iteration, self.config.reset_each_iteration
        if self.sampling is None:
            rollout = self.pool.collect(self.pool.acting(self.ratio), steps, reset=reset, on_progress=count)
        else:
            rollout = self.sampling.collect(self.pool, steps, self.draws, reset=reset, on_progress=count)
        self.executed = None
        return rollout

    def snapshot(self) -> Policy:
        return self.export_policy().eval().requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "progress": self.progress,
            "policy": {name: value.detach().clone() for name, value in self.policy.state_dict().items()},
            "ratio": self.ratio.state_dict(),
            "learner": self.learner.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "draws": self.draws.generator.get_state(),
            "pool": self.pool.state_dict(),
            **{_moments_key(name): moments.state_dict() for name, moments in (self.moments or {}).items()},
            **self._resume_invariants(),
        }

    def _resume_invariants(self) -> dict[str, Any]:
        switch_time = getattr(getattr(self.policy, "field", None), "switch_time", None)
        return {"inner_steps": self.ratio.inner_steps, "switch_time": switch_time, **self._init_facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_unchanged(state, self._resume_invariants())
        self.policy.load_state_dict(state["policy"])
        self.ratio.load_state_dict(state.get("ratio", {}))
        self.learner.load_state_dict(state["learner"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, moments in (self.moments or {}).items():
            moments.load_state_dict(state[_moments_key(name)])
        self.draws.generator.set_state(state["draws"])
        self.pool.load_state_dict(state["pool"])
        self.iteration, self.progress = int(state["iteration"]), int(state["progress"])

    def close(self) -> None:
        self.pool.close()
        self.learner.close()


def _moments_key(name: str) -> str:
    return "moments" if name == "state" else f"{name}_moments"


def rollout_metrics(rollout: Rollout, experience: Experience, env: EnvConfig) -> Metrics:
    """Summarise the episodes that ended during an iteration; NaN without any."""
    rows = rollout.episodes
    metrics: Metrics = {
        "rollout/episodes": float(len(rows)),
        "rollout/return": _mean([row.return_ for row in rows]),
        "rollout/episode_length": _mean([float(row.length) for row in rows]),
        "rollout/chunk_reward": rollout.rewards.sum(dim=-1).mean(),
        "value/explained_variance": explained_variance(experience.value, experience.target),
    }
    if env.spec.success_rule:
        metrics["rollout/success"] = _mean([float(row.success) for row in rows])
    return metrics | led(rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
