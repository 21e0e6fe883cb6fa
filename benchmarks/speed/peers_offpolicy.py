"""What ours is compared with in off-policy learning: plain DSRL in the manner of the released program.

Arrays in NumPy that are converted at every draw, one module per critic, a diffusers scheduler in the loop
that decodes, gradients into critics that the actor's step throws away, a loop over parameters for the target
copies. Written for this comparison.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed import peers

GAMMA, RATE, TAU, FLOOR = 0.99, 3e-4, 0.005, 1e-6


class PlainReplay:
    """Arrays in NumPy, one for each part of a transition, that are converted at every draw.

    Args:
        arrays: state, latent, action, rewards (M, Ta), length, terminated (M,), next_state; float32.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        """Return M."""
        return len(self.arrays["length"])

    def gather(self, row: np.ndarray) -> dict[str, Tensor]:
        """Return rows (B,), their rewards discounted."""
        found = {name: array[row] for name, array in self.arrays.items()}
        rewards, length, terminated = (found.pop(name) for name in ("rewards", "length", "terminated"))
        step = np.arange(rewards.shape[1])
        found["reward"] = (rewards * GAMMA**step * (step < length[:, None])).sum(1)
        found["discount"] = GAMMA**length * (1 - terminated)
        return {name: torch.as_tensor(part, dtype=torch.float32) for name, part in found.items()}

    def draw(self, n: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return n rows, drawn uniformly."""
        return self.gather(rng.integers(len(self), size=n))

    def draw_by_probability(self, n: int, chance: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return n rows, drawn through a vector of probabilities as long as the replay."""
        return self.gather(rng.choice(len(chance), size=n, p=chance))


def plain_net(inputs: int, widths: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Return linear layers, each but the last followed by normalisation and tanh."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class PlainDsrl:
    """DSRL, one module per network; `sac` learns values of latents from recorded ones.

    Args:
        base: The frozen denoiser.
        chunk: (Th, Da), all of it executed.
        state_dim: Of the encoded observation.
        bound: Of the noise.
        variant: `na` or `sac`.
        widths: Of actor and critics.
    """

    def __init__(
        self,
        base: peers.PlainMlp,
        chunk: tuple[int, int],
        state_dim: int,
        bound: float,
        variant: str,
        widths: tuple[int, ...] = (256, 256, 256),
    ) -> None:
        self.base, self.schedule, self.chunk, self.bound, self.variant = (
            base, peers.ddim_scheduler(), chunk, bound, variant,
        )  # fmt: skip
        size = chunk[0] * chunk[1]
        self.actor = plain_net(state_dim, widths, 2 * size)
        self.critics, self.noise_critics = (
            nn.ModuleList(plain_net(state_dim + size, widths, 1) for _ in range(2)) for _ in range(2)
        )
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.remake()

    def remake(self) -> None:
        """Copy the targets and forget the moments of the optimisers."""
        self.targets = copy.deepcopy(self.critics)
        parts = {"actor": self.actor, "critics": self.critics, "noise_critics": self.noise_critics}
        self.optimizers = {name: torch.optim.Adam(net.parameters(), lr=RATE) for name, net in parts.items()}
        self.optimizers["alpha"] = torch.optim.Adam([self.log_alpha], lr=RATE)

    def draw(self, state: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents (B, A) and their log-density (B, 1)."""
        mean, log_std = self.actor(state).chunk(2, dim=1)
        law = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        g = law.mean + law.stddev * eps
        u = torch.tanh(g)
        return u, (law.log_prob(g) - torch.log(1 - u**2 + FLOOR)).sum(1, keepdim=True)

    def decode(self, state: Tensor, latent: Tensor) -> Tensor:
        """Return the frozen policy's chunks (B, A)."""
        start = (self.bound * latent).view(-1, *self.chunk)
        return peers.diffusers_ddim(self.base, self.schedule, state, start).flatten(1)

    def values(self, critics: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
        """Return the values (B, E) of every critic."""
        joint = torch.cat([state, action], 1)
        return torch.cat([critic(joint) for critic in critics], 1)

    def step(self, batch: dict[str, Tensor], eps: Tensor, next_eps: Tensor) -> dict[str, float]:
        """Take a step of temperature, critics and actor."""
        latent, log_prob = self.draw(batch["state"], eps)
        alpha = self.log_alpha.detach().exp()
        self._descend("alpha", -(self.log_alpha * log_prob.detach()).mean())
        with torch.no_grad():
            next_latent, next_log_prob = self.draw(batch["next_state"], next_eps)
            is_na = self.variant == "na"
            judged = self.decode(batch["next_state"], next_latent) if is_na else next_latent
            least = self.values(self.targets, batch["next_state"], judged).min(1, keepdim=True).values
            target = batch["reward"][:, None] + batch["discount"][:, None] * (least - alpha * next_log_prob)
        found = self.values(self.critics, batch["state"], batch["action" if is_na else "latent"])
        critic_loss = 0.5 * ((found - target) ** 2).mean(0).sum()
        self._descend("critics", critic_loss)
        climbed = self.values(self.noise_critics if is_na else self.critics, batch["state"], latent)
        actor_loss = (alpha * log_prob - climbed.min(1, keepdim=True).values).mean()
        self._descend("actor", actor_loss)
        for late, new in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            late.data.mul_(1 - TAU).add_(TAU * new.data)
        return {"critic/loss": critic_loss.item(), "actor/loss": actor_loss.item()}

    def distill(self, batch: dict[str, Tensor], latent: Tensor) -> dict[str, float]:
        """Take a step of the values of latents (B, A)."""
        with torch.no_grad():
            target = self.values(self.critics, batch["state"], self.decode(batch["state"], latent))
        loss = 0.5 * ((self.values(self.noise_critics, batch["state"], latent) - target) ** 2).mean(0).sum()
        self._descend("noise_critics", loss)
        return {"noise_critic/loss": loss.item()}

    def _descend(self, name: str, loss: Tensor) -> None:
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()
