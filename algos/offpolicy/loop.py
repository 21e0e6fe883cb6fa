"""Training loop of off-policy algorithms: act, store, update, and save.

Legend: T chunk steps of a collection, N environments, C condition width, L latent width, A = Ta Da.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from algos.base import Metrics, Quantities, Setup
from algos.offline.loop import THREADS
from algos.offpolicy.config import OffPolicyConfig
from algos.offpolicy.hindsight import Hindsight
from algos.offpolicy.replay_buffer import ChunkBatch, Mixture, Replay
from algos.offpolicy.sac_update import LatentActor, SacUpdate
from algos.optim import DelayedDecay, Ema
from algos.training.experience import summary, transitions_of
from algos.training.metrics import Means
from algos.training.observations import (
    encoder_module,
    from_flat_state,
    shifted,
)
from algos.training.resume_checks import init_facts, require_unchanged
from algos.training.serialization import capture_generator, restore_generator
from algos.transitions import Rewarding, TransitionTable, tabulate
from envs.datasets.action_bounds import box_of, clipped_actions
from envs.datasets.episodes import EpisodeDataset
from envs.fit import require_dataset_of, require_fit
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.rollout import Rollout
from envs.spec import EnvConfig
from policies.errors import CapabilityError, ConfigError
from policies.networks.recorded import Recorded
from policies.policy import Policy
from policies.protocols import Observation
from policies.registry import name_of
from policies.seeds import seeded_generator
from policies.threads import torch_threads

_log = logging.getLogger(__name__)

CHECKED_ROWS = 64  # warm-up transitions inspected before the first update


class Explorer:
    """Rollout actor that records transitions for the replay buffer; see `envs.rollouts.rollout.Actor`."""

    def __init__(self, actor: LatentActor, *, is_warmup: bool, trains_encoder: bool = False) -> None:
        self.actor, self.is_warmup, self.trains_encoder = actor, is_warmup, trains_encoder

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return physical actions (N, Ta, Da), and latent and normalised chunk of each.

        The record holds the condition too, unless the encoder is trained.
        """
        policy = self.actor.policy
        cond = policy.encode(policy.observation(obs)).vec
        shape = len(cond), self.actor.latent_dim
        eps = torch.randn(shape, generator=generator, device=generator.device).to(cond)
        latent = self.actor.warmup_latent(cond, eps) if self.is_warmup else self.actor.draw(cond, eps)[0]
        action = self.actor.chunk(cond, latent)
        physical = policy.physical(action.view(len(cond), policy.chunk.act_steps, -1))
        record = {"latent": latent, "action": action}
        return physical, record if self.trains_encoder else {"cond": cond, **record}


@dataclass(frozen=True)
class ImageEncoding:
    """Encodes sampled batches by the encoder in training: with gradients, successors without.

    Images are shifted by up to `shift` pixels, drawn per row.
    """

    policy: Policy
    shift: int

    def __call__(self, batch: ChunkBatch, generator: torch.Generator) -> ChunkBatch:
        cond = self._features(batch.cond, batch.images, generator)
        with torch.no_grad():
            following = self._features(batch.next_cond, batch.next_images, generator)
        return replace(batch, cond=cond, next_cond=following, images={}, next_images={})

    def _features(self, flat: Tensor, images: Observation, generator: torch.Generator) -> Tensor:
        obs = from_flat_state(self.policy, flat, images)
        moved = shifted(self.policy, obs, self.shift, generator)
        return self.policy.encode(self.policy.observation(moved)).vec


class OffPolicyRun:
    """A run in progress; see `algos.base.Algorithm`.

    Args:
        config: Budget and batches.
        setup: Environment, seed, workers, threads, device.
        learner: SAC update.
        offline: Transitions of a dataset for a fraction of every batch; None: no dataset.
        resume_invariants: In addition to those of config and init; see `algos.training.resume_checks`.
        check: Called with conditions (B, C) of the warm-up and a separate generator, before the first update.

    Raises:
        ConfigError: If the warm-up is longer than the run, or workers and environments do not fit.
        CapabilityError: If the dtypes of policy and replay buffer differ.
    """

    unit, budget = "env_steps", "algo.total_steps"

    def __init__(
        self,
        config: OffPolicyConfig,
        setup: Setup,
        learner: SacUpdate,
        offline: TransitionTable | None = None,
        resume_invariants: Mapping[str, Any] | None = None,
        check: Callable[[Tensor, torch.Generator], Quantities] | None = None,
    ) -> None:
        assert setup.env is not None
        limit = f"at most algo.total_steps={config.total_steps}, or nothing is learned"
        config.require("warmup_steps", config.warmup_steps <= config.total_steps, limit)
        self.config, self.learner, self._check = config, learner, check
        policy = learner.policy
        if policy.dtype != torch.float32:
            raise CapabilityError(
                f"algo={name_of('algo', config)} learns in torch.float32; the policy computes in "
                f"{policy.dtype}. Call .float() on it first."
            )
        self._trains_encoder = trains = config.encoder == "trained"
        self.replay = self._new_replay(setup.device)
        ratio, offset = config.offline_ratio, config.value_offset
        encode = ImageEncoding(policy, config.image_shift) if trains else None
        self.source = Mixture(self.replay, config.discounting, offline, ratio, offset, encode)
        self.pool = setup.pool(policy, config.num_envs, records_path=config.hindsight > 0)
        self._fleet, self._lags = setup.fleet, list[Tensor]()  # updates behind, a tensor per collection
        self._hindsight: Hindsight | None = None
        if config.hindsight:
            free = not self._fleet.is_free  # episodes are followed by environment
            config.require("hindsight", free, "0 with fleet.mode=free")
            goals = seeded_generator(setup.seed, "hindsight")
            self._hindsight = Hindsight(
                setup.env, policy, copies=config.hindsight, generator=goals, is_flat=trains
            )
        self._generator = seeded_generator(setup.seed, "replay", device=setup.device)
        self._check_generator = seeded_generator(setup.seed, "look", device=setup.device)
        self._num_threads = setup.threads(THREADS)
        self._resume_invariants = {
            "seed": setup.seed,
            **init_facts(setup.init, policy),
            **config.resume_invariants(),
            "dataset": None if offline is None or setup.dataset is None else setup.dataset.digest(),
            **(resume_invariants or {}),
        }
        self.progress, self._steps, self._pending_updates = 0, 0, 0.0
        self._trained = nn.ParameterList([*learner.actor.parameters(), *learner.encoder])
        rule = DelayedDecay(config.ema_decay, every=1)
        self._ema = Ema(self._trained, rule) if config.ema_decay else None
        self._recorded = Recorded(self._learner_step, writes_weights=True)
        self._rollout_actor: LatentActor | None = None  # acts: the actor, or a copy of it on the CPU
        self._rollout_actor_steps = 0  # updates after which that copy was made

    def _new_replay(self, device: torch.device) -> Replay:
        """Return an empty buffer, for features, or for states, goals and images of a trained encoder."""
        config, policy, chunk = self.config, self.learner.policy, self.learner.policy.chunk
        chunks = config.total_steps + config.num_envs * config.steps_per_iteration  # at most
        flat = chunk.obs_steps * policy.obs_dim + policy.goal_dim
        shapes = {camera: (chunk.obs_steps, *shape) for camera, shape in policy.images.items()}
        return Replay(
            min(config.buffer_size, chunks * (1 + config.hindsight)),
            cond=flat if self._trains_encoder else policy.encoder.cond_dim,
            latent=self.learner.actor.latent_dim,
            action=chunk.width,
            steps=chunk.act_steps,
            images=shapes if self._trains_encoder else None,
            device=device,
        )

    @property
    def total(self) -> int:
        """Control steps to execute; rounds are executed whole."""
        return self.config.total_steps

    def advance(self) -> Metrics:
        """Act and learn until `log_every` control steps or updates are done; return metrics."""
        before, means, seconds = self.progress, Means(), {"rollout": 0.0, "update": 0.0}
        until, last = min(before + self.config.log_every, self.total), self._steps + self.config.log_every
        episodes: list[EpisodeRow] = []
        with torch_threads(self._num_threads):
            while self.progress < until and self._steps < last:
                began = time.perf_counter()
                rollout = self._collect()
                collected = time.perf_counter()
                episodes += rollout.episodes
                self._update(means)
                self._synchronize()
                seconds["rollout"] += collected - began
                seconds["update"] += time.perf_counter() - collected
        times = {f"time/{what}_s": value for what, value in seconds.items()}
        times["time/env_steps_per_s"] = (self.progress - before) / sum(seconds.values())
        return (
            means.read()
            | summary(episodes, bool(self.pool.env.spec.success_rule))
            | {"replay/rows": float(len(self.replay))}
            | self._lag_metrics()
            | times
        )

    def _collect(self) -> Rollout:
        """Collect chunks into the replay buffer, and count the updates that become due."""
        is_warmup = self.progress < self.config.warmup_steps
        trains = self._trains_encoder
        explorer = Explorer(self._actor_for_rollouts(), is_warmup=is_warmup, trains_encoder=trains)
        steps = self.config.steps_per_iteration
        if self._fleet.is_free:
            rollout = self.pool.collect_free(explorer, steps, self._steps)
            assert rollout.version is not None
            self._lags.append(self._steps - rollout.version.repeat(steps))
        else:
            rollout = self.pool.collect(explorer, steps)
        transitions = transitions_of(rollout, self.learner.policy, trains_encoder=trains)
        self.replay.add(**transitions)
        if self._hindsight is not None and (copies := self._hindsight.relabelled(rollout, transitions)):
            self.replay.add(**copies)
        executed = int(rollout.length.sum())
        self.progress += executed
        if self.progress >= self.config.warmup_steps:
            self._pending_updates += executed * self.config.updates_per_step
        return rollout

    def _lag_metrics(self) -> Metrics:
        """Return the lag of the acting weights behind the newest, in updates, over rows since the last call.

        `fleet/lag_<n>` is the fraction of rows with a lag from n to 2 n - 1.
        """
        if not self._lags:
            return {}
        lag = torch.cat(self._lags)
        self._lags = []
        edges = [0, *(2**power for power in range(math.ceil(math.log2(int(lag.max()) + 2))))]
        ranges = zip(edges, [*edges[1:], math.inf], strict=True)
        metrics: Metrics = {
            f"fleet/lag_{low}": ((lag >= low) & (lag < high)).double().mean() for low, high in ranges
        }
        metrics |= {"fleet/lag_mean": lag.double().mean(), "fleet/lag_max": float(lag.max())}
        return metrics

    def _actor_for_rollouts(self) -> LatentActor:
        """Return what acts; in workers, a copy on the CPU, of which only trained weights are refreshed."""
        actor = self.learner.actor
        if self._rollout_actor is None:
            self._rollout_actor = self.pool.acting(actor)
        elif self._steps > self._rollout_actor_steps and self._rollout_actor.policy is not actor.policy:
            with torch.no_grad():
                copies = self._rollout_actor.parameters()
                for copied, trained in zip(copies, actor.parameters(), strict=True):
                    copied.copy_(trained)
                if self._trains_encoder:
                    encoder = encoder_module(self._rollout_actor.policy)
                    encoder.load_state_dict(encoder_module(actor.policy).state_dict())
        self._rollout_actor_steps = self._steps
        return self._rollout_actor

    def _synchronize(self) -> None:
        """Synchronise the device, so that its time counts as update time instead of copy time."""
        device = self.learner.policy.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _update(self, means: Means) -> None:
        """Take the updates that are due; of a fleet without lockstep, as many as `max_lag` allows."""
        count = math.floor(self._pending_updates)
        limit = self._fleet.max_lag
        if limit is not None and (oldest := self.pool.oldest_version) is not None:
            count = min(count, max(0, oldest + limit - self._steps))
        self._pending_updates -= count
        size, generator = self.config.batch_size, self._generator
        if count and self._steps == 0 and self._check is not None:
            batch = self.source.draw(CHECKED_ROWS, self._check_generator)
            means.add(self._check(batch.cond, self._check_generator))
        for _ in range(count):
            self._steps += 1
            batch, draws = self.source.draw(size, generator), self.learner.draw(size, generator)
            updates_actor = self._steps % self.config.actor_every == 0
            means.add(self._recorded(batch, draws, updates_actor))
            if self._ema is not None and updates_actor:
                self._ema.update(self._trained)
        if count:
            for metrics in self.learner.finish_round(count, size, self.source, generator):
                means.add(metrics)

    def _learner_step(self, batch: ChunkBatch, draws: dict[str, Tensor], updates_actor: bool) -> Quantities:
        return self.learner.step(batch, draws, updates_actor=updates_actor)

    def snapshot(self) -> Policy:
        policy = self.learner.policy.clone().eval().requires_grad_(False)
        if self._ema is not None:
            averages = zip(self._trained, self._ema.module.parameters(), strict=True)
            average_of = {id(weight): average for weight, average in averages}
            pairs = zip(policy.parameters(), self.learner.policy.parameters(), strict=True)
            with torch.no_grad():
                for copied, weight in pairs:
                    copied.copy_(average_of.get(id(weight), copied))
        return policy

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress,
            "steps": self._steps,
            "owed": self._pending_updates,
            "learner": self.learner.state_dict(),
            **({} if self._ema is None else {"ema": self._ema.state_dict()}),
            "replay": self.replay.state_dict(),
            **({} if self._hindsight is None else {"hindsight": self._hindsight.state_dict()}),
            "generator": capture_generator(self._generator),
            "pool": self.pool.state_dict(),
            **self._resume_invariants,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_unchanged(state, self._resume_invariants)
        self.learner.load_state_dict(state["learner"])
        self._recorded.forget()
        if self._ema is not None:
            self._ema.restore(state.get("ema"), self._trained)
        self.replay.load_state_dict(state["replay"])
        if self._hindsight is not None:
            self._hindsight.load_state_dict(state["hindsight"])
        restore_generator(self._generator, state["generator"])
        self.pool.load_state_dict(state["pool"])
        self.progress, self._steps, self._pending_updates = state["progress"], state["steps"], state["owed"]
        self._rollout_actor = None

    def close(self) -> None:
        self.pool.close()


def offline_table(config: OffPolicyConfig, setup: Setup, policy: Policy) -> TransitionTable | None:
    """Return the dataset's transitions if `offline_ratio` is positive, else None.

    Raises:
        ConfigError: If the dataset is missing, belongs to another task, or ends episodes by another rule.
    """
    if not config.offline_ratio:
        if setup.dataset is not None and setup.init is not None:  # a new policy takes the dataset's scales
            _log.warning("no batch takes rows of the dataset: algo.offline_ratio, their share, is 0.")
        return None
    algo = name_of("algo", config)
    if setup.dataset is None:
        raise ConfigError(
            f"algo={algo} with algo.offline_ratio={config.offline_ratio} needs a dataset. "
            f"Give dataset=<file>, or {config.without_data}."
        )
    dataset, advice = setup.dataset, "Use a dataset of the same task."
    require_fit("the policy", policy, dataset.source, dataset, advice=advice)
    if setup.env is not None:
        spec = setup.env.spec
        if setup.init is not None:  # a new policy is built for this task, which was compared already
            require_dataset_of(setup.env, dataset, allow_other_task=setup.allow_other_task)
        _require_ends(dataset, setup.env)
        dataset = clipped_actions(dataset, box_of(dataset, spec))
    rewarding = Rewarding(config.gamma, config.reward_scale, config.reward_shift)
    trains = config.encoder == "trained"
    return tabulate(dataset.to(setup.device), policy, rewarding, trains_encoder=trains)


def _require_ends(dataset: EpisodeDataset, env: EnvConfig) -> None:
    """Refuse episodes that continue after success in a task that ends there; warn of the opposite."""
    name, terminated = env.spec.name, int(dataset.terminated.sum())
    if env.spec.terminate_on_success and not terminated:
        raise ConfigError(
            f"env.terminate_on_success ends episodes of {name}, but none of {dataset.source} is terminated. "
            f"Record it by burnish collect … env.terminate_on_success=true, or leave the option out."
        )
    if getattr(env, "terminate_on_success", None) is False and terminated:
        _log.warning(
            "%s: %d of %d episodes are terminated, but env=%s goes on until its limit, so the same states "
            "have two values. Set env.terminate_on_success=true.",
            dataset.source, terminated, dataset.num_episodes, name,
        )  # fmt: skip
