"""DSRL as a pure learner: soft actor-critic over the noise of a frozen policy, in two variants.

Legend: as in `algos.offpolicy.sac_update`; w = b u the noise, a(s, w) the chunk of the frozen policy, QA values of
chunks, QW values of latents::

    sac   Q(s, u) is learned from recorded latents; the frozen policy is asked nothing
    na    y = r + discount (C_i QA_i_bar(s', a(s', b u')) - alpha log pi(u' | s'))       QA of executed chunks
          actor loss = mean (alpha log pi(u | s) - C_i QW_i(s, u))                     u, not w, enters QW
          distillation = 1/2 sum_i mean (QW_i(s, u) - QA_i(s, a(s, b u)))^2              on batches of its own

No gradient passes through the frozen policy. Latents of the distillation are `gaussian` (b u standard normal,
as released: most of them lie outside of the actor's box), uniform in the `box`, or half of each.

Source: DSRL, arXiv 2506.15799, released code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.offpolicy.replay_buffer import ChunkBatch, Mixture
from algos.offpolicy.sac_update import SacUpdate, SoftRules, half_squared_error
from algos.optim import descend, restore_optimizer
from policies.networks.critics import Ensemble
from policies.networks.distributions import (
    gaussian_draw,
    highest_entropy,
    highest_gaussian_entropy,
    tanh_draw,
)
from policies.wrappers.noise_policy import SteeredPolicy

DISTILLATION_LATENTS = ("gaussian", "box", "mixture")


class SteeredActor:
    """The actor of a steered policy; see `algos.offpolicy.sac_update.LatentActor`.

    Args:
        policy: Whose actor is trained.
        form: Of the squashed density, one of `policies.networks.distributions.FORMS`.
        within_box: Keep latents of the warm-up within the box of the actor, where critics learn of latents; a
            Gaussian has no box.
        is_fresh: Warm up as the frozen policy with normal noise in the form that latents have (with another
            adapter than `full` less free than its own), instead of as the actor does already.
    """

    def __init__(
        self, policy: SteeredPolicy, form: str = "exact", *, within_box: bool = False, is_fresh: bool = True
    ) -> None:
        self.policy, self._form, self._is_fresh = policy, form, is_fresh
        self._within_box = within_box and policy.wrapper.density == "tanh"

    @property
    def latent_dim(self) -> int:
        """L."""
        return self.policy.latent_dim

    @property
    def bound(self) -> float:
        """Of the noise, in its deviations."""
        return self.policy.wrapper.bound

    @property
    def highest_entropy(self) -> float:
        """The largest entropy of u [nats] that the actor can have, or of b u for a Gaussian without bound."""
        is_squashed = self.policy.wrapper.density == "tanh"
        return self.latent_dim * (highest_entropy() if is_squashed else highest_gaussian_entropy())

    def on_cpu(self) -> SteeredActor:
        """Return the actor as workers use it."""
        twin = copy.copy(self)
        twin.policy = self.policy.on_cpu()
        return twin

    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        """Return latents (B, L) of normal noise for the frozen policy, or of the actor that steers already.

        Those of normal noise are kept within the box if asked.
        """
        if not self._is_fresh:
            return self.draw(cond, eps)[0]
        latent = eps / self.bound
        return latent.clamp(-1, 1) if self._within_box else latent

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the weights of the actor."""
        return list(self.policy.actor.parameters())

    def draw(self, cond: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents u (B, L) and the log-density (B,) of u, or of b u for a Gaussian without bound."""
        mean, log_std = self.policy.actor(cond)
        if self.policy.wrapper.density == "tanh":
            return tanh_draw(mean, log_std, eps, form=self._form)
        noise, log_prob = gaussian_draw(mean, log_std, eps)
        return noise / self.bound, log_prob

    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return the executed rows of the frozen policy's chunk, flat (B, A)."""
        return self.policy.chunk_of(cond, latent)[:, self.policy.chunk.executed].flatten(1)


class NoiseAliasedUpdate(SacUpdate):
    """Values of chunks, distilled into values of latents, which the actor climbs.

    Args:
        actor: What is trained.
        critic: QA.
        noise_critic: QW, of as many members.
        rules: Constants.
        latents: Where the two are compared; see the top of the file.
        share: Steps of the distillation per step.
    """

    actor: SteeredActor

    def __init__(
        self,
        actor: SteeredActor,
        critic: Ensemble,
        noise_critic: Ensemble,
        rules: SoftRules,
        *,
        latents: str = "gaussian",
        share: float = 0.5,
    ) -> None:
        super().__init__(actor, critic, rules, of_chunks=True)
        self.noise_critic, self._latents, self._share, self._owed = noise_critic, latents, share, 0.0
        self.noise_critic_optimizer = torch.optim.Adam(
            noise_critic.parameters(), lr=rules.critic_lr, fused=True
        )

    def next_values(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Ask the target critics about the chunks of latents (B, L)."""
        return self.target_critic(cond, self.actor.chunk(cond, latent))

    def climbed_values(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Ask the distilled critics."""
        return self.noise_critic(cond, latent, frozen=True)

    def draw_latents(self, n: int, generator: torch.Generator) -> Tensor:
        """Return latents (n, L) for a step of the distillation."""
        shape, device = (n, self.actor.latent_dim), generator.device
        normal = torch.randn(shape, generator=generator, device=device) / self.actor.bound
        if self._latents == "gaussian":
            chosen = normal
        else:
            box = 2 * torch.rand(shape, generator=generator, device=device) - 1
            chosen = box if self._latents == "box" else torch.cat([normal[: n // 2], box[n // 2 :]])
        return chosen.to(self.critic.weight[0].device)

    def distillation(self, cond: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and targets (E, B) of the distillation at latents (B, L)."""
        with torch.no_grad():
            target = self.critic(cond, self.actor.chunk(cond, latent))
        return self.noise_critic(cond, latent), target

    def distill(self, batch: ChunkBatch, draws: Draws) -> Quantities:
        """Take one step of the distilled critics at the latents `draws["latent"]` (B, L)."""
        loss = half_squared_error(*self.distillation(batch.cond, draws["latent"]))
        descend(self.noise_critic_optimizer, loss)
        return {"noise_critic/loss": loss.detach()}

    def finish_round(
        self, count: int, size: int, source: Mixture, generator: torch.Generator
    ) -> list[Quantities]:
        """Distil, on fresh batches."""
        self._owed += count * self._share
        steps = math.floor(self._owed)
        self._owed -= steps
        found = []
        for _ in range(steps):
            batch = source.draw(size, generator)
            found.append(self.distill(batch, {"latent": self.draw_latents(size, generator)}))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bit-exact continuation needs."""
        return super().state_dict() | {
            "owed": self._owed,
            "noise_critic": self.noise_critic.state_dict(),
            "noise_critic_optimizer": self.noise_critic_optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self._owed = float(state["owed"])
        self.noise_critic.load_state_dict(state["noise_critic"])
        restore_optimizer(self.noise_critic_optimizer, state["noise_critic_optimizer"])
