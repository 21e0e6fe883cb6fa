"""Where workers run: processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.registry import register


class Fleet(Protocol):
    """Starts workers."""

    @property
    def is_free(self) -> bool:
        """Whether workers of an off-policy run do not wait for each other."""
        ...

    @property
    def max_lag(self) -> int | None: ...

    def start(
        self, factory: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, processes: bool
    ) -> Any:
        """Build one object per tuple of arguments; without `processes`, in this process.

        Returns:
            `envs.engine.workers.Workers`.
        """
        ...


@register("fleet", "local")
@dataclass(frozen=True)
class LocalFleet:
    """Worker processes of this machine."""

    is_free: ClassVar[bool] = False
    max_lag: ClassVar[int | None] = None

    def start(
        self, factory: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, processes: bool
    ) -> Any:
        from envs.engine.workers import start_workers  # imports torch; help pages read this file

        return start_workers(factory, arguments, processes=processes)


@register("fleet", "ray")
@dataclass(frozen=True)
class RayFleet(Checked):
    """Actors of a Ray cluster, `num_workers` of them; a lost one costs time, not correctness."""

    address: str | None = None  # of a cluster; auto: the one of this machine; null: starts and ends one
    mode: str = bounded("lockstep", choices=("lockstep", "free"))  # free: off-policy workers do not wait
    max_lag: int | None = bounded(None, ge=1)  # of mode=free: updates since a worker got its weights, at most
    timeout_s: float = bounded(60.0, gt=0)  # without a sign of life, before a worker is replaced [s]

    @property
    def is_free(self) -> bool:
        return self.mode == "free"

    def start(
        self, factory: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, processes: bool
    ) -> Any:
        """Start the actors.

        Raises:
            ConfigError: If `num_workers` is 0.
            MissingExtraError: If Ray is not installed.
        """
        if not processes:
            raise ConfigError("num_workers must be at least 1 with fleet=ray; got 0.")
        from envs.engine.ray_workers import RayWorkers  # imports Ray

        return RayWorkers(factory, arguments, address=self.address, timeout_s=self.timeout_s)


LOCAL = LocalFleet()


@dataclass(frozen=True)
class RolloutSettings(Checked):
    """Where the policy acts while experience is collected; environments are in the workers.

    Attributes:
        device: `workers`: each acts by a copy of the policy on the CPU; `learner`: one decision for all
            environments, on `device`; `auto`: `learner` where `device` is an accelerator.
    """

    key: ClassVar[str] = "rollout"

    device: str = bounded("auto", choices=("auto", "workers", "learner"))
