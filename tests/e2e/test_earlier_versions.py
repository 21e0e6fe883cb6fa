"""What earlier versions wrote loads, acts, evaluates, resumes and runs as it did.

How the files were made is in their README.md. Tolerances allow for rounding on other processors, measured by
restricting one processor to SSE4 and to AVX2 (`ATEN_CPU_CAPABILITY`, `MKL_CBWR`, `ONEDNN_MAX_CPU_ISA`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import burnish
from policies.runner import Runner

WRITTEN = Path(__file__).resolve().parents[1] / "fixtures" / "version_0_1"
POLICIES = sorted(path.name for path in (WRITTEN / "policies").iterdir())
MOVED = {
    "cloned": {"dataset": WRITTEN / "demonstrations.h5"},
    "tuned": {"init": WRITTEN / "policies" / "base"},
    "offline": {"dataset": WRITTEN / "demonstrations.h5"},
}
ACTION_TOLERANCE = 2e-6  # actions lie in -1..1; measured: 1.8e-7
WEIGHT_TOLERANCE = 5e-6  # measured: 9e-8; resuming without Adam's moments or generators: 8e-4 and more


def recorded(policy: str) -> dict[str, np.ndarray]:
    """Observations (8, 1, 4), noise (8, ...) and the actions (8, Ta, 2) that belong to them."""
    with np.load(WRITTEN / "acting.npz") as file:
        return {name: file[f"{policy}/{name}"] for name in ("observation", "noise", "action")}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_acts_as_it_did(name: str) -> None:
    known = recorded(name)
    policy = burnish.load_policy(WRITTEN / "policies" / name)
    action = policy.act(known["observation"], noise=torch.from_numpy(known["noise"]))
    np.testing.assert_allclose(action.detach().numpy(), known["action"], atol=ACTION_TOLERANCE, rtol=0)


@pytest.mark.parametrize("place", ["policies/base", "exported/base"])
def test_a_policy_finds_the_same_episodes(place: str, tmp_path: Path) -> None:
    """Exact: relative changes of all weights by 1e-3, far above rounding, changed none of these numbers."""
    if place.startswith("exported"):
        pytest.importorskip("onnxruntime")
    out = tmp_path / "found.json"
    found = burnish.evaluate(WRITTEN / place, episodes=3, num_workers=0, out=out).evaluation
    assert found.values("success").tolist() == [0, 1, 0]
    assert found.values("return").tolist() == [0, 1, 0]
    assert found.values("length").tolist() == [13, 46, 30]


@pytest.mark.parametrize("name", MOVED)
def test_a_run_resumes_to_the_same_weights(name: str, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "runs" / name, tmp_path / name)
    run = burnish.train(resume=tmp_path / name, **MOVED[name])
    expected = WRITTEN / "policies" / name
    last = json.loads((expected / "config.json").read_text())["provenance"]["step"]
    assert (run.path / "checkpoints" / "last").resolve().name == str(last)
    assert_weights_close(run.load_policy().state_dict(), burnish.load_policy(expected).state_dict())


@pytest.mark.parametrize("name", ["base", "mixture"])
def test_an_exported_folder_agrees_with_its_policy(name: str) -> None:
    pytest.importorskip("onnxruntime")
    known = recorded(name)
    inputs = {key: known[key] for key in ("observation", "noise")}
    found = Runner(WRITTEN / "exported" / name).predict(inputs)
    np.testing.assert_allclose(found.action, known["action"], atol=ACTION_TOLERANCE, rtol=0)


def test_the_runs_hold_the_keys_of_their_version() -> None:
    """Later versions rename these keys; runs that they write would not test that the old ones are read."""
    offline, tuned = ((WRITTEN / "runs" / name / "config.yaml").read_text() for name in ("offline", "tuned"))
    for key in ("policy_every:", "block_steps:", "return_range:", "data:\n  d4rl_compat: true"):
        assert key in offline, key
    for key in ("chunk_rows:", "tunes:", "demonstrator:", "visits:", "fresh:"):
        assert key in tuned, key
    assert '"spread": 0.5' in (WRITTEN / "policies" / "mixture" / "config.json").read_text()


def assert_weights_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Two policies have the same weights but for rounding."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, atol=WEIGHT_TOLERANCE, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
        )
