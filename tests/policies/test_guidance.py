"""Classifier-free guidance by the goal: dropping, weighing, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from messages import mentions
from small_policies import ACTION_DIM, GOAL_DIM, OBS_DIM, statistics

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import PolicyConfig
from policies.processes import Edm, RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.protocols import TE
from policies.samplers.ddpm import DDPM
from policies.storage.policy_folder import load_policy, save_policy


def make(process: object = None, *, goal_dim: int = GOAL_DIM, **changes: object) -> DenoisingPolicy:
    config = PolicyConfig(
        process=process or Edm(), backbone=MlpConfig(width=16), **{"goal_dropout": 0.25, **changes}
    )
    sizes = {"obs_dim": OBS_DIM, "action_dim": ACTION_DIM, "goal_dim": goal_dim}
    policy = build_policy(config, **sizes, statistics=statistics(), seed=1)
    return policy.eval()  # type: ignore[return-value]


def observe(batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "state": 3 + torch.randn(batch, 1, OBS_DIM, generator=generator),
        "goal": 3 + torch.randn(batch, GOAL_DIM, generator=generator),
    }


@pytest.mark.parametrize("process", [Edm(), RectifiedFlow(), VPDiffusion(5, prediction="x0")])
def test_weights_zero_and_one_are_the_policy_without_and_with_its_goal(process: object) -> None:
    policy = make(process)
    cond, noise = (
        policy.encode(observe(5)),
        policy.sample_noise(5, generator=torch.Generator().manual_seed(1)),
    )
    assert cond.free is not None
    with_goal, without = policy.decode(replace(cond, free=None), noise), policy.decode(cond.free, noise)
    assert not torch.allclose(with_goal, without)
    assert torch.equal(policy.with_guidance(1.0).decode(cond, noise), with_goal)
    torch.testing.assert_close(policy.with_guidance(0.0).decode(cond, noise), without, rtol=0, atol=1e-5)


def test_the_guided_field_extrapolates_in_every_kind() -> None:
    policy = make().double()
    obs = {name: value.double() for name, value in observe(4).items()}
    cond, x, t = policy.encode(obs), torch.randn(4, 4, ACTION_DIM).double(), torch.full((4,), 0.6).double()
    for kind in ("eps", "x0", "score", "velocity"):
        given, free = (policy.predict(x, t, c, kind=kind) for c in (cond, cond.free))
        guided = policy.with_guidance(2.5).predict(x, t, cond, kind=kind)
        torch.testing.assert_close(guided, free + 2.5 * (given - free), rtol=1e-9, atol=1e-9)


def test_one_condition_serves_all_chunks() -> None:
    policy = make().with_guidance(2.0)
    cond, noise = (
        policy.encode(observe(1)),
        policy.sample_noise(5, generator=torch.Generator().manual_seed(1)),
    )
    torch.testing.assert_close(policy.decode(cond, noise), policy.decode(cond.repeat(5), noise))


def test_dropped_rows_learn_without_their_goal() -> None:
    policy = make()
    cond, action = policy.encode(observe(400)), torch.zeros(400, 4, ACTION_DIM)
    te = policy.sample_te(400, generator=torch.Generator().manual_seed(3))
    drops = te.more["drops_goal"]
    assert 60 < int(drops.sum()) < 140
    plain = TE(te.t, te.eps, te.level)
    loss = policy.matching_loss(cond, action, te)
    given, free = (policy.matching_loss(c, action, plain) for c in (replace(cond, free=None), cond.free))
    assert torch.equal(loss, torch.where(drops, free, given))


def test_guidance_is_saved_with_the_policy(tmp_path: Path) -> None:
    policy = make().with_guidance(1.7)
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    noise = policy.sample_noise(3, generator=torch.Generator().manual_seed(1))
    assert again.config.guidance == 1.7 and again.config.goal_dropout == 0.25
    assert torch.equal(again.act(observe(3), noise=noise), policy.act(observe(3), noise=noise))


def test_what_cannot_be_guided_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("goal_dropout=0.25")):
        make(goal_dim=0)
    with pytest.raises(ConfigError, match=mentions("policy.goal_dropout 0")):
        make(goal_dropout=0.0, guidance=2.0)
    with pytest.raises(ConfigError, match=mentions("policy.goal_dropout 0 1")):
        make(goal_dropout=1.0)
    with pytest.raises(ConfigError, match=mentions("GaussianPolicy")):
        make(GaussianProcess())
    guided = make(VPDiffusion(5), sampler=DDPM(min_std=0.1, final_std=None)).with_guidance(2.0)
    with pytest.raises(CapabilityError, match=mentions("density with_guidance (1)")):
        guided.sample_chain(guided.encode(observe(2)))
