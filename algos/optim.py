"""Learning-rate schedules as pure functions of the step, optimiser steps, EMA of weights.

Schedules are stateless: resuming needs the step count only.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from algos.training.ranks import current
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.networks.native import Evaluation
from policies.networks.weight_cache import is_recording, note_step

_ONE = torch.tensor(1.0)


def warmup_cosine(step: int, *, lr: float, min_lr: float, warmup: int, cycle: int) -> float:
    """Return the learning rate after `step` scheduler steps.

    Linear warm-up from `min_lr` to `lr` over `warmup` steps, cosine decay to `min_lr` at the end of the
    cycle, then restart. Step 0 is always `min_lr`, also without warm-up. `min_lr > lr` makes the decay a
    rise, as in some published configurations.

    Source: Loshchilov & Hutter, arXiv 1608.03983, equation 5, with the warm-up of the DPPO reference.
    """
    if step == 0:
        return min_lr
    position = step % cycle
    if position < warmup:
        return min_lr + (lr - min_lr) * position / warmup
    return min_lr + (lr - min_lr) * (1.0 + math.cos(math.pi * (position - warmup) / (cycle - warmup))) / 2.0


def check_schedule(
    name: str, *, lr: float, min_lr: float, warmup: int, cycle: int, may_rise: bool = False
) -> None:
    """Refuse rates that are not positive or rise (unless allowed), and a warm-up beyond the cycle."""
    if lr <= 0 or min_lr < 0:
        raise ConfigError(f"{name}_lr must be > 0 and {name}_min_lr >= 0; got {lr} and {min_lr}.")
    if min_lr > lr and not may_rise:
        raise ConfigError(
            f"{name}_min_lr must not exceed {name}_lr={lr}; got {min_lr}. Leave it empty for a constant rate."
        )
    if not 0 <= warmup < cycle:
        raise ConfigError(f"{name}_lr_warmup must lie in 0..{name}_lr_cycle-1={cycle - 1}; got {warmup}.")


def adam(weights: Iterable[Tensor], lr: float) -> torch.optim.Adam:
    """Return Adam of the weights that are trained."""
    return torch.optim.Adam([weight for weight in weights if weight.requires_grad], lr=lr, fused=True)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Take one optimiser step on a loss; several losses are summed. Returns the loss, detached."""
    slope = torch.ones_like(loss)
    descend_along(optimizer, torch.autograd.grad(loss, weights_of(optimizer), slope, allow_unused=True))
    return loss.detach()


def descend_along(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None]) -> None:
    """Take one optimiser step along gradients, which several ranks average in place first."""
    current().mean_([grad for grad in grads if grad is not None])
    take_step(optimizer, grads)


def regress(
    optimizer: torch.optim.Optimizer, found: Evaluation, target: Tensor, *, weight: float = 1.0
) -> Tensor:
    """Take one step on weight * sum_i mean (Q_i - y_i)^2 of values (E, ..., B); return the loss (...).

    Targets are (..., B), or (E, ..., B). The gradient of the loss is in closed form.
    """
    error = found.values - target.detach()
    descend_along(optimizer, found.gradients(error * (2 * weight / max(1, error.shape[-1]))))
    return weight * error.square().mean(dim=-1).sum(dim=0)


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimiser, in order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


@torch.no_grad()
def take_step(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None]) -> None:
    """Take one step along gradients of the optimiser's parameters, in order; None leaves a parameter.

    After its first step a fused Adam or AdamW is one kernel on the optimiser's own state: the numbers of
    `optimizer.step` without its bookkeeping, which is most of the time of a small network. On a CPU it takes
    numbers below the smallest normal one for zero: means of the gradients of inactive units decay to them,
    and some processors need many times as long.
    """
    weights = weights_of(optimizer)
    if len(optimizer.state) < len(weights) or not optimizer.defaults.get("fused"):
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = None if grad is None else _like(grad, weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return
    kernel = torch._fused_adamw_ if isinstance(optimizer, torch.optim.AdamW) else torch._fused_adam_
    was_flushing = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        _step_at_once(optimizer, grads, kernel)
    finally:
        torch.set_flush_denormal(was_flushing)
    note_step(optimizer)


def _step_at_once(
    optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None], kernel: Callable[..., None]
) -> None:
    rest = iter(grads)
    for group in optimizer.param_groups:
        given = [(weight, grad) for weight in group["params"] if (grad := next(rest)) is not None]
        if not given:
            continue
        states = [optimizer.state[weight] for weight, _ in given]
        steps = [state["step"] for state in states]
        if steps[0].is_cpu:  # a number would become a tensor once per parameter
            torch._foreach_add_(steps, _ONE, alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        kernel(
            [weight for weight, _ in given],
            [_like(grad, weight) for weight, grad in given],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of a step; on an accelerator in a tensor, which recorded steps read."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        if device.type == "cpu":
            group["lr"] = lr
        elif not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(lr, device=device)
        elif not is_recording():
            group["lr"].fill_(lr)


def clipped(grads: Sequence[Tensor | None], max_norm: float | None) -> Sequence[Tensor | None]:
    """Return gradients scaled to a joint norm of at most `max_norm`, as PyTorch does; None: unchanged."""
    given = [grad for grad in grads if grad is not None]
    if max_norm is None or not given:
        return grads
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(given)))
    scaled = iter(torch._foreach_mul(given, (max_norm / (norm + 1e-6)).clamp(max=1.0)))
    return [None if grad is None else next(scaled) for grad in grads]


def _like(grad: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient with the memory layout of its weight: on a CPU fused kernels take it for granted."""
    return grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)


def average_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Replace gradients by their means over the ranks of the run; nothing for one."""
    ranks = current()
    if ranks.world > 1:
        ranks.mean_([weight.grad for weight in weights_of(optimizer) if weight.grad is not None])


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore an optimiser's moments; learning rates and weight decays keep their configured values."""
    configured = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)


def save_parts(owner: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the state of networks and optimisers by attribute name."""
    return {name: getattr(owner, name).state_dict() for name in names}


def load_parts(owner: object, names: Sequence[str], state: Mapping[str, Any]) -> None:
    """Restore networks and optimisers from `save_parts`."""
    for name in names:
        part = getattr(owner, name)
        if isinstance(part, torch.optim.Optimizer):
            restore_optimizer(part, state[name])
        else:
            part.load_state_dict(state[name])


@dataclass(frozen=True)
class DelayedDecay(Checked):
    """Copy the weights until `start`, then constant decay at every `every`-th update.

    Source: DPPO (arXiv 2409.00588), reference implementation of pre-training.
    """

    key: ClassVar[str] = "ema"

    value: float = bounded(0.995, ge=0, lt=1)  # decay
    start: int = bounded(0, ge=0)  # updates before which the weights are copied
    every: int = bounded(10, ge=1)  # updates between EMA updates

    def decay(self, count: int) -> float | None:
        if count % self.every:
            return None
        return 0.0 if count < self.start else self.value


@dataclass(frozen=True)
class PowerDecay(Checked):
    """EMA decay 1 - (1 + count / inv_gamma)^-power, within limits.

    Source: Diffusion Policy (arXiv 2303.04137), reference implementation.
    """

    key: ClassVar[str] = "ema"

    power: float = 0.75
    inv_gamma: float = bounded(1.0, gt=0)  # updates; larger values delay the increase of the decay
    min_value: float = bounded(0.0, ge=0, lt=1)
    max_value: float = bounded(0.9999, ge=0, lt=1)
    update_after: int = 0  # updates that only copy the weights
    every: int = bounded(1, ge=1)  # updates between EMA updates; `count` above counts EMA updates

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("min_value", self.min_value <= self.max_value, f"at most max_value={self.max_value:g}")

    def decay(self, count: int) -> float | None:
        if count % self.every:
            return None
        step = (count - self.update_after) // self.every - 1
        if step <= 0:
            return 0.0
        value = 1.0 - (1.0 + step / self.inv_gamma) ** -self.power
        return min(max(value, self.min_value), self.max_value)


DecayRule = DelayedDecay | PowerDecay  # `decay(n)` of the n-th update, from 0; None skips the update


class Ema:
    """Exponential moving average of a module's parameters; buffers are copied.

    `module` is the averaged copy, in evaluation mode and without gradients; `count` the number of updates.
    """

    def __init__(self, module: nn.Module, rule: DecayRule) -> None:
        self.rule, self.count = rule, 0
        self.module = copy.deepcopy(module).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Update the average after one gradient step."""
        decay = self.rule.decay(self.count)
        self.count += 1
        if decay is None:
            return
        mine: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(module.parameters())
        if decay == 0.0:
            torch._foreach_copy_(mine, theirs)
        else:
            torch._foreach_lerp_(mine, theirs, 1.0 - decay)
        for own, other in zip(self.module.buffers(), module.buffers(), strict=True):
            own.copy_(other)

    def state_dict(self) -> dict[str, Any]:
        weights: dict[str, Tensor] = {k: v.clone() for k, v in self.module.state_dict().items()}
        return {"count": self.count, "module": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.count = int(state["count"])

    def restore(self, state: dict[str, Any] | None, module: nn.Module) -> None:
        """Restore from `state_dict`; None (saved without EMA): start from `module`."""
        if state is None:
            self.module.load_state_dict(module.state_dict())
        else:
            self.load_state_dict(state)
