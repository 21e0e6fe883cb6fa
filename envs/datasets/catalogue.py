"""Public datasets by name: download URLs and local paths.

Names follow the papers: `hopper-medium-v2` (D4RL), `cube-single-play-v0` (OGBench),
`robomimic/lift/ph` and `minari/D4RL/door/human-v2`. In a pattern, braces hold alternatives.

Sources:
    D4RL (arXiv 2004.07219), OGBench (arXiv 2410.20092), robomimic (arXiv 2108.03298), Minari (Farama).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path

from envs.evaluation.scores import expand
from policies.errors import DatasetError

FOLDER_VARIABLE = "BURNISH_DATASETS"
"""Environment variable with the folder of downloads."""

_D4RL = "http://rail.eecs.berkeley.edu/datasets/offline_rl"
_OGBENCH = "https://rail.eecs.berkeley.edu/datasets/ogbench"
_HUB = "https://huggingface.co/datasets"
_ROBOMIMIC = f"{_HUB}/robomimic/robomimic_datasets/resolve/main/v1.5"
_MINARI = f"{_HUB}/farama-minari"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a dataset: its URL, path in the download folder, and published SHA-256, if any."""

    url: str
    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class Entry:
    """A public dataset.

    Attributes:
        name: Name of the dataset.
        family: Publisher.
        files: Files to download.
        path: File or folder to read, relative to the download folder.
        elsewhere: Path of the publisher's own program, relative to the home folder.
    """

    name: str
    family: str
    files: tuple[RemoteFile, ...]
    path: str
    elsewhere: str


_OGBENCH_NAMES = (
    "pointmaze-{medium,large,giant,teleport}-{navigate,stitch}-v0",
    "antmaze-{medium,large,giant,teleport}-{navigate,stitch}-v0",
    "antmaze-{medium,large,teleport}-explore-v0",
    "humanoidmaze-{medium,large,giant}-{navigate,stitch}-v0",
    "antsoccer-{arena,medium}-{navigate,stitch}-v0",
    "cube-{single,double,triple,quadruple}-{play,noisy}-v0",
    "scene-{play,noisy}-v0",
    "puzzle-{3x3,4x4,4x5,4x6}-{play,noisy}-v0",
)
_MINARI_NAMES = (
    "D4RL/antmaze/{umaze,umaze-diverse,medium-play,medium-diverse,large-play,large-diverse}-v1",
    "D4RL/{pen,door,hammer,relocate}/{human,cloned,expert}-v2",
    "D4RL/kitchen/{complete,partial,mixed}-v2",
    "D4RL/pointmaze/{open,open-dense,umaze,umaze-dense,medium,medium-dense,large,large-dense}-v2",
    "mujoco/{hopper,halfcheetah,walker2d,ant,humanoid,swimmer}/{simple,medium,expert}-v0",
)
_ROBOMIMIC_NAMES = ("{lift,can}/{ph,mh,mg}", "can/paired", "{square,transport}/{ph,mh}", "tool_hang/ph")
_MAZE = "Ant_maze_{0}_noisy_multistart_{1}_multigoal_{2}_sparse"
_MAZES = {
    "umaze": ("u-maze", False, False),
    "umaze-diverse": ("u-maze", True, True),
    "medium-play": ("big-maze", True, False),
    "medium-diverse": ("big-maze", True, True),
    "large-play": ("hardest-maze", True, False),
    "large-diverse": ("hardest-maze", True, True),
}
_KITCHENS = {
    "complete": "mini_kitchen_microwave_kettle_light_slider",
    "partial": "kitchen_microwave_kettle_light_slider",
    "mixed": "kitchen_microwave_kettle_bottomburner_light",
}


@cache
def catalogue() -> dict[str, Entry]:
    """Return all known datasets by name."""
    return {entry.name: entry for entry in (*_d4rl(), *_ogbench(), *_robomimic(), *_minari())}


def _d4rl_paths() -> Iterator[tuple[str, str]]:
    """Yield names and paths of D4RL's files."""
    kinds = ("random", "medium", "expert", "medium-replay", "medium-expert")
    for robot, version in product(("hopper", "halfcheetah", "walker2d", "ant"), ("v1", "v2")):
        for kind in (*kinds, "full-replay"):
            stem = f"{robot}_{kind.replace('-', '_')}-{version}"
            yield f"{robot}-{kind}-{version}", f"gym_mujoco_{version}/{stem}"
    for robot, kind in product(("hopper", "halfcheetah", "walker2d", "ant"), kinds):
        stem = f"{robot}_{kind.replace('-', '_')}"
        mixed = {"walker2d": "walker"}.get(robot, robot) + "_mixed"
        yield f"{robot}-{kind}-v0", f"gym_mujoco/{mixed if kind == 'medium-replay' else stem}"
    for name, (maze, start, goal) in _MAZES.items():
        stem = _MAZE.format(maze, start, goal)
        yield f"antmaze-{name}-v0", f"ant_maze_new/{stem}"
        yield f"antmaze-{name}-v2", f"ant_maze_v2/{stem}_fixed"
    for size in ("umaze", "medium", "large"):
        yield f"maze2d-{size}-v1", f"maze2d/maze2d-{size}-sparse-v1"
        yield f"maze2d-{size}-dense-v1", f"maze2d/maze2d-{size}-dense-v1"
    for hand, kind in product(("pen", "hammer", "door", "relocate"), ("human", "cloned", "expert")):
        yield f"{hand}-{kind}-v1", f"hand_dapg_v1/{hand}-{kind}-v1"
        old = {
            "human": "-v0_demos_clipped",
            "cloned": "-demos-v0-bc-combined",
            "expert": "-v0_expert_clipped",
        }
        yield f"{hand}-{kind}-v0", f"hand_dapg/{hand}{old[kind]}"
    for kind, stem in _KITCHENS.items():
        yield f"kitchen-{kind}-v0", f"kitchen/{stem}-v0"


def _d4rl() -> Iterator[Entry]:
    for name, stem in _d4rl_paths():
        file = f"{Path(stem).name}.hdf5"
        yield _entry(name, "D4RL", {f"{_D4RL}/{stem}.hdf5": f"d4rl/{file}"}, f".d4rl/datasets/{file}")


def _ogbench() -> Iterator[Entry]:
    for name in _expanded(_OGBENCH_NAMES):
        files = {f"{_OGBENCH}/{name}{part}.npz": f"ogbench/{name}{part}.npz" for part in ("", "-val")}
        yield _entry(name, "OGBench", files, f".ogbench/data/{name}.npz")


def _robomimic() -> Iterator[Entry]:
    for place in _expanded(_ROBOMIMIC_NAMES):
        for kind in ("_sparse", "_dense") if place.endswith("/mg") else ("",):
            file = f"{place}/low_dim{kind}_v15.hdf5"
            path = f"robomimic/v1.5/{file}"
            name = f"robomimic/{place}{kind.replace('_', '-')}"
            yield _entry(name, "robomimic", {f"{_ROBOMIMIC}/{file}": path}, path)


def _minari() -> Iterator[Entry]:
    for name in _expanded(_MINARI_NAMES):
        group, _, inner = name.partition("/")
        files = {
            f"{_MINARI}/{group}/resolve/main/{inner}/data/{part}": f"minari/{name}/data/{part}"
            for part in ("metadata.json", "main_data.hdf5")
        }
        yield _entry(f"minari/{name}", "Minari", files, f".minari/datasets/{name}", f"minari/{name}")


def _expanded(patterns: tuple[str, ...]) -> Iterator[str]:
    return (name for pattern in patterns for name in expand(pattern))


def _entry(name: str, family: str, files: dict[str, str], elsewhere: str, path: str = "") -> Entry:
    """Return an entry with paths by URL; `path` defaults to the first file."""
    remote = tuple(RemoteFile(*item) for item in files.items())
    return Entry(name, family, remote, path or remote[0].path, elsewhere)


def lookup(name: str) -> Entry:
    """Return a known dataset; an error suggests similar names."""
    known = catalogue()
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.5) or ["hopper-medium-v2", "cube-single-play-v0"]
        raise DatasetError(
            f"name={name} is no known dataset; similar names: {', '.join(near)}. `burnish data download` "
            f"lists all; url=<address> fetches any file."
        )
    return known[name]


def download_folder() -> Path:
    """Return the download folder: $BURNISH_DATASETS, else .burnish/datasets in the home folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".burnish" / "datasets"


def find_dataset(given: str | Path) -> Path:
    """Return the path of a dataset given by path or name.

    A name is searched in the download folder, then in the folder of the publisher's program.

    Raises:
        DatasetError: If it is, or resembles, the name of a public dataset that is not downloaded.
    """
    path = Path(given)
    if path.exists():
        return path
    entry = catalogue().get(str(given))
    if entry is None:
        near = [] if path.suffix else get_close_matches(str(given), catalogue(), n=3)
        if near:
            raise DatasetError(
                f"{given}: expected a file, a folder or the name of a downloaded dataset; there is no such "
                f"path. Similar names: {', '.join(near)}."
            )
        return path
    places = [download_folder() / entry.path, Path.home() / entry.elsewhere]
    for place in places:
        if place.exists():
            return place
    raise DatasetError(
        f"{given}: expected a file or a downloaded dataset; it is neither in {places[0]} nor in {places[1]}. "
        f"Fetch it: burnish data download name={given}."
    )
