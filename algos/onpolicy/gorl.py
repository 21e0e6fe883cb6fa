"""GoRL: PPO on the latent of a generative policy, in turns with refits of what decodes it.

Legend: C condition width, z latent (Th Da), mu and sigma of the encoder, g decoder, w weight of the latents::

    z         = mu(s) + sigma(s) eps,   a = g(s, z)          g is frozen within a stage
    ratio     = N(z; mu, sigma) / N(z; mu_old, sigma_old)    exact: no density of actions is needed
    loss      = PPO surrogate - entropy + w mean(mu^2 + sigma^2)
    refit     = matching loss of g at chunks of the latest policy, from fresh noise

After a stage the decoder learns to make the actions of the policy from noise, and the encoder begins anew at
that noise, N(0, I): what the encoder found becomes the prior of the next stage.

Source: GoRL, arXiv 2512.02581, and its released code. Deviations: the decoder begins as a cloned policy, or
as it is drawn, and goes on from its weights in a refit, where the release begins with the identity and fits a
new decoder every time; it may be any policy that is determined by its start noise; standard deviations are
exp(l), not softplus(l); actions are those of the policy, without a further tanh; values bootstrap where time
limits end an episode, which the release ignores; the normaliser is that of the policy; a refit takes a number
of steps, with one draw of noise and time for a chunk, where the release has eight and keeps the best epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algos.base import Metrics, Setup
from algos.cloning.validation import matching_of
from algos.onpolicy.advantages import Experience
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ratios import RatioEstimator, Rows, Score
from algos.onpolicy.running_normalizer import RunningMeanStd
from algos.onpolicy.start import starting_policy
from algos.optim import adam, descend
from algos.training.observations import encode, encoder_module, mapped
from policies.bounds import bounded
from policies.networks.distributions import LOG_2PI
from policies.policy import Policy
from policies.protocols import MatchingLoss
from policies.registry import register
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.noise_policy import SteeredPolicy, Steering


class LatentRatio(RatioEstimator):
    """Ratio of the density of latents, which is that of a normal distribution.

    Args:
        policy: Decoder with its encoder.
        weight: w, of the squares of mu and sigma.
    """

    inner_steps = 1
    factors = 1.0

    def __init__(self, policy: SteeredPolicy, weight: float) -> None:
        self.policy, self.weight = policy, weight

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Explore; the record holds latents (N, Th Da), their log-densities (N,), chunks (N, Th, Da)."""
        policy = self.policy
        cond = policy.encode(policy.observation(obs))
        mean, log_std = policy.actor(cond.vec)
        z = mean + log_std.exp() * policy.sample_noise(len(mean), generator=generator).flatten(1)
        chunk = policy.chunk_of(cond.vec, z / policy.wrapper.bound)
        record = {"latent": z, "log_prob": log_density(z, mean, log_std), "chunk": chunk}
        return policy.executed(chunk), record

    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
        state = rows.state_of_row
        old, z = (experience.record[name].index_select(0, state) for name in ("log_prob", "latent"))
        mean, log_std = self.policy.actor(experience.cond.rows(state).vec)
        entropy = (log_std + 0.5 * (1 + LOG_2PI)).sum(dim=1)
        penalty = self.weight * (mean.square() + (2 * log_std).exp()).mean(dim=1)
        log_ratio = log_density(z, mean, log_std) - old
        return Score(log_ratio, entropy, torch.zeros_like(old), penalty=penalty)


def log_density(z: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return log N(z; mean, std) (B,) of latents (B, L)."""
    eps = (z - mean) / log_std.exp()
    return -(0.5 * eps.square() + log_std + 0.5 * LOG_2PI).sum(dim=1)


@register("algo", "gorl")
@dataclass
class GorlConfig(OnPolicyConfig):
    """GoRL: PPO on latents, and refits of the decoder.

    Published: stages of 60, 60, 30 and 30 million steps, refits of 50 epochs on 512,000 actions; clip ranges
    0.15 in the first stage and 0.3 later.

    Source:
        arXiv 2512.02581 and its released code.
    """

    requires = "needs a policy with a matching loss that is determined by its start noise (process=flow)"

    gamma: float = bounded(0.995, ge=0, le=1)  # discount per chunk step
    clip_range: float = bounded(0.2, gt=0)  # clip range of the ratio
    entropy_coef: float = bounded(0.01, ge=-float("inf"))  # weight of the entropy of latents
    actor_lr: float = bounded(1e-3, gt=0)  # AdamW, peak
    hidden_dims: tuple[int, ...] = bounded((32, 32, 32, 32), ge=1, some=True)  # widths of the encoder; SiLU
    latent_weight: float = bounded(5e-4, ge=0)  # w, keeps latents near the noise that the decoder knows
    stage_steps: int = bounded(1_000_000, ge=1)  # control steps between refits
    refit_rollouts: int = bounded(5, ge=1)  # rollouts, as long as an iteration's, that a refit learns from
    refit_steps: int = bounded(2000, ge=0)  # gradient steps of a refit; 0: the decoder stays
    refit_lr: float = bounded(3e-4, gt=0)  # Adam, of refits

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bc_weight", "demo_weight"):
            is_unset = getattr(self, name) == 0
            self.require(name, is_unset, "0: latents are near the clone by algo.latent_weight")
        self.require("encoder", self.encoder == "frozen", "frozen")

    def unused(self) -> dict[str, str]:
        names = ("stage_steps", "refit_rollouts", "refit_lr")
        refits = {} if self.refit_steps else dict.fromkeys(names, "without algo.refit_steps")
        return super().unused() | refits

    @staticmethod
    def fits(policy: Any) -> bool:
        fixed = policy.noise_sensitive and getattr(policy, "is_deterministic", False)
        return fixed and policy.noise_shape == policy.chunk.shape and isinstance(policy, MatchingLoss)

    def build(self, setup: Setup) -> Gorl:
        """Return a run on a copy of the policy `setup.init`, or on a new policy, with a new encoder.

        Raises:
            ConfigError: If the environment is missing, sizes disagree, or a new policy lacks observation
                statistics.
            CapabilityError: If the policy is not determined by its start noise.
        """
        init, moments = starting_policy(self, setup)
        wrapper = Steering(
            bound=1.0, density="gaussian", hidden_dims=self.hidden_dims, activation="silu", layer_norm=False,
            zero_init=True,
        )  # fmt: skip
        with seeded_weights(derive_seed(setup.seed, "encoder of latents")):
            policy = wrapper.wrap(init.clone().eval()).to(setup.device)
        return Gorl(self, setup, policy, moments)


class Gorl(OnPolicy):
    """A run: iterations of PPO on latents, and refits between stages; see `GorlConfig`."""

    config: GorlConfig
    policy: SteeredPolicy

    def __init__(
        self,
        config: GorlConfig,
        setup: Setup,
        policy: SteeredPolicy,
        moments: Mapping[str, RunningMeanStd] | None,
    ) -> None:
        ratio = LatentRatio(policy, config.latent_weight)
        super().__init__(
            config, setup, ratio=ratio, trainable=policy.actor, bc_term=None, export_policy=policy.clone,
            moments=moments,
        )  # fmt: skip
        self._fresh = {name: value.clone() for name, value in policy.actor.state_dict().items()}
        self.stage_start = 0  # control steps

    def advance(self) -> Metrics:
        """Run one iteration; at the end of a stage, refit the decoder too, if another iteration follows."""
        metrics = super().advance()
        config = self.config
        chunks = config.refit_rollouts * config.num_envs * config.steps_per_iteration
        after = self.progress + chunks * self.policy.chunk.act_steps
        by_steps = config.env_steps is not None
        goes_on = after < self.total if by_steps else self.iteration < config.iterations
        if self.progress - self.stage_start >= config.stage_steps and config.refit_steps and goes_on:
            metrics |= self.refit()
            self.stage_start = self.progress
        return metrics

    @torch_threads(1)
    def refit(self) -> Metrics:
        """Fit the decoder to chunks of the policy, and begin the encoder anew at its noise."""
        conds, chunks = [], []
        for _ in range(self.config.refit_rollouts):
            rollout = self.collect()
            self.progress += int(rollout.length.sum())
            conds.append(encode(self.policy, mapped(rollout.obs, lambda part: part.flatten(0, 1))).vec)
            chunks.append(rollout.record["chunk"].flatten(0, 1).to(self.policy.device))
        metrics = self.fit_decoder(torch.cat(conds), torch.cat(chunks))
        self.policy.actor.load_state_dict(self._fresh)
        self.learner.actor_optimizer.state.clear()
        return metrics

    def fit_decoder(self, vec: Tensor, chunk: Tensor) -> Metrics:
        """Take gradient steps of the decoder's matching loss at chunks (M, Th, Da) and conditions (M, C)."""
        decoder: Policy = self.policy.base.train().requires_grad_(True)
        encoder_module(decoder).requires_grad_(False)
        matching, generator = matching_of(decoder), self.draws.generator
        optimizer = adam(decoder.parameters(), self.config.refit_lr)
        size, loss = min(self.config.batch_size, len(vec)), vec.new_zeros(())
        for _ in range(self.config.refit_steps):
            row = torch.randint(len(vec), (size,), generator=generator).to(vec.device)
            te = matching.sample_te(size, generator=generator)
            losses = matching.matching_loss(decoder.condition(vec[row]), chunk[row], te, reduce="sample")
            loss = loss + descend(optimizer, losses.mean())
        decoder.eval().requires_grad_(False)
        return {"refit/loss": loss / self.config.refit_steps, "refit/rows": float(len(vec))}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stage_start": self.stage_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stage_start = int(state["stage_start"])
