"""What steering asks of entropy, policies and settings, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from messages import mentions
from point_steering import AS_IT_IS, SMALL, changed, composed, flow, start

from algos.dsrl import DsrlConfig, SteeredActor
from algos.offpolicy.replay_buffer import ChunkBatch
from algos.offpolicy.sac_update import SacUpdate
from algos.training.serialization import from_plain, to_plain
from policies.composition.compose import compose
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.networks.critics import EnsembleConfig
from policies.networks.distributions import highest_entropy
from policies.policy import Policy
from policies.processes import Consistency, Edm, Mip, Regression, VPDiffusion
from policies.processes.squashed import TanhGaussianProcess
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.ode import Ancestral, Euler
from policies.wrappers.noise_policy import SteeredPolicy, Steering

every_variant = pytest.mark.parametrize("variant", ["na", "sac"])


def _sampled(policy: Policy, sampler: Any) -> Policy:
    """Return the policy with another sampler."""
    assert isinstance(policy, DenoisingPolicy)
    return policy.with_sampler(sampler)


OBS = torch.rand(6, 1, 2, generator=torch.Generator().manual_seed(4)) * 2 - 1


# -- entropy --------------------------------------------------------------------------------------------


def test_no_squashed_normal_distribution_has_more_entropy_than_is_said_to_be_the_largest() -> None:
    """Brute force over means and deviations."""
    eps = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weight = torch.exp(-0.5 * eps.square())
    weight = weight / weight.sum()
    mean, log_std = torch.meshgrid(
        torch.linspace(0, 2, 21).double(), torch.linspace(-2, 2, 161).double(), indexing="ij"
    )
    g = mean[..., None] + log_std[..., None].exp() * eps
    slope = 2 * (math.log(2) - g - torch.nn.functional.softplus(-2 * g))
    entropy = 0.5 * math.log(2 * math.pi * math.e) + log_std + (weight * slope).sum(-1)
    assert float(entropy.max()) <= highest_entropy() + 1e-6 < math.log(2)
    assert float(entropy.max()) == pytest.approx(highest_entropy(), abs=1e-3)
    narrow = entropy[:, log_std[0] <= -1.0]
    assert float(narrow.max()) == pytest.approx(highest_entropy(-1.0), abs=1e-6)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_than_that_of_the_replay_is_refused(variant: str, dtype: torch.dtype) -> None:
    with pytest.raises(CapabilityError, match=mentions(f"algo=dsrl {dtype}")):
        start(changed(variant=variant), init=flow().to(dtype))
    start(changed(variant=variant), init=flow().to(dtype).float()).close()


@every_variant
def test_an_entropy_that_the_actor_cannot_have_is_refused(variant: str) -> None:
    """Else the temperature grows as long as the run lasts."""
    start(changed(variant=variant, target_entropy=6 * 0.68)).close()
    with pytest.raises(ConfigError, match=mentions("algo.target_entropy 4.102 6 4.2")):
        start(changed(variant=variant, target_entropy=4.2))
    start(changed(variant=variant, target_entropy=4.2, learn_alpha=False)).close()
    start(changed(variant=variant, target_entropy=4.2, steering=AS_IT_IS)).close()
    narrower = dataclasses.replace(SMALL.steering, adapter="row_repeat")
    with pytest.raises(ConfigError, match=mentions("1.367 2")):
        start(changed(variant=variant, target_entropy=1.4, steering=narrower))


def test_the_temperature_settles_at_a_target_that_can_be_reached() -> None:
    """At nine tenths of the largest entropy alpha stays; the actor spreads as asked."""
    torch.manual_seed(0)
    policy = Steering(hidden_dims=(16,)).wrap(flow().eval())
    actor = SteeredActor(policy)
    target = 0.9 * actor.highest_entropy
    config = DsrlConfig(target_entropy=target, init_alpha=0.2, actor_lr=1e-2, alpha_lr=1e-2)
    critic = EnsembleConfig(2, (16,)).build(2, actor.latent_dim)
    learner, generator = SacUpdate(actor, critic, config), torch.Generator().manual_seed(0)
    cond = torch.zeros(128, 2)
    entropy = []
    for _ in range(280):
        draws = learner.draw(128, generator)
        with torch.no_grad():
            latent = actor.draw(cond, draws["next_eps"])[0]
        rows = ChunkBatch(cond, latent, latent, -latent.square().sum(1), torch.zeros(128), cond)
        entropy.append(float(learner.step(rows, draws)["actor/entropy"]))
    assert sum(entropy[-50:]) / 50 == pytest.approx(target, abs=0.1)
    assert float(learner.temperature.value) < 1.0


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [Mip(), Regression(), TanhGaussianProcess()])
@pytest.mark.parametrize("steps", [None, 3])
def test_a_policy_that_is_deaf_to_its_noise_is_refused(process: Any, steps: int | None) -> None:
    """Whatever steps are asked for."""
    with pytest.raises(CapabilityError, match=mentions(f"algo=dsrl noise {type(process).__name__}")):
        start(changed(denoising_steps=steps), init=flow(process))


def test_a_composition_that_draws_at_every_step_is_refused() -> None:
    members = [flow(VPDiffusion(num_levels=4), seed=seed) for seed in (1, 2)]
    with pytest.raises(CapabilityError, match=mentions("algo=dsrl sampler=ddim")):
        start(init=compose(members, (0.5, 0.5)))


def test_a_composition_of_random_steps_is_steered_by_as_many_steps_without_noise_as_asked_for() -> None:
    members = [flow(VPDiffusion(num_levels=4), seed=seed, scale=seed) for seed in (1, 2)]
    run = start(changed(denoising_steps=3), init=compose(members, (0.5, 0.5)))
    run.advance()
    export_policy = run.snapshot()
    assert isinstance(export_policy, SteeredPolicy) and export_policy.base.sampler == DDIM(steps=3)  # type: ignore[attr-defined]
    quiet = compose(members, (0.5, 0.5)).with_sampler(DDIM(steps=3))
    cond, latent = _at(export_policy)
    expected = quiet.decode(quiet.encode(quiet.observation({"state": OBS})), export_policy.noise_of(latent))
    assert torch.equal(export_policy.chunk_of(cond, latent), expected)
    run.close()


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (flow(Regression(start_noise=True)), "sampler=direct"),
        (
            flow(Consistency()),
            "denoising_steps=3 sampler=consistency denoising_steps=1",
        ),
    ],
)
def test_steps_are_refused_where_they_would_have_no_effect_or_not_suffice(init: Policy, message: str) -> None:
    with pytest.raises(CapabilityError, match=mentions(message)) as refused:
        start(changed(denoising_steps=3), init=init)
    assert "chooses one with algo.denoising_steps" not in str(refused.value)


@pytest.mark.parametrize(
    ("process", "noisy", "still"),
    [
        (VPDiffusion(num_levels=4), DDIM(steps=2, eta=0.5, final_std=0.1), DDIM(steps=3)),
        (VPDiffusion(num_levels=4), DDPM(clip_action=1.5), DDIM(steps=3, clip_action=1.5)),
        (None, Ancestral(steps=2), Ancestral(steps=3, eta=0.0)),
        (None, Euler(steps=2, min_std=0.1, final_std=0.2), Euler(steps=3)),
    ],
)
def test_asking_for_steps_silences_every_noise_of_the_sampler(process: Any, noisy: Any, still: Any) -> None:
    run = start(changed(denoising_steps=3), init=_sampled(flow(process), noisy))
    assert run.snapshot().base.sampler == still  # type: ignore[attr-defined]
    run.close()


def _at(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return conditions and latents."""
    cond = policy.encode(policy.observation({"state": OBS})).vec
    return cond, torch.full((len(OBS), 6), 0.3)


@pytest.mark.parametrize("init", [flow(), flow(Edm()), composed()], ids=["flow", "edm", "composed"])
def test_what_is_accepted_is_decided_by_its_latents_alone(init: Policy) -> None:
    policy = start(init=init).snapshot()
    assert isinstance(policy, SteeredPolicy)
    cond = policy.encode(policy.observation({"state": OBS})).vec
    latent = torch.rand(len(OBS), policy.latent_dim, generator=torch.Generator().manual_seed(0)) * 2 - 1
    torch.manual_seed(0)
    one = policy.chunk_of(cond, latent)
    torch.manual_seed(1)
    assert torch.equal(policy.chunk_of(cond, latent), one)
    assert ((policy.chunk_of(cond, -latent) - one).flatten(1).abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize("latents", ["box", "mixture"])
def test_latents_without_a_box_are_not_compared_in_one(latents: str) -> None:
    with pytest.raises(ConfigError, match=mentions("algo.distillation_latents density=gaussian")):
        start(changed(distillation_latents=latents, steering=AS_IT_IS))


def test_settings_that_a_steered_policy_does_not_take_over_are_told(caplog: Any) -> None:
    export_policy = start().snapshot()
    start(init=export_policy).close()
    assert "steered already" not in caplog.text
    asked = changed(steering=Steering(hidden_dims=(8,), bound=2.5), denoising_steps=7)
    start(asked, init=export_policy).close()
    assert "steering.bound=2.5, it has 1.5" in caplog.text and "denoising_steps=7, it has" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "sac"}, "algo.variant sac"),
        ({"steering": {"bound": 2.5}}, "algo.steering.bound 1.5 2.5"),
        (
            {"steering": {"density": "gaussian"}},
            "algo.steering.density gaussian",
        ),
        (
            {"denoising_steps": 3},
            "algo.denoising_steps steps=3",
        ),
        ({"steering": {"adapter": "row_repeat"}}, "algo.steering.adapter row_"),
        (
            {"steering": {"activation": "relu"}},
            "algo.steering.activation relu",
        ),
        ({"critic_activation": "mish"}, "algo.critic_activation mish"),
    ],
)
def test_what_latents_mean_does_not_change_when_a_run_is_continued(
    changes: dict[str, Any], message: str
) -> None:
    run = start()
    run.advance()
    state = from_plain(to_plain(run.state_dict()))
    steering = dataclasses.replace(SMALL.steering, **changes.get("steering", {}))
    with pytest.raises(CheckpointError, match=mentions(message)):
        start(changed(**(changes | {"steering": steering}))).load_state_dict(state)
    run.close()
