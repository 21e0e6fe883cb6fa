"""The engine of envpool: the numbers of the exact one for a while, and refused where that is not enough."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from burnish.config.schema import compose_config
from burnish.runs.context import RunContext
from burnish.runs.launch import train
from envs.engine.envpool import check_release, task_of, vector_on
from envs.engine.vector import ChunkVector
from envs.make import env
from envs.rollouts.rollout import RolloutPool
from envs.tasks.locomotion.stepper import RobotStepper, States
from policies.errors import CapabilityError, CheckpointError, ConfigError, MissingExtraError

ROBOTS = [
    *(("hopper", v) for v in ("v4", "v5")),
    *(("walker2d", v) for v in ("v4", "v5")),
    *(("ant", v) for v in ("v4", "v5")),
    *(("humanoid", v) for v in ("v4", "v5")),
    ("halfcheetah", None),
    ("swimmer", None),
]
STEPS = 50
N = 3


def task(name: str, version: str | None = None, **options: Any) -> Any:
    return env(name, **({"version": version} if version else {}), **options)


def envpool_vector(config: Any, obs_steps: int = 1) -> ChunkVector:
    pytest.importorskip("envpool", reason="envpool is not installed")
    vector = vector_on("envpool", config, N, obs_steps=obs_steps)
    assert isinstance(vector, ChunkVector)
    return vector


def place(stepper: RobotStepper, row: int, obs: np.ndarray, xy: np.ndarray) -> None:
    """Put the exact simulator where envpool started; what is not observed of a position is `xy`."""
    data, model = stepper.datas[row], stepper.model
    mujoco.mj_resetData(model, data)
    rest = model.nq - len(xy)
    data.qpos[:] = [*xy, *obs[:rest]]
    data.qvel[:] = obs[rest : rest + model.nv]
    mujoco.mj_forward(model, data)
    views = [view[None] for view in stepper._views[row]]
    states = States(views[0], views[1], dict(zip(stepper.robot.fields, views[2:], strict=True)))
    stepper._x[row] = stepper.robot.x(states, model)[0]


@pytest.mark.parametrize(("name", "version"), ROBOTS)
def test_envpool_equals_the_exact_engine_for_fifty_steps(name: str, version: str | None) -> None:
    """Both start in the same state; observations agree to rounding, rewards to that of float32."""
    config = task(name, version)
    ours, theirs = config.make_vector(N), envpool_vector(config)
    ours.reset(range(N))
    theirs.reset(range(N))
    first, where = theirs.stepper._pool.reset(np.arange(N, dtype=np.int32))  # again, for what it tells
    angles = next(i for i, name in enumerate(config.spec.obs_names) if "speed [" in name)
    names = ("x_position", "y_position")[: ours.stepper.model.nq - angles]
    for row in range(N):
        place(ours.stepper, row, first[row], np.array([where[n][row] for n in names]))
    rng, alive, compared = np.random.default_rng(0), np.ones(N, bool), 0
    for _ in range(STEPS):
        actions = rng.uniform(-1, 1, (N, 1, config.spec.action_dim)) * config.spec.action_high
        left, right = ours.step_chunk(actions, alive), theirs.step_chunk(actions, alive)
        np.testing.assert_allclose(right.obs[alive], left.obs[alive], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(right.rewards[alive], left.rewards[alive], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(right.terminated, left.terminated)
        compared += int(alive.sum())
        alive &= ~left.done
    assert compared > 10 * N


def test_ends_are_followed_by_fresh_episodes_and_cost_no_step() -> None:
    """No chunk holds envpool's own reset step, whose reward is 0, and limits cut where they should."""
    vector = envpool_vector(task("hopper", max_episode_steps=9), obs_steps=2)
    vector.reset(range(N))
    rng, rows = np.random.default_rng(0), np.arange(N)
    elapsed = np.zeros(N, int)
    for _ in range(60):
        step = vector.step_chunk(rng.uniform(-1, 1, (N, 4, 3)))
        elapsed += step.length
        executed = np.arange(4) < step.length[:, None]
        assert (step.rewards[executed] != 0).all() and (step.rewards[~executed] == 0).all()
        assert (step.truncated == (elapsed == 9)).all()
        done = rows[step.done]
        obs = vector.reset(done.tolist(), done)
        assert (obs[:, 0] == obs[:, 1]).all() and (np.abs(obs[:, 0, 0] - 1.25) < 0.01).all()
        elapsed[done] = 0


def test_rows_that_rest_stay_where_they_are() -> None:
    vector = envpool_vector(task("halfcheetah"))
    vector.reset(range(N))
    actions = np.full((N, 2, 6), 0.5)
    before = vector.step_chunk(actions).obs
    step = vector.step_chunk(actions, np.array([True, False, True]))
    assert (step.obs[1] == before[1]).all() and (step.obs[[0, 2]] != before[[0, 2]]).any()


def test_the_first_seed_decides_everything() -> None:
    starts = []
    for seed in (7, 7, 8):
        vector = envpool_vector(task("hopper"))
        starts.append(np.concatenate([vector.reset([seed, 0, 0]), vector.reset([1, 2, 3])]))
    np.testing.assert_array_equal(starts[0], starts[1])
    assert (starts[0] != starts[2]).all(axis=(1, 2)).any()


class Still:
    """An actor that does nothing."""

    def act(self, obs: Any, generator: Any) -> tuple[Any, dict[str, Any]]:
        state = obs["state"]
        return state.new_zeros(len(state), 2, 3), {}


def test_experience_is_collected_but_never_continued() -> None:
    pytest.importorskip("envpool", reason="envpool is not installed")
    pool = RolloutPool(task("hopper"), num_envs=3, num_workers=0, engine="envpool")
    rollout = pool.collect(Still(), 4)
    assert rollout.obs.shape == (4, 3, 1, 11) and (rollout.length == 2).all()
    state = pool.state_dict()
    with pytest.raises(CheckpointError, match=r"engine=envpool cannot continue.*engine=exact"):
        pool.load_state_dict(state)
    exact = RolloutPool(task("hopper"), num_envs=3, num_workers=0)
    exact.load_state_dict(state)  # episodes begin anew
    assert exact.collect(Still(), 1).first.all()
    with pytest.raises(CapabilityError, match="cannot save"):
        pool._workers._objects[0]._vector.state_dict()  # type: ignore[attr-defined]


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match=r"engine=envpool does not have env=avoid; use engine=exact"):
        vector_on("envpool", env("avoid"), 1)
    with pytest.raises(ConfigError, match=r"engine must be one of exact, envpool; got 'warp'"):
        vector_on("warp", env("avoid"), 1)

    def installed(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    installed(mujoco="3.6.0", envpool="1.2.5")
    check_release()
    installed(mujoco="3.3.0", envpool="1.2.5")
    with pytest.raises(ConfigError, match=r"MuJoCo 3.6.0 \(inside envpool 1.2.5\).*is 3.3.0"):
        check_release()
    installed(mujoco="3.6.0", envpool="9.9")
    with pytest.raises(ConfigError, match=r"envpool 1.2.5 only; got envpool 9.9"):
        check_release()
    installed(mujoco="3.6.0")
    with pytest.raises(MissingExtraError, match=r"pip install 'burnish\[envpool\]'"):
        check_release()


def test_options_reach_envpool() -> None:
    name, options = task_of(task("halfcheetah", ctrl_cost_weight=0.5))
    assert name == "HalfCheetah-v5" and options["ctrl_cost_weight"] == 0.5
    weights = {"forward_reward_weight", "ctrl_cost_weight", "reset_noise_scale"}
    assert set(options) == {*weights, "post_constraint"}
    assert task_of(task("ant", "v4"))[0] == "Ant-v4"


def test_a_run_collects_with_it_and_evaluates_exactly(tmp_path: Path) -> None:
    pytest.importorskip("envpool", reason="envpool is not installed")
    few = ["algo.num_envs=2", "algo.steps_per_iteration=4", "algo.env_steps=8", "algo.batch_size=4"]
    asked = [*few, "experiment=hopper_actor", "evaluation.episodes=1", "env.max_episode_steps=5"]
    config = compose_config("train", [*asked, "engine=envpool", "progress=false"])
    outcome = train(config, RunContext(tmp_path / "run"))
    (evaluation,) = (tmp_path / "run" / "eval").iterdir()
    assert json.loads(evaluation.read_text())["protocol"]["engine"] == "exact"
    assert outcome.directory.latest() == 8
