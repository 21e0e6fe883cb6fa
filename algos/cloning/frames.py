"""The frames of a learned world: an autoencoder, trained before the members on the frames of the data.

See `policies.networks.frames.FrameCoder` for the loss. Afterwards a state of the world is [s, z], the task's
state and the vector of its frames, and members learn its changes as those of any state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algos.base import Metrics
from algos.cloning.batches import Shuffle
from algos.optim import descend, restore_optimizer, warmup_cosine
from algos.training.serialization import capture_generator, restore_generator
from envs.datasets.episodes import EpisodeDataset
from policies.networks.frames import NOISE, FrameCoder
from policies.seeds import derive_seed, seeded_generator, seeded_weights

FRAMES = 16
"""Frames of a gradient step, at most."""
_AT_ONCE = 256  # frames that are encoded together


class FrameCoding:
    """A run that trains a coder on the frames of a dataset.

    Args:
        dataset: With the images of the cameras, all of one size.
        cameras: Their names.
        latent_dim: Width of the vector.
        steps, batch_size, lr, log_every: See `WorldConfig`.
        seed: Of weights, order and noise.
        device: Where it is trained.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        cameras: Sequence[str],
        latent_dim: int,
        *,
        steps: int,
        batch_size: int,
        lr: float,
        log_every: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._data, self.total, self.progress = dataset, steps, 0
        self._size = min(max(batch_size, 2), FRAMES)  # one frame alone has no deviation
        self._lr, self._log_every = lr, log_every
        height, width = dataset.image_shapes[cameras[0]][:2]
        with seeded_weights(derive_seed(seed, "coder")):
            self.coder = FrameCoder(cameras, (height, width), latent_dim).to(device)
        self._stream = Shuffle(dataset.num_frames, seeded_generator(seed, "frames"))
        self._generator = seeded_generator(seed, "latents", device=device)
        self._optimizer = torch.optim.AdamW(self.coder.parameters(), lr=lr, weight_decay=1e-6)

    @property
    def is_done(self) -> bool:
        return self.progress >= self.total

    def advance(self) -> Metrics:
        """Take a block of gradient steps and return its mean loss."""
        count, began = min(self._log_every, self.total - self.progress), time.perf_counter()
        device = next(self.coder.parameters()).device
        loss, self.coder = torch.zeros((), device=device), self.coder.train()
        for _ in range(count):
            for group in self._optimizer.param_groups:
                group["lr"] = warmup_cosine(
                    self.progress, lr=self._lr, min_lr=0.1 * self._lr, warmup=0, cycle=self.total
                )
            loss += self._step(self._stream.take(self._size))
            self.progress += 1
        return {
            "frames/loss": loss / count,
            "frames/lr": self._optimizer.param_groups[0]["lr"],
            "time/steps_per_s": count / (time.perf_counter() - began),
        }

    def _step(self, rows: Tensor) -> Tensor:
        coder = self.coder
        frames = coder.stacked({camera: self._data.images[camera][rows] for camera in coder.cameras})
        latent = coder.encode(frames)
        noise = torch.randn(latent.shape, generator=self._generator, device=latent.device)
        return descend(self._optimizer, (coder.decode(latent + NOISE * noise) - frames).square().mean())

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.progress,
            "coder": self.coder.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "shuffle": self._stream.state_dict(),
            "generator": capture_generator(self._generator),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.progress = int(state["done"])
        self.coder.load_state_dict(state["coder"])
        restore_optimizer(self._optimizer, state["optimizer"])
        self._stream.load_state_dict(state["shuffle"])
        restore_generator(self._generator, state["generator"])


@torch.no_grad()
def with_latents(dataset: EpisodeDataset, coder: FrameCoder | None) -> EpisodeDataset:
    """Return a dataset whose observations are [s, z], without its images; unchanged without a coder.

    There is no frame after the last action of an episode: there, z is said to stay.
    """
    if coder is None:
        return dataset
    coder.eval()
    blocks = torch.arange(dataset.num_frames).split(_AT_ONCE)
    images = ({camera: dataset.images[camera][some] for camera in coder.cameras} for some in blocks)
    latent = torch.cat([coder.encode(coder.stacked(some)) for some in images]).to(dataset.observations.device)
    after = dataset.next_observations
    if after is not None:
        frames = torch.arange(dataset.num_frames, device=latent.device)
        after = torch.cat([after, latent[(frames + 1).where(~dataset.is_last, frames)]], dim=1)
    seen = torch.cat([dataset.observations, latent], dim=1)
    return replace(dataset, observations=seen, next_observations=after, images={})
