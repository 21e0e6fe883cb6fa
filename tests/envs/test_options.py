"""Options of readers: each one reaches its reader, and what a format does not have is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions

from envs.datasets import (
    Episode,
    EpisodeDataset,
    absolute_options,
    read_dataset,
    reader_options,
    supported_options,
    write_d4rl,
    write_minari,
    write_robomimic,
)
from envs.datasets.options import reader_options_of
from policies.errors import ConfigError


@pytest.fixture
def dataset() -> EpisodeDataset:
    def one(seed: int) -> Episode:
        rows = torch.linspace(0, 1, 5)[:, None].numpy() + seed
        return Episode(rows, rows[:-1], rows[:-1, 0], terminated=False, truncated=True, seed=seed)

    return EpisodeDataset.from_episodes([one(0), one(1)])


def test_every_option_is_typed_explained_and_has_a_default() -> None:
    found = reader_options()
    assert {"d4rl", "dppo", "lerobot", "minari", "ogbench", "robomimic"} <= set(found)
    for options in found.values():
        for option in options.values():
            assert option.hint is not Any and option.text, option
    assert {"d4rl_compat", "max_episode_steps"} <= set(found["d4rl"])
    assert found["d4rl"]["d4rl_compat"].default is False


def test_arguments_are_explained_by_their_docstring() -> None:
    def read(path: str, *, one: int = 3, two: str | None = None) -> None:
        """Read.

        Args:
            path: A file.
            one: The first,
                on two lines.
            two: The second: a text.

        Raises:
            ValueError: Never.
        """

    found = reader_options_of(read)
    assert {name: one.text for name, one in found.items()} == {
        "one": "The first, on two lines.",
        "two": "The second: a text.",
    }


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (write_d4rl, {"d4rl_compt": True}, "reader.d4rl_compt"),
        (write_d4rl, {"scaled": True}, "reader.scaled toy-v0 d4rl"),
        (write_robomimic, {"infos": True}, "reader.infos d4rl"),
        (write_d4rl, {"max_episode_steps": "long"}, "reader.max_episode_steps d4rl long"),
        (write_d4rl, {"max_episode_steps": True}, "reader.max_episode_steps True"),
        (write_d4rl, {"max_episode_steps": 0}, "reader.max_episode_steps 1 0"),
        (write_d4rl, {"d4rl_compat": 1}, "reader.d4rl_compat d4rl 1"),
        (write_minari, {"obs_keys": "observation"}, "reader.obs_keys minari observation"),
        (write_minari, {"obs_keys": [1]}, "reader.obs_keys 1"),
    ],
)  # fmt: skip
def test_what_a_format_does_not_have_is_refused_by_name(
    write: Any, options: dict[str, Any], message: str, dataset: EpisodeDataset, tmp_path: Path
) -> None:
    write(tmp_path / "toy-v0", dataset)
    with pytest.raises(ConfigError, match=mentions(message)):
        read_dataset(tmp_path / "toy-v0", **options)


def test_options_are_taken_as_the_reader_takes_them(dataset: EpisodeDataset, tmp_path: Path) -> None:
    write_d4rl(tmp_path / "toy.hdf5", dataset)
    assert read_dataset(tmp_path / "toy.hdf5").num_frames == 8
    assert read_dataset(tmp_path / "toy.hdf5", d4rl_compat=True).num_frames == 6, "time-outs are dropped"
    assert supported_options(tmp_path / "toy.hdf5", {"d4rl_compat": True, "mask": "train"}) == {
        "d4rl_compat": True
    }


def test_files_among_options_mean_the_same_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = {"normalization": "limits.npz", "task": "cube", "max_episode_steps": 3}
    assert absolute_options(given) == given | {"normalization": str(tmp_path / "limits.npz")}
    assert absolute_options({"normalization": "~/x.npz"})["normalization"] == str(tmp_path / "home/x.npz")
    assert absolute_options({"normalization": None}) == {"normalization": None}
