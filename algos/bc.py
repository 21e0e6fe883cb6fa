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
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from algos.base import Metrics, Setup, dataset_of, goal_dim_of, require_one_policy, seen_by
from algos.cloning.batches import CloningBatch, Shuffle, WeightedStream, WindowSampler
from algos.cloning.distillation import Teacher
from algos.cloning.quality import quality
from algos.cloning.validation import Validation, held_out, masked_mean, matching_of
from algos.optim import (
    DecayRule,
    DelayedDecay,
    Ema,
    PowerDecay,
    clipped,
    restore_optimizer,
    take_step,
    warmup_cosine,
)
from algos.training.ranks import current
from algos.training.resume_checks import facts_of, init_facts, require_unchanged
from algos.training.serialization import capture_generator, restore_generator
from envs.datasets.episodes import EpisodeDataset
from policies.bounds import Checked, bounded
from policies.build import build_policy
from policies.errors import CapabilityError, CheckpointError, DatasetError
from policies.networks.recorded import Recorded
from policies.paths import path_field
from policies.policy import Policy
from policies.protocols import TE, Cond
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_generator
from policies.threads import torch_threads
from policies.wrappers.planner import PlannerPolicy

_log = logging.getLogger(__name__)

_EMA_RULES: Mapping[str, Callable[[float, int, int], DecayRule]] = {  # of ema_decay, ema_start, ema_every
    "power": lambda decay, start, every: PowerDecay(max_value=decay, update_after=start, every=every),
    "delayed": DelayedDecay,
}
THREADS = 1  # torch threads, unless `num_threads` is set


@register("algo", "bc")
@dataclass
class BcConfig(Checked):
    """Behaviour cloning.

    Source:
        Diffusion Policy (arXiv 2303.04137) and the pre-training of DPPO (arXiv 2409.00588).
    """

    splits_batches: ClassVar[bool] = True  # over the processes of a run

    steps: int = bounded(20_000, ge=1)  # gradient steps
    epochs: float | None = bounded(None, gt=0)  # passes over the data; replaces `steps`
    batch_size: int = bounded(256, ge=1)  # windows
    lr: float = bounded(1e-3, gt=0)  # AdamW, peak
    min_lr: float = bounded(1e-4, ge=0)  # learning rate at the first and last step
    warmup_steps: int = bounded(100, ge=0)  # gradient steps of linear warm-up
    weight_decay: float = bounded(1e-6, ge=0)  # AdamW
    max_grad_norm: float | None = bounded(None, gt=0, le=math.inf)  # gradient clipping; null: off
    ema: str = bounded("power", choices=tuple(_EMA_RULES))  # power: decay 1 - (1 + n)^-3/4; delayed: constant
    ema_decay: float = bounded(0.9999, ge=0, lt=1)  # EMA decay of the weights (power: its maximum)
    ema_start: int = bounded(0, ge=0)  # gradient steps before averaging starts; until then weights are copied
    ema_every: int = bounded(5, ge=1)  # gradient steps between EMA updates; those after the last are left out
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

    def unused(self) -> dict[str, str]:
        found = super().unused()
        if self.epochs is not None:
            found["steps"] = f"beside algo.epochs={self.epochs:g}, which replaces it"
        if not self.validation_fraction:
            names = ("validation_every", "validation_windows", "validation_samples")
            found |= dict.fromkeys(names, "without algo.validation_fraction")
        return found

    def build(self, setup: Setup) -> Bc:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If the dataset is missing, sizes or cameras of dataset, environment and policy
                differ, or the policy does not support distillation.
            DatasetError: If the dataset has no window.
            CapabilityError: If `init` has no matching loss, or is a composition or a planner.
        """
        if isinstance(setup.init, PlannerPolicy):
            raise CapabilityError(
                "algo=bc clones chunks of actions; init is a planner, whose plans hold states. Use the "
                "algorithm that made it, algo=diffuser or algo=decision_diffuser."
            )
        with torch_threads(setup.threads(THREADS)):
            return Bc(self, setup)


class Bc:
    """A behaviour-cloning run; see `BcConfig`.

    Attributes:
        policy: In training; `snapshot` returns its EMA.
        data_quality: How good the data are, for the model card; see `algos.cloning.quality`.
    """

    unit = "gradient_steps"
    replays: ClassVar[bool] = True  # steps differ in batch and draws alone

    def __init__(self, config: BcConfig, setup: Setup) -> None:
        self.config, self._num_threads = config, setup.threads(THREADS)
        dataset = dataset_of(setup, name_of("algo", config), "demonstrations")
        self.policy = _start_policy(setup, dataset).to(setup.device).train()
        facts = init_facts(setup.init, self.policy) | facts_of("teacher", setup.teacher)
        self._invariants = {"seed": setup.seed, **facts}
        self._matching = matching_of(self.policy)
        dataset = seen_by(self.policy, dataset)  # skips decoding of unused cameras
        self._digest, self._dataset_name = dataset.digest(), dataset.source
        self.data_quality = quality(dataset)
        self._teacher = _teacher_of(config, setup, self.policy)
        self._seed, self._device = setup.seed, setup.device
        self._use(dataset)
        self._done, self._total = 0, config.steps
        if config.epochs is not None:
            self._total = max(math.ceil(config.epochs * self._source.num / config.batch_size), 1)
        self._warmup = config.warmup_steps
        if self._warmup >= self._total:  # a short run
            self._warmup = self._total // 10
            _log.info("algo.warmup_steps is %d, a tenth of this short run.", self._warmup)
        order = seeded_generator(setup.seed, "windows", device=setup.device)
        weight = self._source.weight
        self._stream = Shuffle(self._source.num, order) if weight is None else WeightedStream(weight, order)
        self._generator = seeded_generator(setup.seed, "matching", device=setup.device)
        self._parameters = [p for p in self.policy.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        rule = _EMA_RULES[config.ema](config.ema_decay, config.ema_start, config.ema_every)
        self._ema = Ema(self.policy, rule)
        augments = bool(self.policy.images)  # a replay would repeat the shifts or crops that were recorded
        is_on = self.replays and not augments and current().world == 1
        self._gradients = Recorded(self._loss_and_gradients, is_on=is_on)

    def _use(self, dataset: EpisodeDataset) -> None:
        """Split a dataset into windows of training (`_source`) and validation."""
        config, dataset = self.config, dataset.to(self._device)
        train, rest = held_out(dataset, config.validation_fraction, self._seed)
        self._validation = None
        try:
            self._source = self._windows(train)
        except DatasetError:  # the episodes that are long enough may all be held out
            if rest is None:
                raise
            self._source, rest = self._windows(dataset), None
            _log.warning("no validation: all episodes that hold a whole chunk would be held out.")
        if rest is None:
            return
        try:
            windows = self._windows(rest)
        except DatasetError as error:  # these few episodes may be too short
            _log.warning("no validation with the held-out episodes: %s", error)
            return
        count, samples = config.validation_windows, config.validation_samples
        self._validation = Validation(windows, num_windows=count, num_samples=samples, seed=self._seed)

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
        start = time.perf_counter()
        loss = torch.zeros((), device=self._source.device)
        for _ in range(count):
            self._set_lr()
            loss += self._step(self._draw())
            self._done += 1
        return {
            "policy/loss": loss / count,
            "policy/weight_norm": nn.utils.get_total_norm(self._parameters).detach(),
            "policy/lr": self._optimizer.param_groups[0]["lr"],
            "time/steps_per_s": count / (time.perf_counter() - start),
        }

    def _draw(self) -> CloningBatch:
        return self._source.gather(current().own(self._stream.take(self.config.batch_size)))

    def _step(self, batch: CloningBatch) -> Tensor:
        """Take one gradient step; return its detached loss without host synchronisation."""
        loss, grads = self._gradients(batch, self._draw_te())
        current().mean_([grad for grad in grads if grad is not None])
        take_step(self._optimizer, clipped(grads, self.config.max_grad_norm))
        self._ema.update(self.policy)
        return loss

    def _loss_and_gradients(self, batch: CloningBatch, te: TE) -> tuple[Tensor, list[Tensor | None]]:
        """Return the detached loss and the gradients of all parameters."""
        loss = self._loss(batch, te)
        return loss.detach(), list(torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def _loss(self, batch: CloningBatch, te: TE) -> Tensor:
        """Return the matching loss, averaged over recorded entries."""
        inputs = self._inputs(batch, te)
        if self.config.dp_compat_mean:
            return self._matching.matching_loss(*inputs, reduce="mean")
        loss = self._matching.matching_loss(*inputs, reduce="step")  # (B, Th)
        return masked_mean(loss, batch.mask)

    def _draw_te(self) -> TE:
        """Return times and noise of this process's rows of a batch; all processes draw the whole batch."""
        ranks = current()
        te = self._matching.sample_te(self.config.batch_size, generator=self._generator)
        return te if ranks.world == 1 else te.rows(slice(ranks.rank, None, ranks.world))

    def _inputs(self, batch: CloningBatch, te: TE) -> tuple[Cond, Tensor, TE]:
        """Return what the matching loss takes: condition, normalised actions, times and noise."""
        cond = self.policy.encode(batch.obs, generator=current().own_generator(self._generator))
        action = self.policy.normalize_action(batch.action)
        if self._teacher is not None:
            te = self._teacher.add_targets(batch.obs, action, te)
        return cond, action, te

    def _set_lr(self) -> None:
        c = self.config
        lr = warmup_cosine(self._done, lr=c.lr, min_lr=c.min_lr, warmup=self._warmup, cycle=self._total)
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
            "shuffle": self._stream.state_dict(),
            "generator": capture_generator(self._generator),
            **self._invariants,
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
        require_unchanged(state, self._invariants)
        if state.get("num_threads", self._num_threads) != self._num_threads:
            before, now = state["num_threads"], self._num_threads
            _log.warning("the run used num_threads=%d, now it is %d: last bits may differ.", before, now)
        self._stream.load_state_dict(state["shuffle"])
        self.policy.load_state_dict(state["policy"])
        self._ema.load_state_dict(state["ema"])
        restore_optimizer(self._optimizer, state["optimizer"])
        restore_generator(self._generator, state["generator"])
        self._done = int(state["done"])

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _windows(self, dataset: EpisodeDataset) -> WindowSampler:
        policy, pad = self.policy, self.config.pad_end
        return WindowSampler(
            dataset, policy.chunk, pad_end=pad, goal_dim=policy.goal_dim, cameras=policy.images
        )


def _start_policy(setup: Setup, dataset: EpisodeDataset) -> Policy:
    """Return a new policy with the dataset's statistics, or a copy of `init`."""
    goal_dim = goal_dim_of(setup, dataset)
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


def _teacher_of(config: BcConfig, setup: Setup, student: Policy) -> Teacher | None:
    if setup.teacher is not None:
        return Teacher(setup.teacher, student)
    config.require("teacher", config.teacher is None, "loaded into setup.teacher, or null")
    return None
