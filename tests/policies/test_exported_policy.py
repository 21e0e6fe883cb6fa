"""Untrusted exported folders: their metadata is validated, and no code in them is run."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_policies import OBS_DIM, small_policy

from policies.errors import CheckpointError, ConfigError, ExportError
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.export.signature import read_signature
from policies.processes import RectifiedFlow
from policies.runner import SIGNATURE
from policies.samplers.ode import Euler
from policies.serving.served_policy import ServedFolder

# -- signatures -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was exported."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("exports") / "honest"
    export_onnx(small_policy(RectifiedFlow(), Euler(steps=1)), folder, latency_batches=())
    return folder


TEXTS = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ("[]", "must hold a JSON object; got list"),
    "nothing": ("{}", "format must be onnx; got None"),
    "nested without end": ("[" * 100_000, "nested too deep"),
    "nested inside": ('{"provenance": ' + "[" * 100 + "]" * 100 + "}", "nested too deep"),
    "not a number": ('{"control_hz": NaN}', "numbers must be finite"),
    "a key twice": ('{"format": "onnx", "format": "torch"}', "stands twice"),
}


def at(*keys: str) -> Callable[[Any, Any], None]:
    """Return what sets a value at a place in JSON."""

    def put(facts: Any, value: Any) -> None:
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = value

    return put


LIES: dict[str, tuple[Callable[[Any, Any], None], Any, str]] = {
    "another format": (at("format"), "exe", "format must be onnx; got exe"),
    "a format that is a list": (at("format"), ["onnx"], "format must be onnx"),
    "another graph": (at("graph"), "evil", "graph must be one of whole, step; got evil"),
    "inputs as a list": (at("inputs"), [], "inputs must be an object"),
    "an input that is a number": (at("inputs", "noise"), 1, "inputs.noise must be an object"),
    "a width of text": (at("inputs", "observation", "shape"), ["B", 1, "x"], "must be whole.*got x"),
    "a width that is true": (at("inputs", "observation", "shape"), ["B", 1, True], "must be whole"),
    "a negative width": (at("inputs", "observation", "shape"), ["B", 1, -5], "must be whole"),
    "no batch": (at("inputs", "observation", "shape"), [1, OBS_DIM], "begins with 'B'"),
    "a shape without end": (at("inputs", "noise", "shape"), ["B"] + [1] * 50, "begins with 'B'"),
    "memory without end": (at("inputs", "noise", "shape"), ["B"] + [60_000] * 4, "at most 67108864 numbers"),
    "another history": (at("inputs", "observation", "shape"), ["B", 3, OBS_DIM], "with To=1; got"),
    "another type": (at("inputs", "observation", "dtype"), "object", "dtype one of float32, uint8"),
    "no observation": (at("inputs"), {}, "must hold observation and noise"),
    "a horizon of text": (at("horizon"), "3", "horizon must be whole"),
    "rows that are not there": (at("act_steps"), 99, "must fit into policy.horizon=3"),
    "another number of rows": (at("act_steps"), 1, "outputs.action must have 1 rows"),
    "limits of another width": (at("outputs", "action", "low"), [0.0], "must hold 2 numbers, or null"),
    "limits of text": (at("outputs", "action", "high"), ["1", "1"], "must hold 2 numbers, or null"),
    "a rate below zero": (at("control_hz"), -20, "control_hz must be positive"),
    "a task that is a list": (at("task"), [], "task must be a text"),
    "an origin that is a list": (at("provenance"), [], "provenance must be an object"),
    "a wider observation": (at("inputs", "observation", "shape"), ["B", 1, OBS_DIM + 1], "cannot be run"),
    "another input": (at("inputs", "goal"), {"shape": ["B", 0], "dtype": "float32"}, "must be whole"),
}


def lied(honest: Path, folder: Path, put: Callable[[Any, Any], None], value: Any) -> Path:
    """Copy a folder and change its signature."""
    shutil.copytree(honest, folder)
    facts = json.loads((folder / SIGNATURE).read_text())
    put(facts, value)
    (folder / SIGNATURE).write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("opened", [ExportedPolicy, ServedFolder])
@pytest.mark.parametrize("text", TEXTS)
def test_a_signature_that_cannot_be_read_is_refused_by_file(opened: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / SIGNATURE).write_text(TEXTS[text][0])
    with pytest.raises(ExportError, match=TEXTS[text][1]) as refused:
        opened(tmp_path)
    assert str(tmp_path / SIGNATURE) in str(refused.value)


@pytest.mark.parametrize("opened", [ExportedPolicy, ServedFolder])
@pytest.mark.parametrize("lie", LIES)
def test_a_signature_that_lies_is_refused_by_what_is_wrong(
    opened: Any, lie: str, honest: Path, tmp_path: Path
) -> None:
    put, value, message = LIES[lie]
    with pytest.raises(ExportError, match=message):
        opened(lied(honest, tmp_path / "lied", put, value))


@pytest.fixture(scope="module")
def stepwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a loop of its own."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("exports") / "stepwise"
    policy = small_policy(RectifiedFlow(), Euler(steps=1))
    export_onnx(policy, folder, graph="step", latency_batches=(), batch_sizes=(1,))
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [("step.onnx", "no graph"), ("encoder.onnx", ""), ("loop.json", "[" * 100_000), ("loop.json", "[]")],
)
def test_files_that_lie_are_refused_with_the_folder(
    name: str, text: str, stepwise: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stepwise, tmp_path / "lied")
    (folder / name).write_text(text)
    with pytest.raises(ExportError, match=f"{re.escape(str(folder))} cannot be run"):
        ExportedPolicy(folder)


def test_an_honest_signature_says_what_the_policy_is(honest: Path, tmp_path: Path) -> None:
    signature = read_signature(honest)
    assert (signature.obs_dim, signature.goal_dim, signature.noise_shape) == (OBS_DIM, 0, (3, 2))
    assert signature.chunk == small_policy(RectifiedFlow(), Euler(steps=2)).chunk
    assert ExportedPolicy(honest).description == signature
    with pytest.raises(CheckpointError, match=r"is no exported policy: it holds no signature\.json"):
        read_signature(tmp_path)


# -- code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [ExportedPolicy, ServedFolder])
def test_a_program_of_version_0_1_is_refused_unopened(opened: Any, honest: Path, tmp_path: Path) -> None:
    folder = lied(honest, tmp_path / "program", at("format"), "torch")
    (folder / "policy.onnx").rename(folder / "policy.pt2")
    with pytest.raises(ExportError, match="format must be onnx; got torch"):
        opened(folder)


def test_workers_open_the_folder_themselves(honest: Path) -> None:
    sent = pickle.loads(pickle.dumps(ExportedPolicy(honest)))
    assert sent.chunk == ExportedPolicy(honest).chunk


def test_an_observation_without_state_is_refused(honest: Path) -> None:
    with pytest.raises(ConfigError, match="needs 'state'"):
        ExportedPolicy(honest).act({"goal": torch.zeros(1, 2)})
