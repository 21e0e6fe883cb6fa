"""The run directory: nothing half-written is ever visible, and nothing that is saved runs code."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import exit_code_of
from messages import mentions
from pairwise import everything
from random_walk import tiny_policy

import algos.training.provenance
from algos.training.run_directory import RunDirectory, eval_name, new_folder
from algos.training.serialization import (
    capture_generator,
    capture_global_rng,
    from_plain,
    restore_generator,
    restore_global_rng,
    to_plain,
)
from policies.errors import CheckpointError
from policies.storage.policy_folder import load_policy


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create_at(tmp_path / "day" / "demo", {"algo": {"lr": 0.1}}, ["algo.lr=0.1"])


def test_new_run_describes_itself(run: RunDirectory, tmp_path: Path) -> None:
    assert run.path == tmp_path / "day" / "demo"
    assert run.config == {"algo": {"lr": 0.1}}
    assert run.overrides == ["algo.lr=0.1"]
    facts = json.loads((run.path / "environment.json").read_text())
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["torch_threads"] == torch.get_num_threads()


def test_taken_names_are_counted_up(tmp_path: Path) -> None:
    made = [new_folder(tmp_path / "day" / "12-00-00-demo").name for _ in range(3)]
    assert made == ["12-00-00-demo", "12-00-00-demo-2", "12-00-00-demo-3"]


def test_something_else_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("config.yaml")):
        RunDirectory.open(tmp_path)


def test_checkpoint_returns_what_was_saved(run: RunDirectory) -> None:
    policy = tiny_policy()
    run.save_checkpoint(7, policy, {"algorithm": {"count": 3, "x": np.arange(2.0), "pair": (1, None)}})
    state = RunDirectory.open(run.path).load_training_state()
    assert state["algorithm"]["count"] == 3
    assert state["algorithm"]["pair"] == (1, None)
    np.testing.assert_array_equal(state["algorithm"]["x"], np.arange(2.0))
    assert os.readlink(run.path / "checkpoints" / "last") == "7"
    export_policy = load_policy(run.policy_path())
    torch.testing.assert_close(export_policy.state_dict(), policy.state_dict(), rtol=0, atol=0)


def test_training_state_loads_without_running_code(run: RunDirectory) -> None:
    run.save_checkpoint(
        1, tiny_policy(), {"algorithm": {"numpy": capture_generator(np.random.default_rng(0))}}
    )
    path = run.checkpoint_path() / "training_state" / "state.pt"
    assert torch.load(path, weights_only=True)["step"] == 1


def test_objects_are_refused_when_saved_and_leave_nothing(run: RunDirectory) -> None:
    with pytest.raises(CheckpointError, match=mentions("['algorithm'] ['thing'] object")):
        run.save_checkpoint(1, tiny_policy(), {"algorithm": {"thing": object()}})
    assert list((run.path / "checkpoints").iterdir()) == []


def test_checkpoint_is_never_rewritten(run: RunDirectory) -> None:
    run.save_checkpoint(1, tiny_policy(), {})
    with pytest.raises(CheckpointError, match=mentions("checkpoints/1")):
        run.save_checkpoint(1, tiny_policy(), {})


def test_missing_step_lists_what_there_is(run: RunDirectory) -> None:
    with pytest.raises(CheckpointError, match=mentions("no checkpoint")):
        run.load_training_state()
    run.save_checkpoint(4, tiny_policy(), {})
    with pytest.raises(CheckpointError, match=mentions("checkpoint 5 4")):
        run.load_training_state(5)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a training state")


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("damage", [truncate, overwrite, lambda path: path.write_bytes(b"")])
def test_damaged_state_is_one_clear_error(
    run: RunDirectory, damage: Callable[[Path], None], has_checksums: bool
) -> None:
    run.save_checkpoint(1, tiny_policy(), {"x": torch.zeros(100)})
    if not has_checksums:
        (run.checkpoint_path() / "SHA256SUMS").unlink()
    damage(run.checkpoint_path() / "training_state" / "state.pt")
    with pytest.raises(CheckpointError, match=mentions("state.pt damaged")):
        run.load_training_state()


@pytest.mark.parametrize("position", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_single_flipped_bit_is_noticed(run: RunDirectory, position: float) -> None:
    run.save_checkpoint(1, tiny_policy(), {"x": torch.zeros(1000)})
    path = run.checkpoint_path() / "training_state" / "state.pt"
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=mentions("state.pt damaged SHA-256 SHA256SUMS")):
        run.load_training_state()


@pytest.mark.parametrize("error", [AttributeError, TypeError, IndexError])
def test_whatever_a_damaged_file_raises_is_one_clear_error(
    run: RunDirectory, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error("odd")

    run.save_checkpoint(1, tiny_policy(), {})
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match=mentions("state.pt damaged odd")):
        run.load_training_state()


def test_checksums_name_every_file_and_older_checkpoints_have_none(run: RunDirectory) -> None:
    folder = run.save_checkpoint(1, tiny_policy(), {"x": 1})
    named = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert named == files - {"SHA256SUMS"}
    (folder / "SHA256SUMS").unlink()
    assert run.load_training_state()["x"] == 1


def test_state_that_would_run_code_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (os.mkdir, (str(tmp_path / "ran"),))

    run.save_checkpoint(1, tiny_policy(), {})
    torch.save({"format": 1, "evil": Evil()}, run.checkpoint_path() / "training_state" / "state.pt")
    (run.checkpoint_path() / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=mentions("damaged")):
        run.load_training_state()
    assert not (tmp_path / "ran").exists()


class Cut(BaseException):
    """Stands for the end of the process."""


CALLS = ("os.rename", "os.replace", "os.symlink", "os.fsync", "torch.save", "shutil.rmtree")


def cut_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Let the process end before its `moment`-th call that touches the disk; clean-up does not run."""
    count = 0

    def wrap(call: Callable) -> Callable:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count >= moment:
                raise Cut
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        module, attribute = name.split(".")
        owner = {"os": os, "torch": torch, "shutil": shutil}[module]
        monkeypatch.setattr(owner, attribute, wrap(getattr(owner, attribute)))


def save_cut(run: RunDirectory, moment: int) -> bool:
    """Save checkpoint 3 over 1 and 2 and end at a moment; return whether the end came."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_at(monkeypatch, moment)
        try:
            run.save_checkpoint(3, tiny_policy(3), {"value": 3})
            run.keep_newest(2)
        except Cut:
            return True
    return False


def test_an_end_at_any_moment_of_saving_leaves_loadable_checkpoints(tmp_path: Path) -> None:
    before, moment, ended = RunDirectory.create_at(tmp_path / "before", {}), 0, True
    with before.claim():
        for step in (1, 2):
            before.save_checkpoint(step, tiny_policy(step), {"value": step})
    while ended:
        moment += 1 if everything else 1 + moment % 3 % 2  # of three moments one is left out
        copy = shutil.copytree(before.path, tmp_path / f"run-{moment}", symlinks=True)
        run = RunDirectory.open(copy)
        with run.claim():
            ended = save_cut(run, moment)
        found = RunDirectory.open(run.path)
        assert found.latest() in (2, 3)
        for step in found.checkpoints():
            assert found.load_training_state(step)["value"] == step
            load_policy(found.policy_path(step))
        load_policy(run.path / "checkpoints" / "last" / "policy")
        with found.claim():
            assert not list((run.path / "checkpoints").glob(".*"))
            assert os.readlink(run.path / "checkpoints" / "last") == str(found.latest())
    assert moment > 15


def test_a_damaged_configuration_is_one_line(run: RunDirectory) -> None:
    (run.path / "config.yaml").write_text("{[")
    with pytest.raises(CheckpointError, match=mentions("config.yaml damaged")) as caught:
        _ = run.config
    assert "\n" not in str(caught.value)


def test_second_writer_is_refused_while_the_first_lives(run: RunDirectory) -> None:
    def second_writer() -> None:
        with pytest.raises(CheckpointError, match="process"), RunDirectory.open(run.path).claim():
            pass

    with run.claim():
        assert exit_code_of(second_writer) == 0
    assert exit_code_of(second_writer) == 1, "it is not refused"
    with RunDirectory.open(run.path).claim():
        pass


def test_a_run_that_is_being_made_belongs_to_its_maker(tmp_path: Path) -> None:
    first = RunDirectory.create_at(tmp_path / "run", {"seed": 0})
    with pytest.raises(CheckpointError, match=mentions("process")):
        RunDirectory.create_at(tmp_path / "run", {"seed": 1})
    with first.claim():
        assert first.config == {"seed": 0}
    with pytest.raises(CheckpointError, match=mentions("resume=")):
        RunDirectory.create_at(tmp_path / "run", {"seed": 1})
    with RunDirectory.open(tmp_path / "run").claim():
        assert first.config == {"seed": 0}


def test_reading_does_not_disturb_a_writer(run: RunDirectory) -> None:
    aside = run.path / "checkpoints" / ".aside-half"
    aside.mkdir()
    RunDirectory.open(run.path).checkpoints()
    assert aside.exists()
    with run.claim():
        assert not aside.exists()


def test_a_run_that_was_copied_with_links_followed_goes_on(run: RunDirectory, tmp_path: Path) -> None:
    for step in (1, 2):
        run.save_checkpoint(step, tiny_policy(), {"at": step})
    shutil.copytree(run.path, tmp_path / "copy")
    copy, last = RunDirectory.open(tmp_path / "copy"), tmp_path / "copy" / "checkpoints" / "last"
    assert last.is_dir() and not last.is_symlink()
    with copy.claim():
        assert os.readlink(last) == "2" and copy.checkpoints() == [1, 2]
    last.unlink()
    last.mkdir()
    (last / "notes").touch()
    with pytest.raises(CheckpointError, match=mentions("checkpoints/last link folder")), copy.claim():
        pass
    assert (last / "notes").exists() and not list(last.parent.glob(".aside-*"))


def test_rewinding_forgets_later_checkpoints(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        run.save_checkpoint(step, tiny_policy(), {})
    for name in ("base", *map(eval_name, (1, 2, 3)), eval_name(3, "ab12")):
        run.write_eval(name, {})
    run.rewind(2)
    assert run.checkpoints() == [1, 2] and [one.step for one in run.evals()] == [1, 2]
    assert os.readlink(run.path / "checkpoints" / "last") == "2"
    run.rewind(None)
    assert run.checkpoints() == [] == run.evals()
    assert (run.path / "eval" / "base.json").exists()
    assert not (run.path / "checkpoints" / "last").is_symlink()


def test_evaluations_of_checkpoints_are_found_by_step(run: RunDirectory) -> None:
    for name in ("base", eval_name(20), eval_name(3), eval_name(20, "ab12", "versus", "x"), "step-x"):
        run.write_eval(name, {})
    found = [(one.step, one.path.stem, one.is_of_training) for one in run.evals()]
    assert found == [(3, "step-3", True), (20, "step-20-ab12-versus-x", False), (20, "step-20", True)]


def test_evaluations_are_written_and_replaced(run: RunDirectory) -> None:
    run.write_eval("base", {"success": 0.4})
    path = run.write_eval("base", {"success": 0.5})
    assert json.loads(path.read_text()) == {"success": 0.5}
    assert [p.name for p in path.parent.iterdir()] == ["base.json"]


def test_a_run_names_the_processor_that_computed_it(run: RunDirectory) -> None:
    found = json.loads((run.path / "environment.json").read_text())
    assert found["processor"] not in ("", platform.machine()) or not Path("/proc/cpuinfo").exists()
    assert found["machine"] == platform.machine()
    assert found["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_commit_is_absent_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(algos.training.provenance, "__file__", str(tmp_path / "algos" / "provenance.py"))
    assert algos.training.provenance.describe_environment()["commit"] is None


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64])
def test_numpy_generators_continue(bits: type[np.random.BitGenerator], tmp_path: Path) -> None:
    generator = np.random.Generator(bits(3))
    generator.normal(size=5)
    torch.save(capture_generator(generator), tmp_path / "state")
    expected = generator.normal(size=5)
    other = np.random.Generator(bits(4))
    restore_generator(other, torch.load(tmp_path / "state", weights_only=True))
    np.testing.assert_array_equal(other.normal(size=5), expected)


def test_state_of_another_kind_of_generator_is_refused() -> None:
    with pytest.raises(CheckpointError, match=mentions("random")):
        restore_generator(
            np.random.Generator(np.random.Philox(0)), capture_generator(np.random.default_rng(0))
        )
    with pytest.raises(CheckpointError, match=mentions("random")):
        restore_generator(torch.Generator(), torch.zeros(3, dtype=torch.uint8))


def test_global_torch_state_continues() -> None:
    torch.manual_seed(0)
    state = capture_global_rng()
    expected = torch.rand(3)
    torch.rand(2)
    restore_global_rng(state)
    assert torch.equal(torch.rand(3), expected)


def test_plain_values_return_as_they_were() -> None:
    value = {"a": [1, 2.5, "x", None, True], 3: (np.float64(2.0), b"\xff"), "m": np.eye(2, dtype=np.float32)}
    back = from_plain(to_plain(value))
    np.testing.assert_array_equal(back.pop("m"), np.eye(2, dtype=np.float32))
    assert back == {"a": [1, 2.5, "x", None, True], 3: (2.0, b"\xff")}


@pytest.mark.parametrize("value", [{1.5: 0}, np.array(["text"]), {"deep": [object()]}])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=mentions("state")):
        to_plain(value)
