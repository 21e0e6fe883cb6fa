"""Cloning that goes on after deployment: a fixed dataset and the episodes of a fleet.

Legend: B batch, l_on and l_off mean losses of the fleet's rows and of those of the dataset over the last
`WINDOW` steps, by l_off::

    omega    = clip(e^(ALPHA l_on) / (e^(ALPHA l_on) + e^l_off), 0.2, 0.8)     share of the fleet in a batch
    weight_e = 2^(-age_e / half_life)                                        age: episodes that ended later

Of an episode in which nobody took over all rows are cloned if it succeeded, and none otherwise; of others the
rows of the expert, whatever followed. The observation history of a stretch begins with its first row.

Source: SOP (arXiv 2601.03044) for the share, from descriptions; its constants, the weights by age and what is
cloned of an episode are ours. Deviations: losses are relative to l_off, since those of a denoiser are so
small that the share would be 1/2 whatever they are; one task, so nothing is balanced between tasks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from algos.base import Metrics, Setup
from algos.bc import Bc, BcConfig
from algos.cloning.batches import CloningBatch, WeightedStream, WindowSampler
from algos.cloning.validation import masked_mean
from algos.training.serialization import capture_generator, restore_generator
from envs.datasets.curation import SAMPLING_WEIGHT
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import DECISION
from envs.spec import EnvConfig
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.protocols import TE
from policies.seeds import seeded_generator
from policies.serving.fleet_messages import FleetEpisode
from policies.threads import torch_threads

ALPHA = 1.5
WINDOW = 200  # gradient steps
SHARES = (0.2, 0.8)
_KEPT = 10  # half-lives; older episodes would be drawn less than once in a thousand times
_CLONING: dict[str, Any] = {
    **{"steps": 2**31, "warmup_steps": 0, "validation_fraction": 0.0},
    **{"ema": "delayed", "ema_decay": 0.995, "ema_every": 1},
}


@dataclass
class FleetCloning(Checked):
    """How a fleet's policy is trained."""

    lr: float = bounded(3e-5, gt=0)  # AdamW, constant
    batch_size: int = bounded(256, ge=2)  # windows
    half_life: float = bounded(200.0, gt=0)  # episodes of the fleet after which one is drawn half as often
    seed: int = bounded(0, ge=0)  # of batches and noise

    def build(self, policy: Policy, dataset: EpisodeDataset, env: EnvConfig | None = None) -> FleetLearner:
        """Return the learner of a policy; `env` is its task, if that is known.

        Raises:
            CapabilityError: If the policy has no matching loss, or takes goals or images.
            ConfigError: If policy, dataset and task do not fit.
        """
        if policy.goal_dim or policy.images:
            raise CapabilityError("robots of a fleet report states: got a policy that takes goals or images.")
        return FleetLearner(self, Setup(init=policy, dataset=dataset, env=env, seed=self.seed))


def online_share(online: float, static: float) -> float:
    """Return omega for the mean losses of the fleet's rows and of those of the dataset."""
    share = 1 / (1 + math.exp(min(static - ALPHA * online, 700.0)))
    return min(max(share, SHARES[0]), SHARES[1])


def merge(episodes: Sequence[FleetEpisode], half_life: float) -> EpisodeDataset | None:
    """Return what is cloned of a fleet's episodes, whatever their order; None if nothing is.

    Every stretch of rows is an episode of the dataset, with a sampling weight by its age.
    """
    ordered = sorted(episodes, key=lambda one: one.place)[-math.ceil(_KEPT * half_life) :]
    pieces = [
        _piece(one, rows, 0.5 ** (age / half_life))
        for age, one in enumerate(reversed(ordered))
        for rows in _cloned_rows(one)
    ]
    return EpisodeDataset.from_episodes(pieces, meta={"source": "episodes of the fleet"}) if pieces else None


def _cloned_rows(episode: FleetEpisode) -> Iterator[slice]:
    if not episode.corrected.any():
        if episode.success:
            yield slice(0, len(episode))
        return
    edges = np.flatnonzero(np.diff(np.pad(episode.corrected.astype(np.int8), 1)))
    yield from (slice(int(first), int(end)) for first, end in edges.reshape(-1, 2))


def _piece(episode: FleetEpisode, rows: slice, weight: float) -> Episode:
    decision = episode.decision[rows].copy()
    decision[0] = True  # an expert may take over within a chunk
    return Episode(
        observations=episode.observations[rows.start : rows.stop + 1],
        actions=episode.actions[rows],
        rewards=episode.rewards[rows],
        terminated=episode.terminated and rows.stop == len(episode),
        truncated=not (episode.terminated and rows.stop == len(episode)),
        extras={
            DECISION: decision,
            SAMPLING_WEIGHT: np.full(len(decision), weight, np.float32),
        },
    )


class FleetLearner(Bc):
    """A cloning run whose data grow; see `FleetCloning`. `share` is omega."""

    replays: ClassVar[bool] = False  # each step keeps the losses of its parts

    def __init__(self, config: FleetCloning, setup: Setup) -> None:
        chosen = {"batch_size": config.batch_size, "lr": config.lr, "min_lr": config.lr}
        super().__init__(BcConfig(**_CLONING | chosen), setup)
        self._half_life, self.share = config.half_life, sum(SHARES) / 2
        self._fleet: tuple[WindowSampler, WeightedStream] | None = None
        self._draws = seeded_generator(setup.seed, "fleet", device=setup.device)
        self._losses: deque[Tensor] = deque(maxlen=WINDOW)
        self._count = 0  # rows of the fleet in the present batch, the first ones

    def use(self, episodes: Sequence[FleetEpisode]) -> None:
        """Train on these episodes of the fleet from now on."""
        merged = merge(episodes, self._half_life)
        if merged is not None:
            windows = self._windows(merged.to(self._device))
            assert windows.weight is not None
            self._fleet = windows, WeightedStream(windows.weight, self._draws)

    def train(self, steps: int) -> Metrics:
        """Take gradient steps, then set the share for the next ones; return mean losses and the share."""
        with torch_threads(self._num_threads):
            metrics = self._block(steps)
        if not self._losses:
            return metrics
        online, static = torch.stack(tuple(self._losses)).mean(dim=0).tolist()
        self.share = online_share(online / max(static, 1e-12), 1.0)
        found: Metrics = {"fleet/loss_online": online, "fleet/loss_static": static, "fleet/share": self.share}
        return metrics | found

    def state_dict(self) -> dict[str, Any]:
        own = {"losses": [row.clone() for row in self._losses], "share": self.share}
        return super().state_dict() | own | {"draws": capture_generator(self._draws)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; errors as `Bc`. The episodes of the fleet are given by `use`."""
        super().load_state_dict(state)
        self._losses.extend(row.to(self._device) for row in state["losses"])
        self.share = float(state["share"])
        restore_generator(self._draws, state["draws"])

    def _draw(self) -> CloningBatch:
        size, self._count = self.config.batch_size, 0
        if self._fleet is None:
            return super()._draw()
        windows, stream = self._fleet
        self._count = min(max(round(self.share * size), 1), size - 1)
        ours = windows.gather(stream.take(self._count))
        theirs = self._source.gather(self._stream.take(size - self._count))
        obs = {name: torch.cat([value, theirs.obs[name]]) for name, value in ours.obs.items()}
        return CloningBatch(obs, torch.cat([ours.action, theirs.action]), torch.cat([ours.mask, theirs.mask]))

    def _loss(self, batch: CloningBatch, te: TE) -> Tensor:
        loss = self._matching.matching_loss(*self._inputs(batch, te), reduce="step")
        if self._count:
            parts = slice(self._count), slice(self._count, None)
            means = [masked_mean(loss[part].detach(), batch.mask[part]) for part in parts]
            self._losses.append(torch.stack(means))
        return masked_mean(loss, batch.mask)
