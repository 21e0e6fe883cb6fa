"""`experiment=auto`: sizes of a run from episode length, control rate and amount of data.

The choices become ordinary overrides before those that were typed, so that a run directory holds plain values
and a typed key wins. They are starting points: what small budgets on two processor cores needed in the
studies of docs/results, written as rules.

Legend: T control steps of an episode, Ta executed actions of a chunk, D = T / Ta decisions of an episode,
N frames of the dataset.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from algos.bc import BcConfig
from algos.dppo import DppoConfig
from algos.dsrl import DsrlConfig
from algos.offpolicy.config import OffPolicyConfig
from algos.onpolicy.config import OnPolicyConfig
from algos.ppo import PpoConfig
from algos.reinflow import ReinFlowConfig
from burnish.config.overrides import Overrides, quoted
from burnish.config.train import TrainConfig
from burnish.runs.locate import Located
from envs.datasets import read_dataset
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError

EXPERIMENT = "auto"
_FEW_FRAMES, _FEW_EPISODES = 20_000, 50
_PASSES = 200  # over the data
_STEPS = (5_000, 20_000)  # gradient steps of cloning, at least and at most
_EVALUATED = 25_000  # control steps of an evaluation, about
_LONGEST_PART = 500  # control steps of every environment in an iteration, at most
_ITERATIONS = 60  # of on-policy learning
_MINIBATCHES = 4  # per epoch
_LEARNED_EPISODES = 300  # of off-policy learning, at full length
_SECONDS = 0.1  # duration of a chunk [s]
_REPLACES = {"algo.env_steps": "algo.iterations", "algo.steps": "algo.epochs"}  # key -> the same budget

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One key with its value and the reason."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Facts:
    """What choices depend on.

    Args:
        length: T of the task, else the mean length of recorded episodes.
        hz: Control rate [Hz]; None: unknown.
        has_success: Whether the task defines success.
        frames, episodes: Size of the dataset; None: no dataset.
        act_steps: Ta of the policy to start from, or typed; None: it is chosen.
        is_new: Whether a new policy is made.
        has_steps: Whether the policy to start from denoises in any number of steps.
    """

    length: int
    hz: float | None = None
    has_success: bool = False
    frames: int | None = None
    episodes: int | None = None
    act_steps: int | None = None
    is_new: bool = True
    has_steps: bool = False


def is_auto(typed: Overrides) -> bool:
    """Return whether the sizes of a run are to be chosen."""
    return typed.value("experiment") == EXPERIMENT


def with_choices(config: TrainConfig, typed: Overrides, init: Located | None) -> Overrides:
    """Return the overrides with the choices for a composed configuration; logs each with its reason.

    Raises:
        ConfigError: If there is neither task nor dataset.
        DatasetError: If the dataset cannot be read.
    """
    fixed = set(typed.keys)
    facts = facts_of(config, init, fixed)
    choices = [choice for choice in choose(config.algo, facts, fixed) if _is_open(choice, fixed)]
    for choice in choices:
        _log.info("auto: %s=%s: %s.", choice.key, quoted(choice.value), choice.reason)
    chosen = Overrides.parse(f"{choice.key}={quoted(choice.value)}" for choice in choices)
    return chosen + typed.without("experiment")


def _is_open(choice: Choice, fixed: Collection[str]) -> bool:
    """Return whether a key was not typed, nor another one that it would replace."""
    return choice.key not in fixed and _REPLACES.get(choice.key) not in fixed


def facts_of(config: TrainConfig, init: Located | None, fixed: Collection[str] = ()) -> Facts:
    """Return the facts of a composed configuration; `fixed` are the keys that were typed."""
    if config.env is None and config.dataset is None:
        raise ConfigError(
            "experiment=auto derives sizes from a task or a dataset. Give env=<task> or dataset=<file>."
        )
    data = None if config.dataset is None else read_dataset(config.dataset, **config.reader)
    spec = None if config.env is None else config.env.spec
    policy = None if init is None else init.load()
    is_given = policy is None and bool({"policy.horizon", "policy.act_steps"} & set(fixed))
    executed = None if policy is None else policy.chunk.act_steps
    recorded = 0 if data is None else round(float(data.lengths.float().mean()))
    return Facts(
        length=recorded if spec is None else spec.max_episode_steps,
        hz=config.control_hz if spec is None else spec.control_hz,
        has_success=spec is not None and bool(spec.success_rule),
        frames=None if data is None else len(data),
        episodes=None if data is None else data.num_episodes,
        act_steps=config.policy.act_steps if is_given else executed,
        is_new=policy is None,
        has_steps=isinstance(policy, DenoisingPolicy) and hasattr(policy.sampler, "steps"),
    )


def choose(algo: Any, facts: Facts, fixed: Collection[str] = ()) -> list[Choice]:
    """Return the choices for an algorithm's configuration, in the order in which they are logged.

    Choices that depend on others use the value of a key in `fixed`.
    """
    choices = list(_evaluation(facts))
    if isinstance(algo, BcConfig):
        choices += _cloning(facts)
    elif isinstance(algo, OnPolicyConfig):
        choices += _on_policy(algo, facts, fixed)
    elif isinstance(algo, OffPolicyConfig):
        choices += _off_policy(algo, facts, fixed)
    return choices


def _evaluation(facts: Facts) -> Iterator[Choice]:
    episodes = min(max(_EVALUATED // facts.length, 20), 100)
    yield Choice("evaluation.episodes", episodes, f"episodes of up to {facts.length} control steps")


def _cloning(facts: Facts) -> Iterator[Choice]:
    yield from _new_policy(facts)
    if facts.frames is None or facts.episodes is None:
        return
    batch = 128 if facts.frames < _FEW_FRAMES else 256
    yield Choice("algo.batch_size", batch, f"{facts.frames:,} frames")
    steps = min(max(_rounded(_PASSES * facts.frames / batch), _STEPS[0]), _STEPS[1])
    yield Choice(
        "algo.steps", steps, f"{steps * batch / facts.frames:.0f} passes over {facts.frames:,} frames"
    )
    if facts.episodes < _FEW_EPISODES:
        few = f"{facts.episodes} episodes are few"
        yield Choice("algo.validation_fraction", 0.0, f"{few}, and all are needed")
        if facts.is_new:
            yield Choice("policy.observation_clip", 2.0, f"{few}: their range is hardly that of the task")


def _new_policy(facts: Facts) -> Iterator[Choice]:
    if not facts.is_new:
        return
    chunk = _chunk(facts) if facts.act_steps is None else facts.act_steps
    rate = "an unknown rate" if facts.hz is None else f"{facts.hz:.4g} Hz"
    reason = f"about {_SECONDS} s at {rate}, 4 to 8 actions" if chunk > 1 else "nothing shows longer actions"
    yield Choice("policy.horizon", chunk, reason)
    yield Choice("policy.act_steps", chunk, "the whole chunk is executed, as RL on chunks needs")


def _chunk(facts: Facts) -> int:
    """Return the length of a chunk of about `_SECONDS`, 4 or 8 actions."""
    return 8 if facts.hz is not None and round(_SECONDS * facts.hz) >= 8 else 4


def _on_policy(algo: OnPolicyConfig, facts: Facts, fixed: Collection[str]) -> Iterator[Choice]:
    if facts.is_new:
        facts = replace(facts, act_steps=1 if facts.act_steps is None else facts.act_steps)
        yield Choice(
            "policy.normalizer.state", "gaussian", "moments of the observations are learned on the way"
        )
    act_steps = _chunk(facts) if facts.act_steps is None else facts.act_steps
    yield from _new_policy(facts)
    decisions = math.ceil(facts.length / act_steps)
    steps = min(2 * decisions, max(_LONGEST_PART // act_steps, 1))
    steps = algo.steps_per_iteration if "algo.steps_per_iteration" in fixed else steps
    envs = 20 if steps >= 2 * decisions else 40
    envs = algo.num_envs if "algo.num_envs" in fixed else envs
    whole = f"{decisions} chunks of {act_steps} actions are an episode"
    yield Choice("algo.num_envs", envs, f"an iteration of {envs * steps * act_steps:,} control steps")
    yield Choice("algo.steps_per_iteration", steps, whole)
    if steps >= decisions:
        yield Choice("algo.reset_each_iteration", True, "an iteration holds whole episodes")
    per_iteration = envs * steps * act_steps
    yield Choice("algo.env_steps", _ITERATIONS * per_iteration, f"{_ITERATIONS} iterations")
    iterations = _ITERATIONS
    if "algo.env_steps" in fixed and algo.env_steps is not None:
        iterations = math.ceil(algo.env_steps / per_iteration)
    elif "algo.iterations" in fixed:
        iterations = algo.iterations
    inner = algo.tuned_steps if isinstance(algo, DppoConfig) else 1
    yield Choice(
        "algo.batch_size",
        max(envs * steps * inner // _MINIBATCHES, 2),
        f"{_MINIBATCHES} minibatches per epoch",
    )
    yield Choice("algo.update_epochs", 10, "few iterations, used well")
    yield Choice("algo.gamma", _discount(decisions, 0.99), f"{decisions} decisions")
    yield from _learning_rates(facts, iterations)
    yield from _of_algorithm(algo, facts, iterations)


def _learning_rates(facts: Facts, iterations: int) -> Iterator[Choice]:
    rate, final, reason = 1e-4, 1e-5, "a task without success"
    if facts.is_new or facts.has_success:
        rate, final = 3e-4, 3e-5
        reason = "a new policy" if facts.is_new else "a task with success"
    yield Choice("algo.actor_lr", rate, reason)
    yield Choice("algo.actor_min_lr", final, "the rate falls to a tenth")
    yield Choice("algo.actor_lr_cycle", iterations + 5, "iterations, five more than the run has")


def _of_algorithm(algo: OnPolicyConfig, facts: Facts, iterations: int) -> Iterator[Choice]:
    if type(algo) is PpoConfig and facts.is_new:
        yield Choice("process", "gaussian", "an action is one draw, with its density")
        yield Choice("algo.clip_range", 0.2, "nothing is to be kept")
        yield Choice("algo.log_prob_range", None, "nothing is to be kept")
        yield Choice("algo.log_prob_reduction", "joint", "the density of the whole action")
    if isinstance(algo, DppoConfig) and facts.has_success and not facts.is_new:
        few = "a short run; the published range is for a thousand iterations"
        yield Choice("algo.clip_range", 0.03, few)
        yield Choice("algo.clip_range_base", 0.03, few)
        warmup, none = min(2, iterations // 5), "the run has too few iterations for one"
        noisy = "the first advantages of a new critic are noise" if warmup else none
        yield Choice("algo.critic_warmup_iterations", warmup, noisy)
        yield Choice("algo.actor_lr_warmup", warmup, "the critic's warm-up comes first" if warmup else none)
    elif iterations < _ITERATIONS:
        yield Choice("algo.actor_lr_warmup", iterations // 6, f"{iterations} iterations")
    if isinstance(algo, ReinFlowConfig):
        yield Choice("algo.clip_state", 1.0, "as published; otherwise means leave the box of actions")
        yield Choice("algo.entropy_coef", 0.0, "the deviations of a clone suffice")
        yield Choice("algo.target_kl", 0.001, "of a mean over the chain; updates run away without")
        yield Choice("algo.critic_lr", 1e-3, "few iterations")
        yield Choice("algo.critic_min_lr", None, "few iterations")


def _off_policy(algo: OffPolicyConfig, facts: Facts, fixed: Collection[str]) -> Iterator[Choice]:
    total = min(max(_rounded(_LEARNED_EPISODES * facts.length), 30_000), 100_000)
    yield Choice("algo.total_steps", total, f"{total // facts.length} episodes of full length")
    total = algo.total_steps if "algo.total_steps" in fixed else total
    yield Choice("algo.warmup_steps", total // 10, "a tenth")
    yield Choice("algo.gamma", _discount(facts.length, 0.98), f"{facts.length} control steps")
    yield Choice("algo.batch_size", 128, "small networks on a processor")
    yield Choice("algo.critic_dims", [128, 128, 128], "small networks on a processor")
    yield Choice("algo.updates_per_step", 0.5, "two updates per chunk of four")
    yield Choice("algo.tau", 0.01, "few updates")
    yield Choice("algo.init_alpha", 0.01, "little entropy, for a success worth 1")
    yield Choice("algo.entropy_in_target", False, "values stay those of the task")
    if isinstance(algo, DsrlConfig):
        if facts.has_steps:
            yield Choice("algo.denoising_steps", 4, "four evaluations per decision")
        yield Choice("algo.distillation_latents", "mixture", "half of them where the actor is")
        yield Choice("algo.steering.adapter", "row_repeat", "one row of noise for a chunk")
        yield Choice("algo.steering.hidden_dims", [128, 128, 128], "small networks on a processor")


def _discount(steps: int, lowest: float) -> float:
    """Return a discount whose horizon is an episode of `steps`, from `lowest` to 0.999."""
    return round(min(max(1.0 - 1.0 / steps, lowest), 0.999), 4)


def _rounded(value: float) -> int:
    return math.ceil(value / 1000) * 1000
