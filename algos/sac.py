"""Soft actor-critic on action chunks with a squashed Gaussian policy, and RLPD.

Equations: `algos.offpolicy.sac_update`, with u the executed rows of a chunk and Q over chunks. Loop:
`algos.offpolicy.loop`. `init` is optional: a new policy learns from the reward alone.

Source: SAC, arXiv 1812.05905 (automatic temperature). Deviations: an action is a chunk of Ta control steps;
rewards and values are discounted per control step; chunks end with their episode; time limits are
truncations; the actor update follows the critic update and uses the updated critics. With Ta = 1 the first
two match the publication.

RLPD is SAC with four changes: half of every batch is prior data; layer normalisation in the critics limits
overestimation off the data; targets take the minimum over a random pair of a critic ensemble; many updates
per step. Source: arXiv 2302.02948, released code. Deviations: those of SAC; every critic step draws its own
batch, where the release splits one large batch; `offline_ratio` is configurable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from algos.base import Setup
from algos.offline.loop import THREADS
from algos.offpolicy.config import OffPolicyConfig
from algos.offpolicy.loop import OffPolicyRun, offline_table
from algos.offpolicy.sac_update import LatentActor, SacUpdate
from algos.onpolicy.loop import check_setup
from algos.onpolicy.requirements import require
from algos.onpolicy.running_normalizer import fresh_policy
from algos.training.observations import encoder_module, trained_encoder
from envs.fit import require_dataset_of
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.networks.critics import AGGREGATES
from policies.networks.distributions import Drawn, highest_entropy, tanh_draw
from policies.policy import Policy
from policies.processes.squashed import TanhGaussianPolicy
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads


@register("algo", "sac")
@dataclass
class SacConfig(OffPolicyConfig):
    """Soft actor-critic from scratch or from a squashed Gaussian policy."""

    entropy_share: ClassVar[float] = -1.0

    requires: ClassVar[str] = "trains a squashed Gaussian (process=tanh_gaussian)"

    updates_per_step: float = bounded(1.0, gt=0)  # critic updates per executed control step
    critic_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths
    critic_activation: str = "relu"  # relu, mish or tanh
    critic_layer_norm: bool = False  # layer normalisation before each activation
    target_entropy: float | None = bounded(None, ge=-math.inf)  # of an executed chunk; null: minus its size

    def build(self, setup: Setup) -> OffPolicyRun:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If environment or dataset is missing, sizes disagree, or an untrained policy lacks
                observation statistics.
            CapabilityError: If the policy is not a squashed Gaussian.
        """
        algo = name_of("algo", self)
        init = self._new_policy(setup, algo) if setup.init is None else check_setup(setup, algo)
        init = self.check_policy(init)
        with torch_threads(setup.threads(THREADS)):
            policy = init.clone().to(setup.device).requires_grad_(True)
            actor = SquashedActor(policy, self.density_form, is_fresh=setup.init is None)
            with seeded_weights(derive_seed(setup.seed, "soft_critics")):
                critic = self.critic_config().build(policy.encoder.cond_dim, actor.latent_dim)
            critic = critic.to(policy.device, policy.dtype)
            encoder_module(policy).requires_grad_(False)
            encoder = trained_encoder(policy) if self.encoder == "trained" else ()
            learner = SacUpdate(actor, critic, self, of_chunks=True, encoder=encoder)
            return OffPolicyRun(self, setup, learner, offline_table(self, setup, policy))

    def check_policy(self, policy: Policy) -> TanhGaussianPolicy:
        """Return the policy if it is a squashed Gaussian (else CapabilityError)."""
        checked: TanhGaussianPolicy = require(
            policy,
            name_of("algo", self),
            lambda candidate: isinstance(candidate, TanhGaussianPolicy),
            self.requires,
        )
        return checked

    def _new_policy(self, setup: Setup, algo: str) -> Policy:
        if setup.dataset is not None and setup.env is not None:
            require_dataset_of(setup.env, setup.dataset, allow_other_task=setup.allow_other_task)
            return fresh_policy(setup, algo, setup.dataset.statistics())
        mode = setup.policy.normalizer["state"]
        if setup.env is not None and mode != "identity":
            raise ConfigError(
                f"algo={algo} without init and dataset has no statistics for policy.normalizer.state={mode}. "
                "Use policy.normalizer.state=identity, or give init=<policy directory> or dataset=<file>."
            )
        return fresh_policy(setup, algo)


class SquashedActor(LatentActor):
    """Executed rows of a squashed Gaussian policy; latents are chunks, L = A = Ta Da.

    Args:
        policy: Policy whose network is trained.
        form: Squashed density, one of `policies.networks.distributions.FORMS`.
        is_fresh: Warm up with uniform chunks instead of the policy's samples.
    """

    policy: TanhGaussianPolicy

    def __init__(self, policy: TanhGaussianPolicy, form: str = "exact", *, is_fresh: bool = True) -> None:
        self.policy, self._form, self._is_fresh = policy, form, is_fresh
        rows, width = policy.chunk.executed, policy.chunk.action_dim
        self._executed = slice(rows.start * width, rows.stop * width)

    @property
    def latent_dim(self) -> int:
        return self.policy.chunk.width

    @property
    def highest_entropy(self) -> float:
        return self.latent_dim * highest_entropy(self.policy.process.max_log_std)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.policy.head.parameters())

    def draw(self, cond: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return executed chunks (B, A) and their log-density (B,)."""
        mean, log_std = self.policy.head(cond)
        return tanh_draw(mean[:, self._executed], log_std[:, self._executed], eps, form=self._form)

    def draw_without_graph(self, cond: Tensor, eps: Tensor, weights: Sequence[Tensor]) -> Drawn | None:
        entries, form = self._executed, self._form
        return self.policy.head.draw_without_graph(cond, eps, weights, form=form, entries=entries)

    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        return latent

    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        """Return chunks (B, A): uniform in the action bounds, or samples of `init`."""
        return torch.erf(eps / math.sqrt(2)) if self._is_fresh else self.draw(cond, eps)[0]


@register("algo", "rlpd")
@dataclass
class RlpdConfig(SacConfig):
    """SAC with recorded episodes in every batch."""

    entropy_share: ClassVar[float] = -0.5
    without_data: ClassVar[str] = "use algo=sac"

    offline_ratio: float = bounded(0.5, ge=0, lt=1)  # fraction of a batch drawn from the dataset
    updates_per_step: float = bounded(20.0, gt=0)  # critic updates per executed control step
    actor_every: int = bounded(20, ge=1)  # critic updates per update of actor and temperature
    critics: int = bounded(10, ge=1)  # E, size of the critic ensemble
    critic_layer_norm: bool = True  # layer normalisation before each activation
    aggregate: str = bounded("subset_min", choices=AGGREGATES)  # reduction over critics in targets
    actor_aggregate: str = bounded("mean", choices=AGGREGATES)  # reduction over critics in the actor loss
    target_entropy: float | None = bounded(None, ge=-math.inf)  # of a chunk; null: minus half its size

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("offline_ratio", self.offline_ratio > 0, "above 0 (algo=sac does without a dataset)")
