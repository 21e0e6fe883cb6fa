"""A policy in pieces gives the numbers of the policy in one graph; what cannot be exported says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import everything
from small_policies import GOAL_DIM, OBS_DIM, small_policy

from policies.composition.compose import compose
from policies.errors import CheckpointError, ExportError
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.export.folder import CARD, RUNNER
from policies.policy import Policy
from policies.processes.deterministic import DeterministicProcess
from policies.processes.diffusion import VPDiffusion
from policies.processes.ebt import EnergyDescent
from policies.processes.edm import Edm
from policies.processes.energy import ScoreEnergy
from policies.processes.flow import RectifiedFlow
from policies.processes.gaussian import GaussianProcess
from policies.processes.mixture import MixtureProcess
from policies.processes.regression import Mip
from policies.processes.shortcut import Shortcut
from policies.processes.squashed import TanhGaussianProcess
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.descent import Descent
from policies.samplers.ode import DPMpp2M, Euler
from policies.wrappers.best_of_n import BestOfN, Selection
from policies.wrappers.score_correction import Perturbation

TOLERANCE = 1e-5


def guided_with_memory() -> Policy:
    """A policy that attends to its goal twice, with it and without it, and to its last prediction."""
    guided = {"goal_dim": GOAL_DIM, "goal_dropout": 0.1, "guidance": 1.5}
    return small_policy(VPDiffusion(num_levels=8), DPMpp2M(steps=3), **guided)


STEPWISE = {
    "clipped eps": lambda: small_policy(
        VPDiffusion(num_levels=8, prediction="v"),
        DDIM(steps=2, eta_per_dim=(0.2, 1.0), eps_clip=2.0, recompute_eps=False),
        action_start=1,
        horizon=5,
    ),
    "guided with memory": guided_with_memory,
}
if everything:  # else gradients are exported by the test of walks alone, and scales of a field as one graph
    STEPWISE["x0"] = lambda: small_policy(VPDiffusion(num_levels=3, prediction="x0"), DDPM())
    STEPWISE["second time"] = lambda: small_policy(Shortcut(), Euler(steps=2))
    STEPWISE["descent"] = lambda: small_policy(EnergyDescent(), Descent(steps=3))
    STEPWISE["energy"] = lambda: small_policy(ScoreEnergy(num_levels=4), DDIM(steps=2))
    STEPWISE["edm"] = lambda: small_policy(Edm(), Euler(steps=2))
    STEPWISE["two stops"] = lambda: small_policy(Mip())


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPWISE)
def test_the_pieces_make_the_whole(name: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    report = export_onnx(STEPWISE[name](), tmp_path, graph="step", latency_batches=())
    assert [row["batch"] for row in report.parity] == [1, 2, 7] and report.worst <= TOLERANCE
    assert {path.name for path in tmp_path.iterdir()} >= {"encoder.onnx", "step.onnx", "loop.json", RUNNER}
    json.loads((tmp_path / "loop.json").read_text(), parse_constant=pytest.fail)
    assert "`runner.py` runs" in " ".join((tmp_path / CARD).read_text().split())


@pytest.mark.slow
def test_exported_walks_end_where_the_slope_says(tmp_path: Path) -> None:
    """Rows stop by themselves: the limit lies in the middle of their first slopes, so half of them go on."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    policy, batch = small_policy(EnergyDescent(), Descent(steps=6)), 8
    obs = {"state": torch.randn(batch, 1, OBS_DIM, generator=torch.Generator().manual_seed(1))}
    noise = policy.sample_noise(batch, generator=torch.Generator().manual_seed(0))
    cond = policy.encode(obs)
    _, _, _, gradient = policy.process.step(policy.bind(cond), noise, torch.zeros_like(noise))
    slopes = policy.process.slope(gradient).sort().values
    policy = policy.with_sampler(Descent(steps=6, min_slope=slopes[3:5].mean().item()))
    walked = policy.descend(cond, noise)
    assert len(walked.steps.unique()) > 1
    export_onnx(policy, tmp_path, graph="step", latency_batches=())
    found = ExportedPolicy(tmp_path).act(obs, noise=noise)
    torch.testing.assert_close(found, policy.act(obs, noise=noise), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small_policy(GaussianProcess()), "GaussianPolicy has no denoising steps"),
        (lambda: small_policy(DeterministicProcess()), "DeterministicPolicy has no denoising steps"),
        (lambda: small_policy(TanhGaussianProcess()), "TanhGaussianPolicy has no denoising steps"),
        (lambda: small_policy(MixtureProcess()), "MixturePolicy has no denoising steps"),
        (
            lambda: Perturbation().wrap(small_policy(DeterministicProcess())),
            "PerturbedPolicy has no denoising steps",
        ),
        (
            lambda: compose([small_policy(RectifiedFlow()), small_policy(RectifiedFlow())], [0.5, 0.5]),
            "its members are evaluated at times of their own",
        ),
    ],
    ids=["gaussian", "deterministic", "tanh-gaussian", "mixture", "wrapped", "composed"],
)
def test_what_has_no_steps_of_its_own_says_why(make: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=rf"graph=step cannot export this policy: {reason}.* Use graph=whole"
    ):
        export_onnx(make(), tmp_path / "out", graph="step")
    assert not (tmp_path / "out").exists()


def test_there_are_no_other_graphs(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="whole, step; got 'half'"):
        export_onnx(small_policy(), tmp_path / "out", graph="half")


def test_what_is_no_policy_says_why_it_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="object cannot be exported"):
        export_onnx(object(), tmp_path / "out")  # type: ignore[arg-type]


def test_a_choice_among_plans_is_part_of_the_graph_and_has_no_steps(tmp_path: Path) -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=1))
    best = BestOfN(policy, lambda plans, obs: plans.sum((-1, -2)), Selection(candidates=3))
    with pytest.raises(ExportError, match=r"graph=step .*BestOfN has no denoising steps"):
        export_onnx(best, tmp_path / "out", graph="step")
    assert not (tmp_path / "out").exists()
    assert export_onnx(best, tmp_path / "out", latency_batches=()).worst < 1e-5


def test_a_folder_that_was_not_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("signature.json")):
        ExportedPolicy(tmp_path)
