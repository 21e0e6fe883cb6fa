"""Bad input ends in one line before work starts: what is wrong, where, and what to do about it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from pairwise import each_value
from safetensors.torch import load_file, save_file

import burnish
from algos.training import trainer
from burnish import cli
from burnish.commands import train as train_command
from envs.datasets import write_robomimic
from envs.datasets.episodes import EpisodeDataset
from envs.make import env
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import CONFIG, WEIGHTS, save_policy

TASK = env("avoid")
OBS, ACT = TASK.spec.obs_dim, TASK.spec.action_dim
LEVELS = 5
TINY = {"steps": 4, "log_every": 2, "warmup_steps": 0, "batch_size": 4, "validation_fraction": 0.5}


# -- good input, to be spoilt ---------------------------------------------------------------------------


def episodes(action_dim: int = ACT, num: int = 4, length: int = 8) -> EpisodeDataset:
    generator, frames = torch.Generator().manual_seed(0), num * length
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    return EpisodeDataset(
        observations=torch.rand(frames, OBS, generator=generator),
        actions=torch.rand(frames, action_dim, generator=generator) * 2 - 1,
        rewards=torch.zeros(frames),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        episode_start=torch.arange(0, frames + 1, length),
        meta={"source": "test"},
    )


def robomimic_file(path: Path, action_dim: int = ACT) -> Path:
    write_robomimic(path, episodes(action_dim), TASK)
    return path


def d4rl_file(path: Path, action_dim: int = ACT) -> Path:
    data = episodes(action_dim)
    with h5py.File(path, "w") as file:
        for key, value in (
            ("observations", data.observations), ("actions", data.actions), ("rewards", data.rewards),
            ("terminals", data.terminated), ("timeouts", data.truncated),
        ):  # fmt: skip
            file[key] = value.numpy()
    return path


WRITERS: dict[str, Callable[..., Path]] = {"robomimic": robomimic_file, "d4rl": d4rl_file}
ACTIONS = {"robomimic": "data/demo_1/actions", "d4rl": "actions"}
every_format = pytest.mark.parametrize("kind", WRITERS)


def policy_directory(path: Path, *, obs_dim: int = OBS, sampler: Any = None, **config: Any) -> Path:
    policy = build_policy(
        PolicyConfig(
            process=VPDiffusion(num_levels=LEVELS), backbone=MlpConfig(width=8), sampler=sampler, **config
        ),
        obs_dim=obs_dim,
        action_dim=ACT,
        seed=1,
    )
    return save_policy(policy, path)


class Shell:
    """An empty directory in which commands are given, with the input files elsewhere."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.inputs, self.cwd = root / "inputs", root / "cwd"
        self.inputs.mkdir()
        self.cwd.mkdir()
        monkeypatch.chdir(self.cwd)
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        monkeypatch.setattr(train_command, "train_together", self._must_not_start)
        self._monkeypatch, self._capsys = monkeypatch, capsys

    @staticmethod
    def _must_not_start(*_: Any, **__: Any) -> None:
        pytest.fail("training started")

    def complaint(self, *arguments: str) -> str:
        """Give a command that must fail, and return its one line of complaint."""
        self._monkeypatch.setattr(sys, "argv", ["burnish", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == 2, err
        assert err.startswith("burnish: error: ") and err.count("\n") == 1 and err.endswith("\n")
        assert out == ""
        left = sorted(path.relative_to(self.cwd) for path in self.cwd.rglob("*"))
        assert not left, f"left behind: {left}"
        return err.strip()


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shell]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Shell(tmp_path, monkeypatch, capsys)
    root.handlers[:], root.level = handlers, level  # a command configures logging for its process


# -- a truncated HDF5 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "share"), each_value(list(WRITERS), [0.0, 0.1, 0.6, 0.99]))
def test_a_truncated_file(kind: str, share: float, shell: Shell) -> None:
    path = WRITERS[kind](shell.inputs / "demos.hdf5")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    line = shell.complaint("train", "algo=bc", "env=avoid", f"dataset={path}")
    assert str(path) in line and "truncated" in line and "copy or download it again" in line


def test_a_file_of_another_kind_or_a_missing_one(shell: Shell) -> None:
    path = shell.inputs / "demos.hdf5"
    line = shell.complaint("train", "algo=bc", f"dataset={path}")
    assert str(path) in line and "no such file" in line and "Check the path" in line
    path.write_text("observation,action\n1,2\n")
    assert "another kind" in shell.complaint("train", "algo=bc", f"dataset={path}")
    with h5py.File(path, "w") as file:
        file["pictures"] = np.zeros(3)
    line = shell.complaint("train", "algo=bc", f"dataset={path}")
    assert "d4rl" in line and "robomimic" in line and "['pictures']" in line


# -- NaN in the data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "value"), each_value(list(WRITERS), [np.nan, np.inf]))
def test_nan_in_the_data(kind: str, value: float, shell: Shell) -> None:
    path = WRITERS[kind](shell.inputs / "demos.hdf5")
    with h5py.File(path, "r+") as file:
        file[ACTIONS[kind]][3, 1] = value
    line = shell.complaint("train", "algo=bc", "env=avoid", f"dataset={path}")
    row = 3 if kind == "d4rl" else 11  # the second episode begins at frame 8
    assert str(path) in line and f"key 'actions' must be finite; got {value} at index [{row}, 1]" in line
    assert "Remove or repair" in line


@every_format
def test_nan_in_observations_and_rewards(kind: str, shell: Shell) -> None:
    for key, ours in (("observations", "observations"), ("rewards", "rewards")):
        path = WRITERS[kind](shell.inputs / f"{key}.hdf5")
        folder = "data/demo_0/" if kind == "robomimic" else ""
        with h5py.File(path, "r+") as file:
            name = f"{folder}obs/flat" if folder and key == "observations" else f"{folder}{key}"
            file[name][0] = np.nan
        line = shell.complaint("train", "algo=bc", f"dataset={path}")
        assert str(path) in line and f"key '{ours}' must be finite" in line


# -- wrong action dimension -----------------------------------------------------------------------------


@every_format
def test_a_wrong_action_dimension(kind: str, shell: Shell) -> None:
    path = WRITERS[kind](shell.inputs / "demos.hdf5", action_dim=ACT + 1)
    line = shell.complaint("train", "algo=bc", "env=avoid", f"dataset={path}")
    assert f"env=avoid has action width {ACT}" in line and f"{path} has action width {ACT + 1}" in line
    assert "Use a dataset of the same task" in line
    policy = policy_directory(shell.inputs / "policy")
    line = shell.complaint("train", "algo=bc", f"dataset={path}", f"init={policy}")
    assert f"the policy of init has action width {ACT}" in line and str(path) in line


@every_format
def test_actions_that_are_no_table(kind: str, shell: Shell) -> None:
    path = WRITERS[kind](shell.inputs / "demos.hdf5")
    with h5py.File(path, "r+") as file:
        flat = file[ACTIONS[kind]][:, 0]
        del file[ACTIONS[kind]]
        file[ACTIONS[kind]] = flat
    line = shell.complaint("train", "algo=bc", f"dataset={path}")
    assert str(path) in line and "'actions'" in line and "shape" in line


def test_an_episode_of_another_width(shell: Shell) -> None:
    path = robomimic_file(shell.inputs / "demos.hdf5")
    with h5py.File(path, "r+") as file:
        wide = np.zeros((8, ACT + 2), np.float32)
        del file["data/demo_2/actions"]
        file["data/demo_2/actions"] = wide
    line = shell.complaint("train", "algo=bc", f"dataset={path}")
    assert str(path) in line and "demo_2" in line and "'actions'" in line and f"{ACT + 2}" in line


# -- an unknown key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "what", "hint"),
    [
        ("algo.lrr=1", "unknown key 'algo.lrr'", "Did you mean 'lr'?"),
        ("algo.batchsize=1", "unknown key 'algo.batchsize'", "Did you mean 'batch_size'?"),
        ("backbone.widht=8", "unknown key 'backbone.widht'", "Did you mean 'width'?"),
        ("policy.horizn=8", "unknown key 'policy.horizn'", "Did you mean 'horizon'?"),
        ("trainer.log_evry=8", "unknown key 'trainer.log_evry'", "Did you mean 'log_every'?"),
        ("datset=x.hdf5", "unknown key 'datset'", "Did you mean 'dataset'?"),
        ("algo=bcc", "unknown option algo=bcc", "Did you mean 'bc'? Choose one of: "),
        ("algo.lr=fast", "algo.lr: Value 'fast'", "converted to Float"),
        ("policy.horizon=0", "policy.horizon must be at least 1", "got 0"),
    ],
)
def test_an_unknown_key_or_value(argument: str, what: str, hint: str, shell: Shell) -> None:
    path = robomimic_file(shell.inputs / "demos.hdf5")
    line = shell.complaint("train", "algo=bc", "backbone=mlp", f"dataset={path}", argument)
    assert what in line and hint in line


# -- a checkpoint that does not fit ---------------------------------------------------------------------


def cut_weights(policy: Path) -> None:
    (policy / WEIGHTS).write_bytes((policy / WEIGHTS).read_bytes()[:100])


def drop_a_weight(policy: Path) -> None:
    state = load_file(policy / WEIGHTS)
    state.pop("field.trunk.inlet.weight")
    save_file(state, policy / WEIGHTS)


def widen_in_the_description(policy: Path) -> None:
    data = json.loads((policy / CONFIG).read_text())
    data["parts"]["backbone"]["width"] = 16
    (policy / CONFIG).write_text(json.dumps(data))


def name_an_unknown_part(policy: Path) -> None:
    data = json.loads((policy / CONFIG).read_text())
    data["parts"]["process"]["name"] = "os.system"
    (policy / CONFIG).write_text(json.dumps(data))


def break_the_description(policy: Path) -> None:
    (policy / CONFIG).write_text((policy / CONFIG).read_text()[:40])


def come_from_the_future(policy: Path) -> None:
    data = json.loads((policy / CONFIG).read_text()) | {"format": 99}
    (policy / CONFIG).write_text(json.dumps(data))


SPOILT = {
    cut_weights: (WEIGHTS, "is damaged"),
    drop_a_weight: (WEIGHTS, "does not fit config.json: missing ['field.trunk.inlet.weight']"),
    widen_in_the_description: (WEIGHTS, "must have shape"),
    name_an_unknown_part: (CONFIG, "unknown process 'os.system'; choose one of: consistency, "),
    break_the_description: (CONFIG, "is not valid JSON"),
    come_from_the_future: (CONFIG, "must have format 1; got 99"),
}


@pytest.mark.parametrize(
    ("command", "spoil"),
    each_value(["train", "eval", "export"], list(SPOILT)),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_policy(command: str, spoil: Callable[[Path], None], shell: Shell) -> None:
    policy = policy_directory(shell.inputs / "policy")
    spoil(policy)
    arguments = {
        "train": ["train", "algo=dppo", "env=avoid", f"init={policy}"],
        "eval": ["eval", "env=avoid", f"policy={policy}"],
        "export": ["export", f"policy={policy}"],
    }
    line = shell.complaint(*arguments[command])
    file, what = SPOILT[spoil]
    assert str(policy / file) in line and what in line


def test_a_policy_of_another_task(shell: Shell) -> None:
    policy = policy_directory(shell.inputs / "policy", obs_dim=OBS + 3)
    line = shell.complaint("train", "algo=dppo", "env=avoid", f"init={policy}", "algo.tuned_steps=2")
    assert f"env=avoid has observation width {OBS}" in line and f"width {OBS + 3}" in line
    assert "Choose a policy of this task" in line
    line = shell.complaint("eval", "env=avoid", f"policy={policy}", "num_workers=0")
    assert str(OBS) in line and str(OBS + 3) in line and "avoid" in line


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run of four gradient steps."""
    run = burnish.clone(
        robomimic_file(tmp_path / "demos.hdf5"),
        directory=tmp_path / "run",
        env="avoid",
        backbone={"width": 8},
        evaluation={"episodes": 0},
        num_workers=0,
        progress=False,
        **{f"algo.{key}": value for key, value in TINY.items()},
    )
    return run.path


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("algo.steps=8", "belongs to a run of 4 gradient steps, this one has 8"),
        ("backbone.width=16", "policy.parts.backbone.width must stay what it was"),
        ("process.num_levls=3", "num_levls"),
    ],
)
def test_resuming_with_another_configuration(
    change: str,
    what: str,
    finished: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_command, "train_together", trainer.train_together)
    before = contents(finished)
    assert what in shell.complaint("train", f"resume={finished}", change)
    assert contents(finished) == before


def test_resuming_from_a_damaged_state(finished: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "train_together", trainer.train_together)
    state = finished / "checkpoints" / "4" / "training_state" / "state.pt"
    state.write_bytes(state.read_bytes()[:200])
    before = contents(finished)
    line = shell.complaint("train", f"resume={finished}")
    assert (
        str(state.relative_to(finished)) in line and "is damaged" in line and "Remove its checkpoint" in line
    )
    assert contents(finished) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- fewer denoising steps than fine-tuned ones ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "steps", "tuned"),
    [
        ([f"algo.tuned_steps={LEVELS + 1}"], LEVELS, LEVELS + 1),
        ([], LEVELS, 10),
        (["algo.sampler=ddim", "algo.tuned_steps=6", "algo.denoising_steps=5"], 5, 6),
        (["algo.tuned_steps=6", "algo.denoising_steps=5"], 5, 6),
    ],
)
def test_fewer_denoising_than_tuned_steps(arguments: list[str], steps: int, tuned: int, shell: Shell) -> None:
    policy = policy_directory(shell.inputs / "policy")
    line = shell.complaint("train", "algo=dppo", "env=avoid", f"init={policy}", *arguments)
    assert f"algo.tuned_steps must not exceed the {steps} denoising steps; got {tuned}" in line
    assert f"Use algo.tuned_steps={steps}, or raise algo.denoising_steps" in line


def test_more_steps_than_noise_levels(shell: Shell) -> None:
    policy = policy_directory(shell.inputs / "policy")
    line = shell.complaint(
        "train", "algo=dppo", "env=avoid", f"init={policy}", "algo.tuned_steps=2", "algo.denoising_steps=9"
    )
    assert "9" in line and str(LEVELS) in line and "steps" in line
    ddim = policy_directory(shell.inputs / "ddim", sampler=DDIM(steps=LEVELS))
    for command in (["eval", "env=avoid"], ["export"]):
        line = shell.complaint(*command, f"policy={ddim}", "steps=9")
        assert "9" in line and str(LEVELS) in line and "steps" in line
