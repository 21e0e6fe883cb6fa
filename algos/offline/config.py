"""How learning from a fixed dataset begins: settings, the actor to train, and what is refused."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup, require_one_policy, require_states_only
from algos.offline.loop import THREADS, Learner, OfflineRun
from algos.offline.overestimation import probes_of
from algos.optim import DelayedDecay, Ema
from algos.transitions import (
    Rewarding,
    TransitionTable,
    actions_for,
    box_of,
    clipped_actions,
    tabulate,
)
from envs.datasets.episodes import EpisodeDataset
from envs.fit import require_fit
from envs.spec import EnvSpec
from policies.backbones.mlp import MlpConfig
from policies.bounds import Checked
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.registry import name_of
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.base import WrappedPolicy

_log = logging.getLogger(__name__)

_BEYOND = 1e-4  # of normalised actions, that rounding may put beyond ±1
STD_MARGIN = 1e-3  # added to the deviation of every entry of the state, as in the released programs


@dataclass
class OfflineConfig(Checked):
    """Settings of every algorithm that learns from the rewards of a fixed dataset.

    Without `init` a small fully connected actor of `hidden_dims` is trained from nothing, on states of mean 0
    and deviation 1 (ReBRAC: as recorded); with it, a copy of that policy.
    """

    makes_policy: ClassVar[bool] = True  # process, backbone and the like of a new policy are its own choice

    fixed_length: ClassVar[bool] = False  # whether `steps` shapes what is learned on the way

    steps: int = 1_000_000  # gradient steps of the critic; a run may be continued with more of them
    batch_size: int = 256  # transitions
    gamma: float = 0.99  # discount per environment step
    reward_scale: float = 1.0  # rewards are scale r + shift
    reward_shift: float = 0.0  # see reward_scale
    return_range: float | None = None  # scale rewards so that returns of the data span so much; null: do not
    actor_lr: float = 3e-4  # Adam
    critic_lr: float = 3e-4  # Adam
    tau: float = 0.005  # share of the way that target weights go
    ema_decay: float = 0.0  # share of the old average of the policy's weights, which ships; 0: the weights do
    hidden_dims: tuple[int, ...] = (256, 256)  # of a new actor; ReLU
    critic_dims: tuple[int, ...] = (256, 256)  # hidden widths of a critic; ReLU
    block_steps: int = 1000  # gradient steps between two reports
    autocast: str | None = None  # bfloat16 in hidden layers, faster with AMX or AVX512_BF16; null: float32

    def __post_init__(self) -> None:
        """Check the ranges."""
        self.require("autocast", self.autocast in (None, "bfloat16"), "bfloat16 or null")
        for name in ("steps", "batch_size", "block_steps"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("gamma", 0 <= self.gamma <= 1, "in [0, 1]")
        self.require("tau", 0 < self.tau <= 1, "in (0, 1]")
        self.require("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)")
        for name in ("actor_lr", "critic_lr", "reward_scale"):
            self.require(name, 0 < getattr(self, name) < math.inf, "positive and finite")
        self.require("reward_shift", math.isfinite(self.reward_shift), "finite")
        span = self.return_range
        self.require("return_range", span is None or 0 < span < math.inf, "positive and finite, or null")
        self.require("return_range", span is None or self.reward_scale == 1, "null with algo.reward_scale")
        for name in ("hidden_dims", "critic_dims"):
            widths = tuple(getattr(self, name))
            setattr(self, name, widths)
            self.require(name, bool(widths) and min(widths) >= 1, "one or more widths, all at least 1")

    def rewarding(self, dataset: EpisodeDataset) -> Rewarding:
        """Return what is made of a reward.

        Raises:
            ConfigError: If all episodes have the same return and `return_range` is given.
        """
        scale = self.reward_scale
        if self.return_range is not None:
            span = float(dataset.returns.max() - dataset.returns.min())
            if span <= 0:
                raise ConfigError(
                    f"algo.return_range needs episodes of different returns; all {dataset.num_episodes} of "
                    f"{dataset.source} have the same. Use algo.reward_scale."
                )
            scale = self.return_range / span
            _log.info("%s: returns span %.6g; rewards are multiplied by %.6g", dataset.source, span, scale)
        return Rewarding(self.gamma, scale, self.reward_shift)

    def resume_invariants(self) -> dict[str, Any]:
        """Return what values and the constraint mean, by key: it must stay when a run is continued."""
        names = ("gamma", "reward_scale", "reward_shift", "return_range")
        return {f"algo.{name}": getattr(self, name) for name in names}

    def actor_config(self) -> PolicyConfig:
        """Return what a new actor is made of."""
        return plain_actor(DeterministicProcess(), self.hidden_dims)

    def build(self, setup: Setup) -> OfflineRun:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If there is no dataset, widths of dataset, environment and policy differ, or all
                rewards are 0.
            CapabilityError: If the policy to start from cannot be trained in this way, or the task tells its
                goal beside the state.
            DatasetError: If the dataset has no transition.
        """
        return self.build_seeds(setup, [setup.seed])[0]

    def build_seeds(self, setup: Setup, seeds: Sequence[int]) -> list[OfflineRun]:
        """Return one algorithm for each seed, as `build` would; they share the transitions.

        Args:
            setup: Its own seed is not used.
            seeds: Different ones.
        """
        if self.autocast is not None and setup.device.type == "cpu":
            warn_of_slow_bfloat16()
        with torch_threads(setup.threads(THREADS)):
            dataset, begin = self.start(setup)
            rewarding = self.rewarding(dataset)
            _require_rewards(dataset, rewarding, name_of("algo", self))
            policies = [begin(seed) for seed in seeds]
            table = tabulate(dataset.to(setup.device), policies[0], rewarding)
            probes = probes_of(table, dataset.to(setup.device), rewarding)
            runs = []
            for seed, policy in zip(seeds, policies, strict=True):
                own = replace(setup, seed=seed, num_seeds=len(seeds))
                with seeded_weights(derive_seed(seed, "learner")):
                    learner = self.learner(policy, table, own)
                ema = Ema(policy, DelayedDecay(self.ema_decay, every=1)) if self.ema_decay else None
                runs.append(
                    OfflineRun(
                        self,
                        own,
                        learner,
                        table,
                        dataset,
                        probes=probes,
                        ema=ema,
                        resume_invariants=self.resume_invariants(),
                    )
                )
            return runs

    def start(self, setup: Setup) -> tuple[EpisodeDataset, Callable[[int], Policy]]:
        """Return the dataset, its actions within the box of task or policy, and the policy of a seed."""
        algo = name_of("algo", self)
        if setup.dataset is None:
            raise ConfigError(f"algo={algo} needs transitions with rewards; got none. Give dataset=<file>.")
        dataset, advice = setup.dataset, "Use a dataset of the same task."
        spec = None if setup.env is None else setup.env.spec
        if spec is not None:
            _refuse_goals(spec, algo)
            require_fit(f"env={spec.name}", spec, dataset.source, dataset, advice=advice)
        if setup.init is not None:
            _refuse_several(setup.init, algo)
            require_states_only(setup.init, algo)
            require_fit("the policy of init", setup.init, dataset.source, dataset, advice=advice)
            init = setup.init
            dataset = actions_for(dataset, init, spec)
            return dataset, lambda _: init.clone().to(setup.device).train().requires_grad_(True)
        box = box_of(dataset, spec)
        dataset = clipped_actions(dataset, box)
        statistics = {"state": _state_statistics(dataset), "action": box}

        def begin(seed: int) -> Policy:
            policy = build_policy(
                self.actor_config(),
                obs_dim=dataset.obs_dim,
                action_dim=dataset.action_dim,
                statistics=statistics,
                seed=derive_seed(seed, "actor"),
            )
            return policy.to(setup.device).train()

        return dataset, begin

    @abstractmethod
    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> Learner:
        """Return what learns; torch's global generator is seeded for its initial weights."""


def warn_of_slow_bfloat16() -> None:
    """Warn where the CPU has no instructions for products of bfloat16; old releases of torch do not tell."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if known.get("architecture") == "x86_64" and not (known["amx_bf16"] or known["avx512_bf16"]):
        _log.warning(
            "algo.autocast=bfloat16 is slower than float32 on this CPU (%s), which has neither AMX nor "
            "AVX512_BF16. Leave algo.autocast out.",
            known.get("cpu_name", "unknown"),
        )


def _require_rewards(dataset: EpisodeDataset, rewarding: Rewarding, algo: str) -> None:
    """Refuse rewards that are all 0, and warn of constant ones where no end of the task tells actions apart.

    Raises:
        ConfigError: If all are 0 after `reward_scale` and `reward_shift`.
    """
    least, most = (float(bound) for bound in dataset.rewards.aminmax())
    given = rewarding.scale * least + rewarding.shift
    if least != most or (given and bool(dataset.over.any())):
        return
    changed = f" ({given:g} with algo.reward_scale and algo.reward_shift)" if given != least else ""
    found = f"{dataset.source}: all {len(dataset)} rewards are {least:g}{changed}"
    advice = "Use data with rewards (of OGBench: reader.task=<single task>), or algo=bc, which needs none."
    if given == 0:
        raise ConfigError(
            f"{found}; algo={algo} learns from rewards, and has nothing to learn here. {advice}"
        )
    _log.warning(
        "%s, and the task never ends, so all actions are worth the same to algo=%s. %s", found, algo, advice
    )


def warn_of_reach(table: TransitionTable, setup: Setup, algo: str) -> None:
    """Tell of recorded actions that a policy to start from normalises beyond ±1, where actions are cut off.

    Args:
        table: Encoded for that policy.
        setup: Of the run.
        algo: Its name.
    """
    if setup.init is None or setup.dataset is None:
        return
    beyond = float((table.action.abs() > 1 + _BEYOND).float().mean())
    if beyond:
        _log.warning(
            "%s: %.2g %% of the action entries lie beyond ±1 as the policy of init normalises them (%s), and "
            "algo=%s cuts off what it compares with them there. Start from a policy of these data that "
            "was cloned with policy.normalizer.action=limits.",
            setup.dataset.source, 100 * beyond, setup.init.normalizer.modes["action"], algo,
        )  # fmt: skip


def _refuse_goals(spec: EnvSpec, algo: str) -> None:
    """Refuse a task that tells its goal beside the state, for what is trained here is not told.

    Raises:
        CapabilityError: If it does.
    """
    if spec.goal_dim:
        raise CapabilityError(
            f"algo={algo} learns from states; env={spec.name} tells its goal beside them. Use "
            f"env.goal=appended, where goals of the dataset end the states as well."
        )


def _refuse_several(policy: Policy, algo: str) -> None:
    """Refuse a policy that is made of policies: only one with weights of its own is trained.

    Raises:
        CapabilityError: If it is a composition, or something stands in front of it.
    """
    require_one_policy(policy, algo)
    if isinstance(policy, WrappedPolicy):
        raise CapabilityError(
            f"algo={algo} trains one policy; init has '{name_of('wrapper', policy.wrapper)}' on top. Train "
            f"the policy below, then put it on top again."
        )


def plain_actor(process: Any, hidden_dims: tuple[int, ...]) -> PolicyConfig:
    """Return a policy of single actions on standardised states."""
    return PolicyConfig(
        process=process,
        backbone=MlpConfig(residual=False, hidden_dims=hidden_dims),
        horizon=1,
        act_steps=1,
        normalizer={"state": "gaussian", "action": "limits"},
        observation_clip=None,
    )


def _state_statistics(dataset: EpisodeDataset) -> dict[str, Tensor]:
    """Return moments of the states that transitions start from; the deviation is raised by a margin."""
    states = dataset.transitions().observations.double()
    std = states.std(dim=0, correction=0) + STD_MARGIN
    moments = {"mean": states.mean(dim=0), "std": std, "min": states.amin(0), "max": states.amax(0)}
    return {name: value.float() for name, value in moments.items()}
