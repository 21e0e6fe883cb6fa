"""Honest inputs of every reader, and what a stranger makes of them field by field."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import yaml
from dataset_files import FORMATS, made, read_parquet
from small_policies import small_policy

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.config.saved import describe, restore
from burnish.config.schema import compose_config
from burnish.config.train import TrainConfig
from burnish.runs.locate import locate
from burnish.runs.resolve import parts_of
from burnish.runs.tasks import task_of
from envs.datasets import read_dataset
from envs.datasets.inspect import describe_file
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM

Open = Callable[[Path], object]
CANARY = "canary-of-this-machine"
"""Content of a file, and value of an environment variable, that nobody may ever read."""


def _open_dataset(path: Path) -> None:
    try:
        describe_file(path)
    finally:
        data = read_dataset(path)
        for images in data.images.values():
            list(images.blocks())


def _open_run(path: Path) -> None:
    run = RunDirectory.open(path)
    read_jsonl(run.metrics_path)
    parts_of(run)
    restore(TrainConfig, run.config)
    _ = run.overrides
    found = locate(path)
    found.load()
    task_of(found)
    run.load_training_state()


def _open_export(path: Path) -> None:
    policy = ExportedPolicy(path)
    policy.act({"state": np.zeros((1, policy.chunk.obs_steps, policy.obs_dim), np.float32)})


def honest_inputs(folder: Path) -> dict[str, tuple[Path, Open]]:
    """Write one small input for every reader; returns what is opened, and how, by name."""
    found: dict[str, tuple[Path, Open]] = {}
    for name, form in FORMATS.items():
        home = folder / name
        home.mkdir()
        form.into(home, made())
        found[name] = (home / form.name, _open_dataset)
    policy = small_policy(VPDiffusion(num_levels=5), DDIM(steps=1, spacing="trailing"), obs_steps=1)
    config = describe(compose_config("train", ["algo=bc", "env=avoid", "name=x"]))
    run = RunDirectory.create_at(folder / "run", config, ["algo=bc"])
    run.log({"policy/loss": 1.0}, 1)
    env = config["env"]
    run.save_checkpoint(1, policy, {"algorithm": {"x": np.zeros(3)}}, provenance={"env": env})
    found["run"] = (run.path, _open_run)
    export_onnx(policy, folder / "export", latency_batches=(), batch_sizes=(1,))
    found["export"] = (folder / "export", _open_export)
    export_onnx(policy, folder / "steps", graph="step", latency_batches=(), batch_sizes=(1,))
    found["export, step by step"] = (folder / "steps", _open_export)
    return found


STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**62, 2**70, 1e308, float("nan"), float("inf"), "", "x" * 10_000, "\x00",
    "${oc.env:CANARY}", "../canary", "/etc/hostname", [], {}, [[]], [1, "x"], {"name": "../x"}, "hub://a/b",
    [0] * 1000, {"a": {"a": {"a": {}}}}, "!!python/object/apply:os.system [true]",
)  # fmt: skip


def _places(tree: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [one for key, item in items for one in [(*place, key), *_places(item, (*place, key))]]


def _change_tree(tree: Any, rng: random.Random) -> Any:
    """Replace, remove or double one field of a tree."""
    places = _places(tree)
    if not places or rng.random() < 0.03:
        return rng.choice(STRANGE)
    *way, last = rng.choice(places)
    inner = tree
    for key in way:
        inner = inner[key]
    if rng.random() < 0.15:
        del inner[last]
    else:
        inner[last] = rng.choice(STRANGE)
    return tree


def _change_json(file: Path, rng: random.Random) -> None:
    file.write_text(json.dumps(_change_tree(json.loads(file.read_text()), rng)))


def _change_yaml(file: Path, rng: random.Random) -> None:
    tree = _change_tree(yaml.safe_load(file.read_text()), rng)
    text = yaml.safe_dump(tree)
    if rng.random() < 0.1:
        text += "a0: &a0 [1, 1, 1]\n" + "".join(
            f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 20)
        )
    file.write_text(text)


def _arrays(rng: random.Random) -> np.ndarray:
    numbers = np.random.default_rng(rng.randrange(2**32))
    rows = rng.choice([0, 1, 3, 24, 25, 28])
    return rng.choice([
        lambda: np.zeros(()), lambda: np.full((rows, 2), np.nan), lambda: np.full((rows, 3), 1e300),
        lambda: numbers.normal(size=(rows, 3)) > 0, lambda: np.array([b"x"] * rows),
        lambda: numbers.normal(size=(rows, 2, 2)), lambda: np.zeros((rows, 0)),
        lambda: np.zeros(rows, [("a", "f4"), ("b", "i4")]), lambda: numbers.normal(size=rows).astype(complex),
        lambda: np.arange(rows), lambda: -np.ones(rows), lambda: np.full(rows, 2**62),
    ])()  # fmt: skip


def _change_hdf5(file: Path, rng: random.Random) -> None:
    canary = canary_of(file)
    with h5py.File(file, "a") as content:
        names: list[str] = []
        content.visit(names.append)
        name = rng.choice(names)
        way = rng.randrange(9)
        if way == 0 and len(content[name].attrs):
            key = rng.choice(list(content[name].attrs))
            content[name].attrs[key] = rng.choice(["{", "[]", "3", -1, 2**62, 0.5, [1, 2], "x" * 1000])
            return
        del content[name]
        if way == 1:
            return
        if way == 2:
            content.create_group(name)
        elif way == 3:
            content.create_dataset(name, (8, 2), "u1", external=[(str(canary), 0, 16)])
        elif way == 4:
            content[name] = h5py.ExternalLink(str(canary), "/x")
        elif way == 5:
            content[name] = h5py.SoftLink(rng.choice(["/", "/nothing", f"/{rng.choice(names)}"]))
        elif way == 6:
            layout = h5py.VirtualLayout((8, 2), "f4")
            layout[:] = h5py.VirtualSource(str(canary), "x", (8, 2))
            content.create_virtual_dataset(name, layout)
        elif way == 7:
            content.create_dataset(name, rng.choice([(2**30, 2), (2**40,), (2**62,)]), "f8", chunks=True)
        else:
            content[name] = _arrays(rng)


def _change_npz(file: Path, rng: random.Random) -> None:
    with np.load(file) as archive:
        arrays = dict(archive)
    name = rng.choice(sorted(arrays))
    if rng.random() < 0.2:
        del arrays[name]
    else:
        arrays[name] = _arrays(rng)
    np.savez(file, **arrays)
    if rng.random() < 0.2:
        sizes = [b"(24,", b"(28,", b"(4,"]
        file.write_bytes(
            file.read_bytes().replace(rng.choice(sizes), b"(9" + b"9" * rng.randrange(1, 14) + b",", 1)
        )


def _change_parquet(file: Path, rng: random.Random) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, Any] = {key: list(value) for key, value in read_parquet(file).items()}
    name = rng.choice(sorted(columns))
    rows = len(columns[name])
    if rng.random() < 0.15:
        del columns[name]
    else:
        strange = [None, "x", [1], [1, 2, 3], {"a": 1}, -1, 2**62, float("nan"), b"x", [], [[1], [2]]]
        one = rng.choice(strange)
        columns[name] = [one] * rows if rng.random() < 0.7 else [None, *columns[name][1:]]
        if rng.random() < 0.2:
            columns[name] = [[1.0] * rng.randrange(5) for _ in range(rows)]
    parquet.write_table(pa.table({key: pa.array(value) for key, value in columns.items()}), file)


def _change_bytes(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    way = rng.randrange(5)
    if way == 0:
        content = content[: rng.randrange(len(content) + 1)]
    elif way == 1 and content:
        first = rng.randrange(len(content))
        content[first:first] = content[first : first + rng.randrange(200)]
    elif way == 2 and file.suffix not in (".hdf5", ".npz", ".parquet"):
        file.unlink()
        file.symlink_to(canary_of(file))
        return
    else:
        for _ in range(rng.choice([1, 4, 64])):
            if content:
                content[rng.randrange(len(content))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    file.write_bytes(content)


FIELDS: dict[str, Callable[[Path, random.Random], None]] = {
    ".json": _change_json, ".yaml": _change_yaml, ".hdf5": _change_hdf5, ".npz": _change_npz,
    ".parquet": _change_parquet,
}  # fmt: skip


def spoil(path: Path, rng: random.Random) -> str:
    """Change one file of an input; returns what was done."""
    files = sorted(
        p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file() and p.suffix != ".py"
    )
    files = [
        p for p in files if not p.is_symlink() and p.name not in ("README.md", ".lock", "environment.json")
    ]
    file = rng.choice(files)
    change = FIELDS.get(file.suffix, _change_bytes)
    if rng.random() < 0.25:
        change = _change_bytes
    change(file, rng)
    return f"{change.__name__} of {file.name}"


def canary_of(file: Path) -> Path:
    """Return the file beside the copies that nobody may read."""
    return next(parent / "canary" for parent in file.parents if (parent / "canary").exists())


def copied(path: Path, folder: Path) -> Path:
    """Copy an input, with what lies beside it, and put the canary outside."""
    shutil.rmtree(folder, ignore_errors=True)
    if path.is_dir():
        target = Path(shutil.copytree(path, folder / path.name, symlinks=True))
    else:
        shutil.copytree(path.parent, folder)
        target = folder / path.name
    (folder.parent / "canary").write_text(f"{CANARY}\n" * 8)
    return target
