"""A task of one Python file: a MuJoCo model and three functions."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions

import burnish
from burnish.commands.new import write
from envs.evaluation.protocol import describe_task
from envs.fit import differing_options
from envs.tasks.mjcf import Mjcf
from policies.errors import CapabilityError, ConfigError, EnvironmentFailure


@pytest.fixture
def task(tmp_path: Path) -> Mjcf:
    return Mjcf(file=str(write("task", "disc", tmp_path)[0]))


def edited(task: Mjcf, **changes: str) -> Mjcf:
    """The same task with parts of its file replaced."""
    path = Path(task.file).with_name("edited.py")
    text = Path(task.file).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return Mjcf(file=str(path))


def test_the_file_says_what_the_task_is(task: Mjcf) -> None:
    spec = task.spec
    assert (spec.name, spec.obs_dim, spec.action_dim, spec.max_episode_steps) == ("disc", 4, 2, 60)
    assert spec.obs_names == ("position 0", "position 1", "speed 0", "speed 1")
    assert spec.action_names[0] == "force x [of full]" and spec.control_hz == pytest.approx(25.0)
    assert spec.success_rule == "The disc is within 3 cm of the origin"
    assert pickle.loads(pickle.dumps(task)) == task


def test_its_functions_are_what_happens(task: Mjcf) -> None:
    vector = task.make_vector(1)
    first = vector.reset([3])[0, 0]
    assert np.array_equal(first[:2], np.random.default_rng(3).uniform(-0.3, 0.3, 2))
    step = vector.step_chunk(np.full((1, 2, 2), 0.5))
    assert step.rewards[0] == pytest.approx(-np.linalg.norm(step.path[0, :, :2], axis=1))
    lost = edited(
        task, **{"def success": "def failure(model, data):\n    return data.time > 0.05\n\n\ndef success"}
    )
    lost_vector = lost.make_vector(1)
    lost_vector.reset([3])
    ended = lost_vector.step_chunk(np.zeros((1, 5, 2)))
    assert ended.terminated.all() and ended.length.tolist() == [2] and not ended.success.any()


def test_actions_span_the_range_of_the_actuators_unless_the_file_acts(task: Mjcf) -> None:
    wide = edited(task, **{'joint="x" ctrlrange="-1 1"': 'joint="x" ctrlrange="0 3"'})
    stepper = wide.stepper(1)
    stepper.reset(0, 0)
    stepper.step(np.zeros(1, np.int64), np.array([[-1.0, 0.5]]))
    assert stepper.datas[0].ctrl.tolist() == [0.0, 0.5]
    own = "def act(model, data, action):\n    data.ctrl[:] = -action\n\n\ndef success"
    stepper = edited(task, **{"def success": own}).stepper(1)
    stepper.reset(0, 0)
    stepper.step(np.zeros(1, np.int64), np.array([[0.25, 0.5]]))
    assert stepper.datas[0].ctrl.tolist() == [-0.25, -0.5]


def test_a_saved_state_continues_bit_exactly(task: Mjcf) -> None:
    one, other = task.make_vector(2), task.make_vector(2)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 3, 2))
    one.reset([1, 2])
    other.reset([5, 6])
    one.step_chunk(actions)
    other.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(one.step_chunk(actions).obs, other.step_chunk(actions).obs)


def test_derived_poses_are_those_of_the_state_that_was_reached(task: Mjcf) -> None:
    """Also when an action is applied, and after a saved state: it is not saved."""
    act = "def act(model, data, action):\n    data.ctrl[:] = action - data.xpos[1, :2]\n\n\ndef success"
    seen = edited(task, **{'"position": data.qpos': '"position": data.xpos[1, :2]', "def success": act})
    one, other = seen.make_vector(1), seen.make_vector(1)
    actions = np.ones((1, 3, 2))
    one.reset([1])
    reached = one.step_chunk(actions).obs
    np.testing.assert_array_equal(reached[0, -1, :2], one.stepper.datas[0].qpos)
    other.reset([5])
    other.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(one.step_chunk(actions).obs, other.step_chunk(actions).obs)


def moved_goal(task: Mjcf) -> Mjcf:
    """The task with a goal that resets write into the model, and an action that begins at the disc."""
    return edited(
        task,
        **{
            "    <body>\n": '    <site name="goal" size="0.05" rgba="1 0 0 1"/>\n    <body>\n'
            '      <site name="disc"/>\n',
            "    data.qpos[:] = rng": "    model.site('goal').pos[:2] += rng.uniform(-0.3, 0.3, 2)\n"
            "    data.qpos[:] = rng",
            "-np.linalg.norm(data.qpos)": "-np.linalg.norm(data.site('disc').xpos - model.site('goal').pos)",
            "def success": "def act(model, data, action):\n"
            "    data.ctrl[:] = action - data.site('disc').xpos[:2]\n\n\ndef success",
        },
    )


def test_what_a_reset_writes_into_the_model_is_of_its_episode_alone(task: Mjcf) -> None:
    moving = moved_goal(task)
    single, pair = moving.make_vector(1), moving.make_vector(2)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 3, 2))
    pair.reset([1, 2])
    pair.reset([3, 4])
    single.reset([3])
    expected, beside = single.step_chunk(actions[:1]), pair.step_chunk(actions)
    np.testing.assert_array_equal(beside.rewards[0], expected.rewards[0])
    assert not np.array_equal(pair.stepper.get_appearance(0)["site_pos"][0], np.zeros(3))
    other = moving.make_vector(2)
    other.reset([5, 6])
    other.load_state_dict(pair.state_dict())
    continued, again = pair.step_chunk(actions), other.step_chunk(actions)
    np.testing.assert_array_equal(continued.rewards, again.rewards)
    np.testing.assert_array_equal(continued.path, again.path)


def test_the_content_of_the_file_is_the_task(task: Mjcf, tmp_path: Path) -> None:
    (tmp_path / "copy.py").write_text(Path(task.file).read_text())
    assert differing_options(task, Mjcf(file=str(tmp_path / "copy.py"))) == []
    assert differing_options(task, edited(task, **{"< 0.03": "< 0.05"})) == ["file"]
    assert describe_task(task)["options"]["file"].startswith("sha256:")


def test_its_scene_is_drawn(task: Mjcf) -> None:
    require_drawing()
    frames = task.render_frames(0, np.zeros((3, 2)), every=2, width=32, height=24)
    assert frames.shape == (3, 24, 32, 3)


def test_the_whole_path(task: Mjcf, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"num_workers": 0, "progress": False, "num_threads": 1}
    data = burnish.collect(env=task, episodes=2, out=tmp_path / "disc.hdf5")
    tiny = {"algo.steps": 2, "algo.warmup_steps": 0, "algo.batch_size": 8, "backbone.width": 8}
    few = {"evaluation": {"episodes": 1}}
    run = burnish.clone(data, env=task, directory=tmp_path / "run", **tiny, **quiet, **few)
    result = burnish.evaluate(run, episodes=1, num_workers=0)
    assert result.evaluation.summary()["env"] == "disc"
    with pytest.raises(ConfigError, match=mentions("env.file allow_other_task=true")):
        burnish.evaluate(run, env=edited(task, **{"< 0.03": "< 0.05"}), episodes=1, num_workers=0)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("def reward(", "def other(", "reward missing"),
        ("import numpy", "import no_such_module_here; import numpy", "no_such_module_here"),
        ("<mujoco>", "<mujoco", "MODEL MJCF"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(task: Mjcf, old: str, new: str, parts: str) -> None:
    with pytest.raises(ConfigError, match=mentions(parts)):
        _ = edited(task, **{old: new}).spec


def test_mistakes_in_its_functions_are_named(task: Mjcf) -> None:
    wrong = edited(task, **{"rng.uniform(-0.3, 0.3, 2)": "rng.uniform(-0.3, 0.3, 3)"})
    with pytest.raises(EnvironmentFailure, match=mentions("edited reset broadcast edited.py")):
        _ = wrong.spec
    with pytest.raises(EnvironmentFailure, match=mentions("edited observe nowhere")):
        _ = edited(task, **{'"speed": data.qvel': '"speed": nowhere'}).spec
    with pytest.raises(EnvironmentFailure, match=mentions("edited demonstration nothing")):
        edited(task, **{"return -3 * data.qpos": "return nothing"}).demonstrate(0)


def test_the_file_on_the_page_is_a_task_with_an_expert(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    text = page.read_text().partition("## A task in one file")[2].partition("```python\n")[2]
    (tmp_path / "reach.py").write_text(text.partition("```")[0])
    assert Mjcf(file=str(tmp_path / "reach.py")).demonstrate(0).success


def test_a_wrong_camera_is_refused(task: Mjcf) -> None:
    with pytest.raises(ConfigError, match=mentions("env.cameras free top")):
        _ = replace(task, cameras=("top",)).spec


def test_a_file_and_an_expert_are_needed(task: Mjcf) -> None:
    with pytest.raises(ConfigError, match=mentions("env.file")):
        _ = Mjcf().spec
    with pytest.raises(CapabilityError, match=mentions("expert")):
        edited(task, **{"def expert(": "def another("}).demonstrate(0)
