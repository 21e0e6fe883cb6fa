"""Exported folders of strangers: what they say is checked, and what could run their code is not opened."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from small_policies import OBS_DIM, small_policy

from policies.errors import BurnishError, CheckpointError, ExportError
from policies.export.export import export_policy
from policies.export.exported_policy import ExportedPolicy
from policies.export.folder import CARD, PROGRAM
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
    export_policy(small_policy(RectifiedFlow(), Euler(steps=2)), folder, latency_batches=())
    return folder


TEXTS = {
    "no JSON": ("{", "signature.json JSON"),
    "a list": ("[]", "JSON list"),
    "nothing": ("{}", "format graph"),
    "nested without end": ("[" * 100_000, "JSON deep"),
    "nested inside": ('{"provenance": ' + "[" * 100 + "]" * 100 + "}", "JSON deep"),
    "not a number": ('{"control_hz": NaN}', "finite"),
    "a key twice": ('{"format": "onnx", "format": "torch"}', "JSON format twice"),
}


def at(*keys: str) -> Callable[[Any, Any], None]:
    """Return what sets a value at a place in JSON."""

    def put(facts: Any, value: Any) -> None:
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = value

    return put


LIES: dict[str, tuple[Callable[[Any, Any], None], Any, str]] = {
    "another format": (at("format"), "exe", "format exe"),
    "a format that is a list": (at("format"), ["onnx"], "format graph"),
    "another graph": (at("graph"), "evil", "graph evil"),
    "inputs as a list": (at("inputs"), [], "inputs object"),
    "an input that is a number": (at("inputs", "noise"), 1, "inputs.noise"),
    "a width of text": (at("inputs", "observation", "shape"), ["B", 1, "x"], "inputs.observation.shape x"),
    "a width that is true": (at("inputs", "observation", "shape"), ["B", 1, True], "observation.shape True"),
    "a negative width": (at("inputs", "observation", "shape"), ["B", 1, -5], "inputs.observation.shape -5"),
    "no batch": (at("inputs", "observation", "shape"), [1, OBS_DIM], "inputs.observation.shape 'B'"),
    "a shape without end": (at("inputs", "noise", "shape"), ["B"] + [1] * 50, "inputs.noise.shape 'B'"),
    "memory without end": (
        at("inputs", "noise", "shape"),
        ["B"] + [60_000] * 4,
        "noise.shape 67108864",
    ),
    "another history": (at("inputs", "observation", "shape"), ["B", 3, OBS_DIM], "To=1"),
    "another type": (at("inputs", "observation", "dtype"), "object", "float32 uint8"),
    "no observation": (at("inputs"), {}, "noise"),
    "a horizon of text": (at("horizon"), "3", "horizon 3"),
    "rows that are not there": (at("act_steps"), 99, "policy.horizon=3"),
    "another number of rows": (at("act_steps"), 1, "outputs.action 1"),
    "limits of another width": (at("outputs", "action", "low"), [0.0], "outputs.action.low 2"),
    "limits of text": (at("outputs", "action", "high"), ["1", "1"], "outputs.action.high 2"),
    "a rate below zero": (at("control_hz"), -20, "control_hz"),
    "a task that is a list": (at("task"), [], "task text"),
    "an origin that is a list": (at("provenance"), [], "provenance object"),
    "a wider observation": (at("inputs", "observation", "shape"), ["B", 1, OBS_DIM + 1], "cannot be run"),
    "another input": (at("inputs", "goal"), {"shape": ["B", 0], "dtype": "float32"}, "inputs.goal.shape 0"),
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
    with pytest.raises(ExportError, match=mentions(TEXTS[text][1])) as refused:
        opened(tmp_path)
    assert str(tmp_path / SIGNATURE) in str(refused.value)


@pytest.mark.parametrize("opened", [ExportedPolicy, ServedFolder])
@pytest.mark.parametrize("lie", LIES)
def test_a_signature_that_lies_is_refused_by_what_is_wrong(
    opened: Any, lie: str, honest: Path, tmp_path: Path
) -> None:
    put, value, message = LIES[lie]
    with pytest.raises(ExportError, match=mentions(message)):
        opened(lied(honest, tmp_path / "lied", put, value))


@pytest.fixture(scope="module")
def stepwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a loop of its own."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("exports") / "stepwise"
    policy = small_policy(RectifiedFlow(), Euler(steps=1))
    export_policy(policy, folder, graph="step", latency_batches=(), batch_sizes=(1,))
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
    with pytest.raises(ExportError, match=re.escape(str(folder))):
        ExportedPolicy(folder)


def test_an_honest_signature_says_what_the_policy_is(honest: Path, tmp_path: Path) -> None:
    signature = read_signature(honest)
    assert (signature.obs_dim, signature.goal_dim, signature.noise_shape) == (OBS_DIM, 0, (3, 2))
    assert signature.chunk == small_policy(RectifiedFlow(), Euler(steps=2)).chunk
    assert ExportedPolicy(honest).description == signature
    with pytest.raises(CheckpointError, match=mentions("signature.json")):
        read_signature(tmp_path)


# -- code -----------------------------------------------------------------------------------------------


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.place), "w")


@pytest.fixture
def bombed(tmp_path: Path) -> tuple[Path, Path]:
    """An exported program whose sample inputs are a bomb, and the file that it writes."""
    folder, place = tmp_path / "bombed", tmp_path / "executed"
    policy = small_policy(RectifiedFlow(), Euler(steps=1))
    export_policy(policy, folder, format="torch", compiled=False, latency_batches=(), batch_sizes=(1,))
    content = io.BytesIO()
    torch.save(((Bomb(place),), {}), content)
    with zipfile.ZipFile(folder / PROGRAM) as good:
        files = {name: good.read(name) for name in good.namelist()}
    assert any("sample_inputs" in name for name in files)
    with zipfile.ZipFile(folder / PROGRAM, "w", zipfile.ZIP_STORED) as bad:
        for name, data in files.items():
            bad.writestr(name, content.getvalue() if "sample_inputs" in name else data)
    return folder, place


def test_a_program_is_opened_only_where_its_maker_is_trusted(bombed: tuple[Path, Path]) -> None:
    folder, place = bombed
    for opened in (ExportedPolicy, ServedFolder):
        with pytest.raises(ExportError, match=mentions("trust=false trust=true")):
            opened(folder)
        assert not place.exists()
    with pytest.raises(BurnishError):  # the bomb is no sample: it goes off, and the program is not there
        ExportedPolicy(folder, trust=True)
    assert place.exists(), "the bomb is a real one"
    assert "execute code" in (folder / CARD).read_text()


def test_workers_trust_what_the_one_who_sent_them_trusts(tmp_path: Path) -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=1))
    export_policy(
        policy, tmp_path / "a", format="torch", compiled=False, latency_batches=(), batch_sizes=(1,)
    )
    sent = pickle.loads(pickle.dumps(ExportedPolicy(tmp_path / "a", trust=True)))
    assert sent.trust and sent.chunk == policy.chunk
