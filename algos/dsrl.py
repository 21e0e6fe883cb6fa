"""DSRL: reinforcement learning over the start noise of a frozen generative policy.

The exported policy wraps the frozen one with an actor that chooses its noise
(`policies.wrappers.noise_policy`). SAC learns over the noise, in two variants.

Legend: as in `algos.offpolicy.sac_update`; w = b u the noise of a latent u, b its bound, a(s, w) the chunk
of the frozen policy, QA values of chunks, QW values of latents::

    sac   Q(s, u) is learned on recorded latents; the frozen policy is not evaluated
    na    y = r + discount (C_i QA_i_bar(s', a(s', b u')) - alpha log pi(u' | s'))       QA of executed chunks
          actor loss = mean (alpha log pi(u | s) - C_i QW_i(s, u))                     u, not w, enters QW
          distillation = 1/2 sum_i mean (QW_i(s, u) - QA_i(s, a(s, b u)))^2              on batches of its own

No gradient passes through the frozen policy. Distillation latents are `gaussian` (b u standard normal, as
released: most lie outside the actor's bounds), uniform in the `box`, or half of each.

Source: DSRL, arXiv 2506.15799, released code. Deviations, reverted by `paper_compat` where marked: the noise
bound applies in both variants; the warm-up records the latents it executes; time limits are truncations,
rewards and values are discounted per control step (`paper_compat`); chunks end with their episode; the tanh
density has no floor (`paper_compat`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Draws, Quantities, Setup, require_condition_vector
from algos.offline.loop import THREADS
from algos.offpolicy.config import OffPolicyConfig
from algos.offpolicy.loop import OffPolicyRun, offline_table
from algos.offpolicy.replay_buffer import ChunkBatch, Mixture
from algos.offpolicy.sac_update import LatentActor, SacUpdate
from algos.onpolicy.loop import check_setup
from algos.onpolicy.requirements import algorithms_for
from algos.onpolicy.samplers import NOISE_FREE, replaced
from algos.optim import adam, load_parts, regress, save_parts, weights_of
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError
from policies.networks.critics import Ensemble, Members
from policies.networks.distributions import (
    Drawn,
    gaussian_draw,
    highest_entropy,
    highest_gaussian_entropy,
    tanh_draw,
)
from policies.policy import Policy
from policies.processes.diffusion import VPDiffusion
from policies.registry import name_of, register
from policies.samplers.ddpm import DDIM
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.noise_policy import SteeredPolicy, Steering, require_steerable

_log = logging.getLogger(__name__)

DISTILLATION_LATENTS = ("gaussian", "box", "mixture")
NOISES = 16  # noise samples per condition
LOW_RATIO = 0.05  # ratio of the std over noises to the std over states, below which a warning is logged
ROUNDING = 16  # units in the last place of the largest entry, tolerated as equal


class SteeredActor(LatentActor):
    """Noise actor of a steered policy; see `algos.offpolicy.sac_update.LatentActor`.

    Args:
        policy: Steered policy whose actor is trained.
        form: Squashed density, one of `policies.networks.distributions.FORMS`.
        within_box: Clip warm-up latents to the actor's bounds, for critics over latents; no effect for a
            Gaussian, which is unbounded.
        is_fresh: Warm up with standard normal noise of the frozen policy, in latent form (lower-dimensional
            for adapters other than `full`), instead of with the actor's samples.
    """

    policy: SteeredPolicy

    def __init__(
        self, policy: SteeredPolicy, form: str = "exact", *, within_box: bool = False, is_fresh: bool = True
    ) -> None:
        self.policy, self._form, self._is_fresh = policy, form, is_fresh
        self._within_box = within_box and policy.wrapper.density == "tanh"

    @property
    def latent_dim(self) -> int:
        return self.policy.latent_dim

    @property
    def bound(self) -> float:
        """Bound of the noise, in standard deviations."""
        return self.policy.wrapper.bound

    @property
    def highest_entropy(self) -> float:
        """Maximum entropy [nats] of u, or of b u for an unbounded Gaussian."""
        is_squashed = self.policy.wrapper.density == "tanh"
        return self.latent_dim * (highest_entropy() if is_squashed else highest_gaussian_entropy())

    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        if not self._is_fresh:
            return self.draw(cond, eps)[0]
        latent = eps / self.bound
        return latent.clamp(-1, 1) if self._within_box else latent

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.policy.actor.parameters())

    def draw(self, cond: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents u (B, L) and the log-density (B,) of u, or of b u for an unbounded Gaussian."""
        mean, log_std = self.policy.actor(cond)
        if self.policy.wrapper.density == "tanh":
            return tanh_draw(mean, log_std, eps, form=self._form)
        noise, log_prob = gaussian_draw(mean, log_std, eps)
        return noise / self.bound, log_prob

    def draw_without_graph(self, cond: Tensor, eps: Tensor, weights: Sequence[Tensor]) -> Drawn | None:
        if self.policy.wrapper.density != "tanh":
            return None
        return self.policy.actor.draw_without_graph(cond, eps, weights, form=self._form)

    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return the executed rows of the frozen policy's chunk, flattened (B, A)."""
        return self.policy.chunk_of(cond, latent)[:, self.policy.chunk.executed].flatten(1)


@torch.no_grad()
def noise_sensitivity(actor: LatentActor, cond: Tensor, generator: torch.Generator) -> Quantities:
    """Return the std of executed chunks over noises and over states, normalised units; warns if low.

    `cond` (B, C) holds at least two visited conditions; the noise is that of the actor's warm-up.

    Raises:
        CapabilityError: If chunks are independent of the noise.
    """
    repeated = cond.repeat(NOISES, 1)
    eps = torch.randn(len(repeated), actor.latent_dim, generator=generator, device=generator.device)
    chunks = actor.chunk(repeated, actor.warmup_latent(repeated, eps.to(repeated.device)))
    chunks = chunks.view(NOISES, -1, chunks.shape[1])  # (noises, states, A)
    over_noise = chunks.std(dim=0).mean()
    over_states = chunks.mean(dim=0).std(dim=0).mean()
    if over_noise <= ROUNDING * torch.finfo(chunks.dtype).eps * chunks.abs().max():
        raise CapabilityError(
            "steering needs a policy whose executed rows depend on its noise; the chunks of this one deviate "
            f"by {over_noise:.3g} over noises, by {over_states:.3g} over states."
        )
    if over_noise < LOW_RATIO * over_states:
        _log.warning(
            "the frozen policy does nearly the same from every noise: chunks deviate by %.3g over noises, by "
            "%.3g over states. Steering has little to choose from; clone demonstrations that differ more.",
            over_noise, over_states,
        )  # fmt: skip
    return {"frozen/noise_spread": over_noise, "frozen/state_spread": over_states}


class NoiseAliasedUpdate(SacUpdate):
    """SAC with critics QA over chunks, distilled into noise critics QW, as many, for the actor update."""

    actor: SteeredActor

    def __init__(
        self, actor: SteeredActor, critic: Ensemble, noise_critic: Ensemble, config: DsrlConfig
    ) -> None:
        super().__init__(actor, critic, config, of_chunks=True)
        self.noise_critic, self._pending_updates = noise_critic, 0.0
        self._latents, self._share = config.distillation_latents, config.distillation_share
        self.noise_critic_optimizer = adam(noise_critic.parameters(), config.critic_lr)

    def next_values(self, cond: Tensor, latent: Tensor, members: Members = None) -> Tensor:
        return self.target_critic(cond, self.actor.chunk(cond, latent), members=members)

    @property
    def climbed(self) -> Ensemble:
        return self.noise_critic

    def draw_latents(self, n: int, generator: torch.Generator) -> Tensor:
        """Return latents (n, L) for one distillation step."""
        shape, device = (n, self.actor.latent_dim), generator.device
        normal = torch.randn(shape, generator=generator, device=device) / self.actor.bound
        if self._latents == "gaussian":
            latents = normal
        else:
            box = 2 * torch.rand(shape, generator=generator, device=device) - 1
            latents = box if self._latents == "box" else torch.cat([normal[: n // 2], box[n // 2 :]])
        return latents.to(self.critic.weight[0].device)

    @torch.no_grad()
    def distillation_target(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return the values (E, B) that QW learns at latents (B, L)."""
        return self.critic(cond, self.actor.chunk(cond, latent))

    def distill(self, batch: ChunkBatch, draws: Draws) -> Quantities:
        """Take one distillation step of QW at the latents `draws["latent"]` (B, L)."""
        latent, optimizer = draws["latent"], self.noise_critic_optimizer
        values = self.noise_critic.evaluate(batch.cond, latent, weights_of(optimizer))
        target = self.distillation_target(batch.cond, latent)
        return {"noise_critic/loss": regress(optimizer, values, target, weight=0.5)}

    def finish_round(
        self, count: int, size: int, source: Mixture, generator: torch.Generator
    ) -> list[Quantities]:
        self._pending_updates += count * self._share
        steps = math.floor(self._pending_updates)  # the fraction is left to the next round
        self._pending_updates -= steps
        metrics = []
        for _ in range(steps):
            batch = source.draw(size, generator)
            metrics.append(self.distill(batch, {"latent": self.draw_latents(size, generator)}))
        return metrics

    _own_parts = ("noise_critic", "noise_critic_optimizer")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"owed": self._pending_updates} | save_parts(self, self._own_parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending_updates = float(state["owed"])
        load_parts(self, self._own_parts, state)


@register("algo", "dsrl")
@dataclass
class DsrlConfig(OffPolicyConfig):
    """DSRL: reinforcement learning over the noise of a frozen policy."""

    requires: ClassVar[str] = "chooses the start noise of chunks that are a function of it alone"

    target_entropy: float | None = bounded(0.0, ge=-math.inf)  # of a latent; null: minus half its width
    variant: str = bounded("na", choices=("na", "sac"))  # na: noise-aliased critics | sac: critics over noise
    distillation_share: float = bounded(0.5, gt=0)  # distillation steps per critic update, for na
    distillation_latents: str = bounded("gaussian", choices=DISTILLATION_LATENTS)  # where to distil, for na
    denoising_steps: int | None = bounded(None, ge=1)  # of the frozen policy; null: its saved sampler
    steering: Steering = field(default_factory=Steering)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "offline_ratio", not self.offline_ratio or self.variant == "na",
            "0 with algo.variant=sac: the noise behind recorded actions is unknown",
        )  # fmt: skip

        rule = "frozen: what the critics value are chunks of the frozen policy"
        self.require("encoder", self.encoder == "frozen", rule)
        self.require(
            "hindsight", not self.hindsight or self.variant == "na",
            "0 with algo.variant=sac: under another goal the same noise gives another chunk",
        )  # fmt: skip

    def unused(self) -> dict[str, str]:
        found = super().unused()
        if self.variant == "sac":
            names = ("distillation_share", "distillation_latents")
            found |= dict.fromkeys(names, "without algo.variant=na")
        if self.steering.adapter != "low_rank":
            found["steering.rank"] = "without algo.steering.adapter=low_rank"
        return found

    def build(self, setup: Setup) -> OffPolicyRun:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If policy or environment is missing, or their sizes disagree.
            CapabilityError: If actions are not a deterministic function of the start noise, or the policy's
                condition has tokens.
        """
        name = name_of("algo", self)
        init = check_setup(setup, name)
        require_condition_vector(init, name)
        with torch_threads(setup.threads(THREADS)):
            with seeded_weights(derive_seed(setup.seed, "steering")):
                policy = self._steered(init).to(setup.device)
                learner = self.learner_of(policy, is_fresh=not isinstance(init, SteeredPolicy))
            # Replay and critics depend on the map from latents to chunks: a resume invariant.
            names = ("bound", "adapter", "density", "activation")
            invariants = {name: getattr(policy.wrapper, name) for name in names}
            invariants |= {"rank": policy.noise_shape[0], "sampler": repr(policy.sampler)}
            invariants |= {"variant": self.variant}
            offline = offline_table(self, setup, policy)
            # Standard normal noise, even where a trained actor warms up with its own samples.
            normal = SteeredActor(policy, within_box=self.variant == "sac")
            return OffPolicyRun(self, setup, learner, offline, invariants, partial(noise_sensitivity, normal))

    def check_policy(self, policy: Policy) -> Policy:
        """Return the policy, with a deterministic sampler, if it can be steered (else CapabilityError)."""
        try:
            steerable = policy if isinstance(policy, SteeredPolicy) else self._deterministic(policy)
            require_steerable(steerable)
            return steerable
        except CapabilityError as error:
            algo = name_of("algo", self)
            raise CapabilityError(
                f"algo={algo}: {error} Without steering, use {algorithms_for(policy)}."
            ) from None

    def _steered(self, init: Policy) -> SteeredPolicy:
        """Return the policy to train; a steered policy keeps its actor."""
        if isinstance(init, SteeredPolicy):
            self._warn_of_unused(init)
            policy = init.clone().eval()
            policy.actor.requires_grad_(True)
            return policy
        return self.steering.wrap(self.check_policy(init).clone().eval())

    def _warn_of_unused(self, init: SteeredPolicy) -> None:
        wanted, present = asdict(self.steering), asdict(init.wrapper)
        differing = [name for name in present if wanted[name] != present[name]]
        unused = [f"steering.{name}={wanted[name]}, it has {present[name]}" for name in differing]
        steps = getattr(init.sampler, "steps", None)
        if self.denoising_steps not in (None, steps):
            unused.append(f"denoising_steps={self.denoising_steps}, it has {steps}")
        if unused:
            _log.warning(
                "init is steered already and keeps its settings; not used: algo.%s.", "; ".join(unused)
            )

    def _deterministic(self, init: Policy) -> Policy:
        """Return the policy with a deterministic sampler of `denoising_steps`, if set."""
        steps = self.denoising_steps
        if steps is None or not init.noise_sensitive:
            return init
        if not isinstance(init, DenoisingPolicy):
            raise CapabilityError(
                f"algo.denoising_steps={steps} is for a policy that denoises; leave it out for a "
                f"{type(init).__name__}."
            )
        sampler: Any = init.sampler
        if isinstance(init.process, VPDiffusion) and not isinstance(sampler, DDIM):
            sampler = DDIM(clip_x0=sampler.clip_x0, clip_action=getattr(sampler, "clip_action", None))
        name = name_of("sampler", sampler)
        if "steps" not in {field.name for field in fields(sampler)}:
            raise CapabilityError(
                f"algo.denoising_steps={steps} is for a sampler with any number of steps; leave it out for "
                f"sampler={name}."
            )
        policy = init.with_sampler(replaced(sampler, steps=steps, **NOISE_FREE))
        if not policy.is_deterministic:
            raise CapabilityError(
                f"algo.denoising_steps={steps} needs an init with a deterministic sampler, or "
                f"algo.denoising_steps=1: sampler={name} draws noise at every step."
            )
        return policy

    def learner_of(self, policy: SteeredPolicy, *, is_fresh: bool = True) -> SacUpdate:
        """Return the learner; initial weights use torch's global generator."""
        cond, device = policy.encoder.cond_dim, policy.device
        within_box = self.variant == "sac"
        actor = SteeredActor(policy, self.density_form, within_box=within_box, is_fresh=is_fresh)
        critics = self.critic_config()
        latent_critic = critics.build(cond, policy.latent_dim).to(device, policy.dtype)
        if self.variant == "sac":
            return SacUpdate(actor, latent_critic, self)
        has_box = policy.wrapper.density == "tanh" or self.distillation_latents == "gaussian"
        rule = "gaussian with algo.steering.density=gaussian: its latents have no box"
        self.require("distillation_latents", has_box, rule)
        chunk_critic = critics.build(cond, policy.chunk.width).to(device, policy.dtype)
        return NoiseAliasedUpdate(actor, chunk_critic, latent_critic, self)
