"""Distillation: what a teacher is asked, what a student learns from it, and which pairs are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from small_cloning import finish, tiny, weights
from torch import Tensor, nn
from two_modes import two_mode_setup

import burnish
from algos.base import Setup
from algos.bc import BcConfig
from algos.cloning.distillation import Teacher
from algos.cloning.recap import with_goal
from policies.errors import CheckpointError, ConfigError
from policies.policy import Policy
from policies.processes import Consistency, Edm, RectifiedFlow, Regression, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.protocols import TE, Cond
from policies.samplers.consistency import Renoise
from policies.samplers.ode import Heun
from policies.wrappers.advantage import Advantage

MODE, SPREAD = (
    0.7,
    0.3,
)  # normalised units; those of the data are others: what is learned is the teacher's map


class TwoChunks(nn.Module):
    """The exact velocity of a flow towards two normal distributions of chunks, around +MODE and -MODE."""

    def forward(self, x: Tensor, time: Tensor, cond: Cond, **_: Any) -> Tensor:
        t = time[:, None, None] / RectifiedFlow().time_scale
        noise = 1.0 - t
        variance = (t * SPREAD).square() + noise.square()
        mean = MODE * torch.tanh(MODE * t * x.sum((-2, -1), keepdim=True) / variance)
        x0 = mean + t * SPREAD**2 / variance * (x - t * mean)
        return (x0 - x) / noise

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> Callable[[int, Tensor], Tensor]:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


def fresh(process: Any = None, **changes: Any) -> Policy:
    """A policy of the toy task that has learned nothing."""
    setup = two_mode_setup(process=process)
    return tiny().build(replace(setup, policy=replace(setup.policy, **changes))).policy


def exact_teacher() -> Policy:
    policy: Any = fresh(RectifiedFlow())
    policy.field = TwoChunks()
    return policy


def setup_with(teacher: Policy, process: Any = None) -> Setup:
    return replace(two_mode_setup(process=process or Consistency(), width=64), teacher=teacher)


def test_a_student_learns_the_map_of_its_teacher() -> None:
    config = BcConfig(steps=250, batch_size=128, lr=3e-3, log_every=250, validation_fraction=0.0)
    teacher, process = exact_teacher(), Consistency(noise_max=2.0, num_levels=10)
    algorithm = config.build(setup_with(teacher, process))
    x = torch.linspace(-0.9, 0.9, 200)
    obs = {"state": torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)}
    noise = torch.randn(200, 2, 1, generator=torch.Generator().manual_seed(0))
    whole: Any = teacher.with_sampler(Heun(steps=30, clip_x0=None))  # type: ignore[operator]
    want = whole.decode(whole.encode(obs), noise, start=(noise * 2.0 / 3.0, 1.0 / 3.0))

    def error_of(policy: Any) -> float:
        view = policy.with_sampler(Renoise(steps=1, clip_x0=None))
        return float((view.decode(view.encode(obs), noise) - want).square().mean())

    before = error_of(algorithm.policy)
    finish(algorithm)
    assert error_of(algorithm.snapshot()) < 0.15 * before


PATHS = [RectifiedFlow(), VPDiffusion(20), VPDiffusion(100, prediction="v"), Edm(data_std=0.9)]


@pytest.mark.parametrize("process", PATHS, ids=["flow", "eps", "v", "edm"])
def test_a_teacher_is_asked_at_the_state_that_means_the_same(process: Any) -> None:
    teacher: Any = fresh(process)
    student = fresh(Consistency())
    asked: list[tuple[Tensor, Tensor]] = []
    predict = teacher.predict

    class Witness:
        config, process = teacher.config, teacher.process

        def encode(self, obs: Any) -> Cond:
            return teacher.encode(obs)

        def predict(self, x: Tensor, t: Tensor, cond: Cond, *, kind: Any) -> Tensor:
            asked.append((x, t))
            return predict(x, t, cond, kind=kind)

    wise = Teacher(teacher, student)
    wise.policy = Witness()
    generator = torch.Generator().manual_seed(0)
    action, eps = (torch.randn(5, 2, 1, generator=generator) for _ in range(2))
    te = TE(1.0 / (1.0 + torch.tensor([0.05, 0.3, 1.0, 3.0, 9.0])), eps)
    obs = {"state": torch.randn(5, 1, 2, generator=generator)}
    bc_term = wise.add_targets(obs, action, te).more["near"]
    assert bc_term.isfinite().all() and not bc_term.requires_grad and len(asked) == 2
    state, t = asked[0]
    torch.testing.assert_close(state, process.corrupt(action, eps, t), rtol=1e-3, atol=1e-3)
    noise = torch.tensor([0.05, 0.3, 1.0, 3.0, 9.0])
    alpha, sigma = process.alpha_sigma(t)
    torch.testing.assert_close(sigma / alpha, noise, rtol=1e-3, atol=0)


def test_a_teacher_stays_as_it_is_and_outside_of_what_is_shipped() -> None:
    teacher = exact_teacher()
    plain = tiny().build(replace(setup_with(teacher), teacher=None))
    teacher_of_weights = fresh(RectifiedFlow())
    before = weights(teacher_of_weights)
    algorithm = tiny(validation_fraction=0.1).build(setup_with(teacher_of_weights))
    finish(algorithm)
    assert torch.equal(weights(teacher_of_weights), before)
    assert all(weight.requires_grad for weight in teacher_of_weights.parameters())
    assert algorithm.snapshot().state_dict().keys() == plain.snapshot().state_dict().keys()


def test_resuming_needs_the_same_teacher() -> None:
    first = tiny().build(setup_with(fresh(RectifiedFlow())))
    first.advance()
    again = tiny().build(setup_with(fresh(RectifiedFlow())))
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    rows = [finish(run)[-1]["policy/loss"] for run in (first, again)]
    assert torch.equal(*rows)
    for other in (setup_with(exact_teacher()), replace(setup_with(exact_teacher()), teacher=None)):
        with pytest.raises(CheckpointError, match=mentions("algo.teacher")):
            tiny().build(other).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda: fresh(GaussianProcess()), "process=gaussian"),
        (lambda: fresh(Regression()), "process=regression"),
        (lambda: fresh(Consistency()), "process=consistency"),
        (lambda: Advantage().wrap(with_goal(fresh(RectifiedFlow()), 1, 0.1)), "AdvantagePolicy made from"),
        (lambda: fresh(RectifiedFlow(), horizon=4), "policy.horizon 4 2"),
        (lambda: fresh(RectifiedFlow(), obs_steps=2), "policy.obs_steps 2 1"),
        (
            lambda: fresh(RectifiedFlow(), normalizer={"state": "limits", "action": "gaussian"}),
            "algo.teacher policy.normalizer",
        ),
        (lambda: fresh(VPDiffusion(20, "linear")), "process.noise_max 10"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher: Callable[[], Policy], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        tiny().build(setup_with(teacher()))


def test_a_process_without_use_for_a_teacher_is_refused() -> None:
    setup = replace(two_mode_setup(process=RectifiedFlow()), teacher=exact_teacher())
    with pytest.raises(ConfigError, match=mentions("process=consistency process=flow")):
        tiny().build(setup)
    with pytest.raises(ConfigError, match=mentions("algo.teacher setup.teacher")):
        tiny(teacher="runs/somewhere").build(two_mode_setup(process=Consistency()))


def test_the_command_loads_the_teacher_of_a_run(tmp_path: Path) -> None:
    demonstrations = burnish.collect(env="avoid", episodes=2, out=tmp_path / "avoid.hdf5")
    common = {
        **{f"algo.{k}": v for k, v in {"steps": 2, "warmup_steps": 0, "batch_size": 8}.items()},
        **{"num_workers": 0, "progress": False, "num_threads": 1, "backbone.width": 16},
    }
    teacher = burnish.train("process=flow", dataset=demonstrations, directory=tmp_path / "flow", **common)
    more = {"algo.teacher": teacher, **common}
    run = burnish.train("process=consistency", dataset=demonstrations, directory=tmp_path / "short", **more)
    facts = run.directory.config["algo"]
    assert Path(facts["teacher"]) == (teacher.path / "checkpoints" / "2" / "policy").resolve()
    assert run.load_policy().act(torch.zeros(1, 1, run.load_policy().obs_dim)).isfinite().all()
    with pytest.raises(CheckpointError, match=mentions("algo.teacher=nowhere")):
        burnish.train("process=consistency", dataset=demonstrations, **{**common, "algo.teacher": "nowhere"})
