"""SAC and RLPD: losses written out, values in closed form, and what a run is built from."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from pairwise import everything
from point_env import PointEnv
from point_steering import dataset
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from algos.base import Setup
from algos.offpolicy.loop import Explorer, OffPolicyRun
from algos.offpolicy.replay_buffer import ChunkBatch
from algos.offpolicy.sac_update import SacUpdate
from algos.sac import RlpdConfig, SacConfig, SquashedActor
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.networks.critics import EnsembleConfig
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess
from policies.processes.squashed import TanhGaussianPolicy, TanhGaussianProcess

ROWS, COND, ACTION = 16, 3, 2
NET = MlpConfig(residual=False, hidden_dims=(8,), time_dim=4)
SMALL: dict[str, Any] = {
    "total_steps": 60, "warmup_steps": 0, "num_envs": 2, "steps_per_iteration": 3, "log_every": 1,
    "updates_per_step": 0.5, "batch_size": 8, "critic_dims": (8,),
}  # fmt: skip


def shape(
    process: Any = None, *, state: str = "identity", act_steps: int = 1, start: int = 0
) -> PolicyConfig:
    return PolicyConfig(
        process=process or TanhGaussianProcess(), backbone=NET, horizon=act_steps + start,
        act_steps=act_steps, action_start=start, normalizer={"state": state, "action": "limits"},
    )  # fmt: skip


def policy(obs_dim: int = COND, **config: Any) -> TanhGaussianPolicy:
    one = torch.ones(ACTION)
    box = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    made = build_policy(
        shape(**config), obs_dim=obs_dim, action_dim=ACTION, statistics={"action": box}, seed=3
    )
    assert isinstance(made, TanhGaussianPolicy)
    return made


def learner(config: SacConfig, critics: EnsembleConfig, actor: SquashedActor | None = None) -> SacUpdate:
    torch.manual_seed(0)
    actor = actor or SquashedActor(policy())
    cond_dim = actor.policy.encoder.cond_dim
    return SacUpdate(actor, critics.build(cond_dim, actor.latent_dim), config, of_chunks=True)


def batch(generator: torch.Generator) -> ChunkBatch:
    cond, next_cond = torch.randn(2, ROWS, COND, generator=generator)
    action = torch.rand(ROWS, ACTION, generator=generator) * 2 - 1
    reward, discount = torch.rand(2, ROWS, generator=generator)
    return ChunkBatch(cond, torch.zeros(ROWS, 0), action, reward, discount, next_cond)


# -- a step, written out --------------------------------------------------------------------------------


def distribution(head: nn.Module, cond: Tensor) -> TransformedDistribution:
    """The squashed Gaussian as torch has it, by its weights."""
    weights = dict(head.named_parameters())
    hidden = F.relu(F.linear(cond, weights["trunk.inlet.weight"], weights["trunk.inlet.bias"]))
    mean, log_std = F.linear(hidden, weights["trunk.layers.0.weight"], weights["trunk.layers.0.bias"]).chunk(
        2, 1
    )
    return TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))


def drawn(head: nn.Module, cond: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    law = distribution(head, cond)
    action = torch.tanh(law.base_dist.mean + law.base_dist.stddev * eps)
    return action, law.log_prob(action).sum(1)


def q_values(critic: Any, cond: Tensor, action: Tensor) -> Tensor:
    """Values (E, B), one member after the other."""
    found = []
    for e in range(critic.members):
        h = torch.cat([cond, action], 1)
        for i in range(len(critic.weight)):
            h = h @ critic.weight[i][e] + critic.bias[i][e]
            if i < len(critic.weight) - 1:
                if critic.config.layer_norm:
                    h = F.layer_norm(h, h.shape[-1:], critic.scale[i][e, 0], critic.shift[i][e, 0])
                h = F.relu(h)
        found.append(h[:, 0])
    return torch.stack(found)


CASES = {
    "sac": (SacConfig(target_entropy=-2.0, init_alpha=0.3), EnsembleConfig(2, (8,))),
    "rlpd": (
        SacConfig(
            target_entropy=-1.0, init_alpha=0.3, aggregate="subset_min", actor_aggregate="mean",
            entropy_in_target=False,
        ),
        EnsembleConfig(5, (8,), layer_norm=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_is_the_one_written_out_with_torch_distributions(name: str) -> None:
    rules, critics = CASES[name]
    ours = learner(rules, critics)
    generator = torch.Generator().manual_seed(1)
    rows, draws = batch(generator), ours.draw(ROWS, generator)
    head, critic, target = (
        copy.deepcopy(n) for n in (ours.actor.policy.head, ours.critic, ours.target_critic)
    )  # type: ignore[attr-defined]
    log_alpha = torch.tensor([rules.init_alpha]).log().requires_grad_(True)

    def adam_step(parameters: Any, loss: Tensor) -> None:
        optimizer = torch.optim.Adam(parameters, lr=3e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    alpha = rules.init_alpha
    _, log_prob = drawn(head, rows.cond, draws["eps"])
    adam_step([log_alpha], -(log_alpha * (log_prob.detach() + rules.target_entropy)).mean())
    with torch.no_grad():
        next_action, next_log_prob = drawn(head, rows.next_cond, draws["next_eps"])
        next_q = q_values(target, rows.next_cond, next_action)
        if rules.aggregate == "subset_min":
            next_q = next_q[draws["subset"]]
        y = next_q.min(0).values - (alpha * next_log_prob if rules.entropy_in_target else 0)
        y = rows.reward + rows.discount * y
    found = q_values(critic, rows.cond, rows.action)
    adam_step(critic.parameters(), 0.5 * ((found - y) ** 2).mean(1).sum())
    action, log_prob = drawn(head, rows.cond, draws["eps"])
    climbed = q_values(critic, rows.cond, action)
    climbed = climbed.mean(0) if rules.actor_aggregate == "mean" else climbed.min(0).values
    actor_loss = (alpha * log_prob - climbed).mean()
    adam_step(head.parameters(), actor_loss)

    torch.testing.assert_close(ours.target(rows, draws, torch.tensor(alpha)), y, rtol=0, atol=1e-5)
    reported = ours.step(rows, draws)
    assert float(reported["actor/loss"]) == pytest.approx(float(actor_loss.detach()), abs=1e-5)
    torch.testing.assert_close(ours.temperature.log, log_alpha, rtol=0, atol=1e-6)
    for mine, plain in ((ours.critic, critic), (ours.actor.policy.head, head)):  # type: ignore[attr-defined]
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for late, before, after in zip(
        ours.target_critic.parameters(), target.parameters(), critic.parameters(), strict=True
    ):
        torch.testing.assert_close(late, 0.995 * before + 0.005 * after, rtol=0, atol=1e-6)


# -- closed forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("terminated", "value"), [(0.0, 2.0), (1.0, 1.0)])
def test_values_look_beyond_time_limits_and_not_beyond_ends(terminated: float, value: float) -> None:
    """One state, reward 1, gamma 1/2: 1 + 1/2 + 1/4 + ... = 2 where no step ends the task, else 1."""
    rules = SacConfig(tau=0.2, target_entropy=0.0, entropy_in_target=False, critic_lr=1e-2)
    ours = learner(rules, EnsembleConfig(2, (8,)))
    cond, generator = torch.ones(ROWS, COND), torch.Generator().manual_seed(0)
    for _ in range(400):
        action = torch.rand(ROWS, ACTION, generator=generator) * 2 - 1
        discount = torch.full((ROWS,), 0.5 * (1 - terminated))
        rows = ChunkBatch(cond, action[:, :0], action, torch.ones(ROWS), discount, cond)
        ours.step(rows, ours.draw(ROWS, generator), updates_actor=False)
    found = ours.critic(cond, torch.zeros(ROWS, ACTION)).detach()
    torch.testing.assert_close(found, torch.full_like(found, value), rtol=0, atol=0.05)


@pytest.mark.skipif(not everything, reason="with --all: without it steered actors keep their entropy")
def test_a_bandit_is_solved_and_its_entropy_is_the_one_asked_for() -> None:
    """Reward -8 |a - a*|^2, one step: the mean goes to a*, the temperature keeps the target entropy."""
    best, target_entropy = torch.tensor([0.4, -0.3]), -2.0
    rules = SacConfig(
        tau=0.05, target_entropy=target_entropy, init_alpha=0.1, actor_lr=3e-3, critic_lr=3e-3, alpha_lr=1e-2
    )
    ours = learner(rules, EnsembleConfig(2, (32, 32)))
    generator, rows = torch.Generator().manual_seed(0), 64
    cond, zero = torch.ones(rows, COND), torch.zeros(rows)
    entropy = []
    for step in range(1000):
        draws = ours.draw(rows, generator)
        uniform = torch.rand(rows, ACTION, generator=generator) * 2 - 1
        with torch.no_grad():
            own = ours.actor.draw(cond, draws["next_eps"])[0]
        action = torch.where(torch.arange(rows)[:, None] % 2 == 0, own, uniform)
        reward = -8 * (action - best).square().sum(1)
        found = ours.step(ChunkBatch(cond, action[:, :0], action, reward, zero, cond), draws)
        entropy += [float(found["actor/entropy"])] if step >= 800 else []
    obs = torch.ones(1, 1, COND)
    torch.testing.assert_close(ours.policy.act(obs)[0, 0], best, rtol=0, atol=0.06)
    assert sum(entropy) / len(entropy) == pytest.approx(target_entropy, abs=0.2)


# -- runs -----------------------------------------------------------------------------------------------


def start(
    config: type[SacConfig] = SacConfig, setup: dict[str, Any] | None = None, **values: Any
) -> OffPolicyRun:
    parts: dict[str, Any] = {"policy": shape(act_steps=2), "env": PointEnv(limit=5), "seed": 5}
    parts |= {"num_workers": 0, "num_threads": 1}
    return config(**(SMALL | values)).build(Setup(**(parts | (setup or {}))))


def test_only_executed_rows_are_drawn_judged_and_remembered() -> None:
    made = policy(obs_dim=2, act_steps=2, start=1)
    run = start(setup={"init": made})
    assert run.learner.actor.latent_dim == 2 * ACTION
    run._collect()
    physical, record = Explorer(run.learner.actor, is_warmup=False).act(
        {"state": torch.zeros(4, 1, 2)}, torch.Generator().manual_seed(0)
    )
    assert physical.shape == (4, 2, ACTION) and torch.equal(record["latent"], record["action"])
    mean = torch.tanh(made.head(made.encode({"state": torch.zeros(4, 1, 2)}).vec)[0]).view(4, 3, ACTION)
    export_policy = run.snapshot().act(torch.zeros(4, 1, 2))
    torch.testing.assert_close(export_policy, mean[:, 1:].detach())
    run.close()


def test_a_fresh_policy_warms_up_uniformly_and_a_given_one_by_itself() -> None:
    eps = torch.randn(20_000, ACTION, generator=torch.Generator().manual_seed(0))
    made = policy()
    cond = torch.zeros(len(eps), COND)
    uniform = SquashedActor(made, is_fresh=True).warmup_latent(cond, eps)
    for edge in (-0.8, -0.2, 0.5):
        assert float((uniform < edge).float().mean()) == pytest.approx((edge + 1) / 2, abs=0.01)
    own = SquashedActor(made, is_fresh=False)
    assert torch.equal(own.warmup_latent(cond, eps), own.draw(cond, eps)[0])


def test_data_tell_the_scale_and_fill_their_share_of_batches_within_the_box() -> None:
    data = dataset(scale=1.5)
    run = start(
        RlpdConfig, {"dataset": data, "policy": shape(state="limits", act_steps=2)}, offline_ratio=0.25
    )
    low = data.observations.amin(0)
    torch.testing.assert_close(
        run.learner.policy.normalizer.encode("state", low), -torch.ones(2), rtol=0, atol=1e-5
    )
    run._collect()
    drawn_rows = run.source.draw(400, torch.Generator().manual_seed(0))
    assert int((drawn_rows.reward > 6).sum()) == 100  # rewards of the task are below 1
    assert data.actions.abs().max() > 1.2 and float(drawn_rows.action.abs().max()) == 1.0
    run.advance()
    run.close()


def test_only_a_policy_that_has_its_scales_has_no_use_for_a_dataset(caplog: pytest.LogCaptureFixture) -> None:
    setup = {"dataset": dataset(), "policy": shape(state="limits", act_steps=2)}
    first = start(setup=setup)
    assert "no batch takes rows" not in caplog.text
    start(setup={**setup, "init": first.snapshot()}).close()
    assert "no batch takes rows of the dataset" in caplog.text
    first.close()


def test_without_data_observations_must_be_taken_as_they_are() -> None:
    for mode in ("limits", "gaussian"):
        with pytest.raises(ConfigError, match=mentions(f"algo=sac state={mode} state=identity init=")):
            start(setup={"policy": shape(state=mode)})
    with pytest.raises(ConfigError, match=mentions("algo=rlpd offline_ratio=0.5 dataset= algo=sac")):
        start(RlpdConfig)
    with pytest.raises(ConfigError, match=mentions("algo.offline_ratio 0 algo=sac")):
        RlpdConfig(offline_ratio=0.0)


def test_another_kind_of_policy_is_refused_by_both_names() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=sac GaussianPolicy process=tanh_gaussian")):
        start(setup={"policy": shape(GaussianProcess())})


def test_targets_of_entropy_count_the_entries_of_an_executed_chunk() -> None:
    assert SacConfig().target_entropy_of(8) == -8
    assert RlpdConfig().target_entropy_of(8) == -4
    assert dataclasses.replace(SacConfig(), target_entropy=1.5).target_entropy_of(8) == 1.5


def test_a_point_is_driven_to_its_goal_after_a_few_hundred_steps() -> None:
    """From scratch: the untrained policy ends as far away as it began, the trained one at the goal."""
    run = start(
        setup={"policy": shape(), "env": PointEnv(limit=12)}, total_steps=450, warmup_steps=200,
        log_every=200, updates_per_step=1.0, batch_size=64, critic_dims=(32, 32), init_alpha=0.05,
        actor_lr=3e-3, critic_lr=3e-3, tau=0.02, gamma=0.9,
    )  # fmt: skip
    before = final_distance(run)
    while run.progress < run.total:
        run.advance()
    assert before > 0.6 and final_distance(run) < 0.2
    run.close()


def final_distance(run: OffPolicyRun) -> float:
    """Return how far from the goal the shipped policy ends, on average over starts."""
    place = torch.rand(50, 1, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for _ in range(12):
        place = place + 0.2 * run.snapshot().act(place).clamp(-1, 1)
    return float((place[:, 0] - torch.tensor([0.5, 0.0])).norm(dim=1).mean())


def test_what_values_are_stays_when_a_run_is_continued() -> None:
    setup = {"policy": shape(act_steps=2)}
    run = start(setup=setup)
    state = run.state_dict()
    with pytest.raises(CheckpointError, match=mentions("algo.critic_activation tanh")):
        start(setup=setup, critic_activation="tanh").load_state_dict(state)
    for name, changed in {"gamma": 0.5, "reward_scale": 2.0, "value_offset": 1.0}.items():
        with pytest.raises(CheckpointError, match=mentions(f"algo.{name} {changed}")):
            start(setup=setup, **{name: changed}).load_state_dict(state)
    older = {name: value for name, value in state.items() if name != "critic_activation"}
    start(setup=setup).load_state_dict(older)
    run.close()


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("bins", [0, 11])
def test_a_step_is_the_same_with_and_without_a_graph(bins: int, start: int) -> None:
    config = RlpdConfig(actor_every=1, critics=4, subset=2, actor_aggregate="mean_std")
    steps = []
    for has_graph in (False, True):
        actor = SquashedActor(policy(start=start))
        taken = learner(config, EnsembleConfig(4, (8,), "relu", True, bins=bins), actor)
        if has_graph:
            actor.draw_without_graph = lambda *given: None  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(1)
        given, draws = batch(generator), taken.draw(ROWS, generator)
        for _ in range(3):
            found = taken.step(given, draws)
        steps.append((found, list(actor.parameters())))
    (ours, weights), (other, expected) = steps
    assert ours.keys() == other.keys()
    for pair in [*zip(weights, expected, strict=True), *((ours[name], other[name]) for name in ours)]:
        torch.testing.assert_close(*pair, rtol=2e-4, atol=2e-5)
