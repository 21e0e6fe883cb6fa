"""Imagined episodes: a learned world, stepped like a simulator.

An episode begins in a recorded state and keeps one member of the ensemble. Both follow from its seed, and its
noise from the seed and the step: neither the number of environments nor the other ones matter. Where the
members disagree too much, an episode is truncated, so that its value goes on.

Legend: N environments, M of them addressed, Do and Da widths of state and action, To observation history. In
a world of frames the task observes the first part of the state; the rest is drawn where images are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from envs.engine.image_history import ImageHistory
from envs.engine.lanes import distinct_groups
from envs.spec import Array, JudgedTask, StepResult
from policies.errors import ConfigError
from policies.networks.weight_cache import seal
from policies.wrappers.world import Answers, WorldModel

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
        # One call, since caches of weights must be full before they are sealed.
        self._answers(nobody, nobody, np.zeros((0, world.obs_dim - world.state_dim)))
        seal(world)

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode of one row in a recorded state; returns the observation."""
        generator = np.random.default_rng((seed, _START))
        self._states[row] = self._starts[generator.integers(len(self._starts))]
        self._member[row] = generator.integers(self._num_members)
        self._seeds[row], self._elapsed[row] = seed, 0
        return self._states[row, : self.world.task_dim].copy()

    def latent(self, row: int) -> Array:
        """Return the vector of a row's frames."""
        return self._states[row, self.world.task_dim :].copy()

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Imagine one control step of rows (M,) under actions (M, Da)."""
        actions, lanes = np.asarray(actions, np.float64), self._seeds[rows] % BLOCK_ROWS
        reached, (reward, doubt) = np.empty((len(rows), self.world.state_dim)), np.empty((2, len(rows)))
        terminated, success = np.empty((2, len(rows)), bool)
        for some in distinct_groups(lanes.tolist()):
            answers = self._answers(rows[some], lanes[some], actions[some])
            own = (torch.from_numpy(self._member[rows[some]]), torch.from_numpy(lanes[some]))
            reached[some], reward[some] = answers.states[own].numpy(), answers.rewards[own].numpy()
            terminated[some], success[some] = answers.terminated[own].numpy(), answers.success[own].numpy()
            doubt[some] = answers.doubt[own[1]].numpy()
        obs = reached[:, : self.world.task_dim]
        if self._judge is not None:
            before = self._states[rows, : self.world.task_dim]
            reward, terminated, success = self._judge.judge(before, actions, obs)
        self._states[rows] = reached
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


class ImaginedFrames(ImageHistory[Array]):
    """The frames of a world of frames, each drawn by itself; see `ImageHistory` for the arguments."""

    def __init__(self, stepper: LearnedStepper, cameras: Sequence[str], *, obs_steps: int) -> None:
        super().__init__(stepper.num_envs, cameras, obs_steps)
        self._stepper = stepper

    def capture(self, row: int) -> Array:
        return self._stepper.latent(row)

    def draw(self, state: Array) -> dict[str, Array]:
        coder = self._stepper.world.coder
        assert coder is not None
        images = coder.draw(torch.from_numpy(state[None]).float())
        return {camera: image[0].numpy() for camera, image in images.items()}
