"""The loop of off-policy algorithms, and DSRL on it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import mentions
from point_env import PointEnv
from point_steering import changed, dataset, flow, start
from torch import Tensor, nn

from algos.dsrl import DsrlConfig, NoiseAliasedUpdate, SteeredActor
from algos.offpolicy.loop import Explorer, OffPolicyRun
from algos.offpolicy.sac_update import SacUpdate, Temperature
from algos.training.experience import transitions_of
from algos.training.serialization import from_plain, to_plain
from envs.spec import EnvSpec
from policies.errors import CapabilityError, ConfigError
from policies.processes.diffusion import VPDiffusion
from policies.processes.mixture import MixtureProcess
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.noise_policy import SteeredPolicy, Steering


def everything(run: OffPolicyRun) -> Any:
    return run.replay.gather(torch.arange(len(run.replay)), run.config.discounting)


def test_the_replay_holds_true_successors_across_time_limits() -> None:
    run = start(limit=5)  # chunks of 2, 2 and 1 control steps
    rollout = run._collect()
    assert rollout.truncated.any() and not rollout.terminated.all()
    rows = transitions_of(rollout, run.learner.policy)
    unit = run.learner.policy.normalizer
    ended = rollout.truncated.flatten()
    final = unit.encode("state", rollout.final_obs["state"][:, -1])
    assert torch.equal(rows["next_cond"][ended], final)
    successor = rollout.record["cond"][1:]
    inner = rows["next_cond"].view(*rollout.length.shape, -1)[:-1]
    going_on = ~(rollout.truncated | rollout.terminated)[:-1]
    assert torch.equal(inner[going_on], successor[going_on])
    # The point moves by 0.2 times each executed action, so a whole chunk leads to its successor.
    whole = rollout.length.flatten() == 2
    moved = rows["cond"] + 0.2 * rows["action"].view(-1, 2, 2).sum(1)
    torch.testing.assert_close(moved[whole], rows["next_cond"][whole], rtol=0, atol=1e-5)
    run.close()


def test_recorded_chunks_are_those_of_recorded_latents() -> None:
    run = start()
    run._collect()
    batch = everything(run)
    torch.testing.assert_close(
        run.learner.actor.chunk(batch.cond, batch.latent), batch.action, rtol=0, atol=1e-5
    )
    assert float(batch.latent.abs().max()) < 1  # there is no warm-up: the actor draws
    run.close()


def test_updates_follow_the_executed_steps_and_wait_for_the_warm_up() -> None:
    run = start(changed(warmup_steps=25, updates_per_step=0.3, total_steps=100))
    taken: list[bool] = []
    step = run.learner.step

    def counted(*args: Any, **options: Any) -> dict[str, Tensor]:
        taken.append(options["updates_actor"])
        return step(*args, **options)

    run.learner.step = counted  # type: ignore[method-assign]
    learned_from = 0
    while run.progress < run.total:
        before = run.progress
        run.advance()
        learned_from += run.progress - before if run.progress >= 25 else 0
        assert len(taken) == int(0.3 * learned_from + 1e-9)
    assert all(taken)
    run.close()


def test_a_block_ends_with_so_many_control_steps_or_updates() -> None:
    """A round executes at most 4 control steps, and learns 10 times as often."""
    run = start(changed(warmup_steps=20, updates_per_step=10.0, total_steps=100, steps_per_iteration=1,
                        log_every=20))  # fmt: skip
    run.advance()
    assert 20 <= run.progress < 24 and run._steps in (0, 10, 20, 30, 40)  # nearly a whole block of warm-up
    before, learned = run.progress, run._steps
    run.advance()
    assert run.progress - before <= 8 and 20 <= run._steps - learned < 60
    run.close()


def test_where_blocks_end_changes_nothing_that_is_learned() -> None:
    found = []
    for block in (1, 7):
        run = start(changed(updates_per_step=1.0, warmup_steps=10, total_steps=60, log_every=block))
        while run.progress < run.total:
            run.advance()
        found.append((run.progress, run._steps, run.snapshot().state_dict()))
        run.close()
    for progress, steps, weights in found[1:]:
        assert (progress, steps) == found[0][:2]
        assert all(torch.equal(value, found[0][2][name]) for name, value in weights.items())


def test_what_a_device_still_computes_counts_as_time_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock, waited = start(changed(log_every=20)), [0.0], []

    def wait() -> None:
        clock[0] += 1.0

    monkeypatch.setattr("algos.offpolicy.loop.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(run, "_synchronize", wait)
    found = run.advance()
    assert found["time/rollout_s"] == 0.0 and found["time/update_s"] == clock[0] >= 2.0
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    run._synchronize()
    assert not waited
    device = torch.device("cuda", 0)
    monkeypatch.setattr(type(run.learner.policy), "device", device)
    run._synchronize()
    assert waited == [device]
    run.close()


def test_a_copy_that_acts_is_made_once_and_follows_what_is_learned() -> None:
    run = start(changed(warmup_steps=20))
    actor, copies = run.learner.actor, []

    def elsewhere() -> SteeredActor:
        twin = copy.copy(actor)
        twin.policy = actor.policy.clone()
        copies.append(twin)
        return twin

    actor.on_cpu = elsewhere  # type: ignore[method-assign, assignment]
    for _ in range(4):
        run.advance()
        assert run._actor_for_rollouts() is copies[0]
        same = [torch.equal(p, q) for p, q in zip(copies[0].parameters(), actor.parameters(), strict=True)]
        assert all(same)
    assert len(copies) == 1 and run._steps > 0
    run.load_state_dict(from_plain(to_plain(run.state_dict())))
    assert run._actor_for_rollouts() is copies[1]
    run.close()


def test_the_actor_moves_every_so_many_steps() -> None:
    run = start(changed(actor_every=4, updates_per_step=1.0, total_steps=20))
    moved: list[bool] = []
    step = run.learner.step
    run.learner.step = lambda *a, **o: (moved.append(o["updates_actor"]), step(*a, **o))[1]  # type: ignore
    run.advance()
    assert len(moved) >= 8 and moved == [(i + 1) % 4 == 0 for i in range(len(moved))]
    run.close()


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_what_ships_is_the_average_of_the_actor_where_that_is_asked_for() -> None:
    """Nothing else changes, the frozen policy least; a continued run goes on with its average."""
    plain, run = start(changed()), start(changed(ema_decay=0.5))
    average = [weight.detach().clone() for weight in run.learner.actor.parameters()]
    step = run.learner.step

    def followed(*args: Any, **options: Any) -> Any:
        found = step(*args, **options)
        for mine, weight in zip(average, run.learner.actor.parameters(), strict=True):
            mine.lerp_(weight.detach(), 0.5)
        return found

    run.learner.step = followed  # type: ignore[method-assign]
    for one in (plain, run):
        one.advance()
    assert _equal(plain.learner.policy, run.learner.policy)
    export_policy, last = run.snapshot(), plain.snapshot()
    assert isinstance(export_policy, SteeredPolicy) and isinstance(last, SteeredPolicy)
    for mine, weight in zip(export_policy.actor.parameters(), average, strict=True):
        torch.testing.assert_close(mine, weight)
    assert not _equal(export_policy.actor, last.actor) and _equal(export_policy.base, last.base)
    other = start(changed(ema_decay=0.5))
    other.load_state_dict(from_plain(to_plain(run.state_dict())))
    assert _equal(export_policy, other.snapshot())
    for one in (plain, run, other):
        one.close()


def test_the_warm_up_is_the_frozen_policy() -> None:
    run, obs = start(), torch.rand(4, 1, 2, generator=torch.Generator().manual_seed(0))
    explorer = Explorer(run.learner.actor, is_warmup=True)
    physical, record = explorer.act({"state": obs}, torch.Generator().manual_seed(1))
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).view(4, 3, 2)
    assert isinstance(run.learner.policy, SteeredPolicy)
    torch.testing.assert_close(physical, run.learner.policy.base.act(obs, noise=noise), rtol=0, atol=1e-5)
    assert float(record["latent"].abs().max()) > 1
    run.close()


def test_the_warm_up_stays_in_the_box_where_values_are_of_latents() -> None:
    run = start(changed(variant="sac", steering=Steering(bound=0.3, hidden_dims=(8,))))
    assert type(run.learner) is SacUpdate
    latent = run.learner.actor.warmup_latent(torch.zeros(1, 2), torch.tensor([[0.1, 5.0]]))
    torch.testing.assert_close(latent, torch.tensor([[0.1 / 0.3, 1.0]]))
    run.close()


def test_a_run_names_the_budget_that_lengthens_it() -> None:
    run = start()
    assert run.budget == "algo.total_steps" and hasattr(run.config, run.budget.partition(".")[2])
    run.close()


def test_only_the_actor_of_the_policy_changes() -> None:
    run = start()
    before = {name: value.clone() for name, value in run.learner.policy.state_dict().items()}
    run.advance()
    after = run.learner.policy.state_dict()
    moved = {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"actor"}
    run.close()


@pytest.mark.parametrize(("latents", "inside"), [("gaussian", 0.0), ("box", 1.0), ("mixture", 0.5)])
def test_latents_of_the_distillation_are_where_they_were_asked_for(latents: str, inside: float) -> None:
    run = start(changed(distillation_latents=latents, steering=Steering(bound=0.01, hidden_dims=(8,))))
    assert isinstance(run.learner, NoiseAliasedUpdate)
    drawn = run.learner.draw_latents(1000, torch.Generator().manual_seed(0))
    assert float((drawn.abs() <= 1).all(dim=1).float().mean()) == pytest.approx(inside, abs=0.01)
    run.close()


def test_latents_of_a_box_fill_it_from_edge_to_edge() -> None:
    run = start(changed(distillation_latents="box"))
    assert isinstance(run.learner, NoiseAliasedUpdate)
    drawn = run.learner.draw_latents(1000, torch.Generator().manual_seed(0))
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(drawn.min()) < -0.9 and float(drawn.max()) > 0.9
    run.close()


def test_so_many_steps_are_distilled_as_the_share_says_and_what_is_left_over_counts_later() -> None:
    run = start(changed(distillation_share=0.3))
    learner = run.learner
    assert isinstance(learner, NoiseAliasedUpdate)
    run._collect()
    generator = torch.Generator().manual_seed(0)
    assert [len(learner.finish_round(n, 8, run.source, generator)) for n in (10, 5, 5)] == [3, 1, 2]
    run.close()


def test_a_share_of_the_batches_needs_a_dataset() -> None:
    with pytest.raises(ConfigError, match=mentions("algo=dsrl offline_ratio=0.25 dataset=")):
        start(changed(offline_ratio=0.25))


def test_a_dataset_has_to_end_as_the_task_does(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Ending(PointEnv):
        terminate_on_success: bool = True

        @property
        def spec(self) -> EnvSpec:
            return replace(super().spec, terminate_on_success=self.terminate_on_success)

    ending = dataset()
    cut = replace(ending, terminated=ending.truncated, truncated=ending.terminated)
    with pytest.raises(ConfigError, match=mentions("env.terminate_on_success=true")):
        start(changed(offline_ratio=0.25), env=Ending(), dataset=cut)
    start(changed(offline_ratio=0.25), env=Ending(), dataset=ending).close()
    start(changed(offline_ratio=0.25), env=Ending(terminate_on_success=False), dataset=cut).close()
    start(changed(offline_ratio=0.25), dataset=ending).close()  # a task that has no such choice
    assert "are terminated" not in caplog.text
    start(changed(offline_ratio=0.25), env=Ending(terminate_on_success=False), dataset=ending).close()
    assert "6 of 6 episodes are terminated" in caplog.text and "env.terminate_on_success=true" in caplog.text


def test_steering_goes_on_from_a_steered_policy() -> None:
    first = start()
    first.advance()
    export_policy = first.snapshot()
    second = start(init=export_policy)
    for name, value in export_policy.state_dict().items():
        assert torch.equal(second.learner.policy.state_dict()[name], value)
    cond, eps = torch.rand(4, 2), torch.full((4, 6), 3.0)
    actor = second.learner.actor  # which warms up as it is, not as the frozen policy alone
    assert torch.equal(actor.warmup_latent(cond, eps), actor.draw(cond, eps)[0])
    second.advance()
    assert isinstance(second.snapshot(), SteeredPolicy) and isinstance(export_policy, SteeredPolicy)
    assert not isinstance(second.snapshot().base, SteeredPolicy)
    first.close()
    second.close()


def test_the_temperature_approaches_the_target_entropy() -> None:
    config = DsrlConfig(init_alpha=0.5)
    for entropy, rises in ((-3.0, True), (2.0, False)):
        temperature = Temperature(config, -1.0, torch.device("cpu"))
        loss = temperature.update(torch.full((4,), -entropy))["actor/alpha_loss"]
        assert float(loss) == pytest.approx(math.log(0.5) * (entropy + 1.0), rel=1e-6)
        assert (float(temperature.value) > 0.5) == rises


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offline_ratio", {"variant": "sac", "offline_ratio": 0.5}),
        ("offline_ratio", {"paper_compat": True, "offline_ratio": 0.5}),
        ("subset", {"aggregate": "subset_min", "subset": 3}),
    ],
)  # fmt: skip
def test_senseless_settings_are_refused(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=mentions(f"algo.{name}")):
        changed(**values)


@pytest.mark.parametrize(("ratio", "rows"), [(0.05, 8), (0.95, 8), (0.5, 1), (0.0019, 256)])
def test_a_share_that_rounds_to_no_row_or_to_all_is_refused(ratio: float, rows: int) -> None:
    with pytest.raises(ConfigError, match=mentions(f"algo.offline_ratio 0 batch_size={rows} {ratio}")):
        changed(offline_ratio=ratio, batch_size=rows)


@pytest.mark.parametrize(
    ("ratio", "rows", "count"),
    [(0.07, 8, 1), (0.93, 8, 7), (0.5, 2, 1), (0.002, 256, 1), (0.3, 40, 12), (0.25, 400, 100)],
)
def test_a_share_that_is_taken_holds_rows_of_both(ratio: float, rows: int, count: int) -> None:
    run = start(changed(offline_ratio=ratio, batch_size=rows), dataset=dataset())
    run._collect()
    drawn = run.source.draw(rows, torch.Generator().manual_seed(0))
    assert int((drawn.reward > 6).sum()) == count  # rewards of the task are below 1
    run.close()


def test_a_sampler_that_draws_at_every_step_is_refused_with_advice() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=dsrl VPDiffusion DDPM sampler=ddim")):
        start(init=flow(VPDiffusion(num_levels=4)))


def test_a_diffusion_of_random_steps_is_steered_by_as_many_steps_without_noise_as_asked_for(
    tmp_path: Path,
) -> None:
    noisy = flow(VPDiffusion(num_levels=4))
    run = start(changed(denoising_steps=2), init=noisy)
    run.advance()
    export_policy = run.snapshot()
    assert isinstance(export_policy, SteeredPolicy) and export_policy.base.sampler == DDIM(steps=2)
    still = noisy.with_sampler(DDIM(steps=2))  # type: ignore[attr-defined]
    obs, latent = torch.rand(3, 1, 2), torch.rand(3, 6) * 2 - 1
    cond = still.encode({"state": obs})
    alone = still.decode(cond, export_policy.noise_of(latent))
    torch.testing.assert_close(export_policy.chunk_of(cond.vec, latent), alone)
    loaded = load_policy(save_policy(export_policy, tmp_path / "policy"))
    noise = export_policy.sample_noise(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.act(obs, noise=noise), export_policy.act(obs, noise=noise))
    assert start(changed(denoising_steps=3)).learner.policy.base.sampler.steps == 3  # type: ignore[attr-defined]
    run.close()


def test_steps_of_a_policy_without_steps_are_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo.denoising_steps=3 MixturePolicy")):
        start(changed(denoising_steps=3), init=flow(MixtureProcess()))
    with pytest.raises(ConfigError, match=mentions("algo.denoising_steps 1")):
        changed(denoising_steps=0)


def test_a_run_that_ends_before_anything_is_learned_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.warmup_steps algo.total_steps=60 61")):
        start(changed(warmup_steps=61))
    start(changed(warmup_steps=60)).close()
