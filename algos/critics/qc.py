"""Q-chunking: a clone of the data samples chunks, a critic of chunks chooses among them.

Legend: as in `algos.critics.learner`; N candidates a_n = pi(s, w_n)::

    pi*(s) = argmax over n of C_i Q_i(s, a_n)
    y      = r + discount C_i Q_i_bar(s', pi*(s'))

Acting and targets choose by the critics in training, targets value by the target copies. The policy learns
from its matching loss alone. Any policy that samples chunks from noise will do.

Source: Q-chunking, arXiv 2507.07969, released code. Deviations: chunks that leave an episode are not drawn,
where the release draws them with weight 0; a chunk in which the task ends counts, where the release drops
it; new experience begins where chunks begin, where the release begins at any step; the two losses have an
optimiser each.
"""

from __future__ import annotations

from dataclasses import dataclass

from algos.critics.learner import ChainConfig, ChunkCriticLearner, choosing
from policies.bounds import bounded
from policies.policy import Policy
from policies.registry import register


class QcLearner(ChunkCriticLearner):
    """Critics that choose among N chunks."""

    config: QcConfig

    def __init__(self, base: Policy, config: QcConfig) -> None:
        super().__init__(base, config)
        wrapper = config.wrapper(num_candidates=config.num_candidates)
        self.policy = choosing(base, wrapper, self.critic)


@register("algo", "qc")
@dataclass
class QcConfig(ChainConfig):
    """Q-chunking: best of N chunks by a critic.

    Source:
        arXiv 2507.07969, settings of its robomimic and OGBench tasks.
    """

    num_candidates: int = bounded(32, ge=1)  # N, chunks to choose from

    def learner_of(self, policy: Policy, seed: int) -> QcLearner:
        return QcLearner(policy, self)
