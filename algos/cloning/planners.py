"""Planners: cloning of whole trajectories, which are sampled towards a goal, a value or a return.

Legend: H rows of a plan, O and A widths of state and action, x a plan, t time, G_i return to go from row i::

    diffuser          mean W (f(x_t, t) - target)^2  +  (V(x_t, t) - G_0)^2
                      rows [a, s]; W = action_weight for the first action, 1 otherwise
    decision_diffuser mean (f(x_t, t, y) - target)^2  +  mean (inverse(s_i, s_{i+1}) - a_i)^2
                      rows s; y = 1 + (G_0 - min G) / (max G - min G), 0 with probability `label_dropout`

x_t holds the known entries clean (`policies.wrappers.planner`), and they have no loss. A window's goal is
the state in its last row. Returns run to the end of the episode; V is learned in units of their deviation.

Source: Diffuser (arXiv 2205.09991), Decision Diffuser (arXiv 2211.15657), released code. Deviations: windows
lie inside their episodes, where the releases append zeros; the value and the inverse dynamics are trained at
once with the plans, on the same draws; the network predicts what `process.prediction` says, clean plans by
default; returns are scaled by the data, and an unknown return is the number 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algos.base import Setup, dataset_of, require_one_policy
from algos.bc import THREADS, Bc, BcConfig
from algos.cloning.batches import CloningBatch, WindowSampler
from algos.cloning.validation import masked_mean
from envs.datasets.episodes import EpisodeDataset
from policies.bounds import bounded
from policies.build import build_policy, complete
from policies.errors import CapabilityError, ConfigError, DatasetError
from policies.policy_config import ChunkSpec
from policies.protocols import TE
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.planner import Planner, PlannerPolicy, denoises_plans

_LEARNED = {
    "inverse_dims": "the inverse dynamics",
    "value_widths": "the value (algo.value_widths)",
    "label": "the condition on returns (algo.returns)",
}
"""What a planner has or lacks, by the field of `Planner`."""
_ACTING = ("label", "temperature", "plans", "guide_scale", "guide_repeats", "guide_rest")
"""Fields of `Planner` that no weights depend on."""


@dataclass
class PlanningConfig(BcConfig):
    """What both planners share."""

    pad_end: bool = False  # windows past the end of an episode (masked)
    validation_fraction: float = bounded(0.0, ge=0, lt=1)  # of episodes; sampling their plans takes long
    gamma: float = bounded(0.99, gt=0, le=1)  # discount of returns per control step

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, absent in (("teacher", self.teacher is None), ("dp_compat_mean", not self.dp_compat_mean)):
            self.require(name, absent, "left out")

    def build(self, setup: Setup) -> Planning:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If the dataset is missing, sizes or modes of the normaliser differ.
            DatasetError: If no episode holds a whole plan.
            CapabilityError: If `init` is no planner of these networks, or the process has no plain loss.
        """
        with torch_threads(setup.threads(THREADS)):
            return Planning(self, setup)

    @abstractmethod
    def planner(self, dataset: EpisodeDataset, sizes: Mapping[str, Any]) -> Planner:
        """Return the wrapper of a new policy; `dataset` holds returns."""

    @abstractmethod
    def with_returns(self, dataset: EpisodeDataset) -> EpisodeDataset:
        """Return the dataset with what training reads of returns, as extra keys (N, 1)."""

    def inner(self) -> dict[str, Any]:
        """Return settings of the policy that denoises the plans."""
        return {"goal_dropout": 0.0, "guidance": 1.0}

    def continued(self, init: PlannerPolicy, dataset: EpisodeDataset) -> PlannerPolicy:
        """Return `init`, which acts by these settings.

        Raises:
            CapabilityError: If it has other networks or conditions than this algorithm trains.
        """
        before = init.wrapper
        sizes = {name: getattr(before, name) for name in ("obs_dim", "action_dim", "goal_dim", "normalizer")}
        new = self.planner(dataset, sizes)
        for field, what in _LEARNED.items():
            if bool(wanted := getattr(new, field)) != bool(getattr(before, field)):
                needs, has = ("needs", "lacks") if wanted else ("does not train", "has")
                raise CapabilityError(
                    f"algo={name_of('algo', self)} {needs} {what} with these settings, and init {has} it. "
                    "Continue a planner by the algorithm that made it, with its settings."
                )
        policy = init.with_fields(**{name: getattr(new, name) for name in _ACTING})
        return policy if new.label is None else policy.with_guidance(self.inner()["guidance"])

    def starting_policy(self, setup: Setup, dataset: EpisodeDataset) -> PlannerPolicy:
        """Return `init`, or a new policy."""
        algo = name_of("algo", self)
        if setup.init is not None:
            if not isinstance(setup.init, PlannerPolicy):
                raise CapabilityError(
                    f"algo={algo} continues planners; init is a {type(setup.init).__name__}. Leave it out."
                )
            require_one_policy(setup.init.base, algo)
            return self.continued(setup.init, dataset)
        config, recorded = complete(setup.policy), dataset.extras.get("goal")
        if not denoises_plans(config.process):
            raise CapabilityError(
                f"algo={algo} denoises trajectories; got process={name_of('process', config.process)}. Use "
                "process=diffusion, flow or edm, or algo=bc for this policy."
            )
        mode = config.normalizer.get("action", "limits")
        if config.normalizer.get("state", mode) != mode:
            raise ConfigError(
                f"algo={algo} denoises states and actions together: policy.normalizer.state and .action must "
                f"be the same; got {config.normalizer}."
            )
        goal = (
            setup.env.spec.goal_dim if setup.env is not None else 0 if recorded is None else recorded.shape[1]
        )
        sizes = {"obs_dim": dataset.obs_dim, "action_dim": dataset.action_dim, "goal_dim": goal}
        planner = self.planner(dataset, {**sizes, "normalizer": mode})
        labels = int(planner.label is not None)
        modes = {"action": "identity"} | ({"goal": "identity"} if labels else {})
        config = replace(config, normalizer=modes, observation_clip=None, **(self.inner() if labels else {}))
        seed = derive_seed(setup.seed, "plans")
        base = build_policy(config, obs_dim=0, action_dim=planner.row_dim, goal_dim=labels, seed=seed)
        with seeded_weights(derive_seed(setup.seed, "planner")):
            policy = planner.wrap(base)
        policy.fit(dataset.statistics())
        return policy


@register("algo", "diffuser")
@dataclass
class DiffuserConfig(PlanningConfig):
    """Plans of states and actions, guided by a value.

    Source:
        Diffuser (arXiv 2205.09991).
    """

    action_weight: float = bounded(10.0, gt=0)  # loss weight of the first action
    value_widths: tuple[int, ...] = bounded((32, 64, 128), ge=1)  # channels per level of the value; []: none
    plans: int = bounded(16, ge=1)  # plans per decision, of which the most valuable is executed
    guide_scale: float = bounded(0.1, ge=0)  # step along the value's slope
    guide_repeats: int = bounded(2, ge=0)  # moves per denoising step
    guide_rest: int = bounded(2, ge=0)  # last denoising steps without moves
    failure_cost: float = bounded(100.0, ge=0)  # subtracted from the reward at a termination

    def unused(self) -> dict[str, str]:
        names = ("guide_scale", "guide_repeats", "guide_rest", "failure_cost", "gamma")
        guided = {} if self.value_widths else dict.fromkeys(names, "without algo.value_widths")
        return super().unused() | guided

    def planner(self, dataset: EpisodeDataset, sizes: Mapping[str, Any]) -> Planner:
        return Planner(
            **sizes,
            value_widths=self.value_widths,
            plans=self.plans,
            guide_scale=self.guide_scale,
            guide_repeats=self.guide_repeats,
            guide_rest=self.guide_rest,
        )

    def with_returns(self, dataset: EpisodeDataset) -> EpisodeDataset:
        if not self.value_widths:
            return dataset
        if dataset.num_frames < 2:
            raise DatasetError(
                f"{dataset.source} holds one frame, and a value compares returns of several. Record more, or "
                "use algo.value_widths=[] algo.plans=1."
            )
        cost = self.failure_cost * dataset.terminated.to(dataset.rewards)
        to_go = replace(dataset, rewards=dataset.rewards - cost).returns_to_go(self.gamma)
        scaled = (to_go - to_go.mean()) / to_go.std().clamp(min=1e-6)
        return with_extras(dataset, to_go=scaled[:, None])


@register("algo", "decision_diffuser")
@dataclass
class DecisionDiffuserConfig(PlanningConfig):
    """Plans of states, conditioned on their return, and inverse dynamics.

    Source:
        Decision Diffuser (arXiv 2211.15657).
    """

    inverse_dims: tuple[int, ...] = bounded((256, 256), ge=1)  # hidden widths of the inverse dynamics; ReLU
    temperature: float = bounded(0.5, ge=0)  # scale of all noise when acting
    returns: bool = True  # condition on returns; false: on start and goal alone
    label_dropout: float = bounded(0.25, gt=0, lt=1)  # share of rows without return
    guidance: float = bounded(1.2, ge=0)  # weight of the return when acting; 0: without it
    wanted: float = bounded(0.9, gt=0, le=1)  # quantile of the data's returns that the policy asks for

    def unused(self) -> dict[str, str]:
        names = ("label_dropout", "guidance", "wanted", "gamma")
        return super().unused() | ({} if self.returns else dict.fromkeys(names, "without algo.returns"))

    def inner(self) -> dict[str, Any]:
        return {"goal_dropout": self.label_dropout, "guidance": self.guidance}

    def planner(self, dataset: EpisodeDataset, sizes: Mapping[str, Any]) -> Planner:
        label = float(np.quantile(dataset.extras["label"], self.wanted)) if self.returns else None
        return Planner(**sizes, inverse_dims=self.inverse_dims, temperature=self.temperature, label=label)

    def with_returns(self, dataset: EpisodeDataset) -> EpisodeDataset:
        if not self.returns:
            return dataset
        to_go = dataset.returns_to_go(self.gamma)
        low, high = to_go.aminmax()
        if low == high:
            raise ConfigError(f"{dataset.source}: all returns are {float(low):g}. Use algo.returns=false.")
        return with_extras(dataset, label=(1 + (to_go - low) / (high - low))[:, None])


class Planning(Bc):
    """A run of a planner; see `DiffuserConfig` and `DecisionDiffuserConfig`."""

    config: PlanningConfig
    policy: PlannerPolicy

    def __init__(self, config: PlanningConfig, setup: Setup) -> None:
        dataset = config.with_returns(dataset_of(setup, name_of("algo", config), "episodes"))
        policy = config.starting_policy(setup, dataset)
        dataset = with_last_states(dataset, policy.chunk.horizon, policy.goal_dim)
        self._weight = torch.ones(policy.base.chunk.shape, device=setup.device)
        if isinstance(config, DiffuserConfig):
            self._weight[0, : dataset.action_dim] = config.action_weight
        super().__init__(config, replace(setup, init=policy, dataset=dataset, env=None))

    def _windows(self, dataset: EpisodeDataset) -> WindowSampler:
        policy = self.policy
        return PlanWindows(dataset, policy.chunk, pad_end=self.config.pad_end, goal_dim=policy.goal_dim)

    def _loss(self, batch: CloningBatch, te: TE) -> Tensor:
        """Return the losses of plans, inverse dynamics and values, averaged over recorded rows."""
        cond, rows, te = self._inputs(batch, te)
        policy = self.policy
        loss = (self._weight * policy.matching_loss(cond, rows, te, reduce="none")).mean(dim=-1)
        if policy.inverse is not None:
            has_next = F.pad(batch.mask[:, 1:], (0, 1))  # padding repeats the last state
            loss = loss + policy.inverse_loss(rows) * has_next
        if policy.value is not None:
            time = cast(Any, policy.base).process.net_time(te.t)
            value = policy.value(policy.corrupted(rows, te), time)
            loss = loss + (value - batch.obs["to_go"][:, 0]).square()[:, None]
        return masked_mean(loss, batch.mask)


class PlanWindows(WindowSampler):
    """Windows whose chunks hold actions and states, (B, H, A + O), with returns and labels beside them."""

    def __init__(self, dataset: EpisodeDataset, chunk: ChunkSpec, *, pad_end: bool, goal_dim: int) -> None:
        rows = replace(dataset, actions=torch.cat([dataset.actions, dataset.observations], dim=1))
        wide = replace(chunk, action_dim=rows.action_dim)
        super().__init__(rows, wide, pad_end=pad_end, goal_dim=goal_dim)
        kept = {key: dataset.extras[key] for key in ("to_go", "label") if key in dataset.extras}
        self._beside = {key: values[self.frames] for key, values in kept.items()}

    def gather(self, index: Tensor) -> CloningBatch:
        batch = super().gather(index)
        return replace(batch, obs={**batch.obs, **{key: v[index] for key, v in self._beside.items()}})


def with_extras(dataset: EpisodeDataset, **extras: Tensor) -> EpisodeDataset:
    """Return the dataset with further keys per frame."""
    return replace(dataset, extras={**dataset.extras, **extras})


def with_last_states(dataset: EpisodeDataset, rows: int, width: int) -> EpisodeDataset:
    """Return the dataset whose goals are the first entries of the state `rows` - 1 frames on, or the last."""
    if not width:
        return dataset
    last = (dataset.episode_start[1:] - 1).repeat_interleave(dataset.lengths)
    frame = torch.minimum(torch.arange(dataset.num_frames, device=last.device) + rows - 1, last)
    return with_extras(dataset, goal=dataset.observations[frame, :width])
