"""RECAP: labels, the guided policy, starts from a clone, resuming, learning from mixed data."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything
from small_algorithms import dataset, finished, init, mixed, observed, policy_config, setup, small

from algos.cloning.advantage_labels import is_positive
from algos.cloning.recap import Recap, RecapConfig, with_goal
from algos.training.serialization import from_plain, to_plain
from policies.backbones.dp_transformer import DpTransformerConfig
from policies.backbones.mlp import MlpConfig
from policies.backbones.transformer import TransformerConfig
from policies.backbones.unet1d import Unet1dConfig
from policies.build import build_policy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.policy import Policy
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.advantage import Advantage, AdvantagePolicy


def begin(process: str = "flow", config: RecapConfig | None = None, **changes: Any) -> Recap:
    return (config or small(RecapConfig)).build(setup(process, **changes))


def labelled(process: str = "flow") -> Any:
    """Return a policy whose label has an effect."""
    policy = with_goal(init(process), 1, 0.1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    return policy


# -- the policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", ["flow", "diffusion", "edm"])
def test_weight_zero_is_the_policy_without_label_and_one_is_the_label_bit_by_bit(process: str) -> None:
    base = labelled(process)
    noise = base.sample_noise(5, generator=torch.Generator().manual_seed(1))
    for weight, label in ((0.0, 0.0), (1.0, 1.0)):
        cond = base.encode({"state": observed(), "goal": torch.full((5, 1), label)})
        wanted = base.executed(base.decode(cond, noise)).detach()
        assert torch.equal(Advantage(weight).wrap(base).act(observed(), noise=noise), wanted)
    again = Advantage(2.0).wrap(base).with_guidance(0.0)
    assert torch.equal(
        again.act(observed(), noise=noise), Advantage(0.0).wrap(base).act(observed(), noise=noise)
    )


def test_weights_between_and_beyond_differ() -> None:
    policy = Advantage().wrap(labelled())
    noise = policy.sample_noise(5, generator=torch.Generator().manual_seed(1))
    found = [policy.with_guidance(w).act(observed(), noise=noise) for w in (0.0, 0.5, 1.0, 2.0)]
    assert all(not torch.equal(a, b) for a, b in pairwise(found))


BACKBONES = {
    "mlp": MlpConfig(width=8, time_dim=4),
    "encoded": MlpConfig(width=8, time_dim=4, cond_dims=(6, 5)),
    "unet1d": Unet1dConfig(widths=(8, 8), groups=2, kernel=3, time_dim=8),
    "transformer": TransformerConfig(width=8, depth=1, heads=2),
    "dp_transformer": DpTransformerConfig(width=8, depth=1, heads=2),
}


@pytest.mark.parametrize("name", list(BACKBONES))
def test_a_new_label_changes_nothing(name: str) -> None:
    config = replace(policy_config("flow"), backbone=BACKBONES[name], horizon=4)
    modes = {"state": "identity", "action": "identity"}
    policy = build_policy(replace(config, normalizer=modes), obs_dim=2, action_dim=2, seed=3)
    wide, noise = (
        with_goal(policy, 1, 0.1),
        policy.sample_noise(5, generator=torch.Generator().manual_seed(1)),
    )
    for label in (-1.0, 0.0, 1.0):
        obs = {"state": observed(), "goal": torch.full((5, 1), label)}
        found = wide.act(obs, noise=noise)
        torch.testing.assert_close(found, policy.act(observed(), noise=noise), rtol=0, atol=1e-5)


def test_the_policy_is_a_directory_without_a_label(tmp_path: Path) -> None:
    policy = Advantage(1.5).wrap(labelled().with_sampler(Euler(steps=2))).eval()
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    noise = policy.sample_noise(5, generator=torch.Generator().manual_seed(1))
    assert isinstance(again, AdvantagePolicy) and again.goal_dim == 0 and again.wrapper.guidance == 1.5
    assert torch.equal(again.act(observed(), noise=noise), policy.act(observed(), noise=noise))


@pytest.mark.skipif(not everything, reason="with --all: without it other guided policies are exported")
def test_the_policy_is_a_graph_without_a_label(tmp_path: Path) -> None:
    policy = Advantage(1.5).wrap(labelled().with_sampler(Euler(steps=2))).eval()
    noise = policy.sample_noise(5, generator=torch.Generator().manual_seed(1))
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    from policies.export.export import export_onnx
    from policies.runner import MODEL

    export_onnx(policy, tmp_path / "out", latency_batches=())
    graph = onnxruntime.InferenceSession(tmp_path / "out" / MODEL)
    found = graph.run(["action"], {"observation": observed().numpy(), "noise": noise.numpy()})[0]
    np.testing.assert_allclose(found, policy.act(observed(), noise=noise).numpy(), atol=1e-5)


# -- a run ----------------------------------------------------------------------------------------------


def test_values_come_first_and_then_all_frames_have_a_label() -> None:
    run = begin(config=replace(small(RecapConfig), value_steps=4, positive_fraction=0.25))
    before, seen = run.snapshot(), {}
    while run.labels is None:
        seen |= run.advance()
    noise = before.sample_noise(5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(before.act(observed(), noise=noise), run.snapshot().act(observed(), noise=noise))
    assert run.progress == 4 and run.total == 10 and run.labels.shape == (200, 1)
    assert set(run.labels.flatten().tolist()) == {-1.0, 1.0} and (run.labels > 0).sum() == 50
    assert float(seen["labels/positive_fraction"]) == pytest.approx(0.25)
    only = begin(config=replace(small(RecapConfig), negative_label=False))
    only.advance()
    assert only.labels is not None and set(only.labels.flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_labels_are_those_of_values_and_rewards_written_out(gamma: float) -> None:
    run = begin(config=replace(small(RecapConfig), gamma=gamma, lookahead=2, positive_fraction=0.25))
    while run.labels is None:
        run.advance()
    rewards = dataset().rewards.double().numpy().reshape(40, 5)
    weight = gamma ** np.arange(5)
    scale = max((rewards[:, t:] * weight[: 5 - t]).sum(1).max() for t in range(5))
    with torch.no_grad():
        values = (run.value(run._features).softmax(1) * run._atoms).sum(1).double().numpy().reshape(40, 5)
    found = np.empty((40, 5))
    for t in range(5):
        n = min(2, 5 - t)
        later = values[:, t + n] if t + n < 5 else 0.0
        found[:, t] = (rewards[:, t : t + n] * weight[:n]).sum(1) / scale + gamma**n * later - values[:, t]
    wanted = np.where(found >= np.quantile(found, 0.75), 1.0, -1.0)
    assert run.labels.numpy().reshape(40, 5).tolist() == wanted.tolist()
    assert float(run._to_go.abs().max()) == pytest.approx(1.0)


def test_values_read_all_frames_and_the_policy_clones_decisions_alone() -> None:
    decided = torch.arange(200) % 5 % 2 == 0
    data = replace(dataset(), extras={"decision": decided})
    run = begin(dataset=data, config=replace(small(RecapConfig), validation_fraction=0.0))
    finished(run)
    assert run.labels is not None and run.labels.shape == (200, 1)
    assert run._features.shape[0] == 200 and run._source.frames.tolist() == decided.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_is_resumed_bit_by_bit_while_values_or_policy_are_fitted(after: int) -> None:
    config = replace(small(RecapConfig), value_steps=4)
    one, two = begin(config=config), begin(config=config)
    for _ in range(after):
        one.advance()
    file = io.BytesIO()
    torch.save(to_plain(one.state_dict()), file)
    file.seek(0)
    two.load_state_dict(from_plain(torch.load(file, weights_only=True)))
    assert two.progress == one.progress
    weights = [finished(run).snapshot().state_dict() for run in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("changes", [{"value_steps": 2}, {"positive_fraction": 0.5}, {"gamma": 0.9}])
def test_what_labels_follow_from_stays_when_a_run_is_resumed(changes: dict[str, Any]) -> None:
    config = replace(small(RecapConfig), value_steps=4)
    run = begin(config=config)
    while run.labels is None:
        run.advance()
    (name,) = changes
    with pytest.raises(CheckpointError, match=mentions(f"algo.{name}")):
        begin(config=replace(config, **changes)).load_state_dict(run.state_dict())


def test_a_run_begins_with_its_init_and_goes_on_from_another_run() -> None:
    first = begin()
    noise = init("flow").sample_noise(5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        first.snapshot().act(observed(), noise=noise),
        init("flow").act(observed(), noise=noise),
        rtol=0,
        atol=1e-5,
    )
    made = finished(first).snapshot()
    second = begin(init=made)
    assert torch.equal(second.snapshot().act(observed(), noise=noise), made.act(observed(), noise=noise))
    other = begin(init=made, config=replace(small(RecapConfig), label_dropout=0.4))
    assert other.policy.config.goal_dropout == 0.4
    fresh = finished(begin(init=None)).snapshot()
    assert not torch.equal(fresh.act(observed(), noise=noise), made.act(observed(), noise=noise))


def learned(data: Any) -> Policy:
    config = RecapConfig(
        steps=600, log_every=200, batch_size=64, lr=3e-3, value_steps=100, value_dims=(32,), num_bins=21,
        positive_fraction=0.4, lookahead=1, label_dropout=0.2, validation_fraction=0.0,
    )  # fmt: skip
    policy = replace(policy_config("flow"), backbone=MlpConfig(width=32), horizon=2)
    return finished(begin(config=config, dataset=data, env=None, init=None, policy=policy)).snapshot()


def share(policy: Any, weight: float) -> float:
    actions = policy.with_guidance(weight).act(observed(256), generator=torch.Generator().manual_seed(3))
    return float((actions[:, 0, 0] > 0).double().mean())


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it another method prefers it")
def test_the_better_half_of_the_data_is_asked_for_and_random_labels_change_nothing() -> None:
    policy = learned(mixed())
    assert 0.3 < share(policy, 0.0) < 0.7
    assert share(policy, 1.0) > 0.95
    rewards = torch.rand(800, generator=torch.Generator().manual_seed(5))
    placebo = learned(replace(mixed(), rewards=rewards))
    assert abs(share(placebo, 1.0) - share(placebo, 0.0)) < 0.2


def test_of_equal_advantages_all_are_positive() -> None:
    assert is_positive(torch.tensor([0.0, 1.0, 0.0, -1.0]), 0.5).tolist() == [True, True, True, False]


def test_data_without_what_labels_need_are_refused() -> None:
    flat = replace(dataset(), rewards=torch.zeros(200))
    with pytest.raises(ConfigError, match=mentions("returns 0 'rewards' 'success'")) as silent:
        begin(dataset=flat)
    with pytest.raises(ConfigError, match=mentions("algo.rewards=steps 'success' rewards")) as circular:
        begin(dataset=flat, config=replace(small(RecapConfig), rewards="steps"))
    assert "=steps" not in str(silent.value) and "=recorded" not in str(circular.value)
    with pytest.raises(ConfigError, match=mentions("algo.rewards=steps success algo.rewards=recorded")):
        begin(config=replace(small(RecapConfig), rewards="steps"))
    succeeded = replace(flat, episode_extras={"success": torch.arange(40) % 2 == 0})
    with pytest.raises(ConfigError, match=mentions("returns 0 algo.rewards=steps")):
        begin(dataset=succeeded)
    assert begin(dataset=succeeded, config=replace(small(RecapConfig), rewards="steps")).progress == 0
    with pytest.raises(ConfigError, match=mentions("algo.teacher null")):
        replace(small(RecapConfig), teacher="somewhere")


def test_returns_that_are_all_equal_are_refused() -> None:
    alike = replace(dataset(), rewards=dataset().terminated.float())
    succeeded = replace(alike, episode_extras={"success": torch.ones(40, dtype=torch.bool)})
    with pytest.raises(ConfigError, match=mentions("returns 1 algo.gamma")) as silent:
        begin(dataset=alike)
    assert "algo.rewards=steps" not in str(silent.value)
    with pytest.raises(ConfigError, match=mentions("returns 1 algo.gamma algo.rewards=steps")):
        begin(dataset=succeeded)
    for change in ({"gamma": 0.9}, {"rewards": "steps"}):
        assert begin(dataset=succeeded, config=replace(small(RecapConfig), **change)).progress == 0


def test_policies_that_no_label_can_guide_are_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=recap process=gaussian")):
        begin("gaussian")
    with pytest.raises(CapabilityError, match=mentions("algo=recap process=gaussian")):
        begin("gaussian", init=None)
    with pytest.raises(ConfigError, match=mentions("advantage goal width 1 0")):
        Advantage().wrap(init("flow"))
