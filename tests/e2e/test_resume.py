"""N steps are k steps, a resume, and N - k steps, to the last bit on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_value, everything, repeated
from two_modes import two_mode_setup

from algos.base import Algorithm, Setup
from algos.bc import BcConfig
from algos.dppo import DppoConfig
from algos.dsrl import DsrlConfig
from algos.offpolicy.config import OffPolicyConfig
from algos.sac import SacConfig
from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from algos.training.trainer import TrainerSettings, train
from envs.datasets.episodes import EpisodeDataset
from envs.tasks.avoid.task import Avoid
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.heads import CriticConfig
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.processes.squashed import TanhGaussianProcess
from policies.wrappers.noise_policy import Steering


def assert_equal(first: Any, second: Any, where: str = "state") -> None:
    """Nested states agree to the last bit."""
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            if key not in ("elapsed_s", "cpu_s", "metrics_bytes"):
                assert_equal(value, second[key], f"{where}[{key!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert first == second, where


class Stopped(Exception):
    """Ends a run without warning."""


def train_until(
    algorithm: Algorithm, run: RunDirectory, settings: TrainerSettings, stop_at: int | None
) -> None:
    """Train; leave without warning before the first iteration after `stop_at` units."""
    advance = algorithm.advance

    def guarded() -> Any:
        if stop_at is not None and algorithm.progress >= stop_at:
            raise Stopped
        return advance()

    algorithm.advance = guarded  # type: ignore[method-assign]
    train(algorithm, run, settings, progress=False)


def assert_resumes_bit_exactly(
    build: Any, tmp_path: Path, settings: TrainerSettings, stops: list[int]
) -> None:
    """Compare an uninterrupted run with one that ends without warning at `stops` and is resumed."""
    whole, parts = (RunDirectory.create_at(tmp_path / name, {}) for name in ("whole", "parts"))
    torch.manual_seed(0)
    algorithm = build()
    train_until(algorithm, whole, settings, None)
    algorithm.close()
    for stop_at in [*stops, None]:
        torch.manual_seed(0 if parts.latest() is None else 1)  # a resumed run restores the state itself
        algorithm = build()
        try:
            train_until(algorithm, parts, settings, stop_at)
            assert stop_at is None
        except Stopped:
            assert stop_at is not None
        finally:
            algorithm.close()
    assert parts.checkpoints() == whole.checkpoints()
    assert_equal(parts.load_training_state(), whole.load_training_state())
    weights = [(run.policy_path() / "model.safetensors").read_bytes() for run in (parts, whole)]
    assert weights[0] == weights[1]
    rows = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(run.metrics_path)]
        for run in (parts, whole)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("process", repeated([VPDiffusion(num_levels=5), RectifiedFlow(), GaussianProcess()]))
def test_cloning_resumes_bit_exactly(process: object, tmp_path: Path) -> None:
    config = BcConfig(steps=24, batch_size=100, log_every=3, warmup_steps=4, validation_fraction=0.1)
    assert_resumes_bit_exactly(
        lambda: config.build(two_mode_setup(process=process)),
        tmp_path,
        TrainerSettings(checkpoint_every=6),
        stops=[3, 9, 18],
    )


@pytest.mark.parametrize(("sampler", "num_workers"), each_value(["ddpm", "ddim"], [0, 2]))
def test_dppo_resumes_bit_exactly(sampler: str, num_workers: int, tmp_path: Path) -> None:
    """Stopped within an episode, so that physics, optimisers, reward scaling and draws must all return."""
    config = DppoConfig(
        iterations=6,
        num_envs=4,
        steps_per_iteration=5,
        batch_size=64,
        update_epochs=2,
        denoising_steps=None if sampler == "ddpm" else 4,
        tuned_steps=3,
        sampler=sampler,
        actor_lr_warmup=2,
        actor_lr_cycle=10,
        critic_lr_warmup=2,
        critic_lr_cycle=10,
        bc_weight=0.1,
        critic=CriticConfig(width=8),
    )
    setup = Setup(env=Avoid(), init=avoid_policy(), seed=3, num_workers=num_workers, num_threads=1)
    settings = TrainerSettings(checkpoint_every=150, log_every=1)
    assert_resumes_bit_exactly(lambda: config.build(setup), tmp_path, settings, stops=[150, 250])


def off_policy(name: str) -> tuple[OffPolicyConfig, dict[str, Any]]:
    """A small off-policy run on `avoid`, and what it starts from."""
    small: dict[str, Any] = {
        "total_steps": 160, "warmup_steps": 40, "num_envs": 2, "steps_per_iteration": 2, "log_every": 10,
        "updates_per_step": 0.3, "actor_every": 2, "batch_size": 8, "buffer_size": 16, "critic_dims": (8,),
    }  # fmt: skip
    if name == "sac":
        net = MlpConfig(residual=False, hidden_dims=(8,))
        plain = {"state": "identity", "action": "limits"}
        return SacConfig(**small), {
            "policy": PolicyConfig(TanhGaussianProcess(), backbone=net, normalizer=plain)
        }
    steering, parts = Steering(hidden_dims=(8,)), {"init": avoid_policy(RectifiedFlow())}
    if name == "na-mixed":
        mixed = DsrlConfig(**small, steering=steering, offline_ratio=0.3, distillation_latents="mixture")
        return mixed, parts | {"dataset": avoid_episodes()}
    return DsrlConfig(**small, steering=steering, variant=name.removeprefix("dsrl-")), parts


FROM_A_REPLAY = [("na-mixed", 0), ("dsrl-sac", 0), ("sac", 2)] + [("na", 0), ("sac", 0)] * everything


@pytest.mark.parametrize(("name", "num_workers"), FROM_A_REPLAY)
def test_learning_from_a_replay_resumes_bit_exactly(name: str, num_workers: int, tmp_path: Path) -> None:
    """Stopped in the warm-up, before and after the replay wraps, each time beyond the last checkpoint.

    Workers are begun once more only: their state is that of the engine, whatever the replay holds.
    """
    config, parts = off_policy(name)
    setup = Setup(env=Avoid(), seed=3, num_workers=num_workers, num_threads=1, **parts)
    settings = TrainerSettings(checkpoint_every=35, log_every=1)
    stops = [130] if num_workers else [30, 60, 130]
    assert_resumes_bit_exactly(lambda: config.build(setup), tmp_path, settings, stops)
    replay = RunDirectory.open(tmp_path / "parts").load_training_state()["algorithm"]["replay"]
    assert len(replay["rows"]) == config.buffer_size


MIXED = Setup(env=Avoid(), seed=3, num_workers=0, num_threads=1)
OFTEN = TrainerSettings(checkpoint_every=35, log_every=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run of `off_policy("na-mixed")` that nothing interrupts."""
    config, parts = off_policy("na-mixed")
    torch.manual_seed(0)
    algorithm = config.build(replace(MIXED, **parts))
    run = RunDirectory.create_at(tmp_path_factory.mktemp("mixed") / "whole", {})
    train_until(algorithm, run, OFTEN, None)
    algorithm.close()
    return run


@pytest.mark.parametrize("moment", repeated(["distilling", "updating", "collecting"]))
def test_a_run_killed_within_an_iteration_continues_as_if_nothing_had_happened(
    moment: str, whole: RunDirectory, tmp_path: Path
) -> None:
    """The replay, the critics or the distilled ones are ahead of the checkpoint when the end comes."""
    config, parts = off_policy("na-mixed")
    killed = RunDirectory.create_at(tmp_path / "killed", {})
    torch.manual_seed(0)
    for is_killed in (True, False):
        algorithm = config.build(replace(MIXED, **parts))
        place = {
            "collecting": (algorithm.replay, "add", 6),
            "updating": (algorithm.learner.actor, "draw", 60),
            "distilling": (algorithm.learner, "distill", 7),
        }[moment]
        if is_killed:
            with pytest.raises(Stopped):
                with_a_last_call(*place, lambda a=algorithm: train_until(a, killed, OFTEN, None))
            assert 0 < (killed.latest() or 0) < algorithm.progress < algorithm.total
        else:
            train_until(algorithm, killed, OFTEN, None)
        algorithm.close()
    assert_equal(killed.load_training_state(), whole.load_training_state())


def with_a_last_call(part: Any, name: str, last: int, run: Any) -> None:
    """Run until a method of a part has been called so many times, and leave within its next call."""
    method, calls = getattr(part, name), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > last:
            raise Stopped
        return method(*args, **options)

    setattr(part, name, counted)
    run()


def test_a_longer_budget_continues_a_run_from_its_replay(tmp_path: Path) -> None:
    """A run of 80 steps that is given 160 is one of 160 all along."""
    config, parts = off_policy("na")
    config = replace(config, buffer_size=1000)  # larger than any budget here, which decides the place
    setup = Setup(env=Avoid(), seed=3, num_workers=0, num_threads=1, **parts)
    states = []
    for budgets in ((160,), (80, 160)):
        run = RunDirectory.create_at(tmp_path / f"run{len(budgets)}", {})
        for budget in budgets:
            algorithm = replace(config, total_steps=budget).build(setup)
            train_until(algorithm, run, TrainerSettings(checkpoint_every=80), None)
            algorithm.close()
        states.append(run.load_training_state()["algorithm"])
    assert_equal(states[0], states[1])


def avoid_episodes() -> EpisodeDataset:
    """Two episodes of random numbers with the widths of `avoid`."""
    spec, generator, frames = Avoid().spec, torch.Generator().manual_seed(0), 24
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[11::12] = True
    return EpisodeDataset(
        observations=torch.rand(frames, spec.obs_dim, generator=generator) * 2 - 1,
        actions=torch.rand(frames, spec.action_dim, generator=generator) * 2 - 1,
        rewards=torch.rand(frames, generator=generator),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        episode_start=torch.tensor([0, 12, 24]),
    )


def avoid_policy(process: Any = None) -> Policy:
    """An untrained policy of the task `avoid`; a diffusion unless told otherwise."""
    spec = Avoid().spec
    limits = {
        key: {"min": -torch.ones(dim), "max": torch.ones(dim)}
        for key, dim in (("state", spec.obs_dim), ("action", spec.action_dim))
    }
    config = PolicyConfig(process=process or VPDiffusion(num_levels=6), backbone=MlpConfig(width=8))
    return build_policy(config, obs_dim=spec.obs_dim, action_dim=spec.action_dim, statistics=limits, seed=0)
