"""An exported folder is the policy: same numbers at any batch, with nothing of ours needed to run it."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything
from small_policies import ACTION_DIM, GOAL_DIM, OBS_DIM, small_policy, statistics
from torch import Tensor, nn

from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.errors import ExportError, MissingExtraError
from policies.export import onnx_graph
from policies.export.card import card_of
from policies.export.export import export_onnx
from policies.export.folder import CARD, REPORT, RUNNER, ExportReport, Surroundings, draft_of, signature
from policies.export.onnx_graph import random_inputs
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.gaussian import GaussianProcess
from policies.runner import MODEL, SAMPLE, SIGNATURE
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.ode import Euler

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-5
FILES = {MODEL, SIGNATURE, SAMPLE, REPORT, CARD, RUNNER}


def switched_policy() -> Policy:
    """A policy whose last steps run another network."""
    policy = small_policy(VPDiffusion(num_levels=2), DDPM())
    tuned = copy.deepcopy(policy.field)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.mul_(1.3)
    policy.field = SwitchedField(policy.field, tuned, switch_time=0.5)
    return policy


def deep_policy() -> Policy:
    """Every option of the network that changes its graph."""
    backbone = MlpConfig(
        width=16, num_blocks=2, activation="mish", layer_norm=True, time_dim=8, cond_dims=(8, 4)
    )
    config = PolicyConfig(process=RectifiedFlow(), backbone=backbone, sampler=Euler(steps=2))
    return build_policy(
        config, obs_dim=OBS_DIM, action_dim=ACTION_DIM, statistics=statistics(), seed=3
    ).double()


# Every process and sampler by itself is exported in tests/contracts; these are their options.
CASES = {"deep-float64": deep_policy}
if everything:  # else compiled, and exported in steps alone
    CASES["switched"] = switched_policy
    CASES["diffusion-ddim-noisy"] = lambda: small_policy(
        VPDiffusion(num_levels=8, prediction="v"),
        DDIM(steps=2, eta_per_dim=(0.2, 1.0), eps_clip=2.0, recompute_eps=False),
    )


def open_plainly(folder: Path) -> Any:
    return onnxruntime.InferenceSession(str(folder / MODEL), providers=["CPUExecutionProvider"])


def fed(session: Any, inputs: dict[str, Tensor]) -> np.ndarray:
    return session.run(None, {node.name: inputs[node.name].numpy() for node in session.get_inputs()})[0]


def expected(policy: Policy, inputs: dict[str, Tensor]) -> np.ndarray:
    obs = {"state": inputs["observation"]} | {k: v for k, v in inputs.items() if k == "goal"}
    noise = inputs["noise"].to(policy.dtype)
    return policy.act(obs, noise=noise).float().numpy()


def assert_same(policy: Policy, folder: Path, batches: tuple[int, ...]) -> None:
    session, generator = open_plainly(folder), torch.Generator().manual_seed(99)
    for batch in batches:
        inputs = random_inputs(policy.clone().float(), batch, generator)
        np.testing.assert_allclose(fed(session, inputs), expected(policy, inputs), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_graph_equals_the_policy_at_any_batch(name: str, tmp_path: Path) -> None:
    policy = CASES[name]()
    report = export_onnx(policy, tmp_path, latency_batches=())
    assert [row["batch"] for row in report.parity] == [1, 2, 7]
    assert report.worst <= TOLERANCE and report.latency == []
    assert_same(policy, tmp_path, (1, 2, 7, 40))
    graph = onnx.load(tmp_path / MODEL).graph
    of_weights_alone = {"Sin", "Cos", "Exp"} | ({"Mish", "Softplus"} if name != "deep-float64" else set())
    assert not of_weights_alone & {node.op_type for node in graph.node}
    assert not graph.value_info or all(
        value.type.tensor_type.shape.dim[0].dim_value != 3 for value in graph.value_info
    )


def test_observations_far_outside_the_data_are_clipped_in_the_graph_too(tmp_path: Path) -> None:
    policy = small_policy(GaussianProcess(), observation_clip=2.0)
    export_onnx(policy, tmp_path, latency_batches=())
    sample = dict(np.load(tmp_path / SAMPLE))
    feed = {"observation": 1e4 * sample["observation"], "noise": sample["noise"]}
    inputs = {name: torch.from_numpy(value) for name, value in feed.items()}
    ran = open_plainly(tmp_path).run(None, feed)[0]
    np.testing.assert_allclose(expected(policy, inputs), ran, atol=TOLERANCE, rtol=0)
    further = open_plainly(tmp_path).run(None, feed | {"observation": 10 * feed["observation"]})[0]
    np.testing.assert_array_equal(ran, further)


# -- the folder -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path, ExportReport]:
    """A goal-conditioned policy that executes rows 1 and 2 of a chunk of 4, exported once."""
    policy = small_policy(
        VPDiffusion(num_levels=2), goal_dim=GOAL_DIM, horizon=4, act_steps=2, obs_steps=2, action_start=1
    )
    folder = tmp_path_factory.mktemp("exports") / "made" / "here"
    return policy, folder, export_onnx(policy, folder, latency_batches=(1, 3))


def test_the_folder_holds_what_the_robot_needs_and_nothing_else(made: Any) -> None:
    _, folder, report = made
    assert {path.name for path in folder.iterdir()} == FILES
    assert list(folder.parent.iterdir()) == [folder]
    stored = json.loads((folder / REPORT).read_text())
    assert stored["parity"] == report.parity and stored["tolerance"] == TOLERANCE
    assert [row["batch"] for row in stored["latency"]] == [1, 3]
    assert all(row["eager_ms"] > 0 and row["onnx_ms"] > 0 for row in stored["latency"])
    assert b".py" not in (folder / MODEL).read_bytes(), "no files of this machine"
    card = (folder / CARD).read_text()
    assert "onnxruntime.InferenceSession" in card and all(f"`{n}`" in card for n in ("observation", "goal"))


def test_the_example_of_the_card_acts(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder, _ = made
    card = (folder / CARD).read_text()
    example = card.split("```python\n")[1].split("```")[0].replace("from runner", "from policies.runner")
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["action"].shape == (ACTION_DIM,) and found["newest"].keys() == {"observation", "goal"}


def test_the_card_names_task_and_rate_in_a_sentence() -> None:
    eye = {"shape": ["B", 2, 8, 9, 3], "dtype": "uint8", "units": "bytes"}
    facts = {"graph": "whole", "act_steps": 4, "inputs": {"eye": eye}, "task": None, "control_hz": 10.0}
    report = {"opset": 18, "tolerance": 1e-5, "parity": [], "latency": []}
    card = card_of(facts, report)
    assert "opset 18.\nOne action every 100 ms." in card
    assert '"eye": np.zeros((8, 9, 3), np.uint8)' in card
    card = card_of(facts | {"task": "reach"}, report)
    assert "opset 18.\nMade for the task `reach`, one action every 100 ms." in card
    assert "opset 18.\n\n" in card_of(facts | {"control_hz": None}, report)


def test_the_signature_is_that_of_the_graph(made: Any) -> None:
    policy, folder, _ = made
    facts = json.loads((folder / SIGNATURE).read_text())
    session = open_plainly(folder)
    for node, described in (
        *((node, facts["inputs"][node.name]) for node in session.get_inputs()),
        *((node, facts["outputs"][node.name]) for node in session.get_outputs()),
    ):
        assert isinstance(node.shape[0], str) and node.shape[1:] == described["shape"][1:]
        assert described["shape"][0] == "B" and node.type == "tensor(float)"
    assert {node.name for node in session.get_inputs()} == {"observation", "noise", "goal"}
    assert facts["inputs"]["noise"]["shape"] == ["B", *policy.noise_shape]
    assert facts["act_steps"] == 2 and facts["obs_steps"] == 2 and facts["noise_changes_action"] is True


def test_the_signature_says_what_is_known_of_the_task_and_null_for_the_rest(made: Any) -> None:
    policy, folder, _ = made
    facts = json.loads((folder / SIGNATURE).read_text())
    action = facts["outputs"]["action"]
    assert facts["task"] is facts["control_hz"] is facts["inputs"]["observation"]["names"] is None
    assert action["names"] is action["low"] is action["high"] is None
    assert (facts["horizon"], facts["action_start"]) == (4, 1)
    known = Surroundings(
        task="reach", control_hz=20.0, action_names=("x [m]", "y [m]"), action_low=(-1.0, -2.0)
    )
    facts = signature(policy, known)
    assert (facts["task"], facts["control_hz"]) == ("reach", 20.0)
    assert facts["outputs"]["action"]["names"] == ["x [m]", "y [m]"]
    assert facts["outputs"]["action"]["low"] == [-1.0, -2.0] and facts["outputs"]["action"]["high"] is None
    of_a_box = signature(policy, Surroundings(action_low=tuple(np.full(2, -1.0, np.float32))))
    assert json.loads(json.dumps(of_a_box))["outputs"]["action"]["low"] == [-1.0, -1.0]


def test_the_sample_reproduces_with_numpy_and_onnxruntime_alone(made: Any) -> None:
    policy, folder, _ = made
    sample = dict(np.load(folder / SAMPLE))
    session = open_plainly(folder)
    feed = {node.name: sample[node.name] for node in session.get_inputs()}
    np.testing.assert_allclose(session.run(None, feed)[0], sample["action"], atol=1e-6, rtol=0)
    inputs = {name: torch.from_numpy(value) for name, value in feed.items()}
    np.testing.assert_allclose(expected(policy, inputs), sample["action"], atol=TOLERANCE, rtol=0)


def test_exporting_changes_neither_the_policy_nor_the_random_state(tmp_path: Path) -> None:
    policy = small_policy(GaussianProcess()).train()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    export_onnx(policy, tmp_path, latency_batches=())
    assert torch.equal(torch.get_rng_state(), state) and policy.training
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    with torch.no_grad():  # what is constant in the graph is not constant here
        for weight in policy.parameters():
            weight.add_(0.1)
    with pytest.raises(AssertionError):
        assert_same(policy, tmp_path, (2,))


class ByBatch(nn.Module):
    """A head that computes with its batch size, which a trace at one size would bake in."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, vec: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = self.head(vec)
        rows, steps, width = mean.shape
        return mean.reshape(rows, steps * width).reshape(rows, steps, width), std


@pytest.mark.slow
def test_a_network_that_computes_with_its_batch_size_is_exported_all_the_same(tmp_path: Path) -> None:
    policy = small_policy(GaussianProcess())
    policy.head = ByBatch(policy.head)
    export_onnx(policy, tmp_path, latency_batches=())
    assert_same(policy, tmp_path, (1, 2, 7))


# -- refusals -------------------------------------------------------------------------------------------


class Perturbed:
    """A session whose outputs are changed."""

    def __init__(self, session: Any, change: Any) -> None:
        self.get_inputs, self._session, self._change = session.get_inputs, session, change

    def run(self, names: Any, feed: Any) -> list[np.ndarray]:
        return [self._change(out) for out in self._session.run(names, feed)]


def nan_in_the_second_batch(out: np.ndarray) -> np.ndarray:
    return out if len(out) != 2 else np.full_like(out, np.nan)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda out: out + 1e-3, ""),
        (nan_in_the_second_batch, "nan"),
        (lambda out: out[:1], "inf"),
    ],
    ids=["off", "nan", "shape"],
)
def test_a_graph_that_disagrees_is_an_error_and_leaves_nothing(
    made: Any, change: Any, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, folder, _ = made
    monkeypatch.setattr(
        onnx_graph, "_write_graph", lambda _, path, *a, **k: shutil.copy(folder / MODEL, path)
    )
    plain = onnx_graph.open_session
    monkeypatch.setattr(onnx_graph, "open_session", lambda path: Perturbed(plain(path), change))
    with pytest.raises(ExportError, match=mentions(f"1e-05 1 2 7 {shown}")):
        export_onnx(policy, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_an_earlier_one_as_it_was(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, folder, _ = made
    shutil.copytree(folder, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(
        torch.onnx, "export", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no such op"))
    )
    with pytest.raises(ExportError, match=mentions("ONNX no such op")):
        export_onnx(policy, tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("moved", range(len(FILES)))
def test_a_kill_between_two_files_leaves_no_mixture_of_exports(
    moved: int, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads an export begins with its signature."""
    shutil.copytree(made[1], tmp_path / "out")
    replace, left = Path.replace, list(range(moved))

    def killed(path: Path, target: Path) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt), draft_of(tmp_path / "out") as draft:
        shutil.copytree(made[1], draft, dirs_exist_ok=True)
    assert not (tmp_path / "out" / SIGNATURE).exists()


def test_a_directory_that_holds_something_is_left_alone_unless_asked(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, folder, _ = made
    monkeypatch.setattr(
        onnx_graph, "_write_graph", lambda _, path, *a, **k: shutil.copy(folder / MODEL, path)
    )
    own, other = tmp_path / "mine" / CARD, tmp_path / "mine" / "notes.txt"
    own.parent.mkdir()
    own.write_text("my own words")
    other.write_text("more of them")
    with pytest.raises(ExportError, match=mentions("exists overwrite=true")):
        export_onnx(policy, own.parent, latency_batches=())
    with pytest.raises(ExportError, match=mentions("notes.txt")):
        export_onnx(policy, other, latency_batches=(), overwrite=True)
    assert own.read_text() == "my own words" and len(list(own.parent.iterdir())) == 2
    export_onnx(policy, own.parent, latency_batches=(), overwrite=True)
    assert {path.name for path in own.parent.iterdir()} == {*FILES, other.name}
    assert own.read_text().startswith("# Exported policy") and other.read_text() == "more of them"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_names_its_extra_before_work_starts(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=mentions(f"{package} burnish[export]")):
        export_onnx(small_policy(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_rounding_decides_about_is_told_from_a_wrong_graph(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can reproduce what changes by more than the tolerance where the last digits do."""
    policy, folder, _ = made
    monkeypatch.setattr(
        onnx_graph, "_write_graph", lambda _, path, *a, **k: shutil.copy(folder / MODEL, path)
    )
    own = onnx_graph.own_rounding(onnx_graph.SampledPolicy(policy), (1, 2, 7), 0)
    assert 1e-8 < own < 1e-4
    off = [{"batch": 1, "max_abs_difference": 0.5}]
    monkeypatch.setattr(onnx_graph, "_parity", lambda *_: off)
    with pytest.raises(ExportError, match=mentions("tolerance=")):
        export_onnx(policy, tmp_path / "a", tolerance=own / 2)
    with pytest.raises(ExportError, match=mentions("Nothing written")):
        export_onnx(policy, tmp_path / "b", tolerance=own * 2)


def test_rows_of_a_constant_repeat_up_to_rounding_if_they_are_no_integers() -> None:
    place = np.arange(onnx_graph._FIXED_BATCH)
    values = {
        "rounded": (1 + 2e-7 * (place % 2)).astype(np.float32),
        "other": (1 + 1e-4 * place).astype(np.float32),
        "counted": 200_000_000 + place,
        "repeated": np.tile([0, 1], len(place)),
    }
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = onnx.helper.make_graph([], "constants", [], [], constants)
    onnx_graph._free_shapes(onnx, graph, "state")
    assert [node.output[0] for node in graph.node if node.op_type == "Tile"] == ["rounded", "repeated"]
