"""Datasets of Python objects and of plain arrays in files; what their entries are travels with the policy."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from dataset_files import made, write_lerobot
from messages import mentions
from pairwise import repeated

import burnish
from burnish.api import stored_dataset
from burnish.commands.data_convert import DataConvertConfig, convert
from burnish.commands.export import ExportConfig, surroundings_of
from burnish.commands.serve import ServeConfig, served_by
from burnish.runs.locate import locate
from envs.datasets import Episode, dataset_format, read_dataset, write_dataset, write_robomimic
from envs.datasets.convert import KEYS, as_dataset
from envs.datasets.files.hdf5 import datasets_of
from envs.datasets.interface import interface_of, with_given
from envs.datasets.recorded_task import recorded_task
from policies.errors import ConfigError, DatasetError

RNG = np.random.default_rng(0)
OBS, ACTIONS = RNG.normal(size=(9, 3)), RNG.uniform(-1, 1, (9, 2))
FLAGS = np.arange(9) == 3
EPISODE = {"obs": OBS, "actions": ACTIONS}
PICTURES = np.zeros((9, 4, 5, 3), np.uint8)
TINY = {"algo.steps": 2, "algo.warmup_steps": 0, "algo.batch_size": 8, "backbone.width": 8}
QUIET = {"num_workers": 0, "progress": False, "num_threads": 1}

FORMS: dict[str, tuple[Any, list[int]]] = {
    "a pair": ((OBS, ACTIONS), [9]),
    "a pair of tensors": ((torch.tensor(OBS), torch.tensor(ACTIONS)), [9]),
    "nested lists": ((OBS.tolist(), ACTIONS.tolist()), [9]),
    "a dict": ({"observations": OBS, "actions": ACTIONS}, [9]),
    "other words": ({"state": OBS, "action": ACTIONS, "terminals": FLAGS}, [4, 5]),
    "starts": ({"obs": OBS, "actions": ACTIONS, "episode_start": [0, 2]}, [2, 7]),
    "ends": ({"obs": OBS, "actions": ACTIONS, "episode_ends": [2, 9]}, [2, 7]),
    "lengths": ({"obs": OBS, "actions": ACTIONS, "lengths": [2, 3, 4]}, [2, 3, 4]),
    "numbers": ({"obs": OBS, "actions": ACTIONS, "episode": [0, 0, 5, 5, 5, 5, 5, 5, 6]}, [2, 6, 1]),
    "episodes": ([(OBS[:4], ACTIONS[:4]), {"obs": OBS[4:], "action": ACTIONS[4:]}], [4, 5]),
    "a dataset": (as_dataset((OBS, ACTIONS)), [9]),
}


@pytest.mark.parametrize("form", FORMS)
def test_frames_and_episodes_are_those_that_were_given(form: str) -> None:
    given, lengths = FORMS[form]
    data = as_dataset(given)
    torch.testing.assert_close(data.observations, torch.tensor(OBS).float())
    torch.testing.assert_close(data.actions, torch.tensor(ACTIONS).float())
    assert data.lengths.tolist() == lengths and not data.rewards.any()
    assert bool((data.terminated | data.truncated)[data.episode_start[1:] - 1].all())


def test_ends_rewards_and_successors_are_kept() -> None:
    data = as_dataset({"obs": OBS, "actions": ACTIONS, "terminated": FLAGS, "rewards": np.arange(9)[:, None]})
    assert data.terminated.tolist() == FLAGS.tolist() and data.rewards.tolist() == list(range(9))
    longer = as_dataset([(OBS, ACTIONS[:8])])
    assert longer.next_observations is not None
    torch.testing.assert_close(longer.next_observations[-1], torch.tensor(OBS[8]).float())
    episode = Episode(OBS, ACTIONS[:8], np.zeros(8), True, False)
    assert as_dataset([episode, episode]).lengths.tolist() == [8, 8]
    played = replace(episode, extras={"decision": np.arange(8) % 4 == 0})
    found = as_dataset([as_dataset([episode]), as_dataset([played])]).extras["decision"]
    assert found.tolist() == [True] * 8 + [True, False, False, False] * 2, "others decide at every frame"


def test_a_dict_of_observations_is_joined_by_name_and_its_pictures_are_cameras() -> None:
    seen = {"b": OBS[:, 1:], "a": OBS[:, 0], "eye": PICTURES}
    data = as_dataset({"observations": seen, "actions": ACTIONS})
    torch.testing.assert_close(data.observations, torch.tensor(OBS).float())
    assert data.image_shapes == {"eye": (4, 5, 3)}
    assert interface_of(data.meta, 3, 2) == {"obs_names": ["a 0", "b 0", "b 1"]}
    assert as_dataset([{"observations": seen, "actions": ACTIONS}] * 2).images["eye"].shape == (18, 4, 5, 3)


def pictured(eye: np.ndarray) -> dict[str, Any]:
    return {"observations": {"a": OBS, "eye": eye}, "actions": ACTIONS}


def test_joined_parts_keep_what_all_have_of_episodes_and_tell_what_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = (as_dataset((OBS, ACTIONS)) for _ in range(2))
    one.episode_extras["success"], two.episode_extras["success"] = torch.tensor([True]), torch.tensor([False])
    one.extras["states"], two.extras["states"] = torch.zeros(9, 2), torch.zeros(9, 3)
    both = as_dataset([one, two])
    assert both.episode_extras["success"].tolist() == [True, False] and not both.extras
    assert re.search(mentions("data states"), caplog.text)


def test_joined_parts_of_two_tasks_name_neither(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = []
    for name, rate in (("avoid", 20.0), ("pointmaze-umaze", 10.0), ("avoid", 20.0)):
        one = as_dataset((OBS, ACTIONS))
        one.meta["env"] = {"name": name}
        one.meta["interface"] = {"control_hz": rate, "robot": "arm"}
        files.append(str(tmp_path / f"{len(files)}.hdf5"))
        write_dataset(files[-1], one)
    mixed = convert(DataConvertConfig(dataset=files, out=str(tmp_path / "mixed.hdf5")))
    again = read_dataset(tmp_path / "mixed.hdf5")
    assert recorded_task(mixed.meta) is None and recorded_task(again.meta) is None
    assert interface_of(mixed.meta, 3, 2) == {"robot": "arm"}
    assert re.search(mentions("env=avoid env=pointmaze-umaze mixed.hdf5"), caplog.text)
    same = convert(DataConvertConfig(dataset=[files[0], files[2]], out=str(tmp_path / "same.hdf5")))
    assert recorded_task(same.meta) == ("avoid", {}) and same.meta["interface"]["control_hz"] == 20.0


def test_a_number_in_the_place_of_a_file_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=mentions("3 file")):
        convert(DataConvertConfig(dataset=3, out=str(tmp_path / "x.hdf5")))


def test_small_matrices_are_vectors() -> None:
    assert as_dataset(pictured(np.zeros((9, 4, 4)))).obs_dim == 3 + 16
    assert as_dataset(pictured(np.zeros((9, 2, 20)))).obs_dim == 3 + 40


def test_an_empty_list_of_episodes_is_told_as_such() -> None:
    with pytest.raises(DatasetError, match=mentions("list of episodes empty")):
        burnish.clone([])


@pytest.mark.parametrize("frames", [9, 8])
def test_an_episode_with_cameras_may_have_one_observation_more_than_actions(frames: int) -> None:
    pictures = np.arange(9, dtype=np.uint8)[:, None, None, None] + PICTURES
    seen = {"a": OBS, "eye": pictures[:frames]}
    data = as_dataset([{"observations": seen, "actions": ACTIONS[:8]}] * 2)
    assert data.lengths.tolist() == [8, 8] and data.next_observations is not None
    torch.testing.assert_close(data.next_observations[[7, 15]], torch.tensor(OBS[[8, 8]]).float())
    shown = data.images["eye"][torch.arange(16)]
    assert shown[:, 0, 0, 0].tolist() == [*range(8), *range(8)]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (3, "int"),
        ("text", "str"),
        ([], "list of episodes empty"),
        ([(OBS, ACTIONS), {"obs": OBS[:1], "actions": ACTIONS[:0], "rewards": []}], "[1] actions empty"),
        ({"obs": OBS, "actions": ACTIONS, "images": PICTURES}, "'images' by camera name (9, 4, 5, 3)"),
        (pictured(np.zeros((9, 8, 9, 3), np.float32)), "'eye' float32 (9, 8, 9, 3) uint8 (N, H, W, 3)"),
        (pictured(np.zeros((9, 8, 9), np.uint8)), "'eye' uint8 (9, 8, 9) flatten"),
        (pictured(np.zeros((9, 3, 8, 9))), "'eye' float64 (9, 3, 8, 9)"),
        ((np.zeros((9, 8, 9, 3)), ACTIONS), "'observations' (9, 8, 9, 3) uint8"),
        ({"observations": OBS}, "actions observations"),
        ((OBS, ACTIONS[:4]), "observations 4 (9, 3)"),
        ({"obs": OBS, "actions": ACTIONS[:8], "truncated": FLAGS[:8]}, "observations 9 8 next_observations"),
        (([[1.0], [2.0, 3.0]], ACTIONS), "observations list"),
        ({"obs": OBS, "actions": ACTIONS, "rewards": [1.0]}, "rewards 9 (1,)"),
        ({"obs": OBS, "actions": ACTIONS, "lengths": [9], "episode": [0] * 9}, "lengths episode"),
        ({"obs": OBS, "actions": ACTIONS, "lengths": [2, 3]}, "lengths 9 5"),
        ({"obs": OBS, "actions": ACTIONS, "episode_ends": [2, 5]}, "episode_ends 9 5"),
        ({"obs": OBS, "actions": ACTIONS, "episode": [0, 0, 1]}, "episode 9 (3,)"),
        ({"observations": {"eye": PICTURES}, "actions": ACTIONS}, "eye"),
        ({"obs": OBS, "actions": ACTIONS, "dones": FLAGS}, "'dones' 'terminated' 'truncated'"),
        ([{"obs": OBS, "actions": ACTIONS, "done": FLAGS}], "data[0] 'done' 'terminated' 'truncated'"),
        ([(OBS, ACTIONS), (OBS[:, :2], ACTIONS)], "data[1] (3, 2) (2, 2)"),
        ([EPISODE | {"goal": OBS}, EPISODE], "1 2 'goal'"),
        ([EPISODE | {"goal": OBS}, EPISODE | {"goal": OBS[:, :1]}], "'goal' (3,) (1,)"),
        ([EPISODE, EPISODE | {"reward": FLAGS}], "1 2 'rewards'"),
        ([(OBS, ACTIONS), EPISODE | {"reward": FLAGS}], "1 2 'rewards'"),
        ([EPISODE | {"obs": {"a": OBS}}, EPISODE | {"obs": {"b": OBS}}], "a b observations"),
    ],
)
def test_an_error_names_keys_and_shapes_and_never_prints_values(given: Any, parts: str) -> None:
    with pytest.raises(DatasetError, match=mentions(parts)) as caught:
        as_dataset(given)
    assert len(str(caught.value)) < 400


def write(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
        return path
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            file[key] = value
    return path


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_files_of_plain_arrays_need_no_rewards(suffix: str, tmp_path: Path) -> None:
    plain = read_dataset(write(tmp_path / f"a{suffix}", {"observations": OBS, "actions": ACTIONS}))
    assert plain.meta["format"] == "arrays" and plain.lengths.tolist() == [9]
    arrays = {"observations/a": OBS[:, :1], "observations/b": OBS[:, 1:], "observations/eye": PICTURES}
    parts = read_dataset(
        write(tmp_path / f"b{suffix}", {**arrays, "actions": ACTIONS, "episode_ends": [4, 9], "other": OBS})
    )
    assert parts.lengths.tolist() == [4, 5] and parts.image_shapes == {"eye": (4, 5, 3)}
    torch.testing.assert_close(parts.observations, torch.tensor(OBS).float())


PLAIN = {"observations": OBS, "actions": ACTIONS, "rewards": np.arange(9), "terminals": FLAGS}
"""Own arrays under the names of OGBench and D4RL."""
LAST = np.arange(9) == 8


@pytest.mark.parametrize("marks", [{}, {"episode_ends": [4, 9]}, {"masks": FLAGS, "lengths": [4, 5]}])
def test_terminals_of_own_archives_end_the_task_and_lose_no_row(marks: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", {**PLAIN, **marks})
    data = read_dataset(path)
    assert dataset_format(path) == "arrays" and data.lengths.tolist() == [4, 5]
    assert data.terminated.tolist() == FLAGS.tolist() and data.truncated.tolist() == LAST.tolist()
    assert data.rewards.tolist() == list(range(9)) and data.meta["not_read"] == [*({"masks"} & set(marks))]
    given = {key: value for key, value in {**PLAIN, **marks}.items() if key != "masks"}
    assert data.digest() == as_dataset(given).digest()


@pytest.mark.parametrize("mark", ["truncated", "timeouts", "episode_start", "episode", "traj_lengths"])
def test_archives_with_marks_that_ogbench_lacks_are_plain_arrays(mark: str, tmp_path: Path) -> None:
    values = {"episode": LAST, "episode_start": [0, 8], "traj_lengths": [8, 1]}
    ends = {"terminals": np.arange(9) == 7, mark: values.get(mark, LAST)}
    data = read_dataset(write(tmp_path / "a.npz", {"observations": OBS, "actions": ACTIONS, **ends}))
    assert data.meta["format"] == "arrays" and data.lengths.tolist() == [8, 1]


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"rewards": np.arange(9), "masks": FLAGS},
        {"rewards": np.arange(9), "next_observations": OBS, "qpos": OBS, "qvel": OBS},
    ],
)
def test_what_ogbench_writes_is_of_ogbench(others: dict[str, Any], tmp_path: Path) -> None:
    arrays = {"observations": OBS, "actions": ACTIONS, "terminals": FLAGS | LAST, **others}
    assert dataset_format(write(tmp_path / "a.npz", arrays)) == "ogbench"


def test_a_group_of_observations_is_of_plain_arrays(tmp_path: Path) -> None:
    parts = {"observations/pos": OBS[:, :1], "observations/vel": OBS[:, 1:]}
    given = {**PLAIN, **parts, "episode_ends": [4, 9]}
    data = read_dataset(write(tmp_path / "a.hdf5", {k: v for k, v in given.items() if k != "observations"}))
    assert data.meta["format"] == "arrays" and data.terminated.tolist() == FLAGS.tolist()
    torch.testing.assert_close(data.observations, torch.tensor(OBS).float())
    assert dataset_format(write(tmp_path / "b.hdf5", PLAIN)) == "d4rl"


WRONG = {
    "reward_": (np.arange(9), "reward_ did you mean rewards?"),
    "episode_end": ([4, 9], "episode_end did you mean episode_ends?"),
    "Terminal": (FLAGS, "Terminal did you mean terminated?"),
    "action_": (ACTIONS, "action_ unknown key"),
    "states": (OBS, "states observations is read"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("suffix", ["", ".npz", ".hdf5"])
def test_names_that_are_not_read_are_told_once(
    suffix: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value, parts = WRONG[name]
    given = {"observations": OBS, "actions": ACTIONS, name: value}
    data = read_dataset(write(tmp_path / f"a{suffix}", given)) if suffix else as_dataset([given, given])
    assert data.meta["not_read"] == [name] and not data.rewards.any()
    torch.testing.assert_close(data.observations[:9], torch.tensor(OBS).float())
    (record,) = caplog.records
    assert re.search(mentions(f"{parts} docs/own_data.md"), record.getMessage())


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_images_of_files_without_a_camera_do_not_blame_the_file(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a{suffix}", {"observations": OBS, "actions": ACTIONS, "images": PICTURES})
    with pytest.raises(DatasetError, match=mentions("'images' camera images/wrist (9, 4, 5, 3)")):
        read_dataset(path)


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_dones_of_files_are_refused_unless_something_else_marks_ends(suffix: str, tmp_path: Path) -> None:
    arrays = {"observations": OBS, "actions": ACTIONS, "rewards": np.arange(9), "dones": FLAGS}
    path = write(tmp_path / f"a{suffix}", arrays)
    with pytest.raises(DatasetError, match=mentions(f"a{suffix} 'dones' 'terminated' 'truncated'")):
        read_dataset(path)
    for number, marks in enumerate(({"terminated": FLAGS}, {"truncated": FLAGS}, {"episode_ends": [4, 9]})):
        data = read_dataset(write(tmp_path / f"{number}{suffix}", {**arrays, **marks}))
        assert data.meta["not_read"] == ["dones"] and data.lengths.tolist() == [4, 5]


def test_the_page_lists_the_accepted_keys() -> None:
    page = (Path(burnish.__file__).parents[1] / "docs" / "own_data.md").read_text(encoding="utf-8")
    section = page.split("## Accepted keys")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {key.strip(" `"): tuple(re.findall("`(.+?)`", key + others)) for key, others in rows}
    assert listed == KEYS


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("given", repeated([(OBS, ACTIONS), as_dataset((OBS, ACTIONS))]))
def test_objects_are_cloned_and_the_run_can_be_resumed(given: Any, tmp_path: Path) -> None:
    run = burnish.clone(
        given, "trainer.checkpoint_every=1", directory=tmp_path / "runs" / "one", **TINY, **QUIET
    )
    kept = Path(run.directory.config["dataset"])
    assert kept.parent == tmp_path / "runs" / "data" and read_dataset(kept).num_frames == 9
    burnish.clone(given, directory=tmp_path / "runs" / "two", **TINY, **QUIET)
    assert len(list(kept.parent.iterdir())) == 1
    shutil.rmtree(run.path / "checkpoints" / "2")
    assert burnish.train(resume=run).directory.latest() == 2
    found = burnish.inspect_data(kept, out=tmp_path / "seen", measures=False)
    assert found["frames"] == 9
    with pytest.raises(ConfigError, match=mentions("init ndarray")) as caught:
        burnish.train(init=np.zeros(1000), algo="bc")
    assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("no_picture")
def test_objects_are_stored_in_as_many_arrays_however_many_episodes_there_are(tmp_path: Path) -> None:
    rng, kept = np.random.default_rng(0), []
    for num in (1, 9):
        one = {
            key: rng.normal(size=(2, 3)) for key in ("observations", "next_observations", "actions", "goal")
        }
        data = as_dataset([one] * num)
        path = stored_dataset(data, tmp_path)
        assert read_dataset(path).digest() == data.digest()
        with h5py.File(path) as file:
            kept.append(sorted(datasets_of(file)))
    assert kept[0] == kept[1]


def test_objects_without_a_place_or_given_as_an_override_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=mentions("file data=")):
        burnish.clone(EPISODE, directory=tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=mentions("dict dataset=…")) as caught:
        burnish.train(EPISODE)
    assert "\n" not in str(caught.value)


def test_names_rates_and_texts_of_lerobot_reach_policy_card_and_export(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = tmp_path / "lerobot"
    write_lerobot(folder, made())
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["action"]["names"] = {"motors": ["shoulder.pos", "gripper.pos"]}
    info["robot_type"] = "so101"
    (folder / "meta/info.json").write_text(json.dumps(info))
    limits: dict[str, Any] = {"action_low": -90, "action_high": [90, 100]}
    run = burnish.clone(folder, directory=tmp_path / "run", **limits, **TINY, **QUIET)
    found, policy = locate(run.path), burnish.load_policy(run)
    facts = surroundings_of(found, policy)
    assert facts.control_hz == 10 and facts.action_names == ["shoulder.pos", "gripper.pos"]
    assert facts.obs_names == [f"observation.state {i}" for i in range(3)]
    assert (facts.action_low, facts.action_high) == ([-90.0, -90.0], [90.0, 100.0])
    assert "so101" in (found.path / "README.md").read_text()
    told = served_by(ServeConfig(policy=str(run.path))).schema
    assert (told.control_hz, told.action_low, told.action_high) == (10, (-90.0, -90.0), (90.0, 100.0))
    other = surroundings_of(found, policy, ExportConfig(control_hz=50, action_low=-1, action_high=1))
    assert other.control_hz == 50 and other.action_low == [-1.0, -1.0]
    shown = burnish.inspect_data(folder, out=tmp_path / "seen", measures=False)
    assert shown["interface"]["robot"] == "so101" and shown["interface"]["control_hz"] == 10


def test_robomimics_names_and_rate_are_kept(tmp_path: Path) -> None:
    data = as_dataset((OBS, ACTIONS))
    data.meta["env_args"] = {"env_name": "Thing", "type": 1, "env_kwargs": {"control_freq": 20}}
    write_robomimic(tmp_path / "a.hdf5", data, layout={"eef_pos": 2, "object": 1})
    read = read_dataset(tmp_path / "a.hdf5")
    assert interface_of(read.meta, 3, 2) == {
        "control_hz": 20.0,
        "obs_names": ["eef_pos 0", "eef_pos 1", "object 0"],
    }


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"action_low": -1}, "action_low action_high None"),
        ({"action_low": 1, "action_high": 1}, "action_low action_high"),
        ({"action_low": [1, 2, 3], "action_high": 9}, "action_low 2 [1, 2, 3]"),
        ({"action_low": -1, "action_high": 1, "env": "avoid"}, "action_low env"),
    ],
)
def test_limits_that_are_none_are_refused(given: dict[str, Any], parts: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions(parts)):
        burnish.clone((OBS, ACTIONS), directory=tmp_path / "run", **given, **TINY, **QUIET)


@pytest.mark.parametrize("rate", [0.0, -3.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=mentions("control_hz positive")):
        with_given({}, 2, control_hz=rate, action_low=None, action_high=None)


def test_actions_outside_of_given_limits_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for scale, count in ((1.0, 0), (300.0, 1)):
        caplog.clear()
        made = tmp_path / f"{scale:g}"
        burnish.clone((OBS, ACTIONS * scale), directory=made, action_low=-1, action_high=1, **TINY, **QUIET)
        found = [one.message for one in caplog.records if "lie outside" in one.message]
        assert len(found) == count and all("100 % of the actions" in one for one in found)


def test_cameras_that_no_encoder_reads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    wide = np.zeros((9, 32, 32, 3), np.uint8)
    for encoder, count in (("state", 1), ("vit", 0)):
        caplog.clear()
        burnish.clone(pictured(wide), directory=tmp_path / encoder, encoder=encoder, **TINY, **QUIET)
        found = [one.message for one in caplog.records if re.search(mentions("cameras eye"), one.message)]
        assert len(found) == count


def test_what_a_file_says_of_its_entries_may_be_anything() -> None:
    odd = {"obs_names": [1, 2, 3], "action_names": "ab", "control_hz": float("nan"), "action_low": [0.0, "x"]}
    assert interface_of({"interface": {**odd, "robot": 3, "instructions": {}}}, 3, 2) == {}
    assert interface_of({"interface": 7}, 3, 2) == {} == interface_of({}, 3, 2)


@pytest.mark.usefixtures("no_picture")
def test_inspection_shows_every_camera(tmp_path: Path) -> None:
    given = {"observations": {"a": OBS, "left eye": PICTURES}, "actions": 90 * ACTIONS}
    found = burnish.inspect_data(given, out=tmp_path / "seen", measures=False)
    assert found["cameras"] == {"left eye": [4, 5, 3]}
    assert (tmp_path / "seen" / "frames-left_eye.png").is_file()
    assert any("action_low" in remark for remark in found["remarks"])


@pytest.mark.parametrize("names", [("observations", "observations/a"), ("observations/a", "observations")])
def test_observations_as_one_array_and_by_name_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    np.savez(tmp_path / "both.npz", actions=ACTIONS, episode_ends=[len(OBS)], **dict.fromkeys(names, OBS))
    with pytest.raises(DatasetError, match=mentions("both.npz 'observations' 'observations/<name>'")):
        read_dataset(tmp_path / "both.npz")
