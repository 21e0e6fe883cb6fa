"""Meta-World's scripted policies as experts, one for each of its tasks.

They depend only on the current observation, so they correct for noise on the executed actions, which widens
the state distribution for cloning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from envs.rollouts.recording import Recording, expert_rng
from policies.bounds import Checked, bounded

if TYPE_CHECKING:
    from envs.datasets.episode import Episode
    from envs.engine.physics import MujocoStepper
    from envs.spec import EnvSpec


@dataclass(frozen=True)
class ScriptedExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    noise: float = bounded(0.0, ge=0)  # std of Gaussian noise on every executed action entry, box is [-1, 1]
    hold: int = bounded(10, ge=0)  # control steps recorded after the first success


def demonstrate(
    stepper: MujocoStepper, task: str, seed: int, options: ScriptedExpert, *, spec: EnvSpec
) -> Episode:
    """Record the episode of a seed, until a terminating success or a few steps past the first success.

    Recorded are the executed actions, noise included, and the physics state before each (`states`: time,
    positions, velocities). `task` is the name without version.
    """
    from metaworld.policies import ENV_POLICY_MAP

    policy, rng = ENV_POLICY_MAP[f"{task}-v3"](), expert_rng(seed)
    record = Recording(stepper, seed, terminate_on_success=spec.terminate_on_success)
    left = spec.max_episode_steps
    while left > 0 and not record.ended:
        was_solved, action_mean = record.was_solved, policy.get_action(record.now)
        action = np.clip(action_mean + options.noise * rng.standard_normal(len(action_mean)), -1, 1)
        record.step(action, states=stepper.physics_state(0))
        left -= 1
        if record.was_solved and not was_solved:
            left = min(left, options.hold)
    return record.episode(truncated=not record.ended, success=record.was_solved)
