"""Policies and exported folders as served by a policy server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from policies.execution.history import Array
from policies.export.exported_policy import ExportedPolicy
from policies.export.folder import MODELS, Surroundings
from policies.policy import Policy
from policies.serving.messages import Schema, floats_of
from policies.storage.checksums import sha256
from policies.storage.features import Feature
from policies.wrappers.best_of_n import BestOfN

STATE = "observation"  # name in messages and exported folders of what policies call `state`


class ServedPolicy:
    """A policy on its current device; `fingerprint` identifies its weights."""

    def __init__(
        self, policy: Policy | BestOfN, around: Surroundings | None = None, fingerprint: str = ""
    ) -> None:
        self._policy = policy.eval()
        self.noise_shape = tuple(policy.noise_shape)
        chunk, around = policy.chunk, around or Surroundings()
        inputs = {STATE: Feature((chunk.obs_steps, policy.obs_dim))}
        if policy.goal_dim:
            inputs["goal"] = Feature((policy.goal_dim,))
        for camera, shape in policy.images.items():
            inputs[camera] = Feature((chunk.obs_steps, *shape), "uint8")
        action = Feature((chunk.act_steps, chunk.action_dim))
        bounds = floats_of(around.action_low), floats_of(around.action_high)
        self.schema = Schema(
            inputs, action, chunk.obs_steps, around.task, around.control_hz, *bounds, fingerprint
        )

    def decide(self, inputs: Mapping[str, Array], noise: Array) -> Array:
        obs = {"state" if name == STATE else name: value for name, value in inputs.items()}
        drawn = torch.as_tensor(noise, dtype=self._policy.dtype, device=self._policy.device)
        actions: Array = self._policy.act(obs, noise=drawn).float().cpu().numpy()
        return actions


class ServedFolder:
    """An exported folder, run by onnxruntime; errors as `ExportedPolicy`."""

    def __init__(self, directory: str | Path) -> None:
        folder = Path(directory)
        self._policy = ExportedPolicy(folder)
        models = [folder / name for name in MODELS if (folder / name).is_file()]
        fingerprint = hashlib.sha256("".join(map(sha256, models)).encode()).hexdigest()
        facts = self._policy.description
        own = (facts.task, facts.control_hz, facts.low, facts.high)
        self.schema = Schema(facts.inputs, facts.action, facts.chunk.obs_steps, *own, fingerprint)
        self.noise_shape = facts.noise_shape

    def decide(self, inputs: Mapping[str, Array], noise: Array) -> Array:
        obs = {"state" if name == STATE else name: value for name, value in inputs.items()}
        actions: Array = self._policy.act(obs, noise=torch.from_numpy(noise)).numpy()
        return actions
