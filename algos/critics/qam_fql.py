"""QAM-F: adjoint matching, and a student of one step that imitates the tuned flow and climbs the critics.

Legend: as in `algos.critics.fql`, whose student this is; its teacher a(s, z) is the flow tuned by
`algos.critics.qam`. The student acts, in targets too, and is what is exported: one network evaluation a
chunk. All gradients are those of before the step.

Source: QAM, released code, its variant with a student. Deviations: those of `algos.critics.qam` and of the
student of `algos.critics.fql`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.critics.fql import Student, StudentConfig, student_of
from algos.critics.qam import QamConfig, QamLearner
from algos.transitions import Batch
from policies.denoising import DenoisingPolicy
from policies.policy import Policy
from policies.registry import register


class QamFqlLearner(QamLearner, Student):
    """A cloned flow, its tuned copy, a student of that, critics."""

    config: QamFqlConfig
    own_parts = (*QamLearner.own_parts, "tuned", "student_optimizer")

    def __init__(self, base: DenoisingPolicy, config: QamFqlConfig, seed: int) -> None:
        self._seed = seed  # of a student that is no copy of the flow
        super().__init__(base, config)

    def around(self, tuned: DenoisingPolicy) -> Policy:
        """Return the policy that acts: the student, or the best of its chunks."""
        self.student_optimizer = self.begin_student(student_of(tuned, self._seed))
        return super().around(self.student)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = super().draw_values(n, generator)
        if self.updates_actor:
            draws["student"] = self.student.sample_noise(n, generator=generator)
        return draws

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        found = self.update_student(batch, draws["student"], self.tuned, self.student_optimizer)
        renamed = {name.replace("actor/", "student/"): value for name, value in found.items()}
        return super().update_actor(batch, draws) | renamed


@register("algo", "qam_fql")
@dataclass
class QamFqlConfig(QamConfig, StudentConfig):
    """Adjoint matching with a student of one step, QAM-F.

    Published inverse temperatures: 0.3 to 10; alpha: 0 for cube-double and puzzle-3x3, 3 for puzzle-4x4,
    30 for mazes, 300 for scene and cube-triple.

    Source:
        QAM, released code.
    """

    def learner_of(self, policy: Policy, seed: int) -> QamFqlLearner:
        assert isinstance(policy, DenoisingPolicy)
        return QamFqlLearner(policy, self, seed)
