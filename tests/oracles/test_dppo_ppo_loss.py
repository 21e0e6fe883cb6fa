"""The update's losses, ratios and gradients against reference numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from affine import AffineConfig, AffineCritic, Arrays, load
from official_networks import read
from torch import Tensor

from algos.dppo import DppoConfig
from algos.onpolicy.advantages import Experience
from algos.onpolicy.frozen_copy import tunable_copy
from algos.onpolicy.losses import policy_losses
from algos.onpolicy.ppo_update import PpoUpdate
from algos.onpolicy.ratios import CloningTerm, Rows
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.protocols import Cond

EXTRA: dict[str, dict[str, Any]] = {
    "C": {"value_clip": 0.2, "normalize_advantage": False, "advantage_quantiles": (0.05, 0.95)},
    "D": {"min_sampling_std": 0.05, "min_log_prob_std": 0.05, "bc_weight": 0.1},
    "F": {"noise_clip": 10.0},
}
LOSS = {"rtol": 1e-3, "atol": 2e-6}
GRADIENT = {"rtol": 1e-3, "atol": 1e-5}


@dataclass
class NoiseTape:
    """Hands out recorded noise."""

    recorded: Tensor | None

    def permutation(self, n: int) -> Tensor:
        return torch.arange(n)

    def noise(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        assert self.recorded is not None
        assert tuple(self.recorded.shape) == shape
        return self.recorded


class Case:
    """One case: our learner around the case's weights, and its experience."""

    def __init__(self, data: Arrays, name: str, *, microbatch_size: int, num_threads: int) -> None:
        self.get = lambda key: data[f"{name}_{key}"]
        levels, self.steps, gamma_denoising, clip, base, rate, act_steps = self.get("cfg").tolist()
        self.steps = int(self.steps)
        self.config = DppoConfig(
            tuned_steps=self.steps,
            gamma_denoising=gamma_denoising,
            clip_range=clip,
            clip_range_base=base,
            clip_range_rate=rate,
            microbatch_size=microbatch_size,
            **EXTRA.get(name, {}),
        )
        self.state = data["state"]
        chain = self.get("chain")
        init = self.make_policy(int(levels), chain, int(act_steps))
        load(init.field, data, f"{name}_base")
        explore, _ = self.config.samplers(init)
        self.policy = self.config.exploring(tunable_copy(init, explore, self.steps), explore)
        load(self.policy.scored_net, data, f"{name}_ft")
        critic = AffineCritic(self.state[0].numel())
        load(critic, data, f"{name}_critic")
        self.ratio = self.config.ratio(self.policy)
        self.learner = PpoUpdate(
            self.config,
            ratio=self.ratio,
            actor=list(self.policy.scored_net.parameters()),
            critic=critic,
            cloning=CloningTerm(self.config.exploring(init, explore), self.ratio)
            if self.config.bc_weight
            else None,
            num_threads=num_threads,
        )
        self.batch, self.denoising = self.get("batch_inds"), self.get("denoising_inds")
        self.experience = self.make_experience(chain)
        # Each sample has its own advantage and return, so each is an environment step of its own.
        self.index = torch.arange(len(self.batch)) * self.steps + self.denoising

    def make_policy(self, levels: int, chain: Tensor, act_steps: int) -> Any:
        config = PolicyConfig(
            process=VPDiffusion(levels, prediction="eps"),
            backbone=AffineConfig(),
            horizon=chain.shape[2],
            act_steps=act_steps,
            normalizer=dict.fromkeys(("state", "goal", "action"), "identity"),
        )
        return build_policy(config, obs_dim=self.state.shape[-1], action_dim=chain.shape[3])

    def make_experience(self, chain: Tensor) -> Experience:
        old = self.ratio.reduce(self.get("oldlogprob_all"))[0]
        record = {"chain": chain[self.batch], "log_prob": old[self.batch]}
        cond = Cond(self.state.flatten(1)[self.batch])
        return Experience(cond, record, self.get("advantages"), self.get("returns"), self.get("oldvalues"))

    def noise(self) -> NoiseTape:
        if self.learner.cloning is None:
            return NoiseTape(None)
        start, steps = self.get("bc_x_init"), self.get("bc_noise")
        return NoiseTape(torch.cat([start[:, None], steps.transpose(0, 1)], dim=1))


def names(data: Arrays) -> list[str]:
    found = sorted(name.removesuffix("_cfg") for name in data if name.endswith("_cfg"))
    assert found
    return found


@pytest.mark.parametrize(("microbatch_size", "num_threads"), [(1000, 1), (5, 2)])
@pytest.mark.golden("dppo_ppo_loss*.npz")
def test_losses_and_gradients(golden_path: Path, microbatch_size: int, num_threads: int) -> None:
    data = read(golden_path)
    for name in names(data):
        case = Case(data, name, microbatch_size=microbatch_size, num_threads=num_threads)
        grads, metrics = case.learner.actor_gradient(case.experience, case.index, draws=case.noise())
        critic_grads, value_loss = case.learner.critic_gradient(case.experience, case.index)
        case.learner.close()
        for ours, theirs in (
            (metrics["policy/loss"], "pg_loss"),
            (value_loss, "v_loss"),
            (metrics["policy/clip_fraction"], "clipfrac"),
            (metrics["policy/approx_kl"], "approx_kl"),
            (metrics["policy/ratio_mean"], "ratio_mean"),
            (metrics.get("policy/cloning_loss", torch.zeros(())), "bc_loss"),
        ):
            torch.testing.assert_close(ours.double(), case.get(theirs).double(), **LOSS)
        config = case.config
        total = metrics["policy/loss"] + config.vf_coef * value_loss
        total = total + config.bc_weight * metrics.get("policy/cloning_loss", 0.0)
        torch.testing.assert_close(total, case.get("total"), **LOSS)
        for (key, _), grad in zip(case.policy.scored_net.named_parameters(), grads, strict=True):
            torch.testing.assert_close(grad, case.get(f"gradft_{key}"), **GRADIENT)
        for (key, _), grad in zip(case.learner.critic.named_parameters(), critic_grads, strict=True):
            torch.testing.assert_close(grad, case.get(f"gradcritic_{key}"), **GRADIENT)


@pytest.mark.golden("dppo_ppo_loss*.npz")
def test_ratio_clip_range_and_terms_of_each_sample(golden_path: Path) -> None:
    data = read(golden_path)
    for name in names(data):
        case = Case(data, name, microbatch_size=1000, num_threads=1)
        rows = Rows.sorted_from(case.index, case.steps)
        before = case.experience.advantage.clone()
        with torch.no_grad():
            ratio = case.ratio.score(case.experience, rows).log_ratio.exp()
        clip = case.learner.clip_range[rows.step]
        torch.testing.assert_close(ratio, case.get("ratio"), rtol=2e-4, atol=1e-4)
        torch.testing.assert_close(clip, case.get("clip_coef"), rtol=1e-4, atol=1e-6)
        advantage = case.learner.weighted_advantage(case.experience, case.index)
        plain, clipped = policy_losses(ratio, advantage, clip)
        torch.testing.assert_close(plain, case.get("pg1"), rtol=2e-4, atol=1e-4)
        torch.testing.assert_close(clipped, case.get("pg2"), rtol=2e-4, atol=1e-4)
        assert torch.equal(before, case.experience.advantage)


@pytest.mark.golden("dppo_ppo_loss*.npz")
def test_unreduced_log_densities(golden_path: Path) -> None:
    data = read(golden_path)
    for name in names(data):
        case = Case(data, name, microbatch_size=1000, num_threads=1)
        chain, cond = case.get("chain"), Cond(case.state.flatten(1))
        x, x_next = chain[case.batch, case.denoising], chain[case.batch, case.denoising + 1]
        with torch.no_grad():
            new, _ = case.policy.transition_log_prob(cond, x, x_next, case.denoising, case.batch)
        torch.testing.assert_close(new, case.get("newlogprob_unclamped"), rtol=2e-3, atol=1e-3)
