"""An exported folder at work: the task in this process, the policy in another one, a clock between them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.studies.exported import Elsewhere, _interpreters, act, interpreter_facts
from envs.tasks.avoid.task import Avoid
from policies.build import build_policy
from policies.export.export import export_onnx
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow
from policies.runner import draw_noise
from policies.samplers.ode import Euler

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

STEPS, EPISODES = 12, 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Avoid, Policy, Path]:
    """The task, a policy for it with fresh weights, and what was exported of that."""
    env = Avoid(max_episode_steps=STEPS)
    config = PolicyConfig(process=RectifiedFlow(), sampler=Euler(steps=1), horizon=6, act_steps=3)
    policy = build_policy(config, obs_dim=env.spec.obs_dim, action_dim=env.spec.action_dim, seed=0)
    folder = tmp_path_factory.mktemp("exports") / "made"
    export_onnx(policy, folder, latency_batches=(), batch_sizes=(1,))
    return env, policy, folder


def test_a_policy_in_another_process_drives_the_task_to_the_end_of_its_episodes(made: Any) -> None:
    """Nothing is said of time: whatever is late is counted, and the episodes end all the same."""
    env, _, folder = made
    found = act(env, folder, EPISODES, sys.executable)
    assert len(found["success"]) == EPISODES
    assert EPISODES <= found["steps"] <= EPISODES * STEPS
    assert len(found["decision_s"]) >= EPISODES and all(took > 0 for took in found["decision_s"])
    assert 0 <= found["late"] <= found["steps"] and 0 <= found["starved"] < found["steps"]
    assert found["not_finite"] == 0
    facts = interpreter_facts(sys.executable)
    assert found["interpreter"] == facts and facts["has_torch"]
    assert set(facts["packages"]) == {"numpy", "onnxruntime"}
    said = " ".join(_interpreters([{"task": "avoid", "what": "flow", "act": found}]))
    assert facts["python"] in said and "PyTorch is installed there, but barred" in said


def test_the_other_process_decides_as_the_policy_does(made: Any) -> None:
    _, policy, folder = made
    decide = Elsewhere(folder, sys.executable)
    seen = np.full((1, policy.obs_dim), 0.1, np.float32)
    try:
        plan = decide(seen)
    finally:
        decide.close()
    drawn = draw_noise((0, 0, 0), (1, *policy.noise_shape))
    own = policy.act(seen[None], noise=torch.from_numpy(drawn))[0].numpy()
    np.testing.assert_allclose(plan[: policy.chunk.act_steps], own, atol=1e-5)
