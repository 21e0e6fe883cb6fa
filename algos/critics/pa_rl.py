"""Policy-agnostic RL: a critic ranks chunks and improves them by its gradient, the policy clones the result.

Legend: as in `algos.critics.learner` and `policies.wrappers.candidates`; N sampled chunks, of which the K
best climb the value for L steps; T temperature::

    pi*(s)  = argmax C_i Q_i(s, .) over the K improved chunks
    y       = r + discount C'_i Q_i_bar(s', pi*(s'))
    set     = improved(K - 1 best samples at s, recorded chunk)
    refit   = matching loss at one chunk of the set, drawn from softmax(C_i Q_i / T)

C is the mean, C' the minimum over a random pair. Values move samples, never weights of the policy: any policy
that has a matching loss will do, deterministic ones too; with `refit=false` any policy that decodes noise.
Order: policy, critics, target copies (towards the new critics).

Source: PA-RL, released code. Deviations: a critic of one value unless `critic_bins` is set (released: 128,
with `bin_sigma` 1.06), learned by temporal differences alone, where the release adds the penalty of Cal-QL
at 0.005; members share no layer; pairs are drawn without replacement; box and rate of ascent are in
normalised units; optimisers go on in the task; the policy samples as it is, not by an average of its weights,
and clones on data too (`refit_after`), on the batches of the critics, where the release clones in the task
alone, on batches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner, choosing
from algos.optim import descend
from algos.transitions import Batch
from policies.bounds import bounded
from policies.networks.critics import AGGREGATES
from policies.policy import Policy
from policies.registry import register
from policies.wrappers.candidates import CandidatePolicy, select


class PaRlLearner(ChunkCriticLearner):
    """Critics whose gradient improves chunks, and the policy that clones them."""

    config: PaRlConfig
    policy: CandidatePolicy
    critic_first = False
    moves_first = False

    def __init__(self, base: Policy, config: PaRlConfig) -> None:
        super().__init__(base, config)
        wrapper = config.wrapper(
            num_candidates=config.num_candidates,
            aggregate="mean",
            num_ascended=config.num_ascended,
            ascent_steps=config.ascent_steps,
            ascent_lr=config.ascent_lr,
        )
        self.policy = choosing(base, wrapper, self.critic)

    @property
    def refits(self) -> bool:
        return self.cloning is not None and self.steps >= self.config.refit_after

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = super().draw_values(n, generator)
        if self.updates_actor and self.refits:
            draws["refit"] = self.policy.sample_noise(n, generator=generator)
            uniform = torch.rand(n, self.config.num_ascended, generator=generator, device=generator.device)
            draws["gumbel"] = -uniform.log().neg().log().to(self.base.device)
        return draws

    @torch.no_grad()
    def refit_set(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return improved plans (B, K, Th, Da), which rows are known (B, K, Th), and log-weights (B, K).

        The recorded chunk is the last of each row and takes the place of the worst sample.
        """
        policy, cond = self.policy, self.base.condition(batch.cond)
        plans, actions = policy.candidates(cond, noise)
        plans, actions = policy.best(plans, actions, policy.worth(batch.cond, actions))
        recorded = batch.plan.view(-1, 1, *self.base.chunk.shape)
        plans = torch.cat([plans[:, 1:], recorded], dim=1)
        start = torch.cat([actions[:, 1:], batch.action[:, None]], dim=1)
        real = torch.ones_like(plans[..., 0])
        real[:, -1] = batch.real
        actions, worth = policy.ascended(batch.cond, start)
        weight = (worth / self.config.temperature).log_softmax(dim=1)
        return policy.with_executed(plans, actions), real, weight

    def update_base(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of the policy towards improved chunks."""
        if "refit" not in draws or self.base_optimizer is None:
            return {}
        plans, real, weight = self.refit_set(batch, draws["refit"])
        drawn = weight + draws["gumbel"]  # the largest is a draw from the softmax
        aim = replace(batch, plan=select(plans, drawn).flatten(1), real=select(real, drawn))
        moved = (plans[:, -1].flatten(1) - batch.plan).square().mean().sqrt()
        found = {"policy/loss": descend(self.base_optimizer, self.matching(aim, draws))}
        last = (drawn.argmax(dim=1) == plans.shape[1] - 1).float().mean()
        return found | {"policy/recorded_fraction": last, "actor/ascent_size": moved}


@register("algo", "pa_rl")
@dataclass
class PaRlConfig(ChunkCriticConfig):
    """PA-RL: improve chunks by the critic's gradient, then clone them.

    Published: 32 candidates, 10 of which take 10 steps of 3e-4; 8 and 4 for a large policy.

    Source:
        PA-RL, settings of its released code.
    """

    needs_noise: ClassVar[bool] = False

    critics: int = bounded(10, ge=1)  # E, size of the critic ensemble
    critic_dims: tuple[int, ...] = bounded((256, 256, 256, 256), ge=1, some=True)  # hidden widths of a critic
    critic_activation: str = "silu"
    norm_after: bool = False  # after the activation instead of before it
    aggregate: str = bounded("subset_min", choices=AGGREGATES)  # reduction over critics in targets
    num_candidates: int = bounded(32, ge=1)  # N, chunks of the policy
    num_ascended: int = bounded(10, ge=1)  # K, the best of them, which climb the value
    ascent_steps: int = bounded(10, ge=0)  # L, gradient steps on a chunk; 0: the best of N
    ascent_lr: float = bounded(3e-4, gt=0)  # eta, normalised action units per unit of slope
    temperature: float = bounded(1.0, gt=0)  # T, of the draw of the chunk that is cloned
    refit_after: int = bounded(0, ge=0)  # updates before the policy begins to clone improved chunks

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"at most algo.num_candidates={self.num_candidates}"
        self.require("num_ascended", self.num_ascended <= self.num_candidates, rule)
        chooses = self.num_candidates > 1 or self.ascent_steps > 0
        self.require("ascent_steps", chooses, "at least 1 where algo.num_candidates=1")

    def unused(self) -> dict[str, str]:
        found = super().unused()
        if not self.ascent_steps:
            found["ascent_lr"] = "without algo.ascent_steps"
        if not self.refit:
            found |= dict.fromkeys(("temperature", "refit_after"), "without algo.refit")
        return found

    def learner_of(self, policy: Policy, seed: int) -> PaRlLearner:
        return PaRlLearner(policy, self)
