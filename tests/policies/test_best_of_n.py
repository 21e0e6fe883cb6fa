"""Best of N: the plan that is executed is one of the candidates, and the right one."""

from __future__ import annotations

import pytest
import torch
from messages import mentions
from small_policies import observations, small_policy
from torch import Tensor

from envs.evaluation.protocol import with_settings
from envs.evaluation.settings import EvaluationSettings
from policies.errors import ConfigError
from policies.processes import RectifiedFlow, VPDiffusion
from policies.protocols import Observation
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.hooks import Guidance, Inpaint
from policies.samplers.ode import Euler
from policies.wrappers.best_of_n import BestOfN, Selection

PAIRS = [
    (VPDiffusion(10), DDPM(min_std=0.1)),
    (VPDiffusion(10), DDIM(steps=4)),
    (RectifiedFlow(), Euler(steps=4)),
]
every_pair = pytest.mark.parametrize(("process", "sampler"), PAIRS)


def far_from_observed(plans: Tensor, obs: Observation) -> Tensor:
    """Score plans by how far their first action is from the first entry of the state."""
    return (plans[:, :, 0, 0] - obs["state"][:, -1:, 0]).abs()


def noise_of(policy: BestOfN, batch: int) -> Tensor:
    return policy.sample_noise(batch, generator=torch.Generator().manual_seed(3))


@every_pair
def test_one_candidate_is_the_plain_policy(process, sampler) -> None:
    policy, obs = small_policy(process, sampler), observations(4)
    best = BestOfN(policy, far_from_observed, Selection(candidates=1))
    noise = noise_of(best, 4)
    assert torch.equal(best.act(obs, noise=noise), policy.act(obs, noise=noise[:, 0]))


@every_pair
def test_the_best_of_all_plans_is_executed(process, sampler) -> None:
    policy, obs = small_policy(process, sampler), observations(4)
    best = BestOfN(policy, far_from_observed, Selection(candidates=7))
    noise = noise_of(best, 4)
    alone = torch.stack([policy.act(obs, noise=noise[:, n]) for n in range(7)], dim=1)
    wanted = (alone[:, :, 0, 0] - obs[:, -1:, 0]).abs().argmax(dim=1)
    torch.testing.assert_close(best.act(obs, noise=noise), alone[torch.arange(4), wanted])
    assert wanted.unique().numel() > 1


@every_pair
def test_an_observation_s_choice_does_not_depend_on_the_others(process, sampler) -> None:
    policy, obs = small_policy(process, sampler), observations(3)
    best = BestOfN(policy, far_from_observed, Selection(candidates=4, temperature=0.5))
    noise = noise_of(best, 3)
    together = best.act(obs, noise=noise)
    for i in range(3):
        torch.testing.assert_close(best.act(obs[i : i + 1], noise=noise[i : i + 1])[0], together[i])


def test_the_same_noise_gives_the_same_actions_and_a_generator_is_all_that_draws() -> None:
    best = BestOfN(small_policy(), far_from_observed, Selection(candidates=3, temperature=1.0))
    obs, noise = observations(2), noise_of(best, 2)
    assert noise.shape == (2, *best.noise_shape)
    assert torch.equal(best.act(obs, noise=noise), best.act(obs, noise=noise))
    first, second = (best.act(obs, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, best.act(obs, noise=noise))


@pytest.mark.parametrize("switch", ["start_noise", "sampling_noise"])
def test_an_evaluation_does_not_take_the_noise_from_candidates(switch: str) -> None:
    best = BestOfN(small_policy(), far_from_observed, Selection(candidates=3))
    with pytest.raises(ConfigError, match=mentions("start_noise sampling_noise")):
        with_settings(best, EvaluationSettings(episodes=1, **{switch: "zero"}))  # type: ignore[arg-type]


def test_a_temperature_draws_in_proportion_to_the_softmax() -> None:
    scores = torch.tensor([[0.0, 1.0, -0.5]]).expand(40_000, -1)
    draw = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    chosen = Selection(candidates=3, temperature=0.7).choose(scores, draw)
    share = torch.bincount(chosen, minlength=3) / len(chosen)
    torch.testing.assert_close(share, (scores[0] / 0.7).softmax(0), rtol=0, atol=0.01)


def test_hooks_and_a_warm_start_reach_every_candidate() -> None:
    policy, obs = small_policy(VPDiffusion(10), DDIM(steps=5)), {"state": observations(3)}
    best = BestOfN(policy, far_from_observed, Selection(candidates=4))
    noise, known = noise_of(best, 3), 0.25 * torch.ones(3, 3, 2)
    mask = torch.tensor([1.0, 0.0, 0.0])[:, None]
    pinned = best.candidates(obs, noise, hooks=[Inpaint(known.repeat_interleave(4, dim=0), mask)])
    torch.testing.assert_close(pinned[:, :, 0], known[:, None, 0].expand(-1, 4, -1))
    warm = best.candidates(obs, noise, start=(known, 0.5))
    plain = policy.decode(policy.encode(obs), noise[:, 0], start=(known, 0.5))
    torch.testing.assert_close(warm, plain[:, None].expand(-1, 4, -1, -1))
    idle = best.candidates(obs, noise, hooks=[Guidance(lambda x0, cond: x0, scale=0.0)])
    torch.testing.assert_close(idle, best.candidates(obs, noise), rtol=1e-4, atol=1e-4)
