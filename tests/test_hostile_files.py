"""Files of a stranger and full disks: one clear error, nothing read elsewhere, nothing half written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from entry import exit_code
from small_policies import small_policy

import burnish
from algos.training.run_directory import RunDirectory
from algos.training.run_lock import take_lock
from burnish.config.saved import describe, restore, restore_part
from burnish.config.schema import compose_config
from burnish.runs.resolve import parts_of
from envs.datasets import read_dataset, readers
from envs.datasets.files.hdf5 import read_hdf5, write_hdf5
from envs.datasets.inspect import describe_file
from policies.errors import CheckpointError, ConfigError, DatasetError, WriteError
from policies.processes.diffusion import VPDiffusion
from policies.runner import open_session
from policies.samplers.ddpm import DDIM
from policies.storage.atomic_write import draft_folder, write_text
from policies.storage.checksums import CHECKSUMS
from policies.storage.policy_folder import load_policy, save_policy
from policies.storage.strict_json import MAX_BYTES

SECRET = "a-secret-of-this-machine"


# -- saved configurations are plain data ------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = describe(compose_config("train", ["algo=bc", "env=avoid", "name=x"]))
    return RunDirectory.create_at(tmp_path / "run", config)


def edit(run: RunDirectory, old: str, new: str) -> RunDirectory:
    file = run.path / "config.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return RunDirectory.open(run.path)


@pytest.mark.parametrize("where", ["init: null", "name: x", "dataset: null"])
def test_a_saved_configuration_reads_no_environment_variable(
    run: RunDirectory, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_MACHINE", SECRET)
    key = where.partition(":")[0]
    strange = edit(run, where, f"{key}: hub://x/${{oc.env:OF_THIS_MACHINE}}")
    with pytest.raises(ConfigError, match=f"{key} must be a plain value") as caught:
        burnish.train(resume=strange.path)
    assert SECRET not in str(caught.value)
    assert SECRET not in "".join(p.read_text() for p in strange.path.rglob("*") if p.is_file())


def test_a_task_that_a_policy_names_reads_no_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_MACHINE", SECRET)
    with pytest.raises(ConfigError, match="plain value"):
        restore_part("env", {"name": "avoid", "cameras": ["${oc.env:OF_THIS_MACHINE}"]})
    with pytest.raises(ConfigError, match="plain value"):
        restore_part("env", {"name": "avoid", "${oc.env:OF_THIS_MACHINE}": 1})


def test_a_configuration_survives_being_written_and_read(run: RunDirectory) -> None:
    kind = type(compose_config("train", ["algo=bc"]))
    assert describe(restore(kind, RunDirectory.open(run.path).config)) == run.config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [1, 1]\nb: *a\n", "aliases are not read"),
        ("x: " + "[" * 1000, "nested too deep"),
        ("x: '" + "y" * 2**18 + "'", "at most 262144 bytes"),
        ("- 1", "must hold keys with values"),
        ("1: 2", "keys must be text"),
        ("x: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("x: !!set {y}", "must be text or numbers; got set"),
    ],
)
def test_a_damaged_or_swollen_configuration_is_refused_at_once(
    run: RunDirectory, text: str, reason: str
) -> None:
    (run.path / "config.yaml").write_text(text)
    begun = time.process_time()
    with pytest.raises(CheckpointError, match=reason):
        _ = RunDirectory.open(run.path).config
    assert time.process_time() - begun < 5


def test_nested_aliases_cost_nothing(run: RunDirectory) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 7)]
    (run.path / "config.yaml").write_text("\n".join(lines))
    begun = time.process_time()
    with pytest.raises(CheckpointError, match="aliases"):
        _ = RunDirectory.open(run.path).config
    assert time.process_time() - begun < 1


def test_a_configuration_is_read_once(run: RunDirectory) -> None:
    again = RunDirectory.open(run.path)
    first = again.config
    (run.path / "config.yaml").unlink()
    assert again.config == first
    assert parts_of(again).texts[:2] == ["algo=bc", "env=avoid"]


@pytest.mark.parametrize("name", ["../../x", "bc,dppo", "nothing", "[1]"])
def test_names_of_parts_are_those_that_are_known(run: RunDirectory, name: str) -> None:
    strange = edit(run, "name: bc", f"name: '{name}'")
    with pytest.raises(ConfigError, match="unknown algo"):
        parts_of(strange)


@pytest.mark.parametrize(("key", "value"), [("algo", 5), ("env", [1]), ("policy", "x"), ("trainer", 3)])
def test_a_value_in_the_place_of_a_part_is_refused(run: RunDirectory, key: str, value: Any) -> None:
    kind = type(compose_config("train", ["algo=bc"]))
    with pytest.raises(ConfigError, match=f"{key} must hold keys with values"):
        restore(kind, {**run.config, key: value})


# -- checksums ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = small_policy(VPDiffusion(num_levels=5), DDIM(steps=3))
    return save_policy(policy, tmp_path_factory.mktemp("honest") / "policy")


@pytest.fixture
def directory(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "policy"))


def test_checksums_do_not_lead_out_of_their_folder(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("0" * 64 + "  config.json\n")
    (directory / CHECKSUMS).unlink()
    (directory / CHECKSUMS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of its directory"):
        load_policy(directory)


def test_checksums_are_small(directory: Path) -> None:
    with (directory / CHECKSUMS).open("ab") as file:
        file.truncate(2**33)
    with pytest.raises(CheckpointError, match="must have at most"):
        load_policy(directory)


def test_checksums_that_are_no_file_are_refused(directory: Path) -> None:
    (directory / CHECKSUMS).unlink()
    os.mkfifo(directory / CHECKSUMS)
    with pytest.raises(CheckpointError, match="regular file"):
        load_policy(directory)


# -- HDF5 ---------------------------------------------------------------------------------------------------


def external(file: h5py.File, name: str, secret: Path) -> None:
    file.create_dataset(name, (4, 2), "u1", external=[(str(secret), 0, 8)])


def virtual(file: h5py.File, name: str, secret: Path) -> None:
    layout = h5py.VirtualLayout((4, 2), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "x", (4, 2))
    file.create_virtual_dataset(name, layout)


def linked(file: h5py.File, name: str, secret: Path) -> None:
    file[name] = h5py.ExternalLink(str(secret), "x")


def declared(file: h5py.File, name: str, secret: Path) -> None:
    file.create_dataset(name, (2**28, 2), "f8", chunks=(2**16, 2))


def declared_whole(file: h5py.File, name: str, secret: Path) -> None:
    file.create_dataset(name, (2**28, 2), "f8")


KINDS = {
    external: "external storage",
    virtual: "a virtual dataset",
    linked: "a link to another file",
    declared: "MiB or more that are only declared",
    declared_whole: "MiB or more that are only declared",
}


def honest_hdf5(path: Path, form: str) -> tuple[Path, str, str]:
    """Write a dataset; returns its path, its HDF5 file in it, and the key of an array there."""
    if form == "minari":
        (path / "data").mkdir(parents=True)
        facts = {"data_format": "hdf5", "total_episodes": 1, "observation_space": "{}", "action_space": "{}"}
        (path / "data" / "metadata.json").write_text(json.dumps(facts))
        with h5py.File(path / "data" / "main_data.hdf5", "w") as file:
            group = file.create_group("episode_0")
            group["observations"], group["actions"] = np.zeros((5, 2)), np.zeros((4, 2))
            for key in ("rewards", "terminations", "truncations"):
                group[key] = np.zeros(4)
        return path, "data/main_data.hdf5", "episode_0/"
    with h5py.File(path, "w") as file:
        group = file.create_group("data/demo_0") if form == "robomimic" else file
        names = {"robomimic": "obs/x", "d4rl": "observations"}
        group[names[form]] = group["actions"] = np.zeros((4, 2))
        group["rewards"] = np.zeros(4)
        for key in ("dones",) if form == "robomimic" else ("terminals", "timeouts"):
            group[key] = np.array([0, 0, 0, 1])
    return path, "", "data/demo_0/" if form == "robomimic" else ""


ARRAYS = {
    "d4rl": ("observations", "infos/x", "metadata/x"),
    "robomimic": ("actions", "obs/x", "obs/cam_image", "extras/x", "episode_extras/x"),
    "minari": ("actions", "observations", "infos/x"),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("form", "key"), [(form, key) for form, keys in ARRAYS.items() for key in keys])
def test_no_reader_of_hdf5_reads_what_is_elsewhere_or_nowhere(
    form: str, key: str, kind: Callable[[h5py.File, str, Path], None], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    with h5py.File(secret, "w") as file:
        file["x"] = np.full((4, 2), 7, np.float32)
    path, inside, group = honest_hdf5(tmp_path / form, form)
    assert readers()[form].read(path).num_frames == 4
    with h5py.File(path / inside if inside else path, "a") as file:
        if group + key in file:
            del file[group + key]
        kind(file, group + key, secret)
    for read in (readers()[form].read, describe_file):
        with pytest.raises(DatasetError, match=KINDS[kind]):
            read(path)


@pytest.mark.parametrize("target", ["/", "/a"])
def test_a_group_stands_in_one_place(target: str, tmp_path: Path) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file["a/b"] = np.zeros(3)
        file["a/c"] = file[target]
    with pytest.raises(DatasetError, match="another name of a group"), read_hdf5(path):
        pass


def test_an_array_may_have_two_names_and_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=np.zeros((4096, 4096)), compression="gzip")
        file["b"] = file["a"]
        file["c"] = h5py.SoftLink("/a")
    with read_hdf5(path) as file:
        assert file["c"].shape == (4096, 4096)


# -- metadata and tables -----------------------------------------------------------------------------------


def test_an_archive_that_declares_more_than_there_is_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, observations=np.zeros((4, 2)), actions=np.zeros((4, 2)), terminals=np.array([0, 0, 0, 1]))
    content = path.read_bytes()
    old, new = b"'shape': (4, 2), }" + b" " * 20, b"'shape': (1649267441664, 2), }"
    assert content.count(old) == 2
    path.write_bytes(content.replace(old, new.ljust(len(old))))
    with pytest.raises(DatasetError):
        read_dataset(path)
    with pytest.raises(DatasetError):
        describe_file(path)


def test_an_error_does_not_repeat_what_is_long(tmp_path: Path) -> None:
    path, *_ = honest_hdf5(tmp_path / "minari", "minari")
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_format": [0] * 1000}))
    with pytest.raises(DatasetError, match="must be hdf5, arrow or parquet") as caught:
        read_dataset(path)
    assert len(str(caught.value)) < 500


def test_metadata_is_small(tmp_path: Path) -> None:
    for form, name in (("minari", "data/metadata.json"), ("lerobot", "meta/info.json")):
        file = tmp_path / form / name
        file.parent.mkdir(parents=True)
        file.write_text('{"codebase_version": "v3.0", "data_format": "hdf5"')
        with file.open("ab") as content:
            content.truncate(2**33)
        with pytest.raises(DatasetError, match=f"at most {MAX_BYTES} bytes"):
            read_dataset(tmp_path / form)


@pytest.mark.parametrize(
    "space", [[1], 3, "[]", '"x"', {"shape": 3, "dtype": "uint8"}, {"subspaces": {"a": 1}}]
)
def test_a_space_that_is_none_is_refused_or_passed_over(space: Any, tmp_path: Path) -> None:
    path, *_ = honest_hdf5(tmp_path / "minari", "minari")
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"observation_space": space}))
    try:
        assert read_dataset(path).num_frames == 4
    except DatasetError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "infos", [[{"a": [1]}] * 5, [[1], [1, 2], [], [1], [2]], [[[1], [2, 3]]] * 5, [None] * 5]
)
def test_infos_of_any_shape_are_read_or_refused(infos: list[Any], tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path, *_ = honest_hdf5(tmp_path / "minari", "minari")
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_format": "arrow"}))
    (path / "data" / "main_data.hdf5").unlink()
    episode = path / "data" / "0"
    episode.mkdir()
    (episode / "metadata.json").write_text('{"total_steps": 4}')
    vectors = pa.array([[0.0, 0.0]] * 5)
    numbers = pa.array([0.0] * 5)
    table = pa.table({
        "observations": vectors, "actions": vectors, "rewards": numbers, "terminations": numbers,
        "truncations": numbers, "infos": pa.array([{"x": one} for one in infos]),
    })  # fmt: skip
    with pa.OSFile(str(episode / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for read in (read_dataset, describe_file):
        try:
            read(path)
        except DatasetError as error:
            assert len(str(error)) < 1500


# -- exported folders --------------------------------------------------------------------------------------


def graph_with(tmp_path: Path, kind: str) -> Path:
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    number = helper.make_tensor_value_info("number", TensorProto.INT64, [])
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["on"]), helper.make_node("Identity", ["state"], ["next"])],
        "body",
        [
            number, helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [1]),
        ],
    )  # fmt: skip
    weights = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    if kind == "other files":
        weights.data_location = TensorProto.EXTERNAL
        weights.external_data.add(key="location", value="../secret")
    nodes = [helper.make_node("Identity", ["w"], ["action"])]
    if kind == "loop":
        nodes = [helper.make_node("Loop", ["", "flag", "w"], ["action"], body=body)]
    action = helper.make_tensor_value_info("action", TensorProto.FLOAT, [1])
    graph = helper.make_graph(nodes, "g", [flag] if kind == "loop" else [], [action], [weights])
    path = tmp_path / f"{kind}.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    if kind == "functions":
        model.functions.append(
            helper.make_function("own", "f", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])],
                                 [helper.make_opsetid("", 18)])
        )  # fmt: skip
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("kind", ["loop", "functions", "other files"])
def test_graphs_that_may_never_end_or_read_elsewhere_are_not_opened(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(ValueError, match=kind):
        open_session(graph_with(tmp_path, kind))


def test_a_plain_graph_is_opened(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert open_session(graph_with(tmp_path, "plain")).get_outputs()[0].name == "action"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x0f", b"no graph"])
def test_what_is_no_graph_is_refused(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(Exception, match=r"ONNX graph|mmap|INVALID|Protobuf|protobuf"):
        open_session(tmp_path / "x.onnx")


# -- a disk that takes no more ------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow larger, which the system reports as it does a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("size", [0, 100, 3000, 20_000])
def test_a_file_of_hdf5_is_written_or_not_at_all(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.hdf5"
    with write_hdf5(path) as file:
        file["x"] = 1
    before = everything(tmp_path)
    numbers = np.random.default_rng(0).normal(size=(60, 10, 10))
    with (
        pytest.raises(WriteError, match=r"x\.hdf5 cannot be written"),
        files_of_at_most(size),
        write_hdf5(path) as file,
    ):
        for i, values in enumerate(numbers):
            file.create_dataset(f"g{i}/x", data=values, compression="gzip")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("size", [0, 1500])
def test_a_checkpoint_is_written_or_not_at_all(size: int, run: RunDirectory) -> None:
    policy = small_policy(VPDiffusion(num_levels=5), DDIM(steps=3))
    run.save_checkpoint(1, policy, {"x": np.zeros(10)})
    before = everything(run.path)
    with pytest.raises(WriteError, match="checkpoints/2 cannot be written"), files_of_at_most(size):
        run.save_checkpoint(2, policy, {"x": np.zeros(10)})
    assert everything(run.path) == before
    with pytest.raises(WriteError, match="cannot be written"), files_of_at_most(40_000):
        run.save_checkpoint(2, policy, {"x": np.random.default_rng(0).normal(size=100_000)})
    assert everything(run.path) == before
    assert run.latest() == 1


def test_a_policy_and_a_text_are_written_or_not_at_all(directory: Path) -> None:
    before = everything(directory.parent)
    with pytest.raises(WriteError), files_of_at_most(1500):
        save_policy(load_policy(directory), directory)
    with pytest.raises(WriteError), files_of_at_most(10):
        write_text(directory / "config.json", "x" * 100)
    assert everything(directory.parent) == before


def test_a_read_only_disk_is_named_by_the_file_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "draft")

    monkeypatch.setattr("policies.storage.atomic_write.Draft", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WriteError, match=r"a\.txt cannot be written: Read-only"):
        write_text(tmp_path / "a.txt", "x")


def test_a_lock_that_a_full_disk_refuses_is_named_and_free(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"\.lock cannot be written"), files_of_at_most(0):
        take_lock(tmp_path)
    take_lock(tmp_path).close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_takes_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    take_lock(tmp_path).close()
    write_text(tmp_path / "a.txt", "x")


def test_a_report_is_written_or_not_at_all(run: RunDirectory) -> None:
    run.log({"policy/loss": 1.0}, 1)
    run.log({"policy/loss": 0.5}, 2)
    options = {"run": str(run.path), "episodes": 0}
    with pytest.raises(WriteError), files_of_at_most(2000):
        burnish.report(**options)
    assert not (run.path / "report").exists()
    burnish.report(**options)
    before = everything(run.path / "report")
    with pytest.raises(WriteError), files_of_at_most(2000):
        burnish.report(**options, overwrite=True)
    assert everything(run.path / "report") == before


def test_demonstrations_are_written_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collect", "env=avoid", "episodes=2", f"out={tmp_path / 'demos.hdf5'}"]
    with files_of_at_most(4000):
        assert exit_code(*words, f"hydra.run.dir={tmp_path / 'job'}") == 2
    error = capsys.readouterr().err
    assert error.count("burnish: error:") == 1
    assert ".demos.hdf5.unfinished/00000000.npz cannot be written" in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("*demos*"))


# -- what killed programs leave -----------------------------------------------------------------------------


def test_drafts_of_killed_programs_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    command = """
import os, signal, sys
from pathlib import Path
from policies.storage.atomic_write import draft_folder
with draft_folder(Path(sys.argv[1])) as draft:
    (draft / "policy.onnx").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    target = tmp_path / "export"
    subprocess.run([sys.executable, "-c", command, str(target)], timeout=60)
    (left,) = tmp_path.iterdir()
    with draft_folder(target) as mine:
        for draft in (left, mine):
            os.utime(draft, (1e9, 1e9))
        with draft_folder(target) as other:
            assert set(tmp_path.iterdir()) == {mine, other}
    assert not list(tmp_path.iterdir())
