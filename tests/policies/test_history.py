import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from messages import mentions

from policies.execution.history import ChunkActor
from policies.runner import History, draw_noise

ROOT = Path(__file__).resolve().parents[2]


def test_the_first_observation_stands_for_those_before_it() -> None:
    history = History(3)
    for value in (1.0, 2.0):
        history.push({"observation": np.array([value]), "goal": np.array([10 * value])})
    seen = history.stacked()
    assert seen["observation"].tolist() == [[1.0], [1.0], [2.0]]
    assert seen["goal"].tolist() == [20.0]
    history.reset()
    with pytest.raises(ValueError, match=mentions("no observation")):
        history.stacked()


def test_an_observation_that_is_changed_afterwards_is_remembered_as_it_was() -> None:
    history, buffer = History(2), np.array([1.0])
    history.push({"observation": buffer})
    buffer[0] = 5.0
    assert history.stacked()["observation"].tolist() == [[1.0], [1.0]]


def test_an_observation_with_other_entries_is_refused() -> None:
    history = History(1)
    history.push({"observation": np.zeros(1)})
    with pytest.raises(ValueError, match=mentions("['observation'] ['image']")):
        history.push({"image": np.zeros(1)})


def test_noise_depends_on_its_key_and_nothing_else() -> None:
    first = draw_noise((3, 1, 4), (5, 2))
    draw_noise((3, 1, 5), (5, 2))
    assert first.dtype == np.float32 and np.array_equal(first, draw_noise((3, 1, 4), (5, 2)))
    others = [draw_noise(key, (5, 2)) for key in ((3, 1, 5), (3, 2, 4), (2, 1, 4), (3, 1), (3,))]
    assert not any(np.array_equal(first, other) for other in others)


def test_noise_is_standard_normal() -> None:
    many = np.concatenate([draw_noise((7, i), (100,)) for i in range(400)])
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.02


def test_a_chunk_is_executed_before_the_next_decision() -> None:
    asked = []

    def decide(obs, key):
        asked.append((obs["observation"][:, 0].tolist(), key))
        return np.arange(3.0)[:, None] + 10 * key[2]

    actor = ChunkActor(decide, 2, act_steps=2, seed=5, low=[0.5], high=[10.5])
    actions = [actor.act({"observation": np.array([step])})[0] for step in range(4)]
    assert actions == [0.5, 1.0, 10.0, 10.5]
    assert asked == [([0, 0], (5, 0, 0)), ([1, 2], (5, 0, 1))]
    actor.reset()
    actor.act({"observation": np.array([9])})
    assert asked[-1] == ([9, 9], (5, 1, 0)) and actor.waiting == 1


def test_a_decision_that_fails_can_be_made_again_with_the_same_noise() -> None:
    keys = []

    def decide(obs, key):
        keys.append(key)
        if len(keys) == 1:
            raise TimeoutError
        return np.zeros((1, 1))

    actor = ChunkActor(decide, 1)
    with pytest.raises(TimeoutError):
        actor.act({"observation": np.zeros(1)})
    actor.act({"observation": np.zeros(1)})
    assert keys == [(0, 0, 0), (0, 0, 0)]


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import policies.execution.history"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
