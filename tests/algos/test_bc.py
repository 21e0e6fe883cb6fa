"""Behaviour cloning: what is learned, what is shipped, what is refused."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from two_modes import LEVEL, two_mode_dataset, two_mode_setup

from algos.base import Setup
from algos.bc import Bc, BcConfig
from algos.sources import Shuffle, Source
from algos.validation import Validation
from envs.datasets.episodes import EpisodeDataset
from envs.spec import EnvSpec
from policies.errors import CapabilityError, CheckpointError, ConfigError, DatasetError
from policies.gaussian import GaussianProcess
from policies.processes import RectifiedFlow, VPDiffusion
from policies.protocols import ChunkSpec
from policies.threads import torch_threads

PROCESSES = [
    pytest.param(VPDiffusion(num_levels=10), id="eps"),
    pytest.param(VPDiffusion(num_levels=10, prediction="x0"), id="x0"),
    pytest.param(VPDiffusion(num_levels=10, prediction="v"), id="v"),
    pytest.param(RectifiedFlow(), id="flow"),
    pytest.param(GaussianProcess(), id="gaussian"),
]


def tiny(**changes: Any) -> BcConfig:
    """A run of six gradient steps, reported in pairs."""
    values = {
        "steps": 6,
        "batch_size": 8,
        "block_steps": 2,
        "warmup_steps": 2,
        "validation_fraction": 0.0,
        "ema_every": 1,
    }
    return BcConfig(**{**values, **changes})


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def finish(algorithm: Bc) -> list[dict[str, Any]]:
    rows = []
    while algorithm.progress < algorithm.total:
        rows.append(dict(algorithm.advance()))
    return rows


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
@pytest.mark.parametrize("process", [RectifiedFlow(), VPDiffusion(num_levels=10, prediction="x0")])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_modes_are_learned_within_1500_steps(process: object, seed: int) -> None:
    config = BcConfig(
        steps=1500, batch_size=128, lr=3e-3, block_steps=500, validation_fraction=0.1, validation_samples=16
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


@pytest.mark.parametrize("stop_at", [2, 4])
@pytest.mark.parametrize("process", PROCESSES)
def test_continuation_is_bit_exact(process: object, stop_at: int) -> None:
    config = tiny(validation_fraction=0.1, validation_every=2)
    straight = config.build(two_mode_setup(process=process))
    expected = finish(straight)
    first = config.build(two_mode_setup(process=process))
    while first.progress < stop_at:
        first.advance()
    state = copy.deepcopy(first.state_dict())
    second = config.build(two_mode_setup(process=process))
    second.load_state_dict(state)
    got = finish(second)
    assert torch.equal(weights(second.policy), weights(straight.policy))
    assert torch.equal(weights(second.snapshot()), weights(straight.snapshot()))
    for row, other in zip(got, expected[-len(got) :], strict=True):
        assert {k: float(v) for k, v in row.items() if not k.startswith("time/")} == {
            k: float(v) for k, v in other.items() if not k.startswith("time/")
        }


def test_runs_of_a_seed_repeat_and_ignore_the_global_state() -> None:
    results = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        algorithm = tiny().build(two_mode_setup(3))
        finish(algorithm)
        results.append(weights(algorithm.policy))
    other = tiny().build(two_mode_setup(4))
    finish(other)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], weights(other.policy))


def test_snapshot_is_the_average_of_all_weights_so_far() -> None:
    algorithm = tiny(ema="delayed", ema_decay=0.75, ema_start=2, block_steps=1).build(two_mode_setup())
    average = weights(algorithm.policy)
    for step in range(6):
        algorithm.advance()
        decay = 0.0 if step < 2 else 0.75
        average = decay * average + (1 - decay) * weights(algorithm.policy)
        torch.testing.assert_close(weights(algorithm.snapshot()), average)
    assert not torch.allclose(weights(algorithm.snapshot()), weights(algorithm.policy))


def test_snapshot_stays_as_it_was_while_training_goes_on() -> None:
    algorithm = tiny().build(two_mode_setup())
    snapshot = algorithm.snapshot()
    before = weights(snapshot)
    finish(algorithm)
    assert torch.equal(weights(snapshot), before)
    assert not snapshot.training


def test_power_rule_changes_the_average_every_few_steps_only() -> None:
    algorithm = tiny(steps=9, ema="power", ema_every=2, block_steps=1).build(two_mode_setup())
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


def test_learning_rate_warms_up_then_falls_to_its_minimum() -> None:
    algorithm = tiny(steps=10, block_steps=1, lr=1.0e-3, min_lr=1.0e-4).build(two_mode_setup())
    rates = [row["policy/lr"] for row in finish(algorithm)]
    assert rates[:3] == pytest.approx([1e-4, 5.5e-4, 1e-3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 2e-4


def test_epochs_count_passes_over_the_windows() -> None:
    algorithm = tiny(epochs=2.0, batch_size=100).build(two_mode_setup(num_episodes=10, length=20))
    assert algorithm.total == 4


def test_padding_has_no_influence_on_the_loss() -> None:
    """Windows behind the end repeat the last action; the loss must not see those rows."""
    algorithm = tiny(batch_size=4).build(two_mode_setup(num_episodes=3, length=4))
    index = torch.tensor([3, 7, 11, 0])  # last frames of the episodes: one of two rows is padding
    batch = algorithm._source.gather(index)
    assert batch.mask.tolist() == [[True, False]] * 3 + [[True, True]]
    spoiled = replace(batch, action=torch.where(batch.mask.unsqueeze(-1), batch.action, 2.0 * batch.action))
    losses = []
    for other in (batch, spoiled):
        algorithm._generator.manual_seed(0)
        policy, te = algorithm.policy, None
        te = policy.sample_te(4, generator=algorithm._generator)
        action = policy.normalize_action(other.action)
        per_row = policy.matching_loss(policy.encode(other.obs), action, te, reduce="step")
        algorithm._generator.manual_seed(0)
        losses.append((algorithm._loss(other), per_row))
    loss, per_row = losses[0]
    torch.testing.assert_close(loss, per_row[batch.mask].mean())
    algorithm.config.dp_compat_mean = True
    algorithm._generator.manual_seed(0)
    torch.testing.assert_close(algorithm._loss(batch), per_row.mean())


def test_clipping_bounds_the_gradient() -> None:
    algorithm = tiny(max_grad_norm=1e-3, block_steps=1).build(two_mode_setup())
    algorithm.advance()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in algorithm.policy.parameters() if p.grad is not None]
    )
    assert norm <= 1.001e-3


def test_training_continues_from_a_given_policy_and_keeps_its_statistics() -> None:
    base = tiny().build(two_mode_setup()).snapshot()
    shifted = two_mode_dataset()
    shifted = replace(shifted, actions=shifted.actions * 3.0)
    setup = replace(two_mode_setup(), init=base, dataset=shifted)
    algorithm = tiny(lr=1e-5, min_lr=1e-5, block_steps=1).build(setup)
    assert torch.equal(weights(algorithm.snapshot()), weights(base))
    assert torch.equal(algorithm.policy.normalizer.action_scale, base.normalizer.action_scale)
    before = weights(base)
    finish(algorithm)
    assert torch.equal(weights(base), before)
    assert not torch.equal(weights(algorithm.policy), before)


def test_step_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = tiny().build(two_mode_setup())

    def refuse(*_: object) -> None:
        raise AssertionError("a training step waited for the device")

    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with pytest.raises(AssertionError, match="waited"):
        torch.ones(()).item()
    loss = algorithm._step(algorithm._source.gather(algorithm._shuffle.take(8)))
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


def test_continuing_on_other_data_is_refused_even_when_there_is_as_much_of_it() -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    actions = setup.dataset.actions.clone()
    actions[3, 0] += 1e-3
    with pytest.raises(CheckpointError, match="run on other data than"):
        tiny().build(replace(setup, dataset=replace(setup.dataset, actions=actions))).load_state_dict(state)
    moved = replace(setup.dataset, meta={"source": "elsewhere.hdf5"})
    tiny().build(replace(setup, dataset=moved)).load_state_dict(state)


def test_a_continued_run_takes_the_weight_decay_it_is_given() -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    algorithm = replace(tiny(), weight_decay=0.5).build(setup)
    algorithm.load_state_dict(state)
    assert algorithm._optimizer.param_groups[0]["weight_decay"] == 0.5


def test_continuing_on_another_number_of_threads_is_said(caplog: pytest.LogCaptureFixture) -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    tiny().build(setup).load_state_dict(state)
    assert "num_threads" not in caplog.text
    tiny().build(replace(setup, num_threads=2)).load_state_dict(state)
    assert "num_threads=1, now it is 2" in caplog.text


# -- validation -----------------------------------------------------------------------------------


def test_validation_is_in_physical_units_and_best_is_not_above_mean() -> None:
    setup = two_mode_setup()
    policy = tiny().build(setup).snapshot()
    source = Source(setup.dataset, policy.chunk, pad_end=True)
    found = Validation(source, num_windows=50, num_samples=3, seed=0).measure(policy)
    assert 0.0 < found["validation/action_mse_best"] <= found["validation/action_mse"]
    again = Validation(source, num_windows=50, num_samples=3, seed=0).measure(policy)
    assert found == again


def test_validation_of_the_demonstrator_itself_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = two_mode_setup()
    policy = tiny().build(setup).snapshot()
    validation = Validation(
        Source(setup.dataset, policy.chunk, pad_end=True), num_windows=9, num_samples=2, seed=0
    )
    truth = policy.normalize_action(validation._data.action).repeat_interleave(2, dim=0)
    truth[1::2] += 1.0  # the second sample of every window is one normalised unit off
    monkeypatch.setattr(policy, "decode", lambda cond, noise: truth)
    found = validation.measure(policy)
    unit = 1.0 / policy.normalizer.action_scale.item()
    assert float(found["validation/action_mse_best"]) == pytest.approx(0.0, abs=1e-10)
    assert float(found["validation/action_mse"]) == pytest.approx(unit**2 / 2.0, rel=1e-5)


def test_few_episodes_are_all_used_for_training() -> None:
    algorithm = tiny(validation_fraction=0.05).build(two_mode_setup(num_episodes=19))
    assert algorithm._source.num == 19 * 6
    assert not any(name.startswith("validation/") for row in finish(algorithm) for name in row)
    assert tiny(validation_fraction=0.05).build(two_mode_setup(num_episodes=20))._source.num == 19 * 6


# -- shuffling ------------------------------------------------------------------------------------


def test_every_index_is_used_once_per_pass() -> None:
    shuffle = Shuffle(10, torch.Generator().manual_seed(0))
    stream = torch.cat([shuffle.take(7) for _ in range(10)])
    for start in range(0, 70, 10):
        assert sorted(stream[start : start + 10].tolist()) == list(range(10))


def test_batch_larger_than_the_data_repeats_it() -> None:
    assert Shuffle(3, torch.Generator()).take(9).bincount().tolist() == [3, 3, 3]


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 6, 10, 11])
def test_shuffle_continues_anywhere_in_a_pass(taken: int) -> None:
    shuffle = Shuffle(10, torch.Generator().manual_seed(0))
    for _ in range(taken):
        shuffle.take(3)
    state = copy.deepcopy(shuffle.state_dict())
    expected = torch.cat([shuffle.take(3) for _ in range(9)])
    other = Shuffle(10, torch.Generator().manual_seed(1))
    other.take(5)
    other.load_state_dict(state)
    assert torch.equal(torch.cat([other.take(3) for _ in range(9)]), expected)


# -- refusals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedEnv:
    """An environment that is only described."""

    obs_dim: int = 2
    action_dim: int = 1

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="toy",
            family="toy",
            obs_dim=self.obs_dim,
            action_dim=self.action_dim,
            action_low=(-1.0,) * self.action_dim,
            action_high=(1.0,) * self.action_dim,
            max_episode_steps=10,
            control_hz=10.0,
            obs_names=("x",) * self.obs_dim,
            action_names=("a",) * self.action_dim,
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> Any:
        raise AssertionError("cloning needs no simulator")


def test_missing_dataset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algo=bc needs demonstrations.*dataset="):
        tiny().build(Setup())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (NamedEnv(action_dim=3), "env=toy has action width 3, but two-modes has action width 1"),
        (NamedEnv(obs_dim=5), "env=toy has observation width 5, but two-modes has observation width 2"),
    ],
)
def test_dataset_of_another_task_is_refused(env: NamedEnv, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny().build(replace(two_mode_setup(), env=env))


def test_dataset_that_does_not_fit_the_initial_policy_is_refused() -> None:
    base = tiny().build(two_mode_setup()).snapshot()
    data = two_mode_dataset()
    wide = replace(data, actions=data.actions.expand(-1, 2).contiguous())
    with pytest.raises(
        ConfigError, match="policy of init has action width 1, but two-modes has action width 2"
    ):
        tiny().build(replace(two_mode_setup(), init=base, dataset=wide))


def test_episodes_shorter_than_a_chunk_are_refused_without_padding() -> None:
    setup = two_mode_setup(length=1)
    with pytest.raises(DatasetError, match="chunk of 2"):
        tiny(pad_end=False).build(setup)
    finish(tiny(pad_end=True).build(setup))


def test_nan_in_the_data_is_refused_before_training() -> None:
    data = two_mode_dataset()
    actions = data.actions.clone()
    actions[7] = torch.nan
    with pytest.raises(DatasetError, match=r"'actions' must be finite.*7"):
        tiny().build(replace(two_mode_setup(), dataset=replace(data, actions=actions)))


def test_policy_without_a_matching_loss_is_refused() -> None:
    class Silent(torch.nn.Module):
        obs_dim, goal_dim, chunk = 2, 0, ChunkSpec(1, 2, 2)

        def clone(self) -> Silent:
            return self

    with pytest.raises(CapabilityError, match="cloning needs a policy with a matching loss; Silent has none"):
        tiny().build(replace(two_mode_setup(), init=Silent()))  # type: ignore[arg-type]


def test_checkpoint_of_other_data_or_length_is_refused() -> None:
    state = tiny().build(two_mode_setup()).state_dict()
    with pytest.raises(CheckpointError, match="run on other data than"):
        tiny().build(two_mode_setup(num_episodes=10)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="240 windows; this dataset gives"):
        tiny(pad_end=False).build(two_mode_setup()).load_state_dict(state)
    with pytest.raises(CheckpointError, match="run of 6 gradient steps, this one has 8"):
        tiny(steps=8).build(two_mode_setup()).load_state_dict(state)


def test_another_seed_or_start_is_refused_on_resuming() -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    with pytest.raises(
        CheckpointError, match=rf"seed must stay .*: {setup.seed}; got {setup.seed + 1}\. Res"
    ):
        tiny().build(replace(setup, seed=setup.seed + 1)).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"policy to start from \(init\) must stay .*: None; got"):
        tiny().build(replace(setup, init=tiny().build(setup).snapshot())).load_state_dict(state)
    old = {name: value for name, value in state.items() if name not in ("seed", "init")}
    tiny().build(replace(setup, seed=setup.seed + 1)).load_state_dict(old)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("epochs", 0.0),
        ("epochs", math.nan),
        ("epochs", math.inf),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("min_lr", 1.0),
        ("warmup_steps", 6),
        ("weight_decay", -1.0),
        ("weight_decay", math.inf),
        ("max_grad_norm", 0.0),
        ("ema", "sometimes"),
        ("ema_decay", 1.0),
        ("validation_fraction", 1.0),
        ("validation_every", -1),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"algo.{name} must be"):
        tiny(**{name: value}).build(two_mode_setup())


def test_dataset_type_is_what_the_setup_promises() -> None:
    assert isinstance(two_mode_setup().dataset, EpisodeDataset)
