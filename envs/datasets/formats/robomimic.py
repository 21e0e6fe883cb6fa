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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import Frames, choose_storage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episodes import EpisodeCollector, EpisodeDataset
from envs.datasets.files.arrays import check_keys, check_rows
from envs.datasets.files.hdf5 import (
    datasets_of,
    json_attribute,
    num_rows,
    peek_hdf5,
    read_hdf5,
    read_numbers,
)
from envs.datasets.images import Images, InHdf5, camera_of
from policies.errors import DatasetError
from policies.importing.robomimic_facts import interface_of_task

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
        names = _demo_names(file, path, mask)
        data = file["data"]
        layout = _layout(data, names[0], path, obs_keys)
        storage = choose_storage(_bytes_of(data, names, layout), path, cache=cache)
        frames = Frames(storage, num_rows((data[name] for name in names), "actions"))
        demos = EpisodeCollector(str(path), frames)
        for name in names:
            source = f"{path}: {name}"
            demos.add(source, *_read_demo(data[name], layout, source))
        meta = json_attribute(data, "meta", path) if "meta" in data.attrs else {}
        meta |= {"source": str(path), "format": "robomimic", "obs_layout": dict(layout)}
        images, unread = _images(data, names, Path(path))
        meta["not_read"] = log_skipped_fields(path, unread)
        if "env_args" in data.attrs:
            meta["env_args"] = json_attribute(data, "env_args", path)
        meta.setdefault("interface", _interface(meta.get("env_args", {}), layout))
        has_successors = bool(data.attrs.get("successors_recorded", True))
    return demos.dataset(meta, images, has_successors=has_successors)


def _interface(env_args: Mapping[str, Any], layout: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return names, rate and kind of actions, for `envs.datasets.interface`."""
    names = [f"{key} {i}" for key, width in layout for i in range(width)]
    return interface_of_task(env_args) | ({} if dict(layout).keys() == {"flat"} else {"obs_names": names})


def read_models(path: str | Path, *, mask: str | None = None) -> list[str | None]:
    """Return the MuJoCo model (MJCF) of each demonstration of `read`; None where none is recorded."""
    with read_hdf5(path) as file:
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
    demos = (datasets_of(data[name]) for name in names if isinstance(data[name], h5py.Group))
    items = (one for demo in demos for one in demo.items())
    return sum(
        item.nbytes + 4 * (item.size or 0)
        for key, item in items
        if key in wanted or key.startswith("extras/")
    )


def _demo_names(file: h5py.File, path: str | Path, mask: str | None) -> list[str]:
    """List demonstrations by number: demo_2 before demo_10."""
    if not _has_demos(file):
        raise DatasetError(f"{path}: expected a group data/demo_0 (robomimic); found {sorted(file)}.")
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


def _layout(
    data: h5py.Group, first: str, path: str | Path, obs_keys: Sequence[str] | None
) -> list[tuple[str, int]]:
    """Return key and width of the parts of the flat state, in order."""
    obs = _group(_group(data, first, f"{path}"), "obs", f"{path}: {first}")
    tables = {key: item for key, item in obs.items() if isinstance(item, h5py.Dataset) and item.ndim == 2}
    widths = {key: item.shape[1] for key, item in tables.items()}
    if obs_keys is None and "obs_layout" in data.attrs:
        parts = json_attribute(data, "obs_layout", path, kind=list)
        if not all(isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) for part in parts):
            raise DatasetError(
                f"{path}: attribute 'obs_layout' must list pairs of key and width; got {str(parts)[:99]}."
            )
        obs_keys = [key for key, _ in parts]
    elif obs_keys is None:
        obs_keys = [key for key in _LOW_DIM if key in widths] if "object" in widths else sorted(widths)
    missing = [key for key in obs_keys if key not in widths]
    if missing or not obs_keys:
        raise DatasetError(
            f"{path}: expected the vector-valued observation keys {list(obs_keys)}; {first} has {widths}."
        )
    return [(key, widths[key]) for key in obs_keys]


def _images(data: h5py.Group, names: list[str], path: Path) -> tuple[dict[str, Images], dict[str, str]]:
    """Return the lazy images by camera, and reasons for skipped image-like keys."""
    first = data[names[0]]["obs"]
    keys = [key for key, item in first.items() if getattr(item, "ndim", 0) == 4]
    good = [key for key in keys if first[key].dtype == np.uint8 and first[key].shape[3] == 3]
    lengths = [len(data[name]["actions"]) for name in names]
    images = {}
    for key in good:
        shape = first[key].shape[1:]
        for name, length in zip(names, lengths, strict=True):
            item, wanted = data[name]["obs"].get(key), (length, *shape)
            got = (getattr(item, "shape", None), getattr(item, "dtype", None))
            if got != (wanted, np.dtype(np.uint8)):
                raise DatasetError(
                    f"{path}: {name}/obs: key '{key}' must have shape {wanted}, uint8; got {got}."
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


def _read_demo(
    demo: h5py.Group, layout: list[tuple[str, int]], source: str
) -> tuple[dict[str, np.ndarray], tuple[bool, bool], dict[str, np.ndarray]]:
    """Return rows, end flags and per-episode values as `EpisodeCollector.add` takes them."""
    if not isinstance(demo, h5py.Group):
        raise DatasetError(f"{source} must be a group; got a dataset.")
    check_keys(source, ("actions", "rewards"), demo)
    rows = {key: read_numbers(demo[key], source, key) for key in ("actions", "rewards")}
    rows |= {f"extras/{key}": value for key, value in _read_all(demo, "extras", source).items()}
    rows |= {f"extras/{key}": read_numbers(demo[key], source, key) for key in ("states",) if key in demo}
    if not rows["actions"].shape:
        raise DatasetError(f"{source}: key 'actions' must have one row per step; got a single number.")
    num = len(rows["actions"])
    rows["observations"] = _flat(_group(demo, "obs", source), layout, num, f"{source}/obs")
    if "next_obs" in demo:
        successors = _group(demo, "next_obs", source)
        rows["next_observations"] = _flat(successors, layout, num, f"{source}/next_obs")
    check_rows(source, rows, "actions")
    return rows, _read_ends(demo, num, source), _read_all(demo, "episode_extras", source)


def _read_all(demo: h5py.Group, name: str, source: str) -> dict[str, np.ndarray]:
    """Read the datasets below a group, by path; none if it is absent."""
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


def _read_ends(demo: h5py.Group, num: int, source: str) -> tuple[bool, bool]:
    """Return how a demonstration ended: from its attributes, else from the last `dones`."""
    done = False
    if "dones" in demo:
        dones = read_numbers(demo["dones"], source, "dones")
        if dones.shape not in ((num,), (num, 1)):
            raise DatasetError(f"{source}: key 'dones' must have shape ({num},); got {dones.shape}.")
        done = bool(dones[-1])
    terminated = _flag(demo, "terminated", done, source)
    return terminated, _flag(demo, "truncated", not terminated, source)


def _flag(demo: h5py.Group, name: str, default: bool, source: str) -> bool:
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
