"""Chunk execution equals the published wrapper: history, summed rewards, flags, steps, final observations.

Cases are told apart by their names: `term*` and `history*` end by themselves; `timelimit*` meets a limit
inside the simulator; `wrapper_limit*` the vector's own limit; `no_reset*` is stepped on after its end.
Everything else (history, chunk length, episode end, number of chunks) is read from the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.engine.serial import SerialVector
from envs.spec import EnvSpec

NO_LIMIT = 10**6


class CountingEnv:
    """Observation (global counter, episode step); a reset adds 100; the reward is the episode step."""

    def __init__(self, end: int, *, by_limit: bool) -> None:
        self.counter, self.step_idx, self.inner_steps = 0, 0, 0
        self._end, self._by_limit = end, by_limit

    def _obs(self) -> np.ndarray:
        return np.array([self.counter, self.step_idx], np.float64)

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.counter, self.step_idx = self.counter + 100, 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.counter, self.step_idx, self.inner_steps = (
            self.counter + 1,
            self.step_idx + 1,
            self.inner_steps + 1,
        )
        done = self.step_idx >= self._end
        return self._obs(), float(self.step_idx), done and not self._by_limit, done and self._by_limit, {}

    def close(self) -> None:
        pass


def cases(golden: Any) -> list[str]:
    return sorted(name.removesuffix("_inner_steps") for name in golden.files if name.endswith("_inner_steps"))


def run(golden: Any, case: str, *, paper_compat: bool) -> dict[str, np.ndarray]:
    """Execute the case's chunks in two identical environments; returns the trace of the first."""
    expected = {key: golden[f"{case}_{key}"] for key in ("obs", "inner_steps", "terminated", "truncated")}
    num_chunks, obs_steps, chunk = (
        len(expected["inner_steps"]),
        expected["obs"].shape[1],
        expected["inner_steps"][0],
    )
    end = int(expected["inner_steps"][np.argmax(expected["terminated"] | expected["truncated"])])
    own_limit = case.startswith("wrapper_limit")
    inner_end = NO_LIMIT if own_limit else end
    envs = [CountingEnv(inner_end, by_limit=case.startswith("timelimit")) for _ in range(2)]
    spec = EnvSpec(
        "counting", "test", 2, 1, (-1.0,), (1.0,), end if own_limit else NO_LIMIT, 1.0, ("", ""), ("",)
    )
    vector = SerialVector(spec, envs, obs_steps=obs_steps, paper_compat=paper_compat)
    trace: dict[str, list[Any]] = {
        key: [] for key in ("obs", "reward", "terminated", "truncated", "inner_steps", "final_obs")
    }
    obs = vector.reset([0, 1])
    trace["obs"].append(obs[0])
    for _ in range(num_chunks):
        step = vector.step_chunk(np.zeros((2, chunk, 1)))
        assert (step.obs[0] == step.obs[1]).all()
        assert step.rewards[0, step.length[0] :].sum() == 0
        obs = step.obs.copy()
        if not case.startswith("no_reset"):
            done = np.flatnonzero(step.done)
            obs[done] = vector.reset([0] * len(done), done)
        trace["obs"].append(obs[0])
        trace["reward"].append(step.rewards[0].sum())
        trace["terminated"].append(step.terminated[0])
        trace["truncated"].append(step.truncated[0])
        trace["inner_steps"].append(envs[0].inner_steps)
        trace["final_obs"].append(step.obs[0, -1])
    return {key: np.array(values) for key, values in trace.items()}


@pytest.mark.golden("dppo_multistep*.npz")
def test_chunks_equal_the_published_wrapper(golden_path: Path) -> None:
    with np.load(golden_path) as golden:
        assert cases(golden)
        for case in cases(golden):
            trace = run(golden, case, paper_compat=True)
            for key in ("obs", "reward", "terminated", "truncated", "inner_steps"):
                np.testing.assert_array_equal(trace[key], golden[f"{case}_{key}"], err_msg=f"{case} {key}")
            final = golden[f"{case}_final_obs"]
            given = ~np.isnan(final).any(axis=-1)
            np.testing.assert_array_equal(given, trace["truncated"], err_msg=case)
            np.testing.assert_array_equal(trace["final_obs"][given], final[given], err_msg=case)


@pytest.mark.golden("dppo_multistep*.npz")
def test_by_default_a_time_limit_is_no_termination(golden_path: Path) -> None:
    with np.load(golden_path) as golden:
        for case in cases(golden):
            if case.startswith("no_reset"):
                continue
            trace = run(golden, case, paper_compat=False)
            limited = golden[f"{case}_truncated"]
            np.testing.assert_array_equal(trace["truncated"], limited, err_msg=case)
            np.testing.assert_array_equal(
                trace["terminated"], golden[f"{case}_terminated"] & ~limited, err_msg=case
            )
            np.testing.assert_array_equal(trace["obs"], golden[f"{case}_obs"], err_msg=case)
