"""robomimic's state tasks in robosuite 1.5.1: lift, can, square and transport.

Franka arms move by changes of the gripper pose (operational-space control at 20 Hz, stiffness 150). The
reward is 1 on every step on which the task is solved; only the limit ends an episode, unless
`env.terminate_on_success` is set (as in off-policy work on these tasks, e.g. QC, arXiv 2507.07969).

The observation is robomimic's: gripper position, quaternion and finger positions of each arm, then the
`object` vector. Since robosuite 1.5 that vector has another order (and, in lift, another sign):
`object_layout` must name the kind of file a policy was cloned from. With `observation=proprioception` there
is no `object` vector, as in robomimic's image tasks: objects are known by sight only. `env.engine` selects
the stepper: `envs/tasks/robosuite/fast_stepper.py:FastStepper` or robosuite itself,
`envs/tasks/robosuite/reference_stepper.py:RobosuiteStepper`.

Differences from robomimic's rollouts on robosuite 1.4.1, which DPPO (arXiv 2409.00588) used:

- Deltas are in the world frame and `lite_physics` is off, both as in robosuite 1.4.1; the defaults of
  1.5.1 turn the commands of transport's arms by 90 degrees.
- Observations describe the state after the step. robosuite reports them from before the last physics
  step, and can's and square's relative poses from older positions still (zeros after a reset).
- Models are compiled once (`hard_reset=False`), so what robosuite draws at compilation, the sizes of
  lift's cube and of the head of transport's hammer, is the same in all environments and episodes.
- A reset depends on its seed alone and leaves NumPy's global generator as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from envs.engine.pixels import HasCameras
from envs.engine.rendering import replay_frames
from envs.spec import Array, EnvSpec, symmetric_spec
from envs.tasks.robosuite.expert import ArmExpert, demonstrate
from envs.tasks.robosuite.fast_stepper import FastStepper
from envs.tasks.robosuite.reference_stepper import RobosuiteStepper, hide_collisions
from policies.bounds import bounded
from policies.registry import register

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

LAYOUTS = ("v15", "v141")
ENGINES = ("fast", "robosuite")
OBSERVATIONS = ("state", "proprioception")
_ARM = ("eef_pos", "eef_quat", "gripper_qpos")
_TURN = tuple(f"rotation about {axis} [0.5 rad]" for axis in "xyz")
_COMMAND = (*(f"hand {axis} change [5 cm]" for axis in "xyz"), *_TURN, "gripper closing [1]")


def entry_names(key: str) -> tuple[str, ...]:
    """Name the entries of one of robosuite's observations, with units.

    Example:
        >>> entry_names("cube_pos")
        ('cube x [m]', 'cube y [m]', 'cube z [m]')
    """
    label = key.removesuffix("_pos").removesuffix("_quat").removesuffix("_qpos").replace("_", " ")
    label = label.replace("SquareNut", "nut").replace("Can", "can")
    if key.endswith("_quat"):
        return tuple(f"{label} quaternion {part} [1]" for part in "xyzw")
    if key.endswith("_qpos"):
        return tuple(f"{label} finger {side} [m]" for side in ("right", "left"))
    if "_in_" in key:
        return (f"{label} [0 or 1]",)
    return tuple(f"{label} {axis} [m]" for axis in "xyz")


@dataclass(frozen=True)
class _Robosuite(HasCameras):
    """Common options of the four tasks."""

    max_episode_steps: int = bounded(300, ge=1)  # time limit in control steps
    terminate_on_success: bool = False  # whether success terminates the episode
    object_layout: str = bounded("v15", choices=LAYOUTS)  # order of `object`, as in low_dim_v15.hdf5 or v141
    observation: str = bounded("state", choices=OBSERVATIONS)  # proprioception: without objects
    engine: str = bounded("fast", choices=ENGINES)  # fast: own controller on robosuite's model

    name = ""
    task = ""
    num_arms = 1
    success_rule = ""
    object_v15: ClassVar[tuple[str, ...]] = ()
    object_v141: ClassVar[tuple[str, ...]] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        arms = (f"robot{arm}_{key}" for arm in range(self.num_arms) for key in _ARM)
        if self.observation == "proprioception":
            return tuple(arms)
        return (*arms, *(self.object_v15 if self.object_layout == "v15" else self.object_v141))

    @property
    def spec(self) -> EnvSpec:
        obs_names = tuple(name for key in self.keys for name in entry_names(key))
        action_names = _COMMAND
        if self.num_arms == 2:
            action_names = tuple(f"robot{arm} {name}" for arm in range(2) for name in _COMMAND)
        return symmetric_spec(
            obs_names,
            action_names,
            name=self.name,
            family="robosuite",
            max_episode_steps=self.max_episode_steps,
            control_hz=20.0,
            success_rule=self.success_rule,
            terminate_on_success=self.terminate_on_success,
            packages=("robosuite",),
            extra="robosuite",
        )

    def stepper(self, num_envs: int) -> FastStepper | RobosuiteStepper:
        engine = FastStepper if self.engine == "fast" else RobosuiteStepper
        return engine(self.task, self.num_arms, self.keys, num_envs)

    def render_frames(self, seed: int, actions: Array, **options: Any) -> Array:
        vector = self.make_vector(1)
        model = vector.stepper.model  # type: ignore[attr-defined]
        hide_collisions(model)
        return replay_frames(vector, seed, actions, camera="frontview", **options)


@dataclass(frozen=True)
class _Demonstrated(_Robosuite):
    """Common options of the tasks with an expert."""

    expert: ArmExpert = bounded(ArmExpert(), was="demonstrator")  # options of the expert

    def demonstrate(self, seed: int) -> Episode:
        return demonstrate(self.stepper(1), seed, self.expert, spec=self.spec)


@register("env", "lift")
@dataclass(frozen=True)
class Lift(_Demonstrated):
    """Lift a cube (robosuite `Lift`)."""

    name = "lift"
    task = "Lift"
    success_rule = "the centre of the cube is more than 4 cm above the table"
    object_v15 = ("cube_pos", "cube_quat", "gripper_to_cube_pos")
    object_v141 = ("cube_pos", "cube_quat", "-gripper_to_cube_pos")


def _object_keys(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of an object in the layouts v15 and v141."""
    relative = (f"{name}_to_robot0_eef_pos", f"{name}_to_robot0_eef_quat")
    absolute = (f"{name}_pos", f"{name}_quat")
    return relative + absolute, absolute + relative


@register("env", "can")
@dataclass(frozen=True)
class Can(_Demonstrated):
    """Put a can into its bin (robosuite `PickPlaceCan`)."""

    name = "can"
    task = "PickPlaceCan"
    success_rule = "the can lies in its bin and the gripper has left it"
    object_v15, object_v141 = _object_keys("Can")


@register("env", "square")
@dataclass(frozen=True)
class Square(_Demonstrated):
    """Put a square nut on its peg (robosuite `NutAssemblySquare`)."""

    max_episode_steps: int = bounded(400, ge=1)  # time limit in control steps

    name = "square"
    task = "NutAssemblySquare"
    success_rule = "the nut is around the square peg and the gripper has left it"
    object_v15, object_v141 = _object_keys("SquareNut")


_TRANSPORT_BODIES = (
    *("payload_pos", "payload_quat", "trash_pos", "trash_quat", "lid_handle_pos", "lid_handle_quat"),
    *("target_bin_pos", "trash_bin_pos"),
)
_TRANSPORT_FLAGS = ("payload_in_target_bin", "trash_in_trash_bin")
_TRANSPORT_OFFSETS = (
    *("gripper0_to_payload", "gripper0_to_lid_handle"),
    *("gripper1_to_payload", "gripper1_to_trash"),
)


@register("env", "transport")
@dataclass(frozen=True)
class Transport(_Robosuite):
    """Two arms hand a payload from bin to bin and remove trash (robosuite `TwoArmTransport`)."""

    max_episode_steps: int = bounded(800, ge=1)  # time limit in control steps

    name = "transport"
    task = "TwoArmTransport"
    num_arms = 2
    success_rule = "the payload is in the target bin and the trash in the trash bin"
    object_v15 = (*_TRANSPORT_BODIES, *_TRANSPORT_FLAGS, *_TRANSPORT_OFFSETS)
    object_v141 = (*_TRANSPORT_BODIES, *_TRANSPORT_OFFSETS, *_TRANSPORT_FLAGS)
