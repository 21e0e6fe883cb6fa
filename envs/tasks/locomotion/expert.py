"""Trained actors as experts of locomotion, with action noise.

`expert` and `medium` are policy directories in `assets/actors`, trained from reward alone by
`python -m benchmarks.studies.actors`: the best checkpoint of a run, and the one whose return is nearest to a
third of that. `random` draws uniform actions. `medium-expert` uses the medium actor for even seeds and the
expert for odd ones. `mixed` draws one of the three and a noise scale per episode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from envs.rollouts.recording import Recording, expert_rng
from policies.bounds import Checked, bounded

if TYPE_CHECKING:
    from envs.datasets.episode import Episode
    from envs.spec import EnvSpec
    from envs.tasks.locomotion.stepper import RobotStepper
    from policies.policy import Policy

Act = Callable[[np.ndarray], np.ndarray]
"""Maps an observation (Do,) to an action (Da,)."""

SINGLE = ("expert", "medium", "random")
MEDIUM_EXPERT = ("medium", "expert")
"""Actors of even and odd seeds, for `medium-expert`."""
EXPERTS = (*SINGLE, "medium-expert", "mixed")
MIXED_NOISE = 0.3  # largest additional noise scale of `mixed`


@dataclass(frozen=True)
class LocomotionExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    tier: str = bounded("expert", choices=EXPERTS, was="expert")  # actor; see the module
    noise: float = bounded(0.0, ge=0)  # std of Gaussian noise on every action entry [fraction of full scale]


@cache
def actor(task: str, tier: str) -> Policy:
    """Load an actor shipped with the package; `tier` is `expert` or `medium`."""
    from policies.storage.policy_folder import load_policy

    with as_file(files("assets") / "actors" / task / tier) as directory:
        return load_policy(directory)


def demonstrate_locomotion(
    stepper: RobotStepper, seed: int, options: LocomotionExpert, *, spec: EnvSpec
) -> Episode:
    """Record the episode of a seed in row 0 of a stepper.

    Recorded are the executed actions, noise included, and the physics state before each (`states`: time,
    positions, velocities).
    """
    rng = expert_rng(seed)
    low, high = (np.asarray(side, np.float32) for side in (spec.action_low, spec.action_high))
    act, noise = _select_actor(spec.name, seed, options, rng, high)
    record = Recording(stepper, seed)
    while not record.ended and len(record) < spec.max_episode_steps:
        action = act(record.now) + noise * high * rng.standard_normal(len(high))
        record.step(np.clip(action, low, high), states=stepper.physics_state(0))
    return record.episode(truncated=len(record) >= spec.max_episode_steps, success=False)


def _select_actor(
    task: str, seed: int, options: LocomotionExpert, rng: np.random.Generator, high: np.ndarray
) -> tuple[Act, float]:
    tier, noise = options.tier, options.noise
    if tier == "medium-expert":
        tier = MEDIUM_EXPERT[seed % len(MEDIUM_EXPERT)]
    elif tier == "mixed":
        tier = SINGLE[int(rng.integers(len(SINGLE)))]
        noise += MIXED_NOISE * float(rng.random())
    if tier == "random":
        return lambda _: rng.uniform(-high, high), noise
    policy: Any = actor(task, tier)
    return lambda obs: _mean_action(policy, obs), noise


def _mean_action(policy: Policy, obs: np.ndarray) -> np.ndarray:
    """Return the action (Da,) of a policy with single actions."""
    import torch

    noise = torch.zeros(1, *policy.noise_shape)  # zero noise: the policy's mean action
    action: np.ndarray = policy.act(torch.from_numpy(obs[None, None]).float(), noise=noise)[0, 0].numpy()
    return action
