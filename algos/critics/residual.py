"""Residual learning: a small correction to the chunk of a policy that stays as it is.

    executed = a + clip(beta u, -c - a, c - a),   a = inner(s, w),   u ~ pi(. | s, a)
    y        = r + discount C_i Q_i_bar(s', executed')
    actor    = mean (alpha log pi_beta(u) - C_i Q_i(s, executed))

Critics see what is executed, the actor sees condition and chunk of the policy. The policy is evaluated,
never differentiated: any policy that decodes noise will do, a composition or a wrapped policy included.
With `policy.with_act_steps(1)`, the correction is closed loop at every step, and the policy plans at every
step; with longer chunks the correction is open loop within a chunk. The scale is 0 for `ramp_after` updates,
in which critics are fitted to the policy alone, and rises over `ramp_steps` more. With several candidates the
critics choose among corrected chunks, as FEdit does.

Source: residual policies as in ResFiT (arXiv 2509.19301) and PLD (arXiv 2511.00091), from their
descriptions; FEdit from the released code of QAM. Deviations: chunks of the policy are sampled anew for a
batch, where these store the executed one, which is the same distribution because a chunk begins where the
policy decides; squashed Gaussian, not TD3. Of FEdit: networks step in turn and copies follow, where the
release takes all gradients and moves its copies before the step; target copies choose among several chunks,
where the release has one chunk, or chooses by the mean of the critics in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from algos.base import Draws, Quantities
from algos.critics.edits import EditConfig, EditLearner
from algos.transitions import Batch
from policies.bounds import bounded
from policies.networks.critics import AGGREGATES
from policies.policy import Policy
from policies.registry import register


class ResidualLearner(EditLearner):
    """Edits whose scale rises."""

    is_recordable: ClassVar[bool] = False  # the scale follows the steps

    config: ResidualConfig

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of the edits; none before the scale rises, when no edit is better than another."""
        return super().update_actor(batch, draws) if self.steps > self.config.ramp_after else {}

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        found = super().step(batch, draws)
        self.policy.scale.fill_(self.config.scale_after(self.steps))
        return found


@register("algo", "residual")
@dataclass
class ResidualConfig(EditConfig):
    """Residual actor on a frozen policy.

    Source:
        arXiv 2509.19301; with `refit=true` and `aggregate=mean_std` FEdit, as QAM's released code has it.
    """

    needs_noise: ClassVar[bool] = False

    steps: int = bounded(0, ge=0)  # gradient steps on the dataset
    critics: int = bounded(10, ge=1)  # E, size of the critic ensemble
    critic_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)  # hidden widths of a critic
    aggregate: str = bounded("subset_min", choices=AGGREGATES)  # reduction over critics in targets
    refit: bool = False  # train the policy on the recorded chunks too; false: it stays as it is
    edit_scale: float = bounded(0.2, ge=0)  # beta, in normalised action units
    ramp_after: int = bounded(0, ge=0)  # updates before the scale rises from 0; only critics learn
    ramp_steps: int = bounded(0, ge=0)  # updates over which the scale rises
    num_candidates: int = bounded(1, ge=1)  # N, corrected chunks to choose from

    def learner_of(self, policy: Policy, seed: int) -> ResidualLearner:
        count = self.num_candidates
        wrapper = self.wrapper(num_candidates=count, num_edited=count, keeps_base=False)
        learner = ResidualLearner(policy, wrapper.wrap(policy), self)
        learner.policy.scale.fill_(self.scale_after(0))
        return learner

    def scale_after(self, steps: int) -> float:
        """Return the scale of edits after a number of updates."""
        risen = steps - self.ramp_after
        share = min(max(risen / self.ramp_steps, 0.0), 1.0) if self.ramp_steps else float(risen >= 0)
        return self.edit_scale * share
