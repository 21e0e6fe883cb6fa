"""Distillation: targets from the sampling trajectories of a teacher policy.

Processes of teacher and student may differ. At equal signal-to-noise ratio their states differ by a factor
only and correspond to the same pair (x0, eps)::

    alpha_2 / sigma_2 = alpha / sigma,    x_2 = alpha_2 / alpha x

Source: distillation as in arXiv 2303.01469; the states follow from x = alpha x0 + sigma eps.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.policy import Policy
from policies.processes import Consistency
from policies.processes.base import GaussianPath, over_rows
from policies.protocols import TE, Cond, Observation
from policies.registry import name_of

UNITS_RTOL, UNITS_ATOL = 1e-4, 1e-5
"""Tolerance between the action normalisations of teacher and student."""


class Teacher:
    """Targets from the trajectories of a frozen policy; neither saved nor averaged with the student.

    Args:
        policy: The teacher; kept as a frozen copy on the student's device.
        student: Policy in training.

    Raises:
        ConfigError: If the student's process does not support a teacher, the teacher has no sampling path, or
            their observations or actions differ.
    """

    def __init__(self, policy: Policy, student: Policy) -> None:
        _require_match(policy, student)
        self.policy: Any = policy.clone().to(student.device).requires_grad_(False).eval()
        self.process: Consistency = student.process  # type: ignore[assignment]

    @torch.no_grad()
    def instruct(self, obs: Observation, action: Tensor, te: TE) -> TE:
        """Return the draws extended by the teacher's targets for the student's loss.

        Shapes:
            action: (B, Th, Da), normalised.
        """
        return self.process.taught(action, te, partial(self._explain, self.policy.encode(obs)))

    def _explain(self, cond: Cond, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's (x0, eps) for states and times on the student's path."""
        alpha, sigma = self.process.alpha_sigma(t)
        own = self.policy.process.time_of_lambda(alpha.log() - sigma.log())
        scale = self.policy.process.alpha_sigma(own)[0] / alpha
        x0 = self.policy.predict(over_rows(scale, x) * x, own, cond, kind="x0")
        return x0, (x - over_rows(alpha, x) * x0) / over_rows(sigma, x)


def _require_match(teacher: Policy, student: Policy) -> None:
    process: Any = student.config.process
    if not isinstance(process, Consistency):
        raise ConfigError(
            f"algo.teacher is for processes that learn from one (process=consistency); got "
            f"process={name_of('process', process)}. Leave algo.teacher out, or set process=consistency."
        )
    own: Any = teacher.config.process
    has_path = isinstance(own, GaussianPath) and own.is_integrable
    if not has_path or not isinstance(teacher, DenoisingPolicy):
        raise ConfigError(
            f"algo.teacher must be a policy with a path to follow (process=diffusion, flow or edm); got "
            f"process={name_of('process', own)}."
        )
    if student.config.goal_dropout:
        raise ConfigError(
            f"algo.teacher does not go with policy.goal_dropout: the teacher sees every goal; got "
            f"{student.config.goal_dropout:g}. Set it to 0; a guided teacher passes its guidance on."
        )
    _require_same_view(teacher, student)
    _require_same_units(teacher, student)
    _require_reach(own, process)


def _require_same_view(teacher: Policy, student: Policy) -> None:
    facts = {
        "observation width": (teacher.obs_dim, student.obs_dim),
        "goal width": (teacher.goal_dim, student.goal_dim),
        "cameras": (sorted(teacher.images), sorted(student.images)),
        "policy.obs_steps": (teacher.chunk.obs_steps, student.chunk.obs_steps),
        "policy.horizon": (teacher.chunk.horizon, student.chunk.horizon),
        "policy.action_start": (teacher.chunk.action_start, student.chunk.action_start),
        "action width": (teacher.chunk.action_dim, student.chunk.action_dim),
    }
    for name, (theirs, ours) in facts.items():
        if theirs != ours:
            raise ConfigError(
                f"the policy of algo.teacher must have the {name} of the one that learns; got {theirs} and "
                f"{ours}. Set the new policy's to the teacher's, or take another teacher."
            )


def _require_same_units(teacher: Policy, student: Policy) -> None:
    """Require equal action normalisation; observation normalisation may differ."""
    for part in ("scale", "offset"):
        theirs, ours = (p.normalizer.get_buffer(f"action_{part}").cpu() for p in (teacher, student))
        if not torch.allclose(theirs, ours, rtol=UNITS_RTOL, atol=UNITS_ATOL):
            off = float((theirs - ours).abs().max())
            raise ConfigError(
                f"the policy of algo.teacher normalises actions otherwise than the one that learns: their "
                f"{part}s differ by up to {off:.3g}. Use the teacher's dataset and policy.normalizer."
            )


def _require_reach(teacher: Any, process: Consistency) -> None:
    alpha, sigma = (float(a) for a in teacher.alpha_sigma(torch.zeros((), dtype=torch.float64)))
    reach = sigma / alpha if alpha else math.inf
    if process.noise_max > reach * (1 + 1e-6):
        raise ConfigError(
            f"process.noise_max must be at most {reach:.4g}, the noisiest level of the policy of "
            f"algo.teacher; got {process.noise_max:g}."
        )
