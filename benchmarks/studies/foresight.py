"""Does an encoder that foresees help to clone from images? The same cloning with and without that loss.

    python -m benchmarks.studies.foresight --seeds 0,1,2     avoid by sight, 150 demonstrations per seed
    python -m benchmarks.studies.foresight --report          the page from what is there

Legend: B rows, F features of the image, C width of the condition, j how many steps ahead::

    loss = matching loss + weight mean |P(c_t, j) - f'_{t+j}|

c_t is the condition, the features f_t in it, P a small network, f' the features by averaged weights, and j
drawn from 1 … AHEAD per row; rows whose episode ends before have no second term. Source: auxiliary loss of
ACT-JEPA (arXiv 2501.14622). Deviations: one step ahead is drawn per row instead of predicting all, and the
averaged weights are those of cloning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import burnish
from algos.base import Setup
from algos.bc import Bc, BcConfig
from algos.cloning.batches import CloningBatch
from algos.cloning.validation import masked_mean
from algos.training.ranks import current
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies.definitions import STUDIES
from benchmarks.studies.learning import demonstrations
from benchmarks.studies.once import trained
from benchmarks.studies.rows import EPISODES, describe_dataset, episode_columns
from envs.datasets import EpisodeDataset
from envs.evaluation.intervals import paired_difference
from policies.bounds import bounded
from policies.protocols import TE
from policies.registry import register

PAGE, STUDY = "foresight", STUDIES["avoid-moved"]
AHEAD = 8
WEIGHTS = (0.0, 1.0)


@dataclass
class ForesightConfig(BcConfig):
    """Cloning whose encoder foresees its own features."""

    weight: float = bounded(1.0, ge=0)  # of the second loss

    def build(self, setup: Setup) -> Foresight:
        """Check the setup and return the algorithm, ready to advance."""
        return Foresight(self, setup)


class Foresight(Bc):
    """A run; see `ForesightConfig`. Without validation, on one process."""

    config: ForesightConfig

    def __init__(self, config: ForesightConfig, setup: Setup) -> None:
        super().__init__(config, setup)
        encoder: Any = self.policy.encoder
        width, self._features = encoder.cond_dim, encoder.config.features
        with torch.random.fork_rng():
            torch.manual_seed(setup.seed)
            self._predictor = nn.Sequential(
                nn.Linear(width + AHEAD, 128), nn.SiLU(), nn.Linear(128, self._features)
            )
        added = list(self._predictor.parameters())
        self._optimizer.add_param_group({"params": added})
        self._parameters += added

    def _use(self, dataset: EpisodeDataset) -> None:
        super()._use(dataset)
        self._data, frames = dataset, torch.arange(dataset.num_frames)
        self._left = (dataset.episode_start[1:] - 1).repeat_interleave(dataset.lengths) - frames

    def _draw(self) -> CloningBatch:
        self._rows = current().own(self._stream.take(self.config.batch_size))
        return self._source.gather(self._rows)

    def _loss(self, batch: CloningBatch, te: TE) -> Tensor:
        cond, action, te = self._inputs(batch, te)
        loss = masked_mean(self._matching.matching_loss(cond, action, te, reduce="step"), batch.mask)
        if self.config.weight == 0:
            return loss
        ahead = torch.randint(AHEAD, (len(self._rows),), generator=self._generator)
        now = self._source.frames[self._rows]
        is_there = ahead + 1 <= self._left[now]
        then = torch.where(is_there, now + ahead + 1, now)
        seen = {camera: images[then][:, None] for camera, images in self._data.images.items()}
        with torch.no_grad():
            averaged: Any = self._ema.module
            told = averaged.encode({"state": self._data.observations[then][:, None], **seen}).vec
        assert cond.vec is not None
        guess = self._predictor(torch.cat([cond.vec, F.one_hot(ahead, AHEAD).to(cond.vec)], dim=1))
        error = (guess - told[:, : self._features]).abs().mean(dim=1)
        return loss + self.config.weight * (error * is_there).sum() / is_there.sum().clamp(min=1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "predictor": self._predictor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._predictor.load_state_dict(state["predictor"])


def run_one(seed: int, weight: float, root: Path, workers: int) -> Path:
    """Clone with one weight and play the last checkpoint; returns the JSON file."""
    target = pages.RESULTS / PAGE / f"weight{weight:g}-seed{seed}.json"
    if target.exists():
        return target
    demos = demonstrations(STUDY, seed, None, root)
    place = root / f"weight{weight:g}-seed{seed}"
    settings = ("experiment=avoid_moved_bc", "algo=foresight", f"algo.weight={weight:g}")
    values: dict[str, Any] = {"seed": seed, "num_threads": 1, "algo.validation_fraction": 0.0}
    run = trained(place, *settings, dataset=str(demos), **values)
    played = burnish.evaluate(str(place), episodes=EPISODES, num_workers=workers).evaluation
    content = {"weight": weight, "seed": seed, "dataset": describe_dataset(demos)}
    content["configuration"] = pages.configuration(run.directory)
    return pages.keep(PAGE, target.stem, {**content, "after": episode_columns(played)})


def report() -> Path:
    """Write docs/results/foresight.md."""
    found = {(one["weight"], one["seed"]): one for one in pages.kept(PAGE, advice="run it first")}
    seeds = sorted({seed for _, seed in found if all((weight, seed) in found for weight in WEIGHTS)})
    everything = list(found.values())
    lines = [
        "# An encoder that foresees", "",
        f"`python -m benchmarks.studies.foresight`: `experiment=avoid_moved_bc` of {STUDY.demonstrations} "
        "demonstrations, as it is and with the auxiliary loss of ACT-JEPA (arXiv 2501.14622): the encoder's "
        f"features predict those of one of the next {AHEAD} steps, by averaged weights. Success of "
        f"{EPISODES} episodes, last checkpoint, from the same demonstrations and first weights. "
        f"{pages.INTERVALS}",
        "", *pages.table(("seed", "cloning", "with foresight", "difference"), _rows(found, seeds)), "",
        f"Measured with {pages.versions(everything[0])}; commits {pages.commits(everything)}. Per-episode "
        f"numbers are in `{PAGE}/`.",
    ]  # fmt: skip
    return pages.write(PAGE, lines)


def _rows(found: dict[tuple[float, int], dict[str, Any]], seeds: list[int]) -> Iterator[list[str]]:
    for some in [[seed] for seed in seeds] + ([seeds] if len(seeds) > 1 else []):
        plain, told = (
            np.array([found[weight, seed]["after"]["success"] for seed in some]) for weight in WEIGHTS
        )
        change = paired_difference(plain, told)
        name = str(some[0]) if len(some) == 1 else "**all**"
        yield [name, pages.success(plain), pages.success(told), pages.points(change)]


def main() -> None:
    """Run what is asked for."""
    options = study_parser(__doc__, seeds="0,1,2", root="runs/foresight", workers=0).parse_args()
    register("algo", "foresight")(ForesightConfig)
    for seed, weight in () if options.report else product(options.seeds, WEIGHTS):
        print(f"written: {run_one(seed, weight, options.root, options.workers)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
