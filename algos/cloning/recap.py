"""RECAP: cloning of data of mixed quality, conditioned on whether an action was better than usual.

Legend: N frames, G_t return to go, c the largest |G| of the data, V value of a state in [-1, 1], atoms the
places of its categorical distribution, n = min(lookahead, frames left), q the share of positive labels::

    V loss = - sum over atoms of two_hot(G_t / c) log p(s_t),   V = sum p atom
    A_t    = (sum over k < n of gamma^k r_{t+k}) / c + gamma^n V(s_{t+n}) - V(s_t),   0 after the end
    l_t    = 1 where A_t is at least the quantile 1 - q of A over all frames, else -1
    policy = matching loss with the condition l_t, replaced by 0 with probability `label_dropout`

First V is fitted, then all frames are labelled, then the policy is cloned. No gradient of a value reaches the
policy. Rewards are recorded ones, or with `rewards=steps` -1 per frame, 0 for the last one of a success and
-failure_cost for that of a failure.

Source: pi*0.6, arXiv 2511.14759, from its description and a public re-implementation. Deviations: one scale c
for returns, rewards and values, where the re-implementation normalises rewards by another one; the value is a
network of the policy's features, not a model of language and images; no row is positive whatever its
advantage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algos.base import Metrics, Setup, dataset_of, goal_dim_of, require_one_policy
from algos.bc import THREADS, Bc, BcConfig
from algos.cloning.advantage_labels import advantages, is_positive, require_unequal, step_rewards, two_hot
from algos.cloning.batches import WindowSampler
from algos.onpolicy.requirements import algorithms_for
from algos.optim import adam, descend, load_parts, save_parts
from algos.training.observations import encode
from algos.training.ranks import current
from algos.training.serialization import capture_generator, restore_generator
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import DECISION
from policies.bounds import bounded
from policies.build import build_policy, complete
from policies.errors import CapabilityError, ConfigError
from policies.networks.mlp_blocks import TrunkConfig
from policies.policy import Policy
from policies.registry import lookup, name_of, register
from policies.seeds import derive_seed, seeded_generator, seeded_weights
from policies.storage.config_json import describe, rebuild
from policies.threads import torch_threads
from policies.wrappers.advantage import Advantage, AdvantagePolicy

REWARDS = ("recorded", "steps")
_ENCODED_AT_ONCE = 65_536
_PARTS = ("value", "value_optimizer")
_OF_LABELS = (
    *("value_steps", "gamma", "rewards", "failure_cost", "lookahead", "positive_fraction"),
    "negative_label",
)
"""Settings that stay what they were when a run is resumed: all frames are labelled once."""


def with_goal(policy: Policy, width: int, dropout: float = 0.0) -> Policy:
    """Return a copy with a new goal; its weights are 0, so that it has no effect yet."""
    described = describe(policy)
    modes = described["normalizer"] | {"goal": "identity"}
    given = {"goal_dim": width, "goal_dropout": dropout, "guidance": 1.0, "normalizer": modes}
    wide = rebuild(described | given)
    own, weights = policy.state_dict(), wide.state_dict()
    for name, value in own.items():
        weights[name] = F.pad(value, (0, weights[name].shape[-1] - value.shape[-1])) if value.ndim else value
    wide.load_state_dict(weights)
    return wide.to(policy.device, policy.dtype)


@register("algo", "recap")
@dataclass
class RecapConfig(BcConfig):
    """Advantage-conditioned cloning.

    Source:
        arXiv 2511.14759.
    """

    value_steps: int = bounded(2000, ge=1)  # gradient steps of the value, before those of the policy
    value_lr: float = bounded(3e-4, gt=0)  # Adam
    value_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of the value; ReLU
    num_bins: int = bounded(201, ge=2)  # atoms of the value's distribution
    gamma: float = bounded(1.0, gt=0, le=1)  # discount per control step
    rewards: str = bounded("recorded", choices=REWARDS)  # steps: -1 per step, 0 at success
    failure_cost: float = bounded(300.0, ge=0)  # of rewards=steps, at the last step of a failed episode
    lookahead: int = bounded(10, ge=1)  # steps of an advantage before the value
    positive_fraction: float = bounded(0.3, gt=0, lt=1)  # q
    negative_label: bool = True  # -1 for the others; false: they have no label, as if it were dropped
    label_dropout: float = bounded(0.1, gt=0, lt=1)  # share of rows without label
    guidance: float = bounded(1.0, ge=0)  # weight of the label when acting; 0: without label

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("teacher", self.teacher is None, "null")

    def unused(self) -> dict[str, str]:
        cost = {} if self.rewards == "steps" else {"failure_cost": "without algo.rewards=steps"}
        return super().unused() | cost

    def build(self, setup: Setup) -> Recap:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If the dataset is missing, sizes differ, there is a goal, or all returns are equal.
            CapabilityError: If the policy has no denoising process.
        """
        with torch_threads(setup.threads(THREADS)):
            return Recap(self, setup)

    def starting_policy(self, setup: Setup, dataset: EpisodeDataset) -> Policy:
        """Return the policy inside `init` if it has a label, else a copy with one, or a new policy."""
        algo, init = name_of("algo", self), setup.init
        if goal_dim_of(setup, dataset):
            raise ConfigError(f"algo={algo} puts a label where goals are; got a policy or task with a goal.")
        if init is not None:
            require_one_policy(init, algo)
            _require_guidance(init, algo, init.base if isinstance(init, AdvantagePolicy) else init)
            if not isinstance(init, AdvantagePolicy):
                return with_goal(init, 1, self.label_dropout)
            start: Any = init.base.clone()
            start.config = replace(start.config, goal_dropout=self.label_dropout, guidance=1.0)
            return start
        config = complete(setup.policy)
        _require_guidance(None, algo, lookup("policy_class", config.process.policy_class), config.process)
        modes = config.normalizer | {"goal": "identity"}
        config = replace(config, goal_dropout=self.label_dropout, guidance=1.0, normalizer=modes)
        return build_policy(
            config,
            obs_dim=dataset.obs_dim,
            action_dim=dataset.action_dim,
            goal_dim=1,
            images=dataset.image_shapes,
            statistics=dataset.statistics(),
            seed=derive_seed(setup.seed, "labelled policy"),
        )


def _require_guidance(policy: Policy | None, algo: str, found: Any, process: Any = None) -> None:
    """Refuse policies without a field that a label can guide (CapabilityError)."""
    if not getattr(found, "can_drop_goals", False):
        process = found.config.process if process is None else process
        raise CapabilityError(
            f"algo={algo} guides a denoiser by a label; got process={name_of('process', process)}"
            f"{'' if policy is None else f' ({type(policy).__name__})'}. Use process=flow or diffusion"
            f"{'' if policy is None else f', or {algorithms_for(policy)} for this policy'}."
        )


class Recap(Bc):
    """A run: gradient steps of the value, labels, then a `Bc` run; see `RecapConfig`."""

    config: RecapConfig

    def __init__(self, config: RecapConfig, setup: Setup) -> None:
        dataset = dataset_of(setup, name_of("algo", config), "episodes with rewards")
        start = config.starting_policy(setup, dataset)
        unlabelled = _labelled(dataset, torch.zeros(dataset.num_frames, 1))
        super().__init__(config, replace(setup, init=start, dataset=unlabelled, env=None))
        self._invariants |= {f"algo.{name}": getattr(config, name) for name in _OF_LABELS}
        self._dataset, self._value_done = unlabelled.with_cameras(start.images), 0
        rewards = (
            dataset.rewards if config.rewards == "recorded" else step_rewards(dataset, config.failure_cost)
        )
        to_go = replace(dataset, rewards=rewards).returns_to_go(config.gamma)
        require_unequal(to_go, dataset, config.rewards, config.gamma)
        scale = float(to_go.abs().max())
        self._to_go = (to_go / scale).to(setup.device)
        low, high = (float(bound) for bound in self._to_go.aminmax())
        self._atoms = torch.linspace(min(low, 0), max(high, 0), config.num_bins, device=setup.device)
        self._features = self._encoded()
        with seeded_weights(derive_seed(setup.seed, "value")):
            trunk = TrunkConfig(residual=False, hidden_dims=config.value_dims)
            self.value = trunk.build_trunk(self._features.shape[1], config.num_bins).to(self._features)
        self.value_optimizer = adam(self.value.parameters(), config.value_lr)
        self._value_rows = seeded_generator(setup.seed, "value rows", device=setup.device)
        self.labels: Tensor | None = None  # (N, 1)

    @torch.no_grad()
    def _encoded(self) -> Tensor:
        """Return the features (N, C) of all frames, without label."""
        policy = self.policy
        extras = {key: value for key, value in self._dataset.extras.items() if key != DECISION}
        every = replace(self._dataset, extras=extras).to(policy.device)
        windows = WindowSampler(every, policy.chunk, pad_end=True, goal_dim=1, cameras=policy.images)
        pieces = torch.arange(windows.num, device=windows.device).split(_ENCODED_AT_ONCE)
        return torch.cat([encode(policy, windows.gather(piece).obs).vec[:, :-1] for piece in pieces])

    @property
    def progress(self) -> int:
        return self._value_done + self._done

    @property
    def total(self) -> int:
        return self.config.value_steps + self._total

    def advance(self) -> Metrics:
        """Take a block of gradient steps of the value, then of the policy; return the means of metrics."""
        if self._value_done == self.config.value_steps:
            return super().advance()
        start, count = (
            time.perf_counter(),
            min(self.config.log_every, self.config.value_steps - self._value_done),
        )
        with torch_threads(self._num_threads):
            loss = sum(self._value_step() for _ in range(count)) / count
            self._value_done += count
            labels = self._label() if self._value_done == self.config.value_steps else {}
        return {"value/loss": loss, **labels, "time/steps_per_s": count / (time.perf_counter() - start)}

    def _value_step(self) -> Tensor:
        rows, device = self._value_rows, self._value_rows.device
        row = torch.randint(len(self._to_go), (self.config.batch_size,), generator=rows, device=device)
        row = current().own(row)
        wanted = two_hot(self._to_go[row], self._atoms)
        loss = -(wanted * self.value(self._features[row]).log_softmax(dim=1)).sum(dim=1).mean()
        return descend(self.value_optimizer, loss)

    @torch.no_grad()
    def _label(self) -> Metrics:
        """Label all frames; return facts of the value and the labels."""
        data, config = self._dataset, self.config
        value = torch.cat(
            [(self.value(part).softmax(1) * self._atoms).sum(1) for part in self._features.split(4096)]
        )
        frame = torch.arange(data.num_frames)
        remaining = (data.episode_start[1:].repeat_interleave(data.lengths) - frame).to(value.device)
        found = advantages(self._to_go, value, remaining, config.lookahead, config.gamma)
        positive = is_positive(found, config.positive_fraction)
        self._use_labels(torch.where(positive, 1.0, -1.0 if config.negative_label else 0.0)[:, None])
        residual, spread = (self._to_go - value).var(), self._to_go.var()
        return {
            "value/explained_variance": 1 - residual / spread,
            "labels/positive_fraction": positive.float().mean(),
            "labels/advantage_std": found.std().float(),
        }

    def _use_labels(self, labels: Tensor) -> None:
        self.labels = labels
        self._use(_labelled(self._dataset, labels.cpu()))

    def snapshot(self) -> Policy:
        """Return a copy of the EMA policy that acts with the label, in evaluation mode."""
        return Advantage(self.config.guidance).wrap(super().snapshot()).eval()

    def state_dict(self) -> dict[str, Any]:
        own = {"value_done": self._value_done, "value_rows": capture_generator(self._value_rows)}
        labels = {} if self.labels is None else {"labels": self.labels}
        return super().state_dict() | own | labels | save_parts(self, _PARTS)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state))
        load_parts(self, _PARTS, state)
        restore_generator(self._value_rows, state["value_rows"])
        self._value_done = int(state["value_done"])
        if "labels" in state:
            self._use_labels(state["labels"].to(self._features))


def _labelled(dataset: EpisodeDataset, labels: Tensor) -> EpisodeDataset:
    """Return the dataset with labels (N, 1) as goals."""
    return replace(dataset, extras=dict(dataset.extras) | {"goal": labels})
