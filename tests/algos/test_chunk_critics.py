"""Laws of all algorithms with critics of chunks: the policy that chooses, learning, going on in the task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import of_each, repeated
from point_env import PointEnv
from small_algorithms import (
    QAMS,
    begin,
    dataset,
    finished,
    init,
    noise_of,
    observed,
    policy_config,
    saved,
    setup,
    small,
    start,
    weights,
)
from torch import Tensor

from algos.critics.learner import ChunkCriticConfig
from algos.critics.pa_rl import PaRlConfig
from algos.critics.qc import QcConfig
from algos.offline.loop import acting
from algos.offline.online import Experience, OnlineConfig, RunningChunks
from algos.transitions import Batch
from policies import registry
from policies.backbones.dp_transformer import DpTransformerConfig
from policies.build import build_policy
from policies.composition.operators import Composition
from policies.composition.policy import ComposedPolicy
from policies.encoders.vit import VitEncoderConfig
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.policy import Policy
from policies.processes.deterministic import DeterministicPolicy
from policies.samplers.ode import Euler, Heun
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.candidates import CandidatePolicy, Candidates, ascend, select, with_candidates
from policies.wrappers.noise_policy import Steering

METHODS = ("qc", "fql", "idql", "expo", "residual", "pa_rl", "dqc", *QAMS, "famo2o")
OFFLINE = ("iql", "td3_bc", "rebrac", "a2pr", "prdc")


def online(algo: str, steps: int = 12, warmup: int = 4, **values: Any) -> Any:
    """Return a small configuration that goes on in the task."""
    part = small(registry.lookup("algo", algo))
    rate, std = 0.7, 0.1  # a share of an update is left over at most steps
    settings = OnlineConfig(2, warmup, updates_per_step=rate, buffer_size=64, exploration_std=std)
    return replace(part, online_steps=steps, online=settings, **values)


def wrapped(base: Policy, **values: Any) -> CandidatePolicy:
    torch.manual_seed(4)
    return Candidates(critic_dims=(8,), edit_dims=(8,), **values).wrap(base).eval()


# -- the policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", ["flow", "diffusion", "edm", "shortcut"])
def test_one_candidate_is_the_policy_bit_by_bit(process: str) -> None:
    base = init(process)
    chosen = wrapped(base, num_candidates=1)
    noise = noise_of(chosen)
    assert chosen.critic is None
    assert torch.equal(chosen.act(observed(), noise=noise), base.act(observed(), noise=noise[:, 0]))


@pytest.mark.parametrize("num_edited", [0, 4])
def test_a_critic_that_values_all_alike_changes_nothing(num_edited: int) -> None:
    base = init("flow")
    chosen = wrapped(base, num_candidates=4, num_edited=num_edited, edit_scale=0.3)
    assert chosen.critic is not None
    with torch.no_grad():
        chosen.critic.weight[-1].zero_()
    noise, cond = noise_of(chosen), chosen.encode({"state": observed()})
    assert torch.equal(chosen.decode(cond, noise), chosen.sampled(cond, noise)[:, 0])
    torch.testing.assert_close(chosen.act(observed(), noise=noise), base.act(observed(), noise=noise[:, 0]))


@pytest.mark.parametrize("bound", [1.0, None])
def test_edits_of_scale_zero_are_the_policy_bit_by_bit(bound: float | None) -> None:
    base = init("flow")
    edited = wrapped(base, num_candidates=1, num_edited=1, keeps_base=False, edit_scale=0.0, bound=bound)
    noise = noise_of(edited)
    assert torch.equal(edited.act(observed(), noise=noise), base.act(observed(), noise=noise[:, 0]))


def test_edits_stay_in_the_box_and_move_what_is_outside_inwards_only() -> None:
    edited = wrapped(init("flow"), num_candidates=1, num_edited=1, keeps_base=False, edit_scale=0.5)
    action = torch.tensor([[0.8, -0.9, 1.3, 0.0], [0.8, -0.9, 1.3, 0.0]])
    found = edited.edited(action, torch.tensor([[1.0, -1.0, 1.0, 0.4], [-1.0, 1.0, -1.0, -0.4]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1.0, 1.3, 0.2], [0.3, -0.4, 0.8, -0.2]]))


def test_edits_change_executed_rows_only() -> None:
    base = init("flow")  # horizon 3, of which 2 rows are executed
    edited = wrapped(base, num_candidates=1, num_edited=1, keeps_base=False, edit_scale=0.5)
    cond, noise = edited.encode({"state": observed()}), noise_of(edited)
    plan, original = edited.decode(cond, noise), base.decode(cond, noise[:, 0])
    assert torch.equal(plan[:, 2:], original[:, 2:]) and not torch.equal(plan[:, :2], original[:, :2])


@pytest.mark.parametrize(
    "values",
    [
        {"num_candidates": 4},
        {"num_candidates": 3, "num_edited": 2, "edit_scale": 0.3},
        {"num_candidates": 4, "num_ascended": 2, "ascent_steps": 3, "ascent_lr": 0.1, "critic_bins": 11},
    ],
)
def test_a_chosen_policy_is_a_directory_like_any_other(values: dict[str, Any], tmp_path: Path) -> None:
    policy = wrapped(init("flow"), **values)
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    noise = noise_of(policy)
    assert torch.equal(again.act(observed(), noise=noise), policy.act(observed(), noise=noise))
    assert isinstance(again, CandidatePolicy) and again.wrapper == policy.wrapper


@pytest.mark.parametrize(
    "values",
    repeated(
        [
            {"num_candidates": 3, "num_edited": 2, "edit_scale": 0.3, "critic_bins": 11},
            {"num_candidates": 8, "num_ascended": 2, "ascent_steps": 1, "ascent_lr": 0.1},
        ]
    ),
)
def test_a_chosen_policy_is_exported_as_one_graph_with_its_critics(
    values: dict[str, Any], tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    from policies.export.export import export_onnx
    from policies.runner import MODEL

    policy = wrapped(init("flow").with_sampler(Euler(steps=1)), **values)  # a graph unrolls its loops
    export_onnx(policy, tmp_path / "out", latency_batches=())
    graph = onnxruntime.InferenceSession(tmp_path / "out" / MODEL)
    noise = noise_of(policy)
    found = graph.run(["action"], {"observation": observed().numpy(), "noise": noise.numpy()})[0]
    wanted = policy.act(observed(), noise=noise).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_of_equal_values_the_first_is_chosen() -> None:
    options = torch.arange(6.0).view(1, 3, 2)
    assert torch.equal(select(options, torch.tensor([[1.0, 2.0, 2.0]])), torch.tensor([[2.0, 3.0]]))


def test_a_chosen_policy_keeps_its_executed_steps() -> None:
    policy = wrapped(init("flow"), num_candidates=2)
    assert policy.with_act_steps(2) is policy
    with pytest.raises(CapabilityError, match="act_steps=1"):
        policy.with_act_steps(1)


def test_edits_are_means_where_the_policy_is_not_stochastic() -> None:
    policy = wrapped(
        init("flow"), num_candidates=1, num_edited=1, keeps_base=False, edit_scale=0.3, stochastic=False
    )
    noise, other = noise_of(policy), noise_of(policy)
    other[:, 1:] += 1.0
    assert torch.equal(policy.act(observed(), noise=noise), policy.act(observed(), noise=other))
    sampling = policy.sampling_edits()
    assert not torch.equal(sampling.act(observed(), noise=noise), sampling.act(observed(), noise=other))


def test_ascent_ends_where_a_quadratic_says_and_keeps_the_best_point() -> None:
    """Of Q = -|a - a*|^2 a point is a* + (1 - 2 eta)^L (a_0 - a*) after L steps; long steps are undone."""
    aim = torch.tensor([0.9, -0.4], dtype=torch.float64)
    start = torch.tensor([[[0.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)

    def worth(points: Tensor) -> Tensor:
        return -(points - aim).square().sum(-1)

    for steps in (0, 1, 7):
        found, value = ascend(worth, start, steps=steps, lr=0.1, box=None)
        torch.testing.assert_close(found, aim + 0.8**steps * (start - aim))
        torch.testing.assert_close(value, worth(found))
    assert torch.equal(ascend(worth, start, steps=5, lr=1.5, box=None)[0], start)
    level = ascend(lambda points: 0 * points.sum(-1), 3 * start, steps=1, lr=0.1, box=(-0.2, 0.6))[0]
    assert torch.equal(level, (3 * start).clamp(-0.2, 0.6))  # the later of equals
    boxed = ascend(worth, start, steps=60, lr=0.1, box=(-0.2, 0.6))[0]
    torch.testing.assert_close(boxed, torch.tensor([0.6, -0.2], dtype=torch.float64).expand(1, 2, 2))


def test_without_steps_of_ascent_the_best_candidate_is_executed() -> None:
    values = {"num_candidates": 4, "num_ascended": 2}
    still, plain = wrapped(init("flow"), ascent_steps=0, **values), wrapped(init("flow"), num_candidates=4)
    noise = noise_of(plain)
    assert torch.equal(still.act(observed(), noise=noise), plain.act(observed(), noise=noise))
    climbing = wrapped(init("flow"), ascent_steps=5, ascent_lr=0.5, **values)
    cond = climbing.encode({"state": observed()})
    chosen = climbing.executed_part(climbing.decode(cond, noise))
    before = plain.executed_part(plain.decode(cond, noise))
    assert (climbing.worth(cond.vec, chosen[:, None]) > climbing.worth(cond.vec, before[:, None])).all()
    assert chosen.abs().max() <= 1


def test_candidates_do_not_climb_a_critic_that_values_all_alike() -> None:
    climbing = wrapped(init("flow"), num_candidates=4, num_ascended=2, ascent_steps=5, ascent_lr=0.5)
    assert climbing.critic is not None
    with torch.no_grad():
        climbing.critic.weight[-1].zero_()
    cond, noise = climbing.encode({"state": observed()}), noise_of(climbing)
    is_sampled = climbing.sampled(cond, noise) == climbing.decode(cond, noise)[:, None]
    assert bool(is_sampled.flatten(2).all(dim=2).any(dim=1).all())


def test_candidates_that_climb_are_some_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match="num_ascended"):
        Candidates(num_candidates=2, num_ascended=3, ascent_steps=1)
    with pytest.raises(ConfigError, match=mentions("algo.num_ascended algo.num_candidates=2")):
        PaRlConfig(num_candidates=2, num_ascended=3)


# -- learning -------------------------------------------------------------------------------------------


def test_no_value_gradient_reaches_the_cloned_policy() -> None:
    """The policy of QC, the teacher of FQL and the policy of EXPO learn from their matching loss alone."""
    for algo in ("qc", "fql", "expo", "idql", "dqc", *QAMS):
        config = small(registry.lookup("algo", algo))
        run = begin(config)
        other = begin(replace(config, reward_scale=50.0))
        for one in (run, other):
            finished(one)
        assert torch.equal(weights(run.learner.base), weights(other.learner.base)), algo
        assert not torch.equal(weights(run.learner.base), weights(init("flow"))), algo


def test_what_ships_is_the_average_of_all_that_acts_critics_included() -> None:
    run, plain = (begin(replace(small(QcConfig), log_every=1, ema_decay=decay)) for decay in (0.75, 0.0))
    average = weights(run.learner.policy)
    for _ in range(3):
        run.advance()
        plain.advance()
        average = 0.75 * average + 0.25 * weights(plain.learner.policy)
    assert torch.equal(weights(run.learner.policy), weights(plain.learner.policy))
    torch.testing.assert_close(weights(run.snapshot()), average)


def test_without_refit_the_policy_stays_bit_by_bit() -> None:
    for algo in METHODS[:-1]:  # FamO2O is its cloning
        run = finished(begin(replace(small(registry.lookup("algo", algo)), refit=False)))
        assert torch.equal(weights(run.learner.base), weights(init("flow"))), algo


@pytest.mark.parametrize("algo", [name for name in METHODS if name not in ("fql", "famo2o")])
def test_a_policy_of_one_candidate_is_loaded_as_it_was_saved(algo: str, tmp_path: Path) -> None:
    config = small(registry.lookup("algo", algo))
    more = {"pa_rl": {"num_ascended": 1}, "expo": {"num_edited": 1}}.get(algo, {})
    run = begin(replace(config, num_candidates=1, **more))
    policy = finished(run).snapshot()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    obs, noise = {"state": observed()}, noise_of(policy)
    assert torch.equal(loaded.act(obs, noise=noise), policy.act(obs, noise=noise))
    if algo in ("qc", "idql", "dqc"):
        assert torch.equal(policy.act(obs, noise=noise), policy.base.act(obs, noise=noise[:, 0]))


CHOICES = {
    "qc": ("critic", "mean"),
    "dqc": ("critic", "mean"),
    "pa_rl": ("critic", "mean"),
    **dict.fromkeys(QAMS, ("critic", "mean")),
    "idql": ("target_critic", "min"),
    "expo": ("target_critic", "min"),
    "residual": ("target_critic", "min"),
}


@pytest.mark.parametrize("algo", CHOICES)
def test_a_policy_chooses_by_the_critics_in_training_or_by_their_copies(algo: str) -> None:
    which, how = CHOICES[algo]
    run = begin(replace(small(registry.lookup("algo", algo)), num_candidates=8))
    learner = run.learner
    assert learner.critic is not learner.target_critic
    for policy in {learner.policy, getattr(learner, "acting", learner.policy)}:
        assert policy.critic is getattr(learner, which) and policy.wrapper.aggregate == how
    finished(run)
    shipped, own = run.snapshot().critic.state_dict(), getattr(learner, which).state_dict()
    assert all(torch.equal(value, own[name]) for name, value in shipped.items())


def test_one_candidate_of_a_policy_with_critics_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    several = finished(begin(small(QcConfig))).snapshot()
    one = with_candidates(several, "critic", 1)
    assert one.critic is None and isinstance(several, CandidatePolicy) and several.critic is not None
    save_policy(one, tmp_path / "policy")
    obs, noise = {"state": observed()}, noise_of(one)
    base = several.base.act(obs, noise=noise.flatten(0, 1))
    assert torch.equal(load_policy(tmp_path / "policy").act(obs, noise=noise), base)


@pytest.mark.parametrize("algo", ["qc", "residual", "pa_rl", "dqc"])
def test_black_boxes_are_chosen_from_and_corrected(algo: str) -> None:
    """Policies without a matching loss of chunks are improved without refit."""
    composed = ComposedPolicy([init("flow"), init("flow")], Composition(weights=(0.5, 0.5)))
    planner = small(registry.lookup("algo", "diffuser")).build(setup("diffusion", init=None)).snapshot()
    config = replace(small(registry.lookup("algo", algo)), refit=False)
    for black_box in (composed, planner, Steering(hidden_dims=(8,)).wrap(init("flow"))):
        run = begin(config, init=black_box)
        run.advance()
        assert run.snapshot().act(observed()).shape == (5, 2, 2)
        with pytest.raises(CapabilityError, match=mentions(f"algo={algo} matching loss algo.refit=false")):
            begin(replace(config, refit=True), init=black_box)


@pytest.mark.parametrize("algo", ["qc", "residual", "qam", "cfpi"])
def test_a_policy_that_nothing_trains_must_be_given(algo: str) -> None:
    config = replace(small(registry.lookup("algo", algo)), refit=False)
    with pytest.raises(ConfigError, match=mentions(f"algo={algo} algo.refit=false init=<run>")):
        begin(config, "gaussian" if algo == "cfpi" else "flow", init=None)


# -- going on in the task -------------------------------------------------------------------------------


def kind_of(algo: str) -> list[str]:
    return [registry.lookup("algo", algo).__mro__[1].__name__]


def process_of(algo: str) -> str:
    return "gaussian" if algo == "cfpi" else "deterministic" if algo in OFFLINE else "flow"


@pytest.mark.parametrize("algo", of_each([*METHODS, *OFFLINE], kind_of))
def test_a_run_goes_on_in_its_task_and_learns_from_what_happens(algo: str) -> None:
    process = process_of(algo)
    run = begin(online(algo), process)
    assert run.budget == "algo.online_steps" and run.total == 18
    while run.progress < 6:
        run.advance()
    before, seen = weights(run.snapshot()), {}
    while run.progress < run.total:
        seen |= run.advance()
    assert run.progress >= 18 and len(run.online.experience) > 0
    assert {"rollout/episodes", "replay/rows", "critic/loss"} <= set(seen)
    assert not torch.equal(weights(run.snapshot()), before)
    run.close()


@pytest.mark.parametrize(
    "algo",
    [*METHODS, "cfpi", *of_each([algo for algo in OFFLINE if algo != "iql"], kind_of)],  # whose rate decays
)
def test_the_steps_on_data_are_those_of_a_run_that_ends_there(algo: str) -> None:
    process = process_of(algo)
    config = small(registry.lookup("algo", algo))
    alone, first = finished(begin(config, process)), begin(online(algo), process)
    while first.progress < config.steps:
        first.advance()
    assert torch.equal(weights(alone.snapshot()), weights(first.snapshot()))
    zero = finished(begin(replace(online(algo), online_steps=0), process))
    assert torch.equal(weights(alone.snapshot()), weights(zero.snapshot())) and zero.unit == "gradient_steps"
    first.close()


@pytest.mark.parametrize(
    ("algo", "after"),
    [(algo, 10) for algo in (*METHODS, "cfpi", *of_each(OFFLINE[::-1], kind_of))]  # within an episode
    + [(algo, 4) for algo in (*repeated(METHODS), *repeated(OFFLINE))],
)
def test_a_run_is_resumed_bit_by_bit_on_data_and_in_its_task(algo: str, after: int) -> None:
    process = process_of(algo)
    one, two = begin(online(algo), process), begin(online(algo), process)
    while one.progress < after:
        one.advance()
    two.load_state_dict(saved(one))
    assert torch.equal(weights(finished(one).snapshot()), weights(finished(two).snapshot()))
    assert torch.equal(one.online.experience._rows[: one.online.experience.size],
                       two.online.experience._rows[: two.online.experience.size])  # fmt: skip
    one.close()
    two.close()


def test_a_new_encoder_with_weights_is_refused_and_a_way_is_named() -> None:
    sight = replace(policy_config("flow"), encoder=VitEncoderConfig(width=8, heads=2, features=5))
    seen = replace(dataset(), images={"ahead": torch.zeros(200, 24, 24, 3, dtype=torch.uint8)})
    for algo in METHODS:
        config = replace(small(registry.lookup("algo", algo)), refit=True)
        with pytest.raises(
            CapabilityError, match=mentions(f"algo={algo} algo=bc init=<run> algo.encoder=trained")
        ):
            config.initial_policy(setup("flow", policy=sight, init=None, env=None), seen, seen.statistics())


def test_transitions_of_experience_are_those_of_the_same_episodes_as_data() -> None:
    """Rewards are discounted per step up to the end, and a time limit does not end the task."""
    run = begin(online("qc", gamma=0.9, reward_scale=2.0, reward_shift=0.5, warmup=4), env=PointEnv(limit=3))
    while run.progress < 6:
        run.advance()
    phase = run.online
    phase.act(run.learner.policy)
    first = phase.experience.gather(torch.arange(2))
    phase.act(run.learner.policy)
    second = phase.experience.gather(torch.arange(2, 4))
    assert first.discount.tolist() == pytest.approx([0.81] * 2)  # two steps of three
    assert second.discount.tolist() == pytest.approx([0.9] * 2)  # the third is cut by the limit
    assert second.real[:, 0].tolist() == [1.0, 1.0] and second.real[:, 1:].sum() == 0
    assert first.real.sum(dim=1).tolist() == [2.0, 2.0]  # executed rows of a plan of three
    assert torch.equal(first.plan.view(2, 3, 2)[:, :2].flatten(1), first.action)
    assert torch.equal(first.next_cond, second.cond)
    run.close()


def test_experience_has_no_value_after_the_end_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("point_env.LIMIT", -1.0)  # every step ends the task
    run = begin(online("qc", gamma=0.9))
    while run.progress < 6:
        run.advance()
    run.online.act(run.learner.policy)
    found = run.online.experience.gather(torch.arange(2))
    assert found.discount.tolist() == [0, 0] and found.real.tolist() == [[1, 0, 0]] * 2
    run.close()


def chunk_of(start: float, reward: float, discount: float) -> Batch:
    """Return a chunk of one environment: two steps of one number, `start` and half more."""
    one, action = torch.ones(1), torch.tensor([[start, start + 0.5]])
    return Batch(
        cond=one[:, None] * start,
        action=action,
        reward=one * reward,
        next_cond=one[:, None] * (start + 1),
        discount=one * discount,
        next_action=torch.zeros(1, 2),
        has_next=torch.zeros(1),
        plan=action,
        real=torch.ones(1, 2),
        row=torch.full((1,), -1),
    )


def test_consecutive_chunks_are_joined_up_to_the_end_of_the_task() -> None:
    yes, no = torch.tensor([True]), torch.tensor([False])
    running = RunningChunks(3)
    assert running.add(chunk_of(0, 1.0, 0.5), yes, no) == [] == running.add(chunk_of(1, 10.0, 0.5), no, no)
    (whole,) = running.add(chunk_of(2, 100.0, 0.5), no, no)
    assert (whole.reward.item(), whole.discount.item()) == (1 + 5 + 25, 0.125)
    assert whole.action.tolist() == [[0, 0.5, 1, 1.5, 2, 2.5]]
    assert (whole.cond.item(), whole.next_cond.item()) == (0, 3) and whole.plan.tolist() == [[0, 0.5]]
    other = RunningChunks(3)
    other.load_state_dict(running.state_dict(), torch.device("cpu"))
    for one in (running, other):
        last, middle, oldest = one.add(chunk_of(3, 8.0, 0.0), no, yes)  # the task ends
        assert (last.reward.item(), last.action.tolist()) == (8, [[3, 3.5, 3.5, 3.5, 3.5, 3.5]])
        assert (middle.reward.item(), middle.action.tolist()) == (100 + 4, [[2, 2.5, 3, 3.5, 3.5, 3.5]])
        assert (oldest.reward.item(), oldest.discount.item()) == (10 + 50 + 2, 0)
    assert running.add(chunk_of(5, 1.0, 0.5), yes, no) == []  # a new episode, which a limit cuts
    assert running.add(chunk_of(6, 1.0, 0.5), yes, no) == [] == running.add(chunk_of(7, 1.0, 0.5), no, no)
    (after,) = running.add(chunk_of(8, 1.0, 0.5), no, no)
    assert after.cond.item() == 6


def test_running_chunks_are_resumed_on_the_device_of_the_run() -> None:
    """Checkpoints are read to the processor; `meta` stands for another device."""
    device, (yes, no) = torch.device("meta"), torch.tensor([[True], [False]])
    running, other = RunningChunks(2), RunningChunks(2)
    running.add(chunk_of(0, 1.0, 0.5), yes, no)
    other.load_state_dict(running.state_dict(), device)
    (saved,) = other.state_dict()["running"]
    assert {part.device for part in saved.values()} == {device}


def test_experience_holds_the_latest_rows() -> None:
    table = begin(online("qc")).table
    ring, again = Experience(5, table), Experience(7, table)
    for first in (0, 3, 6):
        ring.add(table.gather(torch.arange(first, first + 3)))
    assert len(ring) == 5 and torch.equal(ring._rows, table._rows[[5, 6, 7, 8, 4]])
    again.load_state_dict(ring.state_dict())
    for one in (ring, again):
        one.add(table.gather(torch.tensor([9])))
    assert torch.equal(ring._rows, table._rows[[5, 6, 7, 8, 9]])
    assert torch.equal(again._rows[:6], table._rows[4:10]) and len(again) == 6


def test_updates_in_the_task_follow_its_steps_and_wait_for_the_warm_up() -> None:
    settings = OnlineConfig(num_envs=2, warmup_steps=9, updates_per_step=0.3)
    run = begin(replace(online("qc", steps=30), online=settings, log_every=1))
    while run.progress < 6:
        run.advance()
    learned_from = 0
    while run.progress < run.total:
        before = run.progress
        run.advance()
        learned_from += run.progress - before if run.progress - 6 >= 9 else 0
        assert run.learner.steps - 6 == int(0.3 * learned_from + 1e-9)
    run.close()


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (0.5, 4), (1.0, 8), (None, None)])
def test_batches_hold_the_asked_share_of_data(ratio: float | None, expected: int | None) -> None:
    run = begin(online("qc"))
    run.online.config.offline_ratio = ratio
    while run.progress < 6:
        run.advance()
    run.online.act(run.learner.policy)
    from_data = int((run.online.draw(8).row >= 0).sum())
    rows = len(run.table) / (len(run.table) + len(run.online.experience))
    assert from_data == (round(8 * rows) if expected is None else expected)
    run.close()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.online_steps env=")):
        begin(online("qc"), env=None)
    with pytest.raises(ConfigError, match=mentions("algo.online.warmup_steps 12 13")):
        begin(online("qc", warmup=13))
    with pytest.raises(ConfigError, match=mentions("algo.steps algo.online_steps")):
        begin(replace(small(QcConfig), steps=0))
    with pytest.raises(ConfigError, match=mentions("algo.subset algo.critics=2")):
        replace(small(QcConfig), subset=3)
    run = begin(online("qc"))
    state = saved(run)
    run.close()
    longer = begin(replace(online("qc"), steps=8))
    with pytest.raises(CheckpointError, match=mentions("length of the run 6 8")):
        longer.load_state_dict(state)
    longer.close()


def test_a_run_can_begin_in_its_task_and_be_extended_there() -> None:
    config = online("residual", steps=12, warmup=0)
    config = replace(config, online=OnlineConfig(num_envs=2, warmup_steps=0, offline_ratio=0.0))
    first = finished(begin(replace(config, steps=0)))
    state = saved(first)
    second = begin(replace(config, steps=0, online_steps=24))
    second.load_state_dict(state)
    assert second.progress == first.progress and finished(second).progress >= 24
    first.close()
    second.close()


def test_a_run_beyond_its_gradient_steps_does_not_go_on_in_the_task() -> None:
    state = saved(finished(begin(small(registry.lookup("algo", "td3_bc")), "deterministic")))
    shorter = begin(replace(online("td3_bc"), steps=4), "deterministic")
    with pytest.raises(CheckpointError, match=mentions("algo.steps 6 4")):
        shorter.load_state_dict(state)
    shorter.close()


def test_prdc_goes_on_in_its_task_after_a_run_on_data_alone() -> None:
    """There new states have no list."""
    state = saved(finished(begin(small(registry.lookup("algo", "prdc")), "deterministic")))
    assert state["learner"]["regulariser"]["search"] == "lists"
    run = begin(online("prdc"), "deterministic")
    run.load_state_dict(state)
    assert finished(run).progress >= 18
    run.close()


@pytest.mark.parametrize(
    ("algo", "process", "std", "warned"),
    [
        ("td3_bc", "deterministic", 0.0, True),
        ("iql", "gaussian", 0.0, True),
        ("iql", "gaussian", 0.1, False),
        ("iql", "flow", 0.0, False),
    ],
)
def test_a_policy_that_explores_nothing_in_its_task_is_warned_of(
    algo: str, process: str, std: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = online(algo)
    begin(replace(config, online=replace(config.online, exploration_std=std)), process).close()
    assert any("algo.online.exploration_std=0" in text for text in caplog.messages) == warned


def test_noise_leaves_actions_in_the_box_of_the_task_where_the_policy_has_no_limits() -> None:
    """Actions of a mean of 0 and a deviation of a quarter are up to 4 in its units."""
    zero, one = torch.zeros(2), torch.ones(2)
    statistics = {"min": -one, "max": one, "mean": zero, "std": one / 4}
    policy = init("flow")
    modes = {**policy.config.normalizer, "action": "gaussian"}
    config = replace(policy.config, normalizer=modes)
    wide = build_policy(
        config, obs_dim=2, action_dim=2, statistics={"state": statistics, "action": statistics}
    )
    run = begin(online("iql"), init=wide)
    run.online.config.exploration_std = 5.0
    while run.progress < 18:
        run.advance()
    stored = run.online.experience.gather(torch.arange(len(run.online.experience)))
    high = wide.normalize_action(torch.tensor(run.online.pool.env.spec.action_high))
    assert stored.action.abs().max() == high.max() == 4
    run.close()


def test_a_deterministic_policy_explores_with_noise_in_the_box() -> None:
    run = begin(online("td3_bc"), "deterministic")
    run.online.config.exploration_std = 1.0
    assert isinstance(run.learner.policy, DeterministicPolicy)
    while run.progress < 18:
        run.advance()
    stored = run.online.experience.gather(torch.arange(len(run.online.experience)))
    with torch.no_grad():
        own = run.learner.policy.decode(
            run.learner.policy.condition(stored.cond), noise_of(run.learner.policy, len(stored))
        )
    assert not torch.allclose(own[:, :2].flatten(1), stored.action, atol=1e-3)
    assert stored.action.abs().max() == 1
    run.close()


def test_experience_holds_what_was_planned_beyond_the_executed_steps() -> None:
    """The policy learns from whole plans: other rows than those it makes would tell experience from data."""
    run = begin(online("td3_bc"), "deterministic")
    while run.progress < 6:
        run.advance()
    policy = run.learner.policy
    run.online.act(policy)
    found = run.online.experience.gather(torch.arange(2))
    with torch.no_grad():
        planned = policy.decode(policy.condition(found.cond), noise_of(policy, 2))
    plan = found.plan.view_as(planned)
    torch.testing.assert_close(plan[:, 2:], planned[:, 2:])
    assert not torch.allclose(plan[:, :2], planned[:, :2]) and not found.real[:, 2:].any()
    run.close()


@pytest.mark.parametrize(
    "algo", [algo for algo in METHODS if algo not in ("residual", "pa_rl", "famo2o")]
)  # which take any policy
def test_every_method_says_which_policy_it_refuses(algo: str) -> None:
    with pytest.raises(CapabilityError, match=mentions(f"algo={algo} process=deterministic")):
        start(algo, "deterministic")


def test_shared_settings_have_one_meaning() -> None:
    assert issubclass(registry.lookup("algo", "qc"), ChunkCriticConfig)
    for algo in METHODS:
        wrapper = small(registry.lookup("algo", algo)).wrapper()
        assert wrapper.members == small(registry.lookup("algo", algo)).critics


def dropping() -> Policy:
    """Return a flow whose network drops half of its features in training."""
    net = DpTransformerConfig(width=8, depth=1, heads=1, dropout=0.5)
    config = replace(policy_config("flow"), backbone=net)
    return build_policy(config, obs_dim=2, action_dim=2, statistics=dataset().statistics(), seed=1)


@pytest.mark.parametrize("algo", ["qc", "fql", "qam", "famo2o", "td3_bc", "iql"])
def test_features_are_dropped_in_the_matching_loss_alone(algo: str) -> None:
    """A decoded chunk is a function of its noise, in targets and in the task as after the run."""
    run = begin(small(registry.lookup("algo", algo)), init=dropping())
    run.advance()
    learner, batch = run.learner, run.table.gather(torch.arange(8))
    policy, generator = acting(learner), torch.Generator().manual_seed(0)
    cond, noise = policy.condition(batch.cond), policy.sample_noise(8, generator=generator)
    assert torch.equal(policy.decode(cond, noise), policy.decode(cond, noise))
    losses = {"td3_bc": lambda: learner.regulariser._cloning, "iql": lambda: learner.policy_loss._cloning}
    loss = losses.get(algo, lambda: learner.cloning)()
    draws = loss.draw(8, generator)
    assert not torch.equal(loss(batch, draws), loss(batch, draws))
    assert torch.equal(policy.decode(cond, noise), policy.decode(cond, noise))


def test_equal_flows_differ_by_nothing_where_features_are_dropped() -> None:
    learner = begin(small(registry.lookup("algo", "qam")), init=dropping()).learner
    cond = learner.base.condition(torch.rand(8, 2))
    states, _ = learner.chain(cond, learner.draw(8, torch.Generator())["chain"])
    assert not learner.difference(cond, states).any()


@pytest.mark.parametrize("algo", QAMS)
def test_adjoint_matching_is_at_the_times_that_the_flow_acts_at(algo: str) -> None:
    config, flow = small(registry.lookup("algo", algo)), init("flow")
    learner = begin(config, init=flow.with_sampler(Euler(steps=4, released_times=True))).learner
    even = learner.tuned.process.net_time(torch.arange(4) / 4)
    torch.testing.assert_close(learner.tuned.table.net_time, even)
    with pytest.raises(CapabilityError, match=mentions(f"algo={algo} Heun sampler=euler")):
        begin(config, init=flow.with_sampler(Heun(steps=3)))
