"""Laws of every registered reader of datasets: ends, successors, windows, statistics, options.

What is read is one small dataset (`dataset_files.made`), written in every format. A reader without a file
here, or with an option that nobody tries, fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from dataset_files import CUT, FORMATS, LENGTHS, made, write_dppo, write_ogbench
from messages import mentions

from envs.datasets import (
    EpisodeDataset,
    free_memory,
    read_dataset,
    reader_options,
    readers,
    write_d4rl,
    write_minari,
    write_robomimic,
)
from envs.datasets.array_storage import Disk
from envs.datasets.options import hint_name
from envs.datasets.windows import Windows
from policies.errors import ConfigError
from policies.policy_config import ChunkSpec

ENDS_KNOWN = ("arrays", "d4rl", "dppo", "lerobot", "minari", "robomimic")
"""Formats that tell an end by termination from one by truncation; all others only cut."""
SUCCESSORS = ("arrays", "d4rl", "minari", "ogbench", "robomimic")
"""Formats that hold the observation after the last action of an episode, as they are written here."""

each = pytest.mark.parametrize("name", sorted(readers()))


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    return FORMATS[name].into(tmp_path)[0]


def last_frames(data: EpisodeDataset) -> torch.Tensor:
    return data.episode_start[1:] - 1


def test_every_reader_has_a_file_here() -> None:
    assert set(FORMATS) == set(readers()) == set(OPTIONS)


@each
def test_a_file_is_of_one_format(name: str, path: Path) -> None:
    assert [other for other, reader in readers().items() if reader.matches(path)] == [name]


@each
def test_numbers_are_those_that_were_written(name: str, path: Path) -> None:
    data, original = read_dataset(path), made()
    assert data.lengths.tolist() == list(LENGTHS) and data.source.startswith(str(path))
    for key in ("observations", "actions"):
        torch.testing.assert_close(getattr(data, key), getattr(original, key), atol=1e-6, rtol=0)
    expected = torch.zeros_like(original.rewards) if name == "ogbench" else original.rewards
    torch.testing.assert_close(data.rewards, expected, atol=0, rtol=0)


@each
def test_every_episode_ends_once_and_at_its_last_frame(name: str, path: Path) -> None:
    data = read_dataset(path)
    last = last_frames(data)
    ends = [name in ENDS_KNOWN and number != CUT for number in range(len(LENGTHS))]
    assert data.terminated[last].tolist() == ends
    assert torch.equal(data.truncated[last], ~data.terminated[last])
    assert int((data.terminated | data.truncated).sum()) == len(LENGTHS), "no flag inside of an episode"


@each
def test_successors_are_true_or_there_is_no_transition(name: str, path: Path) -> None:
    data, original = read_dataset(path), made()
    assert (data.next_observations is not None) == (name in SUCCESSORS)
    steps = data.transitions()
    cut = set() if name in SUCCESSORS else {int(last_frames(data)[CUT])}
    assert set(range(data.num_frames)) - set(steps.frames.tolist()) == cut
    matter = ~steps.terminated  # values never look at the others
    expected = original.next_observations[steps.frames]
    torch.testing.assert_close(steps.next_observations[matter], expected[matter], atol=1e-6, rtol=0)


@each
@pytest.mark.parametrize("pad", [True, False])
def test_windows_stay_within_their_episode(name: str, path: Path, pad: bool) -> None:
    data = read_dataset(path)
    chunk = ChunkSpec(action_dim=2, horizon=4, act_steps=2, obs_steps=2, action_start=1)
    windows = Windows(data, chunk, pad_end=pad)
    batch = windows.gather(torch.arange(windows.num))
    found = []
    for episode, (first, end) in enumerate(zip(data.episode_start, data.episode_start[1:], strict=False)):
        for frame in range(int(first), int(end)):
            rows = torch.arange(4) + frame - 1
            if not pad and frame - 1 + 4 > int(end):
                continue
            at = len(found)
            found.append((frame, episode))
            inside = rows.clamp(int(first), int(end) - 1)
            assert torch.equal(batch.action[at], data.actions[inside])
            assert torch.equal(batch.mask[at], rows == inside)
            seen = torch.tensor([frame - 1, frame]).clamp(int(first))
            assert torch.equal(batch.obs[at], data.observations[seen])
    assert windows.frames.tolist() == [frame for frame, _ in found]


@each
def test_statistics_are_those_of_the_frames(name: str, path: Path) -> None:
    data = read_dataset(path)
    for key, rows in (("state", data.observations), ("action", data.actions)):
        frames, found = rows.double().numpy(), data.statistics()[key]
        expected = {"min": frames.min(0), "max": frames.max(0), "mean": frames.mean(0)}
        for which, value in (expected | {"std": frames.std(0, ddof=1)}).items():
            np.testing.assert_allclose(found[which].numpy(), value, rtol=1e-6, atol=1e-7)


# -- options --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A value of an option, and what it has to change.

    Attributes:
        value: What is given; `{folder}` in texts stands for the folder of the file.
        law: Tells of the dataset read without it and of that read with it whether it was heard.
        write: Writes what is read; None: as everywhere here.
        needs: Package that it takes.
    """

    value: Any
    law: Callable[[EpisodeDataset, EpisodeDataset], bool]
    write: Callable[[Path, EpisodeDataset], Any] | None = None
    needs: str = "numpy"


def bc_term(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool((one - two).abs().max() < 1e-5)


def with_goal(data: EpisodeDataset) -> EpisodeDataset:
    return replace(data, extras={"goal": data.observations[:, :2] + 1, "speed": data.observations[:, 2]})


def without_limits(path: Path, data: EpisodeDataset) -> None:
    """Write a D4RL file that tells the ends of episodes by terminals alone."""
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards"):
            file[key] = getattr(data, key).numpy()
        file["terminals"] = data.terminated.numpy()


def doubled(path: Path, data: EpisodeDataset, beside: str = "normalization.npz") -> None:
    """Write a DPPO file with limits by which everything is twice what is stored."""
    write_dppo(path, data)
    with np.load(path.parent / "normalization.npz") as limits:
        np.savez(path.parent / beside, **{key: 2 * value for key, value in limits.items()})


def with_positions(path: Path, data: EpisodeDataset) -> None:
    """Write an OGBench file with simulator states, all of them far from any goal."""
    write_ogbench(path, data)
    with np.load(path) as old:
        np.savez(path, qpos=np.full((len(old["actions"]), 2), 99.0), **old)


OPTIONS: dict[str, dict[str, Tried]] = {
    "arrays": {},
    "d4rl": {
        "max_episode_steps": Tried(
            4,
            lambda plain, told: (
                plain.lengths.tolist() == [5, 15, 4] and told.lengths.tolist() == [4, 1, 4, 4, 4, 3, 4]
            ),
            without_limits,
        ),
        "d4rl_compat": Tried(True, lambda plain, told: told.num_frames == plain.num_frames - 2),
        "infos": Tried(
            False,
            lambda plain, told: set(plain.extras) == {"goal", "speed"} and not told.extras,
            lambda path, data: write_d4rl(path, with_goal(data)),
        ),
    },
    "dppo": {
        "normalization": Tried(
            "{folder}/other.npz",
            lambda plain, told: bc_term(told.actions, 2 * plain.actions),
            lambda path, data: doubled(path, data, "other.npz"),
        ),
        "scaled": Tried(True, lambda plain, told: bc_term(2 * told.actions, plain.actions), doubled),
    },
    "lerobot": {
        "obs_keys": Tried(
            ["action", "observation.state"],
            lambda plain, told: bc_term(told.observations, torch.hstack([plain.actions, plain.observations])),
        ),
        "done_is_terminal": Tried(
            True,
            lambda plain, told: (
                int(plain.terminated.sum()) == len(LENGTHS) - 1
                and bool(told.terminated[last_frames(told)].all())
            ),
        ),
    },
    "minari": {
        "obs_keys": Tried(
            ["desired_goal"],
            lambda plain, told: bc_term(told.observations, plain.extras["goal"]),
            lambda path, data: write_minari(path, with_goal(data)),
        ),
        "infos": Tried(
            False,
            lambda plain, told: "speed" in plain.extras and "speed" not in told.extras,
            lambda path, data: write_minari(path, with_goal(data)),
        ),
    },
    "ogbench": {
        "task": Tried(
            "pointmaze-medium-navigate-singletask-task1-v0",
            lambda plain, told: not plain.rewards.any() and bool((told.rewards == -1).all()),
            with_positions,
            "ogbench",
        ),
        "compact": Tried(True, lambda plain, told: bc_term(told.lengths, plain.lengths + 1)),
    },
    "robomimic": {
        "mask": Tried(
            "valid",
            lambda plain, told: (plain.num_episodes, told.num_episodes) == (4, 2),
            lambda path, data: write_robomimic(path, data, valid_fraction=0.5),
        ),
        "obs_keys": Tried(
            ["b"],
            lambda plain, told: bc_term(told.observations, plain.observations[:, 1:]),
            lambda path, data: write_robomimic(path, data, layout={"a": 1, "b": 2}),
        ),
    },
}
"""A value for every option of every reader but `cache`, which they all have."""


@each
def test_every_option_is_tried_here(name: str) -> None:
    assert {*OPTIONS[name], "cache"} == set(reader_options()[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, known in OPTIONS.items() for option in known]
)
def test_an_option_changes_what_it_says(name: str, option: str, tmp_path: Path) -> None:
    tried = OPTIONS[name][option]
    pytest.importorskip(tried.needs, reason=f"needs the package '{tried.needs}'")
    form = FORMATS[name] if tried.write is None else replace(FORMATS[name], write=tried.write)
    path, _ = form.into(tmp_path)
    value = tried.value.format(folder=tmp_path) if isinstance(tried.value, str) else tried.value
    assert tried.law(read_dataset(path), read_dataset(path, **{option: value}))


@each
def test_what_has_no_room_goes_to_the_folder_that_is_named(
    name: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_dataset(path)
    monkeypatch.setattr(free_memory, "free_memory", lambda: 0)
    spilled = read_dataset(path, cache=tmp_path / "cache")
    assert isinstance(spilled.storage, Disk) and spilled.storage.folder == tmp_path / "cache"
    assert spilled.digest() == plain.digest()


@each
def test_options_of_others_and_of_other_types_are_refused(name: str, path: Path) -> None:
    options = reader_options()
    others = {option for known in options.values() for option in known} - set(options[name])
    for option in (*others, "no_such_option"):
        owners = " ".join(other for other, known in options.items() if option in known)
        listed = f"{path} {name} {' '.join(options[name])}"
        assert re.search(mentions(f"reader.{option} {owners} {listed}"), refusal(path, **{option: None}))
    for option, known in options[name].items():
        wanted = f"reader.{option} {name} {hint_name(known.hint)} 1.5"
        assert re.search(mentions(wanted), refusal(path, **{option: 1.5}))


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read_dataset(path, **options)
    return str(refused.value)
