"""Any environment with gymnasium's interface is a task."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions
from own_environments import Walk

import burnish
from burnish.config.saved import describe_part, restore_part
from burnish.config.schema import compose_config
from burnish.runs.locate import Located
from burnish.runs.tasks import known_task, task_of, values_of_task
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.make import env
from envs.tasks.avoid.task import Avoid
from envs.tasks.gym.factories import HERE, local_factory
from envs.tasks.gym.task import Gym
from policies.build import build_policy
from policies.errors import ConfigError, EnvironmentFailure
from policies.policy import PolicyConfig

QUIET = {"num_workers": 0, "progress": False, "num_threads": 1}
TINY = {"algo.steps": 2, "algo.warmup_steps": 0, "algo.batch_size": 8, "backbone.width": 8}
WALK = "own_environments:tests/Walk-v0"


def test_a_dict_is_flattened_by_name_and_actions_take_any_shape() -> None:
    task = Gym(id=WALK)
    spec = task.spec
    assert spec.name == "tests/Walk-v0" and spec.obs_names == ("goal 0", "place 0")
    assert (spec.action_low, spec.action_high) == ((-0.5,), (0.25,))
    assert (spec.max_episode_steps, spec.control_hz) == (12, 8.0)
    assert "is_success" in spec.success_rule
    vector, alone = task.make_vector(2, obs_steps=2), Walk()
    seen, _ = alone.reset(seed=5)
    assert vector.reset([4, 5])[1, 1].tolist() == [seen["goal"].item(), seen["place"].item()]
    step = vector.step_chunk(np.full((2, 20, 1), 9.0))
    assert step.path[1, 0, 1] == 0.25, "clipped to the box"
    assert (step.truncated | step.success).all() and step.length.max() <= 12
    chosen = Gym(id=WALK, obs_keys=("place",), max_episode_steps=3, control_hz=2.0)
    assert chosen.spec.obs_names == ("place 0",) and chosen.spec.control_hz == 2.0
    assert chosen.make_vector(1).reset([0]).shape == (1, 1, 1)
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    assert restore_part("env", describe_part("env", chosen)) == chosen


@pytest.mark.parametrize("named", [{"id": "near_package:Near-v0"}, {"factory": "near_package:Near"}])
def test_a_package_in_the_current_folder_is_found(
    named: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near_package.py").write_text(
        "import gymnasium\nfrom own_environments import Walk as Near\n"
        "gymnasium.register('Near-v0', entry_point='near_package:Near')\n"
    )
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", os.getcwd())])
    with pytest.raises(ConfigError, match=mentions("cannot be made near_package")):
        Gym(**named).make_vector(1)
    monkeypatch.chdir(tmp_path)
    assert Gym(**named).make_vector(1).reset([0]).shape == (1, 1, 2)
    assert sys.path[-1] == str(tmp_path)
    sys.modules.pop("near_package")


def test_success_is_what_the_named_key_of_the_info_says() -> None:
    named = Gym(factory="own_environments:Walk", kwargs={"key": "done", "reach": 3.0}, success="done")
    vector = named.make_vector(1)
    vector.reset([0])
    assert vector.step_chunk(np.zeros((1, 1, 1))).success.all()
    assert "done" in named.spec.success_rule
    silent = Gym(factory="own_environments:Silent", kwargs={"reach": 3.0})
    assert silent.spec.success_rule == "" and silent.spec.quantity == "return"
    assert silent.spec.max_episode_steps == 1000, "a factory without a limit"


@pytest.mark.parametrize("value", ["no", None, float("nan"), [True, False]])
def test_success_is_a_bool_or_a_number(value: Any) -> None:
    class Told(Walk):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:-1], {"success": value})

    vector = Gym(factory=local_factory(Told())).make_vector(1)
    vector.reset([0])
    with pytest.raises(EnvironmentFailure, match=mentions("info['success'] Told bool number")):
        vector.step_chunk(np.zeros((1, 1, 1)))


class Late(Walk):
    """An environment that reports success at the end only."""

    def step(self, action: Any) -> Any:
        *given, done, truncated, info = super().step(action)
        return (*given, done, truncated, info if done else {})


@pytest.mark.parametrize(
    ("made", "success", "warning"),
    [
        (Late, None, "Late is_success first env.success=is_success"),
        (Late, "is_success", ""),
        (Walk, "arrived", "env.success=arrived Walk is_success"),
    ],
)
def test_success_that_is_not_found_is_warned_of_once(
    made: Any, success: str | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = Gym(factory=local_factory(made()), success=success, max_episode_steps=40)
    vector = task.make_vector(2)
    for _ in range(2):
        goals = vector.reset([4, 5])[:, 0, 0]
        step = vector.step_chunk(np.repeat(np.sign(goals) * 0.1, 40)[:, None].reshape(2, 40, 1))
    assert step.success.any() == (success != "arrived")
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == bool(warning)
    assert all(re.search(mentions(warning), text) for text in texts)


@pytest.mark.parametrize("camera", ["eye", "render"])
def test_images_are_parts_of_a_dict_or_the_rendered_picture(camera: str) -> None:
    task = Gym(id=WALK, cameras=(camera,), image_size=(2, 3))
    vector = task.make_vector(1, obs_steps=2)
    vector.reset([0])
    assert vector.images()[camera].shape == (1, 2, 2, 3, 3) and not vector.images()[camera].any()
    vector.step_chunk(np.full((1, 1, 1), 0.25))
    assert [frame.max() for frame in vector.images()[camera][0]] == [0, 25]


def test_an_episode_is_drawn_by_its_own_render() -> None:
    frames = Gym(id=WALK).render_frames(0, np.full((3, 1), -0.25), every=2)
    assert frames.shape[1:] == (4, 6, 3) and frames[:, 0, 0, 0].tolist() == [0, 50, 75]
    with pytest.raises(ConfigError, match=mentions("render() rgb_array")):
        Gym(factory="own_environments:Silent", kwargs={"render_mode": "rgb_array"}).render_frames(
            0, np.zeros((1, 1))
        )


def test_a_replay_gives_the_environment_the_actions_that_were_played() -> None:
    given: list[np.ndarray] = []

    class Noted(Walk):
        def step(self, action: Any) -> Any:
            given.append(action.copy())
            return super().step(action)

    task = Gym(factory=local_factory(lambda: Noted("rgb_array", reach=0.0)), max_episode_steps=3)
    vector, actions = task.make_vector(1), np.float32([[0.1], [-0.1], [3.0]])
    vector.reset([1])
    given.clear()
    vector.step_chunk(actions[None])
    played = given.copy()
    given.clear()
    task.render_frames(1, actions)
    assert [one.dtype for one in given] == [one.dtype for one in played] == [np.float32] * 3
    np.testing.assert_array_equal(given, played)


def test_parts_that_nothing_observes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Kinds(Walk):
        def __init__(self) -> None:
            super().__init__()
            spaces = gymnasium.spaces
            self.observation_space["kind"] = spaces.Discrete(3)
            self.observation_space["both"] = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])

    for _ in range(2):
        assert Gym(factory=local_factory(Kinds)).spec.obs_names == ("goal 0", "place 0")
    (record,) = [one for one in caplog.records if "not observed" in one.getMessage()]
    assert "kind (Discrete)" in record.getMessage() and "both (Tuple)" in record.getMessage()
    caplog.clear()
    assert Gym(factory=local_factory(Kinds), obs_keys=("goal",)).spec.obs_names == ("goal 0",)
    assert not [one for one in caplog.records if "not observed" in one.getMessage()]


def test_mujoco_environments_are_drawn_without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    require_drawing()
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    task = Gym(id="Reacher-v5", kwargs={"width": 64, "height": 48})
    frames = task.render_frames(0, np.ones((2, 2)), every=1)
    assert frames.shape == (3, 48, 64, 3) and frames.std() > 0
    assert "MUJOCO_GL" not in os.environ


class Odd(Walk):
    """An environment with a mistake."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def reset(self, **options: Any) -> Any:
        seen, info = super().reset(**options)
        if self.kind == "fails":
            raise OSError("no gripper")
        return seen if self.kind == "bare reset" else (seen, info)

    def step(self, action: Any) -> Any:
        given = super().step(action)
        return given[:3] + given[4:] if self.kind == "four" else given


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("fails", "Odd reset OSError gripper"),
        ("bare reset", "reset Odd observation info dict"),
        ("four", "step Odd truncated float bool dict"),
    ],
)
def test_mistakes_in_an_environment_are_named(kind: str, parts: str) -> None:
    with pytest.raises(EnvironmentFailure, match=mentions(parts)):
        _ = Gym(factory=local_factory(Odd(kind))).spec


def test_what_a_factory_makes_is_an_environment() -> None:
    with pytest.raises(ConfigError, match=mentions("env.factory=builtins:int gymnasium int reset")):
        _ = Gym(factory="builtins:int").spec


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, "env.id env.factory"),
        ({"id": "Nothing-v7"}, "Nothing-v7"),
        ({"id": "no_such_package:Nothing-v7"}, "no_such_package"),
        ({"factory": "own_environments:nothing"}, "nothing AttributeError"),
        ({"id": WALK, "obs_keys": ("eye",)}, "eye env.obs_keys"),
        ({"id": WALK, "cameras": ("eyes",)}, "env.cameras eye, render; eyes"),
        ({"id": "CartPole-v1"}, "Discrete(2) Box"),
    ],
)
def test_what_is_no_task_is_named(options: dict[str, Any], parts: str) -> None:
    with pytest.raises(ConfigError, match=mentions(parts)):
        _ = Gym(**options).spec
    with pytest.raises(ConfigError, match=mentions("env.id env.factory")):
        Gym(id="A-v0", factory="a:b")


def test_a_policy_is_evaluated_and_its_kwargs_are_typed_on_the_command_line() -> None:
    config = compose_config(
        "eval", ["policy=p", "env=gym", f"env.id='{WALK}'", "env.kwargs.reach=0.5", "env.max_episode_steps=4"]
    )
    assert config.env == Gym(id=WALK, kwargs={"reach": 0.5}, max_episode_steps=4)
    policy = build_policy(PolicyConfig(), obs_dim=2, action_dim=1)
    found = evaluate(policy, config.env, Settings(episodes=2), num_workers=0)
    assert found.protocol["env"]["options"]["kwargs"] == {"reach": 0.5}


@pytest.mark.parametrize("given", [Walk, Walk(), lambda: Walk()], ids=["class", "object", "function"])
def test_environments_and_functions_are_tasks_in_python(given: Any, tmp_path: Path) -> None:
    values = values_of_task(given)
    is_local = given is not Walk
    assert (values.get("num_workers") == 0) == is_local == values["env.factory"].startswith(HERE)
    observations = np.random.default_rng(0).normal(size=(20, 2))
    data = tmp_path / "demos.hdf5"
    _write(data, observations, np.tanh(observations[:, :1]) / 4)
    run = burnish.clone(
        data, env=given, directory=tmp_path / "run", **TINY, **QUIET, evaluation={"episodes": 1}
    )
    assert run.directory.section("env")["factory"] == values["env.factory"]
    result = burnish.evaluate(run, env=given, episodes=1)
    assert result.evaluation.summary()["env"] == "Walk"


class Near(Walk):
    """Another environment, with another space of actions."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(-1, 1, (1, 1))


def test_the_limit_is_found_below_wrappers_and_in_copies(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = gymnasium.wrappers.TransformReward(gymnasium.wrappers.TimeLimit(Walk(), 60), float)
    assert Gym(factory=local_factory(wrapped)).spec.max_episode_steps == 60
    assert Gym(factory=local_factory(gymnasium.make("Reacher-v5"))).spec.max_episode_steps == 50
    assert not caplog.records
    endless = local_factory(type("Endless", (Walk,), {})())
    for _ in range(2):
        assert Gym(factory=endless).spec.max_episode_steps == 1000
    assert len(caplog.records) == 1


def test_what_cannot_be_drawn_is_reported_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Blind(Walk):
        def render(self) -> Any:
            raise AttributeError("Unexpected mode: None")

        def seen(self) -> dict[str, Any]:
            return {"place": np.ones(1), "goal": np.ones((1, 1))}

    data = tmp_path / "demos.hdf5"
    _write(data, np.zeros((20, 2)), np.zeros((20, 1)))
    few = {"evaluation": {"episodes": 0}}
    run = burnish.clone(data, env=Blind, directory=tmp_path / "run", **TINY, **QUIET, **few)
    page = burnish.report(run, episodes=2).read_text()
    assert "No pictures: this environment draws no picture" in page and page.count("data-episode=") == 2
    with pytest.raises(ConfigError, match=mentions("render() Unexpected mode")):
        burnish.evaluate(run, env=Blind, episodes=1, videos=1)
    assert "return" not in capsys.readouterr().out, "it is refused before episodes are played"


def _write(path: Path, observations: np.ndarray, actions: np.ndarray) -> None:
    from envs.datasets import EpisodeDataset, write_dataset

    count = len(observations)
    no = np.zeros(count, bool)
    data = EpisodeDataset.from_arrays(observations, actions, np.zeros(count), no, no, [0, count])
    write_dataset(path, data)


def test_a_configuration_is_a_task_in_python_too() -> None:
    assert values_of_task(env("cube-single", task=3)) == {"env": "cube-single", "env.task": 3}
    with pytest.raises(ConfigError, match=mentions("env= int")):
        values_of_task(3)


@pytest.mark.parametrize("fresh", [Walk, lambda: lambda: Walk(), lambda: lambda: gymnasium.make(WALK)])
def test_a_task_may_be_made_anew_for_every_call(fresh: Any, tmp_path: Path) -> None:
    data = tmp_path / "demos.hdf5"
    _write(data, np.zeros((20, 2)), np.zeros((20, 1)))
    few = {"evaluation": {"episodes": 0}}
    run = burnish.clone(data, env=fresh(), directory=tmp_path / "run", **TINY, **QUIET, **few)
    assert len(burnish.evaluate(run, env=fresh(), episodes=1).evaluation.rows) == 1
    with pytest.raises(ConfigError, match=mentions("Near Walk allow_other_task")):
        burnish.evaluate(run, env=lambda: Near(), episodes=1)


def test_what_was_passed_again_in_another_process_is_found() -> None:
    number = local_factory(Walk()).rpartition("-")
    assert Gym(factory=f"{number[0]}-987").spec.name == "Walk"


def test_a_run_is_resumed_with_its_environment_passed_again(tmp_path: Path) -> None:
    data = tmp_path / "demos.hdf5"
    _write(data, np.zeros((20, 2)), np.zeros((20, 1)))
    few = {"evaluation": {"episodes": 1}}
    run = burnish.clone(data, env=Walk(), directory=tmp_path / "run", **TINY, **QUIET, **few)
    resumed = burnish.train(resume=str(run.directory.path), env=lambda: Walk(), **QUIET)
    assert resumed.directory.path == run.directory.path
    with pytest.raises(ConfigError, match=mentions("Near Walk allow_other_task")):
        burnish.train(resume=str(run.directory.path), env=lambda: Near(), **QUIET)


def test_an_object_of_another_process_is_asked_for_again() -> None:
    here = Walk()
    assert local_factory(here) == local_factory(here) != local_factory(Walk())
    with pytest.raises(ConfigError, match=mentions("another Python process")):
        _ = Gym(factory=f"{HERE}:gone").spec


def test_code_named_by_a_policy_outside_of_a_run_is_not_run(tmp_path: Path) -> None:
    policy = build_policy(PolicyConfig(), obs_dim=2, action_dim=1)
    task = Gym(factory="own_environments:Walk")
    path = burnish.save_policy(policy, tmp_path / "p", provenance={"env": describe_part("env", task)})
    with pytest.raises(ConfigError, match=mentions("env.factory=own_environments:Walk")):
        task_of(Located(path))
    assert known_task(Located(path)) == task, "it is compared all the same"
    burnish.save_policy(policy, tmp_path / "q", provenance={"env": describe_part("env", Avoid())})
    assert task_of(Located(tmp_path / "q")) == Avoid()


def test_the_run_of_a_stranger_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observations = np.random.default_rng(0).normal(size=(20, 2))
    data = tmp_path / "demos.hdf5"
    _write(data, observations, np.tanh(observations[:, :1]) / 4)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    run = burnish.clone(
        data, env=Walk, directory=tmp_path / "run", **TINY, **QUIET, evaluation={"episodes": 0}
    )
    assert len(burnish.evaluate(run, episodes=1, num_workers=0).evaluation.rows) == 1
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's"))
    for command in (
        lambda: burnish.evaluate(run, episodes=1, num_workers=0),
        lambda: burnish.train(resume=str(run.directory.path)),
    ):
        with pytest.raises(ConfigError, match=mentions("code env=gym")):
            command()
    assert len(burnish.evaluate(run, env=Walk, episodes=1, num_workers=0).evaluation.rows) == 1
