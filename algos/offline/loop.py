"""A run that learns from a fixed dataset: it owns a table of transitions and a learner.

The learner takes a step on a batch with random numbers that it is handed, and knows nothing of datasets,
budgets or reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from algos.base import Metrics, Setup
from algos.offline.overestimation import Probes
from algos.optim import Ema
from algos.training.metrics import Means
from algos.training.resume_checks import init_facts, require_unchanged
from algos.training.serialization import capture_generator, restore_generator
from algos.transitions import Batch, TransitionTable
from envs.datasets.episodes import EpisodeDataset
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy
from policies.seeds import seeded_generator
from policies.threads import torch_threads

THREADS = 1  # of torch, unless `num_threads` says otherwise


class Learner(Protocol):
    """Takes steps on batches.

    Attributes:
        steps: How many it has taken.
    """

    steps: int

    @property
    def policy(self) -> Policy:
        """The policy in training."""
        ...

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of the coming step on n rows."""
        ...

    def step(self, batch: Batch, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take a step; return detached scalars by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything a continuation needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


class StackedLearner(Protocol):
    """Takes the steps of several seeds on batches (S, B, ...).

    Attributes:
        steps: How many it has taken.
    """

    steps: int

    def step(self, batch: Batch, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take a step; return detached tensors (S,) by name."""
        ...


@runtime_checkable
class TrainsSeeds(Protocol):
    """A configuration of an algorithm that can train several seeds at once."""

    def build_seeds(self, setup: Setup, seeds: Sequence[int]) -> list[OfflineRun]:
        """Return one algorithm for each seed; they share the transitions."""
        ...

    def together(self, runs: Sequence[OfflineRun]) -> SeedBatch:
        """Return what takes the steps of runs of several seeds, made by `build_seeds`, at once."""
        ...


class Budget(Protocol):
    """What a run is told: gradient steps, transitions of a batch, gradient steps between two reports.

    Attributes:
        fixed_length: Whether a rate follows the number of steps, so that a run cannot be made longer.
    """

    fixed_length: ClassVar[bool]
    steps: int
    batch_size: int
    block_steps: int


class OfflineRun:
    """A run in progress; see `OfflineConfig`."""

    unit = "gradient_steps"

    def __init__(
        self,
        config: Budget,
        setup: Setup,
        learner: Learner,
        table: TransitionTable,
        dataset: EpisodeDataset,
        *,
        probes: Probes | None = None,
        ema: Ema | None = None,
        resume_invariants: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.learner, self.table, self._probes = config, learner, table, probes
        self._ema = ema
        self.num_threads = setup.threads(THREADS)
        self._index = seeded_generator(setup.seed, "transitions", device=setup.device)
        self._noise = seeded_generator(setup.seed, "learner noise", device=setup.device)
        self._lasting = {
            "seed": setup.seed,
            **init_facts(setup.init, learner.policy),
            "dataset": dataset.digest(),
            **({"total": config.steps} if config.fixed_length else {}),
            **(resume_invariants or {}),
        }
        self._done = 0
        self.is_led = False  # steps are taken by `SeedBatch`, for good

    @property
    def progress(self) -> int:
        """Gradient steps done."""
        return self._done

    @property
    def total(self) -> int:
        """Gradient steps to do."""
        return self.config.steps

    @property
    def budget(self) -> str | None:
        """The key that makes a run longer; None: its length is part of it."""
        return None if self.config.fixed_length else "algo.steps"

    def advance(self) -> Metrics:
        """Take a block of gradient steps and report the means of what was measured.

        Raises:
            CapabilityError: If it is trained together with others; see `SeedBatch`.
        """
        self._require_alone()
        count = min(self.config.block_steps, self.total - self._done)
        start, means = time.perf_counter(), Means()
        with torch_threads(self.num_threads):
            for _ in range(count):
                means.add(self._step())
            measured = means.read() | self.judged()
        return measured | {"time/steps_per_s": count / (time.perf_counter() - start)}

    def judged(self) -> Metrics:
        """Return what the critics are too sure of, where there are critics and probes."""
        critic = getattr(self.learner, "critic", None)
        if critic is None or self._probes is None:
            return {}
        return {"critic/overestimation": self._probes.overestimation(critic)}

    def _step(self) -> dict[str, Tensor]:
        row, draws = self.draw()
        measured = self.learner.step(self.table.gather(row), draws)
        self.follow()
        return measured

    def draw(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows (B,) and the random numbers of the coming step."""
        size, device = self.config.batch_size, self._index.device
        row = torch.randint(len(self.table), (size,), generator=self._index, device=device)
        return row, self.learner.draw(size, self._noise)

    def follow(self) -> None:
        """Let the averaged weights follow a step that was taken."""
        self._done += 1
        if self._ema is not None:
            self._ema.update(self.learner.policy)

    def snapshot(self) -> Policy:
        """Return a copy of the policy, its weights averaged where they are to be, in evaluation mode."""
        policy = self.learner.policy if self._ema is None else cast(Policy, self._ema.module)
        return policy.clone().eval().requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bit-exact continuation needs."""
        return {
            "done": self._done,
            "learner": self.learner.state_dict(),
            "index": capture_generator(self._index),
            "noise": capture_generator(self._noise),
            **({} if self._ema is None else {"ema": self._ema.state_dict()}),
            **self._lasting,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: If length, data, seed, the policy to start from or what is made of rewards are
                not those of the run.
            CapabilityError: If it is trained together with others; see `SeedBatch`.
        """
        self._require_alone()
        require_unchanged(state, self._lasting)
        self.learner.load_state_dict(state["learner"])
        if self._ema is not None:
            self._ema.restore(state.get("ema"), self.learner.policy)
        restore_generator(self._index, state["index"])
        restore_generator(self._noise, state["noise"])
        self._done = int(state["done"])

    def _require_alone(self) -> None:
        if self.is_led:
            raise CapabilityError(
                "this run takes its steps together with other seeds. Build it anew to advance it alone or to "
                "continue it from a state."
            )

    def close(self) -> None:
        """Nothing to release."""


class SeedBatch:
    """Runs of several seeds whose steps are taken by one learner.

    Every run draws what it would draw alone and stays what is saved, evaluated and shipped, but advances and
    loads only here from the first steps on. Seeds that are behind go first and together.

    Args:
        runs: Of one configuration, made by `OfflineConfig.build_seeds`; each may have been continued.
        combine: Returns the learner of several; see `Td3Learner.together`.

    Raises:
        ConfigError: If they were made apart: they must share their transitions.
    """

    def __init__(
        self, runs: Sequence[OfflineRun], combine: Callable[[Sequence[Any]], StackedLearner]
    ) -> None:
        if any(run.table is not runs[0].table for run in runs):
            raise ConfigError("runs that are trained together must be made together, by build_seeds.")
        self.runs, self._combine = runs, combine
        self._moving: tuple[OfflineRun, ...] = ()
        self._learner: StackedLearner | None = None

    def advance(self) -> list[Metrics]:
        """Take a block of gradient steps with every seed that is furthest behind.

        Returns:
            What `OfflineRun.advance` would, for each run; empty for those that stood still.
        """
        done = min(run.progress for run in self.runs)
        learner, moving = self._learner_of([run for run in self.runs if run.progress == done])
        ahead = [run.progress for run in self.runs if run.progress > done]
        config, start, means = moving[0].config, time.perf_counter(), Means()
        count = min([config.block_steps, moving[0].total - done, *(other - done for other in ahead)])
        with torch_threads(moving[0].num_threads):
            for _ in range(count):
                means.add(step_together(learner, moving))
            measured = {name: value.unbind(0) for name, value in means.tensors().items()}
            judged = [run.judged() for run in moving]
        rate = {"time/steps_per_s": count / (time.perf_counter() - start)}
        found: dict[int, Metrics] = {
            id(run): {**{name: value[s] for name, value in measured.items()}, **judged[s], **rate}
            for s, run in enumerate(moving)
        }
        return [found.get(id(run), {}) for run in self.runs]

    def _learner_of(self, runs: Sequence[OfflineRun]) -> tuple[StackedLearner, tuple[OfflineRun, ...]]:
        """Return what takes the steps of these runs; made anew where others moved before."""
        if self._learner is None or self._moving != tuple(runs):
            self._moving = tuple(runs)
            self._learner = self._combine([run.learner for run in runs])
            for run in runs:
                run.is_led = True
        return self._learner, self._moving


def step_together(
    learner: StackedLearner, runs: Sequence[OfflineRun], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Take a step of every run; returns measured quantities, each (S,).

    Args:
        learner: Of all runs.
        runs: What they draw is used.
        rows: (S, B), in place of those that they draw.
    """
    drawn, draws = zip(*(run.draw() for run in runs), strict=True)
    together = {name: torch.stack([each[name] for each in draws]) for name in draws[0]}
    measured = learner.step(runs[0].table.gather(torch.stack(drawn) if rows is None else rows), together)
    for run in runs:
        run.learner.steps = learner.steps
        run.follow()
    return measured


def precision(autocast: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return what networks are evaluated in; see `OfflineConfig.autocast`."""
    return nullcontext() if autocast is None else torch.autocast(device.type, dtype=getattr(torch, autocast))
