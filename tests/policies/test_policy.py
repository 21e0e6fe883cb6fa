import copy
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from small_policies import ACTION_DIM, GOAL_DIM, OBS_DIM, observations, small_policy, statistics

from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.networks.weight_cache import WeightCache
from policies.policy import PolicyConfig
from policies.policy_config import ChunkSpec
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.gaussian import GaussianProcess
from policies.protocols import ChainPolicy, Field, Hook, MatchingLoss, NoiseDecoder
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.ode import Euler
from policies.wrappers.best_of_n import BestOfN, Selection

EXPLORE = {"min_std": 0.1, "final_std": None}


def test_policies_speak_the_protocols() -> None:
    for policy in (small_policy(), small_policy(RectifiedFlow())):
        for protocol in (NoiseDecoder, MatchingLoss, ChainPolicy, Field):
            assert isinstance(policy, protocol)
    for protocol in (NoiseDecoder, MatchingLoss, ChainPolicy):
        assert isinstance(small_policy(GaussianProcess()), protocol)


def test_actions_are_physical_and_have_the_executed_rows_only() -> None:
    policy = small_policy(horizon=5, act_steps=2, obs_steps=2, action_start=1)
    obs, noise = observations(7, 2), policy.sample_noise(7)
    action = policy.act(obs, noise=noise)
    chunk = policy.decode(policy.encode({"state": obs}), noise)
    assert action.shape == (7, 2, ACTION_DIM)
    torch.testing.assert_close(action, policy.physical(chunk)[:, 1:3])
    low, high = statistics()["action"]["min"], statistics()["action"]["max"]
    assert ((action >= low - 1e-3) & (action <= high + 1e-3)).all()  # the last step of ddpm is clip(x0)


@pytest.mark.parametrize("several", [False, True])
def test_noise_of_any_float_type_is_taken(several: bool) -> None:
    policy: Any = small_policy(RectifiedFlow())
    policy = BestOfN(policy, lambda plans, _: plans.sum(dim=(-2, -1)), Selection(3)) if several else policy
    obs, noise = observations(2), policy.sample_noise(2)
    assert torch.equal(policy.act(obs, noise=noise.double()), policy.act(obs, noise=noise))


def test_initial_weights_follow_the_seed_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b = small_policy(), small_policy()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
    other = build_policy(
        PolicyConfig(), obs_dim=OBS_DIM, action_dim=ACTION_DIM, statistics=statistics(), seed=2
    )
    assert not torch.equal(next(other.parameters()), next(a.parameters()))


def test_a_goal_changes_the_action_and_must_be_given() -> None:
    policy = small_policy(goal_dim=GOAL_DIM)
    obs, noise = observations(2), policy.sample_noise(2)
    near, far = torch.zeros(2, GOAL_DIM), torch.full((2, GOAL_DIM), 9.0)
    assert not torch.allclose(
        policy.act({"state": obs, "goal": near}, noise=noise),
        policy.act({"state": obs, "goal": far}, noise=noise),
    )
    with pytest.raises(ConfigError, match=mentions("goal")):
        policy.act(obs, noise=noise)


def test_observations_of_the_wrong_shape_are_named() -> None:
    with pytest.raises(ConfigError, match=mentions(f"state ('B', 1, {OBS_DIM}) (2, {OBS_DIM})")):
        small_policy().act(torch.zeros(2, OBS_DIM))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_observation_that_is_not_finite_is_refused_with_its_entry(bad: float) -> None:
    policy = small_policy(goal_dim=GOAL_DIM)
    state, goal = observations(3), torch.zeros(3, GOAL_DIM)
    state[2, 0, 4], other = bad, goal.clone()
    other[1, 0] = bad
    for obs, name, place in ((state, "state", [2, 0, 4]), (other, "goal", [1, 0])):
        given = {"state": observations(3), "goal": goal} | {name: obs}
        with pytest.raises(ConfigError, match=mentions(f"'{name}' finite {bad} {place}")):
            policy.act(given)
    large = torch.full((1, 1, OBS_DIM), 3e38)  # their sum is not finite
    assert policy.act({"state": large, "goal": goal[:1]}).isfinite().all()


@pytest.mark.parametrize(
    ("obs", "parts"),
    [
        (None, "'state' (B, 1, 5) NoneType"),
        ("abc", "'state' (B, 1, 5) str"),
        (3.0, "'state' (B, 1, 5) float"),
        ([[1.0], [1.0, 2.0]], "'state' (B, 1, 5) list"),
        ({"observation": np.zeros((1, 1, 5)), "eye": None}, "'state' (B, 1, 5) ['eye', 'observation']"),
        ({"observation": np.zeros((1, 1, 5))}, "'state' 'goal' (B, 3) keys ['observation']"),
    ],
)
def test_what_is_no_observation_is_refused_with_the_names_that_are_needed(obs: Any, parts: str) -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=2), goal_dim=GOAL_DIM if "goal" in parts else 0)
    with pytest.raises(ConfigError, match=mentions(parts)):
        policy.act(obs)


def test_executed_rows_must_fit_the_horizon() -> None:
    with pytest.raises(ConfigError, match=mentions("policy.horizon=4")):
        ChunkSpec(2, horizon=4, act_steps=4, obs_steps=2, action_start=1)


def test_a_policy_on_the_cpu_needs_no_copy_and_another_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy()
    assert policy.on_cpu() is policy
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    other = policy.on_cpu()
    assert other is not policy
    assert all(
        x is not y and torch.equal(x, y) for x, y in zip(other.parameters(), policy.parameters(), strict=True)
    )


def test_scoring_some_columns_equals_scoring_the_chain() -> None:
    policy = small_policy(VPDiffusion(num_levels=6), DDPM(**EXPLORE))
    cond = policy.encode({"state": observations(4)})
    chain = policy.sample_chain(cond)
    columns = torch.tensor([4, 0])
    whole, _ = policy.chain_log_prob(cond, chain.x)
    torch.testing.assert_close(policy.chain_log_prob(cond, chain.x, steps=columns)[0], whole[:, columns])


def test_densities_reach_exactly_the_network() -> None:
    policy = small_policy(VPDiffusion(num_levels=4), DDPM(**EXPLORE))
    cond = policy.encode({"state": observations(4)})
    chain = policy.sample_chain(cond)
    policy.chain_log_prob(cond, chain.x.detach())[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.field.parameters())


def test_a_deterministic_chain_has_no_density() -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=3))
    with pytest.raises(CapabilityError, match=mentions("deterministic")):
        policy.sample_chain(policy.encode({"state": observations(2)}))


@pytest.mark.parametrize(
    ("process", "sampler", "match"),
    [
        (VPDiffusion(num_levels=4), DDPM(), "0 0.001"),
        (VPDiffusion(num_levels=4), DDPM(min_std=0.1, final_std=0.05), "0.05 0.1"),
        (VPDiffusion(num_levels=4), DDPM(min_std=0.1, final_std=0.5, clip_action=None), "0.5 0.1"),
        (VPDiffusion(num_levels=4), DDPM(**EXPLORE, clip_action=1.0), "clip_action=null ±1"),
        (RectifiedFlow(), Euler(steps=3, min_std=0.1), "clip_action=null ±1"),
    ],
)
def test_a_sampler_with_another_density_than_is_scored_is_refused(
    process: object, sampler: object, match: str
) -> None:
    policy = small_policy(process, sampler)
    cond = policy.encode({"state": observations(2)})
    chain = torch.zeros(2, policy.tuned_steps + 1, *policy.chunk.shape)
    for use in (lambda: policy.sample_chain(cond), lambda: policy.chain_log_prob(cond, chain)):
        with pytest.raises(CapabilityError, match=mentions(match)):
            use()


def test_a_gaussian_refuses_an_encoder_of_the_condition() -> None:
    config = PolicyConfig(process=GaussianProcess(), backbone=MlpConfig(width=16, cond_dims=(8, 4)))
    with pytest.raises(ConfigError, match=mentions("backbone.cond_dims= [8, 4] backbone")):
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM)


def test_a_view_shares_weights_but_not_what_is_put_in_their_place() -> None:
    policy = small_policy(VPDiffusion(num_levels=4))
    view, field = policy.with_sampler(DDIM(steps=2)), policy.field
    assert view.field is field and view.table.num_steps == 2 and policy.table.num_steps == 4
    assert view.noise_shape == policy.chunk.shape and policy.noise_shape == (5, *policy.chunk.shape)
    view.field = copy.deepcopy(field)
    view.register_buffer("mark", torch.zeros(1))
    assert policy.field is field and "mark" not in dict(policy.named_buffers())
    policy.field = torch.nn.Identity()
    assert isinstance(view.field, type(field))


def test_more_tuned_than_denoising_steps_is_refused() -> None:
    policy = small_policy(VPDiffusion(num_levels=4))
    with pytest.raises(ConfigError, match=mentions("tuned_steps 1 4 5")):
        policy.with_sampler(policy.sampler, tuned_steps=5)


def test_warm_start_from_the_start_is_the_whole_loop() -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=4))
    cond, noise = policy.encode({"state": observations(2)}), policy.sample_noise(2)
    torch.testing.assert_close(policy.decode(cond, noise, start=(noise, 0.0)), policy.decode(cond, noise))
    late = policy.decode(cond, noise, start=(noise, 0.75))
    assert not torch.allclose(late, policy.decode(cond, noise))


def test_the_loss_vanishes_where_the_network_is_right() -> None:
    policy = small_policy(RectifiedFlow())
    action, te = torch.zeros(4, *policy.chunk.shape), policy.sample_te(4)
    policy.field.forward = lambda x, t, c, **_: -te.eps  # the true velocity of a path that ends at 0
    loss = policy.matching_loss(policy.encode({"state": observations(4)}), action, te, reduce="none")
    assert loss.shape == (4, 3, ACTION_DIM) and loss.abs().max() < 1e-10


def test_a_loss_of_few_rows_embeds_their_times_and_one_of_many_the_table_of_levels() -> None:
    policy, asked = small_policy(VPDiffusion(num_levels=4)), []
    plain = policy.field.forward
    policy.field.forward = lambda x, t, c, **more: asked.append(len(t)) or plain(x, t, c, **more)
    generator = torch.Generator().manual_seed(0)
    cond, te = policy.encode({"state": observations(6)}), policy.sample_te(6, generator=generator)
    action = torch.randn(6, *policy.chunk.shape, generator=generator)
    whole = policy.matching_loss(cond, action, te)
    parts = [
        policy.matching_loss(cond.rows(row), action[row], te.rows(row)) for row in torch.arange(6).split(3)
    ]
    assert asked == [4, 3, 3]
    torch.testing.assert_close(whole, torch.cat(parts))


def test_gradients_flow_through_decoding_only_on_request() -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=2))
    cond, noise = policy.encode({"state": observations(2)}), policy.sample_noise(2)
    assert not policy.decode(cond, noise).requires_grad
    assert policy.decode(cond, noise, grad=True).requires_grad


def test_many_rows_act_as_their_parts_do() -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=2))
    obs, noise = observations(1100), policy.sample_noise(1100)
    parts = [policy.act(obs[rows], noise=noise[rows]) for rows in (slice(1024), slice(1024, None))]
    together = policy.act(obs, noise=noise)
    torch.testing.assert_close(together, torch.cat(parts), rtol=0, atol=0)
    sizes, plan = [], policy.plan
    policy.plan = lambda seen, part: sizes.append(len(part)) or plan(seen, part)
    torch.testing.assert_close(policy.act(obs, noise=noise), together, rtol=0, atol=0)
    assert sizes == [1024, 76]


def test_a_gaussian_refuses_what_it_would_have_to_ignore() -> None:
    policy = small_policy(GaussianProcess())
    cond, noise = policy.encode({"state": observations(2)}), policy.sample_noise(2)
    for options in ({"hooks": [Hook()]}, {"start": (noise, 0.5)}):
        with pytest.raises(CapabilityError, match=mentions("process=gaussian")):
            policy.decode(cond, noise, **options)
    with pytest.raises(ConfigError, match=mentions("process=gaussian sampler=mean sampler=ddim")):
        policy.with_sampler(DDIM())
    config = PolicyConfig(process=GaussianProcess(), backbone=object())
    with pytest.raises(ConfigError, match=mentions("process=gaussian")):
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"state": "limits", "action": "limits"}, "must give a mode to goal as well"),
        ({"obs": "limits"}, "knows state, goal, action; got obs"),
    ],
)
def test_features_without_a_mode_and_modes_without_a_feature_are_named(
    modes: dict[str, str], message: str
) -> None:
    config = PolicyConfig(backbone=MlpConfig(width=8), normalizer=modes)
    with pytest.raises(ConfigError, match=mentions(f"policy.normalizer {message}")):
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM, goal_dim=GOAL_DIM)


def test_a_policy_that_moves_lets_go_of_what_it_computed_where_it_was() -> None:
    policy = small_policy(VPDiffusion(num_levels=5)).eval()
    policy.act(observations(2))
    caches = [one for part in policy.modules() for one in vars(part).values() if isinstance(one, WeightCache)]
    assert any(cache._entry is not None for cache in caches)
    policy.double()
    assert all(cache._entry is None for cache in caches)


def test_steps_of_the_frozen_network_are_not_scored_as_those_of_the_tuned_one() -> None:
    policy = small_policy(VPDiffusion(num_levels=6), DDPM(min_std=0.1, final_std=None, clip_action=None))
    policy.field = SwitchedField(policy.field, policy.clone().field, 2.5)
    cond = policy.encode({"state": observations(2)})
    with pytest.raises(CapabilityError, match=mentions("DDPM with_sampler 6")):
        policy.sample_chain(cond)
    tuned = policy.with_sampler(policy.sampler, tuned_steps=3)
    tuned.sample_chain(cond)
