"""EXPO: a cloned policy samples chunks, a small actor edits them, a critic chooses among all.

Equations: `policies.wrappers.candidates` (acting) and `algos.critics.edits` (edits); targets::

    y = r + discount min_S Q_bar(s', a*),   a* = argmax over candidates of min_S' Q_bar(s', .)

S and S' are two random pairs of critics; there is no entropy in y. Order: critics, target copies (towards
the new critics), then every `actor_every` steps the policy on its matching loss, edits, temperature. Edits
are trained at recorded actions (`edits_at`). The exported policy chooses by the minimum over all target
critics.

Source: EXPO, arXiv 2507.07986, released code. Deviations: those of `algos.critics.qc`; edited actions stay
in the box; the default target entropy is reachable, the released one is not below a scale of 0.303; rates
are constant; every critic step draws its own batch; without edits before the first update; the policy acts as
it is, not by an average of its weights, and by all target critics, where the release draws two.
"""

from __future__ import annotations

from dataclasses import dataclass

from algos.critics.edits import EDITED, EditConfig, EditLearner
from policies.bounds import bounded
from policies.networks.critics import AGGREGATES
from policies.policy import Policy
from policies.registry import register


@register("algo", "expo")
@dataclass
class ExpoConfig(EditConfig):
    """EXPO: base and edited chunks compete by value.

    Published edit scales: 0.05 for robomimic and antmaze, 0.7 for pen.

    Source:
        arXiv 2507.07986 and its released code.
    """

    critics: int = bounded(10, ge=1)  # E, size of the critic ensemble
    critic_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)  # hidden widths of a critic
    critic_activation: str = "relu"
    norm_after: bool = False  # after the activation instead of before it
    aggregate: str = bounded("subset_min", choices=AGGREGATES)  # reduction over critics in targets
    actor_every: int = bounded(20, ge=1)  # critic updates per update of policy and edits
    edit_scale: float = bounded(0.05, ge=0)  # beta, in normalised action units
    edits_at: str = bounded("data", choices=EDITED)  # whose actions edits are trained at
    num_candidates: int = bounded(8, ge=1)  # N, chunks of the policy
    num_edited: int = bounded(8, ge=1)  # M of them are edited

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"at most algo.num_candidates={self.num_candidates}"
        self.require("num_edited", self.num_edited <= self.num_candidates, rule)

    def learner_of(self, policy: Policy, seed: int) -> EditLearner:
        wrapper = self.wrapper(num_candidates=self.num_candidates, num_edited=self.num_edited)
        return EditLearner(policy, wrapper.wrap(policy), self)
