"""`world`: the task that a learned world imagines; see `envs.engine.learned`, `policies.wrappers.world`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from envs.engine.vector import ChunkVector
from envs.spec import EnvConfig, EnvSpec, JudgedTask
from policies.bounds import Checked, bounded
from policies.errors import CheckpointError, ConfigError
from policies.paths import path_field
from policies.registry import register

if TYPE_CHECKING:
    from envs.engine.learned import LearnedStepper
    from policies.encoders import ImageShape

STARTS = ("initial", "data")


@register("env", "world")
@dataclass(frozen=True)
class LearnedTask(Checked):
    """The task of a learned world, imagined by it; `algo=world` makes one."""

    needs: ClassVar[str] = "model"  # the option without which there is no task

    model: str | None = path_field()  # run or directory of a learned world
    starts: str = bounded("initial", choices=STARTS)  # data: episodes begin in any recorded state
    horizon: int | None = bounded(None, ge=1)  # time limit in control steps; null: that of the task
    doubt: float | None = bounded(1.5, gt=0)  # truncate above this multiple of the data's 99 %; null: never
    cameras: tuple[
        str, ...
    ] = ()  # cameras whose imagined frames are observed; a policy of images adds its own
    known_rules: bool = True  # rewards and ends by the task's rules where it judges states; else as learned

    @property
    def folder(self) -> Path:
        """The directory of the model."""
        if self.model is None:
            raise ConfigError("env=world needs env.model=<run or directory of a learned world>.")
        from policies.storage.policy_folder import policy_in

        return policy_in(self.model)

    @cached_property
    def imagined(self) -> EnvConfig:
        """The task that the world was learned of.

        Raises:
            ConfigError: If there is no model, it does not say its task, or that runs code, which a directory
                must not.
        """
        from envs.datasets.recorded_task import recorded_env
        from policies.storage.policy_folder import read_config

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
    def images(self) -> dict[str, ImageShape]:
        """Shapes of the observed frames, by camera."""
        shown = getattr(self.imagined, "images", {})
        if missing := [camera for camera in self.cameras if camera not in shown]:
            raise ConfigError(
                f"env.cameras must be among those of the world, {', '.join(shown) or 'none'}; got "
                f"{', '.join(missing)}."
            )
        return {camera: shown[camera] for camera in self.cameras}

    def with_cameras(self, images: Mapping[str, ImageShape]) -> LearnedTask:
        """Return the task with exactly the cameras of a policy, whose `images` are shapes by camera.

        Raises:
            ConfigError: If the world has no frames of them, or of another size.
        """
        chosen = replace(self, cameras=tuple(images))
        if chosen.images != {camera: tuple(shape) for camera, shape in images.items()}:
            raise ConfigError(f"the policy needs images {dict(images)}; env.model gives {chosen.images}.")
        return chosen

    @property
    def judge(self) -> JudgedTask | None:
        """The task, where it judges states by known rules; None: rewards and ends are as learned."""
        task = self.imagined
        judges = isinstance(task, JudgedTask) and not getattr(task, "hides_something", False)
        return cast(JudgedTask, task) if self.known_rules and judges else None

    def stepper(self, num_envs: int) -> LearnedStepper:
        from envs.engine.learned import LearnedStepper
        from policies.storage.policy_folder import load_policy
        from policies.wrappers.world import WorldModel

        model: Any = load_policy(self.folder)
        spec = self.spec
        if not isinstance(model, WorldModel) or model.task_dim != spec.obs_dim:
            raise CheckpointError(f"env.model={self.model} is no learned world of {self.imagined.spec.name}.")
        return LearnedStepper(model, num_envs, starts=self.starts, doubt=self.doubt, judge=self.judge)

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build N imagined environments."""
        from envs.engine.learned import ImaginedFrames

        stepper, history = self.stepper(num_envs), None
        if self.cameras:
            coder = stepper.world.coder
            if coder is None or coder.shapes != getattr(self.imagined, "images", {}):
                raise CheckpointError(f"env.model={self.model} has no frames of the cameras of its task.")
            history = ImaginedFrames(stepper, tuple(self.images), obs_steps=obs_steps)
        return ChunkVector(self.spec, stepper, obs_steps=obs_steps, image_history=history)
