"""Laws of every registered algorithm, on every kind of policy that it accepts."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import Laws, Shared, of_each, representatives
from point_env import PointEnv, PointStepper
from small_algorithms import (
    ALGOS,
    FROM_SCRATCH,
    LIMIT,
    PROCESSES,
    accepts,
    dataset,
    init,
    policy_config,
    small,
    start,
)
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from algos.base import Setup
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.ratios import Rows
from algos.training.serialization import from_plain, to_plain
from burnish.commands import matrix
from burnish.commands.matrix import algorithms, pairs
from envs.engine.vector import ChunkVector
from envs.spec import Array, StepResult
from policies import registry
from policies.build import build_policy
from policies.errors import BurnishError, CapabilityError, ConfigError
from policies.policy import Policy
from policies.storage.policy_folder import load_policy, save_policy
from policies.threads import torch_threads
from tests.global_states import global_states

ONLINE = sorted(algorithms())
ALLOWED = set(pairs())
"""Pairs of the page docs/algorithms/matrix.md."""


def allowed(algo: str, process: str) -> bool:
    return (algo, process) in ALLOWED if algo in ONLINE else accepts(algo, process)


def accepted() -> Iterator[Any]:
    for algo in ALGOS:
        for process in PROCESSES:
            if allowed(algo, process):
                yield pytest.param(algo, process, id=f"{algo}-{process}")


def loop_and_process(case: Any) -> tuple[str, str]:
    """Return the loop of an algorithm and a process: what may fail together."""
    algo, process = case.values
    *_, loop, _checked, _object = registry.lookup("algo", algo).__mro__
    return loop.__name__, process


MIXED = sorted(accepted(), key=lambda case: zlib.crc32(case.id.encode()))
"""Not the same algorithm first with every process."""
every_run = Laws(
    ("algo", "process"),
    dict.fromkeys([*representatives(MIXED, loop_and_process), *of_each(MIXED, lambda case: case.values[:1])]),
)
every_loop = Shared(
    "algo,process", of_each(MIXED, lambda case: case.values[:1]), lambda case: loop_and_process(case)[0]
)
on_policy = Laws(
    ("algo", "process"),
    [case for case in accepted() if issubclass(registry.lookup("algo", case.values[0]), OnPolicyConfig)],
)

WITHOUT_BOOTSTRAP = ("bc", "cdsa", "decision_diffuser", "diffuser", "recap", "trajectories")
"""Algorithms without values, or with those of recorded returns."""

ROUNDING = 2 * 16 * torch.finfo(torch.float32).eps / 0.05
"""Of a log ratio: that of `test_ratios` for a mean, twice it for a sum over the 4 entries of a chunk."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every_run.generate(metafunc)
    every_loop.generate(metafunc)
    on_policy.generate(metafunc)


# -- comparing ------------------------------------------------------------------------------------------


def timeless(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that do not measure time."""
    return {name: float(value) for name, value in metrics.items() if not name.startswith("time/")}


def assert_equal(a: Any, b: Any, where: str = "state") -> None:
    """Compare nested plain states bit by bit."""
    assert type(a) is type(b), where
    if isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{index}]")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), where
    else:
        assert a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)), where


def weights(policy: Policy) -> Tensor:
    return torch.cat([value.flatten().double() for value in policy.state_dict().values()])


# -- laws -----------------------------------------------------------------------------------------------


def test_every_algorithm_accepts_some_policy() -> None:
    assert {algo for algo in ALGOS if any(accepts(algo, process) for process in PROCESSES)} == set(ALGOS)


@every_run
def test_advancing_progresses_and_reports_finite_named_numbers(algo: str, process: str) -> None:
    run = start(algo, process)
    assert run.unit in ("gradient_steps", "env_steps") and run.progress == 0 < run.total
    for _ in range(2):
        before = run.progress
        metrics = run.advance()
        assert run.progress > before
        assert metrics and all(re.fullmatch(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*", name) for name in metrics)
        assert all(torch.as_tensor(value).numel() == 1 for value in metrics.values())
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        assert not bad
    for _ in range(20):
        if run.progress >= run.total:
            break
        run.advance()
    assert run.progress >= run.total
    run.close()


@on_policy
def test_ratios_are_one_on_fresh_data(algo: str, process: str) -> None:
    run = start(algo, process)
    experience = run.estimate_advantages(run.collect(), run.policy, run.learner.critic, run.scaler)
    steps = run.ratio.inner_steps
    with torch.no_grad():
        score = run.ratio.score(experience, Rows.sorted_from(torch.arange(len(experience) * steps), steps))
    assert float((score.log_ratio.exp() - 1).abs().max()) <= ROUNDING
    run.close()


@on_policy
def test_a_new_policy_learns_from_the_reward_alone(algo: str, process: str) -> None:
    modes = {"state": "gaussian", "action": "limits"}
    policy = dataclasses.replace(policy_config(process), normalizer=modes)
    run = start(algo, process, init=None, policy=policy)
    before = weights(run.snapshot())
    metrics = run.advance()
    assert all(math.isfinite(value) for value in metrics.values())
    assert not torch.equal(weights(run.snapshot()), before)
    assert bool((run.policy.normalizer.state_scale != 1).all())
    run.close()


class EndsElsewhere(PointStepper):
    """Points whose last observation, after `LIMIT` steps, is a place of its own."""

    def __init__(self, num_envs: int, place: float, is_over: bool) -> None:
        super().__init__(num_envs)
        self.place, self.is_over, self.steps = place, is_over, np.zeros(num_envs, np.int64)

    def reset(self, row: int, seed: int) -> Array:
        self.steps[row] = 0
        return super().reset(row, seed)

    def step(self, rows: Array, actions: Array) -> StepResult:
        self.steps[rows] += 1
        result, ends = super().step(rows, actions), self.steps[rows] == LIMIT
        obs = np.where(ends[:, None], self.place, result.obs)
        return dataclasses.replace(result, obs=obs, terminated=ends & self.is_over)


@dataclasses.dataclass(frozen=True)
class Elsewhere(PointEnv):
    """Episodes end by the task where `is_over`, else by their limit."""

    place: float = 0.0
    is_over: bool = False

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        return ChunkVector(self.spec, EndsElsewhere(num_envs, self.place, self.is_over), obs_steps=obs_steps)


def critics_after(algo: str, place: float, is_over: bool) -> dict[str, Tensor]:
    """Return the critics of a few updates on episodes whose last observation is a place."""
    data = dataset(8)
    ends, frames = data.terminated, torch.arange(data.num_frames)
    following = data.observations[(frames + 1) % data.num_frames]
    following = torch.where(ends[:, None], place, following)
    none = torch.zeros_like(ends)
    data = dataclasses.replace(
        data,
        rewards=data.rewards / 10,  # within the range of the critics of `dqc`
        next_observations=following,
        terminated=ends if is_over else none,
        truncated=none if is_over else ends,
    )
    process = next(process for process in PROCESSES if accepts(algo, process))
    run = start(algo, process, dataset=data, env=Elsewhere(LIMIT + is_over, place, is_over))
    for _ in range(3):
        run.advance()
    run.close()

    def tensors(state: Any, where: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(state, Tensor):
            yield where, state
        for key, part in state.items() if isinstance(state, Mapping) else ():
            yield from tensors(part, f"{where}.{key}")

    return {name: part for name, part in tensors(run.state_dict(), "") if re.search("critic|value", name)}


@pytest.mark.parametrize("algo", [algo for algo in ALGOS if algo not in WITHOUT_BOOTSTRAP])
def test_values_continue_after_a_time_limit_and_not_after_the_task(algo: str) -> None:
    for is_over in (True, False):
        near, far = (critics_after(algo, place, is_over) for place in (0.0, 0.9))
        assert near and near.keys() == far.keys()
        assert all(torch.equal(part, far[name]) for name, part in near.items()) == is_over


@every_run
def test_a_saved_state_continues_bit_by_bit(algo: str, process: str) -> None:
    first = start(algo, process)
    for _ in range(2):  # the first may be a warm-up, which leaves no state of later updates
        first.advance()
    file = io.BytesIO()
    torch.save(to_plain(first.state_dict()), file)
    second = start(algo, process)
    file.seek(0)
    second.load_state_dict(from_plain(torch.load(file, weights_only=True)))
    assert second.progress == first.progress and second.total == first.total
    assert timeless(second.advance()) == pytest.approx(timeless(first.advance()), abs=0, rel=0, nan_ok=True)
    assert_equal(to_plain(first.state_dict()), to_plain(second.state_dict()))
    assert torch.equal(weights(first.snapshot()), weights(second.snapshot()))
    first.close()
    second.close()


@every_loop
def test_a_run_follows_from_its_seed_and_not_from_global_state(algo: str, process: str) -> None:
    results = []
    for seed, global_seed in ((5, 1), (5, 2), (6, 1)):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        run = start(algo, process, seed=seed)
        results.append((timeless(run.advance()), weights(run.snapshot())))
        run.close()
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert results[0][0] != results[2][0]


@every_run
def test_a_run_draws_nothing_from_global_state(algo: str, process: str) -> None:
    before = global_states()
    run = start(algo, process)
    run.advance()
    run.snapshot()
    assert global_states() == before
    run.close()


def with_torch_threads(number: int, algo: str, process: str) -> tuple[set[int], dict[str, float], Tensor]:
    """Return the threads that networks saw, the metrics and the weights, where torch has so many threads."""
    seen: set[int] = set()
    hook = register_module_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    try:
        with torch_threads(number):
            run = start(algo, process, num_threads=None)
            metrics = timeless(run.advance())
            assert torch.get_num_threads() == number
    finally:
        hook.remove()
    run.close()
    return seen, metrics, weights(run.snapshot())


@every_loop
def test_a_run_takes_the_threads_it_was_given_and_not_those_of_the_program(algo: str, process: str) -> None:
    one, many = (with_torch_threads(number, algo, process) for number in (1, 3))
    assert one[0] == many[0] == {1}
    assert one[1] == many[1] and torch.equal(one[2], many[2])


@pytest.mark.parametrize("algo", ALGOS)
def test_no_threads_at_all_are_refused(algo: str) -> None:
    process = next(process for process in PROCESSES if accepts(algo, process))
    with pytest.raises(ConfigError, match=mentions("num_threads 1 0")):
        start(algo, process, num_threads=0)


@every_loop
def test_a_snapshot_is_an_independent_policy_that_saves_and_loads(
    algo: str, process: str, tmp_path: Path
) -> None:
    given = init(process)
    before = weights(given)
    run = start(algo, process, **({} if algo in FROM_SCRATCH else {"init": given}))
    run.advance()
    snapshot = run.snapshot()
    obs = torch.rand(3, 1, 2, generator=torch.Generator().manual_seed(0))
    noise = snapshot.sample_noise(3, generator=torch.Generator().manual_seed(1))
    action = snapshot.act(obs, noise=noise)
    assert not snapshot.training and action.shape == (3, 2, 2) and action.isfinite().all()
    run.advance()
    assert torch.equal(snapshot.act(obs, noise=noise), action)
    assert not torch.equal(weights(run.snapshot()), weights(snapshot))
    assert torch.equal(load_policy(save_policy(snapshot, tmp_path / "policy")).act(obs, noise=noise), action)
    assert torch.equal(weights(given), before)
    run.close()


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
def test_a_missing_part_is_refused_by_name(algo: str) -> None:
    process = next(process for process in PROCESSES if accepts(algo, process))
    with pytest.raises(ConfigError, match=mentions(f"algo={algo}")):
        small(registry.lookup("algo", algo)).build(Setup())
    for part in ("env", "dataset", "init"):
        try:
            start(algo, process, **{part: None}).close()
        except BurnishError as error:
            assert isinstance(error, ConfigError)
            assert re.search(mentions(f"algo={algo} {part}="), str(error))


@pytest.mark.parametrize("algo", ALGOS)
def test_an_algorithm_that_derives_from_another_says_its_own_name(
    algo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_PARTS", {group: dict(parts) for group, parts in registry._PARTS.items()})
    parent = registry.lookup("algo", algo)
    own = registry.register("algo", "one_of_a_plug_in")(dataclasses.dataclass(type("Own", (parent,), {})))
    with pytest.raises(ConfigError, match=mentions("algo=one_of_a_plug_in")):
        small(own).build(Setup())


@pytest.mark.parametrize("algo", ALGOS)
def test_a_policy_that_cannot_do_what_is_asked_is_refused_by_both_names(algo: str) -> None:
    """And every other algorithm that the refusal names takes this policy."""
    for process in (process for process in PROCESSES if not allowed(algo, process)):
        part = registry.lookup("process", process)
        with pytest.raises(CapabilityError) as refused:
            start(algo, process)
        message = str(refused.value)
        assert f"algo={algo}" in message and (part.__name__ in message or f"process={process}" in message)
        named = set(re.findall(r"algo=(\w+)", message)) - {algo}
        assert named and all(accepts(other, process) for other in named)


def test_the_page_of_algorithms_and_processes_is_what_is_registered(tmp_path: Path) -> None:
    assert matrix.main([str(tmp_path / "matrix.md")]) == 0
    committed = (Path(__file__).parents[2] / matrix.PAGE).read_text()
    assert (tmp_path / "matrix.md").read_text() == committed, "run python -m burnish.commands.matrix"


@every_run
def test_a_policy_of_another_task_is_refused(algo: str, process: str) -> None:
    one = torch.ones(3)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    wide = build_policy(
        policy_config(process), obs_dim=2, action_dim=3,
        statistics={"state": {k: v[:2] for k, v in limits.items()}, "action": limits},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"action.*\b[23]\b.*\b[23]\b"):
        start(algo, process, init=wide)
