"""`world`: the task that a learned world imagines; see `policies.wrappers.world`.

An episode begins in a recorded state and keeps one member of the ensemble. Both follow from its seed, and its
noise from the seed and the step: neither the number of environments nor the other ones matter. Where the
members disagree too much, an episode is truncated, so that its value goes on.

Legend: N environments, M of them addressed, Do and Da widths of state and action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from envs.datasets.recorded_task import recorded_env
from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvConfig, EnvSpec, JudgedTask, StepResult
from policies.bounds import Checked, bounded
from policies.errors import CheckpointError, ConfigError
from policies.networks.weight_cache import seal
from policies.paths import path_field
from policies.registry import register
from policies.storage.policy_folder import load_policy, policy_in, read_config
from policies.wrappers.world import Answers, WorldModel

STARTS = ("initial", "data")
BLOCK_ROWS = 32  # rows of every call of the networks, and lanes: a row's place in a matrix affects rounding
_START, _NOISE = 0, 1  # streams of random numbers of an episode


class LearnedStepper:
    """N imagined episodes.

    Args:
        world: The model, on the CPU; its weights do not change any more.
        num_envs: N.
        starts: `initial`, first states of recorded episodes, or `data`, any recorded states.
        doubt: Truncate where the doubt exceeds this multiple of the model's limit; None: never.
        judge: The task whose rules give rewards and ends; None: as learned.
    """

    can_save = True

    def __init__(
        self,
        world: WorldModel,
        num_envs: int,
        *,
        starts: str = "initial",
        doubt: float | None = None,
        judge: JudgedTask | None = None,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        self.world, self.num_envs, self._judge = world, num_envs, judge
        self._starts = (world.first_states if starts == "initial" else world.states).double().numpy()
        self._limit = np.inf if doubt is None else doubt * float(world.doubt_limit)
        self._num_members = len(world.members)
        self._states = np.zeros((num_envs, world.state_dim))
        self._seeds, self._elapsed, self._member = np.zeros((3, num_envs), np.int64)
        nobody = np.zeros(0, np.int64)
        self._answers(nobody, nobody, np.zeros((0, world.obs_dim - world.state_dim)))
        seal(world)

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode of one row in a recorded state; returns (Do,)."""
        generator = np.random.default_rng((seed, _START))
        self._states[row] = self._starts[generator.integers(len(self._starts))]
        self._member[row] = generator.integers(self._num_members)
        self._seeds[row], self._elapsed[row] = seed, 0
        return self._states[row].copy()

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Imagine one control step of rows (M,) under actions (M, Da)."""
        actions, lanes = np.asarray(actions, np.float64), self._seeds[rows] % BLOCK_ROWS
        obs, (reward, doubt) = np.empty((len(rows), self.world.state_dim)), np.empty((2, len(rows)))
        terminated, success = np.empty((2, len(rows)), bool)
        for some in _blocks(lanes):
            answers = self._answers(rows[some], lanes[some], actions[some])
            own = (torch.from_numpy(self._member[rows[some]]), torch.from_numpy(lanes[some]))
            obs[some], reward[some] = answers.states[own].numpy(), answers.rewards[own].numpy()
            terminated[some], success[some] = answers.terminated[own].numpy(), answers.success[own].numpy()
            doubt[some] = answers.doubt[own[1]].numpy()
        if self._judge is not None:
            reward, terminated, success = self._judge.judge(self._states[rows], actions, obs)
        self._states[rows] = obs
        self._elapsed[rows] += 1
        return StepResult(obs, reward, terminated, (doubt > self._limit) & ~terminated, success)

    def _answers(self, rows: Array, lanes: Array, actions: Array) -> Answers:
        """Return what the members say to rows in distinct lanes, at their lanes."""
        states, acted = (
            np.zeros((BLOCK_ROWS, part.shape[1]), np.float32) for part in (self._states, actions)
        )
        noise = np.zeros((BLOCK_ROWS, *self.world.noise_shape), np.float32)
        states[lanes], acted[lanes] = self._states[rows], actions
        if self.world.noise_sensitive:
            keys = zip(lanes.tolist(), self._seeds[rows].tolist(), self._elapsed[rows].tolist(), strict=True)
            for lane, seed, step in keys:
                bits = np.random.Philox(key=(seed, _NOISE), counter=(0, step, 0, 0))
                noise[lane] = np.random.Generator(bits).standard_normal(noise.shape[1:], np.float32)
        return self.world.answer(*(torch.from_numpy(given) for given in (states, acted, noise)))

    def metrics(self) -> dict[str, Array]:
        return {}

    def get_state(self) -> dict[str, Array]:
        return {
            "states": self._states.copy(),
            "seeds": self._seeds.copy(),
            "elapsed": self._elapsed.copy(),
            "member": self._member.copy(),
        }

    def set_state(self, state: Mapping[str, Array]) -> None:
        self._states = np.array(state["states"], np.float64)
        self._seeds, self._elapsed, self._member = (
            np.array(state[name], np.int64) for name in ("seeds", "elapsed", "member")
        )

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _blocks(lanes: Array) -> list[Array]:
    """Group indices (M,) such that no lane occurs twice in a group."""
    order = np.argsort(lanes, kind="stable")
    first = np.searchsorted(lanes[order], lanes[order])  # of the same lane
    number = np.arange(len(lanes)) - first
    return [order[number == block] for block in range(number.max(initial=-1) + 1)]


@register("env", "world")
@dataclass(frozen=True)
class LearnedTask(Checked):
    """The task of a learned world, imagined by it; `algo=world` makes one."""

    needs: ClassVar[str] = "model"  # the option without which there is no task

    model: str | None = path_field()  # run or directory of a learned world
    starts: str = bounded("initial", choices=STARTS)  # data: episodes begin in any recorded state
    horizon: int | None = bounded(None, ge=1)  # time limit in control steps; null: that of the task
    doubt: float | None = bounded(1.5, gt=0)  # truncate above this multiple of the data's 99 %; null: never
    known_rules: bool = True  # rewards and ends by the task's rules where it judges states; else as learned

    @property
    def folder(self) -> Path:
        """The directory of the model."""
        if self.model is None:
            raise ConfigError("env=world needs env.model=<run or directory of a learned world>.")
        return policy_in(self.model)

    @cached_property
    def imagined(self) -> EnvConfig:
        """The task that the world was learned of.

        Raises:
            ConfigError: If there is no model, it does not say its task, or that runs code, which a directory
                must not.
        """
        facts = read_config(self.folder).get("provenance", {}).get("env")
        found = facts if isinstance(facts, Mapping) else {}
        options = {key: value for key, value in found.items() if key != "name"}
        task = recorded_env(str(found.get("name")), options)
        if task is None or isinstance(task, LearnedTask) or getattr(task, "runs_code", False):
            raise ConfigError(
                f"env.model={self.model} must be a world learned of a task that runs no code of its own; got "
                f"env={found.get('name')}."
            )
        return task

    @property
    def spec(self) -> EnvSpec:
        own = self.imagined.spec
        return replace(
            own,
            name=f"world:{own.name}",
            max_episode_steps=self.horizon or own.max_episode_steps,
            simulator_dim=0,
            episode_metrics=(),
            packages=(),
            extra="",
        )

    @property
    def judge(self) -> JudgedTask | None:
        """The task, where it judges states by known rules; None: rewards and ends are as learned."""
        task = self.imagined
        judges = isinstance(task, JudgedTask) and not getattr(task, "hides_something", False)
        return cast(JudgedTask, task) if self.known_rules and judges else None

    def stepper(self, num_envs: int) -> LearnedStepper:
        model: Any = load_policy(self.folder)
        spec = self.spec
        if not isinstance(model, WorldModel) or model.state_dim != spec.obs_dim:
            raise CheckpointError(f"env.model={self.model} is no learned world of {self.imagined.spec.name}.")
        return LearnedStepper(model, num_envs, starts=self.starts, doubt=self.doubt, judge=self.judge)

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build N imagined environments."""
        return ChunkVector(self.spec, self.stepper(num_envs), obs_steps=obs_steps)
