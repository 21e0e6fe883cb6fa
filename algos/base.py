"""Protocol between trainer and algorithms: advance, report, save, resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from algos.training.ranks import current
from algos.training.settings import BuildSettings
from envs.datasets.episodes import EpisodeDataset
from envs.engine.pixels import match_cameras
from envs.fit import require_dataset_of, require_fit
from envs.rollouts.fleet import LOCAL, Fleet, RolloutSettings
from envs.rollouts.rollout import RolloutPool
from envs.rollouts.starts import Starts
from envs.spec import EnvConfig
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy, PolicyConfig

_log = logging.getLogger(__name__)
AT_BOUND = 0.98  # fraction of the action or latent bounds beyond which an entry counts as saturated

Metrics = dict[str, float | Tensor]  # `component/quantity` -> value; only the logger converts tensors
Quantities = dict[str, Tensor]  # `component/quantity` -> detached scalar
Draws = Mapping[str, Tensor]  # random numbers of a step by name


class OnFirstUse:
    """Descriptor of a field whose value may be a zero-argument function, called at the first read.

    The value itself is kept as `_<name>` in the instance.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return None
        value = vars(instance)[self._key]
        if callable(value):
            value = vars(instance)[self._key] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._key] = value


@dataclass
class Setup:
    """Inputs of `AlgoConfig.build`; an algorithm refuses a setup without its required parts."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)  # for algorithms that build a new policy
    env: EnvConfig | None = None
    dataset: EpisodeDataset | None = OnFirstUse()  # type: ignore[assignment]
    init: Policy | None = None  # policy to start from
    teacher: Policy | None = None  # policy to distil from
    starts: Starts | None = OnFirstUse()  # type: ignore[assignment]
    seed: int = 0
    num_seeds: int = 1  # seeds trained at once in this process, this one included
    num_workers: int = BuildSettings.num_workers
    fleet: Fleet = LOCAL
    num_threads: int | None = BuildSettings.num_threads
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    allow_other_task: bool = False  # accept a dataset that was recorded in another task

    def __post_init__(self) -> None:
        if isinstance(self.init, Policy):  # methods also pass other modules that implement a protocol
            self.init = self.init.without_provenance()

    @property
    def has_unused_starts(self) -> bool:
        """Whether starts are given that no algorithm has read: it collects no episodes."""
        return callable(vars(self)["_starts"])

    @property
    def acts_on(self) -> torch.device | None:
        """Where the policy acts for all environments at once; None: copies of it act in the workers."""
        where = self.rollout.device
        at_learner = (
            self.device.type != "cpu" and not self.fleet.is_free if where == "auto" else where == "learner"
        )
        return self.device if at_learner else None

    def pool(self, policy: Policy, num_envs: int, **options: Any) -> RolloutPool:
        """Return environments in which a policy collects experience; options are those of `RolloutPool`."""
        assert self.env is not None
        return RolloutPool(
            match_cameras(self.env, policy.images),
            num_envs=num_envs,
            num_workers=self.num_workers,
            fleet=self.fleet,
            acts_on=self.acts_on,
            obs_steps=policy.chunk.obs_steps,
            seed=self.seed,
            starts=self.starts,
            **options,
        )

    def threads(self, default: int) -> int:
        """Return `num_threads`, or the algorithm's `default`; ConfigError if it is not positive.

        On-policy algorithms compute parts of a gradient on this many threads with one torch thread each;
        results are the same for any number. Other algorithms set torch's intra-op threads: more than one
        rarely helps small networks and changes results in the last bits.
        """
        threads = default if self.num_threads is None else self.num_threads
        if threads < 1:
            raise ConfigError(f"num_threads must be at least 1, or null; got {threads}.")
        return threads


def dataset_of(setup: Setup, algo: str, needs: str) -> EpisodeDataset:
    """Return the dataset of a setup, after a comparison with its task and `init`.

    Raises:
        ConfigError: If there is none (`needs` names what it must hold), or their sizes or cameras differ.
    """
    if setup.dataset is None:
        raise ConfigError(f"algo={algo} needs {needs}; got none. Give dataset=<file>.")
    dataset, advice = setup.dataset, "Use a dataset of the same task."
    if setup.env is not None:
        require_dataset_of(setup.env, dataset, allow_other_task=setup.allow_other_task)
    if setup.init is not None:
        require_fit("the policy of init", setup.init, dataset.source, dataset, advice=advice)
    return dataset


def seen_by(policy: Policy, dataset: EpisodeDataset) -> EpisodeDataset:
    """Return the dataset with the cameras that a policy sees; logs the names of others."""
    if unseen := sorted(dataset.images.keys() - policy.images.keys()):
        _log.info(
            "%s: cameras that the policy does not see: %s; encoder=resnet and encoder=vit read images.",
            dataset.source, ", ".join(unseen),
        )  # fmt: skip
    return dataset.with_cameras(policy.images)


def goal_dim_of(setup: Setup, dataset: EpisodeDataset) -> int:
    """Return Dg of `init`, else of the task, else of the dataset if goals are dropped.

    Raises:
        ConfigError: If the dataset lacks these goals.
    """
    recorded = dataset.extras["goal"].shape[-1] if "goal" in dataset.extras else 0
    goal_dim = recorded if setup.policy.goal_dropout else 0
    if setup.init is not None:
        goal_dim = setup.init.goal_dim
    elif setup.env is not None:
        goal_dim = setup.env.spec.goal_dim
    if goal_dim and not recorded:
        raise ConfigError(
            f"the policy is conditioned on goals; {dataset.source} has no key 'goal'. Use a dataset that "
            f"records them, or a task whose goal is part of the state (env.goal=appended in mazes)."
        )
    if goal_dim and goal_dim != recorded:
        raise ConfigError(
            f"the policy is conditioned on goals of width {goal_dim}; those of {dataset.source} have width "
            f"{recorded}. Use a dataset of the same task."
        )
    return goal_dim


def require_condition_vector(policy: Policy, algo: str) -> None:
    """Refuse a policy whose condition is more than the stored vector (CapabilityError)."""
    try:
        policy.condition(torch.zeros(1, policy.encoder.cond_dim))
    except CapabilityError as error:
        raise CapabilityError(f"algo={algo} remembers observations as features. {error}") from None


def require_one_policy(policy: Policy, algo: str) -> None:
    """Refuse a composition (CapabilityError), which has no network of its own."""
    if isinstance(policy, ComposedPolicy):
        raise CapabilityError(
            f"algo={algo} trains one policy; init is a composition. Train its members, then compose them."
        )


class Algorithm(Protocol):
    """A training run in progress.

    Optional attributes:
        budget: Of a run that can be extended, the key of its length, e.g. `algo.steps`.
        expected: Of a run whose last iteration may exceed `total`, the units after which it will end.
        stage: Where a long iteration is, as text for the progress line.
        data_quality: How good the data are, for the model card; see `algos.cloning.quality`.
    """

    @property
    def progress(self) -> int:
        """Units done (gradient steps offline, environment steps online)."""
        ...

    @property
    def total(self) -> int: ...

    @property
    def unit(self) -> str:
        """Name of the unit: `gradient_steps` or `env_steps`."""
        ...

    def advance(self) -> Metrics:
        """Run one iteration (a PPO iteration, or a block of gradient steps) and return its metrics."""
        ...

    def snapshot(self) -> Policy:
        """Return the policy to export (evaluation mode, averaged weights)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all state for a bit-exact resume: tensors and plain values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class AlgoConfig(Protocol):
    """A registered configuration (group `algo`) that builds its algorithm."""

    def build(self, setup: Setup) -> Algorithm:
        """Check the setup (ConfigError, CapabilityError) and return the algorithm, ready to advance."""
        ...


def device_of(name: str) -> torch.device:
    """Return the torch device of a name; ConfigError if it is unsupported or unavailable."""
    device: torch.device | None = None
    if name == "cuda" and current().world > 1:
        name = f"cuda:{current().local_rank}"
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or cuda:<n>; got '{name}'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} is not available on this machine. Use device=cpu.")
    return device
