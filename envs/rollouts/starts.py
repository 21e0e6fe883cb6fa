"""Where training episodes begin: after steps of a guide policy, or inside recorded episodes.

A start is reached by acting from the task's own reset: the guide acts, or recorded actions are repeated from
the seed of their episode; these steps are *led*. That works in every deterministic task, whatever its
simulator can save, and time limits count led steps. How much of an episode is led (`order`): `back`, less
from stage to stage, all of it at first and nothing at last, while returns stay as high; `random`, drawn for
every episode; `values`, starts drawn such that low and high values are equally frequent.

Legend: N environments, n of them led, To observation history, Ta executed steps, T steps of a recorded
episode, h led steps.

Source: Jump-start reinforcement learning (arXiv 2204.02372) for guides and the rule of the stages.
Deviations: returns are those of training episodes, and each worker has its own stage; h is a multiple of the
guide's executed steps; a guide whose episode ends before the hand-over begins again with half as many steps,
and the first of these episodes are the measure of the way back; what the guide does is not given to the
learner. Starts by value: SnapshotRL (arXiv 2403.00673); the value is the return to go that was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from envs.datasets.episodes import EpisodeDataset
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.observations import observe, to_tensors
from envs.rollouts.value_clusters import even_shares, value_clusters
from envs.spec import Array, ChunkStep, VectorEnv
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.paths import path_field

LED = "led_steps"
"""Metric of an episode: steps before its start."""
ORDERS = ("back", "random", "values")
CLUSTERS, DISCOUNT = 6, 0.99  # of values; of returns to go per step, so that later states are worth more
_STREAM = 5  # separates the random numbers of a start from those of the episode
_TOLERANCE = 1e-4  # of repeated observations, relative to the largest entry, at least 1


@dataclass(frozen=True)
class StartSettings(Checked):
    """Where training episodes begin; off without `guide` and `dataset`. Evaluation begins as always."""

    key: ClassVar[str] = "start"

    guide: str | None = path_field()  # policy that acts first: a run or a policy directory
    dataset: str | None = path_field()  # file of episodes inside of which training begins
    steps: int | None = bounded(None, ge=1)  # most steps before the start; null: the episode, or the limit
    order: str = bounded("back", choices=ORDERS)  # back: from the end to the task's start
    stages: int = bounded(10, ge=1)  # numbers of steps on the way back
    episodes: int = bounded(20, ge=1)  # episodes of a worker whose mean return decides about its next stage
    tolerance: float = bounded(0.2, ge=0, lt=1)  # share of the best mean return that may be lost

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("guide", self.guide is None or self.dataset is None, "empty beside start.dataset")
        recorded = self.dataset is not None or self.order != "values"
        self.require("order", recorded, "back or random without start.dataset")

    def unused(self) -> dict[str, str]:
        names = ("steps", "order", "stages", "episodes", "tolerance")
        return {} if self.is_on else dict.fromkeys(names, "without start.guide or start.dataset")

    @property
    def is_on(self) -> bool:
        return self.guide is not None or self.dataset is not None


@dataclass(frozen=True)
class Recorded:
    """Episodes to begin in: seeds, actions (T, Da), observations (T, Do) and returns to go (T,)."""

    source: str
    seeds: Sequence[int]
    actions: Sequence[Array]
    observations: Sequence[Array]
    values: Sequence[Array]

    @classmethod
    def from_dataset(cls, dataset: EpisodeDataset) -> Recorded:
        """Return the successful episodes of a dataset; all of them where success is not recorded.

        Raises:
            ConfigError: If the seeds of the episodes are not recorded, or none is successful.
        """
        if "seed" not in dataset.episode_extras:
            raise ConfigError(
                f"start.dataset={dataset.source} must hold the seeds of its episodes, from which they are "
                "repeated. Record it by burnish collect, or use start.guide."
            )
        bounds = dataset.episode_start.tolist()
        success = dataset.success
        kept = [e for e in range(dataset.num_episodes) if success is None or bool(success[e])]
        if not kept:
            raise ConfigError(
                f"start.dataset={dataset.source} must hold an episode with success; it has none."
            )
        to_go = dataset.returns_to_go(DISCOUNT)
        spans = [slice(bounds[e], bounds[e + 1]) for e in kept]
        return cls(
            dataset.source,
            [int(dataset.episode_extras["seed"][e]) for e in kept],
            [dataset.actions[span].numpy() for span in spans],
            [dataset.observations[span].numpy() for span in spans],
            [to_go[span].numpy() for span in spans],
        )


@dataclass(frozen=True)
class Starts:
    """What workers need to lead episodes; one of `guide` and `recorded` is set."""

    settings: StartSettings
    guide: Any = None
    recorded: Recorded | None = None


class HandOver:
    """The stage of the way back: from 0 (led as far as possible) to `last` (not led).

    The first mean return is that of the guide; later ones move on while they are within the tolerance of the
    best. Source: arXiv 2204.02372, algorithm 1, as its public port has it.
    """

    def __init__(self, last: int, tolerance: float) -> None:
        self.last, self.tolerance = last, tolerance
        self.stage, self.best, self.tolerated = 0, -np.inf, -np.inf

    def note(self, mean_return: float) -> None:
        if self.stage == self.last:
            return
        if np.isfinite(self.best) and mean_return >= self.tolerated:
            self.stage += 1
        if mean_return >= self.best:
            self.best, self.tolerated = mean_return, mean_return - self.tolerance * abs(mean_return)


class Leader:
    """Leads the episodes of one worker's environments to their starts.

    Attributes:
        led, reward: Led steps of the running episodes and their rewards, (N,).
        stage: Of the hand-over when the running episodes began, (N,).
        returns: Of episodes of the present stage, until they decide about the next one.
    """

    def __init__(self, starts: Starts, vector: VectorEnv) -> None:
        self.starts, self.vector, n = starts, vector, vector.num_envs
        self.hand_over = HandOver(starts.settings.stages, starts.settings.tolerance)
        self.led, self.reward, self.stage = np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.int64)
        self.returns: list[float] = []
        self.guided: list[float] = []  # returns of episodes that the guide ended, until they are the measure
        self._snapshots, self._shares = self._find_snapshots()
        guide = starts.guide
        if guide is not None and guide.chunk.obs_steps != vector.obs_steps:
            raise ConfigError(
                f"the policy of start.guide sees {guide.chunk.obs_steps} observations, the learner "
                f"{vector.obs_steps}. Use a guide with the same policy.obs_steps."
            )

    def _most_steps(self, chosen: int) -> int:
        """Return the most steps of a recorded episode that can be repeated."""
        data, limit = self.starts.recorded, self.starts.settings.steps
        assert data is not None
        most = min(len(data.actions[chosen]), self.vector.spec.max_episode_steps) - 1
        return most if limit is None else min(most, limit)

    def _find_snapshots(self) -> tuple[Array, Array | None]:
        """Return starts (S, 2), episode and led steps of every stage of it, and how often each is drawn."""
        data, stages = self.starts.recorded, self.starts.settings.stages
        if data is None or self.starts.settings.order != "values":
            return np.zeros((0, 2), np.int64), None
        snapshots = np.array(
            [
                (chosen, self._most_steps(chosen) * part // stages)
                for chosen in range(len(data.seeds))
                for part in range(stages + 1)
            ]
        )
        values = np.array([data.values[chosen][steps] for chosen, steps in snapshots])
        return snapshots, even_shares(value_clusters(values, CLUSTERS))

    def lead(self, rows: Array, seeds: Sequence[int]) -> Array:
        """Start episodes in rows (n,) from their seeds and lead them; returns observations (n, To, Do)."""
        settings = self.starts.settings
        draws = [np.random.default_rng((seed, _STREAM)) for seed in seeds]
        parts = np.full(len(rows), settings.stages - self.hand_over.stage)  # of the way, in stages
        if settings.order == "random":
            parts = np.array([draw.integers(settings.stages + 1) for draw in draws])
        self.led[rows], self.reward[rows], self.stage[rows] = 0, 0.0, self.hand_over.stage
        obs = self.vector.reset(seeds, rows).copy()
        if self.starts.recorded is not None:
            for i, (row, draw) in enumerate(zip(rows.tolist(), draws, strict=True)):
                obs[i] = self._repeat(row, int(parts[i]), draw, obs[i])
            return obs
        limit = self.vector.spec.max_episode_steps - 1
        most = limit if settings.steps is None else min(settings.steps, limit)
        return self._guided(rows, seeds, most * parts // settings.stages, obs)

    def _repeat(self, row: int, parts: int, draw: np.random.Generator, obs: Array) -> Array:
        """Begin inside a recorded episode; returns (To, Do), `obs` where nothing of it is repeated."""
        data = self.starts.recorded
        assert data is not None
        if self._shares is None:
            chosen = int(draw.integers(len(data.seeds)))
            steps = self._most_steps(chosen) * parts // self.starts.settings.stages
        else:
            chosen, steps = self._snapshots[draw.choice(len(self._snapshots), p=self._shares)].tolist()
        actions = data.actions[chosen]
        if not steps:
            return obs
        self.vector.reset([data.seeds[chosen]], [row])
        step = self._step(actions[None, :steps], np.array([row]))
        history, recorded = step.obs[row], data.observations[chosen][steps]
        tolerance = _TOLERANCE * max(1.0, float(np.abs(recorded).max()))
        if step.done[row] or float(np.abs(history[-1] - recorded).max()) > tolerance:
            raise ConfigError(
                f"start.dataset={data.source} cannot be repeated in env={self.vector.spec.name}: the episode "
                f"of seed {data.seeds[chosen]} differs after {steps} steps. Record it in the task as it is "
                "configured here, or use start.guide."
            )
        return history

    def _guided(self, rows: Array, seeds: Sequence[int], steps: Array, obs: Array) -> Array:
        """Let the guide act for `steps` (n,), rounded up to whole chunks of it."""
        guide, generator = self.starts.guide, torch.Generator().manual_seed(seeds[0])
        chunks = -(-steps // guide.chunk.act_steps)
        left, history = chunks.copy(), obs
        ended: dict[int, float] = {}  # returns of the first episode of rows that the guide ended
        while len(going := np.flatnonzero(left)):
            index = rows[going]
            guide_obs = to_tensors(observe(self.vector, history[going], index))
            step = self._step(guide.act(guide_obs, generator=generator).numpy(), index)
            history[going], left[going] = step.obs[index], left[going] - 1
            for i in going[step.done[index]].tolist():
                ended.setdefault(i, float(self.reward[rows[i]]))
                chunks[i] = left[i] = chunks[i] // 2
                self.led[rows[i]], self.reward[rows[i]] = 0, 0.0
                history[i] = self.vector.reset([seeds[i]], [rows[i]])[0]
        self._note_guided([ended[i] for i in sorted(ended)])
        return history

    def _note_guided(self, returns: Sequence[float]) -> None:
        """Note the mean return of the guide's first own episodes, with which the learner is compared."""
        if self.hand_over.stage or np.isfinite(self.hand_over.best):
            return
        self.guided += returns
        if len(self.guided) >= self.starts.settings.episodes:
            self.hand_over.note(float(np.mean(self.guided)))
            self.returns = []

    def _step(self, actions: Array, index: Array) -> ChunkStep:
        """Execute chunks (n, Ta, Da) in rows (n,); counts steps and rewards."""
        chunks = np.zeros((self.vector.num_envs, *actions.shape[1:]), np.float32)
        active = np.zeros(self.vector.num_envs, bool)
        chunks[index], active[index] = actions, True
        step = self.vector.step_chunk(chunks, active)
        self.led += step.length
        self.reward += step.rewards.sum(axis=1)
        return step

    def finished(self, rows: Array, episodes: Sequence[EpisodeRow]) -> list[EpisodeRow]:
        """Note ended episodes of rows (n,), and return them with the number of led steps as a metric.

        Their returns, with those of the led steps, decide about the stage.
        """
        for row, episode in zip(rows.tolist(), episodes, strict=True):
            if self.starts.settings.order == "back" and self.stage[row] == self.hand_over.stage:
                self.returns.append(float(self.reward[row]) + episode.return_)
            if len(self.returns) == self.starts.settings.episodes:
                if np.isfinite(self.hand_over.best) or not self.guided:
                    self.hand_over.note(float(np.mean(self.returns)))
                self.returns = []
        return [
            replace(episode, metrics={**episode.metrics, LED: float(self.led[row])})
            for row, episode in zip(rows, episodes, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        rule = {name: getattr(self.hand_over, name) for name in ("stage", "best", "tolerated")}
        kept = {name: getattr(self, name).copy() for name in ("led", "reward", "stage")}
        return {"rule": rule, **kept, "returns": list(self.returns), "guided": list(self.guided)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self.hand_over).update(state["rule"])
        self.returns, self.guided = list(state["returns"]), list(state.get("guided", ()))
        for name in ("led", "reward", "stage"):
            getattr(self, name)[:] = np.asarray(state[name])
