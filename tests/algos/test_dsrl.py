"""Laws of steering: what it leaves alone, where it starts, what it remembers, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import each_value, repeated
from point_env import PointEnv, PointStepper
from point_steering import AS_IT_IS, changed, composed, flow, start
from torch import Tensor

from algos.offpolicy.loop import OffPolicyRun
from algos.offpolicy.replay_buffer import ChunkBatch
from algos.offpolicy.sac_update import SacUpdate
from algos.training.metrics import Means
from algos.training.serialization import from_plain, to_plain
from envs.engine.vector import ChunkVector
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.spec import Array, EnvSpec, StepResult
from policies.backbones.dp_transformer import DpTransformerConfig
from policies.build import build_policy
from policies.errors import CheckpointError
from policies.policy import Policy
from policies.processes.diffusion import VPDiffusion
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.noise_policy import ADAPTERS, DENSITIES, SteeredPolicy, Steering

VARIANTS = ("na", "sac")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
OBS = torch.rand(6, 1, 2, generator=torch.Generator().manual_seed(4)) * 2 - 1


def acts(policy: Policy, obs: Tensor = OBS) -> Tensor:
    noise = policy.sample_noise(len(obs), generator=torch.Generator().manual_seed(1))
    return policy.act(obs, noise=noise)


def until_the_end(run: OffPolicyRun) -> OffPolicyRun:
    while run.progress < run.total:
        run.advance()
    run.close()
    return run


def rows_of(run: OffPolicyRun) -> ChunkBatch:
    return run.replay.gather(torch.arange(len(run.replay)), run.config.discounting)


# -- what it leaves alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "make"), each_value(VARIANTS, [composed, flow]))
def test_the_base_policy_behaves_bit_by_bit_as_before(variant: str, make: Any, tmp_path: Path) -> None:
    given = make()
    before, flags = acts(given), [p.requires_grad for p in given.parameters()]
    export_policy = until_the_end(start(changed(variant=variant), init=given)).snapshot()
    assert isinstance(export_policy, SteeredPolicy)
    loaded = load_policy(save_policy(export_policy, tmp_path / "policy"))
    assert isinstance(loaded, SteeredPolicy) and torch.equal(acts(loaded), acts(export_policy))
    for policy in (given, export_policy.base, loaded.base):
        assert torch.equal(acts(policy), before)
    assert [p.requires_grad for p in given.parameters()] == flags
    assert not torch.equal(acts(export_policy), acts(start(changed(variant=variant), init=given).snapshot()))


@every_variant
def test_a_policy_that_was_left_in_training_mode_is_steered_as_it_acts(variant: str) -> None:
    """Nothing is dropped: a latent has one chunk, also where training goes on from a steered policy."""
    net = DpTransformerConfig(width=8, depth=1, heads=1, dropout=0.5)
    base = build_policy(dataclasses.replace(flow().config, backbone=net), obs_dim=2, action_dim=2)
    for init in (base, Steering(hidden_dims=(8,)).wrap(base)):
        run = start(changed(variant=variant), init=init.train())
        cond, latent = torch.zeros(4, 2), torch.full((4, 6), 0.3)
        assert torch.equal(run.learner.actor.chunk(cond, latent), run.learner.actor.chunk(cond, latent))
        assert init.training
        run.close()


def test_updates_ask_the_encoder_nothing() -> None:
    """Conditions are encoded when they are met, and remembered."""
    run = start()
    policy, asked = run.learner.policy, 0
    encode = policy.encode

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return encode(*args, **options)

    policy.encode = counted  # type: ignore[method-assign]
    rollout = run._collect()
    ends = bool(len(rollout.final_index))
    # Every chunk, the last successors, and the final observations.
    assert asked == run.config.steps_per_iteration + 1 + ends
    before, actor = asked, [p.clone() for p in policy.actor.parameters()]  # type: ignore[attr-defined]
    run._pending_updates = 6.0
    run._update(Means())
    assert asked == before and run._steps == 6
    moved = zip(actor, policy.actor.parameters(), strict=True)  # type: ignore[attr-defined]
    assert not all(torch.equal(a, b) for a, b in moved)
    run.close()


# -- where it starts ------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("make", [flow, composed])
def test_untrained_steering_plays_the_episodes_of_the_policy_alone(variant: str, make: Any) -> None:
    base = make()
    untrained = start(changed(variant=variant, steering=AS_IT_IS), init=base).snapshot()
    settings = Settings(episodes=20, num_envs=4)
    alone, steered = (evaluate(p, PointEnv(limit=9), settings) for p in (base, untrained))
    assert len({row.return_ for row in alone.rows}) == 20
    for a, b in zip(alone.rows, steered.rows, strict=True):
        assert (a.length, a.success) == (b.length, b.success)
        assert a.return_ == pytest.approx(b.return_, abs=1e-4)


@pytest.mark.parametrize("bound", [1.0, 1.5])
def test_noise_of_an_untrained_tanh_actor_is_narrower_and_has_no_tails(bound: float) -> None:
    steering = Steering(hidden_dims=(8,), zero_init=True, bound=bound)
    policy = start(changed(steering=steering)).snapshot()
    assert isinstance(policy, SteeredPolicy)
    eps = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0))
    noise = policy.noise_of(policy.latent(torch.zeros(1, 2), eps))
    assert float(noise.std()) == pytest.approx(0.628 * bound, abs=0.01)
    assert float(noise.abs().max()) <= bound


@pytest.mark.parametrize("adapter", ADAPTERS)
@every_variant
def test_the_warm_up_executes_what_it_records(variant: str, adapter: str) -> None:
    """Decoded once: the point moves by 0.2 times each recorded action, that of the recorded latent."""
    steering = Steering(hidden_dims=(8,), adapter=adapter)
    run = start(changed(variant=variant, warmup_steps=40, steering=steering), limit=4)
    for _ in range(3):
        run._collect()
    assert run.progress <= 40 and not run._pending_updates
    rows = rows_of(run)
    decoded = run.learner.actor.chunk(rows.cond, rows.latent)
    torch.testing.assert_close(decoded, rows.action, rtol=0, atol=1e-5)
    moved = rows.cond + 0.2 * rows.action.clamp(-1, 1).view(-1, 2, 2).sum(1)
    assert (rows.discount > 0).all()
    torch.testing.assert_close(moved, rows.next_cond, rtol=0, atol=1e-5)
    beyond = bool((rows.latent.abs() > 1).any())
    assert beyond == (variant == "na")  # values of latents learn within the box of the actor
    run.close()


def test_a_gaussian_actor_has_no_box_for_its_warm_up() -> None:
    run = start(changed(variant="sac", steering=dataclasses.replace(AS_IT_IS, bound=0.3)))
    latent = run.learner.actor.warmup_latent(torch.zeros(1, 2), torch.tensor([[0.1, 5.0]]))
    torch.testing.assert_close(latent, torch.tensor([[0.1, 5.0]]) / 0.3)
    run.close()


@pytest.mark.parametrize("density", DENSITIES)
def test_latents_that_are_learned_from_are_those_that_the_policy_acts_by(density: str) -> None:
    run = start(changed(steering=Steering(hidden_dims=(8,), density=density, bound=0.4)))
    policy, generator = run.learner.policy, torch.Generator().manual_seed(0)
    assert isinstance(policy, SteeredPolicy)
    cond, eps = torch.randn(9, 2, generator=generator), torch.randn(9, 6, generator=generator)
    assert torch.equal(run.learner.actor.draw(cond, eps)[0], policy.latent(cond, eps))
    run.close()


# -- what it remembers ----------------------------------------------------------------------------------


class CountingStepper(PointStepper):
    """Writes down every control step; every third one of an episode meets the success rule."""

    def __init__(self, num_envs: int, book: list[tuple[int, float]]) -> None:
        super().__init__(num_envs)
        self.book, self.age = book, np.zeros(num_envs, int)

    def reset(self, row: int, seed: int) -> Array:
        self.age[row] = 0
        return super().reset(row, seed)

    def step(self, rows: Array, actions: Array) -> StepResult:
        found = super().step(rows, actions)
        self.age[rows] += 1
        self.book += [(int(row), float(reward)) for row, reward in zip(rows, found.reward, strict=True)]
        ends = self.age[rows] == 5
        return dataclasses.replace(found, terminated=ends, success=self.age[rows] == 3)


@dataclasses.dataclass(frozen=True)
class CountingEnv(PointEnv):
    """Episodes end their task with their fifth control step, within a chunk of two."""

    book: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def spec(self) -> EnvSpec:
        return dataclasses.replace(super().spec, success_rule="is three steps old")

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        return ChunkVector(self.spec, CountingStepper(num_envs, self.book), obs_steps=obs_steps)


@every_variant
def test_every_executed_step_counts_once_and_none_after_an_end(variant: str) -> None:
    """Warm-up included; a chunk of which one step succeeds is a success, whatever its rewards sum up to."""
    env = CountingEnv(limit=11)
    run = start(changed(variant=variant, warmup_steps=12, gamma=1.0), env=env)
    metrics = run.advance()
    while run.progress < run.total:
        metrics = run.advance()
        assert metrics["rollout/episodes"] == 0 or metrics["rollout/success"] == 1
    assert run.progress == len(env.book) >= run.total
    rows = rows_of(run)
    assert float(rows.reward.sum()) == pytest.approx(sum(reward for _, reward in env.book), rel=1e-4)
    lengths = torch.bincount(run.replay.state_dict()["rows"][:, 2 + 6 + 4 + 2].long())
    assert lengths[1] > 0 and int(lengths[1] + 2 * lengths[2]) == len(env.book)
    assert int((rows.discount == 0).sum()) == int(lengths[1])  # ends are the only ones of one step
    run.close()


def test_latents_at_the_bound_are_reported() -> None:
    run = start(changed(updates_per_step=1.0))
    actor = run.learner.policy.actor  # type: ignore[attr-defined]
    with torch.no_grad():
        for weight in actor.trunk.layers[0].parameters():
            weight.zero_()
        actor.trunk.layers[0].bias[:3] = torch.tensor([9.0, -9.0, 9.0])  # means of half of the six numbers
        actor.trunk.layers[0].bias[6:] = -9.0  # hardly any deviation
    found = run.learner.step(*_batch_and_draws(run))
    assert float(found["actor/saturated_fraction"]) == 0.5
    assert float(found["actor/latent_size"]) == pytest.approx(math.sqrt(0.5), abs=1e-3)
    run.close()


def _batch_and_draws(run: OffPolicyRun) -> tuple[ChunkBatch, dict[str, Tensor]]:
    run._collect()
    generator = torch.Generator().manual_seed(0)
    return run.source.draw(16, generator), run.learner.draw(16, generator)


@pytest.mark.parametrize("change", ["normaliser", "weights"])
def test_a_run_is_not_continued_with_another_policy(change: str) -> None:
    run = start()
    run.advance()
    state = from_plain(to_plain(run.state_dict()))
    other = flow(scale=2.0) if change == "normaliser" else flow(seed=4)
    with pytest.raises(CheckpointError, match=mentions("init")):
        start(init=other).load_state_dict(state)
    start().load_state_dict(state)
    run.close()


@every_variant
def test_a_run_is_not_continued_with_another_mixture_of_the_same_policies(variant: str) -> None:
    """Their weights are the same, but not what a remembered latent means."""
    run = start(changed(variant=variant), init=composed())
    run.advance()
    state = from_plain(to_plain(run.state_dict()))
    other = start(changed(variant=variant), init=composed().with_weights(0.1, 0.9))  # type: ignore[attr-defined]
    message = "init.composition.weights (0.5, 0.5) (0.1, 0.9)"
    with pytest.raises(CheckpointError, match=mentions(message)):
        other.load_state_dict(state)
    start(changed(variant=variant), init=composed()).load_state_dict(state)
    run.close()


def test_released_conventions_are_those_of_the_whole_run() -> None:
    run = start(changed(paper_compat=True, gamma=0.5), limit=5)  # chunks of 2, 2 and 1 control steps
    rollout = run._collect()
    rows = run.replay.gather(torch.arange(len(run.replay)), run.source.discounting)
    torch.testing.assert_close(rows.reward, rollout.rewards.flatten(0, 1).sum(1))
    assert torch.equal(rows.discount, 0.5 * (~(rollout.terminated | rollout.truncated)).flatten().float())
    eps = torch.full((1, 6), 60.0)
    floored, exact = (r.learner.actor.draw(rows.cond[:1], eps)[1].detach() for r in (run, start()))
    assert float(exact - floored) > 6 * 20  # 1e-6 bounds the density at the edge of the box
    run.close()


# -- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["min", "mean", "subset_min", "mean_std"])
def test_targets_and_actors_aggregate_as_configured(how: str) -> None:
    config = changed(critics=5, aggregate=how, actor_aggregate=how, subset=3, pessimism=0.7)
    run = start(config)
    learner, (batch, draws) = run.learner, _batch_and_draws(run)
    assert isinstance(learner, SacUpdate)
    alpha = torch.tensor(0.3)
    with torch.no_grad():
        latent, log_prob = learner.actor.draw(batch.next_cond, draws["next_eps"])
        values = learner.next_values(batch.next_cond, latent)
        own, own_log_prob = learner.actor.draw(batch.cond, draws["eps"])
        climbed = learner.climbed(batch.cond, own, frozen=True)
    expected = batch.reward + batch.discount * (_by_hand(values, how, draws) - 0.3 * log_prob)
    torch.testing.assert_close(learner.target(batch, draws, alpha), expected, rtol=1e-5, atol=1e-5)
    found = learner.step(batch, draws)
    loss = (config.init_alpha * own_log_prob - _by_hand(climbed, how, draws)).mean()
    assert float(found["actor/loss"]) == pytest.approx(float(loss), abs=1e-5)
    run.close()


def test_every_critic_has_its_turn_in_subsets_that_change() -> None:
    run = start(changed(critics=5, subset=2))
    generator = torch.Generator().manual_seed(0)
    drawn = [run.learner.draw(1, generator)["subset"].tolist() for _ in range(200)]
    assert {len(set(subset)) for subset in drawn} == {2}
    assert {frozenset(subset) for subset in drawn} == {frozenset(p) for p in combinations(range(5), 2)}
    run.close()


def _by_hand(values: Tensor, how: str, draws: dict[str, Tensor]) -> Tensor:
    """Reduce (E, B) row by row in NumPy."""
    array = values.numpy()
    if how == "subset_min":
        assert len(set(draws["subset"].tolist())) == 3
        array = array[draws["subset"].numpy()]
    by_name = {"min": array.min(0), "subset_min": array.min(0), "mean": array.mean(0)}
    return torch.as_tensor(by_name[how] if how in by_name else array.mean(0) - 0.7 * array.std(0))


# -- learning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "make", "steps"),
    repeated(
        [
            pytest.param("na", flow, None, id="na-flow"),
            pytest.param("sac", composed, None, id="sac-composed"),
            pytest.param(
                "na", partial(flow, VPDiffusion(num_levels=10, prediction="eps")), 5, id="na-diffusion"
            ),
        ]
    ),
)
def test_a_point_is_steered_to_its_goal_by_a_policy_that_never_learned_the_way(
    variant: str, make: Callable[[], Policy], steps: int | None
) -> None:
    """Returns of an untrained policy are near 0, those of one that goes to the goal and stays near 9."""
    init, task = make(), PointEnv(limit=12)
    config = changed(
        variant=variant, denoising_steps=steps, total_steps=700, warmup_steps=200, log_every=700,
        num_envs=4, steps_per_iteration=1, updates_per_step=0.5, batch_size=64, critic_dims=(32, 32),
        gamma=0.9, tau=0.02, init_alpha=0.02, target_entropy=-6.0, entropy_in_target=False, actor_lr=2e-3,
        critic_lr=2e-3, alpha_lr=2e-3, distillation_latents="box", steering=Steering(hidden_dims=(32, 32)),
    )  # fmt: skip
    run = until_the_end(start(config, env=task, init=init))
    settings = Settings(episodes=50, num_envs=50)
    before, after = (evaluate(p, task, settings).rows for p in (init, run.snapshot()))
    assert mean(row.return_ for row in before) < 3 and mean(row.return_ for row in after) > 5
