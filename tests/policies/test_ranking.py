"""Candidates ranked by what a policy itself knows, and by critics: chosen, saved, made by the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import repeated
from small_policies import observations, small_policy
from torch import Tensor

import burnish
from envs.evaluation.protocol import with_settings
from envs.evaluation.settings import EvaluationSettings
from policies.composition.compose import compose
from policies.errors import CapabilityError, ConfigError
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.policy import Policy
from policies.processes import Edm, RectifiedFlow, Regression, VPDiffusion
from policies.processes.deterministic import DeterministicProcess
from policies.processes.ebt import EnergyDescent
from policies.processes.energy import ScoreEnergy
from policies.processes.gaussian import GaussianProcess
from policies.processes.mixture import MixtureProcess, ModeMean
from policies.processes.squashed import Squashed, TanhGaussianProcess
from policies.protocols import TE, Cond
from policies.samplers.descent import Descent
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy
from policies.threads import torch_threads
from policies.wrappers.candidates import CandidatePolicy, Candidates, with_candidates

COUNT = 6
FLOW = (RectifiedFlow(), Euler(steps=2))
EBT = (EnergyDescent(num_steps=1, extra_steps=0), Descent(steps=2))
MIXTURE = (MixtureProcess(num_modes=3), ModeMean(temperature=1.0))


def ranked(score: str, *parts: Any, count: int = COUNT, **values: Any) -> CandidatePolicy:
    return with_candidates(small_policy(*parts), score, count, **values)


def plans_of(policy: CandidatePolicy) -> tuple[Cond, Tensor, Tensor, Tensor]:
    """Return conditions, noise, candidates and the choice of 4 observations."""
    cond = policy.encode({"state": observations(4)})
    noise = policy.sample_noise(4, generator=torch.Generator().manual_seed(1))
    return cond, noise, policy.candidates(cond, noise)[0], policy.decode(cond, noise)


def best(plans: Tensor, scores: Tensor) -> Tensor:
    """Return the plan of the largest score (N,) of every row."""
    return torch.stack([of[int(score.argmax())] for of, score in zip(plans, scores, strict=True)])


def test_a_density_in_closed_form_chooses_the_likeliest_chunk() -> None:
    policy = with_candidates(small_policy(*MIXTURE, horizon=2), "density", COUNT)
    cond, _, plans, chosen = plans_of(policy)
    base: Any = policy.base
    scores = [base.density(cond).log_prob(plans[:, n]).sum(dim=(1, 2)) for n in range(COUNT)]
    assert torch.equal(chosen, best(plans, torch.stack(scores, dim=1)))
    assert not torch.equal(chosen, plans[:, 0])


@pytest.mark.parametrize("process", [RectifiedFlow(), VPDiffusion(6), Edm()])
def test_a_policy_that_denoises_ranks_by_its_loss_on_common_draws(process: Any) -> None:
    policy = ranked("density", process, score_draws=5)
    cond, _, plans, chosen = plans_of(policy)
    base: Any = policy.base
    assert (policy.score_t.diff() >= 0).all() and len(policy.score_t.unique()) > 1  # quantiles, spread out
    losses = torch.zeros(4, COUNT)
    for i in range(5):
        level = None if policy.score_level is None else policy.score_level[i].expand(4)
        te = TE(policy.score_t[i].expand(4), policy.score_eps[i].expand(4, -1, -1), level)
        losses += torch.stack([base.matching_loss(cond, plans[:, n], te) for n in range(COUNT)], dim=1)
    assert torch.equal(chosen, best(plans, -losses))


@pytest.mark.parametrize("process", [ScoreEnergy(4), EBT[0]])
def test_an_energy_chooses_the_chunk_of_the_lowest(process: Any) -> None:
    policy = ranked("energy", process)
    cond, _, plans, chosen = plans_of(policy)
    base: Any = policy.base
    last = 1.0 if isinstance(process, EnergyDescent) else float(process.levels()[0])
    time = torch.full((4,), last)
    energies = torch.stack([base.energy(plans[:, n], time, cond) for n in range(COUNT)], dim=1)
    assert torch.equal(chosen, best(plans, -energies)) and bool(energies.std(dim=1).min() > 0)


SCORED = [
    ("density", (Edm(), Euler(steps=1))),
    ("density", (RectifiedFlow(), Euler(steps=1))),
    ("density", MIXTURE),
    ("energy", (EBT[0], Descent(steps=1))),
]


@pytest.mark.parametrize(("score", "parts"), SCORED)
def test_a_ranked_policy_is_a_directory(score: str, parts: Any, tmp_path: Path) -> None:
    policy = ranked(score, *parts, count=2, score_draws=2).eval()
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    noise = policy.sample_noise(4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again.act(observations(4), noise=noise), policy.act(observations(4), noise=noise))


@pytest.mark.parametrize(("score", "parts"), [*SCORED, ("density", (ScoreEnergy(4),))])
def test_a_ranked_policy_acts_in_inference_mode(score: str, parts: Any) -> None:
    policy = ranked(score, *parts, count=3, score_draws=2).eval()
    noise = policy.sample_noise(4, generator=torch.Generator().manual_seed(1))
    with torch_threads(1), torch.inference_mode():
        found = policy.act(observations(4), noise=noise.clone())
    assert torch.allclose(found, policy.act(observations(4), noise=noise), atol=1e-6)


@pytest.mark.parametrize(("score", "parts"), repeated(SCORED))
def test_a_ranked_policy_is_a_graph(score: str, parts: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    policy = ranked(score, *parts, count=2, score_draws=2).eval()
    report = export_onnx(policy, tmp_path / "exported", batch_sizes=(1, 5), latency_batches=())
    assert report.worst < 1e-5
    with pytest.raises(ConfigError, match=mentions("start_noise random candidates zero")):
        with_settings(ExportedPolicy(tmp_path / "exported"), EvaluationSettings(start_noise="zero"))


def test_more_rows_may_be_executed_unless_critics_value_them() -> None:
    policy = ranked("density", *FLOW)
    assert policy.with_act_steps(3).act(observations(2)).shape[1] == 3
    critics = Candidates(num_candidates=2, critic_dims=(8,)).wrap(small_policy(*FLOW))
    with pytest.raises(CapabilityError, match=mentions("2 act_steps=3")):
        critics.with_act_steps(3)


def test_critics_rank_another_number_of_candidates() -> None:
    torch.manual_seed(0)
    few = Candidates(num_candidates=2, critic_dims=(8,)).wrap(small_policy(*FLOW))
    many = with_candidates(few, "critic", COUNT)
    cond, noise, plans, chosen = plans_of(many)
    assert few.noise_shape[0] == 2 and many.noise_shape[0] == COUNT and many.critic is not None
    values = torch.stack([many.critic(cond.vec, plans[:, n, :2].flatten(1)).mean(0) for n in range(COUNT)], 1)
    assert torch.equal(chosen, best(plans, values))
    assert torch.equal(
        few.decode(cond, noise[:, :2]), with_candidates(many, "critic", 2).decode(cond, noise[:, :2])
    )
    assert with_candidates(many, "density", 3).base is few.base


@pytest.mark.parametrize(
    ("score", "policy", "named", "instead"),
    [
        ("energy", FLOW, "score=energy process=energy score=density", "density"),
        ("density", EBT, "score=density score=energy", "energy"),
        ("critic", FLOW, "score=critic algo=idql algo=qc", "density"),
        ("density", (DeterministicProcess(),), "noise process=flow", None),
        ("density", (Regression(),), "noise process=flow", None),
        ("density", (GaussianProcess(),), "noise process=flow", None),
        ("density", (TanhGaussianProcess(), Squashed(temperature=0.0)), "noise process=flow", None),
    ],
)
def test_a_score_that_there_is_not_is_refused(
    score: str, policy: Any, named: str, instead: str | None
) -> None:
    with pytest.raises(CapabilityError, match=mentions(named)):
        ranked(score, *policy)
    if instead is not None:
        ranked(instead, *policy)


def test_a_composition_has_neither_density_nor_energy() -> None:
    both: Policy = compose([small_policy(*FLOW), small_policy(*FLOW)], [0.5, 0.5])
    for score in ("density", "energy"):
        with pytest.raises(CapabilityError, match=mentions(f"has no {score}")):
            with_candidates(both, score, 3)


def test_edits_are_ranked_by_critics_only() -> None:
    with pytest.raises(ConfigError, match=mentions("score critic")):
        Candidates(num_candidates=2, num_edited=1, score="density")


def test_the_command_makes_a_policy_directory(tmp_path: Path) -> None:
    plain = save_policy(small_policy(*FLOW), tmp_path / "plain", provenance={"algo": "bc"})
    path = burnish.rank(plain, num_candidates=4, out=str(tmp_path / "ranked"))
    policy = load_policy(path)
    assert isinstance(policy, CandidatePolicy) and policy.wrapper.num_candidates == 4
    assert policy.provenance["algo"] == "bc" and policy.provenance["ranked"] == "plain"
    with pytest.raises(ConfigError, match=mentions("overwrite=true")):
        burnish.rank(plain, out=str(path))
