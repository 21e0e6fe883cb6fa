"""ReinFlow's update on a fixed minibatch: losses, statistics and all gradients against the released code.

The released term that keeps a policy near the initial one starts its second integration where the first left
off. Its intended value is compared; the total and the gradients of a file with that term hold the released
one, so they are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_chains import chain_of, config_of, noise_keys, part, policy_of
from official_networks import install, read, residual_dims
from torch import Tensor

from algos.onpolicy.advantages import Experience
from algos.onpolicy.ppo_update import GeneratorDraws, PpoUpdate
from algos.onpolicy.ratios import Rows
from algos.onpolicy.reinflow_ratio import PathTerm, ReinflowRatio
from policies.networks.heads import CriticConfig
from policies.protocols import Cond

DENSITY = {"rtol": 1e-4, "atol": 1e-5}
GRADIENT = {"rtol": 1e-3, "atol": 1e-5}


class Case:
    """The learner of a file, its experience and its rows."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        entropy_coef, vf_coef, self.bc_weight = arrays["coef_ent_vf_bc"].tolist()
        clip = float(arrays["clip_vloss"])
        options = {
            "entropy_coef": entropy_coef, "vf_coef": vf_coef, "value_clip": clip or None,
            "log_prob_range": (-1.0, 1.0), "clip_range": 0.01,
        }  # fmt: skip
        self.config = config_of(arrays, **options)
        self.ratio: ReinflowRatio = chain_of(arrays, **options)
        weights = part(arrays, "critic.")
        critic = CriticConfig(**residual_dims(weights, "Q1."))
        value = critic.build(arrays["obs"][0].numel())
        install(value, critic.official_keys(), weights)
        self.learner = PpoUpdate(
            self.config, ratio=self.ratio, actor=list(self.ratio.trainable.parameters()), critic=value
        )
        record = {"chain": arrays["chain"], "log_prob": arrays["old_logprob"]}
        cond = Cond(arrays["obs"].flatten(1))
        columns = (arrays[name] for name in ("adv", "returns", "old_values"))
        self.experience = Experience(cond, record, *columns)
        self.index = torch.arange(len(cond))
        self.draws = GeneratorDraws(torch.Generator())

    @property
    def rows(self) -> Rows:
        return Rows.sorted_from(self.index, 1)


def assert_near(ours: Tensor, theirs: Tensor, name: str, tolerance: dict[str, float] = DENSITY) -> None:
    torch.testing.assert_close(
        ours.float(), theirs.float(), **tolerance, msg=lambda message: f"{name}: {message}"
    )


@pytest.mark.golden("reinflow_ppo_loss_*.npz")
def test_log_densities_ratios_and_losses(golden_path: Path) -> None:
    arrays = read(golden_path)
    case = Case(arrays)
    with torch.no_grad():
        log_prob, entropy = case.ratio.log_prob(case.experience.cond, arrays["chain"])
        new = case.ratio.reduce(log_prob, arrays["chain"])
        assert_near(new, arrays["new_logprob"], "new_logprob")
        assert_near(case.ratio.reduce(entropy, None), arrays["entropy_rate"], "entropy_rate")
        assert_near(case.ratio.std(case.experience.cond).mean(), arrays["out_noise_std"], "noise_std")
        for name, values in (("new", new), ("old", arrays["old_logprob"])):
            clamped = case.ratio._clamped(values)[0]
            assert_near(clamped.min(), arrays[f"out_{name}_min"], f"{name}_min")
            assert_near(clamped.max(), arrays[f"out_{name}_max"], f"{name}_max")
            assert_near(clamped.std(), arrays[f"out_{name}_std"], f"{name}_std")
        value = case.learner.critic(case.experience.cond.vec)
        assert_near(value.mean(), arrays["out_value_mean"], "value_mean")
    _, metrics = case.learner.actor_gradient(case.experience, case.index, draws=case.draws)
    _, value_loss = case.learner.critic_gradient(case.experience, case.index)
    for ours, theirs in (
        (metrics["policy/loss"], "pg_loss"),
        (-metrics["policy/entropy"], "entropy_loss"),
        (metrics["policy/clip_fraction"], "clipfrac"),
        (metrics["policy/approx_kl"], "approx_kl"),
        (metrics["policy/ratio_mean"], "ratio_mean"),
        (value_loss, "v_loss"),
    ):
        assert_near(ours, arrays[f"out_{theirs}"], theirs)
    if not case.bc_weight:
        total = metrics["policy/loss"] - case.config.entropy_coef * metrics["policy/entropy"]
        assert_near(total + case.config.vf_coef * value_loss, arrays["total_loss"], "total_loss")


@pytest.mark.golden("reinflow_ppo_loss_*.npz")
def test_gradients_of_velocity_noise_and_critic(golden_path: Path) -> None:
    arrays = read(golden_path)
    case = Case(arrays)
    critic, _ = case.learner.critic_gradient(case.experience, case.index)
    keys = case.learner.critic.config.official_keys()
    expected = {keys[name]: value for name, value in part(arrays, "grad_critic.").items()}
    named = zip(case.learner.critic.named_parameters(), critic, strict=True)
    ours = {name: grad for (name, _), grad in named}
    assert set(ours) == set(expected)
    for name, gradient in ours.items():
        assert_near(gradient, expected[name], name, GRADIENT)
    if case.bc_weight:
        return
    gradients, _ = case.learner.actor_gradient(case.experience, case.index, draws=case.draws)
    expected = actor_gradients(arrays)
    names = [name for name, _ in case.ratio.trainable.named_parameters()]
    assert set(expected) <= set(names)
    for name, gradient in zip(names, gradients, strict=True):
        assert_near(gradient, expected.get(name, torch.zeros_like(gradient)), name, GRADIENT)


def actor_gradients(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a file by our names: 0 is the velocity network, 1 the noise."""
    backbone = policy_of(arrays).config.backbone
    keys = {f"policy.{official}": f"0.{ours}" for official, ours in backbone.official_keys().items()}
    noise = noise_keys(arrays)
    keys |= {f"explore_noise_net.mlp_logvar.moduleList.{name}": f"1.{ours}" for name, ours in noise.items()}
    return {keys[name]: value for name, value in part(arrays, "grad_actor.").items()}


@pytest.mark.golden("reinflow_ppo_loss_*.npz")
def test_the_distance_from_the_initial_policy(golden_path: Path) -> None:
    arrays = read(golden_path)
    if "w2_loss_clean" not in arrays:
        pytest.skip("a file without the term")
    cond, start = Cond(arrays["obs"].flatten(1)), torch.zeros_like(arrays["w2_action_old"])
    # The released code integrates this term on its own grid of times.
    policy, frozen = (
        policy_of(arrays, prefix, released_times=True) for prefix in ("actor.policy.", "actor_old.")
    )
    losses = PathTerm(frozen, policy).losses(cond, start)
    assert_near(frozen.decode(cond, start), arrays["w2_action_old"], "w2_action_old")
    assert_near(policy.decode(cond, start), arrays["w2_action_new_clean"], "w2_action_new_clean")
    assert_near(losses.mean(), arrays["w2_loss_clean"], "w2_loss_clean")
    assert not start.any()
