"""One small dataset, written in every format that a reader is registered for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from envs.datasets import Episode, EpisodeDataset, write_d4rl, write_minari, write_robomimic

LENGTHS = (5, 3, 12, 4)
CUT = 1
"""Number of the episode that was truncated; the others terminated."""


def made() -> EpisodeDataset:
    rng = np.random.default_rng(0)
    return EpisodeDataset.from_episodes(
        [
            Episode(
                observations=rng.normal(size=(length + 1, 3)).astype(np.float32),
                actions=rng.normal(size=(length, 2)).astype(np.float32),
                rewards=rng.normal(size=length).astype(np.float32),
                terminated=number != CUT,
                truncated=number == CUT,
                success=number != CUT,
            )
            for number, length in enumerate(LENGTHS)
        ]
    )


def write_ogbench(path: Path, data: EpisodeDataset) -> None:
    """Write every episode with its last successor as a row without an action."""
    parts = [data.select([number]) for number in range(data.num_episodes)]
    np.savez_compressed(
        path,
        observations=np.concatenate([np.vstack([p.observations, p.next_observations[-1:]]) for p in parts]),
        actions=np.concatenate([np.vstack([p.actions, p.actions[-1:]]) for p in parts]),
        terminals=np.concatenate([np.arange(p.num_frames + 1) == p.num_frames for p in parts]),
    )


def write_d4rl_maze(path: Path, obs_dim: int, action_dim: int, *, frames: int = 60, steps: int = 20) -> Path:
    """Write what D4RL's files of mazes hold: states without goals, which lie under `infos/goal`."""
    rng = np.random.default_rng(0)
    ends = np.arange(1, frames + 1) % steps == 0
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(frames, obs_dim)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (frames, action_dim)).astype(np.float32)
        file["rewards"] = np.zeros(frames, np.float32)
        file["terminals"], file["timeouts"] = np.zeros(frames, bool), ends
        goals = rng.normal(size=(frames // steps, 2)).repeat(steps, axis=0)
        file["infos/goal"] = goals.astype(np.float32)
        file["infos/qpos"] = rng.normal(size=(frames, 15)).astype(np.float32)
    return path


ENDS = (("min", -1.0), ("max", 1.0 - 1e-6))  # DPPO's scaling is then the identity


def write_dppo(path: Path, data: EpisodeDataset) -> None:
    np.savez(
        path, states=data.observations, actions=data.actions, rewards=data.rewards,
        terminals=data.terminated, traj_lengths=data.lengths,
    )  # fmt: skip
    wide = {f"{what}_{end}": np.full(n, s) for what, n in (("obs", 3), ("action", 2)) for end, s in ENDS}
    np.savez(path.parent / "normalization.npz", **wide)


PARQUET = "data/chunk-000/file-000.parquet"


def write_lerobot(path: Path, data: EpisodeDataset) -> None:
    """Write a folder as LeRobot's documentation lays it out; an end by termination is a success."""
    lengths, over = data.lengths.tolist(), (data.terminated | data.truncated).numpy()
    columns: dict[str, np.ndarray] = {
        "observation.state": data.observations.numpy(),
        "action": data.actions.numpy(),
        "next.reward": data.rewards.numpy(),
        "next.done": over,
        "next.success": data.terminated.numpy(),
        "timestamp": np.concatenate([np.arange(n) / 10 for n in lengths]).astype(np.float32),
        "frame_index": np.concatenate([np.arange(n) for n in lengths]),
        "episode_index": np.repeat(np.arange(len(lengths)), lengths),
        "index": np.arange(data.num_frames),
        "task_index": np.zeros(data.num_frames, np.int64),
    }
    features = {
        key: {"dtype": str(value.dtype), "shape": list(value.shape[1:]) or [1]}
        for key, value in columns.items()
    }
    info = {"codebase_version": "v3.0", "fps": 10, "features": features}
    info |= {"total_episodes": len(lengths), "total_frames": data.num_frames}
    (path / "meta").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(info))
    write_parquet(path / PARQUET, columns)
    episodes = {"episode_index": np.arange(len(lengths)), "length": np.array(lengths)}
    write_parquet(path / "meta/episodes/chunk-000/file-000.parquet", episodes)


def write_parquet(file: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write arrays (N, ...) as columns; vectors as lists."""
    import pyarrow as pa
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    rows = {key: pa.array(list(value) if value.ndim > 1 else value) for key, value in columns.items()}
    parquet.write_table(pa.table(rows), file)


def read_parquet(file: Path) -> dict[str, np.ndarray]:
    """Return the columns of a file as arrays (N, ...)."""
    from pyarrow import parquet

    columns = parquet.read_table(file).to_pydict()
    return {key: np.array(values) for key, values in columns.items()}


@dataclass(frozen=True)
class Written:
    """How a format is written.

    Attributes:
        write: Writes a dataset to a path.
        name: What the file or folder is called.
        numbers: The file with the numbers, below a folder.
        action: What the format calls actions.
        needs: Package that reading and writing takes.
    """

    write: Callable[[Path, EpisodeDataset], Any]
    name: str = "demos.hdf5"
    numbers: str = ""
    action: str = "actions"
    needs: str = "numpy"

    def into(self, folder: Path, data: EpisodeDataset | None = None) -> tuple[Path, Path]:
        """Write a dataset; returns what is read and the file with the numbers."""
        pytest.importorskip(self.needs, reason=f"needs the package '{self.needs}'")
        path = folder / self.name
        self.write(path, made() if data is None else data)
        return path, path / self.numbers if self.numbers else path


def write_arrays(path: Path, data: EpisodeDataset) -> None:
    names = ("observations", "actions", "rewards", "terminated", "next_observations", "lengths")
    np.savez(path, **{name: getattr(data, name).numpy() for name in names})


FORMATS = {
    "arrays": Written(write_arrays, "demos.npz"),
    "d4rl": Written(write_d4rl),
    "dppo": Written(write_dppo, "demos.npz"),
    "lerobot": Written(write_lerobot, "demos", PARQUET, "action", "pyarrow"),
    "minari": Written(write_minari, "demos-v0", "data/main_data.hdf5"),
    "ogbench": Written(write_ogbench, "demos.npz"),
    "robomimic": Written(write_robomimic),
}
"""Every registered format, by its name."""
