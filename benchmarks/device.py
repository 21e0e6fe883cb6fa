"""What an accelerator brings: decisions, gradient steps and collections on the CPU and on the device.

    python -m benchmarks.device [--rounds 5] [--device cuda] [--workers 8] [--from FILE]

writes docs/results/scale/device.json and the table in docs/scale.md; with `--from`, from the file of a run on
another machine. Variants take turns, each waits for the device, and times are medians on the wall. "Kernel by
kernel" is the device without recorded kernels (`policies.networks.recorded`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from algos.base import Setup
from algos.bc import BcConfig
from algos.dppo import DppoConfig
from algos.offline.batched_seeds import SeedBatch, build_seeds
from algos.td3_bc import Td3BcConfig
from benchmarks.options import parser
from benchmarks.pages import RESULTS, keep, record, replace_block, table
from benchmarks.ranks import PROCESS, UNET, random_episodes
from benchmarks.speed.cases_learning import synthetic_experience
from benchmarks.speed.sides import CHUNK, OBS, dppo_run, unit_statistics
from benchmarks.speed.timing import interleave
from envs.make import env as make_env
from envs.rollouts.fleet import RolloutSettings
from policies.build import build_policy
from policies.encoders.resnet import ResNetEncoderConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM
from policies.threads import torch_threads

PAGE = "docs/scale.md"
ENVS, CHUNKS = 64, 25
SIDES = {
    **{"cpu, 1 thread": "CPU, 1 thread", "cpu": "CPU"},
    **{"kernels": "device, kernel by kernel", "replayed": "device, replayed"},
}
"""Variants, and what the table calls them."""
Call = Callable[[], object]
MLP = PolicyConfig(process=PROCESS, horizon=4)
UNET_POLICY = PolicyConfig(process=VPDiffusion(num_levels=100), horizon=16, act_steps=8, backbone=UNET)
IMAGES = PolicyConfig(process=PROCESS, horizon=16, encoder=ResNetEncoderConfig(width=32))


def policy(config: PolicyConfig, device: torch.device) -> Policy:
    """Return an untrained policy of Hopper's sizes that takes ten DDIM steps."""
    built = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    return built.with_sampler(DDIM(steps=10)).eval().requires_grad_(False).to(device)


def decision(config: PolicyConfig, rows: int, device: torch.device, threads: int, replays: bool) -> Call:
    """Return a decision for rows of observations."""
    acting = policy(config, device)
    obs = torch.zeros(rows, 1, OBS, device=device)

    def act() -> object:
        with torch_threads(threads), torch.no_grad():
            if replays or device.type == "cpu":
                return acting.act(obs)
            return acting.executed(acting.plan(acting.observation(obs), acting.sample_noise(rows)))

    return act


def stepping(build: Callable[[Setup], Any], given: Setup, replays: bool) -> Call:
    """Return a block of gradient steps of a run."""
    run = build(given)
    recorded = getattr(run, "_recorded", getattr(run, "_gradients", None))
    recorded._is_on = recorded._is_on and replays
    return run.advance  # type: ignore[no-any-return]


def cloning(
    config: PolicyConfig, batch: int, steps: int, device: torch.device, threads: int, replays: bool
) -> Call:
    """Return gradient steps of cloning."""
    settings: dict[str, Any] = {"validation_fraction": 0.0, "validation_every": 0, "warmup_steps": 1}
    algo = BcConfig(steps=10**9, batch_size=batch, log_every=steps, **settings)
    dataset = random_episodes(1000, images=config is IMAGES)
    given = Setup(policy=config, dataset=dataset, device=device, num_threads=threads)
    return stepping(algo.build, given, replays)


def td3_bc(seeds: int, device: torch.device, threads: int, replays: bool) -> Call:
    """Return twenty gradient steps of TD3+BC, of several seeds at once."""
    algo, plain = Td3BcConfig(steps=10**9, log_every=20), random_episodes(1000, images=False)
    dataset = replace(plain, rewards=plain.actions.sum(dim=1))
    given = Setup(dataset=dataset, device=device, num_threads=threads)
    if seeds == 1:
        return stepping(algo.build, given, replays)
    group = SeedBatch(build_seeds(algo, given, range(seeds)))
    group.advance()
    group._recorded._is_on = replays
    return group.advance


def update(device: torch.device, threads: int, replays: bool) -> Call:
    """Return an update of DPPO's actor and critic with one minibatch of 50,000 rows."""
    run = dppo_run(0, threads, 1, device=device)
    experience = synthetic_experience(run, 20_000)
    index = torch.randperm(200_000, generator=torch.Generator().manual_seed(4))[:50_000].to(device)
    return lambda: run.learner.step(experience, index, draws=run.draws, train_actor=True)


def collection(config: PolicyConfig, where: str, workers: int, device: torch.device) -> Call:
    """Return a collection of DPPO on Hopper by a policy that acts in the workers or on the device."""
    levels = {"tuned_steps": 10, "num_envs": ENVS, "steps_per_iteration": CHUNKS, "batch_size": 50_000}
    given = Setup(
        env=make_env("hopper"), init=policy(config, torch.device("cpu")), num_workers=workers,
        device=device, rollout=RolloutSettings(where),
    )  # fmt: skip
    run = DppoConfig(**levels).build(given)  # type: ignore[arg-type]
    return run.collect


def cases(device: torch.device, workers: int) -> dict[str, dict[str, tuple[Callable[[], Call], int]]]:
    """Return, by case and variant, what builds a call, and the steps of a call."""
    cpu = torch.device("cpu")
    found: dict[str, dict[str, tuple[Callable[[], Call], int]]] = {}
    sides = {
        "cpu, 1 thread": (cpu, 1, False),
        "cpu": (cpu, os.cpu_count() or 1, False),
        "kernels": (device, 1, False),
        "replayed": (device, 1, True),
    }

    def add(case: str, build: Callable[[torch.device, int, bool], Call], steps: int = 1) -> None:
        found[case] = {name: (partial(build, *side), steps) for name, side in sides.items()}

    for name, config in (("MLP", MLP), ("U-Net of 4 M", UNET_POLICY)):
        for rows in (1, 64, 1024):
            add(f"decision, {name}, {rows} rows", partial(decision, config, rows))
    add("TD3+BC, batch 256, step", partial(td3_bc, 1), 20)
    add("the same, 16 seeds at once", partial(td3_bc, 16), 20)
    add("cloning, MLP, batch 256, step", partial(cloning, MLP, 256, 20), 20)
    add("cloning, U-Net, batch 256, step", partial(cloning, UNET_POLICY, 256, 2), 2)
    add("cloning, images 96 × 96, batch 64, step", partial(cloning, IMAGES, 64, 2), 2)
    add("DPPO, minibatch of 50,000 rows, step", update)
    found["DPPO, minibatch of 50,000 rows, step"].pop("replayed")  # not recorded
    for name, config in (("MLP", MLP), ("U-Net", UNET_POLICY)):
        found[f"collection of {ENVS * CHUNKS:,} chunks, DPPO, {name}"] = {
            side: (partial(collection, config, where, workers, place), 1)
            for side, where, place in (("cpu", "workers", cpu), ("kernels", "learner", device))
        }
    return found


def measure(device: torch.device, rounds: int, workers: int) -> None:
    """Measure seconds of a step by case and variant; every case is kept as it ends."""

    def waited(call: Call) -> Call:
        def run() -> None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    found = {}
    for case, sides in cases(device, workers).items():
        calls = {name: waited(build()) for name, (build, _) in sides.items()}
        for name, call in calls.items():
            for _ in range(1 if name.startswith("cpu") else 5):  # recordings are made
                call()
        times = interleave(calls, rounds=rounds, slot_s=0.0)
        found[case] = {name: times[name] / sides[name][1] for name in sides}
        sys.stdout.write(f"{case}: {found[case]}\n")
        sys.stdout.flush()
        keep("scale", "device", {"rounds": rounds, "workers": workers, "cases": found}, indent=1)


def lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    machine = found["environment"]
    command = f"python -m benchmarks.device --rounds {found['rounds']} --workers {found['workers']}"
    beside = f"{machine['cpu_count']} CPU cores" + (f" of {name}" if (name := machine["processor"]) else "")
    rows = []
    for case, sides in found["cases"].items():
        cells = [f"{1000 * sides[name]:.3g}" if name in sides else "–" for name in SIDES]
        best = min(time for name, time in sides.items() if name.startswith("cpu"))
        gain = best / sides.get("replayed", sides["kernels"])
        rows.append([case, *cells, f"**{gain:.2g}**"])
    columns = ("", *SIDES.values(), "better CPU by device")
    return [
        f"`{command}`, medians in ms on the wall: {machine['accelerator']} beside {beside}; "
        f"torch {machine['packages']['torch']}.",
        "",
        *table(columns, rows),
    ]


def main() -> None:
    """Measure, keep, write."""
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--workers", type=int, default=8)
    asked.add_argument("--from", dest="file", help="measurement of another machine")
    options = asked.parse_args()
    if options.file:
        shutil.copy(options.file, RESULTS / "scale" / "device.json")
    else:
        measure(torch.device(options.device), options.rounds, options.workers)
    replace_block(PAGE, "device", lines(record("scale", "device")))


if __name__ == "__main__":
    main()
