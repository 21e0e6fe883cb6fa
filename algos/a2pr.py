"""A2PR: TD3 with a penalty towards a generative guide, which is learned on advantageous actions.

Legend: V state value, u = VAE(s, a) a reconstruction, q1 the first critic, w_vae weight of reconstructions, m
weight of the constraint (`mask` in the released code)::

    V     towards min(y, y'), y' = r + discount min(Q1, Q2)(s', a') with the critics just updated
    VAE   mean w_vae 1[q1(s, a) > V] (u - a)^2 + 1/2 mean KL(N(mean, std^2) | N(0, 1))
    guide g = u_pi = VAE(s, pi) where q1(s, u_pi) >= q1(s, a), else a
    constraint = mean m 1[q1(s, u_pi) >= V or q1(s, a) > V] (pi - g)^2

V is evaluated once per step, before it is updated; the gradient passes through u_pi back into pi.

Source: A2PR, arXiv 2405.19909, and its released code.

Deviations from the released code: none in the equations; checkpoints include optimiser moments and the step
count, and unused parts are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from algos.base import Draws, Quantities, Setup
from algos.offline.loop import precision
from algos.offline.td3_update import Actor, Backup, ConstrainedTd3Config, Penalty, Regulariser
from algos.optim import adam, descend, load_parts, regress, save_parts, weights_of
from algos.transitions import Batch, TransitionTable
from policies.bounds import bounded
from policies.networks import native
from policies.networks.critics import Ensemble, EnsembleConfig, aggregate
from policies.networks.mlp_blocks import NAMES
from policies.registry import register

_RELU = native.Stack(1, "relu", transposed=True)


class ActionVae(nn.Module):
    """Conditional variational auto-encoder of actions (B, A) within `limit`, given conditions (B, C).

    The latent has 2 A entries; encoder and decoder have two hidden layers of `width`.
    """

    def __init__(self, cond_dim: int, action_dim: int, width: int = 750, limit: float = 1.0) -> None:
        super().__init__()
        self.latent_dim, self.limit = 2 * action_dim, limit
        self.encoder = _stack(cond_dim + action_dim, width)
        self.mean, self.log_std = (nn.Linear(width, self.latent_dim) for _ in range(2))
        self.decoder = _stack(cond_dim + self.latent_dim, width)
        self.outlet = nn.Linear(width, action_dim)

    def forward(
        self, cond: Tensor, action: Tensor, noise: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstructions (..., B, A), means and stds (..., B, 2A) for noise (..., B, 2A).

        `rows` (R,) of a batch are reconstructed alone, (R, A).
        """
        mean, log_std = _through(self.encoder, [self.mean, self.log_std], torch.cat([cond, action], dim=-1))
        mean, std = mean.to(noise), log_std.to(noise).clamp(-4, 15).exp()
        latent = torch.cat([cond, mean + std * noise], dim=-1)
        (decoded,) = _through(self.decoder, [self.outlet], latent if rows is None else latent[rows])
        return self.limit * torch.tanh(decoded).to(noise), mean, std


def _stack(in_dim: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def _through(hidden: nn.Sequential, heads: Sequence[nn.Linear], x: Tensor) -> Sequence[Tensor]:
    """Return what heads of equal width read from the hidden layers."""
    if x.ndim > 2 or not native.serves(x):
        h = hidden(x)
        return [head(h) for head in heads]
    layers: list[Any] = [part for part in hidden if isinstance(part, nn.Linear)]
    parts = []
    for name in NAMES:
        whole = torch.cat([getattr(head, name) for head in heads])
        parts += [*(getattr(layer, name) for layer in layers), whole]
    found: Sequence[Tensor] = _RELU(x, parts)[0].chunk(len(heads), dim=-1)
    return found


def divergence(mean: Tensor, std: Tensor) -> Tensor:
    """Return KL(N(mean, std^2) | N(0, 1)), averaged over rows and entries (..., B, L)."""
    return -0.5 * (1 + std.square().log() - mean.square() - std.square()).mean(dim=(-2, -1))


class AdvantageGuide(Regulariser):
    """The guide with its value network and VAE; see the module docstring.

    Args:
        vae: Guide.
        value: V, an ensemble of one member over states.
        config: Weights, rates, precision.
    """

    def __init__(self, vae: ActionVae, value: Ensemble, config: A2prConfig) -> None:
        self.vae, self.value, self.config = vae, value, config
        self.value_optimizer = adam(value.parameters(), config.value_lr)
        self.vae_optimizer = adam(vae.parameters(), config.vae_lr)
        self._state_value: Tensor | None = None  # V of the batch before its update
        self._data_value: Tensor | None = None  # q1 of the data actions

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        shape, device = (n, self.vae.latent_dim), self.vae.outlet.weight.device
        noise = (torch.randn(shape, generator=generator, device=generator.device) for _ in range(2))
        return {name: eps.to(device) for name, eps in zip(("vae_data", "vae_policy"), noise, strict=True)}

    def learn(self, batch: Batch, backup: Backup, critic: Ensemble, draws: Draws) -> Quantities:
        aim = self.value_target(batch, backup, critic)
        with torch.no_grad(), self._precision():
            self._data_value = critic(batch.cond, batch.action, members=1)[0]
        with self._precision():
            found = self.value.evaluate(batch.cond, None, weights_of(self.value_optimizer))
        value_loss = regress(self.value_optimizer, found, aim)
        value = self._state_value = found.values[0]
        keep = (self._data_value > self._state_value).to(value.dtype)
        rows = keep.nonzero().squeeze(1) if self._can_choose(keep) else None
        with self._precision():
            rebuilt, mean, std = self.vae(batch.cond, batch.action, draws["vae_data"], rows)
        if rows is None:
            error = (keep[..., None] * (rebuilt - batch.action).square()).mean(dim=(-2, -1))
        else:
            error = (rebuilt - batch.action[rows]).square().sum() / batch.action.numel()
        vae_loss = self.config.vae_weight * error + 0.5 * divergence(mean, std)
        descend(self.vae_optimizer, vae_loss)
        return {
            "value/loss": value_loss,
            "guide/loss": vae_loss.detach(),
            "guide/kept_fraction": keep.mean(dim=-1),
        }

    @torch.no_grad()
    def value_target(self, batch: Batch, backup: Backup, critic: Ensemble) -> Tensor:
        """Return the regression target of V, min(y, y') (..., B)."""
        with self._precision():
            fresh = aggregate(critic(batch.next_cond, backup.next_action), "min")
        return torch.minimum(backup.target, torch.addcmul(batch.reward, batch.discount, fresh))

    def penalty(self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws) -> Penalty:
        with self._precision():
            self.vae.requires_grad_(False)  # gradients with respect to the input only
            rebuilt = self.vae(batch.cond, action, draws["vae_policy"])[0]
            self.vae.requires_grad_(True)
        follows, weight = self.judged(batch, rebuilt, critic)
        guide = torch.where(follows[..., None], rebuilt, batch.action)
        penalty = (weight[..., None] * (action - guide).square()).mean(dim=(-2, -1))
        told = {
            "guide/followed_fraction": follows.to(weight.dtype).mean(dim=-1),
            "guide/active_fraction": (weight > 0).to(weight.dtype).mean(dim=-1),
        }
        return Penalty(penalty, metrics=told)  # the guide depends on the action too

    @torch.no_grad()
    def judged(self, batch: Batch, rebuilt: Tensor, critic: Ensemble) -> tuple[Tensor, Tensor]:
        """Return a mask (..., B) where the guide is `rebuilt` (..., B, A), and the constraint weight."""
        value, data = self._state_value, self._data_value
        assert value is not None and data is not None, "learn comes before penalty"
        with self._precision():
            rebuilt_value = critic(batch.cond, rebuilt, members=1)[0]
        follows = rebuilt_value - value >= data - value
        is_active = (rebuilt_value >= value) | (data > value)
        return follows, self.config.constraint_weight * is_active.to(value.dtype)

    def _can_choose(self, keep: Tensor) -> bool:
        """Say whether rows that are not kept (B,) are left out; elsewhere counting them costs more.

        Products in bfloat16 are prepared anew for every number of rows.
        """
        is_float = keep.is_cpu and self.config.autocast is None
        return is_float and keep.ndim == 1 and not self.vae._forward_hooks

    def _precision(self) -> AbstractContextManager[Any]:
        return precision(self.config.autocast, self.vae.outlet.weight.device)

    _parts = ("vae", "value", "vae_optimizer", "value_optimizer")

    def state_dict(self) -> dict[str, Any]:
        return save_parts(self, self._parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_parts(self, self._parts, state)


@register("algo", "a2pr")
@dataclass
class A2prConfig(ConstrainedTd3Config):
    """A2PR with the defaults of the released code.

    Published: alpha 40, constraint_weight 1 for halfcheetah-medium; constraint_weight 0.4, gamma 0.995 for
    hopper-medium; vae_weight 1.5, constraint_weight 1 for walker2d-medium.

    Source:
        arXiv 2405.19909 and its released code.
    """

    hidden_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)
    critic_dims: tuple[int, ...] = bounded((256, 256, 256, 256), ge=1, some=True)
    value_dims: tuple[int, ...] = bounded((256, 256, 256, 256), ge=1, some=True)  # hidden widths of V; ReLU
    value_lr: float = bounded(3e-4, gt=0)  # Adam
    vae_width: int = bounded(750, ge=1)  # width of both hidden layers of encoder and decoder
    vae_lr: float = bounded(1e-3, gt=0)  # Adam
    vae_weight: float = bounded(1.0, ge=0)  # weight of the reconstruction error against the KL divergence
    constraint_weight: float = bounded(0.5, ge=0)  # m; `mask` in the released code

    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> AdvantageGuide:
        like = table.cond
        value = EnsembleConfig(members=1, hidden_dims=self.value_dims).build(like.shape[1], 0)
        vae = ActionVae(like.shape[1], table.action.shape[1], self.vae_width)
        return AdvantageGuide(vae.to(like.device, like.dtype), value.to(like.device, like.dtype), self)
