"""The smallest real algorithm: a policy whose weights walk at random, from every kind of generator."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import torch

from algos.training.serialization import capture_generator, restore_generator
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig


def tiny_policy(seed: int = 0) -> Policy:
    """Make a real policy with very few weights; 2 observations, 1 action, chunk of 2."""
    config = PolicyConfig(backbone=MlpConfig(width=8), horizon=2, act_steps=2)
    limits = {"min": torch.tensor([-1.0]), "max": torch.tensor([1.0])}
    statistics = {
        "action": limits,
        "state": {key: value.expand(2) for key, value in limits.items()},
    }
    return build_policy(config, obs_dim=2, action_dim=1, statistics=statistics, seed=seed)


class RandomWalk:
    """Adds noise of three generators (torch, numpy, global torch) to the weights."""

    unit = "env_steps"

    def __init__(self, total: int = 10, stride: int = 1) -> None:
        self.policy = tiny_policy()
        self.progress, self.total, self.stride = 0, total, stride
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(2)
        self.losses: dict[int, float] = {}  # loss to report at a step, instead of a finite one
        self.signals: dict[int, signal.Signals] = {}  # signal sent to ourselves in the iteration to a step
        self.metrics: dict[str, float] = {}

    @torch.no_grad()
    def advance(self) -> dict[str, Any]:
        self.progress = min(self.progress + self.stride, self.total)
        if self.progress in self.signals:
            signal.raise_signal(self.signals[self.progress])
        for weight in self.policy.parameters():
            weight += torch.randn(weight.shape, generator=self.torch_generator)
            weight += torch.randn(weight.shape) + self.numpy_generator.normal()
        loss = self.losses.get(self.progress, float(self.progress))
        return {"policy/loss": torch.tensor(loss), "rollout/return": 1.5, **self.metrics}

    def snapshot(self) -> Policy:
        return self.policy.clone().eval()

    def weights(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.policy.parameters()).detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress,
            "policy": self.policy.state_dict(),
            "torch": capture_generator(self.torch_generator),
            "numpy": capture_generator(self.numpy_generator),
            "counts": np.arange(3),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["counts"], np.ndarray)
        self.progress = state["progress"]
        self.policy.load_state_dict(state["policy"])
        restore_generator(self.torch_generator, state["torch"])
        restore_generator(self.numpy_generator, state["numpy"])

    def close(self) -> None:
        pass
