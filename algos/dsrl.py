"""DSRL: a frozen generative policy is steered by the noise that it starts from.

The result is a policy like any other: the frozen one, with an actor around it that chooses its noise
(`policies.wrappers.noise_policy`). The equations are in `algos.offpolicy.dsrl_update`, the loop is in
`algos.offpolicy.loop`.

Source: DSRL, arXiv 2506.15799, released code. Deviations, all undone by `paper_compat` where it says so: the
noise bound is applied in both variants; the warm-up executes what it records; time limits are not ends of the
task, rewards and values are discounted per control step (`paper_compat`); chunks end with their episode; the
density of tanh has no floor (`paper_compat`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from algos.base import Setup, require_states_only
from algos.offline.loop import THREADS
from algos.offpolicy.config import OffPolicyConfig
from algos.offpolicy.dsrl_update import DISTILLATION_LATENTS, NoiseAliasedUpdate, SteeredActor
from algos.offpolicy.loop import OffPolicyRun, offline_table
from algos.offpolicy.noise_sensitivity import look_at_noise
from algos.offpolicy.sac_update import SacUpdate
from algos.onpolicy.loop import check_setup
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.processes.diffusion import VPDiffusion
from policies.registry import name_of, register
from policies.samplers.ddpm import DDIM
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.noise_policy import SteeredPolicy, Steering

_log = logging.getLogger(__name__)

VARIANTS = ("na", "sac")
STILL = {"eta": 0.0, "eta_per_dim": (), "min_std": 0.0, "final_std": None}
"""What a sampler is told, where it knows the word, so that it draws nothing after the start."""


@register("algo", "dsrl")
@dataclass
class DsrlConfig(OffPolicyConfig):
    """Diffusion steering: reinforcement learning over the noise of a frozen policy."""

    target_entropy: float | None = bounded(0.0, ge=-math.inf)  # of a latent; null: minus half its width
    # na: values of chunks, distilled into values of noise | sac: values of noise only
    variant: str = bounded("na", choices=VARIANTS)
    distillation_share: float = bounded(0.5, gt=0)  # distillation steps per critic update, for na
    distillation_latents: str = bounded("gaussian", choices=DISTILLATION_LATENTS)  # where to distil, for na
    denoising_steps: int | None = bounded(
        None, ge=1
    )  # of the frozen policy, deterministic; null: its sampler
    steering: Steering = field(default_factory=Steering)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "offline_ratio", not self.offline_ratio or self.variant == "na",
            "0 with algo.variant=sac: the noise behind recorded actions is unknown",
        )  # fmt: skip

    def build(self, setup: Setup) -> OffPolicyRun:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If policy or environment is missing, or their sizes disagree.
            CapabilityError: If the policy is not decided by the noise that it starts from, or sees more than
                states.
        """
        name = name_of("algo", self)
        init = check_setup(setup, name)
        require_states_only(init, name)
        with torch_threads(setup.threads(THREADS)):
            with seeded_weights(derive_seed(setup.seed, "steering")):
                policy = self._steered(init).to(setup.device)
                learner = self.learner_of(policy, is_fresh=not isinstance(init, SteeredPolicy))
            # Latents and their chunks are remembered, and values are of them: what they mean must not change.
            names = ("bound", "adapter", "density", "activation")
            meaning = {name: getattr(policy.wrapper, name) for name in names}
            meaning |= {"rank": policy.noise_shape[0], "sampler": repr(policy.sampler)}
            resume_invariants = meaning | {"variant": self.variant}
            offline = offline_table(self, setup, policy)
            # By normal noise, also where an actor that knows something warms up by its own draws.
            normal = SteeredActor(policy, within_box=self.variant == "sac")
            look = partial(look_at_noise, normal)
            return OffPolicyRun(self, setup, learner, offline, resume_invariants, look)

    def _steered(self, init: Policy) -> SteeredPolicy:
        """Return the policy to train; one that is steered already is steered on."""
        if isinstance(init, SteeredPolicy):
            self._warn_of_unused(init)
            policy = init.clone().eval()
            policy.actor.requires_grad_(True)
            return policy
        try:
            return self.steering.wrap(self._deciding(init).clone().eval())
        except CapabilityError as error:
            raise CapabilityError(f"algo={name_of('algo', self)}: {error}") from None

    def _warn_of_unused(self, init: SteeredPolicy) -> None:
        """Say which settings of a policy that is steered already are not the ones asked for."""
        asked, has = asdict(self.steering), asdict(init.wrapper)
        unused = [
            f"steering.{name}={asked[name]}, it has {has[name]}" for name in has if asked[name] != has[name]
        ]
        steps = getattr(init.sampler, "steps", None)
        if self.denoising_steps not in (None, steps):
            unused.append(f"denoising_steps={self.denoising_steps}, it has {steps}")
        if unused:
            _log.warning(
                "init is steered already and stays as it is made; not used: algo.%s.", "; ".join(unused)
            )

    def _deciding(self, init: Policy) -> Policy:
        """Return the policy with a sampler of so many steps that its start noise decides, if asked for.

        Raises:
            CapabilityError: If the policy takes no such number, or draws at every step all the same.
        """
        steps = self.denoising_steps
        if steps is None or not init.noise_sensitive:
            return init
        if not isinstance(init, DenoisingPolicy):
            raise CapabilityError(
                f"algo.denoising_steps={steps} is for a policy that denoises; got {type(init).__name__}. "
                f"Leave it out."
            )
        own: Any = init.sampler
        if isinstance(init.process, VPDiffusion) and not isinstance(own, DDIM):
            own = DDIM(clip_x0=own.clip_x0, clip_action=getattr(own, "clip_action", None))
        name, known = name_of("sampler", own), {f.name for f in fields(own)}
        if "steps" not in known:
            raise CapabilityError(
                f"algo.denoising_steps={steps} is for a sampler that takes any number of steps; "
                f"sampler={name} does not. Leave it out."
            )
        still = {word: value for word, value in STILL.items() if word in known}
        policy = init.with_sampler(replace(own, steps=steps, **still))
        if not policy.is_deterministic:
            raise CapabilityError(
                f"algo.denoising_steps={steps} leaves the policy its sampler={name}, which draws noise at "
                f"every step. Use algo.denoising_steps=1, or an init with a deterministic sampler."
            )
        return policy

    def learner_of(self, policy: SteeredPolicy, *, is_fresh: bool = True) -> SacUpdate:
        """Return what learns; torch's global generator decides the initial weights.

        Args:
            policy: To be trained.
            is_fresh: Whether its actor knows nothing yet.
        """
        chunk, cond, device = policy.chunk, policy.encoder.cond_dim, policy.device
        within_box = self.variant == "sac"
        actor = SteeredActor(policy, self.density_form, within_box=within_box, is_fresh=is_fresh)
        rules, critics = self.rules(actor.latent_dim, actor.highest_entropy), self.critic_config()
        of_latents = critics.build(cond, policy.latent_dim).to(device, policy.dtype)
        if self.variant == "sac":
            return SacUpdate(actor, of_latents, rules)
        has_box = policy.wrapper.density == "tanh" or self.distillation_latents == "gaussian"
        rule = "gaussian with algo.steering.density=gaussian: its latents have no box"
        self.require("distillation_latents", has_box, rule)
        of_chunks = critics.build(cond, chunk.act_steps * chunk.action_dim).to(device, policy.dtype)
        return NoiseAliasedUpdate(
            actor,
            of_chunks,
            of_latents,
            rules,
            latents=self.distillation_latents,
            share=self.distillation_share,
        )
