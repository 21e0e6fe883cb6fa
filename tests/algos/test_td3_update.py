"""The offline core: what moves when, what gradients reach, and that it improves on what recorded the data."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import repeated
from point_env import PointEnv
from point_steering import AS_IT_IS, composed
from torch import Tensor

from algos.a2pr import A2prConfig, ActionVae
from algos.base import Setup
from algos.iql import IqlConfig, expectile_loss
from algos.offline.loop import Limits, OfflineRun, _evenly_spaced, limits_of
from algos.offline.td3_update import Actor, ConstrainedTd3Config, Td3Learner, towards
from algos.prdc import PrdcConfig
from algos.rebrac import RebracConfig
from algos.td3_bc import Td3BcConfig
from algos.transitions import Rewarding
from burnish.config.overrides import experiments
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.networks import native
from policies.networks.critics import EnsembleConfig, aggregate
from policies.networks.mlp_blocks import PlainTrunk
from policies.policy import Policy, PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.registry import name_of
from policies.samplers.ode import Euler
from policies.threads import torch_threads

SIZES: dict[str, Any] = {
    "hidden_dims": (32, 32),
    "critic_dims": (32, 32),
    "batch_size": 64,
    "log_every": 50,
}
CONSTRAINED: list[type[ConstrainedTd3Config]] = [Td3BcConfig, PrdcConfig, A2prConfig, RebracConfig]


def bandit(n: int = 512, seed: int = 0) -> EpisodeDataset:
    """Return episodes of one step: best is the action that equals the state, data are noisy."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.rand(n, 2, generator=generator) - 0.5
    action = (state + 0.4 * torch.randn(n, 2, generator=generator)).clamp(-1, 1)
    over = torch.ones(n, dtype=torch.bool)
    return EpisodeDataset(
        observations=state, actions=action, rewards=-(action - state).square().sum(1), terminated=over,
        truncated=~over, episode_start=torch.arange(n + 1), meta={"source": "bandit"},
    )  # fmt: skip


def run_of(config: Any, **changes: Any) -> OfflineRun:
    return config.build(Setup(dataset=bandit(), seed=1, **changes))


def small(config: Any, **options: Any) -> Any:
    """Return a configuration with narrow networks."""
    narrow = {"value_dims": (32, 32), "vae_width": 32}
    known = {f.name for f in fields(config)}
    return config(**SIZES | {k: v for k, v in narrow.items() if k in known} | options)


def regret(policy: Policy) -> float:
    """Return the mean squared distance of actions from the best ones."""
    state = torch.rand(256, 1, 2, generator=torch.Generator().manual_seed(9)) - 0.5
    action = policy.act(state, generator=torch.Generator().manual_seed(2))[:, 0]
    return float((action - state[:, 0]).square().sum(1).mean())


def flow(seed: int = 0) -> Policy:
    """Return a small flow that acts in single steps."""
    one = torch.ones(2)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    return build_policy(
        PolicyConfig(
            process=RectifiedFlow(), backbone=MlpConfig(width=32), sampler=Euler(steps=4), horizon=1,
            act_steps=1,
        ),
        obs_dim=2, action_dim=2, statistics={"state": limits, "action": limits}, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("config", CONSTRAINED, ids=lambda c: c.__name__)
def test_the_actor_and_the_targets_move_on_every_second_step(config: Any) -> None:
    run = run_of(small(config, steps=8))
    learner = run.learner
    assert isinstance(learner, Td3Learner)
    parts = {
        "actor": learner.policy, "critic": learner.critic,
        "target actor": learner.target_actor.policy, "target critic": learner.target_critic,
    }  # fmt: skip
    for step in range(1, 5):
        before = {name: weights(part) for name, part in parts.items()}
        run._step()
        moved = {name for name, part in parts.items() if not torch.equal(weights(part), before[name])}
        assert moved == (set(parts) if step % 2 == 0 else {"critic"})


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_the_actor_step_leaves_no_gradient_in_the_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(Td3BcConfig(steps=4, **SIZES))
    learner = run.learner
    assert isinstance(learner, Td3Learner)
    monkeypatch.setattr(Td3Learner, "_evaluate_without_graphs", lambda *_: None)
    monkeypatch.setattr("algos.offline.td3_update.descend", lambda _, loss: loss.backward())
    batch = run.table.gather(torch.arange(16))
    learner._update_actor(batch, {"start": learner.actor.draw(16, torch.Generator())})
    assert all(p.grad is None for p in learner.critic.parameters())
    assert all(p.grad is not None for p in learner.policy.parameters())


def actor_gradients(
    config: ConstrainedTd3Config, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Return those of a step without graphs, and those of one with graphs; one of the two is empty."""
    run, taken = run_of(config), list[Tensor]()
    learner = run.learner
    assert isinstance(learner, Td3Learner)
    monkeypatch.setattr("algos.offline.td3_update.descend", lambda _, loss: loss.backward())
    monkeypatch.setattr("algos.offline.td3_update.descend_along", lambda _, grads: taken.extend(grads))
    learner.steps = 1  # the second step updates the actor
    batch, draws = run.table.gather(torch.arange(16)), learner.draw(16, torch.Generator().manual_seed(0))
    learner.regulariser.learn(batch, learner.backup(batch, draws), learner.critic, draws)
    learner._update_actor(batch, draws)
    assert all(p.grad is None for p in learner.critic.parameters())
    return taken, [p.grad for p in learner.policy.parameters() if p.grad is not None]


@pytest.mark.skipif(native.library() is None, reason="there is no program in C")
@pytest.mark.parametrize("kind", CONSTRAINED)
def test_actor_gradients_without_graphs_are_those_of_autograd(
    kind: type[ConstrainedTd3Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch_threads(1):
        found, none = actor_gradients(kind(steps=4, **SIZES), monkeypatch)
        monkeypatch.setattr(Td3Learner, "_evaluate_without_graphs", lambda *_: None)
        nothing, expected = actor_gradients(kind(steps=4, **SIZES), monkeypatch)
    assert found and expected and not (none or nothing)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm() + 1e-12


@pytest.mark.skipif(native.library() is None, reason="there is no program in C")
@pytest.mark.parametrize("weight", [1.0, 0.03])
def test_the_slope_of_a_distance_is_that_of_autograd(weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    action, other = (torch.randn(2, 6, 3, generator=generator) for _ in range(2))
    value, slope, _ = towards(action.requires_grad_(), other, weight)
    torch.testing.assert_close(value, weight * (action - other).square().mean(dim=(1, 2)))
    assert slope is not None and not slope.requires_grad
    torch.testing.assert_close(slope, torch.autograd.grad(value.sum(), action)[0])


def test_weights_that_are_frozen_tied_or_another_networks_have_graphs() -> None:
    x, other = torch.randn(5, 3), PlainTrunk((3, 8, 8, 2), "relu")

    def serves(weights: list[Tensor]) -> bool:
        with torch_threads(1):
            return trunk.evaluate_without_graph(x, weights) is not None

    trunk = PlainTrunk((3, 8, 8, 2), "relu")
    assert serves(list(trunk.parameters())) and serves(list(trunk.layers.parameters()))
    assert not serves(list(other.parameters()))
    trunk.inlet.weight.requires_grad_(False)
    assert not serves(list(trunk.parameters())) and serves(list(trunk.layers.parameters()))
    trunk.layers[0].bias = trunk.inlet.bias
    assert not serves(list(trunk.layers.parameters()))


def test_an_actor_in_another_precision_has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_threads(1):
        none, found = actor_gradients(Td3BcConfig(steps=4, autocast="bfloat16", **SIZES), monkeypatch)
    assert found and not none


def test_aggregates() -> None:
    values = torch.tensor([[1.0, 4.0], [2.0, 3.0], [6.0, -1.0]])
    assert aggregate(values, "min").tolist() == [1.0, -1.0]
    assert aggregate(values, "mean").tolist() == [3.0, 2.0]
    assert aggregate(values, "subset_min", subset=torch.tensor([1, 2])).tolist() == [2.0, -1.0]
    expected = values.mean(0) - 0.5 * values.std(0, correction=0)
    torch.testing.assert_close(aggregate(values, "mean_std"), expected)
    with pytest.raises(ConfigError, match=mentions("subset_min mean_std")):
        aggregate(values, "subset_min")


def test_the_expectile_of_numbers_is_where_their_loss_is_least() -> None:
    numbers = torch.linspace(0, 1, 1001)
    best = min(torch.linspace(0, 1, 401).tolist(), key=lambda v: float(expectile_loss(numbers - v, 0.9)[0]))
    # the 0.9-expectile of the uniform density solves 0.9 (1 - v)^2 = 0.1 v^2
    assert best == pytest.approx(3 / 4, abs=5e-3)


@pytest.mark.parametrize("config", repeated([*CONSTRAINED, IqlConfig]), ids=lambda c: c.__name__)
def test_a_new_actor_becomes_better_than_the_data(config: Any) -> None:
    """The data are 0.32 away from the best action on average, and imitating them perfectly is not better."""
    extra = {"alpha": 10.0} if issubclass(config, ConstrainedTd3Config) else {"temperature": 10.0}
    run = run_of(small(config, steps=100, actor_lr=1e-2, critic_lr=1e-2, **extra))
    while run.progress < run.total:
        run.advance()
    noise = bandit().actions - bandit().observations
    assert regret(run.snapshot()) < 0.25 * float(noise.square().sum(1).mean())


@pytest.mark.parametrize("config", repeated([PrdcConfig, Td3BcConfig, A2prConfig]), ids=lambda c: c.__name__)
def test_a_flow_becomes_better_by_gradients_through_its_sampler(config: Any) -> None:
    options = {"actor_lr": 3e-3, "critic_lr": 3e-3, "alpha": 10.0}
    run = run_of(small(config, steps=200, **options), init=flow())
    before = regret(run.snapshot())
    while run.progress < run.total:
        run.advance()
    assert regret(run.snapshot()) < min(0.5 * before, 0.25)


def test_a_single_flow_action_has_the_gradient_of_its_finite_difference() -> None:
    policy = flow().double()
    actor, cond = Actor(policy), torch.zeros(1, 2, dtype=torch.float64)
    noise = policy.sample_noise(1, generator=torch.Generator().manual_seed(0))
    weight = next(p for p in policy.field.parameters() if p.dim() == 2)
    (grad,) = torch.autograd.grad(actor(cond, noise).sum(), weight)
    with torch.no_grad():
        weight[0, 0] += 1e-6
        high = actor(cond, noise).sum()
        weight[0, 0] -= 2e-6
        low = actor(cond, noise).sum()
    assert float((high - low) / 2e-6) == pytest.approx(float(grad[0, 0]), rel=1e-4, abs=1e-8)


def test_a_run_on_other_data_is_not_continued() -> None:
    state = run_of(Td3BcConfig(steps=8, **SIZES)).state_dict()
    other = Td3BcConfig(steps=8, **SIZES).build(Setup(dataset=bandit(seed=3), seed=1))
    with pytest.raises(CheckpointError, match=mentions("dataset")):
        other.load_state_dict(state)


def test_a_new_actor_acts_in_the_box_of_the_task() -> None:
    run = run_of(Td3BcConfig(steps=1, **SIZES), env=PointEnv())
    spec = PointEnv().spec
    action = run.snapshot().act(100 * torch.randn(64, 1, 2, generator=torch.Generator().manual_seed(0)))
    for side in (spec.action_low, spec.action_high):
        bound = torch.tensor(side)
        assert torch.isclose(action[:, 0], bound, atol=0.5 * float(bound.abs().max())).any()
    assert (action >= torch.tensor(spec.action_low) - 1e-6).all()
    assert (action <= torch.tensor(spec.action_high) + 1e-6).all()


def test_cloning_is_the_limit_without_a_value() -> None:
    run = run_of(Td3BcConfig(steps=300, alpha=0.0, **SIZES))
    while run.progress < run.total:
        metrics = run.advance()
    assert float(metrics["actor/value_loss"]) == 0.0
    assert regret(run.snapshot()) < 0.05  # the mean of the data is the state


def recording(lengths: tuple[int, ...], ends: tuple[bool, ...]) -> EpisodeDataset:
    """Return episodes of given lengths; ends: whether the task ended there, or only the recording."""
    total, last = sum(lengths), torch.tensor(lengths).cumsum(0) - 1
    generator = torch.Generator().manual_seed(4)
    terminated, truncated = torch.zeros(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    terminated[last], truncated[last] = torch.tensor(ends), ~torch.tensor(ends)
    start = torch.cat([torch.zeros(1, dtype=torch.long), last + 1])
    return EpisodeDataset(
        observations=torch.randn(total, 3, generator=generator),
        actions=torch.rand(total, 2, generator=generator) * 2 - 1,
        rewards=torch.randn(total, generator=generator), terminated=terminated, truncated=truncated,
        episode_start=start, meta={"source": "recording"},
    )  # fmt: skip


def test_overestimation_is_zero_for_returns_and_a_shift_for_shifted_ones() -> None:
    dataset = recording((7, 12), (True, False))
    run = Td3BcConfig(steps=2, gamma=0.5, reward_scale=2.0, reward_shift=1.0, **SIZES).build(
        Setup(dataset=dataset, seed=1)
    )
    probes, rewards = run._probes, 2.0 * dataset.rewards + 1.0
    assert probes is not None
    by_hand = [float(sum(0.5**k * r for k, r in enumerate(rewards[start:7]))) for start in range(7)]
    torch.testing.assert_close(probes.to_go[:7], torch.tensor(by_hand))
    assert len(probes.to_go) == 7 + 6, "rows of the cut recording count where what it lacks weighs < 1 %"

    def critic(cond: Tensor, action: Tensor) -> Tensor:
        return torch.stack([probes.to_go + 3.0, probes.to_go + 5.0])

    assert float(probes.overestimation(critic)) == pytest.approx(4.0, abs=1e-5)  # type: ignore[arg-type]
    assert "critic/overestimation" in run.advance()


def test_probes_are_found_where_a_float_rounds_the_last_row_up() -> None:
    rows = 2**24 + 4
    assert _evenly_spaced(torch.ones(rows, dtype=torch.bool), 3).tolist()[::2] == [0, rows - 1]


def test_values_and_actions_beyond_limits_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    sizes = SIZES | {"log_every": 1}
    run = Td3BcConfig(steps=4, gamma=0.5, **sizes).build(Setup(dataset=recording((9,), (True,)), seed=1))
    learner: Any = run.learner
    run.advance()
    assert not caplog.records
    with torch.no_grad():
        learner.critic.bias[-1] += 50.0
    run.advance()
    run.advance()
    largest = (2 - 0.5**8) * float(recording((9,), (True,)).rewards.max())
    (text,) = caplog.messages
    assert f"exceeds {largest:.4g}" in text and "algo.alpha" in text
    run.warn({"critic/value": torch.tensor(-50.0), "actor/saturated_fraction": torch.tensor(0.9)})
    run.warn({"actor/saturated_fraction": torch.tensor(0.9)})
    _, text = caplog.messages
    assert text.startswith("actor/saturated_fraction is 0.90, of the data 0.")


def test_values_of_new_critics_that_approach_the_returns_are_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Td3BcConfig(steps=4, gamma=0.5, **SIZES).build(Setup(dataset=recording((9,), (True,)), seed=1))
    for value in (90.0, 80.0, 70.0, 70.0):
        run.warn({"critic/value": torch.tensor(value)})
    assert not caplog.records
    run.warn({"critic/value": torch.tensor(71.0)})
    assert "critic/value is 71" in caplog.text and "reward_scale" not in caplog.text
    small = Limits(-1.0, 0.0, at_bound=0.0, advice="Stop.").broken({"critic/value": torch.tensor(0.3)})
    assert "Raise algo.reward_scale" in small["values"] and small["values"].endswith("Stop.")


LIMITS = [  # ends of two episodes of 3 and 2 steps, gamma, steps in the task, sum of gamma^k
    ((True, False), 0.5, 6, 2.0),
    ((True, True), 0.5, 4, 1.875),
    ((True, True), 0.5, None, 1.75),
    ((True, True), 1.0, 4, 4.0),
    ((True, False), 1.0, 4, math.inf),
]


@pytest.mark.parametrize(("ends", "gamma", "steps", "weight"), LIMITS)
def test_limits_are_the_returns_of_the_extreme_rewards_in_every_step(
    ends: tuple[bool, ...], gamma: float, steps: int | None, weight: float
) -> None:
    data = replace(recording((3, 2), ends), rewards=torch.tensor([-1.0, 0.0, 3.0, 1.0, 2.0]))
    table = run_of(small(Td3BcConfig)).table
    for shift, most in ((0.0, 6.0), (-7.0, 0.0)):  # of all negative rewards the best is to end
        found = limits_of(table, data, Rewarding(gamma, 2.0, shift), episode_steps=steps, advice="")
        assert (found.least, found.most) == (weight * (shift - 2.0), weight * most if most else 0.0)
    assert found.at_bound == float((table.action.abs() > 0.98).float().mean())


def test_no_probe_where_every_recording_is_cut_short() -> None:
    run = Td3BcConfig(steps=1, **SIZES).build(Setup(dataset=recording((7, 12), (False, False)), seed=1))
    assert "critic/overestimation" not in run.advance()


@pytest.mark.parametrize("config", [Td3BcConfig, RebracConfig, A2prConfig, IqlConfig])
def test_half_precision_changes_steps_by_its_rounding_only(config: Any) -> None:
    runs = [run_of(small(config, steps=20, autocast=kind)) for kind in (None, "bfloat16")]
    before = weights(runs[0].learner.policy)
    for run in runs:
        for _ in range(2):
            run._step()
    exact, rough = (weights(run.learner.policy) for run in runs)
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    # Two steps of Adam move an entry by 3e-4 at most; signs of nearly all gradients must agree.
    moved, other = exact - before, rough - before
    assert torch.nn.functional.cosine_similarity(moved, other, dim=0) > 0.8


def test_the_actor_waits_for_the_critics_and_its_targets_do_not() -> None:
    """Until the warm-up ends an actor is what it was; critics learn as those of a run without one."""
    plain, waiting = (run_of(small(Td3BcConfig, steps=9, **more)) for more in ({}, {"warmup_steps": 4}))
    start = weights(waiting.learner.policy)
    first = waiting.learner.target_critic.state_dict()["weight.0"].clone()
    for _ in range(4):
        assert "actor/value" not in waiting._step()
    assert torch.equal(weights(waiting.learner.policy), start)
    assert not torch.equal(waiting.learner.target_critic.state_dict()["weight.0"], first)
    for _ in range(2):
        plain._step()  # the actor of a run without a warm-up moves at its second step
    assert not torch.equal(weights(plain.learner.policy), start)
    waiting._step()
    assert "actor/value" in waiting._step() and not torch.equal(weights(waiting.learner.policy), start)


def test_a_warm_up_ends_before_the_run() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.warmup_steps algo.steps 5")):
        Td3BcConfig(steps=5, warmup_steps=5)


@pytest.mark.parametrize("config", CONSTRAINED, ids=lambda c: c.__name__)
@pytest.mark.parametrize("normalised", [False, True])
def test_critics_are_normalised_where_that_is_asked_for(config: Any, normalised: bool) -> None:
    run = run_of(small(config, steps=4, critic_layer_norm=normalised))
    learner = run.learner
    assert isinstance(learner, Td3Learner)
    for critic in (learner.critic, learner.target_critic):
        assert len(critic.scale) == len(critic.shift) == (2 if normalised else 0)
    before = [scale.detach().clone() for scale in learner.critic.scale]
    run._step()
    assert not any(map(torch.equal, before, learner.critic.scale))


@pytest.mark.parametrize("config", [Td3BcConfig, PrdcConfig, A2prConfig])
def test_settings_for_few_rows_are_named_where_published_ones_are_used(
    config: type[ConstrainedTd3Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "algos.offline.td3_update")
    named = f"{name_of('algo', config())}_few_rows"
    assert named in experiments()
    run_of(small(config, steps=1, critic_layer_norm=True))
    assert not any(named in text for text in caplog.messages)
    run_of(small(config, steps=1))
    assert sum(named in text for text in caplog.messages) == 1
    caplog.clear()
    monkeypatch.setattr("algos.offline.td3_update.FEW_ROWS", 512)
    run_of(small(config, steps=1))
    assert not any(named in text for text in caplog.messages), "as many rows as are enough"


def test_settings_for_few_rows_are_not_named_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "algos.offline.td3_update")
    assert "rebrac_few_rows" not in experiments()
    run_of(small(RebracConfig, steps=1, critic_layer_norm=False))
    assert not any("few_rows" in text for text in caplog.messages)


def test_new_critics_that_move_a_given_policy_at_once_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for init, steps, expected in ((None, 0, 0), (flow(), 1, 0), (flow(), 0, 1)):
        run_of(small(Td3BcConfig, steps=2, warmup_steps=steps), init=init)
        assert sum("algo.warmup_steps=0" in text for text in caplog.messages) == expected


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_half_precision_that_takes_longer_is_warned_of(
    ratio: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: ratio}
    monkeypatch.setattr("algos.offline.config.seconds_of_product", seconds.__getitem__)
    for autocast in (None, "bfloat16"):
        assert not caplog.records
        run_of(small(Td3BcConfig, steps=1, autocast=autocast))
    assert any("2.0 times" in text for text in caplog.messages) is (ratio > 1)


def test_half_precision_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algo\.autocast must be .*bfloat16.*; got 'half'"):
        Td3BcConfig(autocast="half")


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_values_of_hundreds_keep_their_digits_in_half_precision(members: int, layer_norm: bool) -> None:
    torch.manual_seed(0)
    critic = EnsembleConfig(layer_norm=layer_norm).build(8, 3)
    with torch.no_grad():
        critic.bias[-1] += 300.0  # numbers of eight bits are 2 apart here
        cond, action = torch.randn(64, 8), torch.randn(64, 3)
        exact = critic(cond, action, members=members)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = critic(cond, action, members=members)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0, atol=2e-2)  # hidden layers are rounded, values not


def test_deviations_of_the_guide_stay_within_their_limits() -> None:
    vae, generator = ActionVae(2, 3, width=16), torch.Generator().manual_seed(0)
    with torch.no_grad():
        vae.log_std.weight.mul_(1e4)
        std = vae(*(torch.randn(50, width, generator=generator) for width in (2, 3, vae.latent_dim)))[2]
    assert float(std.min()) == pytest.approx(math.exp(-4)) and float(std.max()) == pytest.approx(math.exp(15))


def test_actions_that_the_guide_does_not_keep_need_no_reconstruction() -> None:
    found = []
    for listens in (False, True):  # what listens to the guide is shown all of a batch
        run = run_of(small(A2prConfig))
        guide: Any = run.learner.regulariser
        shown: list[int] = []
        if listens:
            guide.vae.register_forward_hook(lambda net, given, out, shown=shown: shown.append(len(out[0])))
        batch = run.table.gather(torch.arange(64))
        with torch.no_grad():
            guide.value.bias[-1] += 0.2  # keeps some
        out = run.learner.step(batch, run.learner.draw(64, torch.Generator().manual_seed(0)))
        assert 0.1 < float(out["guide/kept_fraction"]) < 0.9 and all(rows == 64 for rows in shown)
        means = [guide.vae_optimizer.state[weight]["exp_avg"] for weight in guide.vae.parameters()]
        found.append([out["guide/loss"], *means])
    for chosen, whole in zip(*found, strict=True):
        torch.testing.assert_close(chosen, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", [*CONSTRAINED, IqlConfig])
def test_only_a_policy_with_weights_of_its_own_is_tuned(kind: Any) -> None:
    with pytest.raises(CapabilityError, match=mentions("init composition")):
        run_of(small(kind), init=composed())
    with pytest.raises(CapabilityError, match=mentions("steering")):
        run_of(small(kind), init=AS_IT_IS.wrap(flow()))
