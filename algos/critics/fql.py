"""Flow Q-learning: a one-step student imitates the chunks of a cloned policy and climbs a critic.

Legend: as in `algos.critics.learner`; teacher a(s, z) the cloned policy, mu(s, z) the student, z noise, clip
to the bound `clip_action` of the teacher's sampler, if any::

    y       = r + discount C_i Q_i_bar(s', clip mu(s', z'))
    loss    = alpha mean (mu(s, z) - a(s, z))^2 - lambda mean Q_i(s, clip mu(s, z))      one z for both
    lambda  = 1, or 1 / mean |mean_i Q_i(s, clip mu)| with `normalize_value`, constant

The mean over critics maximised by the student is plain, whatever `aggregate` says. The teacher learns from
its matching loss alone. All gradients are those of before the step. The exported policy is the student: one
network evaluation.

Source: FQL, arXiv 2502.02538, released code; on chunks QC-FQL, arXiv 2507.07969. Deviations: those of
`algos.critics.qc`; the student is a flow of one Euler step that starts as a copy of the teacher, where the
release starts a plain network anew; from a teacher that is no flow it starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from algos.base import Draws, Quantities
from algos.critics.learner import ChainConfig, ChunkCriticConfig, ChunkCriticLearner, policy_beside
from algos.onpolicy.requirements import algorithms_for
from algos.optim import adam, descend
from algos.training.ranks import current
from algos.transitions import Batch
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.processes.flow import RectifiedFlow
from policies.registry import name_of, register
from policies.samplers.ode import Euler


def student_of(teacher: DenoisingPolicy, seed: int) -> DenoisingPolicy:
    """Return a trainable flow of one Euler step: a copy of a flow, or a new flow beside another process."""
    clip = getattr(teacher.sampler, "clip_action", None)
    if type(teacher.process) is RectifiedFlow:
        student: Policy = teacher.clone()
    else:
        config = replace(teacher.config, process=RectifiedFlow(), sampler=Euler(steps=1))
        student = policy_beside(teacher, config, seed, "student")
    assert isinstance(student, DenoisingPolicy)
    student = student.with_sampler(Euler(steps=1, clip_action=clip))
    student.requires_grad_(True)
    cast(nn.Module, student.encoder).requires_grad_(False)
    return student


@dataclass
class StudentConfig(ChunkCriticConfig):
    """Settings shared by algorithms that train a student."""

    has_actor: ClassVar[bool] = True

    alpha: float = bounded(10.0, ge=0)  # weight of the distillation
    normalize_value: bool = False  # divide the value term by its mean magnitude


class Student(ChunkCriticLearner):
    """The part of a learner that trains a student of one Euler step."""

    config: StudentConfig

    def begin_student(self, student: DenoisingPolicy) -> torch.optim.Adam:
        """Take the policy that is trained; return its optimiser."""
        assert isinstance(student.sampler, Euler)
        self.student, self._clip = student, student.sampler.clip_action
        self._unclipped = student.with_sampler(replace(student.sampler, clip_action=None))
        return adam(student.parameters(), self.config.actor_lr)

    def student_losses(
        self, batch: Batch, noise: Tensor, teacher: DenoisingPolicy
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distillation error, the value term, and lambda, for noise (B, Th, Da)."""
        cond = self.base.condition(batch.cond)
        target = teacher.decode(cond, noise).detach()
        chunk = self._unclipped.decode(cond, noise, grad=True)
        distillation = (chunk - target).square().mean()
        action = chunk[:, self.student.chunk.executed].flatten(1)
        action = action if self._clip is None else action.clamp(-self._clip, self._clip)
        value = self.critic(batch.cond, action, frozen=True).mean(dim=0)
        scale = torch.ones_like(value[0])  # lambda
        if self.config.normalize_value:
            scale = 1 / current().mean(value.detach().abs().mean())
        return distillation, -scale * value.mean(), scale

    def update_student(
        self, batch: Batch, noise: Tensor, teacher: DenoisingPolicy, optimizer: torch.optim.Adam
    ) -> Quantities:
        """Take one step of the student."""
        distillation, value, _ = self.student_losses(batch, noise, teacher)
        descend(optimizer, self.config.alpha * distillation + value)
        return {"actor/distillation": distillation.detach(), "actor/value_loss": value.detach()}


class FqlLearner(Student):
    """A teacher, its student and critics."""

    config: FqlConfig
    critic_first = False
    own_parts = ("base", "actor_optimizer")

    def __init__(self, base: DenoisingPolicy, student: DenoisingPolicy, config: FqlConfig) -> None:
        super().__init__(base, config)
        self.policy, self.actor_optimizer = student, self.begin_student(student)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = super().draw_values(n, generator)
        if self.updates_actor:
            draws["student"] = self.policy.sample_noise(n, generator=generator)
        return draws

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        assert isinstance(self.base, DenoisingPolicy)
        return self.update_student(batch, draws["student"], self.base, self.actor_optimizer)


@register("algo", "fql")
@dataclass
class FqlConfig(ChainConfig, StudentConfig):
    """Flow Q-learning; with chunks of several steps QC-FQL.

    Published alpha: 10 for antmaze, 30 for humanoid, 300 for cube and scene, 1000 for puzzle; QC-FQL 100.
    For new tasks the authors advise `normalize_value` and a search over 0.03 to 10.

    Source:
        arXiv 2502.02538 and its released code.
    """

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        is_plain = isinstance(policy, DenoisingPolicy) and policy.noise_shape == policy.chunk.shape
        if not (is_plain and policy.is_deterministic):
            process = name_of("process", policy.config.process)
            raise CapabilityError(
                f"algo={algo} distils a policy that is determined by its start noise, and this "
                f"{type(policy).__name__} (process={process}, sampler="
                f"{type(getattr(policy, 'sampler', None)).__name__}) is not. Use "
                f"sampler=euler or ddim (eta 0) where the process has one, or {algorithms_for(policy)}."
            )

    def learner_of(self, policy: Policy, seed: int) -> FqlLearner:
        assert isinstance(policy, DenoisingPolicy)
        return FqlLearner(policy, student_of(policy, seed), self)
