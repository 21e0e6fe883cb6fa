"""Wrapped policies, the correction of actions and the perturbation it is tested with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from messages import mentions
from small_policies import observations, small_policy
from torch import Tensor

from policies.errors import CheckpointError, ConfigError
from policies.export.export import export_onnx
from policies.policy import Policy
from policies.processes.deterministic import DeterministicProcess
from policies.processes.flow import RectifiedFlow
from policies.samplers.ode import Euler
from policies.storage.policy_folder import CONFIG, load_policy, read_config, save_policy
from policies.wrappers.score_correction import CorrectedPolicy, Correction, Perturbation, within

SMALL = Correction(hidden_dims=(16, 16), dynamics_dims=(16,), steps=3, eta=0.5, eta_state=0.3)


def bases() -> list[Policy]:
    return [small_policy(DeterministicProcess()), small_policy(RectifiedFlow())]


def corrected(base: Policy, config: Correction = SMALL) -> CorrectedPolicy:
    torch.manual_seed(0)
    policy = config.wrap(base).eval()
    policy.gate.fill_(-1.0)
    return policy


def act(policy: Policy, n: int = 5) -> Tensor:
    noise = policy.sample_noise(n, generator=torch.Generator().manual_seed(1))
    return policy.act(observations(n), noise=noise)


@pytest.mark.parametrize("index", [0, 1])
def test_without_a_step_the_policy_is_unchanged_bit_by_bit(index: int) -> None:
    base = bases()[index]
    off = Correction(eta=0.0, hidden_dims=(16,), dynamics_dims=(16,))
    assert torch.equal(act(corrected(base, off)), act(base))
    assert not torch.equal(act(corrected(base)), act(base))


def test_a_closed_gate_leaves_actions_alone() -> None:
    base = bases()[0]
    policy = corrected(base)
    policy.gate.fill_(math.inf)
    assert torch.equal(act(policy), act(base))


def test_a_policy_in_double_precision_is_corrected_in_it() -> None:
    assert act(corrected(bases()[1].double())).dtype == torch.float64


def test_only_the_executed_rows_change() -> None:
    base = bases()[1]
    policy, obs = corrected(base), observations(4)
    noise = policy.sample_noise(4, generator=torch.Generator().manual_seed(1))
    cond = policy.encode(policy.observation(obs))
    changed = policy.decode(cond, noise) != base.decode(cond, noise)
    assert changed[:, base.chunk.executed].any() and not changed[:, base.chunk.executed.stop :].any()


def test_no_action_moves_further_than_the_radius() -> None:
    generator = torch.Generator().manual_seed(0)
    origin, moved = torch.randn(50, 6, generator=generator), torch.randn(50, 6, generator=generator)
    bound = within(moved, origin, 0.2)
    distance = (bound - origin).square().mean(1).sqrt()
    assert (distance <= 0.2 + 1e-6).all() and (distance > 0.19).any()
    near = origin + 0.01
    torch.testing.assert_close(within(near, origin, 0.2), near)
    assert within(moved, origin, None) is moved


@pytest.mark.parametrize("index", [0, 1])
def test_a_wrapped_policy_is_saved_and_acts_the_same(index: int, tmp_path: Path) -> None:
    policy = corrected(bases()[index])
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(loaded, CorrectedPolicy) and loaded.wrapper == policy.wrapper
    assert torch.equal(act(loaded), act(policy))


def test_wrappers_nest_in_the_order_of_the_directory(tmp_path: Path) -> None:
    inner = Perturbation(std=0.2).wrap(bases()[0])
    policy = corrected(inner)
    place = save_policy(policy, tmp_path / "policy")
    assert [one["name"] for one in read_config(place)["wrappers"]] == ["perturbation", "correction"]
    assert torch.equal(act(load_policy(place)), act(policy))


@pytest.mark.parametrize("sigma", [0.1, 0.5])
def test_scores_are_the_noise_that_is_found_over_its_deviation_downwards(sigma: float) -> None:
    policy, generator = corrected(bases()[0]), torch.Generator().manual_seed(2)
    state = torch.randn(7, len(policy.mean), generator=generator)
    action = torch.randn(7, policy.chunk.width, generator=generator)
    expected = -policy.noise_in(state, action, sigma) / sigma
    torch.testing.assert_close(torch.cat(policy.scores(state, action, sigma), dim=1), expected)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    policy, obs = corrected(bases()[1]), observations(2)
    noise = policy.sample_noise(2, generator=torch.Generator().manual_seed(1))
    both = policy.act(obs, noise=noise)
    alone = torch.cat([policy.act(obs[i : i + 1], noise=noise[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(both, alone, rtol=1e-5, atol=1e-6)


def test_a_corrected_policy_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    policy = corrected(small_policy(RectifiedFlow(), Euler(steps=1)), replace(SMALL, steps=1))
    report = export_onnx(policy, tmp_path / "exported", latency_batches=())
    assert report.parity and report.worst < 1e-5


def test_noise_is_added_to_a_policy_that_has_none() -> None:
    base = bases()[0]
    policy = Perturbation(std=0.3).wrap(base)
    assert policy.noise_sensitive and policy.noise_shape == base.chunk.shape
    cond = policy.encode(policy.observation(observations(3)))
    noise = policy.sample_noise(3, generator=torch.Generator().manual_seed(1))
    expected = (base.decode(cond, noise) + 0.3 * noise).clamp(-1, 1)
    assert torch.equal(policy.decode(cond, noise), expected)
    with pytest.raises(ConfigError, match=mentions("noise")):
        Perturbation().wrap(bases()[1])


@pytest.mark.parametrize(
    "wrapper",
    [{"name": "os.system"}, {"name": "correction", "eta": "1"}, {"name": "correction", "wrong": 1}, 3],
)
def test_wrappers_that_are_none_are_refused(wrapper: object, tmp_path: Path) -> None:
    place = save_policy(corrected(bases()[0]), tmp_path / "policy")
    (place / "SHA256SUMS").unlink()
    data = json.loads((place / CONFIG).read_text())
    data["wrappers"] = [wrapper]
    (place / CONFIG).write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"wrapper|correction|eta|wrong"):
        load_policy(place)
