"""The examples run with small sizes, print results and use parts alone; with `--all` they learn."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys

import numpy as np
import pytest
import torch
from pairwise import everything

from algos.optim import descend
from benchmarks.layout import python_files
from envs.tasks.avoid.task import Avoid
from examples import bc, compose, dppo
from examples.own_task import Reach
from policies.composition.compose import compose as composed

EXAMPLES = [path for path in python_files("examples") if path.name != "__init__.py"]
learns = pytest.mark.skipif(not everything, reason="with --all: without it the same runs, but hardly learns")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example with small sizes; returns what it printed."""

    def run(name: str, **sizes: int) -> str:
        words = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
        monkeypatch.setattr(sys, "argv", [name, *words])
        importlib.import_module(f"examples.{name}").main()
        return capsys.readouterr().out

    return run


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_examples_fit_on_a_few_screens_and_need_neither_command_line_nor_hydra():
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 150, path.name
        modules = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        used = {node.module for node in modules}
        assert not {name for name in used if re.match(r"burnish|hydra|algos\.training\.trainer", name)}


def test_cloning_lowers_the_loss(run):
    out = run("bc", ways=1, demonstrations=1, steps=40)
    losses = numbers(r"loss ([\d.]+)", out)
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0]
    assert re.search(r"success: \d+% of 100 episodes", out)


def test_the_written_loss_is_that_of_the_policy():
    policy = bc.clone(bc.demonstrations(Avoid(), range(1), 1), steps=10)
    windows = bc.Windows(bc.demonstrations(Avoid(), range(1), 1), policy.chunk)
    batch, rng = windows.gather(torch.arange(16)), torch.Generator().manual_seed(0)
    written = bc.diffusion_loss(policy, batch, rng)
    draw = policy.sample_te(16, generator=torch.Generator().manual_seed(0))
    cond, action = policy.encode({"state": batch.obs}), policy.normalize_action(batch.action)
    loss = policy.matching_loss(cond, action, draw, reduce="step")
    torch.testing.assert_close(written, (loss * batch.mask).sum() / batch.mask.sum())


def test_fine_tuning_collects_and_updates(monkeypatch, run):
    few = functools.partial(bc.demonstrations, each=1)
    monkeypatch.setattr(dppo, "demonstrations", lambda env, ways, each: few(env, ways))
    for name, size in (("ENVS", 4), ("CHUNKS", 25), ("EPOCHS", 1), ("BATCH", 250)):
        monkeypatch.setattr(dppo, name, size)
    updated = []
    monkeypatch.setattr(dppo, "descend", lambda *step: updated.append(step[1].item()) or descend(*step))
    out = run("dppo", steps=10, iterations=2)
    assert len(numbers(r"iteration +\d+  success while exploring (\d+)%", out)) == 2
    assert len(updated) == 2 * 4 * 25 * dppo.TUNED // 250 and np.isfinite(updated).all()
    assert numbers(r"cloned: (\d+)%", out) and numbers(r"fine-tuned: (\d+)%", out)


@learns
def test_fine_tuning_is_no_worse_than_the_clone(monkeypatch, run):
    monkeypatch.setattr(dppo, "CHUNKS", 25)
    out = run("dppo", steps=800, iterations=5)
    (before,), (after,) = numbers(r"cloned: (\d+)%", out), numbers(r"fine-tuned: (\d+)%", out)
    assert before > 0 and after >= before


def test_an_actor_is_compared_with_its_clone_and_its_data(run):
    returns = numbers(r"return: (-[\d.]+)", run("offline", episodes=4, steps=8))
    assert len(returns) == 3 and returns[1] != returns[2]


@learns
def test_offline_learning_beats_its_clone_and_its_data(run):
    recorded, cloned, learned = numbers(r"return: (-[\d.]+)", run("offline", episodes=50, steps=400))
    assert learned > cloned and learned > recorded


def test_a_composition_acts_within_limits_and_is_its_member_at_full_weight():
    data = bc.demonstrations(Avoid(), range(1), 1)
    members = [bc.clone(data, steps=10, width=16, seed=seed) for seed in (0, 1)]
    obs = torch.as_tensor(Avoid().make_vector(8).reset(range(8))).float()
    noise = members[0].sample_noise(8, generator=torch.Generator().manual_seed(0))
    low, high = (members[0].physical(torch.full((1, 2), bound)).numpy() for bound in (-1.0, 1.0))
    for operator, weights in compose.COMBINATIONS.values():
        action = composed(members, weights, operator=operator).act(obs, noise=noise).numpy()
        assert (action >= low - 1e-6).all() and (action <= high + 1e-6).all()
    alone = composed(members, (1.0, 0.0)).act(obs, noise=noise)
    assert torch.equal(alone, members[0].act(obs, noise=noise))


def test_every_combination_is_played(run):
    out = run("compose", demonstrations=1, steps=20, episodes=5)
    shares = numbers(r"success +(\d+)%", out)
    assert len(shares) == len(compose.COMBINATIONS)
    ways = [numbers(r"way \d+: (\d+)", line) for line in out.splitlines() if "success" in line]
    assert [sum(way) * 20 for way in ways] == shares


def test_the_own_task_is_recorded_cloned_and_played(run):
    out = run("own_task", demonstrations=2, steps=10)
    assert numbers(r"recorded (\d+) episodes", out) == [2.0]
    assert len(numbers(r"10 gradient steps: (\d+)% success", out)) == 2


@learns
def test_the_own_task_trains(run):
    untrained, trained = numbers(r"(\d+)% success", run("own_task", demonstrations=30, steps=600))
    assert trained > untrained + 20


def test_the_own_task_continues_bit_exactly():
    vector, actions = Reach().make_vector(2), np.full((2, 3, 2), 0.5, np.float32)
    vector.reset([0, 1])
    state = vector.state_dict()
    first = vector.step_chunk(actions).obs
    vector.load_state_dict(state)
    assert np.array_equal(vector.step_chunk(actions).obs, first)
