"""What one update reads and moves: critics of before or after their step, draws of its own, in its turn."""

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
from algos.critics.learner import ChunkCriticConfig
from algos.offline.loop import acting
from algos.transitions import Batch
from policies import registry

PROCESS = {"cfpi": "gaussian"}
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


def test_every_critic_of_chunks_is_among_these() -> None:
    parts = registry.parts("algo").items()
    assert {*BEFORE, *AFTER} == {name for name, part in parts if issubclass(part, ChunkCriticConfig)}


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


@pytest.mark.parametrize("algo", [*BEFORE, *AFTER])
def test_every_use_of_random_numbers_has_its_own(algo: str) -> None:
    """Start and steps of a chain, states and their successors, choices and actions: none share a draw."""
    learner = begin(algo)[0]
    learner.steps = 2  # where srpo begins to train its actor
    draws = learner.draw(ROWS, torch.Generator().manual_seed(0))
    numbers = torch.cat([part.flatten() for part in draws.values() if part.is_floating_point()])
    assert len(numbers.unique()) == len(numbers)


ACTORS = {
    **dict.fromkeys(("qc", "dqc", "idql", "pa_rl"), ("base",)),
    **dict.fromkeys(("qam", "trqam"), ("base", "target_base", "tuned")),
    "fql": ("base", "policy"),
    "qam_edit": ("base", "tuned", "policy.editor"),
    "qam_fql": ("base", "tuned", "student"),
    "expo": ("base", "policy.editor"),
    "residual": ("policy.editor",),
    "famo2o": ("base", "policy.chooser"),
}


@pytest.mark.parametrize("algo", ACTORS)
def test_policy_and_actors_move_in_every_so_many_updates(algo: str) -> None:
    config = replace(small(registry.lookup("algo", algo)), actor_every=3, log_every=1)
    run = config.build(setup("flow"))
    parts = [operator.attrgetter(name)(run.learner) for name in ACTORS[algo]]
    for step in range(1, 7):
        before = [parameters_to_vector(part.parameters()).detach().clone() for part in parts]
        run.advance()
        for name, part, old in zip(ACTORS[algo], parts, before, strict=True):
            is_still = torch.equal(parameters_to_vector(part.parameters()).detach(), old)
            waits = name == "target_base" and step == 3  # the base has not moved yet
            assert is_still == (step % 3 != 0 or waits), (name, step)


def test_the_loss_in_a_trust_region_has_the_weight_of_before_its_step() -> None:
    learner, batch, draws = begin("trqam")
    cond, weight = learner.base.condition(batch.cond), learner.weight.clone()
    states, chunk = learner.chain(cond, draws["chain"])
    adjoint = learner.adjoints(cond, states, chunk)
    wanted = learner.matching_sum(learner.difference(cond, states), adjoint)
    found = learner.update_actor(batch, draws)
    torch.testing.assert_close(found["actor/loss"], wanted.detach())
    assert learner.weight < weight == 1


@pytest.mark.parametrize("algo", ["expo", "residual", "qam_edit"])
def test_edits_are_samples_in_the_task_and_in_targets_where_means_ship(algo: str) -> None:
    config, found = small(registry.lookup("algo", algo)), []
    for is_sample in (True, False):
        run = replace(config, stochastic=is_sample, edit_scale=0.5).build(setup("flow"))
        learner, batch = run.learner, run.table.gather(torch.arange(ROWS))
        explorer = acting(learner)
        assert run.snapshot().wrapper.stochastic == is_sample and explorer.wrapper.stochastic
        assert explorer.editor is learner.policy.editor and explorer.base is learner.policy.base
        with torch.no_grad():
            found.append(learner.target(batch, learner.draw(ROWS, torch.Generator().manual_seed(0))))
    assert torch.equal(*found)
