"""QAM-E: adjoint matching, and a small edit that may leave what the flow can sample.

The tuned flow follows values inside the support of the data (`algos.critics.qam`); an edit actor corrects its
chunks (`algos.critics.edits`), in the loss, in targets and when it acts::

    a    = clip(decode(s, z) + beta u),     u ~ pi(. | s, decode(s, z)),     decode by the tuned flow
    edit = mean (alpha log pi(u) - mean_i Q_i(s, a))

With several candidates the critics choose among edited chunks. Flow, edits, critics and base take gradients
of before the step.

Source: QAM, released code, its variant with edits. Deviations: those of `algos.critics.qam`; edits have ReLU
networks of their own widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.critics.edits import EditConfig, Edits
from algos.critics.learner import choosing
from algos.critics.qam import QamConfig, QamLearner
from algos.transitions import Batch
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.policy import Policy
from policies.registry import register
from policies.wrappers.candidates import CandidatePolicy


class QamEditLearner(QamLearner, Edits):
    """A cloned flow, its tuned copy, edits, critics."""

    config: QamEditConfig
    policy: CandidatePolicy
    own_parts = (*QamLearner.own_parts, *Edits.edit_parts)

    def __init__(self, base: DenoisingPolicy, config: QamEditConfig) -> None:
        super().__init__(base, config)
        self.begin_edits(self.policy)

    def around(self, tuned: DenoisingPolicy) -> CandidatePolicy:
        """Return the policy that acts: edited chunks of the tuned flow, the best of several."""
        count = self.config.num_candidates
        wrapper = self.config.wrapper(
            aggregate="mean", num_candidates=count, num_edited=count, keeps_base=False
        )
        return choosing(tuned, wrapper, self.critic)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = super().draw_values(n, generator)
        return draws | (self.edit_draws(n, generator) if self.updates_actor else {})

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        return self.backup(batch, self.chunk(self.acting, batch.next_cond, draws["next"]), draws)

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        edits = self.update_edits(batch, draws)  # of the flow before its step
        renamed = {name.replace("actor/", "edit/"): value for name, value in edits.items()}
        return super().update_actor(batch, draws) | renamed


@register("algo", "qam_edit")
@dataclass
class QamEditConfig(QamConfig, EditConfig):
    """Adjoint matching with edits, QAM-E.

    Published inverse temperatures: 1 to 10, puzzle-4x4 0.1; scales of edits: 0 for cube-double and scene,
    0.1, puzzle-4x4 0.9.

    Source:
        QAM, released code.
    """

    edit_dims: tuple[int, ...] = bounded((512, 512, 512, 512), ge=1, some=True)  # widths of the edits; ReLU

    def learner_of(self, policy: Policy, seed: int) -> QamEditLearner:
        assert isinstance(policy, DenoisingPolicy)
        return QamEditLearner(policy, self)
