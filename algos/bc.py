"""Behaviour cloning for any process: the matching loss on windows of demonstrations.

Equation: minimise E[ mask * loss(policy, s, a, t, eps) ] / E[mask] over windows (s, a), times t and noise
eps; the policy defines the loss (denoising error, velocity error, or negative log-likelihood).

Deviations from the reference implementations of arXiv 2303.04137 and 2409.00588:
    - padded actions are masked and the loss is averaged over recorded entries (`dp_compat_mean` includes
      padding);
    - the learning-rate schedule counts gradient steps instead of epochs;
    - by default the EMA decay adapts to the length of the run (`ema=delayed` with ema_decay=0.995,
      ema_every=10 matches DPPO);
    - exported, validated and evaluated weights are the EMA of all parts of the policy.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from algos.base import Metrics, Setup, require_one_policy
from algos.cloning.batches import CloningBatch, Shuffle, WindowSampler
from algos.cloning.distillation import Teacher
from algos.cloning.validation import Validation, masked_mean, matching_of
from algos.optim import DecayRule, DelayedDecay, Ema, PowerDecay, restore_optimizer, warmup_cosine
from algos.training.resume_checks import facts_of, init_facts, require_unchanged
from algos.training.serialization import capture_generator, restore_generator
from envs.datasets.episodes import EpisodeDataset
from envs.fit import require_fit
from policies.bounds import Checked, bounded
from policies.build import build_policy
from policies.errors import CheckpointError, ConfigError
from policies.paths import path_field
from policies.policy import Policy
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_generator
from policies.threads import torch_threads

_log = logging.getLogger(__name__)

EMA_RULES: Mapping[str, Callable[[float, int, int], DecayRule]] = {
    "power": lambda decay, start, every: PowerDecay(max_value=decay, update_after=start, every=every),
    "delayed": DelayedDecay,
}
"""EMA decay rules by name; arguments `ema_decay`, `ema_start` and `ema_every`."""
THREADS = 1  # torch threads, unless `num_threads` is set


@register("algo", "bc")
@dataclass
class BcConfig(Checked):
    """Behaviour cloning.

    Source:
        Diffusion Policy (arXiv 2303.04137) and the pre-training of DPPO (arXiv 2409.00588).
    """

    steps: int = bounded(20_000, ge=1)  # gradient steps
    epochs: float | None = bounded(None, gt=0)  # passes over the data; replaces `steps`
    batch_size: int = bounded(256, ge=1)  # windows
    lr: float = bounded(1e-3, gt=0)  # AdamW, peak
    min_lr: float = bounded(1e-4, ge=0)  # learning rate at the first and last step
    warmup_steps: int = bounded(100, ge=0)  # gradient steps of linear warm-up
    weight_decay: float = bounded(1e-6, ge=0)  # AdamW
    max_grad_norm: float | None = bounded(None, gt=0, le=math.inf)  # gradient clipping; null: off
    ema: str = bounded("power", choices=tuple(EMA_RULES))  # power: decay 1 - (1 + n)^-3/4; delayed: constant
    ema_decay: float = bounded(0.9999, ge=0, lt=1)  # EMA decay of the weights (power: its maximum)
    ema_start: int = bounded(0, ge=0)  # gradient steps before averaging starts; until then weights are copied
    ema_every: int = bounded(5, ge=1)  # gradient steps between EMA updates
    pad_end: bool = True  # windows may extend past the end of an episode, masked
    dp_compat_mean: bool = False  # average the loss over padding too, as Diffusion Policy does
    log_every: int = bounded(100, ge=1, was="block_steps")  # gradient steps between two log rows
    validation_fraction: float = bounded(0.05, ge=0, lt=1)  # fraction of episodes held out, rounded down
    validation_every: int | None = bounded(None, ge=0)  # gradient steps; null: a tenth; 0: at the end
    validation_windows: int = bounded(256, ge=1)  # held-out windows, at most
    validation_samples: int = bounded(8, ge=1)  # chunks sampled per window
    teacher: str | None = path_field()  # run or policy directory of the teacher for consistency distillation

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("min_lr", self.min_lr <= self.lr, f"in 0..lr={self.lr}")

    def build(self, setup: Setup) -> Bc:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If the dataset is missing, sizes or cameras of dataset, environment and policy
                differ, or the policy does not support distillation.
            DatasetError: If the dataset has no window.
            CapabilityError: If `init` has no matching loss, or is a composition.
        """
        with torch_threads(setup.threads(THREADS)):
            return Bc(self, setup)

    def num_steps(self, num_windows: int) -> int:
        """Return the gradient steps of a run on `num_windows` windows."""
        if self.epochs is None:
            return self.steps
        return max(math.ceil(self.epochs * num_windows / self.batch_size), 1)

    def ema_rule(self) -> DecayRule:
        """Return the EMA decay rule."""
        return EMA_RULES[self.ema](self.ema_decay, self.ema_start, self.ema_every)


class Bc:
    """A behaviour-cloning run; see `BcConfig`.

    Attributes:
        policy: Policy in training; `snapshot` returns its EMA.
    """

    unit = "gradient_steps"

    def __init__(self, config: BcConfig, setup: Setup) -> None:
        self.config, self._num_threads = config, setup.threads(THREADS)
        dataset = _dataset_of(config, setup)
        self.policy = _start_policy(setup, dataset).to(setup.device).train()
        facts = init_facts(setup.init, self.policy) | facts_of("teacher", setup.teacher)
        self._lasting = {"seed": setup.seed, **facts}
        self._matching = matching_of(self.policy)
        dataset = dataset.with_cameras(self.policy.images)  # skips decoding of unused cameras
        self._digest, self._dataset_name = dataset.digest(), dataset.source
        self._teacher = _teacher_of(config, setup, self.policy)
        train, held_out = _hold_out(dataset.to(setup.device), config, setup.seed)
        self._source = self._windows(train)
        self._done, self._total = 0, config.num_steps(self._source.num)
        config.require("warmup_steps", config.warmup_steps < self._total, f"below {self._total} steps")
        self._validation = self._validation_on(held_out, setup.seed)
        self._shuffle = Shuffle(
            self._source.num, seeded_generator(setup.seed, "windows", device=setup.device)
        )
        self._generator = seeded_generator(setup.seed, "matching", device=setup.device)
        self._parameters = [p for p in self.policy.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self._ema = Ema(self.policy, config.ema_rule())

    @property
    def progress(self) -> int:
        return self._done

    @property
    def total(self) -> int:
        return self._total

    def advance(self) -> Metrics:
        """Take a block of gradient steps and return its mean loss; validate when due."""
        before = self._done
        with torch_threads(self._num_threads):
            metrics = self._block(min(self.config.log_every, self._total - before))
            return metrics | self._validate_if_due(before)

    def _block(self, count: int) -> Metrics:
        """Take `count` gradient steps."""
        start = time.perf_counter()
        loss = torch.zeros((), device=self._source.device)
        for _ in range(count):
            self._set_lr()
            loss += self._step(self._source.gather(self._shuffle.take(self.config.batch_size)))
            self._done += 1
        return {
            "policy/loss": loss / count,
            "policy/weight_norm": nn.utils.get_total_norm(self._parameters).detach(),
            "policy/lr": self._optimizer.param_groups[0]["lr"],
            "time/steps_per_s": count / (time.perf_counter() - start),
        }

    def _step(self, batch: CloningBatch) -> Tensor:
        """Take one gradient step; return its detached loss without host synchronisation."""
        loss = self._loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm, foreach=True)
        self._optimizer.step()
        self._ema.update(self.policy)
        return loss.detach()

    def _loss(self, batch: CloningBatch) -> Tensor:
        """Return the matching loss, averaged over recorded entries."""
        te = self._matching.sample_te(len(batch.action), generator=self._generator)
        cond = self.policy.encode(batch.obs, generator=self._generator)
        action = self.policy.normalize_action(batch.action)
        if self._teacher is not None:
            te = self._teacher.instruct(batch.obs, action, te)
        if self.config.dp_compat_mean:
            return self._matching.matching_loss(cond, action, te, reduce="mean")
        loss = self._matching.matching_loss(cond, action, te, reduce="step")  # (B, Th)
        return masked_mean(loss, batch.mask)

    def _set_lr(self) -> None:
        c = self.config
        lr = warmup_cosine(self._done, lr=c.lr, min_lr=c.min_lr, warmup=c.warmup_steps, cycle=self._total)
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _validate_if_due(self, before: int) -> Metrics:
        """Validate the EMA weights at multiples of `validation_every` and at the end."""
        every = self.config.validation_every
        every = max(self._total // 10, 1) if every is None else every
        due = self._done >= self._total or (every > 0 and self._done // every > before // every)
        if self._validation is None or not due:
            return {}
        return self._validation.measure(cast(Policy, self._ema.module))

    def snapshot(self) -> Policy:
        """Return a copy of the EMA policy in evaluation mode."""
        return cast(Policy, copy.deepcopy(self._ema.module)).eval()

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self._done,
            "total": self._total,
            "dataset": self._digest,
            "num_threads": self._num_threads,
            "policy": self.policy.state_dict(),
            "ema": self._ema.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "shuffle": self._shuffle.state_dict(),
            "generator": capture_generator(self._generator),
            **self._lasting,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: If length, data, seed or `init` differ from those of the saved run.
        """
        if state["total"] != self._total:
            raise CheckpointError(
                f"the checkpoint belongs to a run of {state['total']} gradient steps, this one has "
                f"{self._total}, so learning rates differ. Resume with the same algo.steps, or start a run "
                f"from its policy (init=<policy directory>)."
            )
        if state.get("dataset", self._digest) != self._digest:
            raise CheckpointError(
                f"the checkpoint belongs to a run on other data than {self._dataset_name} holds now. Resume "
                f"with the file as it was, or start a run from its policy (init=<policy directory>)."
            )
        require_unchanged(state, self._lasting)
        if state.get("num_threads", self._num_threads) != self._num_threads:
            _log.warning(
                "this run used num_threads=%d, now it is %d: results may differ in the last bits.",
                state["num_threads"],
                self._num_threads,
            )
        self._shuffle.load_state_dict(state["shuffle"])
        self.policy.load_state_dict(state["policy"])
        self._ema.load_state_dict(state["ema"])
        restore_optimizer(self._optimizer, state["optimizer"])
        restore_generator(self._generator, state["generator"])
        self._done = int(state["done"])

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _windows(self, dataset: EpisodeDataset) -> WindowSampler:
        chunk, pad = self.policy.chunk, self.config.pad_end
        return WindowSampler(
            dataset, chunk, pad_end=pad, goal_dim=self.policy.goal_dim, cameras=self.policy.images
        )

    def _validation_on(self, held_out: EpisodeDataset | None, seed: int) -> Validation | None:
        if held_out is None:
            return None
        windows, samples = self.config.validation_windows, self.config.validation_samples
        return Validation(self._windows(held_out), num_windows=windows, num_samples=samples, seed=seed)


def _dataset_of(config: BcConfig, setup: Setup) -> EpisodeDataset:
    if setup.dataset is None:
        algo = name_of("algo", config)
        raise ConfigError(f"algo={algo} needs demonstrations; got none. Give dataset=<file>.")
    dataset, advice = setup.dataset, "Use a dataset of the same task."
    if setup.env is not None:
        spec = setup.env.spec
        require_fit(f"env={spec.name}", spec, dataset.source, dataset, advice=advice)
    if setup.init is not None:
        require_fit("the policy of init", setup.init, dataset.source, dataset, advice=advice)
    return dataset


def _start_policy(setup: Setup, dataset: EpisodeDataset) -> Policy:
    """Return a new policy with the dataset's statistics, or a copy of `init`."""
    goal_dim = _goal_dim(setup, dataset)
    _require_goals(goal_dim, dataset)
    if setup.init is not None:
        require_one_policy(setup.init, "bc")
        return setup.init.clone().requires_grad_(True)
    return build_policy(
        setup.policy,
        obs_dim=dataset.obs_dim,
        action_dim=dataset.action_dim,
        goal_dim=goal_dim,
        images=dataset.image_shapes,
        statistics=dataset.statistics(),
        seed=derive_seed(setup.seed, "weights"),
    )


def _goal_dim(setup: Setup, dataset: EpisodeDataset) -> int:
    """Return Dg of `init`, else of the task, else of the dataset if goals are dropped."""
    if setup.init is not None:
        return setup.init.goal_dim
    if setup.env is not None:
        return setup.env.spec.goal_dim
    return _goal_width(dataset) if setup.policy.goal_dropout else 0


def _goal_width(dataset: EpisodeDataset) -> int:
    """Return the width of the recorded goals; 0 without goals."""
    return dataset.extras["goal"].shape[-1] if "goal" in dataset.extras else 0


def _require_goals(goal_dim: int, dataset: EpisodeDataset) -> None:
    width = _goal_width(dataset)
    if goal_dim and not width:
        raise ConfigError(
            f"the policy is conditioned on goals; {dataset.source} has no key 'goal'. Use a dataset that "
            f"records them, or a task whose goal is part of the state (env.goal=appended in mazes)."
        )
    if goal_dim and goal_dim != width:
        raise ConfigError(
            f"the policy is conditioned on goals of width {goal_dim}; those of {dataset.source} have width "
            f"{width}. Use a dataset of the same task."
        )


def _teacher_of(config: BcConfig, setup: Setup, student: Policy) -> Teacher | None:
    """Return the teacher, or None."""
    if setup.teacher is not None:
        return Teacher(setup.teacher, student)
    config.require("teacher", config.teacher is None, "loaded into setup.teacher, or null")
    return None


def _hold_out(
    dataset: EpisodeDataset, config: BcConfig, seed: int
) -> tuple[EpisodeDataset, EpisodeDataset | None]:
    """Split off whole episodes for validation; none if the fraction is below one episode."""
    count = int(config.validation_fraction * dataset.num_episodes)
    if count == 0:
        _log.info(
            "no validation: %.3g of %d episodes is none.", config.validation_fraction, dataset.num_episodes
        )
        return dataset, None
    return dataset.split(count / dataset.num_episodes, seed=seed)
