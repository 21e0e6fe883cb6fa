"""What one update reads: target copies and actors of the critics of before, or of after, their step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_algorithms import setup, small
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from algos.base import Draws
from algos.transitions import Batch
from policies import registry

PROCESS = {"cfpi": "gaussian", "srpo": "diffusion"}
BEFORE = ("qc", "fql", "dqc", "qam", "qam_edit", "qam_fql", "trqam")
AFTER = ("idql", "expo", "residual", "pa_rl", "famo2o", "cfpi", "srpo")
ROWS = 8


def begin(algo: str) -> tuple[Any, Batch, Draws]:
    """Return a learner whose critics move far in one step, a batch, and the draws of the step."""
    options = {"weighting": "exponential"} if algo == "idql" else {}
    config = replace(small(registry.lookup("algo", algo)), critic_lr=0.1, tau=0.25, **options)
    run = config.build(setup(PROCESS.get(algo, "flow")))
    with torch.no_grad():
        for weight in run.learner.target_critic.parameters():
            weight.mul_(1.5)
    draws = run.learner.draw(ROWS, torch.Generator().manual_seed(0))
    return run.learner, run.table.gather(torch.arange(ROWS)), draws


def copied(net: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in net.parameters()]


@pytest.mark.parametrize("algo", [*BEFORE, *AFTER])
def test_target_copies_move_towards_the_critics_of_before_or_after_the_step(algo: str) -> None:
    learner, batch, draws = begin(algo)
    target, before = copied(learner.target_critic), copied(learner.critic)
    learner.step(batch, draws)
    aims = before if algo in BEFORE else copied(learner.critic)
    for found, old, aim in zip(learner.target_critic.parameters(), target, aims, strict=True):
        torch.testing.assert_close(found, 0.75 * old + 0.25 * aim)


def actor(learner: Any, batch: Batch, draws: Draws) -> None:
    learner.update_actor(batch, draws)


def edits(learner: Any, batch: Batch, draws: Draws) -> None:
    learner.update_edits(batch, draws)


def student(learner: Any, batch: Batch, draws: Draws) -> None:
    learner.update_student(batch, draws["student"], learner.tuned, learner.student_optimizer)


def weighted(learner: Any, batch: Batch, draws: Draws) -> None:
    learner.update_base(batch, draws, learner.weight(learner.advantage(batch).detach()))


def cloning(learner: Any, batch: Batch, draws: Draws) -> None:
    learner.update_base(batch, draws)


@pytest.mark.parametrize(
    ("algo", "alone", "net", "is_first"),
    [
        ("fql", actor, "policy", True),
        ("qam", actor, "tuned", True),
        ("trqam", actor, "tuned", True),
        ("qam_edit", edits, "policy.editor", True),
        ("qam_fql", student, "student", True),
        ("pa_rl", cloning, "base", True),
        ("idql", weighted, "base", True),
        ("expo", actor, "policy.editor", False),
    ],
)
def test_actors_follow_the_networks_of_before_or_after_the_step(
    algo: str, alone: Callable[[Any, Batch, Draws], None], net: str, is_first: bool
) -> None:
    """An actor that reads the networks of before moves as if nothing else did."""
    found = []
    for step in (lambda learner, *rest: learner.step(*rest), alone):
        learner, batch, draws = begin(algo)
        part = operator.attrgetter(net)(learner)
        start = parameters_to_vector(part.parameters()).detach().clone()
        step(learner, batch, draws)
        found.append(parameters_to_vector(part.parameters()).detach())
        assert not torch.equal(found[-1], start)
    assert torch.equal(*found) == is_first
