"""Settings and steps shared by algorithms with a critic of chunks: regression, refit, target copies.

Legend: E critics, B rows, A = Ta Da, bar target copy, C_i aggregate over critics, s' the state after a
chunk, tau the Polyak coefficient::

    y           = r + discount V'(s')          V' is the algorithm's, discount = gamma^l, 0 after the task
    critic loss = mean over critics and rows of (Q_i(s, a) - y)^2, or with `critic_bins` of the cross entropy
                  of the histogram Q_i(s, a) and one of y
    refit       = mean over rows and steps of the policy's matching loss on recorded steps, 0 on others
    Q_bar      <- tau Q + (1 - tau) Q_bar      Q of before the step (`moves_first`) or of after it

With `iterate_every` T the critics are a chain of Bellman updates instead: y_i = r + discount Q_i_bar(s', a'),
where Q_i_bar is a copy of critic i - 1 (`iterate`).

A batch holds transitions of the dataset, or of it and new experience (`algos.offline.online`).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Draws, Quantities, Setup, goal_dim_of, require_condition_vector
from algos.critics.losses import cross_entropy, histogram
from algos.offline.chunk_loss import ChunkLoss
from algos.offline.config import Statistics, TransitionsConfig, warn_of_clipped_actions
from algos.onpolicy.requirements import algorithms_for
from algos.optim import adam, descend, load_parts, regress, save_parts, weights_of
from algos.training.observations import encoder_module
from algos.transitions import Batch, TransitionTable
from envs.datasets.episodes import EpisodeDataset
from policies.bounds import bounded
from policies.build import build_policy
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError, ConfigError
from policies.networks.activations import ACTIVATIONS
from policies.networks.critics import (
    AGGREGATES,
    USED_BY,
    Ensemble,
    EnsembleConfig,
    aggregate,
    aggregate_of,
    polyak,
)
from policies.policy import Policy, PolicyConfig
from policies.protocols import MatchingLoss
from policies.registry import name_of
from policies.seeds import derive_seed
from policies.wrappers.candidates import CandidatePolicy, Candidates
from policies.wrappers.planner import PlannerPolicy

NORM_EPS = 1e-6


@torch.no_grad()
def iterate(critic: Ensemble, target: Ensemble, step: int, period: int, every: int) -> None:
    """Move the chain of critics after update `step` (1, 2, ...).

    Every `period` updates all targets become copies of the critics, and every critic takes the weights of
    the next one, the last keeping its own; at other multiples of `every`, target i copies critic i - 1.
    Target 0 stays within a period, so that critic i learns the i-th Bellman update of it.

    Source: iterated Q-networks, arXiv 2403.02107, in the released code of its sequel i-DQN.
    """
    for online, copied in zip(critic.parameters(), target.parameters(), strict=True):
        if step % period == 0:
            copied.copy_(online)
            online[:-1] = online[1:].clone()
        elif step % every == 0:
            copied[1:] = online[:-1]


@dataclass
class ChunkCriticConfig(TransitionsConfig):
    """Settings shared by algorithms with critics of chunks."""

    needs_noise: ClassVar[bool] = True  # the policy must sample different chunks
    may_keep: ClassVar[bool] = True  # whether one without matching loss may stay as it is, by refit=false
    has_actor: ClassVar[bool] = False  # whether one beside the policy is trained
    reduces: ClassVar[bool] = True  # values of critics by `aggregate`; false: the least counts

    steps: int = bounded(1_000_000, ge=0)  # gradient steps on the dataset
    critics: int = bounded(2, ge=1)  # E, size of the critic ensemble
    critic_dims: tuple[int, ...] = bounded((512, 512, 512, 512), ge=1, some=True)  # hidden widths of a critic
    critic_activation: str = bounded("gelu", choices=tuple(ACTIVATIONS))
    critic_layer_norm: bool = True  # layer normalisation in the critics
    norm_after: bool = True  # after the activation instead of before it
    critic_bins: int = bounded(0, ge=0)  # K, bins of a histogram of returns; 0: one value, by squared error
    bin_sigma: float = bounded(0.75, ge=0)  # deviation of targets in bins (HL-Gauss), in widths; 0: two-hot
    value_min: float = bounded(0.0, ge=float("-inf"))  # the smallest discounted return; for dqc and bins
    value_max: float = bounded(1.0, ge=float("-inf"))  # the largest discounted return; for dqc and bins
    aggregate: str = bounded("mean", choices=AGGREGATES)  # reduction over critics in targets
    subset: int = bounded(2, ge=1)  # critics in subset_min, resampled at every step
    pessimism: float = bounded(0.5, ge=0)  # standard deviations subtracted by mean_std
    refit: bool = True  # train the policy on the recorded chunks too; false: it stays as it is
    actor_every: int = bounded(1, ge=1)  # critic updates per update of policy and actors

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("subset", self.subset <= self.critics, f"at most algo.critics={self.critics}")
        self.require("critic_bins", self.critic_bins != 1, "0, or 2 and more")
        self.require("value_max", self.value_max > self.value_min, f"above algo.value_min={self.value_min:g}")

    def unused(self) -> dict[str, str]:
        found, reductions = super().unused(), (self.aggregate, getattr(self, "actor_aggregate", None))
        found |= {k: f"without algo.aggregate={how}" for k, how in USED_BY.items() if how not in reductions}
        if not self.reduces:
            found |= dict.fromkeys(("aggregate", *USED_BY), "here: the least value of the critics counts")
        if not self.critic_bins:
            names = ("bin_sigma", "value_min", "value_max")
            found |= dict.fromkeys(names, "without algo.critic_bins")
        if not self.critic_layer_norm:
            found["norm_after"] = "without algo.critic_layer_norm"
        if not (self.refit or self.has_actor):
            found |= dict.fromkeys(("actor_lr", "actor_every"), "without algo.refit")
        return found

    def resume_invariants(self) -> dict[str, Any]:
        names = ("critic_bins", "value_min", "value_max") if self.critic_bins else ("critic_bins",)
        return super().resume_invariants() | {f"algo.{name}": getattr(self, name) for name in names}

    def critic_config(self, members: int | None = None) -> EnsembleConfig:
        """Return the configuration of the critics, or of `members` networks of one value like them."""
        after = self.critic_layer_norm and self.norm_after
        shape = (self.critic_dims, self.critic_activation, self.critic_layer_norm, after)
        if members is not None:
            return EnsembleConfig(members, *shape, norm_eps=NORM_EPS)
        bins, low, high = self.critic_bins, self.value_min, self.value_max
        return EnsembleConfig(self.critics, *shape, norm_eps=NORM_EPS, bins=bins, low=low, high=high)

    def wrapper(self, **values: Any) -> Candidates:
        """Return the wrapper of the exported policy, whose critics are those of this configuration."""
        how = "min" if self.aggregate == "subset_min" else self.aggregate
        shape = ("critic_dims", "critic_activation", "critic_layer_norm", "norm_after")
        names = (*shape, "pessimism", "critic_bins", "value_min", "value_max")
        own = {"members": self.critics} | {name: getattr(self, name) for name in names}
        return Candidates(**{"aggregate": how, **own, **values})

    def require_trainable(self, setup: Setup, algo: str) -> None:
        self.require("steps", self.steps + self.online_steps > 0, "above 0 without algo.online_steps")
        if setup.init is not None:
            self.require_policy(setup.init, algo)
        elif not self.refit:
            raise ConfigError(
                f"algo={algo} with algo.refit=false leaves its policy as it is, and without init that is a "
                "new one of random weights. Give init=<run> or set algo.refit=true."
            )

    def require_policy(self, policy: Policy, algo: str) -> None:
        """Refuse a policy that this algorithm cannot train (CapabilityError)."""
        require_condition_vector(policy, algo)
        process = name_of("process", policy.config.process)
        if self.needs_noise and not policy.noise_sensitive:
            raise CapabilityError(
                f"algo={algo} chooses among different chunks, and this policy (process={process}) acts the "
                f"same from every noise. Use {algorithms_for(policy)} for this policy."
            )
        others = ComposedPolicy | PlannerPolicy  # the loss of a planner is one of states
        is_trained = isinstance(policy, MatchingLoss) and not isinstance(policy, others)
        if self.refit and not is_trained:
            without = "Set algo.refit=false, or use" if self.may_keep else "Use"
            raise CapabilityError(
                f"algo={algo} trains the policy by its matching loss, and {type(policy).__name__} "
                f"(process={process}) has none. {without} {algorithms_for(policy)}."
            )

    def initial_policy(self, setup: Setup, dataset: EpisodeDataset, statistics: Statistics) -> Policy:
        """Return a copy of `init`, or a new policy of the configured parts, trainable with `refit`."""
        if setup.init is not None:
            policy = setup.init.clone()
        else:
            policy = build_policy(
                setup.policy,
                obs_dim=dataset.obs_dim,
                action_dim=dataset.action_dim,
                goal_dim=goal_dim_of(setup, dataset),
                images=dataset.image_shapes,
                statistics=statistics,
                seed=derive_seed(setup.seed, "chunk policy"),
            )
            self.require_policy(policy, name_of("algo", self))
            _require_no_new_encoder(policy, name_of("algo", self))
        policy = policy.to(setup.device).eval().requires_grad_(self.refit)
        encoder_module(policy).requires_grad_(False)  # conditions are stored
        return policy

    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> ChunkCriticLearner:
        warn_of_clipped_actions(table, setup, name_of("algo", self))
        return self.learner_of(policy, setup.seed)

    @abstractmethod
    def learner_of(self, policy: Policy, seed: int) -> ChunkCriticLearner:
        """Return the learner of a trainable policy; initial weights use torch's global generator.

        `seed` is that of the run, for policies built anew.
        """


@dataclass
class ChainConfig(ChunkCriticConfig):
    """Settings of algorithms whose critics may be a chain: targets come from `ChunkCriticLearner.backup`."""

    iterate_every: int = bounded(0, ge=0)  # T, updates until the chain of critics moves on; 0: no chain
    chain_every: int = bounded(10, ge=1)  # updates until a critic of the chain follows the one before it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterate_every:
            self.require("critics", self.critics > 1, "2 or more with algo.iterate_every")

    def unused(self) -> dict[str, str]:
        chain = {"tau": "with algo.iterate_every"} if self.iterate_every else {}
        return super().unused() | (chain or {"chain_every": "without algo.iterate_every"})


class ChunkCriticLearner:
    """Critics of executed chunks and the policy they improve.

    Args:
        base: Policy that samples the chunks; trained by its matching loss with `config.refit`.
        config: Settings.
        critic: Critics; None: those of `config`, of executed chunks.
    """

    policy: Policy
    is_recordable: ClassVar[bool] = True  # its steps differ in draws and `updates_actor` alone
    moves_first: ClassVar[bool] = True  # target copies move towards the critics of before the step
    critic_first: ClassVar[bool] = True  # actors use the critics of after their step
    row_axes: ClassVar[Mapping[str, int | None]] = {"subset": None, "choosing": None}
    """Axis of the rows of draws, if not the first; None: shared by the rows."""

    def __init__(self, base: Policy, config: ChunkCriticConfig, critic: Ensemble | None = None) -> None:
        if critic is None:
            critic = config.critic_config().build(base.encoder.cond_dim, base.chunk.width)
        self.base, self.config, self.steps = base, config, 0
        self.iterated = config if isinstance(config, ChainConfig) and config.iterate_every else None
        self.critic = critic.to(base.device, base.dtype)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.critic_optimizer = adam(self.critic.parameters(), config.critic_lr)
        self.cloning = ChunkLoss(base) if config.refit else None
        is_trained = any(weight.requires_grad for weight in base.parameters())
        self.base_optimizer = adam(base.parameters(), config.actor_lr) if is_trained else None

    # -- one step -------------------------------------------------------------------------------------

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of the next step for n rows."""
        draws = self.draw_values(n, generator)
        draws["subset"] = self.draw_subset(generator)
        if self.updates_actor and self.cloning is not None:
            draws |= self.cloning.draw(n, generator)
        return draws

    def draw_subset(self, generator: torch.Generator) -> Tensor:
        """Return indices of critics, for `subset_min`."""
        order = torch.randperm(self.critic.members, generator=generator, device=generator.device)
        return order[: self.config.subset].to(self.base.device)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of targets and actors; by default the noise of next chunks."""
        return {"next": self.policy.sample_noise(n, generator=generator)}

    @property
    def updates_actor(self) -> bool:
        """Whether the next step updates policy and actors."""
        return (self.steps + 1) % self.config.actor_every == 0

    @property
    def decisions(self) -> tuple[bool] | None:
        """What Python decides in the next step, for its replay; None: the step cannot be replayed."""
        return (self.updates_actor,) if self.is_recordable and self.iterated is None else None

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        """Update critics, policy and actors; return metrics."""
        updates_actor = self.updates_actor
        self.steps += 1
        with torch.no_grad():
            target = self.target(batch, draws)
        metrics: Quantities = {}
        if updates_actor and not self.critic_first:
            metrics |= self.update_actor(batch, draws) | self.update_base(batch, draws)
        if self.moves_first:
            self.follow()
        metrics |= self.update_critic(batch, target, draws)
        if not self.moves_first:
            self.follow()
        if updates_actor and self.critic_first:
            metrics |= self.update_base(batch, draws) | self.update_actor(batch, draws)
        return metrics

    def follow(self) -> None:
        """Move the target copies towards the critics, or the chain of critics."""
        chain = self.iterated
        updates = self.steps - 1 if self.moves_first else self.steps  # that the critics have taken
        if chain is None:
            polyak(self.target_critic, self.critic, self.config.tau)
        elif updates:
            iterate(self.critic, self.target_critic, updates, chain.iterate_every, chain.chain_every)

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        """Return y (B,); by default of next chunks of the policy."""
        return self.backup(batch, self.chunk(self.policy, batch.next_cond, draws["next"]), draws)

    def update_critic(self, batch: Batch, target: Tensor, draws: Draws | None = None) -> Quantities:
        """Take one step of the critics; those of quantiles need the draws of the step."""
        critic, config, optimizer, metrics = self.critic, self.config, self.critic_optimizer, {}
        if critic.centres is None:
            evaluation = critic.evaluate(batch.cond, batch.action, weights_of(optimizer))
            values, loss = (
                evaluation.values,
                regress(optimizer, evaluation, target, weight=1 / critic.members),
            )
        else:
            logits = critic.outputs(batch.cond, batch.action)
            probs = histogram(target, critic.centres, config.bin_sigma)
            values, loss = critic.mean(logits.detach()), descend(optimizer, cross_entropy(logits, probs))
            outside = (target < config.value_min) | (target > config.value_max)
            metrics["critic/clipped_fraction"] = outside.float().mean()
        return {"critic/loss": loss, "critic/value": values.mean(), "critic/target": target.mean()} | metrics

    def update_base(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of the policy on its matching loss, if it is trained."""
        if self.cloning is None or self.base_optimizer is None:
            return {}
        return {"policy/loss": descend(self.base_optimizer, self.matching(batch, draws))}

    def matching(self, batch: Batch, draws: Draws, weight: Tensor | None = None) -> Tensor:
        """Return the mean matching loss of recorded steps, of rows weighted by (B,)."""
        assert self.cloning is not None
        loss = self.cloning(batch, draws) * batch.real
        return loss.mean() if weight is None else (weight * loss.mean(dim=1)).mean()

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of what acts besides the policy; nothing by default."""
        return {}

    # -- values ---------------------------------------------------------------------------------------

    def aggregated(self, values: Tensor, subset: Tensor, how: str | None = None) -> Tensor:
        """Return C_i of values (E, ...), or their reduction by `how`."""
        how = self.config.aggregate if how is None else how
        return aggregate(values, how, subset=subset, pessimism=self.config.pessimism)

    def aggregated_of(self, evaluate: Callable[..., Tensor], subset: Tensor) -> Tensor:
        """Return C_i of the values that `evaluate(members=...)` returns, of the members that count."""
        return aggregate_of(evaluate, self.config.aggregate, subset=subset, pessimism=self.config.pessimism)

    def backup(self, batch: Batch, action: Tensor, draws: Draws) -> Tensor:
        """Return y (B,) for next chunks (B, A); of a chain y (E, B), one for each critic."""
        evaluate = partial(self.target_critic, batch.next_cond, action)
        values = evaluate() if self.iterated else self.aggregated_of(evaluate, draws["subset"])
        return torch.addcmul(batch.reward, batch.discount, values)

    def chunk(self, policy: Policy, vec: Tensor, noise: Tensor, *, grad: bool = False) -> Tensor:
        """Return executed chunks (B, A) of a policy for noise, at conditions (B, C)."""
        plan = policy.decode(self.base.condition(vec), noise, grad=grad)
        return plan[:, policy.chunk.executed].flatten(1)

    # -- state ----------------------------------------------------------------------------------------

    own_parts: ClassVar[tuple[str, ...]] = ()
    """Names of further networks and optimisers."""
    own_values: ClassVar[tuple[str, ...]] = ()
    """Names of further tensors."""

    @property
    def _parts(self) -> tuple[str, ...]:
        optional = () if self.base_optimizer is None else ("base_optimizer",)
        return ("policy", "critic", "target_critic", "critic_optimizer", *optional, *self.own_parts)

    def state_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name).detach().clone() for name in self.own_values}
        return {"steps": self.steps} | save_parts(self, self._parts) | values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_parts(self, self._parts, state)
        self.steps = int(state["steps"])
        with torch.no_grad():
            for name in self.own_values:
                getattr(self, name).copy_(state[name])


def _require_no_new_encoder(policy: Policy, algo: str) -> None:
    """Refuse to leave a new encoder as it was drawn (CapabilityError)."""
    if next(encoder_module(policy).parameters(), None) is not None:
        raise CapabilityError(
            f"algo={algo} keeps encoders as they are, and a new {type(policy.encoder).__name__} is random. "
            "Clone a policy by algo=bc and give init=<run>; algo=dsrl with algo.encoder=trained learns one "
            "from rewards."
        )


def choosing(base: Policy, wrapper: Candidates, critic: Ensemble) -> CandidatePolicy:
    """Return the policy that ranks candidates by `critic`, which it shares; one candidate is not ranked."""
    policy = wrapper.wrap(base)
    if wrapper.has_critic:
        policy.critic = critic
    return policy


def policy_beside(policy: Policy, config: PolicyConfig, seed: int, name: str) -> Policy:
    """Return a new trainable policy of `config` with the frozen encoder and the normaliser of another.

    `name` is that of the stream of its initial weights.
    """
    fresh = build_policy(
        config,
        obs_dim=policy.obs_dim,
        action_dim=policy.chunk.action_dim,
        goal_dim=policy.goal_dim,
        images=policy.images,
        seed=derive_seed(seed, name),
    )
    fresh.normalizer.load_state_dict(policy.normalizer.state_dict())
    encoder = encoder_module(fresh)
    encoder.load_state_dict(encoder_module(policy).state_dict())
    fresh = fresh.to(policy.device, policy.dtype).eval()
    encoder.requires_grad_(False)
    return fresh
