"""Behaviour cloning: what is learned and what is shipped."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pairwise import repeated
from small_algorithms import dataset, setup, small
from small_cloning import PROCESSES, finish, tiny, weights
from two_modes import LEVEL, two_mode_dataset, two_mode_setup

from algos.bc import BcConfig
from algos.cloning.planners import DecisionDiffuserConfig
from envs.datasets.episodes import EpisodeDataset, split_episodes
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.threads import torch_threads


@pytest.mark.parametrize("process", PROCESSES)
def test_every_process_trains_and_reports(process: object) -> None:
    algorithm = tiny(validation_fraction=0.1, validation_every=4).build(two_mode_setup(process=process))
    before = weights(algorithm.policy)
    rows = finish(algorithm)
    assert [sorted(k for k in row if k.startswith("validation/")) for row in rows] == [
        [],
        ["validation/action_mse", "validation/action_mse_best", "validation/loss"],
        ["validation/action_mse", "validation/action_mse_best", "validation/loss"],
    ]
    for row in rows:
        assert torch.isfinite(torch.as_tensor([float(v) for v in row.values()])).all()
    assert not torch.equal(weights(algorithm.policy), before)
    action = algorithm.snapshot().act(torch.zeros(3, 1, 2), generator=torch.Generator().manual_seed(0))
    assert action.shape == (3, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("process", repeated([VPDiffusion(num_levels=10, prediction="x0"), RectifiedFlow()]))
@pytest.mark.parametrize("seed", repeated([0, 1, 2]))
def test_both_modes_are_learned_within_450_steps(process: object, seed: int) -> None:
    config = BcConfig(
        steps=450, batch_size=64, lr=3e-3, log_every=150, validation_fraction=0.1, validation_samples=16
    )
    algorithm = config.build(two_mode_setup(seed, process=process, width=64))
    last = finish(algorithm)[-1]
    x = torch.linspace(-0.9, 0.9, 200)
    obs = torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)
    action = algorithm.snapshot().act(obs, generator=torch.Generator().manual_seed(seed)).squeeze(-1)
    error = (action.abs() - (LEVEL + 0.2 * x).unsqueeze(1)).abs()
    assert error.median() < 0.15
    assert 0.3 < (action[:, 0] > 0).float().mean() < 0.7
    assert (action[:, 0].sign() == action[:, 1].sign()).float().mean() > 0.95
    assert last["validation/action_mse_best"] < 0.5
    assert last["validation/action_mse"] > 2.0  # half of the samples take the other mode


def test_gaussian_policy_averages_the_modes_and_validation_says_so() -> None:
    config = BcConfig(steps=300, batch_size=64, lr=3e-3, validation_fraction=0.1)
    last = finish(config.build(two_mode_setup(process=GaussianProcess())))[-1]
    assert last["validation/action_mse_best"] > 2.0


def test_training_continues_from_a_given_policy_and_keeps_its_statistics() -> None:
    base = tiny().build(two_mode_setup()).snapshot()
    shifted = two_mode_dataset()
    shifted = replace(shifted, actions=shifted.actions * 3.0)
    setup = replace(two_mode_setup(), init=base, dataset=shifted)
    algorithm = tiny(lr=1e-5, min_lr=1e-5, log_every=1).build(setup)
    assert torch.equal(weights(algorithm.snapshot()), weights(base))
    assert torch.equal(algorithm.policy.normalizer.action_scale, base.normalizer.action_scale)
    before = weights(base)
    finish(algorithm)
    assert torch.equal(weights(base), before)
    assert not torch.equal(weights(algorithm.policy), before)


def test_few_episodes_are_all_used_for_training() -> None:
    algorithm = tiny(validation_fraction=0.05).build(two_mode_setup(num_episodes=19))
    assert algorithm._source.num == 19 * 6
    assert not any(name.startswith("validation/") for row in finish(algorithm) for name in row)
    assert tiny(validation_fraction=0.05).build(two_mode_setup(num_episodes=20))._source.num == 19 * 6
    of_hundred = tiny(validation_fraction=0.29).build(two_mode_setup(num_episodes=100, length=2))
    assert of_hundred._source.num == 71 * 2, "100 * 0.29 is 28.999… as a float"


@pytest.mark.parametrize(("held_out", "others", "windows"), [(1, 3, 9 * 2), (3, 1, 2)])
def test_held_out_episodes_that_are_too_short_or_all_that_are_not_leave_validation_out(
    held_out: int, others: int, windows: int, caplog: pytest.LogCaptureFixture
) -> None:
    given = two_mode_setup(num_episodes=10)
    lengths = torch.full((10,), others)
    lengths[split_episodes(10, 0.1, given.seed)[1]] = held_out
    frames = int(lengths.sum())
    data = EpisodeDataset.from_arrays(
        torch.rand(frames, 2), torch.rand(frames, 1), torch.zeros(frames), torch.zeros(frames), None,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )  # fmt: skip
    algorithm = tiny(pad_end=False, validation_fraction=0.1).build(replace(given, dataset=data))
    assert algorithm._source.num == windows and "no validation" in caplog.text
    assert not any(name.startswith("validation/") for row in finish(algorithm) for name in row)


# -- a step -------------------------------------------------------------------------------------------


def test_learning_rate_warms_up_then_falls_to_its_minimum() -> None:
    algorithm = tiny(steps=10, log_every=1, lr=1.0e-3, min_lr=1.0e-4).build(two_mode_setup())
    rates = [row["policy/lr"] for row in finish(algorithm)]
    assert rates[:3] == pytest.approx([1e-4, 5.5e-4, 1e-3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 2e-4


def test_epochs_count_passes_over_the_windows() -> None:
    algorithm = tiny(epochs=2.0, batch_size=100).build(two_mode_setup(num_episodes=10, length=20))
    assert algorithm.total == 4


def test_rows_of_padding_are_not_averaged_over() -> None:
    """Windows behind the end repeat the last action; the loss is not that of those rows."""
    algorithm = tiny(batch_size=4).build(two_mode_setup(num_episodes=3, length=4))
    batch = algorithm._source.gather(
        torch.tensor([3, 7, 11, 0])
    )  # three last frames: half of each is padding
    assert batch.mask.tolist() == [[True, False]] * 3 + [[True, True]]
    policy = algorithm.policy
    te = policy.sample_te(4, generator=torch.Generator().manual_seed(0))
    action, cond = policy.normalize_action(batch.action), policy.encode(batch.obs)
    per_row = policy.matching_loss(cond, action, te, reduce="step")
    expected = {False: per_row[batch.mask].mean(), True: per_row.mean()}
    assert not torch.isclose(expected[False], expected[True], rtol=0.01)
    for compat, loss in expected.items():
        algorithm.config.dp_compat_mean = compat
        torch.testing.assert_close(algorithm._loss(batch, te), loss)


def test_inverse_dynamics_learn_no_pair_of_states_behind_an_end() -> None:
    config = replace(small(DecisionDiffuserConfig), pad_end=True)
    algorithm = config.build(setup("diffusion", init=None, dataset=dataset(3, 4)))
    te = algorithm.policy.sample_te(1, generator=torch.Generator().manual_seed(0))
    norms = []
    for frame in (3, 2):
        batch = algorithm._source.gather(torch.tensor([frame]))
        assert batch.mask.sum() == 4 - frame
        loss, weights = algorithm._loss(batch, te), list(algorithm.policy.inverse.parameters())
        norms.append(float(torch.nn.utils.get_total_norm(torch.autograd.grad(loss, weights))))
    assert norms[0] == 0 < norms[1]


def test_clipping_bounds_the_gradient() -> None:
    algorithm = tiny(max_grad_norm=1e-3, log_every=1).build(two_mode_setup())
    algorithm.advance()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in algorithm.policy.parameters() if p.grad is not None]
    )
    assert norm <= 1.001e-3


def test_step_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = tiny().build(two_mode_setup())

    def refuse(*_: object) -> None:
        raise AssertionError("a training step waited for the device")

    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with pytest.raises(AssertionError, match="waited"):
        torch.ones(()).item()
    loss = algorithm._step(algorithm._source.gather(algorithm._stream.take(8)))
    monkeypatch.undo()
    assert math.isfinite(loss.item())


@pytest.mark.parametrize(("given", "expected"), [(None, 1), (1, 1), (3, 3)])
def test_torch_uses_the_threads_that_training_is_given(given: int | None, expected: int) -> None:
    seen = []
    algorithm = tiny().build(replace(two_mode_setup(), num_threads=given))
    field = algorithm.policy.field
    field.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    with torch_threads(2):
        algorithm.advance()
        assert torch.get_num_threads() == 2
    assert set(seen) == {expected}


# -- the average of the weights -----------------------------------------------------------------------


def test_snapshot_is_the_average_of_all_weights_so_far() -> None:
    algorithm = tiny(ema="delayed", ema_decay=0.75, ema_start=2, log_every=1).build(two_mode_setup())
    average = weights(algorithm.policy)
    for step in range(6):
        algorithm.advance()
        decay = 0.0 if step < 2 else 0.75
        average = decay * average + (1 - decay) * weights(algorithm.policy)
        torch.testing.assert_close(weights(algorithm.snapshot()), average)
    assert not torch.allclose(weights(algorithm.snapshot()), weights(algorithm.policy))


def test_power_rule_changes_the_average_every_few_steps_only() -> None:
    algorithm = tiny(steps=9, ema="power", ema_every=2, log_every=1).build(two_mode_setup())
    average = weights(algorithm.policy)
    decays = [0.0, None, 0.0, None, 1 - 2**-0.75, None, 1 - 3**-0.75, None, 1 - 4**-0.75]
    for decay in decays:
        algorithm.advance()
        if decay is not None:
            average = decay * average + (1 - decay) * weights(algorithm.policy)
        torch.testing.assert_close(weights(algorithm.snapshot()), average)


def test_power_rule_only_copies_until_its_start() -> None:
    algorithm = tiny(ema_start=100).build(two_mode_setup())
    finish(algorithm)
    assert torch.equal(weights(algorithm.snapshot()), weights(algorithm.policy))
