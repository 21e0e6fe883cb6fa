"""What ours is compared with in offline learning: plain programs in the manner of the released ones.

Separate arrays in NumPy that are converted at every step, modules one by one, a loop over parameters for the
target copies, and for PRDC a query of a tree at every step of the actor. Written for this comparison.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial import KDTree
from torch import Tensor, nn


def plain_net(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PlainTd3Bc:
    """TD3+BC, one module per network.

    Args:
        arrays: state, action, reward, next_state, discount; float32, reward and discount (M, 1).
        alpha: Weight of the value.
        width: Of the two hidden layers.
    """

    def __init__(self, arrays: dict[str, np.ndarray], alpha: float = 2.5, width: int = 256) -> None:
        self.arrays, self.alpha = arrays, alpha
        states, actions = arrays["state"].shape[1], arrays["action"].shape[1]
        self.actor = nn.Sequential(plain_net(states, width, width, actions), nn.Tanh())
        self.critics = nn.ModuleList(plain_net(states + actions, width, width, 1) for _ in range(2))
        self.remake()

    def remake(self) -> None:
        """Copy the targets and forget the moments of the optimisers."""
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4)
        self.steps = 0

    def batch(self, row: np.ndarray) -> dict[str, Tensor]:
        """Return rows (B,) of every array as tensors."""
        return {name: torch.tensor(array[row], dtype=torch.float32) for name, array in self.arrays.items()}

    def values(self, critics: nn.ModuleList, state: Tensor, action: Tensor) -> list[Tensor]:
        """Return the values (B, 1) of every critic."""
        joint = torch.cat([state, action], 1)
        return [critic(joint) for critic in critics]

    def step(self, row: np.ndarray, noise: Tensor | None = None) -> dict[str, float]:
        """Take a step on rows (B,); noise (B, A) is that of next actions, drawn if None."""
        self.steps += 1
        batch = self.batch(row)
        with torch.no_grad():
            drawn = torch.randn_like(batch["action"]) if noise is None else noise
            smoothing = (drawn * 0.2).clamp(-0.5, 0.5)
            next_action = (self.target_actor(batch["next_state"]) + smoothing).clamp(-1, 1)
            bound = torch.min(*self.values(self.target_critics, batch["next_state"], next_action))
            target = batch["reward"] + batch["discount"] * bound
        values = self.values(self.critics, batch["state"], batch["action"])
        loss = F.mse_loss(values[0], target) + F.mse_loss(values[1], target)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        out = {"critic_loss": loss.item()}
        if self.steps % 2 == 0:
            out["actor_loss"] = self._move_actor(batch)
        return out

    def _move_actor(self, batch: dict[str, Tensor]) -> float:
        action = self.actor(batch["state"])
        value = self.values(self.critics, batch["state"], action)[0]
        scale = self.alpha / value.abs().mean().detach()
        loss = -scale * value.mean() + F.mse_loss(action, self.aim(batch, action))
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        for online, slow in ((self.critics, self.target_critics), (self.actor, self.target_actor)):
            for p, q in zip(online.parameters(), slow.parameters(), strict=True):
                q.data.copy_(0.005 * p.data + 0.995 * q.data)
        return loss.item()

    def aim(self, batch: dict[str, Tensor], action: Tensor) -> Tensor:
        """Return the actions (B, A) that the actor is kept near."""
        return batch["action"]


class PlainPrdc(PlainTd3Bc):
    """PRDC: a tree over all rows, asked at every step of the actor."""

    def __init__(self, arrays: dict[str, np.ndarray], alpha: float = 2.5, beta: float = 2.0) -> None:
        super().__init__(arrays, alpha)
        self.beta = beta
        self.tree = KDTree(np.hstack([beta * arrays["state"], arrays["action"]]))

    def aim(self, batch: dict[str, Tensor], action: Tensor) -> Tensor:
        """Return the action of the nearest row."""
        key = torch.cat([self.beta * batch["state"], action], 1).detach().numpy()
        index = self.tree.query(key, k=1)[1]
        return torch.tensor(self.arrays["action"][index])
