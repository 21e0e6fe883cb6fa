"""How imagined data keep to the physics of their task and to a policy.

    python -m benchmarks.studies.imagined runs/policy real.hdf5 imagined.hdf5 …

prints a row per dataset, over evenly spaced steps: the error of the next state against one step of the
simulator from the recorded state, in deviations of the first dataset's states (root mean square, and median
over steps); the distance of actions to the policy's, in the box as [-1, 1]; the share of steps that end the
task. For tasks whose states are positions and speeds (`benchmarks.studies.world.can_be_drawn`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import pages
from benchmarks.options import parser
from benchmarks.studies.world import can_be_drawn, put
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.datasets import read_dataset
from envs.datasets.episode import Transitions
from envs.spec import EnvConfig

STEPS = 2000


def some(steps: Transitions) -> Tensor:
    """Return evenly spaced transitions that do not end the task."""
    going_on = (~steps.terminated).nonzero().squeeze(1)
    return going_on[torch.linspace(0, len(going_on) - 1, min(STEPS, len(going_on))).long()]


def physics_errors(env: EnvConfig, steps: Transitions, scale: Tensor) -> np.ndarray:
    """Return the errors (M,) of transitions against one step of the simulator, in units of a scale (Do,)."""
    stepper: Any = env.make_vector(1).stepper
    stepper.reset(0, 0)
    rows, errors, picked = np.zeros(1, np.int64), [], some(steps)
    parts = (steps.observations, steps.actions, steps.next_observations)
    for state, action, reached in zip(*(part[picked].double().numpy() for part in parts), strict=True):
        put(stepper, state)
        errors.append(stepper.step(rows, action[None]).obs[0] - reached)
    gone = np.stack(errors) / scale.double().numpy()
    return np.sqrt((gone**2).mean(axis=1))


def distances(policy: Any, env: EnvConfig, steps: Transitions) -> float:
    """Return the mean distance of actions to a policy's, in the box as [-1, 1]."""
    picked = some(steps)
    half = (torch.tensor(env.spec.action_high) - torch.tensor(env.spec.action_low)) / 2
    generator = torch.Generator().manual_seed(0)
    wanted = policy.act({"state": steps.observations[picked, None]}, generator=generator)[:, 0]
    return float(((steps.actions[picked] - wanted) / half).norm(dim=1).mean())


def main() -> None:
    """Print the table."""
    asked = parser(__doc__)
    asked.add_argument("policy")
    asked.add_argument("datasets", nargs="+")
    options = asked.parse_args()
    torch.set_num_threads(1)
    found = locate(options.policy)
    policy, env, rows, scale = found.load().eval(), task_of(found), [], None
    if not can_be_drawn(env):
        raise SystemExit(f"{env.spec.name} shows more than positions and speeds.")
    for path in options.datasets:
        data = read_dataset(path)
        scale = data.observations.std(dim=0) if scale is None else scale
        steps = data.transitions()
        errors, ends = physics_errors(env, steps, scale), 100 * float(data.terminated.float().mean())
        physics = (f"{np.sqrt((errors**2).mean()):.3f}", f"{np.median(errors):.3f}")
        rows.append(
            (data.source, data.num_frames, *physics, f"{distances(policy, env, steps):.3f}", f"{ends:.2f} %")
        )
    columns = ("dataset", "steps", "error of s′", "median", "distance to the policy", "ends")
    print("\n".join(pages.table(columns, rows)))


if __name__ == "__main__":
    main()
