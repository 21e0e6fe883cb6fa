"""Episodes of a policy, watched by the task's expert, who takes over before a failure.

Before the robot executes a chunk, a copy of the simulator does, and what the policy decides after it. Where
the episode fails there, the expert acts for `expert_steps` steps and hands back: the simulated form of a
person who sees it coming.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from envs.datasets.episode import Episode
from envs.datasets.windows import DECISION
from envs.rollouts.observations import observe, to_tensors
from envs.rollouts.player import EvaluatedPolicy
from envs.spec import Array, ChunkStep, EnvConfig, EnvSpec
from policies import registry
from policies.errors import CapabilityError
from policies.seeds import seeded_generator

CORRECTED = "corrected"
"""Extra key (T,): whether the expert acted instead of the policy."""
FORESIGHT = 2  # chunks that are simulated before the first of them is executed


@runtime_checkable
class HasTakeover(Protocol):
    """A task whose expert can continue a running episode; its simulator can save its state."""

    def take_over(self, stepper: Any, seed: int) -> Callable[[], Array]:
        """Return the expert of the running episode in row 0; it returns the next action (Da,)."""
        ...


def require_takeover(env: Any) -> HasTakeover:
    """Return a task whose expert can take over.

    Raises:
        CapabilityError: If it has none; names the tasks that have one.
    """
    if isinstance(env, HasTakeover):
        return env
    able = ", ".join(name for name, part in registry.parts("env").items() if hasattr(part, "take_over"))
    raise CapabilityError(f"env={env.spec.name} has no expert that takes over; tasks that have one: {able}.")


class SupervisedPlayer:
    """A policy that acts in one simulator.

    Args:
        policy: What acts; it may be replaced between episodes.
        env: The task; see `require_takeover` for episodes that are watched.
        expert_steps: Steps for which the expert acts before it hands back.
        speed: Simulated time by real time; None: as fast as possible.
    """

    def __init__(
        self, policy: EvaluatedPolicy, env: EnvConfig, *, expert_steps: int, speed: float | None = None
    ) -> None:
        self.policy, self._env, self._expert_steps = policy, env, expert_steps
        self._step_s = 0.0 if speed is None else 1.0 / (speed * env.spec.control_hz)
        self._vector: Any = env.make_vector(1, obs_steps=policy.chunk.obs_steps)

    def close(self) -> None:
        self._vector.close()

    def play(self, seed: int, *, watched: bool) -> Episode:
        """Play the episode of a seed; its `extras` are `DECISION` and `CORRECTED`, (T,) bool."""
        generator, left = seeded_generator(seed, "supervised"), 0
        obs = self._vector.reset([seed])
        record, expert = _Record(obs[0, -1]), None
        while not record.is_over:
            began = time.monotonic()
            if left == 0:
                chunk, expert = self._decide(obs, generator), None
                if watched and self._fails(chunk, generator):
                    takes_over = require_takeover(self._env).take_over
                    expert, left = takes_over(self._vector.stepper, seed), self._expert_steps
            if expert is not None:
                chunk, left = np.asarray(expert(), np.float32)[None, None], left - 1
            step = self._vector.step_chunk(chunk)
            obs = step.obs
            record.add(step, chunk[0], expert is not None)
            time.sleep(max(0.0, int(step.length[0]) * self._step_s - (time.monotonic() - began)))
        return record.episode(seed, self._env.spec)

    def _decide(self, obs: Array, generator: torch.Generator) -> Array:
        noise = self.policy.sample_noise(1, generator=generator)
        with torch.inference_mode():
            return self.policy.act(to_tensors(observe(self._vector, obs)), noise=noise).cpu().numpy()

    def _fails(self, chunk: Array, generator: torch.Generator) -> bool:
        """Return whether the policy fails within `FORESIGHT` chunks, this one first; nothing changes."""
        saved, future = self._vector.state_dict(), torch.Generator()
        future.set_state(generator.get_state())
        for _ in range(FORESIGHT):
            step = self._vector.step_chunk(chunk)
            if step.done[0]:
                break
            chunk = self._decide(step.obs, future)
        self._vector.load_state_dict(saved)
        return bool(step.terminated[0] and not step.success[0])


class _Record:
    """The steps of a running episode."""

    def __init__(self, first: Array) -> None:
        self._path, self._actions, self._rewards = [first.copy()[None]], list[Array](), list[Array]()
        self._flags: dict[str, list[Array]] = {DECISION: [], CORRECTED: []}
        self._success = False
        self._last: ChunkStep | None = None

    @property
    def is_over(self) -> bool:
        return self._last is not None and bool(self._last.done[0])

    def add(self, step: ChunkStep, actions: Array, is_corrected: bool) -> None:
        """Add the executed steps of a chunk (Ta, Da)."""
        done = int(step.length[0])
        self._path.append(step.path[0, :done])
        self._actions.append(actions[:done])
        self._rewards.append(step.rewards[0, :done])
        self._flags[DECISION].append(np.arange(done) == 0)
        self._flags[CORRECTED].append(np.full(done, is_corrected))
        self._success, self._last = self._success or bool(step.success[0]), step

    def episode(self, seed: int, spec: EnvSpec) -> Episode:
        assert self._last is not None
        actions = np.clip(np.concatenate(self._actions), spec.action_low, spec.action_high)
        return Episode(
            observations=np.concatenate(self._path),
            actions=actions.astype(np.float32),
            rewards=np.concatenate(self._rewards),
            terminated=bool(self._last.terminated[0]),
            truncated=bool(self._last.truncated[0]),
            success=self._success,
            seed=seed,
            extras={name: np.concatenate(values) for name, values in self._flags.items()},
        )
