"""Training loop of algorithms on a dataset: sample transitions, take a gradient step, report metrics.

Legend: G_t = sum over k of gamma^k (scale r_{t+k} + shift), to the end of the recorded episode.
Overestimation indicates an actor outside of the data::

    overestimation = mean over probes of mean over critics of Q(s_t, a_t) - G_t

Q is the value of the actor, G the return of the recording policy, so a better actor also raises the
difference: compare it between runs and over time. G of a truncated episode lacks the later rewards; only rows
count where their weight is below 1 %: gamma^remaining < 0.01.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from algos.base import AT_BOUND, Metrics, Quantities, Setup
from algos.offline.online import OnlinePhase
from algos.optim import Ema
from algos.training.experience import summary
from algos.training.metrics import Means
from algos.training.ranks import current
from algos.training.resume_checks import init_facts, require_unchanged
from algos.training.serialization import capture_generator, restore_generator
from algos.transitions import Batch, Rewarding, TransitionTable
from envs.datasets.episodes import EpisodeDataset
from policies.errors import CapabilityError, CheckpointError
from policies.networks.recorded import Recorded
from policies.policy import Policy
from policies.seeds import seeded_generator
from policies.threads import torch_threads

_log = logging.getLogger(__name__)
THREADS = 1  # torch threads, unless `num_threads` is set
_PROBES = 4096  # rows, at most
_BLOCK = 262_144  # rows that are searched at once
_CUT_WEIGHT = 0.01  # largest weight of the rewards missing from a truncated episode
_VALUES = ("critic/value", "actor/value")
_ROUNDING = 0.01  # of the span of returns: values of new critics may be that much below the least
_SMALL = 2.0  # span of returns that new critics, whose values are about 1, easily leave
_RAISE = "Raise algo.reward_scale: new critics begin with values of that size. "
_SATURATED, _SATURATED_TIMES = 0.4, 1.75  # share of action entries at bounds, and times that of the data


class Learner(Protocol):
    """Takes gradient steps on batches."""

    steps: int  # steps taken
    # Optional, for replays on an accelerator: `decisions`, hashable, is all that Python decides in the next
    # step; `prepare()` sets rates of the next step, which its kernels read.

    @property
    def policy(self) -> Policy: ...

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]: ...

    def step(self, batch: Batch, draws: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LoopConfig(Protocol):
    """Settings of the loop."""

    fixed_length: ClassVar[bool]  # a schedule depends on `steps`: the run cannot be extended
    steps: int
    batch_size: int
    log_every: int


class OfflineRun:
    """A run on a dataset, continued in the task if it has an online phase; see `TransitionsConfig`."""

    is_batched = False  # a `SeedBatch` takes the steps of this run

    def __init__(
        self,
        config: LoopConfig,
        setup: Setup,
        learner: Learner,
        table: TransitionTable,
        dataset: EpisodeDataset,
        *,
        probes: Probes | None = None,
        limits: Limits | None = None,
        ema: Ema | None = None,
        online: OnlinePhase | None = None,
        resume_invariants: Mapping[str, Any] | None = None,
    ) -> None:
        self.online = online
        self.config, self.learner, self.table, self._probes, self._ema = config, learner, table, probes, ema
        self.num_threads = setup.threads(THREADS)
        self._index = seeded_generator(setup.seed, "transitions", device=setup.device)
        self._noise = seeded_generator(setup.seed, "learner noise", device=setup.device)
        self._invariants = {
            "seed": setup.seed,
            **init_facts(setup.init, learner.policy),
            "dataset": dataset.digest(),
            **({"total": config.steps} if config.fixed_length or online is not None else {}),
            **(resume_invariants or {}),
        }
        self._limits, self._warned = limits, set[str]()
        self._excess = math.inf  # of the values in the report before
        self._done = 0
        self._recorded = Recorded(self._learner_step, writes_weights=True, is_on=current().world == 1)

    @property
    def unit(self) -> str:
        """`gradient_steps`, or `steps` for gradient steps on data and then control steps."""
        return "gradient_steps" if self.online is None else "steps"

    @property
    def progress(self) -> int:
        return self._done + (0 if self.online is None else self.online.progress)

    @property
    def total(self) -> int:
        return self.config.steps + (0 if self.online is None else self.online.total)

    @property
    def budget(self) -> str | None:
        """Key of the run's length; None if the run cannot be extended."""
        if self.online is not None:
            return "algo.online_steps"
        return None if self.config.fixed_length else "algo.steps"

    def advance(self) -> Metrics:
        """Take `log_every` steps and return the means of their metrics.

        They are gradient steps on the dataset, then control steps with the updates that belong to them.

        Raises:
            CapabilityError: If a `SeedBatch` trains the run.
        """
        self._require_alone()
        count = min(self.config.log_every, self.config.steps - self._done)
        if not count and self.online is not None:
            return self._advance_online(self.online)
        start, means = time.perf_counter(), Means()
        with torch_threads(self.num_threads):
            for _ in range(count):
                means.add(self._step())
            measured = means.read() | self.overestimation()
        self.warn(measured)
        return measured | {"time/steps_per_s": count / (time.perf_counter() - start)}

    def warn(self, measured: Mapping[str, Any]) -> None:
        """Warn once of values that no return reaches, actions at their bounds, targets beyond the bins.

        Values of new critics begin anywhere: those that come nearer to the returns are not warned of.
        """
        problems: dict[str, str] = {}
        if self._limits is not None:
            excess, before = self._limits.excess(measured), self._excess
            problems, self._excess = self._limits.broken(measured), excess
            if excess <= before:
                problems.pop("values", None)
        self._warn_once(problems | clipped_targets(measured))

    def _warn_once(self, problems: Mapping[str, str]) -> None:
        for text in (text for kind, text in problems.items() if kind not in self._warned):
            _log.warning("%s", text)
        self._warned |= problems.keys()

    def _advance_online(self, online: OnlinePhase) -> Metrics:
        before, start, means, episodes = online.progress, time.perf_counter(), Means(), []
        with torch_threads(self.num_threads):
            while online.progress < min(before + self.config.log_every, online.total):
                due, finished = online.act(acting(self.learner))
                episodes += finished
                for _ in range(due):
                    size = self.config.batch_size
                    means.add(self._take_step(online.draw(size), self.learner.draw(size, self._noise)))
                    if self._ema is not None:
                        self._ema.update(self.learner.policy)
            measured = means.read()
        self._warn_once(clipped_targets(measured))
        metrics = measured | summary(episodes, bool(online.pool.env.spec.success_rule))
        rate = (online.progress - before) / (time.perf_counter() - start)
        return metrics | {"replay/rows": float(len(online.experience)), "time/env_steps_per_s": rate}

    def _step(self) -> dict[str, Tensor]:
        measured = self._take_step(*self.draw())
        self.count_step()
        return measured

    def _take_step(self, source: Tensor | Batch, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take a step on rows of the table (B,), or on a batch."""
        return replayed(self._recorded, self.learner, source, draws)

    def _learner_step(self, source: Tensor | Batch, draws: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
        batch = self.table.gather(source) if isinstance(source, Tensor) else source
        return self.learner.step(batch, draws)

    def _require_alone(self) -> None:
        if self.is_batched:
            raise CapabilityError(
                "this run is trained together with other seeds. Build it anew to advance or load it alone."
            )

    def draw(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows (B,) and random numbers of the next step, of several ranks the own ones."""
        size = self.config.batch_size
        row = self.table.draw(size, self._index)
        draws, axes = self.learner.draw(size, self._noise), getattr(self.learner, "row_axes", {})
        return current().own(row), current().own_draws(draws, axes)

    def count_step(self) -> None:
        """Count a gradient step and update the EMA weights."""
        self._done += 1
        if self._ema is not None:
            self._ema.update(self.learner.policy)

    def overestimation(self) -> Metrics:
        """Return Q minus return-to-go on the probes; empty without critics or probes."""
        critic = getattr(self.learner, "probed", getattr(self.learner, "critic", None))
        if critic is None or self._probes is None:
            return {}
        return {"critic/overestimation": self._probes.overestimation(critic)}

    def snapshot(self) -> Policy:
        """Return a copy of the policy in evaluation mode, with EMA weights if enabled."""
        policy = self.learner.policy if self._ema is None else cast(Policy, self._ema.module)
        return policy.clone().eval().requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self._done,
            "learner": self.learner.state_dict(),
            "index": capture_generator(self._index),
            "noise": capture_generator(self._noise),
            **({} if self._ema is None else {"ema": self._ema.state_dict()}),
            **({} if self.online is None else {"online": self.online.state_dict()}),
            **self._invariants,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CapabilityError: If a `SeedBatch` trains the run.
            CheckpointError: If length, data, seed, `init` or the reward transform differ from the saved run,
                or the run is beyond the gradient steps after which it goes on in the task.
        """
        self._require_alone()
        require_unchanged(state, self._invariants)
        self.learner.load_state_dict(state["learner"])
        self._recorded.forget()
        if self._ema is not None:
            self._ema.restore(state.get("ema"), self.learner.policy)
        restore_generator(self._index, state["index"])
        restore_generator(self._noise, state["noise"])
        self._done = int(state["done"])
        if self.online is not None and self._done > self.config.steps:
            raise CheckpointError(
                f"algo.steps must be at least the {self._done} gradient steps that the run has taken; got "
                f"{self.config.steps}. Raise it, or leave algo.online_steps out."
            )
        if self.online is not None and "online" in state:
            self.online.load_state_dict(state["online"])

    def close(self) -> None:
        """Close the environments of the online phase."""
        if self.online is not None:
            self.online.close()


def replayed(recorded: Recorded[Quantities], learner: Any, source: Any, draws: Quantities) -> Quantities:
    """Take a recorded step of a learner, or the step itself where it says no `decisions`."""
    decisions = getattr(learner, "decisions", None)
    if decisions is None:
        return recorded.function(source, draws, None)
    before, prepare = learner.steps, getattr(learner, "prepare", None)
    if prepare is not None:
        prepare()
    measured = recorded(source, draws, decisions)
    learner.steps = before + 1  # a replay runs no Python
    return measured


def acting(learner: Learner) -> Policy:
    """Return the policy that acts online: the learner's own `acting`, else the policy in training."""
    policy: Policy = getattr(learner, "acting", learner.policy)
    return policy


@dataclass(frozen=True)
class Probes:
    """Rows of the data whose return is known: conditions (P, C), actions (P, A), returns to go (P,)."""

    cond: Tensor
    action: Tensor
    to_go: Tensor

    @torch.no_grad()
    def overestimation(self, critic: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return (critic(self.cond, self.action).mean(dim=0) - self.to_go).mean()


def probes_of(table: TransitionTable, dataset: EpisodeDataset, rewarding: Rewarding) -> Probes | None:
    """Return evenly spaced rows whose return-to-go is known up to `_CUT_WEIGHT`; None without such rows."""
    if table.frame is None or "masks" in dataset.extras:  # with masks, returns continue after the task's end
        return None
    row = _evenly_spaced(_has_known_return(table.frame, dataset, rewarding.gamma), _PROBES)
    if not len(row):
        return None
    to_go = torch.stack([_return_to_go(dataset, rewarding, int(frame)) for frame in table.frame[row]])
    batch = table.gather(row)
    return Probes(batch.cond.contiguous(), batch.action.contiguous(), to_go.to(batch.reward))


def _has_known_return(frames: Tensor, dataset: EpisodeDataset, gamma: float) -> Tensor:
    """Return whether returns from frames (M,) are known: to the task's end, or to what is worth nothing."""
    steps = torch.arange(int(dataset.lengths.max()) + 1, device=frames.device)
    is_worthless = gamma ** steps.double() < _CUT_WEIGHT  # the reward so many steps later

    def known(frame: Tensor) -> Tensor:
        end = dataset.episode_start[torch.searchsorted(dataset.episode_start, frame, right=True)]
        return dataset.terminated[end - 1] | is_worthless[end - frame]

    return torch.cat([known(block) for block in frames.split(_BLOCK)])


def _evenly_spaced(is_known: Tensor, most: int) -> Tensor:
    """Return the indices of at most `most` true entries of (M,), evenly spaced; found block by block."""
    counts = torch.stack([block.sum() for block in is_known.split(_BLOCK)])
    if not (total := int(counts.sum())):
        return counts[:0]
    number = torch.linspace(0, total - 1, min(most, total), device=is_known.device).long()  # of true entries
    number = number.clamp(max=total - 1)  # above 2^24 the last one may be rounded up
    ends = counts.cumsum(0)
    block_of = torch.searchsorted(ends, number, right=True)
    index = []
    for block in block_of.unique().tolist():
        known = is_known[block * _BLOCK : (block + 1) * _BLOCK].nonzero().squeeze(1)
        before = ends[block] - counts[block]  # true entries in earlier blocks
        index.append(block * _BLOCK + known[number[block_of == block] - before])
    return torch.cat(index)


def _return_to_go(dataset: EpisodeDataset, rewarding: Rewarding, frame: int) -> Tensor:
    """Return the discounted sum of rewards from a frame to the end of its episode."""
    end = dataset.episode_start[torch.searchsorted(dataset.episode_start, frame, right=True)]
    rewards = rewarding.scale * dataset.rewards[frame:end].double() + rewarding.shift
    return (rewards * rewarding.gamma ** torch.arange(len(rewards), device=rewards.device).double()).sum()


def clipped_targets(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return what the metrics say of targets outside the range of critics, by kind."""
    if not (share := float(measured.get("critic/clipped_fraction", 0.0))):
        return {}
    return {
        "range": f"{100 * share:.3g} % of the targets of the critics lie outside their range and are clipped "
        "(critic/clipped_fraction). Widen it by algo.value_min and algo.value_max."
    }


@dataclass(frozen=True)
class Limits:
    """What no discounted return leaves, and how many of the recorded action entries are at their bounds.

    `least` and `most` are the returns of an episode with the smallest, or the largest, reward of the data in
    every step, and 0 where ending at once is beyond them. `advice` says how to stay closer to the data.
    """

    least: float
    most: float
    at_bound: float
    advice: str

    def excess(self, measured: Mapping[str, Any]) -> float:
        """Return how far the values of the metrics lie beyond the returns, 0 inside."""
        values = [float(measured[name]) for name in _VALUES if name in measured]
        return max((max(value - self.most, self.least - value, 0.0) for value in values), default=0.0)

    def broken(self, measured: Mapping[str, Any]) -> dict[str, str]:
        """Return what the metrics say against a policy, by kind."""
        problems, margin = {}, _ROUNDING * (self.most - self.least)
        for name in _VALUES:
            value = float(measured.get(name, self.most))
            if not self.least - margin <= value <= self.most:
                above = value > self.most
                scale = "" if self.most - self.least > _SMALL else _RAISE
                problems["values"] = (
                    f"the critics diverge: {name} is {value:.4g}, and no return "
                    f"{'exceeds' if above else 'is below'} {self.most if above else self.least:.4g}, that of "
                    f"the {'largest' if above else 'smallest'} reward of the data in every step. The policy "
                    f"follows their errors. {scale}{self.advice}"
                )
        share = float(measured.get("actor/saturated_fraction", 0.0))
        if share > max(_SATURATED, _SATURATED_TIMES * self.at_bound):
            problems["actions"] = (
                f"actor/saturated_fraction is {share:.2f}, of the data {self.at_bound:.2f}: the policy acts "
                f"at its bounds, where the critics know little. {self.advice}"
            )
        return problems


def limits_of(
    table: TransitionTable,
    dataset: EpisodeDataset,
    rewarding: Rewarding,
    *,
    episode_steps: int | None,
    advice: str,
) -> Limits:
    """Return the limits of values and actions of a dataset.

    Args:
        table: Its transitions, which hold normalised actions.
        dataset: The episodes.
        rewarding: Discount, and how rewards are transformed.
        episode_steps: Largest length of an episode in the task, if known. It counts where every recorded
            episode ends with the task; values of others continue behind their ends.
        advice: How to stay closer to the data.
    """
    gamma, ends = rewarding.gamma, dataset.terminated[dataset.episode_start[1:] - 1]
    weight = 1 / (1 - gamma) if gamma < 1 else math.inf  # return of a reward of 1 in every step
    if bool(ends.all()) and "masks" not in dataset.extras:
        steps = max(int(dataset.lengths.max()), episode_steps or 0)
        weight = (1 - gamma**steps) / (1 - gamma) if gamma < 1 else float(steps)
    least, most = (rewarding.scale * float(reward) + rewarding.shift for reward in dataset.rewards.aminmax())
    parts = table.action.split(65_536)
    at_bound = sum(int((part.abs() > AT_BOUND).sum()) for part in parts) / table.action.numel()
    return Limits(weight * least if least < 0 else 0.0, weight * most if most > 0 else 0.0, at_bound, advice)


def precision(autocast: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context; see `OfflineConfig.autocast`."""
    return nullcontext() if autocast is None else torch.autocast(device.type, dtype=getattr(torch, autocast))
