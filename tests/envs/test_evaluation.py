"""Evaluation: rows depend on the episode alone; protocols, comparisons and files are exact."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from torch import Tensor

from envs.evaluation import protocol
from envs.evaluation.comparison import FEWEST_EPISODES, compare, format_interval
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.intervals import paired_difference
from envs.evaluation.protocol import describe_protocol
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.make import env
from envs.rollouts import blocks
from envs.rollouts.episodes import EpisodeRow
from envs.spec import EnvConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, CheckpointError, ConfigError, TrainingError
from policies.execution.warm_start import WarmStart
from policies.policy import Policy, PolicyConfig
from policies.policy_config import ChunkSpec
from policies.processes.flow import RectifiedFlow
from policies.wrappers.candidates import Candidates
from tests.global_states import global_states

TASK = env("hopper", max_episode_steps=30)
EPISODES = 7


@dataclass
class Proportional:
    """A policy with a stochastic noise tape of 1 + 2 steps; sensitive to every entry."""

    chunk: ChunkSpec = ChunkSpec(3, horizon=4, act_steps=3)  # noqa: RUF009
    seen: int = 0
    noise_shape = (3, 4, 3)

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(n, *self.noise_shape, generator=generator)

    def act(self, obs: dict[str, Tensor], *, noise: Tensor) -> Tensor:
        assert len(noise) == len(obs["state"])
        self.seen += 1
        return 0.3 * noise[:, 0, :3] + 0.1 * noise[:, 1:, :3].sum(1) + 0.05 * obs["state"][:, -1, None, 5:8]


class Standing(Proportional):
    """Noise-free."""

    def act(self, obs: dict[str, Tensor], *, noise: Tensor) -> Tensor:
        return torch.zeros(len(noise), 3, 3)


def small(process: object | None = None) -> Policy:
    """A real policy with an awkward width."""
    spec = TASK.spec
    stats = {
        name: {
            "min": -torch.ones(dim),
            "max": torch.ones(dim),
            "mean": torch.zeros(dim),
            "std": torch.ones(dim),
        }
        for name, dim in (("state", spec.obs_dim), ("action", spec.action_dim))
    }
    config = PolicyConfig(process=process, backbone=MlpConfig(width=13, time_dim=6), obs_steps=2)
    return build_policy(config, obs_dim=spec.obs_dim, action_dim=spec.action_dim, statistics=stats, seed=3)


@dataclass
class Failing(Standing):
    """Gives a number that is not finite in the episode with this first state (Do,)."""

    first: Tensor = field(default_factory=lambda: torch.zeros(0))

    def act(self, obs: dict[str, Tensor], *, noise: Tensor) -> Tensor:
        fails = (obs["state"][:, -1] == self.first.to(obs["state"])).all(dim=1)
        return torch.where(fails[:, None, None], torch.nan, super().act(obs, noise=noise))


def test_an_error_names_the_seed_and_how_the_episodes_before_it_ended() -> None:
    vector, settings = TASK.make_vector(1), Settings(episodes=2, num_envs=1)
    policy = Failing(first=torch.from_numpy(vector.reset([1])[0, -1]))
    vector.close()
    (alone,) = evaluate(Standing(), TASK, replace(settings, episodes=1)).values("return")
    with pytest.raises(TrainingError, match=mentions(f"hopper [1] 1 2 return {alone:.4g} stored")):
        evaluate(policy, TASK, settings)
    with pytest.raises(TrainingError, match=mentions("hopper [1] None 2")):
        evaluate(policy, TASK, replace(settings, first_seed=1))


@pytest.mark.parametrize("process", [None, RectifiedFlow()], ids=["diffusion", "flow"])
def test_rows_do_not_depend_on_the_number_of_environments_or_workers(process: object) -> None:
    policy = small(process)
    expected = evaluate(policy, TASK, Settings(episodes=EPISODES, num_envs=1))
    assert len({row.return_ for row in expected.rows}) == EPISODES
    assert (
        [row.seed for row in expected.rows] == [row.episode for row in expected.rows] == list(range(EPISODES))
    )
    for num_envs, num_workers in ((2, 0), (5, 0), (64, 0), (2, 1), (5, 2)):
        got = evaluate(policy, TASK, Settings(episodes=EPISODES, num_envs=num_envs), num_workers=num_workers)
        assert got == expected and got.protocol_hash == expected.protocol_hash


@pytest.mark.parametrize("process", [None, RectifiedFlow()], ids=["diffusion", "flow"])
def test_rows_are_those_of_blocks_of_one_size_with_fixed_places(
    process: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = small(process)
    got = evaluate(policy, TASK, Settings(episodes=20, num_envs=20))
    monkeypatch.setattr(blocks, "SIZES", ())
    assert got == evaluate(policy, TASK, Settings(episodes=20, num_envs=20))


def test_a_task_is_judged_by_success_where_it_has_a_rule_for_it() -> None:
    found = evaluate(Standing(), TASK, Settings(episodes=1))
    assert TASK.spec.quantity == found.quantity == "return"
    assert env("avoid").spec.quantity == "success"


@pytest.mark.parametrize("process", [None, RectifiedFlow()], ids=["diffusion", "flow"])
def test_an_evaluation_draws_nothing_from_global_state(process: object) -> None:
    policy = small(process)
    before = global_states()
    evaluate(policy, TASK, Settings(episodes=2, num_envs=2))
    assert global_states() == before


def test_workers_get_the_policy_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, twin = small(), small()
    monkeypatch.setattr(Policy, "on_cpu", lambda self: twin)
    assert torch.equal(next(twin.parameters()), next(policy.parameters()))
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()  # so that the difference shows
    two = Settings(episodes=2)
    sent = evaluate(policy, TASK, two, num_workers=1).rows
    assert sent == evaluate(twin, TASK, two).rows != evaluate(policy, TASK, two).rows


def test_an_episode_is_the_same_in_any_list() -> None:
    whole = evaluate(Proportional(), TASK, Settings(episodes=EPISODES))
    assert evaluate(Proportional(), TASK, Settings(episodes=3, num_envs=2)).rows == whole.rows[:3]


def test_noise_and_seed_are_separate_switches() -> None:
    def returns(**options: object) -> list[float]:
        rows = evaluate(Proportional(), TASK, Settings(episodes=3, **options)).rows  # type: ignore[arg-type]
        return [row.return_ for row in rows]

    base = returns()
    variants = [
        returns(start_noise="zero"),
        returns(sampling_noise="zero"),
        returns(start_noise="zero", sampling_noise="zero"),
        returns(noise_seed=1),
        returns(first_seed=1),
    ]
    assert returns() == base
    assert all(variant != base for variant in variants) and len({tuple(v) for v in variants}) == 5
    quiet = returns(start_noise="zero", sampling_noise="zero", noise_seed=9)
    assert quiet == variants[2]


def test_zero_noise_is_refused_where_it_makes_candidates_alike() -> None:
    chooser = Candidates(num_candidates=2, critic_dims=(8,)).wrap(small())
    with pytest.raises(ConfigError, match=mentions("start_noise random candidates zero")):
        evaluate(chooser, TASK, Settings(episodes=1, start_noise="zero"))
    assert evaluate(chooser, TASK, Settings(episodes=1)).rows
    with pytest.raises(ConfigError, match=mentions("start_noise random candidates zero")):
        protocol.with_settings(chooser, Settings(start_noise="zero"))  # also of open-loop evaluations
    alone = Candidates(num_candidates=1).wrap(small())
    assert evaluate(alone, TASK, Settings(episodes=1, start_noise="zero")).rows


def test_settings_are_the_only_home_of_defaults() -> None:
    assert inspect.signature(evaluate).parameters["settings"].default == Settings()
    protocol = evaluate(Standing(), TASK, Settings(episodes=1)).protocol
    about_the_task = {"env", "block_rows", "engine", "versions"}
    hashed = {field.name for field in fields(Settings)} - {"num_envs"}
    assert set(protocol) - about_the_task == hashed - {"guidance"}  # as in protocols before it
    assert "executed" not in protocol["warm_start"]  # as in protocols before it
    remembering = Settings(warm_start=WarmStart(executed=True))
    assert describe_protocol(TASK, remembering, TASK)["warm_start"]["executed"]
    guided = describe_protocol(TASK, Settings(guidance=2.0), TASK)
    assert set(guided) - about_the_task == hashed and guided["guidance"] == 2.0


def test_fields_of_a_subclass_are_no_part_of_the_protocol() -> None:
    @dataclass(frozen=True)
    class Longer(Settings):
        out: str = "place.json"

    assert evaluate(Standing(), TASK, Longer(episodes=1)) == evaluate(Standing(), TASK, Settings(episodes=1))


def test_an_evaluation_leaves_the_policy_as_it_is() -> None:
    policy = small().train()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    evaluate(policy, TASK, Settings(episodes=2))
    assert policy.training
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


class Shifted(torch.nn.Module):
    """A policy around another, in training mode as every module that is made."""

    noise_shape = (4, 3)

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.chunk = policy, policy.chunk
        self.seen: set[bool] = set()

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self.policy.sample_noise(n, generator=generator)

    def act(self, obs: dict[str, Tensor], *, noise: Tensor) -> Tensor:
        self.seen |= {part.training for part in self.modules()}
        return self.policy.act(obs, noise=noise) + 0.01


def test_every_part_of_a_policy_is_evaluated_in_evaluation_mode_and_gets_its_own_back() -> None:
    for top, inner, part in product((True, False), repeat=3):
        policy = Shifted(small().train(inner)).train(top)
        policy.policy.train(inner)
        policy.policy.normalizer.train(part)
        before = [module.training for module in policy.modules()]
        evaluate(policy, TASK, Settings(episodes=1))
        assert [module.training for module in policy.modules()] == before
        assert policy.seen == {False}


def test_steps_change_the_sampler_of_the_evaluation_only() -> None:
    policy = small(RectifiedFlow())
    native = policy.sampler.steps
    few = evaluate(policy, TASK, Settings(episodes=2, steps=2))
    assert policy.sampler.steps == native and few.protocol["steps"] == 2
    assert few.rows != evaluate(policy, TASK, Settings(episodes=2)).rows
    with pytest.raises(CapabilityError, match=mentions("Proportional")):
        evaluate(Proportional(), TASK, Settings(steps=2))


def test_recorded_trajectories_replay_to_the_same_observations() -> None:
    evaluation = evaluate(Proportional(), TASK, Settings(episodes=3, num_envs=2), keep_observations=True)
    assert evaluation == evaluate(Proportional(), TASK, Settings(episodes=3, num_envs=2))
    vector = TASK.make_vector(1)
    for row in evaluation.rows:
        assert row.observations is not None and row.actions is not None
        assert row.observations.shape == (row.length + 1, 11) and row.actions.shape == (row.length, 3)
        np.testing.assert_array_equal(vector.reset([row.seed])[0, 0], row.observations[0])
        for action, after in zip(row.actions, row.observations[1:], strict=True):
            step = vector.step_chunk(action[None, None])
            np.testing.assert_array_equal(step.obs[0, 0], after)
        assert (step.terminated[0], step.truncated[0]) == (row.terminated, row.truncated)


def test_progress_counts_every_episode() -> None:
    calls: list[tuple[int, int]] = []
    settings = Settings(episodes=5, num_envs=2)
    evaluate(Standing(), TASK, settings, on_progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (5, 5) and [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_json_keeps_everything_but_trajectories() -> None:
    evaluation = evaluate(Proportional(), TASK, Settings(episodes=3))
    restored = Evaluation.from_json(evaluation.to_json())
    assert restored == evaluation and restored.protocol_hash == evaluation.protocol_hash
    nan = replace(evaluation.rows[0], metrics={"mode": float("nan")})
    text = Evaluation((nan,), evaluation.protocol).to_json()
    assert np.isnan(Evaluation.from_json(text).rows[0].metrics["mode"])


def test_an_edited_or_foreign_file_is_refused() -> None:
    data = json.loads(evaluate(Standing(), TASK, Settings(episodes=1)).to_json())
    data["protocol"]["first_seed"] = 5
    with pytest.raises(CheckpointError, match=mentions("protocol hash")):
        Evaluation.from_json(json.dumps(data))
    for text in ("not json", "{}", '{"rows": 3}'):
        with pytest.raises(CheckpointError, match=mentions("JSON evaluation")):
            Evaluation.from_json(text)


def test_the_hash_covers_the_protocol_and_not_the_policy() -> None:
    a = evaluate(Standing(), TASK, Settings(episodes=2))
    assert evaluate(Proportional(), TASK, Settings(episodes=2, num_envs=1)).protocol_hash == a.protocol_hash
    other = evaluate(Standing(), env("hopper", max_episode_steps=31), Settings(episodes=2))
    assert other.protocol_hash != a.protocol_hash
    assert set(a.protocol["versions"]) == {"mujoco", "gymnasium", "burnish"}


def test_the_hash_covers_the_content_of_a_file_and_not_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content_of(path: object) -> dict[str, Any]:
        task = env("adroit-door", starts=str(path))
        return protocol.describe_protocol(task, Settings(), task)

    monkeypatch.chdir(tmp_path)
    for name, content in (("one", "starts"), ("same", "starts"), ("other", "other starts")):
        Path(name).write_text(content)
    one = content_of("one")
    assert content_of(tmp_path / "one") == content_of("same") == one != content_of("other")
    Path("one").write_text("changed")
    assert content_of("one") != one


def test_the_protocol_has_the_versions_of_what_a_task_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"mujoco": "3", "gymnasium": "1", "burnish": "0", "ogbench": "7", "robosuite": "8"}
    monkeypatch.setattr(protocol, "installed_version", lambda name: installed.get(name, "another"))

    def versions(name: str) -> dict[str, str]:
        task = env(name)
        found: dict[str, str] = protocol.describe_protocol(task, Settings(), task)["versions"]
        return found

    always = {"mujoco": "3", "gymnasium": "1", "burnish": "0"}
    assert versions("hopper") == versions("avoid") == versions("antmaze-umaze") == always
    assert versions("og-antmaze-medium") == always | {"ogbench": "7"}
    assert versions("cube-single") == always | {"ogbench": "7", "dm-control": "another"}
    assert versions("lift") == always | {"robosuite": "8"}
    assert versions("metaworld") == always | {"metaworld": "another"}
    for name in ("kitchen-mixed", "adroit-door", "pointmaze-umaze"):
        assert versions(name) == always | {"gymnasium-robotics": "another"}


def test_evaluations_from_before_packages_were_recorded_are_read_and_compared() -> None:
    now = evaluate(Standing(), TASK, Settings(episodes=2))
    before = replace(now, protocol={**now.protocol, "versions": {"mujoco": "3.0"}})
    restored = Evaluation.from_json(before.to_json())
    found = compare(restored, now)
    assert restored == before and found.episodes == 2 and not found.same_protocol


def test_the_summary_has_a_score_where_references_exist_and_no_success_without_a_rule() -> None:
    four = evaluate(Standing(), TASK, Settings(episodes=4))
    summary = four.summary()
    returns = summary["return"]["value"]
    assert summary["d4rl_score"]["value"] == pytest.approx(100 * (returns + 20.272305) / (3234.3 + 20.272305))
    assert summary["return"]["low"] <= returns <= summary["return"]["high"]
    worst = four.values("return").min()
    assert summary["return_cvar"]["value"] == summary["return_value_at_risk"]["value"] == worst
    assert summary["return_var"] == summary["return_value_at_risk"]  # former name
    assert "success" not in summary and summary["length"]["value"] == 30


def test_one_episode_has_no_interval_of_its_numbers() -> None:
    two = evaluate(Standing(), TASK, Settings(episodes=2))
    one = replace(two, rows=two.rows[:1])
    summary = one.summary()
    assert [set(summary[name]) for name in ("return", "length", "d4rl_score")] == [{"value"}] * 3
    assert set(summary["return_cvar"]) == {"value", "share"}
    assert "95 % interval –" in str(compare(one, one)) and " to " in str(compare(two, two))


def rows(seeds: Sequence[int], returns: Sequence[float]) -> tuple[EpisodeRow, ...]:
    return tuple(
        EpisodeRow(seed, k, value, 10, value > 0, False, True)
        for k, (seed, value) in enumerate(zip(seeds, returns, strict=True))
    )


def made(seeds: Sequence[int], returns: Sequence[float], *, name: str = "task", rule: str = "") -> Evaluation:
    task = {"name": name, "options": {}, "success_rule": rule, "reference_scores": None}
    return Evaluation(rows(seeds, returns), {"env": task, "episodes": len(seeds)})


def test_a_comparison_pairs_common_episodes_by_seed() -> None:
    before = made([0, 1, 2, 3], [1.0, 2.0, 3.0, 100.0])
    after = made([4, 2, 1, 0], [-50.0, 5.0, 4.0, 3.0])
    comparison = compare(before, after)
    assert comparison.quantity == "return" and comparison.episodes == 3
    assert comparison.difference.value == comparison.difference.low == comparison.difference.high == 2.0
    assert comparison.difference.excludes_zero and comparison.before == 2.0
    assert compare(before, before).difference.value == 0.0 and compare(before, before).same_protocol
    several = compare([before, before], [after, before])
    assert several.episodes == 6 and several.difference.value == 1.0
    assert not several.difference.excludes_zero  # one of two seeds did not improve
    assert "Their protocols differ" not in str(comparison)
    from_zero = replace(after, protocol=after.protocol | {"start_noise": "zero"})
    assert "Their protocols differ" in str(compare(before, from_zero))


def test_success_is_compared_where_the_task_has_it() -> None:
    comparison = compare(made([0, 1], [0, 0], rule="r"), made([0, 1], [0, 7], rule="r"))
    assert comparison.quantity == "success" and comparison.difference.value == 0.5


def test_a_comparison_says_in_one_sentence_what_it_found() -> None:
    few = compare(made([0, 1], [0, 0], rule="r"), made([0, 1], [0, 7], rule="r"))
    assert str(few) == (
        "paired difference of success: 50.0 % (95 % interval 0.0 to 100.0 %) on 2 episodes: "
        "too few episodes to tell."
    )
    seeds = range(FEWEST_EPISODES)
    one, other = made(seeds, [1.0] * len(seeds)), made(seeds, [3.5] * len(seeds))
    assert str(compare(one, other)).endswith(
        "return: 2.50 (95 % interval 2.50 to 2.50) on 20 episodes: clearly different."
    )
    assert compare(one, one).verdict == "within noise"


def test_a_verdict_takes_enough_episodes() -> None:
    seeds = range(FEWEST_EPISODES - 1)
    one, other = made(seeds, [1.0] * len(seeds)), made(seeds, [3.5] * len(seeds))
    assert compare(one, other).difference.excludes_zero
    assert compare(one, other).verdict == "too few episodes to tell"
    assert compare([one, one], [other, other]).verdict == "clearly different", "those of all seeds count"


@pytest.mark.parametrize(("episodes", "low", "high"), [(5, 0.1, 0.25), (FEWEST_EPISODES, 0.03, 0.09)])
def test_equal_policies_differ_clearly_about_as_often_as_promised_from_enough_episodes(
    episodes: int, low: float, high: float
) -> None:
    rng, trials = np.random.default_rng(9), 600
    pairs = rng.normal(size=(trials, 2, episodes))
    found = [paired_difference(*pair, num_resamples=400, seed=k) for k, pair in enumerate(pairs)]
    assert low <= sum(one.excludes_zero for one in found) / trials <= high


@pytest.mark.parametrize(
    ("quantity", "numbers", "shown"),
    [
        ("success", (0.01, 0.0, 0.0545), ("1.0 %", "0.0 to 5.5 %")),
        ("return", (0.01, 0.0, 0.03), ("0.0100", "0.0000 to 0.0300")),
        ("return", (-0.52, -0.9, 0.1), ("-0.520", "-0.900 to 0.100")),
        ("return", (2345.67, 2300.0, 2400.0), ("2345.7", "2300.0 to 2400.0")),
        ("return", (0.0, 0.0, 0.0), ("0.0", "0.0 to 0.0")),
    ],
)
def test_small_numbers_keep_their_digits(
    quantity: str, numbers: tuple[float, float, float], shown: tuple[str, str]
) -> None:
    assert format_interval(quantity, dict(zip(("value", "low", "high"), numbers, strict=True))) == shown


def test_what_cannot_be_compared_is_refused() -> None:
    a = made([0], [1.0])
    with pytest.raises(ConfigError, match=mentions("compare task other")):
        compare(a, made([0], [1.0], name="other"))
    with pytest.raises(ConfigError, match=mentions("first_seed")):
        compare(a, made([1], [1.0]))
    with pytest.raises(ConfigError, match=mentions("compare 1 2")):
        compare(a, [a, a])
    with pytest.raises(ConfigError, match=mentions("mode success return")):
        a.values("mode")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"episodes": 0}, "episodes 1 0"),
        ({"num_envs": 0}, "num_envs 1 0"),
        ({"start_noise": "none"}, "start_noise none"),
        ({"sampling_noise": "off"}, "sampling_noise"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=mentions(match)):
        evaluate(Standing(), TASK, Settings(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("task", [env("walker2d"), env("halfcheetah")])
def test_a_policy_of_another_robot_is_refused_before_anything_starts(task: EnvConfig) -> None:
    with pytest.raises(ConfigError, match=mentions("6 3 width policy")):
        evaluate(Standing(), task)


def test_a_policy_that_wants_goals_is_refused_where_there_are_none() -> None:
    spec = TASK.spec
    policy = build_policy(PolicyConfig(), obs_dim=spec.obs_dim, action_dim=spec.action_dim, goal_dim=2)
    with pytest.raises(ConfigError, match=mentions("env=hopper 0 2")):
        evaluate(policy, TASK)
