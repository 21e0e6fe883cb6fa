"""Demonstrations in on-policy updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from point_env import PointEnv
from test_trust_region import RATIOS, SIZES

from algos.base import Setup
from algos.onpolicy import demonstrations
from algos.onpolicy.ppo_update import GeneratorDraws
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from policies.errors import CheckpointError, ConfigError
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess


def dataset(seed: int = 0, reward: float = 0.0) -> EpisodeDataset:
    generator = torch.Generator().manual_seed(seed)
    states, actions = torch.rand(12, 2, generator=generator), torch.rand(11, 2, generator=generator) - 0.5
    episode = Episode(
        states.numpy(), actions.numpy(), torch.full((11,), reward).numpy(), terminated=False, truncated=True
    )
    return EpisodeDataset.from_episodes([episode], meta={"source": "points"})


def make_run(name: str, *, data: EpisodeDataset | None, **changes: Any) -> Any:
    config, init = RATIOS[name]
    setup = Setup(env=PointEnv(), init=init(), dataset=data, seed=5, num_workers=0, num_threads=1)
    return replace(config, **(SIZES | changes)).build(setup)


def gradient(run: Any, experience: Any) -> tuple[torch.Tensor, Any]:
    draws = GeneratorDraws(torch.Generator().manual_seed(3))
    grads, metrics = run.learner.actor_gradient(experience, torch.arange(len(experience)), draws=draws)
    return torch.cat([grad.flatten() for grad in grads]), metrics


def test_the_gradient_is_the_sum_of_both() -> None:
    with_data, without = (
        make_run("gaussian", data=dataset(), demo_weight=0.3),
        make_run("gaussian", data=None),
    )
    experience = without.experience(without.collect())
    both, metrics = gradient(with_data, experience)
    plain, before = gradient(without, experience)
    run = with_data.learner
    loss = run.demonstrations.draw(torch.Generator().manual_seed(3))()
    own = torch.autograd.grad(loss, run.actor, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(both, plain + 0.3 * torch.cat([part.flatten() for part in own]))
    assert "policy/demo_loss" not in before and metrics["policy/demo_loss"] == loss
    with_data.close()
    without.close()


@pytest.mark.parametrize("name", RATIOS)
def test_every_kind_of_policy_comes_closer_to_them(name: str) -> None:
    run = make_run(name, data=dataset(), demo_weight=100.0, update_epochs=4, actor_lr=5e-3, target_kl=None)

    def loss() -> float:
        draws = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return sum(float(run.learner.demonstrations.draw(draws)()) for _ in range(4))

    before = loss()
    run.advance()
    assert loss() < before
    run.close()


def test_the_critics_gradient_is_the_sum_of_both() -> None:
    both, alone = (make_run("gaussian", data=dataset(), demo_value_weight=w, gamma=0.9) for w in (0.3, 0.0))
    experience = alone.experience(alone.collect())
    both.collect()
    both.scaler.load_state_dict(alone.scaler.state_dict())
    index, learner = torch.arange(len(experience)), both.learner
    table = both.learner.recorded._table
    batch = table.gather(table.draw(256, torch.Generator().manual_seed(3)))
    value, later = learner.critic(batch.cond), learner.critic(batch.next_cond).detach()
    reward = batch.reward / (alone.scaler.var + 1e-8).sqrt().float()
    loss = (value - reward - 0.9 * batch.discount * later).square().mean() / 2
    own = torch.autograd.grad(loss, learner.critic_params)
    found, _ = learner.critic_gradient(experience, index)
    draws = GeneratorDraws(torch.Generator().manual_seed(3))
    torch._foreach_add_(found, learner.recorded_gradient(learner.recorded, draws))
    plain, _ = alone.learner.critic_gradient(experience, index)
    for one, before, more in zip(found, plain, own, strict=True):
        torch.testing.assert_close(one, before + 0.3 * alone.config.vf_coef * more)
    both.close()
    alone.close()


def test_the_critic_learns_what_was_recorded() -> None:
    data = dataset(reward=3.0)
    run = make_run("gaussian", data=data, demo_value_weight=50.0, update_epochs=20, critic_lr=5e-3, gamma=0.5)

    def error() -> float:
        draws = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return float(run.learner.recorded.draw(run.learner.critic, draws)().mean())

    before = error()
    run.advance()
    assert error() < 0.1 * before
    run.close()


def test_recorded_chunks_are_tabulated_where_the_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EpisodeDataset] = []
    monkeypatch.setattr(demonstrations, "tabulate", lambda data, *_: seen.append(data))
    _, init = RATIOS["gaussian"]
    demonstrations.RecordedValues(dataset(), init().to("meta"), 0.9, lambda reward: reward)
    assert seen[0].rewards.device.type == "meta"


def test_values_of_a_new_policys_data_are_refused() -> None:
    config, _ = RATIOS["gaussian"]
    modes = {"state": "gaussian", "goal": "limits", "action": "limits"}
    policy = PolicyConfig(process=GaussianProcess(), horizon=1, act_steps=1, normalizer=modes)
    setup = Setup(env=PointEnv(), policy=policy, dataset=dataset(), seed=5, num_workers=0, num_threads=1)
    with pytest.raises(ConfigError, match=mentions("algo.demo_value_weight 0 init normaliser")):
        replace(config, **SIZES, demo_value_weight=1.0).build(setup)


def test_what_is_missing_or_other_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("demonstrations algo.demo_weight=0.1 dataset=<file>")):
        make_run("gaussian", data=None, demo_weight=0.1)
    first, other = (make_run("gaussian", data=dataset(seed), demo_weight=0.1) for seed in (0, 1))
    with pytest.raises(CheckpointError, match="dataset"):
        other.load_state_dict(first.state_dict())
    first.close()
    other.close()
