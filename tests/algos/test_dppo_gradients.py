"""DPPO's ratio and gradients: equal to the naive ones, whatever the pieces and threads, and cheap."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import everything
from point_dppo import SMALL, draws, experience_of, make_init, make_run, shift_weights
from torch import Tensor

from algos.onpolicy.advantages import Experience
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ratios import Rows
from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.threads import torch_threads

NETS = {
    "residual": MlpConfig(width=8, time_dim=4),
    "deep": MlpConfig(
        width=8, num_blocks=2, layer_norm=True, activation="mish", time_dim=4, cond_dims=(8, 4)
    ),
    "plain": MlpConfig(residual=False, hidden_dims=(8, 6), time_dim=4),
}


@settings(max_examples=30 if everything else 12)
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


@pytest.mark.parametrize(
    ("microbatch_size", "num_threads", "shares"),
    [(1, 1, True), (7, 2, True), (1000, 1, True), (16, 3, True), (7, 1, False)],
)
def test_chunked_gradients_equal_the_naive_ones(
    microbatch_size: int, num_threads: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shares:  # as on an accelerator
        own = classmethod(lambda cls, index, steps: cls(index, index % steps, index // steps))
        monkeypatch.setattr(Rows, "sorted_from", own)
    config = replace(SMALL, microbatch_size=microbatch_size, clip_range=0.2, clip_range_base=0.05)
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


def test_gradient_norm_limit_covers_the_actor_only() -> None:
    run = make_run(replace(SMALL, max_grad_norm=1e-20, actor_lr=1.0, critic_lr=1.0))
    experience = experience_of(run)
    critic = [weight.clone() for weight in run.learner.critic_params]
    run.learner.step(experience, torch.arange(50), draws=draws(), train_actor=True)
    moments = [run.learner.actor_optimizer.state[weight]["exp_avg"] for weight in run.learner.actor]
    assert 0 < float(torch.stack([moment.norm() for moment in moments]).norm()) <= 1e-20
    assert not any(torch.equal(a, b) for a, b in zip(critic, run.learner.critic_params, strict=True))


# -- what an update costs ------------------------------------------------------------------------------


def test_update_never_runs_the_frozen_network_and_encodes_each_state_once() -> None:
    run = make_run(replace(SMALL, microbatch_size=1000, batch_size=96))
    experience = experience_of(run)
    field = run.policy.field
    assert isinstance(field, SwitchedField)
    calls: list[int] = []
    field.base.register_forward_hook(lambda *_: pytest.fail("the frozen network ran"))
    run.learner.critic.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    run.learner.step(experience, torch.arange(96), draws=draws(), train_actor=True)
    assert calls == [32]


def test_python_work_of_an_update_does_not_grow_with_the_minibatch() -> None:
    run = make_run(replace(SMALL, microbatch_size=10_000, steps_per_iteration=32))
    experience = experience_of(run)

    def calls(rows: int) -> int:
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        index = torch.arange(rows)
        run.learner.step(experience, index, draws=draws(), train_actor=True)
        gc.collect()
        gc.disable()  # what it finalises is the work of others
        sys.setprofile(profile)
        try:
            run.learner.step(experience, index, draws=draws(), train_actor=True)
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    assert calls(384) == calls(30)


# -- the cloning term ---------------------------------------------------------------------------------


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
