"""Laws of critics that hold a histogram of returns: HL-Gauss and two-hot targets, who takes such critics."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from small_algorithms import dataset, init, noise_of, observed, saved, setup, small, weights
from torch import Tensor

from algos.critics.dqc import DqcConfig
from algos.critics.idql import IdqlConfig
from algos.critics.learner import ChunkCriticConfig
from algos.critics.losses import cross_entropy, histogram
from algos.critics.pa_rl import PaRlConfig
from algos.critics.qc import QcConfig
from algos.offline.loop import OfflineRun
from algos.offline.online import OnlineConfig
from policies import registry
from policies.errors import CheckpointError, ConfigError
from policies.networks.critics import EnsembleConfig
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.candidates import Candidates

LOW, HIGH, BINS = -2.0, 3.0, 20
WIDTH = (HIGH - LOW) / BINS
CRITICS = [
    name
    for name, part in registry.parts("algo").items()
    if issubclass(part, ChunkCriticConfig) and part is not DqcConfig
]
PROCESS = {"cfpi": "gaussian"}


def centres() -> Tensor:
    found = EnsembleConfig(bins=BINS, low=LOW, high=HIGH).centres()
    assert found is not None
    return found.double()


def histograms(values: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities of values, and their means."""
    probs = histogram(values, centres(), sigma)
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(values))
    assert bool((probs >= 0).all())
    return probs, probs @ centres()


# -- targets --------------------------------------------------------------------------------------------


def test_a_value_at_a_centre_is_one_hot_and_others_share_their_two_neighbours() -> None:
    probs, _ = histograms(centres(), 0.0)
    torch.testing.assert_close(probs, torch.eye(BINS, dtype=torch.float64))
    values = torch.linspace(LOW - 1, HIGH + 1, 301, dtype=torch.float64)
    probs, mean = histograms(values, 0.0)
    assert int((probs > 1e-12).sum(-1).max()) == 2
    torch.testing.assert_close(mean, values.clamp(LOW + WIDTH / 2, HIGH - WIDTH / 2))


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.75])
def test_the_mean_of_a_gaussian_target_is_its_value_up_to_the_known_bias(sigma: float) -> None:
    """Rounding leaves its first Fourier term, d/pi exp(-2 pi^2 sigma^2); the ends cut half of the mass."""
    inside = torch.linspace(LOW + 6 * sigma * WIDTH, HIGH - 6 * sigma * WIDTH, 301, dtype=torch.float64)
    _, mean = histograms(inside, sigma)
    bias = WIDTH / math.pi * math.exp(-2 * (math.pi * sigma) ** 2)
    assert bias / 2 < float((mean - inside).abs().max()) < 1.01 * bias + 1e-9
    ends = torch.tensor([LOW - 5, LOW, HIGH, HIGH + 5], dtype=torch.float64)
    probs, mean = histograms(ends, sigma)
    assert torch.equal(probs[0], probs[1]) and torch.equal(probs[2], probs[3])
    half = sigma * WIDTH * math.sqrt(2 / math.pi)  # the mean of half a normal distribution
    assert half <= float(mean[1]) - LOW <= half + WIDTH / 2
    assert float(mean[1]) - LOW == pytest.approx(HIGH - float(mean[2]))


def test_the_loss_is_least_where_the_critic_holds_the_target() -> None:
    probs, _ = histograms(torch.tensor([0.1, 2.2], dtype=torch.float64), 0.75)
    logits = torch.randn(3, 2, BINS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_(True)
    wanted = F.cross_entropy(logits.flatten(0, 1), probs.repeat(3, 1))
    torch.testing.assert_close(cross_entropy(logits, probs), wanted)
    (slope,) = torch.autograd.grad(cross_entropy(logits, probs), logits)
    torch.testing.assert_close(slope, (logits.softmax(-1) - probs) / 6)
    assert cross_entropy(probs.clamp(min=1e-30).log()[None], probs).item() < wanted.item()


# -- networks and policies ------------------------------------------------------------------------------


def test_a_value_is_the_mean_of_its_histogram_and_stays_in_the_range() -> None:
    net = EnsembleConfig(3, (8,), bins=BINS, low=LOW, high=HIGH).build(2, 2)
    cond, action = 50 * torch.randn(2, 9, 2, generator=torch.Generator().manual_seed(0))
    logits, values = net.outputs(cond, action), net(cond, action)
    assert logits.shape == (3, 9, BINS) and values.shape == (3, 9)
    torch.testing.assert_close(values, (logits.double().softmax(-1) @ centres()).float())
    assert bool((values > LOW).all() & (values < HIGH).all())
    torch.testing.assert_close(net(cond, action, members=1), values[:1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.mean(logits), values)
    assert set(net.state_dict()) == set(EnsembleConfig(3, (8,)).build(2, 2).state_dict())


def test_bins_without_a_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("critic.bins 0 2")):
        EnsembleConfig(bins=1)
    with pytest.raises(ConfigError, match=mentions("critic.high critic.low")):
        EnsembleConfig(bins=4, low=1.0)


def test_critics_that_value_all_alike_change_nothing() -> None:
    policy = Candidates(num_candidates=4, critic_dims=(8,), critic_bins=BINS).wrap(init("flow")).eval()
    assert policy.critic is not None
    with torch.no_grad():
        policy.critic.weight[-1].zero_()
    noise, cond = noise_of(policy), policy.encode({"state": observed()})
    assert torch.equal(policy.decode(cond, noise), policy.sampled(cond, noise)[:, 0])


# -- learning -------------------------------------------------------------------------------------------


def begin(algo: str, **values: Any) -> OfflineRun:
    bins = {"critic_bins": BINS, "value_max": 6.0}
    config = replace(small(registry.lookup("algo", algo)), **(bins | values))
    run: OfflineRun = config.build(setup(PROCESS.get(algo, "flow")))
    return run


@pytest.mark.parametrize("algo", CRITICS)
def test_every_algorithm_learns_such_critics_is_resumed_and_ships_them(algo: str, tmp_path: Path) -> None:
    run, again = begin(algo), begin(algo)
    first = run.learner.critic.weight[-1].detach().clone()
    found = run.advance()
    assert 0 < found["critic/loss"] < 2 * math.log(BINS) and 0 < found["critic/value"] < 6
    assert first.shape[-1] == BINS and not torch.equal(run.learner.critic.weight[-1], first)
    if value := getattr(run.learner, "value", None):  # V has no range
        assert value.weight[-1].shape[-1] == 1
    again.load_state_dict(saved(run))
    run.advance(), again.advance()
    policy = run.snapshot()
    assert torch.equal(weights(again.snapshot()), weights(policy))
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    noise = noise_of(policy)
    assert torch.equal(loaded.act(observed(), noise=noise), policy.act(observed(), noise=noise))


@pytest.mark.parametrize(
    ("algo", "first", "changes", "message"),
    [
        ("idql", {}, {"critic_bins": 0}, "algo.critic_bins 20 0"),
        ("idql", {}, {"value_max": 5.0}, "algo.value_max 6 5"),
        ("dqc", {"critic_bins": 0}, {"value_max": 5.0}, "algo.value_max 6 5"),
    ],
)
def test_a_run_goes_on_with_the_range_it_began_with(
    algo: str, first: Any, changes: Any, message: str
) -> None:
    state, other = saved(begin(algo, **first)), begin(algo, **first | changes)
    with pytest.raises(CheckpointError, match=mentions(message)):
        other.load_state_dict(state)


def test_a_chain_of_such_critics_has_a_histogram_for_each_target() -> None:
    run = begin("qc", iterate_every=4, chain_every=2)
    batch, draws = run.table.gather(torch.arange(8)), run.learner.draw(8, torch.Generator().manual_seed(0))
    target = run.learner.target(batch, draws)
    outputs, bins = run.learner.critic.outputs(batch.cond, batch.action), run.learner.critic.centres
    wanted = torch.stack(
        [F.cross_entropy(o, histogram(y, bins, 0.75)) for o, y in zip(outputs, target, strict=True)]
    )
    assert target.shape == (2, 8)
    torch.testing.assert_close(run.learner.update_critic(batch, target)["critic/loss"], wanted.mean())


def test_a_critic_finds_the_returns_of_its_data() -> None:
    """Without a future the return of a chunk is its reward, here the mean of two actions."""
    data = dataset()
    data = replace(data, rewards=data.actions.mean(dim=1))
    config = replace(
        small(IdqlConfig), gamma=0.0, steps=300, log_every=300, batch_size=64, critic_dims=(32,),
        critic_lr=1e-2, critic_bins=21, value_min=-1.0, refit=False,
    )  # fmt: skip
    run: OfflineRun = config.build(setup("flow", dataset=data, env=None))
    run.advance()
    batch = run.table.gather(torch.arange(len(run.table)))
    with torch.no_grad():
        error = (run.learner.critic(batch.cond, batch.action).mean(0) - batch.reward).square().mean()
    assert float(error) < 0.1 * float(batch.reward.var())


@pytest.mark.parametrize("part", [replace(small(QcConfig), critic_bins=5), small(DqcConfig)])
def test_targets_outside_the_range_are_counted_and_said_once(
    part: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(part, value_min=-9.0, value_max=0.5, gamma=0.0)
    run: OfflineRun = config.build(setup("flow"))
    rewards = run.table.gather(torch.arange(len(run.table))).reward
    with caplog.at_level(logging.WARNING):
        found = [run.advance()["critic/clipped_fraction"] for _ in range(2)]
    assert min(found) > 0.2 and bool((rewards > 0.5).any() & (rewards <= 0.5).any()) and max(found) < 0.9
    said = [record.getMessage() for record in caplog.records if "clipped" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{100 * found[0]:.3g} % of the targets")


def test_targets_are_counted_in_the_task_too(caplog: pytest.LogCaptureFixture) -> None:
    settings = OnlineConfig(num_envs=2, warmup_steps=0, buffer_size=64, exploration_std=0.1)
    config = replace(small(QcConfig), steps=0, online_steps=12, online=settings, critic_bins=5)
    run: OfflineRun = replace(config, value_min=5.0, value_max=6.0).build(setup("flow"))
    with caplog.at_level(logging.WARNING):
        while run.progress < run.total:
            found = run.advance()
    run.close()
    assert found["critic/clipped_fraction"] > 0.5 and caplog.text.count("are clipped") == 1


def test_who_takes_no_such_critics_and_ranges_without_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.critic_bins 0 logit")):
        DqcConfig(critic_bins=5)
    with pytest.raises(ConfigError, match=mentions("algo.critic_bins 0 2")):
        PaRlConfig(critic_bins=1)
    with pytest.raises(ConfigError, match=mentions("algo.value_max algo.value_min")):
        PaRlConfig(value_max=-1.0)
