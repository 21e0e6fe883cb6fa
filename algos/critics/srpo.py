"""Score-regularised policy: a deterministic actor climbs a critic and follows the score of data.

Legend: as in `algos.critics.learner`; pi(s) plan of the actor (Th Da numbers), a its executed part,
eps(x, s, t) noise that the cloned policy predicts, alpha_t and sigma_t its path, z noise, beta weight::

    x        = alpha_t pi(s) + sigma_t z
    g        = grad_a mean_i Q_i_bar(s, a)           over its root mean square with `normalize_gradient`
    actor    = mean of w_t <eps(x, s, t) - z, pi(s)> - beta <g, a>,      eps and g constant
    w_t      = sigma_t^2 / (alpha_t^2 + sigma_t^2) (`vds`), alpha_t / sigma_t (`score`), or 1 (`stable`)

The gradient of the first term is that of the divergence between smoothed policy and smoothed data. First
`warmup_steps` updates fit V and Q to recorded chunks as IQL does, then they stay and the actor is trained; no
step decodes a chunk of the clone. The exported policy is the actor: one network evaluation, without critics.

Source: SRPO, arXiv 2310.07297, released code. Deviations: any denoising policy gives the score, over chunks;
t is uniform over its path in 0.02..0.98 (discrete levels: the nearest), where the release has a continuous
VP-SDE; z is always subtracted, which changes no mean gradient; a path that does not keep the variance has the
weights of its scaled state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from algos.base import Draws, Quantities, Setup
from algos.critics.idql import ValueLearner
from algos.critics.learner import ChunkCriticConfig, policy_beside
from algos.critics.losses import value_loss
from algos.onpolicy.requirements import require
from algos.optim import adam, descend
from algos.transitions import Batch
from policies.backbones.mlp import MlpConfig
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.networks.critics import Ensemble
from policies.policy import Policy
from policies.processes.base import over_rows
from policies.processes.deterministic import DeterministicProcess
from policies.protocols import Cond, has_field
from policies.registry import register

WEIGHTS = ("vds", "score", "stable")
_FIRST, _LAST = 0.02, 0.98  # times
_SMALLEST = 1e-12  # root mean square of a gradient that is normalised: flat values have none


def noise_weight(alpha: Tensor, sigma: Tensor, how: str) -> Tensor:
    """Return w_t of a path at times (B,)."""
    if how == "vds":
        return sigma.square() / (alpha.square() + sigma.square())
    return alpha / sigma if how == "score" else torch.ones_like(alpha)


def value_gradient(
    critic: Ensemble, cond: Tensor, action: Tensor, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Return g (B, A) and the mean values (B,) of executed chunks (B, A), both constant."""
    point = action.detach().requires_grad_()
    with torch.enable_grad():
        value = critic(cond, point, frozen=True).mean(dim=0)
        (slope,) = torch.autograd.grad(value.sum(), point)
    if normalize:
        slope = slope / slope.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=_SMALLEST)
    return slope, value.detach()


def score_direction(
    base: DenoisingPolicy, cond: Cond, plan: Tensor, t: Tensor, z: Tensor, how: str
) -> Tensor:
    """Return w_t (eps - z), like plans (B, Th, Da), constant, for times (B,) and noise like plans."""
    with torch.no_grad():
        eps = base.predict(base.process.corrupt(plan, z, t), t, cond, kind="eps")
        alpha, sigma = base.process.alpha_sigma(t)
        return over_rows(noise_weight(alpha, sigma, how), plan) * (eps - z)


def product(direction: Tensor, action: Tensor) -> Tensor:
    """Return the mean over rows of <direction, action>, both (B, ...)."""
    return (direction * action).flatten(1).sum(dim=1).mean()


class SrpoLearner(ValueLearner):
    """Q, V, a frozen cloned policy, and the actor that follows its score."""

    is_recordable: ClassVar[bool] = False  # a phase and a rate follow the steps

    config: SrpoConfig
    own_parts: ClassVar[tuple[str, ...]] = (*ValueLearner.own_parts, "actor_optimizer")

    def __init__(self, base: DenoisingPolicy, actor: Policy, config: SrpoConfig) -> None:
        super().__init__(base, config)
        self.policy = actor
        self.actor_optimizer = adam(actor.parameters(), config.actor_lr)

    @property
    def fits_values(self) -> bool:
        """Whether the next step is one of the critics."""
        return self.steps < self.config.warmup_steps

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {} if self.fits_values else self.draw_values(n, generator)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return times (n,) and noise (n, Th, Da) of an update of the actor."""
        u = torch.rand(n, generator=generator, device=generator.device).to(self.base.device)
        noise = torch.randn(n, *self.base.chunk.shape, generator=generator, device=generator.device)
        process = cast(DenoisingPolicy, self.base).process
        return {"t": process.nearest_time(_FIRST + (_LAST - _FIRST) * u), "z": noise.to(self.base.device)}

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        """Update the values, or later the actor; return metrics."""
        out = self.fit(batch) if self.fits_values else self.update_actor(batch, draws)
        self.steps += 1
        return out

    def fit(self, batch: Batch) -> Quantities:
        """Take one step of V and Q; targets hold V of before its step."""
        with torch.no_grad():
            target = self.target(batch, {})
        u = self.advantage(batch)
        loss = descend(self.value_optimizer, value_loss(u, "expectile", self.config.expectile))
        out = {"value/loss": loss, "actor/advantage": u.detach().mean()} | self.update_critic(batch, target)
        self.follow()
        return out

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        config, base = self.config, cast(DenoisingPolicy, self.base)
        cond, t, z = base.condition(batch.cond), draws["t"], draws["z"]
        plan = self.policy.decode(cond, z, grad=True)
        action = plan[:, base.chunk.executed].flatten(1)
        direction = score_direction(base, cond, plan, t, z, config.time_weight)
        slope, value = value_gradient(
            self.target_critic, batch.cond, action, normalize=config.normalize_gradient
        )
        done = (self.steps - config.warmup_steps) / (config.steps - config.warmup_steps)
        for group in self.actor_optimizer.param_groups:
            group["lr"] = config.actor_lr * 0.5 * (1 + math.cos(math.pi * done))
        loss = descend(self.actor_optimizer, product(direction, plan) - config.beta * product(slope, action))
        distance = (action.detach() - batch.action).square().mean().sqrt()
        return {"actor/loss": loss, "actor/value": value.mean(), "actor/data_distance": distance}


@register("algo", "srpo")
@dataclass
class SrpoConfig(ChunkCriticConfig):
    """SRPO with the published networks and rates; give a clone as `init`.

    Published beta, with `normalize_returns=1000`: 0.05, 0.2 and 0.01 for hopper medium, medium-replay and
    medium-expert; 0.2, 0.2, 0.01 for halfcheetah; 0.05, 0.5, 0.1 for walker2d; 0.02 to 0.08 for antmaze,
    there with `normalize_gradient`, expectile 0.9 and four hidden layers of the actor.

    Source:
        arXiv 2310.07297 and its released code.
    """

    fixed_length: ClassVar[bool] = True  # the actor's learning rate falls to 0 over the run
    needs_noise: ClassVar[bool] = False
    has_actor: ClassVar[bool] = True
    reduces: ClassVar[bool] = False

    steps: int = bounded(2_500_000, ge=1)  # gradient steps: of the values, then of the actor
    warmup_steps: int = bounded(1_500_000, ge=1)  # steps of the values, before the actor
    critic_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of critics and V
    critic_activation: str = "relu"
    critic_layer_norm: bool = False  # layer normalisation in the critics
    norm_after: bool = False  # after the activation instead of before it
    refit: bool = False  # the clone stays as it is
    hidden_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of the actor; ReLU
    expectile: float = bounded(0.7, gt=0, lt=1)  # kappa
    beta: float = bounded(0.05, ge=0)  # weight of the value
    time_weight: str = bounded("vds", choices=WEIGHTS)  # w_t; modes far apart need score, see the page
    normalize_gradient: bool = False  # divide the value's gradient by its root mean square

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("refit", not self.refit, "false")
        self.require("warmup_steps", self.warmup_steps < self.steps, "below algo.steps")
        self.require("online_steps", not self.online_steps, "0: values are fitted first, then kept")

    def unused(self) -> dict[str, str]:
        return super().unused() | {"actor_every": "here: the actor follows the critics, at every step"}

    def require_trainable(self, setup: Setup, algo: str) -> None:
        if setup.init is None:
            raise ConfigError(f"algo={algo} follows the score of a cloned policy; give init=<run>.")
        super().require_trainable(setup, algo)

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        require(policy, algo, has_field, "follows the noise that a denoiser predicts at every level")

    def learner_of(self, policy: Policy, seed: int) -> SrpoLearner:
        assert isinstance(policy, DenoisingPolicy)
        plain = replace(policy.config, goal_dropout=0.0, guidance=1.0, sampler=None)
        backbone = MlpConfig(residual=False, hidden_dims=self.hidden_dims, activation="relu")
        config = replace(plain, process=DeterministicProcess(), backbone=backbone)
        return SrpoLearner(policy, policy_beside(policy, config, seed, "actor"), self)
