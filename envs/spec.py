"""What an environment is, before any simulator is imported."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from envs.engine.vector import VectorEnv


@dataclass(frozen=True)
class EnvSpec:
    """Names, sizes, units and rules of one task.

    `obs_names` and `action_names` carry the unit in brackets, e.g. `torso height [m]`.
    """

    name: str
    family: str
    obs_dim: int
    action_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_episode_steps: int
    control_hz: float
    obs_names: tuple[str, ...]
    action_names: tuple[str, ...]
    success_rule: str = ""  # in words; empty where the task has a return but no success
    terminate_on_success: bool = False  # whether solving a task that would go on terminates its episode
    reference_scores: tuple[float, float] | None = None  # D4RL (random, expert) returns
    goal_dim: int = 0  # Dg of goals that are told beside the observation; 0: none are
    state_goal_dim: int = 0  # Dg of goals that are the last entries of the observation; 0: none are
    episode_metrics: tuple[str, ...] = ()  # extra per-episode rows, e.g. "mode" of `avoid`
    packages: tuple[str, ...] = ()  # besides MuJoCo and gymnasium, whose versions decide what happens

    @property
    def quantity(self) -> str:
        """What the task is judged by: `success` or `return`."""
        return judged_by(self.success_rule)


def judged_by(success_rule: str) -> str:
    """Return what a task with such a rule is judged by: `success`, or where it has no rule `return`."""
    return "success" if success_rule else "return"


class EnvConfig(Protocol):
    """A registered configuration (group `env`); simulators are imported in `make_vector`, not before."""

    @property
    def spec(self) -> EnvSpec:
        """Describe the task without importing its simulator."""
        ...

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> VectorEnv:
        """Build the exact in-process engine.

        Raises:
            MissingExtraError: If the simulator is not installed; names the extra.
        """
        ...


def options_of(env: EnvConfig) -> dict[str, Any]:
    """Return the options of a task; none where its configuration is no dataclass."""
    return asdict(env) if is_dataclass(env) and not isinstance(env, type) else {}


def named_options(env: EnvConfig) -> dict[str, Any]:
    """Return a task in plain values: its name and its options."""
    return {"name": env.spec.name, **options_of(env)}
