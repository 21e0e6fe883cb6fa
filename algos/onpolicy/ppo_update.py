"""PPO update: minibatches, gradients in cache-sized microbatches, optimiser steps.

Legend: M environment steps, S inner steps per environment step (denoising steps), B rows of a minibatch
(pairs of environment step and inner step), U distinct environment steps of a minibatch.

The gradient of a minibatch is the sum over microbatches, each sized for the cache and computed by one of
several threads. Advantage statistics are taken over the whole minibatch first, so the sum equals the full
gradient. The critic evaluates each distinct environment step once, weighted by its number of rows. Results
are equal for any number of threads.

Source: PPO (arXiv 1707.06347); DPPO (arXiv 2409.00588), algorithm 1. Deviations from the reference: none in
the numbers; unused evaluations of the frozen network are skipped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from algos.base import Quantities
from algos.onpolicy.advantages import Experience
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.demonstrations import ROWS, Demonstrations, RecordedValues
from algos.onpolicy.losses import (
    SURROGATES,
    approx_kl,
    clip_to_quantiles,
    normalize_advantage,
    value_losses,
)
from algos.onpolicy.ratios import BcTerm, RatioEstimator, Rows, Score
from algos.optim import clipped, load_parts, save_parts, take_step, warmup_cosine
from algos.training.observations import EncodedWhenRead
from algos.training.ranks import current
from policies.protocols import Cond
from policies.threads import torch_threads

SURROGATE_METRICS = (
    *("loss", "clip_fraction", "approx_kl", "ratio_mean"),
    *("ratio_spread", "entropy", "saturated_fraction", "penalty"),
)
TERMS = (*SURROGATE_METRICS, "policy/cloning_loss", "policy/demo_loss")
"""Metrics of the actor's tasks, in the order in which they are summed."""


def single_term(name: str, value: Tensor) -> Tensor:
    """Return the metrics (len(TERMS),) of a task that has one of them; the others are 0."""
    sums = torch.zeros(len(TERMS), device=value.device, dtype=value.dtype)
    sums[TERMS.index(name)] = value.detach()
    return sums


def of_step(values: Tensor, step: Tensor) -> Tensor:
    """Return the value of each row's inner step, (B,), or of the only one, (1,)."""
    return values if len(values) == 1 else values.index_select(0, step)


def named_metrics(sums: Tensor) -> Quantities:
    """Return the metrics that `PpoUpdate.surrogate` sums, by name; the spread is a root mean square."""
    metrics = {f"policy/{name}": value for name, value in zip(SURROGATE_METRICS, sums, strict=False)}
    return metrics | {"policy/ratio_spread": metrics["policy/ratio_spread"].sqrt()}


@dataclass(frozen=True)
class Task:
    """Part of a minibatch's loss: `weight` times the sum of the losses (n,) that `loss()` returns first.

    Second it returns metrics, which are summed over tasks.
    """

    params: Sequence[nn.Parameter]
    loss: Callable[[], tuple[Tensor, Tensor]]
    weight: float = 1.0

    def run(self) -> tuple[tuple[Tensor, ...], Tensor]:
        with torch.enable_grad():
            losses, metrics = self.loss()
            slope = torch.full_like(losses, self.weight)
            grads = torch.autograd.grad(losses, self.params, slope, allow_unused=True, materialize_grads=True)
        return grads, metrics.detach()


class GradientThreads:
    """Runs tasks on several threads with one torch thread each; sums follow the order of the tasks.

    Results are bitwise equal for any number of threads. With one thread, tasks run in the caller.
    """

    def __init__(self, num_threads: int) -> None:
        pool = partial(ThreadPoolExecutor, initializer=torch.set_num_threads, initargs=(1,))
        self._pool = pool(num_threads, "gradient") if num_threads > 1 else None

    def sum(self, tasks: Sequence[Task]) -> tuple[list[Tensor], Tensor]:
        """Return summed gradients and metrics of tasks that share their parameters, over all ranks."""
        ranks = current()
        own = ranks.own(tasks)
        with torch_threads(1):
            computed = own or tasks[:1]  # fewer tasks than ranks: of this one only the shapes are used
            results = map(Task.run, computed) if self._pool is None else self._pool.map(Task.run, computed)
            first, metrics = next(results)
            grads = list(first)
            if len(computed) > 1 or ranks.world > 1:  # added to in place; a gradient may be an expanded view
                grads = [grad.clone() for grad in first]
            for more_grads, more_metrics in results:
                torch._foreach_add_(grads, list(more_grads))
                metrics = metrics + more_metrics
        if ranks.world > 1:
            sums = [*grads, metrics := metrics.clone()]
            if not own:
                torch._foreach_zero_(sums)
            ranks.sum_(sums)
        return grads, metrics

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class GeneratorDraws:
    """Random numbers of an update."""

    generator: torch.Generator

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def noise(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=like.dtype).to(like.device)


class PpoUpdate:
    """Updates the actor, i.e. trained parameters of the policy in `ratio`, and the critic."""

    def __init__(
        self,
        config: OnPolicyConfig,
        *,
        ratio: RatioEstimator,
        actor: Sequence[nn.Parameter],
        critic: nn.Module,
        encoder: Sequence[nn.Parameter] = (),
        cloning: BcTerm | None = None,
        demonstrations: Demonstrations | None = None,
        recorded: RecordedValues | None = None,
        num_threads: int = 1,
    ) -> None:
        self.config, self.ratio, self.critic, self.cloning = config, ratio, critic, cloning
        self.stop_kl, self.demonstrations, self.recorded = config.target_kl, demonstrations, recorded
        self.actor, self.critic_params = [*actor, *encoder], list(critic.parameters())
        self.threads, self.stage = GradientThreads(num_threads), ""
        steps, device = ratio.inner_steps, self.actor[0].device
        self.clip_range = config.clip_range_of(steps).to(device)
        self.discount = config.discount_of(steps).to(device)
        adamw = partial(torch.optim.AdamW, fused=True)
        actor_decay, critic_decay = config.actor_weight_decay, config.critic_weight_decay
        groups: list[dict[str, Any]] = [{"params": list(actor), "share": 1.0}]
        if encoder:
            groups.append({"params": list(encoder), "share": config.encoder_share})
        self.actor_optimizer = adamw(groups, config.actor_lr, weight_decay=actor_decay)
        self.critic_optimizer = adamw(self.critic_params, config.critic_lr, weight_decay=critic_decay)

    # -- one iteration ---------------------------------------------------------------------------------

    def update(self, experience: Experience, *, iteration: int, draws: GeneratorDraws) -> Quantities:
        """Run the epochs of one iteration; return metrics averaged over its minibatches.

        Only `target_kl` synchronises with the device after every minibatch, as it may stop the update.
        """
        actor_lr, critic_lr = self.rates(iteration)
        for optimizer, lr in ((self.actor_optimizer, actor_lr), (self.critic_optimizer, critic_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("share", 1.0)
        if isinstance(experience.cond, EncodedWhenRead):
            experience = replace(experience, shift=self.shift(experience))
        train_actor = iteration >= self.config.critic_warmup_iterations
        reports: list[Quantities] = []
        rows = len(experience) * self.ratio.inner_steps
        planned = self.config.update_epochs * (rows // min(self.config.batch_size, rows))
        for index in self.minibatches(rows, draws):
            self.stage = f"{len(reports)} of {planned} minibatches"
            reports.append(self.step(experience, index, draws=draws, train_actor=train_actor))
            if self.stop_kl is not None and float(reports[-1]["policy/approx_kl"]) > self.stop_kl:
                break
        means = {name: torch.stack([report[name] for report in reports]).mean() for name in reports[0]}
        means["policy/lr"] = torch.tensor(actor_lr if train_actor else 0.0)
        means["value/lr"] = torch.tensor(critic_lr)
        means["policy/updates"] = torch.tensor(float(len(reports)))
        if self.ratio.factors is not None:
            means["policy/joint_clip"] = self.clip_range[-1] * self.ratio.factors
        return means

    def rates(self, iteration: int) -> tuple[float, float]:
        """Return learning rates (actor, critic); the actor's schedule starts after the critic warm-up."""
        config, trained = self.config, max(0, iteration - self.config.critic_warmup_iterations)
        actor, critic = config.schedule("actor"), config.schedule("critic")
        return warmup_cosine(trained, **actor), warmup_cosine(iteration, **critic)

    def minibatches(self, total: int, draws: GeneratorDraws) -> Iterator[Tensor]:
        """Yield row indices: a permutation per epoch, split into full minibatches, the rest dropped."""
        size = min(self.config.batch_size, total)
        for _ in range(self.config.update_epochs):
            order = draws.permutation(total)
            for start in range(0, total - size + 1, size):
                yield order[start : start + size]

    def step(
        self, experience: Experience, index: Tensor, *, draws: GeneratorDraws, train_actor: bool
    ) -> Quantities:
        """Take one optimiser step of actor and critic on the rows `index` (B,)."""
        if train_actor:
            metrics = self.actor_step(experience, index, draws)
        else:
            metrics = self.untouched_actor(experience, index)
        critic_grads, value_loss = self.critic_gradient(experience, index)
        if self.recorded is not None:
            torch._foreach_add_(critic_grads, self.recorded_gradient(self.recorded, draws))
        take_step(self.critic_optimizer, critic_grads)
        return metrics | {"value/loss": value_loss}

    def actor_step(self, experience: Experience, index: Tensor, draws: GeneratorDraws) -> Quantities:
        grads, metrics = self.actor_gradient(experience, index, draws=draws)
        take_step(self.actor_optimizer, clipped(grads, self.config.max_grad_norm))
        return metrics

    def ordered(self, index: Tensor) -> Tensor:
        """Return rows (B,) sorted by environment step where several share its condition: on a CPU."""
        return index.sort().values if self.ratio.inner_steps > 1 and index.is_cpu else index

    # -- the actor's loss ------------------------------------------------------------------------------

    def actor_gradient(
        self, experience: Experience, index: Tensor, *, draws: GeneratorDraws
    ) -> tuple[list[Tensor], Quantities]:
        drawn = index.to(experience.advantage.device)  # in random order, of which the cloning term takes some
        index = self.ordered(drawn)
        share = 1.0 / len(index)
        tasks = [Task(self.actor, losses, share) for losses in self.surrogates(experience, index)]
        terms = {
            "policy/cloning_loss": self.cloning_tasks(experience, drawn, draws),
            "policy/demo_loss": self.demo_tasks(draws),
        }
        grads, sums = self.threads.sum(sum(terms.values(), tasks))
        extra = {name: sums[TERMS.index(name)] for name, present in terms.items() if present}
        return grads, named_metrics(sums) | extra

    def surrogates(self, experience: Experience, index: Tensor) -> list[Callable[[], tuple[Tensor, Tensor]]]:
        """Return the microbatches' losses and metrics at ordered rows (B,), as functions."""
        advantage, size = self.weighted_advantage(experience, index), self.microbatch_size(index)
        return [
            partial(self.surrogate, experience, rows, part, len(index))
            for rows, part in zip(index.split(size), advantage.split(size), strict=True)
        ]

    def surrogate(
        self, experience: Experience, index: Tensor, advantage: Tensor, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's losses (B,) and its part of the metrics of `total` rows."""
        rows = Rows.sorted_from(index, self.ratio.inner_steps)
        score = self.score(experience, index, rows, advantage)
        return self.objective(score, advantage, of_step(self.clip_range, rows.step), total)

    def objective(
        self, score: Score, advantage: Tensor, clip_range: Tensor, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return losses (B,) of scored rows and their part of the metrics of `total` rows."""
        ratio = score.log_ratio.exp()
        objective = loss = SURROGATES[self.config.surrogate](ratio, advantage, clip_range)
        if self.config.entropy_coef:
            objective = objective - self.config.entropy_coef * score.entropy
        if score.penalty is not None:
            objective = objective + score.penalty
        with torch.no_grad():
            change, zeros = ratio - 1.0, torch.zeros_like(ratio)
            outside = (change.abs() > clip_range).to(ratio.dtype)
            kl = approx_kl(score.log_ratio if score.drift is None else score.drift)
            penalty = zeros if score.penalty is None else score.penalty
            terms = (loss, outside, kl, ratio, change.square(), score.entropy, score.saturated, penalty)
            sums = torch.stack([*terms, *[zeros] * (len(TERMS) - len(terms))]).sum(dim=1) / total
        return objective, sums

    def score(
        self, experience: Experience, index: Tensor, rows: Rows, advantage: Tensor | None = None
    ) -> Score:
        """Return the score of rows, without what shifted images alone change (`Experience.shift`)."""
        score = self.ratio.score(experience, rows, advantage)
        if experience.shift is None:
            return score
        of_log_ratio, of_drift = experience.shift.index_select(1, index)
        drift = None if score.drift is None else score.drift - of_drift
        return replace(score, log_ratio=score.log_ratio - of_log_ratio, drift=drift)

    @torch.no_grad()
    def shift(self, experience: Experience) -> Tensor:
        """Return the log ratios and drifts (2, M S) of the acting policy on the images of the updates."""
        index = torch.arange(len(experience) * self.ratio.inner_steps, device=experience.advantage.device)
        parts = []
        for part in index.split(self.microbatch_size(index)):
            score = self.ratio.score(experience, Rows.sorted_from(part, self.ratio.inner_steps))
            drift = torch.zeros_like(score.log_ratio) if score.drift is None else score.drift
            parts.append(torch.stack([score.log_ratio, drift]))
        return torch.cat(parts, dim=1)

    def weighted_advantage(self, experience: Experience, index: Tensor) -> Tensor:
        """Return the rows' advantages: normalised over the minibatch, clipped, discounted by inner step."""
        steps = self.ratio.inner_steps
        advantage = experience.advantage.index_select(0, index if steps == 1 else index // steps)
        if self.config.normalize_advantage:
            advantage = normalize_advantage(advantage)
        advantage = clip_to_quantiles(advantage, *self.config.advantage_quantiles)
        return advantage if steps == 1 else advantage * of_step(self.discount, index % steps)

    def untouched_actor(self, experience: Experience, index: Tensor) -> Quantities:
        """Return the metrics of an unchanged policy: every ratio is one."""
        index = index.to(experience.advantage.device)
        zero = experience.advantage.new_zeros(())
        metrics = {f"policy/{name}": zero for name in SURROGATE_METRICS}
        return metrics | {
            "policy/loss": -self.weighted_advantage(experience, index).mean(),
            "policy/ratio_mean": zero + 1,
        }

    def cloning_tasks(self, experience: Experience, index: Tensor, draws: GeneratorDraws) -> list[Task]:
        """Return the cloning term's tasks over the first `bc_rows` sampled rows; empty without the term."""
        if self.cloning is None:
            return []
        state = index[: self.config.bc_rows].sort().values // self.ratio.inner_steps
        noise = draws.noise((len(state), *self.cloning.noise_shape), experience.advantage)
        size = self.microbatch_size(index)
        return [
            Task(self.actor, partial(self.cloning_loss, experience, rows, part, len(state)))
            for rows, part in zip(state.split(size), noise.split(size), strict=True)
        ]

    def cloning_loss(
        self, experience: Experience, state: Tensor, noise: Tensor, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return this microbatch's part of the weighted cloning loss at environment steps `state` (B,)."""
        assert self.cloning is not None
        cond, initial = experience.cond.rows(state), experience.initial_cond
        frozen = None if initial is None else initial.rows(state)
        loss = self.cloning.losses(cond, noise, frozen).sum() / total
        return self.config.bc_weight * loss, single_term("policy/cloning_loss", loss)

    def demo_tasks(self, draws: GeneratorDraws) -> list[Task]:
        """Return the task of drawn demonstrations; empty without them."""
        if self.demonstrations is None:
            return []
        mean_loss, weight = self.demonstrations.draw(draws.generator), self.config.demo_weight

        def loss() -> tuple[Tensor, Tensor]:
            value = mean_loss()
            return weight * value, single_term("policy/demo_loss", value)

        return [Task(self.actor, loss)]

    # -- the critic's loss -----------------------------------------------------------------------------

    def recorded_gradient(self, recorded: RecordedValues, draws: GeneratorDraws) -> list[Tensor]:
        """Return the critic's gradient of recorded values; their loss is in no metric."""
        loss = recorded.draw(self.critic, draws.generator)
        weight = self.config.vf_coef * self.config.demo_value_weight / ROWS
        return self.threads.sum([Task(self.critic_params, lambda: (loss(), torch.zeros(())), weight)])[0]

    def critic_gradient(self, experience: Experience, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the critic's gradient of the rows `index` (B,), and their mean loss without `vf_coef`."""
        index = self.ordered(index.to(experience.advantage.device))
        rows = Rows.sorted_from(index, self.ratio.inner_steps)
        size = self.microbatch_size(rows.state)
        states = rows.state.split(size)
        counts = [None] * len(states) if rows.count is None else rows.count.split(size)
        weight = self.config.vf_coef / len(index)
        tasks = [
            Task(self.critic_params, partial(self.value_loss, experience, state, count, len(index)), weight)
            for state, count in zip(states, counts, strict=True)
        ]
        return self.threads.sum(tasks)

    def value_loss(
        self, experience: Experience, state: Tensor, count: Tensor | None, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return the losses (U,) of distinct states, weighted by row count, and their part of the mean."""
        target, old = experience.target.index_select(0, state), experience.value.index_select(0, state)
        readable = experience.cond if experience.seen is None else experience.seen
        inputs = readable.rows(state)
        value = self.critic(inputs.vec if isinstance(inputs, Cond) else inputs)
        losses = value_losses(value, target, old, self.config.value_clip)
        losses = losses if count is None else losses * count
        return losses, losses.detach().sum() / total

    def microbatch_size(self, index: Tensor) -> int:
        """Return the rows of a microbatch: cache-sized on a CPU, a rank's whole share elsewhere."""
        share = math.ceil(len(index) / current().world)
        if index.device.type != "cpu":
            return share
        return min(max(1, self.config.microbatch_size // self.ratio.evaluations), max(1, share))

    def close(self) -> None:
        self.threads.close()

    # -- saving ----------------------------------------------------------------------------------------

    _parts = ("critic", "actor_optimizer", "critic_optimizer")

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(save_parts(self, self._parts))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts(self, self._parts, state)
