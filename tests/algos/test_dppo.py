"""DPPO on a toy environment: laws of the ratio, the gradient, the loop, and refusals."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError
from point_env import PointEnv
from torch import Tensor

from algos.base import Setup
from algos.buffers import Experience, encode, evaluate_rows
from algos.dppo import DppoConfig
from algos.onpolicy import OnPolicy
from algos.plain import from_plain, to_plain
from algos.ratios import Rows
from algos.surrogate import GeneratorDraws
from policies.backbones.mlp import MlpConfig
from policies.errors import CapabilityError, ConfigError
from policies.fields import SwitchedField
from policies.folder import load_policy, save_policy
from policies.heads import CriticConfig
from policies.policy import Policy, PolicyConfig, build_policy
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.samplers import DDIM
from policies.threads import torch_threads

SMALL = DppoConfig(
    num_envs=4,
    steps_per_iteration=8,
    iterations=4,
    batch_size=50,
    update_epochs=2,
    tuned_steps=3,
    actor_lr=1e-3,
    critic=CriticConfig(width=8),
    chunk_rows=16,
)


def make_init(
    *, levels: int = 5, prediction: str = "eps", backbone: Any = None, sampler: Any = None, horizon: int = 3
) -> Policy:
    config = PolicyConfig(
        process=VPDiffusion(levels, prediction=prediction),
        backbone=backbone or MlpConfig(width=16, time_dim=4),
        sampler=sampler,
        horizon=horizon,
        act_steps=2,
    )
    limits = {"min": torch.full((2,), -1.0), "max": torch.full((2,), 1.0)}
    statistics = {
        name: limits | {"mean": torch.zeros(2), "std": torch.ones(2)} for name in ("state", "action")
    }
    return build_policy(config, obs_dim=2, action_dim=2, statistics=statistics, seed=3)


def make_run(config: DppoConfig = SMALL, init: Policy | None = None, **setup: Any) -> OnPolicy:
    values = {
        "num_workers": 0,
        "num_threads": 1,
        "env": PointEnv(),
        "init": init or make_init(),
        "seed": 5,
    } | setup
    return config.build(Setup(**values))


def experience_of(run: OnPolicy) -> Experience:
    return run.appraise(run.collect(), run.policy, run.learner.critic, run.scaler)


def draws(seed: int = 0) -> GeneratorDraws:
    return GeneratorDraws(torch.Generator().manual_seed(seed))


def shift_weights(run: OnPolicy, scale: float = 0.01) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in run.learner.actor:
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))


NETS = {
    "residual": MlpConfig(width=8, time_dim=4),
    "deep": MlpConfig(
        width=8, num_blocks=2, layer_norm=True, activation="mish", time_dim=4, cond_dims=(8, 4)
    ),
    "plain": MlpConfig(residual=False, hidden_dims=(8, 6), time_dim=4),
}


@settings(max_examples=30)
@given(
    prediction=st.sampled_from(["eps", "x0", "v"]),
    net=st.sampled_from(sorted(NETS)),
    sampler=st.sampled_from(["ddpm", "ddim"]),
    levels=st.integers(2, 12),
    floors=st.sampled_from([(0.1, 0.1), (0.04, 0.1), (0.1, 0.05)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_ratio_is_one_on_fresh_data(
    prediction: str,
    net: str,
    sampler: str,
    levels: int,
    floors: tuple[float, float],
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    steps = levels if sampler == "ddpm" else data.draw(st.integers(2, levels))
    config = replace(
        SMALL,
        sampler=sampler,
        denoising_steps=None if sampler == "ddpm" else steps,
        tuned_steps=data.draw(st.integers(1, steps)),
        min_sampling_std=floors[0],
        min_log_prob_std=floors[1],
    )
    init = make_init(levels=levels, prediction=prediction, backbone=NETS[net]).to(dtype)
    run = make_run(config, init)
    experience = experience_of(run)
    total = len(experience) * config.tuned_steps
    with torch.no_grad():
        score = run.ratio.score(experience, Rows.sorted_from(torch.arange(total), config.tuned_steps))
    assert score.log_ratio.dtype == dtype
    assert score.log_ratio.exp().mean().item() == pytest.approx(1.0, abs=1e-6)
    assert score.log_ratio.abs().max().item() <= (1e-6 if dtype == torch.float64 else 1e-4)
    run.close()


def naive_gradients(
    run: OnPolicy, experience: Experience, index: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the published loss, row by row in one batch, every row encoded by itself."""
    config, steps = run.config, run.ratio.inner_steps
    state, inner = index // steps, index % steps
    chain = experience.record["chain"]
    x, x_next = chain[state, inner], chain[state, inner + 1]
    log_prob, _ = run.policy.transition_log_prob(experience.cond.rows(state), x, x_next, inner)
    new = log_prob[:, run.policy.chunk.executed].clamp(-5, 2).mean(dim=(1, 2))
    ratio = torch.exp(new - experience.record["log_prob"][state, inner])
    advantage = experience.advantage[state]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    advantage = advantage * torch.tensor([config.gamma_denoising ** (steps - 1 - int(i)) for i in inner])
    clip = run.learner.clip_range[inner]
    loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
    value = run.learner.critic(experience.cond.vec[state])
    value_loss = 0.5 * (value - experience.target[state]).square().mean()
    actor = torch.autograd.grad(loss, run.learner.actor)
    critic = torch.autograd.grad(config.vf_coef * value_loss, run.learner.critic_params)
    return list(actor), list(critic)


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    ours_flat, theirs_flat = (torch.cat([g.flatten() for g in grads]) for grads in (ours, theirs))
    return float((ours_flat - theirs_flat).norm() / theirs_flat.norm())


@pytest.mark.parametrize(("chunk_rows", "num_threads"), [(1, 1), (7, 2), (1000, 1), (16, 3)])
def test_chunked_gradients_equal_the_naive_ones(chunk_rows: int, num_threads: int) -> None:
    config = replace(SMALL, chunk_rows=chunk_rows, clip_range=0.2, clip_range_base=0.05)
    run = make_run(config, num_threads=num_threads)
    experience = experience_of(run)
    shift_weights(run, 0.1)
    index = torch.randperm(len(experience) * 3, generator=torch.Generator().manual_seed(0))[:61]
    actor, metrics = run.learner.actor_gradient(experience, index, draws=draws())
    critic, _ = run.learner.critic_gradient(experience, index)
    naive_actor, naive_critic = naive_gradients(run, experience, index)
    assert 0.0 < metrics["policy/clip_fraction"] < 1.0
    assert relative_error(actor, naive_actor) < 1e-5
    assert relative_error(critic, naive_critic) < 1e-5
    run.close()


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    results = []
    for num_threads in (1, 2, 3):
        run = make_run(num_threads=num_threads)
        experience = experience_of(run)
        shift_weights(run)
        seen: list[int] = []
        run.policy.scored_net.register_forward_pre_hook(lambda *_, s=seen: s.append(torch.get_num_threads()))
        with torch_threads(3):  # whatever the program uses elsewhere
            results.append(run.learner.actor_gradient(experience, torch.arange(96), draws=draws())[0])
        assert set(seen) == {1}
        run.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_compat_takes_the_next_episode_s_value_inside_a_rollout_and_the_true_one_at_its_end() -> None:
    run = make_run(replace(SMALL, steps_per_iteration=6), env=PointEnv(limit=6))  # 3 chunks per episode
    rollout = run.collect()
    assert rollout.truncated[[2, 5]].all()
    critic, value = run.learner.critic, torch.rand(6, 4, dtype=torch.float64)
    true, compat = (
        replace(run.appraise, paper_compat=flag).successors(rollout, run.policy, critic, value)
        for flag in (False, True)
    )
    final = evaluate_rows(critic, encode(run.policy, rollout.final_obs)).view(2, 4)
    assert torch.equal(true[[2, 5]], final)
    assert torch.equal(compat[2], value[3]) and torch.equal(compat[5], final[1])
    run.close()


def test_update_never_runs_the_frozen_network_and_encodes_each_state_once() -> None:
    run = make_run(replace(SMALL, chunk_rows=1000, batch_size=96))
    experience = experience_of(run)
    field = run.policy.field
    assert isinstance(field, SwitchedField)
    calls: list[int] = []
    field.base.register_forward_hook(lambda *_: pytest.fail("the frozen network ran"))
    run.learner.critic.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    run.learner.step(experience, torch.arange(96), draws=draws(), train_actor=True)
    assert calls == [32]


def test_python_work_of_an_update_does_not_grow_with_the_minibatch() -> None:
    run = make_run(replace(SMALL, chunk_rows=10_000, steps_per_iteration=32))
    experience = experience_of(run)

    def calls(rows: int) -> int:
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        index = torch.arange(rows)
        run.learner.step(experience, index, draws=draws(), train_actor=True)
        sys.setprofile(profile)
        try:
            run.learner.step(experience, index, draws=draws(), train_actor=True)
        finally:
            sys.setprofile(None)
        return count

    assert calls(384) == calls(30)


def test_advance_counts_executed_steps_and_keeps_the_frozen_network() -> None:
    run = make_run(init=make_init())
    field = run.policy.field
    before = [weight.clone() for weight in field.base.parameters()]
    tuned = [weight.clone() for weight in field.tuned.parameters()]
    assert run.total == 4 * 4 * 8 * 2
    rollouts = []
    collect = run.collect
    run.collect = lambda: rollouts.append(collect()) or rollouts[-1]  # type: ignore[method-assign]
    metrics = run.advance()
    assert run.progress == int(rollouts[0].length.sum()) < 4 * 8 * 2  # episodes of 11 steps end inside chunks
    for name in (
        "policy/loss",
        "value/loss",
        "policy/approx_kl",
        "value/explained_variance",
        "rollout/return",
    ):
        assert np.isfinite(float(metrics[name])), name
    assert float(metrics["policy/updates"]) == 2  # floor(96 / 50) = 1 per epoch
    assert all(torch.equal(a, b) for a, b in zip(before, field.base.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(tuned, field.tuned.parameters(), strict=True))
    while run.progress < run.total:
        run.advance()
    assert run.iteration == 4
    run.close()


def test_minibatches_drop_the_rest_and_are_at_least_one() -> None:
    run = make_run()
    sizes = [len(index) for index in run.learner.minibatches(96, draws())]
    assert sizes == [50, 50]
    assert [len(index) for index in run.learner.minibatches(30, draws())] == [30, 30]
    first, second = run.learner.minibatches(96, draws())
    assert len(set(first.tolist())) == 50
    assert first.tolist() != second.tolist()


def test_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    config = replace(SMALL, actor_min_lr=1e-4, actor_lr_warmup=1, actor_lr_cycle=4, bc_weight=0.1)
    straight = make_run(config)
    straight.advance()
    torch.save(to_plain(straight.state_dict()), tmp_path / "state.pt")
    for _ in range(2):
        straight.advance()
    resumed = make_run(config, num_threads=2)
    resumed.load_state_dict(from_plain(torch.load(tmp_path / "state.pt", weights_only=True)))
    for _ in range(2):
        resumed.advance()
    assert resumed.progress == straight.progress
    for ours, theirs in (
        (resumed.policy.state_dict(), straight.policy.state_dict()),
        (resumed.learner.critic.state_dict(), straight.learner.critic.state_dict()),
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    straight.close()
    resumed.close()


def test_state_dict_is_a_picture_of_its_moment() -> None:
    run = make_run()
    run.advance()
    state = run.state_dict()
    picture = repr(to_plain(state))
    run.advance()
    assert repr(to_plain(state)) == picture


def test_critic_warmup_leaves_the_actor_alone() -> None:
    run = make_run(replace(SMALL, critic_warmup_iterations=1))
    before = [weight.clone() for weight in run.learner.actor]
    critic = [weight.clone() for weight in run.learner.critic_params]
    metrics = run.advance()
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.actor, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(critic, run.learner.critic_params, strict=True))
    assert float(metrics["policy/ratio_mean"]) == 1.0
    run.advance()
    assert not all(torch.equal(a, b) for a, b in zip(before, run.learner.actor, strict=True))


def test_target_kl_stops_all_epochs() -> None:
    run = make_run(replace(SMALL, target_kl=1e-12, update_epochs=5, actor_lr=1e-2))
    assert float(run.advance()["policy/updates"]) == 2  # the first minibatch still has ratio one
    free = make_run(replace(SMALL, target_kl=None, update_epochs=5, actor_lr=1e-2))
    assert float(free.advance()["policy/updates"]) == 5


def test_gradient_norm_limit_covers_the_actor_only() -> None:
    run = make_run(replace(SMALL, max_grad_norm=1e-20, actor_lr=1.0, critic_lr=1.0))
    experience = experience_of(run)
    critic = [weight.clone() for weight in run.learner.critic_params]
    seen: list[float] = []
    run.learner.actor_optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.stack([w.grad.norm() for w in run.learner.actor]).norm()))
    )
    run.learner.step(experience, torch.arange(50), draws=draws(), train_actor=True)
    assert seen[0] <= 1e-19
    assert not any(torch.equal(a, b) for a, b in zip(critic, run.learner.critic_params, strict=True))


def test_cloning_term_pulls_towards_the_frozen_policy() -> None:
    run = make_run(replace(SMALL, bc_weight=1.0, bc_rows=40))
    experience, index = experience_of(run), torch.arange(96)

    def loss() -> float:
        return float(run.learner.actor_gradient(experience, index, draws=draws())[1]["policy/cloning_loss"])

    at_start = loss()
    shift_weights(run, 0.1)
    shifted = loss()
    assert shifted > at_start
    frozen = run.learner.cloning.frozen  # type: ignore[union-attr]
    assert not any(weight.requires_grad for weight in frozen.parameters())
    plain = make_run()
    shift_weights(plain, 0.1)
    with_term, _ = run.learner.actor_gradient(experience, index, draws=draws())
    without, _ = plain.learner.actor_gradient(experience, index, draws=draws())
    step = [b - a for a, b in zip(without, with_term, strict=True)]
    with torch.no_grad():
        for weight, gradient in zip(run.learner.actor, step, strict=True):
            weight.sub_(1e-4 * gradient)
    assert loss() < shifted


def test_cloning_term_on_few_rows_takes_them_from_the_whole_rollout() -> None:
    run = make_run(replace(SMALL, bc_weight=1.0, bc_rows=4, update_epochs=1))
    experience, seen = experience_of(run), []
    cloning_loss = run.learner.cloning_loss
    run.learner.cloning_loss = lambda cond, state, *rest: (  # type: ignore[method-assign]
        seen.append(state) or cloning_loss(cond, state, *rest)
    )
    for index in run.learner.minibatches(len(experience) * run.ratio.inner_steps, draws()):
        seen.clear()
        run.learner.actor_gradient(experience, index, draws=draws())
        expected = index[:4] // run.ratio.inner_steps
        assert torch.equal(torch.cat(seen).sort().values, expected.sort().values)


def test_saturated_fraction_counts_clamped_densities() -> None:
    wide = make_run(replace(SMALL, log_prob_range=None))
    narrow = make_run(replace(SMALL, log_prob_range=(0.5, 0.6)))
    assert float(wide.advance()["policy/saturated_fraction"]) == 0.0
    assert float(narrow.advance()["policy/saturated_fraction"]) > 0.5


def test_snapshot_is_independent_and_survives_its_directory(tmp_path: Path) -> None:
    run = make_run()
    run.advance()
    policy = run.snapshot()
    obs = torch.linspace(-1, 1, 6).view(3, 1, 2)
    noise = policy.sample_noise(3, generator=torch.Generator().manual_seed(0))
    before = policy.act(obs, noise=noise)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    torch.testing.assert_close(loaded.act(obs, noise=noise), before, rtol=0, atol=1e-6)
    run.advance()
    assert torch.equal(policy.act(obs, noise=noise), before)
    assert policy.table.std[-1].item() == 0.0
    assert run.policy.table.std.min().item() == pytest.approx(0.1)
    assert not policy.training
    again = make_run(init=loaded)  # fine-tuning goes on from a fine-tuned policy
    assert torch.equal(
        torch.cat([w.flatten() for w in again.learner.actor]),
        torch.cat([w.detach().flatten() for w in loaded.field.tuned.parameters()]),
    )
    with pytest.raises(ConfigError, match="tuned before"):
        make_run(replace(SMALL, tuned_steps=2), init=loaded)


def test_ddim_explores_with_noise_and_evaluates_without() -> None:
    run = make_run(replace(SMALL, sampler="ddim", denoising_steps=3), init=make_init(levels=9))
    assert not isinstance(run.policy.field, SwitchedField)  # all steps tuned: the frozen network is unused
    assert run.snapshot().is_deterministic
    assert float(run.advance()["policy/updates"]) == 2


def test_ddim_steps_default_to_the_initial_policy() -> None:
    run = make_run(replace(SMALL, sampler="ddim"), init=make_init(levels=8, sampler=DDIM(steps=4)))
    assert run.policy.table.num_steps == 4


def test_worker_processes_give_the_same_kind_of_experience() -> None:
    run = make_run(num_workers=2, num_threads=2)
    metrics = run.advance()
    assert np.isfinite(float(metrics["policy/loss"]))
    run.close()


def test_config_is_a_structured_config() -> None:
    schema = OmegaConf.structured(DppoConfig)
    merged = OmegaConf.merge(schema, {"tuned_steps": 5, "min_sampling_std": 1, "target_kl": None})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, DppoConfig)
    assert isinstance(config.min_sampling_std, float)
    assert config.target_kl is None
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(schema, {"clip": 0.1})
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"tuned_steps": "ten"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor_lr": 2e-5, "actor_min_lr": 1e-4}, "actor_min_lr must not exceed"),
        ({"actor_lr_warmup": 10, "actor_lr_cycle": 10, "paper_compat": True}, "actor_lr_warmup must lie in"),
        ({"sampler": "euler"}, "algo.sampler must be one of ddpm, ddim; got euler"),
        ({"eta": 0.0}, "deterministic sampler has no density"),
        ({"tuned_steps": 0}, "algo.tuned_steps must be at least 1; got 0"),
        ({"batch_size": 0}, "algo.batch_size"),
        ({"gamma": 1.5}, "algo.gamma must be in"),
        ({"log_prob_reduction": "sum"}, "mean, per_step, joint"),
        ({"advantage_quantiles": (0.9, 0.1)}, "algo.advantage_quantiles"),
        ({"min_log_prob_std": 0.0}, "algo.min_log_prob_std must be positive"),
        ({"entropy_coef": 0.1}, r"algo.entropy_coef must be 0.*got 0\.1"),
        ({"batch_size": 1}, "algo.batch_size must be at least 2 with algo.normalize_advantage=true"),
        ({"advantage_quantiles": (0.5,)}, "algo.advantage_quantiles must be two rising"),
        ({"advantage_quantiles": (0.1, 0.2, 0.3)}, "algo.advantage_quantiles must be two rising"),
        ({"log_prob_range": (1.0,)}, "algo.log_prob_range must be two rising numbers"),
        ({"log_prob_range": (5.0, math.nan)}, "algo.log_prob_range must be two rising numbers"),
        ({"clip_range_rate": 1000.0}, r"algo.clip_range_rate must be in \[-100, 100\]; got 1000"),
        ({"clip_range_rate": math.nan}, "algo.clip_range_rate must be in"),
        ({"min_sampling_std": math.inf}, "algo.min_sampling_std must be positive and finite"),
        ({"actor_min_lr": math.inf, "paper_compat": True}, "algo.actor_min_lr must be"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change)


SIZES = [
    *("reward_scale_clip", "reward_scale_const", "gamma", "gae_lambda", "vf_coef", "bc_weight"),
    *("actor_lr", "actor_min_lr", "actor_weight_decay", "critic_lr", "critic_min_lr", "critic_weight_decay"),
]


@pytest.mark.parametrize("value", [math.nan, -1.0])
@pytest.mark.parametrize("name", SIZES)
def test_numbers_that_cannot_be_meant_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"algo.{name} must be .*; got {value}"):
        replace(SMALL, **{name: value})


def test_what_looks_odd_but_can_be_meant_is_allowed() -> None:
    assert replace(SMALL, paper_compat=True, actor_lr=2e-5, actor_min_lr=1e-4).actor_min_lr == 1e-4
    assert replace(SMALL, batch_size=1, normalize_advantage=False).batch_size == 1
    steep = replace(SMALL, reward_scale_clip=math.inf, clip_range_rate=100.0)
    assert bool(steep.clip_range_of(5).isfinite().all())
    assert replace(SMALL, log_prob_range=None).log_prob_range is None


def test_a_resumed_run_takes_the_weight_decay_it_is_given() -> None:
    first, second = make_run(), make_run(replace(SMALL, actor_weight_decay=0.1, critic_weight_decay=0.2))
    first.advance()
    second.load_state_dict(from_plain(to_plain(first.state_dict())))
    optimizers = (second.learner.actor_optimizer, second.learner.critic_optimizer)
    assert [optimizer.param_groups[0]["weight_decay"] for optimizer in optimizers] == [0.1, 0.2]


def test_rising_rate_is_allowed_for_parity_only() -> None:
    assert replace(SMALL, actor_lr=2e-5, actor_min_lr=1e-4, paper_compat=True).actor_min_lr == 1e-4


def test_unfit_setups_are_refused_before_work_starts() -> None:
    class NoEnv(PointEnv):
        def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> Any:
            pytest.fail("environments were made")

    class WideEnv(NoEnv):
        @property
        def spec(self) -> Any:
            return replace(PointEnv().spec, obs_dim=3)

    flow = PolicyConfig(process=RectifiedFlow(), backbone=MlpConfig(width=8, time_dim=4), act_steps=2)
    for setup, error, message in (
        ({"init": None}, ConfigError, "algo=dppo fine-tunes a policy and got none"),
        ({"init": make_init(), "env": None}, ConfigError, "algo=dppo learns in an environment"),
        ({"init": make_init(), "env": WideEnv()}, ConfigError, "observation width 3.*width 2"),
        (
            {"init": make_init(levels=2)},
            ConfigError,
            "tuned_steps must not exceed the 2 denoising steps; got 3",
        ),
        ({"init": build_policy(flow, obs_dim=2, action_dim=2)}, CapabilityError, "dppo needs.*RectifiedFlow"),
    ):
        with pytest.raises(error, match=message):
            SMALL.build(Setup(**({"env": NoEnv(), "num_workers": 0} | setup)))
