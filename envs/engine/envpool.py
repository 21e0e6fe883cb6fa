"""The engine of envpool: compiled environments, stepped without Python, for collecting experience only.

It computes what gymnasium computes, to about 1e-13 a step, if both carry the same MuJoCo; then chaos takes
over. It takes one seed when it is made and ignores those of resets, and it cannot save its state. So an
episode does not follow from its seed, nothing continues bit for bit, and evaluation always uses the exact
engine.

Left alone, envpool spends the step after an end on a reset: that step ignores its action and is worth
nothing. Here every end is followed by an explicit reset of that row, before it is stepped again, and rows
that rest are left out of the call.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, NoReturn

import numpy as np

from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvConfig, EnvSpec, StepResult, VectorEnv
from policies.errors import CapabilityError, ConfigError, MissingExtraError
from policies.extras import require

ENGINES = ("exact", "envpool")
MUJOCO_INSIDE = {"1.2.5": "3.6.0"}
"""Release of envpool -> release of MuJoCo compiled into it."""

_LARGEST_SEED = 2**31


def vector_on(engine: str, env: EnvConfig, num_envs: int, *, obs_steps: int = 1) -> VectorEnv:
    """Build N environments on an engine.

    Raises:
        ConfigError: If there is no such engine, or MuJoCo is not the one inside envpool.
        CapabilityError: If envpool has no such task.
        MissingExtraError: If the simulator or envpool is not installed.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}; got '{engine}'.")
    if engine == "exact":
        return env.make_vector(num_envs, obs_steps=obs_steps)
    stepper = EnvpoolStepper(*task_of(env), num_envs, spec=env.spec)
    return ChunkVector(env.spec, stepper, obs_steps=obs_steps)


def task_of(env: Any) -> tuple[str, dict[str, Any]]:
    """Return envpool's name of a task, and its options.

    Raises:
        CapabilityError: If envpool does not have it.
    """
    if not hasattr(env, "envpool_task"):
        raise CapabilityError(f"engine=envpool does not have env={env.spec.name}; use engine=exact.")
    name, options = env.envpool_task()
    return name, options


def check_release() -> None:
    """Refuse an envpool whose MuJoCo is not the one of Python: their physics would differ in every step.

    Raises:
        MissingExtraError: If envpool is not installed.
        ConfigError: If the releases disagree, or envpool is of a release that nobody looked into.
    """
    try:
        release, ours = metadata.version("envpool"), metadata.version("mujoco")
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError(
            "engine=envpool needs the package 'envpool': pip install 'burnish[envpool]'."
        ) from error
    inside = MUJOCO_INSIDE.get(release)
    if inside is None:
        raise ConfigError(
            f"engine=envpool knows the MuJoCo inside envpool {', '.join(MUJOCO_INSIDE)} only; got envpool "
            f"{release}. Install one of these, or use engine=exact."
        )
    if inside != ours:
        raise ConfigError(
            f"engine=envpool simulates with MuJoCo {inside} (inside envpool {release}), but the mujoco that "
            f"evaluates is {ours}. pip install mujoco=={inside}, or use engine=exact."
        )


class EnvpoolStepper:
    """Steps N environments of envpool on one thread.

    Args:
        task: Its name in envpool.
        options: Of the task.
        num_envs: N.
        spec: The task as it is described here.
    """

    can_save = False

    def __init__(self, task: str, options: dict[str, Any], num_envs: int, *, spec: EnvSpec) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        check_release()
        self._envpool = require("envpool", extra="envpool")
        self.num_envs = num_envs
        self._task, self._options, self._spec = task, options, spec
        self._pool: Any = None

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode in one row; the first seed ever given seeds everything, later ones do nothing."""
        if self._pool is None:
            self._pool = self._made(seed % _LARGEST_SEED)
        obs, _ = self._pool.reset(np.array([row], np.int32))
        first: Array = np.asarray(obs[0], np.float64).reshape(-1)
        return first

    def _made(self, seed: int) -> Any:
        """Make the environments; `ChunkVector` applies the time limit."""
        return self._envpool.make(
            self._task,
            env_type="gymnasium",
            num_envs=self.num_envs,
            num_threads=1,
            seed=seed,
            max_episode_steps=self._spec.max_episode_steps + 1,
            **self._options,
        )

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da)."""
        obs, reward, terminated, truncated, info = self._pool.step(
            np.ascontiguousarray(actions, np.float64), rows.astype(np.int32)
        )
        order = np.argsort(info["env_id"])
        flat = np.asarray(obs, np.float64).reshape(len(rows), -1)[order]
        ends = np.asarray(terminated, bool)[order], np.asarray(truncated, bool)[order]
        return StepResult(flat, np.asarray(reward, np.float64)[order], *ends, np.zeros(len(rows), bool))

    def metrics(self) -> dict[str, Array]:
        """Return nothing: the return says it all."""
        return {}

    def get_state(self) -> NoReturn:
        """Refuse.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("engine=envpool cannot save the state of its simulators; use engine=exact.")

    def set_state(self, state: Any) -> NoReturn:
        """Refuse.

        Raises:
            CapabilityError: Always.
        """
        self.get_state()

    def close(self) -> None:
        """Release the simulators."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
