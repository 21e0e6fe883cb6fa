"""Errors on recorded episodes: `burnish eval dataset=…`, against closed forms and by its commands."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from torch import Tensor

import burnish
from burnish.commands import evaluate as evaluate_command
from burnish.config.evaluate import EvalConfig
from burnish.config.overrides import RunContext
from burnish.runs import open_loop as open_loop_command
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.open_loop import open_loop
from envs.evaluation.settings import EvaluationSettings
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.policy_config import ChunkSpec, PolicyConfig
from policies.storage.policy_folder import save_policy

LENGTHS = (7, 12)


def recorded(lengths: tuple[int, ...] = LENGTHS, **extras: Any) -> EpisodeDataset:
    """Return episodes whose observation is the number of the frame, and actions (f, -2 f, 3)."""
    frames = np.arange(sum(lengths), dtype=np.float32)
    actions = np.stack([frames, -2 * frames, np.full_like(frames, 3)], axis=1)
    no, start = np.zeros(len(frames), bool), np.cumsum([0, *lengths])
    values = (frames[:, None], actions, np.zeros(len(frames)), no, None, start)
    return EpisodeDataset.from_arrays(*values, extras=extras)


class Known:
    """A policy that knows the recorded actions of a frame and the ones behind, and adds `error`."""

    def __init__(self, chunk: ChunkSpec, error: tuple[float, ...] = (0, 0, 0), scale: float = 1.0) -> None:
        self.chunk, self.obs_dim, self.noise_shape = chunk, 1, chunk.shape
        self.error, self.scale, self.seen = torch.tensor(error), scale, list[int]()

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(n, *self.noise_shape)

    def act(self, obs: Any, *, noise: Tensor | None = None) -> Tensor:
        newest = obs["state"][:, -1]
        self.seen += newest.squeeze(1).int().tolist()
        frames = newest + torch.arange(self.chunk.act_steps)
        actions = torch.stack([frames, -2 * frames, torch.full_like(frames, 3)], dim=-1)
        return self.scale * actions + self.error


@pytest.mark.parametrize(("obs_steps", "action_start"), [(1, 0), (3, 2)])
def test_one_that_does_what_was_done_has_no_error(obs_steps: int, action_start: int) -> None:
    chunk = ChunkSpec(horizon=8, action_dim=3, act_steps=4, obs_steps=obs_steps, action_start=action_start)
    policy = Known(chunk)
    found = open_loop(policy, recorded(), EvaluationSettings())
    assert found.squared.shape == (2, 3) and not found.squared.any()
    assert policy.seen == [0, 4, 7, 11, 15], "it decides at every fourth frame of each episode"


def test_it_decides_at_its_own_frames_wherever_the_recording_policy_did() -> None:
    policy = Known(ChunkSpec(horizon=4, action_dim=3, act_steps=3, obs_steps=1))
    decision = np.arange(sum(LENGTHS)) % 2 == 1
    found = open_loop(policy, recorded(decision=decision), EvaluationSettings())
    assert policy.seen == [0, 3, 6, 7, 10, 13, 16] and not found.squared.any()


@pytest.mark.parametrize("goal_dim", [0, 2])
def test_goals_stand_where_the_policy_reads_them(goal_dim: int) -> None:
    goals = np.arange(2 * sum(LENGTHS), dtype=np.float32).reshape(-1, 2)

    class Led(Known):
        def act(self, obs: Any, *, noise: Tensor | None = None) -> Tensor:
            state = obs["state"]
            goal = obs["goal"] if goal_dim else state[:, -1, 1:]
            np.testing.assert_array_equal(goal, goals[state[:, -1, 0].int()])
            return super().act({"state": state[..., :1]})

    policy: Any = Led(ChunkSpec(horizon=4, action_dim=3, act_steps=2, obs_steps=1))
    policy.goal_dim, policy.obs_dim = goal_dim, 1 if goal_dim else 3
    assert not open_loop(policy, recorded(goal=goals), EvaluationSettings()).squared.any()
    expected = "goals of width 2 dataset (1,) give every frame" if goal_dim else "observation width 3 1"
    with pytest.raises(ConfigError, match=mentions(expected)):
        open_loop(policy, recorded(goal=goals[:, :1]), EvaluationSettings())


def test_errors_and_shares_are_those_of_the_closed_form() -> None:
    chunk = ChunkSpec(horizon=4, action_dim=3, act_steps=4, obs_steps=1)
    found = open_loop(Known(chunk, (0.5, -1.0, 2.0)), recorded(), EvaluationSettings())
    episodes = np.split(np.arange(sum(LENGTHS)), [LENGTHS[0]])
    middle = np.mean([one.mean() for one in episodes])
    variance = np.mean([((one - middle) ** 2).mean() for one in episodes])
    np.testing.assert_allclose(found.rmse, [0.5, 1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(found.deviation, [variance**0.5, 2 * variance**0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(found.unexplained, [0.25 / variance, 0.25 / variance, np.nan], rtol=1e-6)
    np.testing.assert_allclose(found.by_episode(), 0.25 / variance, rtol=1e-6)
    mean = Known(chunk, (middle, -2 * middle, 3.0), scale=0)
    constant = open_loop(mean, recorded(), EvaluationSettings())
    np.testing.assert_allclose(constant.unexplained[:2], 1.0, rtol=1e-6)
    np.testing.assert_allclose(constant.summary().value, 1.0, rtol=1e-6)


def test_episodes_are_the_first_ones_and_one_must_vary() -> None:
    chunk = ChunkSpec(horizon=4, action_dim=3, act_steps=2, obs_steps=1)
    assert len(open_loop(Known(chunk), recorded(), EvaluationSettings(episodes=1)).squared) == 1
    with pytest.raises(ConfigError, match=mentions("no entry varies")):
        open_loop(Known(chunk), recorded((1,)), EvaluationSettings())
    wide = ChunkSpec(horizon=4, action_dim=2, act_steps=2, obs_steps=1)
    with pytest.raises(ConfigError, match=mentions("action width 2 3")):
        open_loop(Known(wide), recorded(), EvaluationSettings())


def test_the_noise_of_an_episode_is_its_own() -> None:
    class Noisy(Known):
        def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
            return torch.randn(n, *self.noise_shape, generator=generator)

        def act(self, obs: Any, *, noise: Tensor | None = None) -> Tensor:
            assert noise is not None
            return super().act(obs) + noise

    policy = Noisy(ChunkSpec(horizon=4, action_dim=3, act_steps=4, obs_steps=1))
    both = open_loop(policy, recorded(), EvaluationSettings())
    one = open_loop(policy, recorded(), EvaluationSettings(episodes=1))
    np.testing.assert_array_equal(both.squared[0], one.squared[0])
    assert not open_loop(policy, recorded(), EvaluationSettings(start_noise="zero")).squared.any()


TINY: dict[str, Any] = {
    **{"algo.steps": 30, "algo.warmup_steps": 0, "algo.batch_size": 16, "backbone.width": 16},
    **{"policy.horizon": 4, "policy.act_steps": 2, "num_workers": 0, "progress": False},
}


def test_a_policy_without_a_task_is_judged_by_held_out_episodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(120, 2)).astype(np.float32)
    data = {"observations": seen, "actions": seen[:, :1] * 0.5, "lengths": [40, 40, 40]}
    run = burnish.clone(data, directory=tmp_path / "run", **TINY)
    held = burnish.open_loop(run, data, baseline=run, out=tmp_path / "errors.json")
    assert held.comparison is not None and held.comparison.difference.value == 0
    assert "too few episodes" in str(held) and str(held).count("all") == 2
    written = json.loads((tmp_path / "errors.json").read_text())
    assert len(written["episodes"]) == 3 and written["actions"] == ["action 0"]
    assert written["unexplained_variance"]["value"] == held.errors.summary().value
    with caplog.at_level(logging.WARNING):
        burnish.open_loop(run, data)
    assert "was trained on a file named" in caplog.text


def test_one_episode_alone_has_no_interval_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = PolicyConfig(horizon=2, act_steps=2, backbone=MlpConfig(width=8, time_dim=4))
    save_policy(build_policy(parts, obs_dim=4, action_dim=2), tmp_path / "policy")
    np.savez(tmp_path / "data.npz", observations=np.zeros((9, 4)), actions=np.eye(9)[:, :2])
    places = {"policy": tmp_path / "policy", "dataset": tmp_path / "data.npz", "out": tmp_path / "one.json"}
    config = EvalConfig(**{key: str(place) for key, place in places.items()})
    value = evaluate_command.run(config, RunContext(tmp_path))
    assert json.loads(places["out"].read_text())["unexplained_variance"] == {"value": value}
    assert f"written: {places['out']}" in capsys.readouterr().out


def test_a_baseline_that_does_not_fit_is_refused_before_the_policy_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"long": (4, 4, 2), "short": (2, 4, 2), "wide": (4, 4, 3)}  # horizon, Do, Da
    for name, (horizon, obs_dim, action_dim) in shapes.items():
        parts = PolicyConfig(horizon=horizon, act_steps=2, backbone=MlpConfig(width=8, time_dim=4))
        policy = build_policy(parts, obs_dim=obs_dim, action_dim=action_dim)
        save_policy(policy, tmp_path / name)
    path, zeros = {name: str(tmp_path / name) for name in shapes}, np.zeros((9, 4))
    np.savez(tmp_path / "data.npz", observations=zeros, actions=np.eye(9)[:, :2])
    for where, name in ((open_loop_command, "open_loop"), (evaluate_command, "play")):
        monkeypatch.setattr(where, name, lambda *_, **__: pytest.fail("acts"))
    missing = tmp_path / "missing.npz"
    with pytest.raises(ConfigError, match=mentions("baseline= short act_steps 3 2")):
        burnish.open_loop(path["long"], missing, baseline=path["short"], act_steps=3)
    with pytest.raises(ConfigError, match=mentions("warm_start episodes that are played")):
        burnish.open_loop(path["long"], missing, **{"warm_start.steps": 1})
    with pytest.raises(ConfigError, match=mentions("baseline= wide action width 3 2")):
        burnish.open_loop(path["long"], tmp_path / "data.npz", baseline=path["wide"])
    task: dict[str, Any] = {"env": "avoid", "out": tmp_path / "eval.json"}
    with pytest.raises(ConfigError, match=mentions("baseline= short act_steps 3 2")):
        burnish.evaluate(path["long"], baseline=path["short"], act_steps=3, **task)
    with pytest.raises(ConfigError, match=mentions("policy= short act_steps 3 2")):
        burnish.evaluate(path["short"], baseline=path["long"], act_steps=3, **task)
    with pytest.raises(ConfigError, match=mentions("baseline= wide action width 2 3")):
        burnish.evaluate(path["long"], baseline=path["wide"], **task)


def test_what_needs_a_task_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    for key, value in (("videos", 1), ("env", "avoid"), ("weights", [0.5, 0.5]), ("first_seed", 3)):
        with pytest.raises(ConfigError, match=mentions(f"{key} belongs")):
            burnish.open_loop("runs/none", file, **{key: value})
    with pytest.raises(ConfigError, match=mentions("burnish.open_loop(policy, dataset)")):
        burnish.evaluate("runs/none", dataset=file)
    with pytest.raises(ConfigError, match=mentions("reader= needs dataset=<file>")):
        burnish.evaluate("runs/none", reader={"infos": False})
