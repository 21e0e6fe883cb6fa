"""A learned world: an ensemble that clones what the task answers to states and actions.

Legend: N steps of the data, s state, a action, s' reached state, scale that of the state's normaliser::

    observation  [s, a]
    chunk        one row: [(s' - s) scale, reward, end, success]
    member g     `algos.bc` on all training episodes, with its own weights, order and noise

Changes are learned, not reached states: a copy of the state already explains most of a reached state. The
flags are learned from states and actions, never from the reached state of the data, which the world does not
know: a model that glides through an obstacle would never see a contact. Then `WorldModel.calibrate` sets
their thresholds, and the limit of the doubt, on the same data.

Where the task has cameras, a coder of frames is trained first (`algos.cloning.frames`), and s is [s, z], the
task's state and the vector of its frames.

Source: PETS, arXiv 1805.12114; with process=edm the transition model of DIAMOND (arXiv 2405.12399) and
World4RL (arXiv 2509.19080), on states. Deviations: rewards and flags are entries of the same row, not
networks of their own; members see the same episodes in another order, not bootstraps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Metrics, Setup, dataset_of
from algos.bc import THREADS, Bc, BcConfig
from algos.cloning.frames import FrameCoding, with_latents
from algos.cloning.validation import held_out
from algos.training.resume_checks import require_unchanged
from envs.datasets.curation import SAMPLING_WEIGHT
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.statistics import statistics_of
from envs.fit import task_text
from policies.bounds import Checked, bounded
from policies.build import complete
from policies.errors import ConfigError, DatasetError
from policies.normalizer import affine
from policies.policy import PolicyConfig
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_generator
from policies.threads import torch_threads
from policies.wrappers.world import World, WorldModel

_log = logging.getLogger(__name__)

MOST_STATES = 5000
"""Stored states at most; four times as many steps set thresholds and the limit of the doubt."""
HORIZONS = (1, 10, 50)
"""Steps after which errors are reported."""


@register("algo", "world")
@dataclass
class WorldConfig(Checked):
    """A world learned from data, in which policies are trained and judged.

    Source:
        PETS (arXiv 1805.12114), DIAMOND (arXiv 2405.12399), World4RL (arXiv 2509.19080).
    """

    makes_model: ClassVar[bool] = True  # its result is no policy of the task

    members: int = bounded(5, ge=1)  # networks of the ensemble
    steps: int = bounded(20_000, ge=1)  # gradient steps of each member and, before, of the coder of frames
    batch_size: int = bounded(256, ge=1)  # recorded steps
    lr: float = bounded(1e-3, gt=0)  # AdamW, peak
    latent_dim: int = bounded(32, ge=1)  # width of the vector of frames; not used without env.cameras
    log_every: int = bounded(100, ge=1)  # gradient steps between two log rows
    validation_fraction: float = bounded(0.1, ge=0, lt=1)  # fraction of episodes held out for errors

    def build(self, setup: Setup) -> LearnedWorld:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If task or dataset are missing, the task runs code of its own, is a learned world or
                gives goals beside the state, or a policy is given to start from.
            DatasetError: If the dataset has no step with a known successor, or no images of the cameras.
        """
        with torch_threads(setup.threads(THREADS)):
            return LearnedWorld(self, setup)


class LearnedWorld:
    """A run: one `Bc` run per member; see `WorldConfig`."""

    unit = "gradient_steps"

    def __init__(self, config: WorldConfig, setup: Setup) -> None:
        name = name_of("algo", config)
        if setup.env is None:
            raise ConfigError(f"algo={name} learns a task; give env=<the task of the data>.")
        if getattr(setup.env, "runs_code", False) or hasattr(setup.env, "imagined"):
            raise ConfigError(f"algo={name} learns tasks of this package; got {task_text(setup.env)}.")
        if setup.env.spec.goal_dim:
            raise ConfigError(f"algo={name} learns states; {setup.env.spec.name} has goals beside them.")
        if setup.init is not None:
            raise ConfigError(f"algo={name} learns a new world; leave init out.")
        dataset = dataset_of(setup, name, "recorded steps")
        if setup.env.spec.success_rule:
            _warn_of_one_outcome(dataset)
        self._seed, self._device = setup.seed, setup.device
        self._train, self._held_out = held_out(dataset, config.validation_fraction, setup.seed)
        if self._held_out is not None and int(self._held_out.lengths.max()) < 2:
            _log.warning("%s: the held-out episodes have one step each, so no errors follow.", dataset.source)
            self._held_out = None
        self._invariants = {"seed": setup.seed, "total": config.steps, "dataset": self._train.digest()}
        self._num_threads, self._config, self._setup = setup.threads(THREADS), config, setup
        self._coding, self.members = self._coding_of(setup), list[Bc]()
        if self._coding is None:
            self._data, self.members = self._begun()

    def _coding_of(self, setup: Setup) -> FrameCoding | None:
        """Return the training of a coder of the task's frames; None without cameras."""
        cameras, config = tuple(getattr(setup.env, "cameras", ())), self._config
        if not cameras:
            return None
        shown = {camera: tuple(shape) for camera, shape in setup.env.images.items()}  # type: ignore[union-attr]
        found = {camera: self._train.image_shapes.get(camera) for camera in cameras}
        if found != shown:
            raise DatasetError(f"{self._train.source}: expected images {shown}; there are {found}.")
        return FrameCoding(
            self._train.with_cameras(cameras),
            cameras,
            config.latent_dim,
            steps=config.steps,
            batch_size=config.batch_size,
            lr=config.lr,
            log_every=config.log_every,
            seed=setup.seed,
            device=setup.device,
        )

    def _begun(self) -> tuple[EpisodeDataset, list[Bc]]:
        """Return the data with vectors of the present coder, and members of them that have not learned."""
        config, setup = self._config, self._setup
        data = with_latents(self._train, None if self._coding is None else self._coding.coder)
        cloning = BcConfig(
            steps=config.steps,
            batch_size=config.batch_size,
            lr=config.lr,
            min_lr=0.1 * config.lr,
            log_every=config.log_every,
            validation_fraction=0.0,
        )
        of_member = replace(setup, policy=_of_answers(setup.policy), dataset=answers_of(data), env=None)
        seeds = [derive_seed(setup.seed, "member", i) for i in range(config.members)]
        return data, [Bc(cloning, replace(of_member, seed=seed)) for seed in seeds]

    @property
    def progress(self) -> int:
        coded = 0 if self._coding is None else self._coding.progress
        return coded + (self.members[0].progress if self.members else 0)

    @property
    def total(self) -> int:
        return self._config.steps if self._coding is None else 2 * self._config.steps

    def advance(self) -> Metrics:
        """Take a block of gradient steps, of the coder or with every member, and return (mean) metrics.

        At the end, errors on held-out episodes are added.
        """
        if not self.members:
            assert self._coding is not None
            with torch_threads(self._num_threads):
                metrics = self._coding.advance()
                if self._coding.is_done:
                    self._data, self.members = self._begun()
            return metrics
        found = [member.advance() for member in self.members]
        means: Metrics = {
            key: torch.stack([torch.as_tensor(metrics[key]) for metrics in found]).mean() for key in found[0]
        }
        if self.progress < self.total or self._held_out is None:
            return means
        with torch_threads(self._num_threads):
            world = self.snapshot()
            errors = errors_by_horizon(world, self._held_out, max(HORIZONS), seed=self._seed)
            drawn = frame_errors(world, self._held_out, HORIZONS, seed=self._seed) if world.coder else {}
        means |= {f"validation/error_{h}": errors[h - 1] for h in HORIZONS if h <= len(errors)}
        return means | {f"validation/frame_error_{h}": error for h, error in drawn.items()}

    def snapshot(self) -> WorldModel:
        """Return the world of the averaged weights."""
        with torch_threads(self._num_threads):
            data, members = (self._data, self.members) if self.members else self._begun()
        steps, first = data.transitions(), data.episode_start[:-1]
        every, some = _evenly(len(steps.frames), 4 * MOST_STATES), _evenly(len(first), MOST_STATES)
        states = steps.observations[_evenly(len(steps.frames), MOST_STATES)]
        first_states = data.observations[first[some]]
        sizes = World(len(members), len(states), len(first_states))
        if self._coding is not None:
            coder = self._coding.coder
            sizes = replace(
                sizes, latent_dim=self._config.latent_dim, cameras=coder.cameras, image_size=coder.size
            )
        world = WorldModel([member.snapshot() for member in members], sizes)
        if world.coder is not None and self._coding is not None:
            world.coder.load_state_dict(self._coding.coder.state_dict())
        world = world.eval().to(self._device)
        world.states.copy_(states)
        world.first_states.copy_(first_states)
        noise = world.sample_noise(len(every), generator=seeded_generator(self._seed, "calibration"))
        flags = flags_of(data, steps.frames[every], steps.terminated[every]).to(self._device)
        seen, acted = (one[every].to(self._device) for one in (steps.observations, steps.actions))
        with torch_threads(self._num_threads):
            world.calibrate(seen, acted, flags, noise)
        return world

    def state_dict(self) -> dict[str, Any]:
        coding = {} if self._coding is None else {"coding": self._coding.state_dict()}
        return {"members": [member.state_dict() for member in self.members], **coding, **self._invariants}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; refuses what `Bc.load_state_dict` refuses."""
        require_unchanged(state, self._invariants)
        if self._coding is not None:
            self._coding.load_state_dict(state["coding"])
            if state["members"]:
                with torch_threads(self._num_threads):
                    self._data, self.members = self._begun()
        for member, saved in zip(self.members, state["members"], strict=True):
            member.load_state_dict(saved)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _warn_of_one_outcome(dataset: EpisodeDataset) -> None:
    """Log that a world cannot tell success from failure, if the data hold only one of them."""
    known = dataset.success
    last = dataset.episode_start[1:] - 1
    has_successors = dataset.next_observations is not None  # without them a cut episode lacks its last step
    has_end = dataset.terminated[last] | has_successors
    if known is None or not (known & has_end).any():
        found = "no step with a known successor is recorded as a success"
    elif known.all():
        found = "every recorded episode is a success"
    else:
        return
    _log.warning(
        "%s: %s, so a success in this world says little of a policy. Record episodes of both kinds, e.g. "
        "burnish collect policy=<run> keep_failures=true.",
        dataset.source,
        found,
    )


def answers_of(dataset: EpisodeDataset) -> EpisodeDataset:
    """Return the data as a member sees them: observations [s, a], actions one row of answers.

    Steps without a known successor are left out, and so are episodes without any step.

    Raises:
        DatasetError: If there is no step.
    """
    steps = dataset.transitions()
    scale, _ = affine("gaussian", statistics_of(steps.observations))
    change = (steps.next_observations - steps.observations) * scale.to(steps.observations)
    flags = flags_of(dataset, steps.frames, steps.terminated)
    counts = torch.bincount(episode_of(dataset, steps.frames), minlength=dataset.num_episodes)
    counts = counts[counts > 0]
    start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    last = torch.zeros(len(steps.frames), dtype=torch.bool)
    last[start[1:] - 1] = True
    return EpisodeDataset.from_arrays(
        torch.cat([steps.observations, steps.actions], dim=1),
        torch.cat([change, steps.rewards[:, None], flags.to(change)], dim=1),
        steps.rewards,
        torch.zeros_like(last),
        last,
        start,
        extras={
            key: dataset.extras[key][steps.frames] for key in (SAMPLING_WEIGHT,) if key in dataset.extras
        },
        meta={"source": dataset.source},
    )


def flags_of(dataset: EpisodeDataset, frames: Tensor, terminated: Tensor) -> Tensor:
    """Return end and success of recorded steps, (M, 2) bool; success is that of an episode, at its last step.

    Args:
        dataset: The data.
        frames: (M,), frames of the steps.
        terminated: (M,), whether they ended the task.
    """
    success = torch.zeros_like(terminated)
    if dataset.success is not None:
        won = dataset.success.bool()[episode_of(dataset, frames)]
        success = won & dataset.is_last[frames]
    return torch.stack([terminated, success], dim=1)


def episode_of(dataset: EpisodeDataset, frames: Tensor) -> Tensor:
    """Return the episodes (M,) of frames (M,)."""
    return torch.bucketize(frames, dataset.episode_start[1:], right=True)


def errors_by_horizon(
    world: WorldModel, dataset: EpisodeDataset, steps: int, *, seed: int = 0
) -> list[float]:
    """Return the errors of states after 1 … `steps` recorded actions, without reading states in between.

    An error is the root mean square over evenly spaced starts, entries of the task's state and members, in
    standard deviations of the state. It ends before `steps` if no episode is as long.

    Args:
        world: The model.
        dataset: Episodes in the task's own observations and actions, with images in a world of frames.
        steps: Most actions.
        seed: Seed of the noise.
    """
    width, own = world.task_dim, dataset.observations.to(world.device)
    told = imagined(world, dataset, steps, most=512, seed=seed)
    gaps = ((states[..., :width] - own[frames]) * world.state_scale[:width] for states, frames in told)
    return [float(gap.square().mean().sqrt()) for gap in gaps]


@torch.no_grad()
def frame_errors(
    world: WorldModel, dataset: EpisodeDataset, horizons: Sequence[int], *, seed: int = 0
) -> dict[int, float]:
    """Return the errors of drawn frames after some numbers of actions, in a world of frames.

    An error is the root mean square over starts, pixels and members, 1 being the range of a pixel; key 0: of
    the coder alone, which draws the frame that it reads. Arguments as `errors_by_horizon`.
    """
    assert world.coder is not None
    errors = {}
    told = imagined(world, dataset, max(horizons), most=128, seed=seed, first=True)
    for step, (states, frames) in enumerate(told):
        if step in (0, *horizons):
            real = world.coder.stacked({c: dataset.images[c][frames.cpu()] for c in world.coder.cameras})
            drawn = [world.coder.decode(one[:, world.task_dim :]).clamp(0, 1) for one in states]
            errors[step] = float((torch.stack(drawn) - real).square().mean().sqrt())
    return errors


@torch.no_grad()
def imagined(
    world: WorldModel,
    dataset: EpisodeDataset,
    steps: int,
    *,
    most: int,
    seed: int,
    first: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what members imagine after 1 … `steps` recorded actions, and the frames where that happened.

    Args:
        world: See `errors_by_horizon`.
        dataset: See there.
        steps: See there.
        most: Number of starts.
        seed: See there.
        first: Begin with the starts themselves.

    Shapes:
        (G, M, Do) and (M,), for M evenly spaced starts.
    """
    starts = starts_of(dataset, steps, most)
    generator = seeded_generator(seed, "errors")
    seen, acted = with_latents(dataset, world.coder).observations, dataset.actions.to(world.device)
    states = seen[starts].to(world.device).expand(len(world.members), -1, -1).clone()
    if first:
        yield states.clone(), starts
    for step in range(min(steps, int(dataset.lengths.max()) - 1)):
        noise = world.sample_noise(len(starts), generator=generator)
        for g in range(len(world.members)):
            states[g] = world.answer(states[g], acted[starts + step], noise).states[g]
        yield states.clone(), starts + step + 1


def starts_of(dataset: EpisodeDataset, steps: int, most: int) -> Tensor:
    """Return evenly spaced frames (M,) with `steps` more in their episode, or as many as the longest has."""
    inside = episode_of(dataset, torch.arange(dataset.num_frames))
    left = dataset.episode_start[inside + 1] - torch.arange(dataset.num_frames) - 1  # frames after each
    if int(left.max()) < 1:
        raise DatasetError(f"{dataset.source}: expected episodes of two steps or more.")
    starts = (left >= min(steps, int(left.max()))).nonzero().squeeze(1)
    return starts[_evenly(len(starts), most)]


def _of_answers(policy: PolicyConfig) -> PolicyConfig:
    """Return the configuration of a member: one row, unbounded, in standard deviations."""
    policy = complete(policy)
    return replace(
        policy,
        sampler=replace(policy.sampler, clip_action=None),
        obs_steps=1,
        horizon=1,
        act_steps=1,
        action_start=0,
        normalizer={"state": "gaussian", "action": "gaussian"},
        observation_clip=None,
    )


def _evenly(count: int, most: int) -> Tensor:
    """Return at most `most` evenly spaced indices of `count`."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()
