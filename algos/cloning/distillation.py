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

_RTOL, _ATOL = 1e-4, 1e-5  # between the action normalisations of teacher and student


class Teacher:
    """Targets from the trajectories of a frozen copy of a policy, which is neither saved nor averaged.

    Raises:
        ConfigError: If the student's process does not support a teacher, the teacher has no sampling path, or
            their observations or actions differ.
    """

    def __init__(self, policy: Policy, student: Policy) -> None:
        _require_match(policy, student)
        self.policy: Any = policy.clone().to(student.device).requires_grad_(False).eval()
        self.process: Consistency = student.process  # type: ignore[assignment]

    @torch.no_grad()
    def add_targets(self, obs: Observation, action: Tensor, te: TE) -> TE:
        """Return the draws with the teacher's targets for normalised actions (B, Th, Da)."""
        return self.process.taught(action, te, partial(self._predict, self.policy.encode(obs)))

    def _predict(self, cond: Cond, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
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
            f"algo.teacher needs process=consistency; got process={name_of('process', process)}. Set it, or "
            f"leave algo.teacher out."
        )
    own: Any = teacher.config.process
    has_path = isinstance(own, GaussianPath) and own.is_integrable
    if not has_path:
        raise ConfigError(
            f"algo.teacher must have process=diffusion, flow or edm; got process={name_of('process', own)}."
        )
    if not isinstance(teacher, DenoisingPolicy):
        raise ConfigError(
            f"algo.teacher must be a denoiser alone; got a {type(teacher).__name__} around one, whose "
            "decisions are not all its own. Take the policy that it was made from."
        )
    if student.config.goal_dropout:
        raise ConfigError(
            f"policy.goal_dropout must be 0 with algo.teacher, whose targets use every goal; got "
            f"{student.config.goal_dropout:g}."
        )
    _require_same_shapes(teacher, student)
    _require_same_normalization(teacher, student)
    _require_noise_range(own, process)


def _require_same_shapes(teacher: Policy, student: Policy) -> None:
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
                f"algo.teacher and the student must have the same {name}; got {theirs} and {ours}. Set the "
                f"student's to the teacher's, or take another teacher."
            )


def _require_same_normalization(teacher: Policy, student: Policy) -> None:
    """Require equal action normalisation; observation normalisation may differ."""
    for part in ("scale", "offset"):
        theirs, ours = (p.normalizer.get_buffer(f"action_{part}").cpu() for p in (teacher, student))
        if not torch.allclose(theirs, ours, rtol=_RTOL, atol=_ATOL):
            off = float((theirs - ours).abs().max())
            raise ConfigError(
                f"algo.teacher and the student normalise actions differently: their {part}s differ by up to "
                f"{off:.3g}. Use the teacher's dataset and policy.normalizer."
            )


def _require_noise_range(teacher: Any, process: Consistency) -> None:
    alpha, sigma = (float(a) for a in teacher.alpha_sigma(torch.zeros((), dtype=torch.float64)))
    most = sigma / alpha if alpha else math.inf
    if process.noise_max > most * (1 + 1e-6):
        raise ConfigError(
            f"process.noise_max must be at most {most:.4g}, that of algo.teacher; got {process.noise_max:g}."
        )
