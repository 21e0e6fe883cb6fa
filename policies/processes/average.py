"""Shared parts of flows that learn average velocities.

Legend: t sampling time, 0 noise and 1 data; s <= t start and end of a step; x state at s. On the line
I_s = s x0 + (1 - s) eps with velocity v = x0 - eps the flow has the velocity b(x, s) = E[v | I_s = x]. The
network outputs the average velocity u of a step instead, so that sampling needs few steps::

    X(x, s, t) = x + (t - s) u(x, s, t)      where the flow carries x: the flow map
    u(x, t, t) = b(x, t)

The network's second time is the length t - s of the step, so that 0 asks for b.

Source: arXiv 2410.12557 (shortcut models), 2405.20320 and 2406.07507 (flow maps), 2505.13447 (MeanFlow).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from policies.errors import CapabilityError
from policies.networks.attention import set_attention
from policies.processes.flow import RectifiedFlow

if TYPE_CHECKING:
    from policies.backbones import Backbone


@dataclass(frozen=True)
class AveragePath(RectifiedFlow):
    """Straight path whose network predicts the average velocity of a step; base class of processes."""

    has_second_time: ClassVar[bool] = True

    def second_net_time(self, t: Tensor, t_next: Tensor) -> Tensor:
        return self.time_scale * (t_next - t)

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "euler", "steps": 2}  # one is possible, two are usually needed


def allow_derivatives(backbone: Backbone, *, trained: bool) -> Backbone:
    """Configure a backbone for forward-mode derivatives and return it.

    Attention and normalisation are set to `math`. `trained`: a loss backpropagates through the derivative.
    """
    assert isinstance(backbone, nn.Module)
    set_attention(backbone, "math")
    fused = [name for name, part in backbone.named_modules() if type(part) is nn.LayerNorm]
    if trained and fused:
        raise CapabilityError(
            "this objective backpropagates through a derivative, which PyTorch's LayerNorm computes wrongly; "
            f"{type(backbone).__name__} has it in {', '.join(fused)}. Use "
            "policies.networks.attention.LayerNorm there, process=meanflow, or process.objective=psd."
        )
    return backbone


def derivative(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], along: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return a function's value and directional derivative, both differentiable."""
    value, change = torch.func.jvp(function, at, along)  # type: ignore[misc]
    return value, change
