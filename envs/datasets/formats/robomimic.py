"""robomimic HDF5 files, from `burnish collect` or other writers.

    data/                    attributes: total, env_args (JSON), obs_layout (JSON), meta (JSON)
      demo_<i>/              attributes: num_samples, terminated, truncated, success, seed, …
        actions rewards dones states   obs/<key>  next_obs/<key>   extras/<key>   obs/<camera>_image
    mask/<train|valid|…>     names of demonstrations

Observations are stored per key; `obs_layout` lists keys and widths of the flat state in order. Images (T, H,
W, 3) uint8 are compressed per frame and read on access; camera names are keys without `_image`. Writing and
reading is lossless. Files of other writers only have `dones`: an episode whose last step is done counts as
terminated, any other as truncated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import Frames, choose_storage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.hdf5 import peek_hdf5, read_hdf5, read_numbers
from envs.datasets.images import Images, InHdf5, camera_of
from policies.errors import DatasetError

_LOW_DIM = [f"robot{i}_{part}" for i in (0, 1) for part in ("eef_pos", "eef_quat", "gripper_qpos")] + [
    "object"
]
MODEL = "model_file"  # attribute of demonstrations of robosuite


def matches(path: str | Path) -> bool:
    """Whether a file has the robomimic layout."""
    with peek_hdf5(path) as file:
        return file is not None and _has_demos(file)


def _has_demos(file: h5py.File) -> bool:
    return isinstance(file.get("data"), h5py.Group) and any(key.startswith("demo_") for key in file["data"])


def read(
    path: str | Path,
    *,
    mask: str | None = None,
    obs_keys: Sequence[str] | None = None,
    cache: str | Path | None = None,
) -> EpisodeDataset:
    """Read a robomimic file: data/demo_<i>, with the images of its cameras where it has some.

    Args:
        path: HDF5 file.
        mask: Read only the demonstrations listed under mask/<mask>.
        obs_keys: Keys of the flat state, in order; None: the recorded layout, else the usual
            proprioception and `object`, else every vector-valued key in alphabetical order.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If the file does not hold a usable dataset; names file and key.
    """
    with read_hdf5(path) as file:
        if not _has_demos(file):
            raise DatasetError(f"{path}: expected a group data/demo_0 (robomimic); found {sorted(file)}.")
        data, names = file["data"], _demo_names(file, path, mask)
        layout = _layout(data, names[0], path, obs_keys)
        storage = choose_storage(_bytes_of(data, names, layout), path, cache=cache)
        demos = _Demos(str(path), Frames(storage, _num_frames(data, names)))
        for name in names:
            demos.add(name, _read_demo(data[name], layout, f"{path}: {name}"))
        meta = _json_attribute(data, "meta", path) if "meta" in data.attrs else {}
        meta |= {"source": str(path), "format": "robomimic", "obs_layout": dict(layout)}
        images, unread = _images(data, names, Path(path))
        meta["not_read"] = log_skipped_fields(path, unread)
        if "env_args" in data.attrs:
            meta["env_args"] = _json_attribute(data, "env_args", path)
        has_successors = bool(data.attrs.get("successors_recorded", True))
    return demos.dataset(meta, images, has_successors)


def read_models(path: str | Path, *, mask: str | None = None) -> list[str | None]:
    """Return the MuJoCo model (MJCF) of each demonstration, in the order of `read`.

    Args:
        path: HDF5 file.
        mask: Only those of the demonstrations listed under mask/<mask>.

    Returns:
        One text per demonstration; None where none is recorded.

    Raises:
        DatasetError: If the file is unreadable, or a model is no text; names file and demonstration.
    """
    with read_hdf5(path) as file:
        if not _has_demos(file):
            raise DatasetError(f"{path}: expected a group data/demo_0 (robomimic); found {sorted(file)}.")
        names = _demo_names(file, path, mask)
        return [_model(file["data"][name].attrs.get(MODEL), f"{path}: {name}") for name in names]


def _model(text: Any, source: str) -> str | None:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if text is not None and not (isinstance(text, str) and text.lstrip().startswith("<")):
        raise DatasetError(
            f"{source}: attribute '{MODEL}' must be an MJCF document; got {str(text)[:40]!r}. Remove it."
        )
    return text


def _bytes_of(data: h5py.Group, names: list[str], layout: list[tuple[str, int]]) -> int:
    """Return the bytes required: arrays as stored, plus those of converted float32 copies."""
    wanted = {"actions", "states", *(f"{group}/{key}" for group in ("obs", "next_obs") for key, _ in layout)}
    sizes = [0]

    def see(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and (key in wanted or key.startswith("extras/")):
            sizes.append(item.nbytes + 4 * (item.size or 0))

    for name in names:
        if isinstance(data[name], h5py.Group):  # others are refused on reading
            data[name].visititems(see)
    return sum(sizes)


def _num_frames(data: h5py.Group, names: list[str]) -> int:
    groups = (data[name] for name in names if isinstance(data[name], h5py.Group))
    actions = (group.get("actions") for group in groups)
    return sum(len(one) for one in actions if isinstance(one, h5py.Dataset) and one.shape)


def _demo_names(file: h5py.File, path: str | Path, mask: str | None) -> list[str]:
    """List demonstrations by number: demo_2 before demo_10."""
    names = [name for name in file["data"] if name.startswith("demo_")]
    if mask is not None:
        masks = sorted(file.get("mask", {}))
        if mask not in masks:
            raise DatasetError(f"{path}: expected the key mask/{mask}; the file has the masks {masks}.")
        chosen = {name.decode() if isinstance(name, bytes) else str(name) for name in file["mask"][mask][()]}
        missing = sorted(chosen - set(names))
        if missing or not chosen:
            raise DatasetError(
                f"{path}: mask/{mask} must name demonstrations of the file; got {missing or []}."
            )
        names = [name for name in names if name in chosen]
    odd = sorted(name for name in names if not name.removeprefix("demo_").isdecimal())
    if odd:
        raise DatasetError(f"{path}: demonstrations must be called data/demo_<number>; got {odd[:5]}.")
    return sorted(names, key=lambda name: int(name.removeprefix("demo_")))


def _json_attribute(data: h5py.Group, name: str, path: str | Path, *, kind: type = dict) -> Any:
    """Parse an attribute of `data` that must hold JSON of one kind."""
    text = data.attrs[name]
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, kind):
        raise DatasetError(
            f"{path}: attribute '{name}' of data must be a JSON {'object' if kind is dict else 'array'}; got "
            f"{str(text)[:60]!r}. Remove or repair the attribute."
        )
    return value


def _recorded_keys(data: h5py.Group, path: str | Path) -> list[str]:
    """Return the observation keys of the attribute `obs_layout`."""
    parts = _json_attribute(data, "obs_layout", path, kind=list)
    if not all(isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) for part in parts):
        raise DatasetError(
            f"{path}: attribute 'obs_layout' of data must list pairs of key and width; got {str(parts)[:99]}."
        )
    return [key for key, _ in parts]


def _layout(
    data: h5py.Group, first: str, path: str | Path, obs_keys: Sequence[str] | None
) -> list[tuple[str, int]]:
    """Return the observation keys of the flat state, in order."""
    obs = _group(_group(data, first, f"{path}"), "obs", f"{path}: {first}")
    tables = {key: item for key, item in obs.items() if isinstance(item, h5py.Dataset) and item.ndim == 2}
    widths = {key: item.shape[1] for key, item in tables.items()}
    if obs_keys is None and "obs_layout" in data.attrs:
        obs_keys = _recorded_keys(data, path)
    elif obs_keys is None:
        obs_keys = [key for key in _LOW_DIM if key in widths] if "object" in widths else sorted(widths)
    missing = [key for key in obs_keys if key not in widths]
    if missing or not obs_keys:
        raise DatasetError(
            f"{path}: expected the vector-valued observation keys {list(obs_keys)}; {first} has {widths}."
        )
    return [(key, widths[key]) for key in obs_keys]


def _images(data: h5py.Group, names: list[str], path: Path) -> tuple[dict[str, Images], dict[str, str]]:
    """Return the lazy images by camera, and reasons for skipped image-like keys.

    Raises:
        DatasetError: If a demonstration has other images than the first, or another number of them.
    """
    first = data[names[0]]["obs"]
    keys = [key for key, item in first.items() if getattr(item, "ndim", 0) == 4]
    good = [key for key in keys if first[key].dtype == np.uint8 and first[key].shape[3] == 3]
    lengths = [len(data[name]["actions"]) for name in names]
    images = {}
    for key in good:
        shape = first[key].shape[1:]
        for name, length in zip(names, lengths, strict=True):
            item = data[name]["obs"].get(key)
            got = (getattr(item, "shape", None), getattr(item, "dtype", None))
            if got != ((length, *shape), np.dtype(np.uint8)):
                raise DatasetError(
                    f"{path}: {name}/obs: key '{key}' must have shape {(length, *shape)}, uint8, as in "
                    f"{names[0]}; got {got[0]}, {got[1]}."
                )
        start = np.concatenate([[0], np.cumsum(lengths)])
        places = tuple(f"data/{name}/obs/{key}" for name in names)
        images[camera_of(key)] = Images(InHdf5(path.absolute(), places, start, shape))
    return images, {key: "no RGB images in bytes" for key in keys if key not in good}


def _group(parent: h5py.Group, key: str, source: str) -> h5py.Group:
    if key not in parent:
        raise DatasetError(f"{source}: expected the key {key}; found {sorted(parent)}.")
    if not isinstance(parent[key], h5py.Group):
        raise DatasetError(f"{source}: key '{key}' must be a group; got a dataset.")
    return parent[key]


def _read_demo(demo: h5py.Group, layout: list[tuple[str, int]], source: str) -> dict[str, Any]:
    if not isinstance(demo, h5py.Group):
        raise DatasetError(f"{source} must be a group; got a dataset.")
    missing = [key for key in ("actions", "rewards") if key not in demo]
    if missing:
        raise DatasetError(f"{source}: expected the keys {missing}; found {sorted(demo)}.")
    actions = read_numbers(demo["actions"], source, "actions")
    if actions.ndim == 0:
        raise DatasetError(f"{source}: key 'actions' must have one row per step; got a single number.")
    num = len(actions)
    extras = {key: read_numbers(demo[key], source, key) for key in ("states",) if key in demo}
    out: dict[str, Any] = {
        "observations": _flat(_group(demo, "obs", source), layout, num, f"{source}/obs"),
        "actions": actions,
        "rewards": read_numbers(demo["rewards"], source, "rewards"),
        "extras": _read_all(demo, "extras", source) | extras,
        "episode_extras": _read_all(demo, "episode_extras", source),
    }
    if "next_obs" in demo:
        successors = _group(demo, "next_obs", source)
        out["next_observations"] = _flat(successors, layout, num, f"{source}/next_obs")
    for key, value in {**out["extras"], "rewards": out["rewards"]}.items():
        if value.shape[:1] != (num,):
            got = len(value) if value.ndim else "a single number"
            raise DatasetError(f"{source}: key '{key}' must have {num} rows as the actions have; got {got}.")
    return out | _read_ends(demo, num, source)


def _read_all(demo: h5py.Group, name: str, source: str) -> dict[str, np.ndarray]:
    """Read the datasets below a group that may be absent; a slash in a key stands for a group within."""
    if name not in demo:
        return {}
    group = _group(demo, name, source)
    found: dict[str, np.ndarray] = {}
    for key, item in group.items():
        if isinstance(item, h5py.Group):
            inner = _read_all(group, key, f"{source}/{name}")
            found |= {f"{key}/{rest}": values for rest, values in inner.items()}
        else:
            found[key] = read_numbers(item, f"{source}/{name}", key)
    return found


def _read_ends(demo: h5py.Group, num: int, source: str) -> dict[str, bool]:
    """Return how a demonstration ended: from its attributes, else from the last `dones`."""
    done = False
    if "dones" in demo:
        dones = read_numbers(demo["dones"], source, "dones")
        if dones.shape not in ((num,), (num, 1)):
            raise DatasetError(f"{source}: key 'dones' must have shape ({num},); got {dones.shape}.")
        done = num > 0 and bool(dones[-1])
    terminated = _flag(demo, "terminated", done, source)
    return {"terminated": terminated, "truncated": _flag(demo, "truncated", not terminated, source)}


def _flag(demo: h5py.Group, name: str, default: bool, source: str) -> bool:
    """Return an optional attribute that must be 0 or 1."""
    value = demo.attrs.get(name, default)
    if np.shape(value) != () or isinstance(value, str | bytes) or value not in (0, 1):
        raise DatasetError(f"{source}: attribute '{name}' must be true or false; got {value!r}.")
    return bool(value)


def _flat(group: h5py.Group, layout: list[tuple[str, int]], num: int, source: str) -> np.ndarray:
    for key, width in layout:
        got = getattr(group[key], "shape", "a group") if key in group else "nothing"
        if got != (num, width):
            raise DatasetError(f"{source}: key '{key}' must have shape ({num}, {width}); got {got}.")
    return np.concatenate([read_numbers(group[key], source, key) for key, _ in layout], axis=1)


class _Demos:
    """Demonstrations collected one by one; optional keys are kept if every demonstration has them.

    Args:
        source: Name of the file in messages.
        frames: Collector of frames.
    """

    def __init__(self, source: str, frames: Frames) -> None:
        self._source, self._frames = source, frames
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._ends: dict[str, list[bool]] = {"terminated": [], "truncated": []}
        self._per_episode: dict[str, list[np.ndarray]] = {}

    def add(self, name: str, demo: Mapping[str, Any]) -> None:
        """Append a demonstration.

        Raises:
            DatasetError: If its rows are not shaped like those of the first, or there are none.
        """
        rows = {key: demo[key] for key in ("observations", "actions", "rewards")}
        rows |= {key: demo[key] for key in ("next_observations",) if key in demo}
        rows |= {f"extras/{key}": value for key, value in demo["extras"].items()}
        self._check(name, rows, demo["episode_extras"])
        self._frames.add(rows)
        self._names.append(name)
        self._lengths.append(len(demo["actions"]))
        for key, flags in self._ends.items():
            flags.append(demo[key])
        known = self._per_episode if len(self._names) > 1 else {key: [] for key in demo["episode_extras"]}
        shared = {key: values for key, values in known.items() if key in demo["episode_extras"]}
        self._per_episode = {k: [*values, demo["episode_extras"][k]] for k, values in shared.items()}

    def _check(self, name: str, rows: Mapping[str, Any], per_episode: Mapping[str, Any]) -> None:
        """Refuse an empty demonstration, and one shaped differently."""
        if len(rows["actions"]) == 0:
            raise DatasetError(
                f"{self._source}: demonstration number {len(self._names)} is empty; expected actions."
            )
        for key, shape in self._frames.shapes.items():
            got = np.shape(rows[key]) if key in rows else (0, *shape)
            if got[1:] != shape:
                raise DatasetError(
                    f"{self._source}: {name}: key '{key.removeprefix('extras/')}' must have shape "
                    f"{(got[0], *shape)}, as in {self._names[0]}; got {got}. Leave this demonstration out, "
                    f"or record it again."
                )
        for key, values in self._per_episode.items():
            if key in per_episode and per_episode[key].shape != values[0].shape:
                raise DatasetError(
                    f"{self._source}: {name}: key 'episode_extras/{key}' must have shape {values[0].shape}, "
                    f"as in {self._names[0]}; got {per_episode[key].shape}."
                )

    def dataset(
        self, meta: Mapping[str, Any], images: Mapping[str, Images], has_successors: bool
    ) -> EpisodeDataset:
        """Return all of them."""
        rows, start = self._frames.joined(), np.concatenate([[0], np.cumsum(self._lengths)])
        flags = {key: np.zeros(start[-1], dtype=bool) for key in self._ends}
        for key, flag in flags.items():
            flag[start[1:] - 1] = self._ends[key]
        extras = {key.removeprefix("extras/"): v for key, v in rows.items() if key.startswith("extras/")}
        return EpisodeDataset.from_arrays(
            rows["observations"],
            rows["actions"],
            rows["rewards"],
            flags["terminated"],
            flags["truncated"],
            start,
            next_observations=rows.get("next_observations") if has_successors else None,
            extras=extras,
            episode_extras={key: np.stack(values) for key, values in self._per_episode.items()},
            images=images,
            meta=meta,
            storage=self._frames.storage,
        )
