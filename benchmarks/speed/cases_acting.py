"""Cases of acting: what it takes to sample an action, and to gather experience with it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.sides import (
    CHUNK,
    ENVS,
    LEVELS,
    OBS,
    dppo_run,
    our_policy,
    plain_nets,
    push_t,
    reference,
    require_close,
    small_dit,
    tape,
)
from benchmarks.speed.timing import Figure, compare, interleave
from envs.make import env as make_env
from envs.rollouts.rollout import RolloutPool
from policies.denoising import DenoisingPolicy
from policies.export.export import export_onnx
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.runner import Runner
from policies.samplers.ddpm import DDPM
from policies.samplers.ode import Euler


def sampling(options: argparse.Namespace) -> Iterator[Figure]:
    """Twenty DDPM steps, one thread, against a diffusers scheduler in the loop."""
    net, schedule = plain_nets()[0], peers.scheduler(LEVELS)
    policy = our_policy(net, noise_clip=None)
    for batch, floor in ((1, 7.0), (40, 2.4), (500, 1.7)):
        state = torch.randn(batch, OBS, generator=torch.Generator().manual_seed(batch))
        obs = state.unsqueeze(1)
        expected = peers.diffusers_sample(net, schedule, state, torch.Generator().manual_seed(1))
        require_close("sampling", policy.act(obs, noise=tape(batch, 1, last=False)), expected, 2e-5)
        generator = torch.Generator().manual_seed(2)
        ours = partial(policy.act, obs, generator=generator)
        theirs = partial(peers.diffusers_sample, net, schedule, state, generator)
        sides = ("policy.act", ours), ("diffusers loop", theirs)
        yield compare(f"sample, batch {batch}", *sides, floor, rounds=options.rounds)


def unet(options: argparse.Namespace) -> Iterator[Figure]:
    """Ten DDIM steps of Diffusion Policy's U-Net for Push-T, one thread, against a diffusers scheduler."""
    plain, policy = push_t()
    schedule = peers.ddim_scheduler()
    for batch, floor in ((1, 2.5), (16, 1.0)):
        generator = torch.Generator().manual_seed(batch)
        obs = torch.rand(batch, 2, policy.obs_dim, generator=generator) * 2 - 1
        state, start = obs.flatten(1), torch.randn(batch, *plain.chunk, generator=generator)
        ours = partial(policy.act, obs, noise=start)
        theirs = partial(peers.diffusers_ddim, plain, schedule, state, start)
        require_close("unet", ours(), theirs(), 5e-5)
        sides = ("policy.act", ours), ("diffusers loop", theirs)
        yield compare(f"U-Net, batch {batch}", *sides, floor, rounds=options.rounds)


def transformer(options: argparse.Namespace) -> Iterator[Figure]:
    """Ten Euler steps of a small diffusion transformer, one thread, against the plain network in a loop."""
    plain, policy = small_dit(RectifiedFlow(), Euler(steps=10))
    scale = policy.process.time_scale
    for batch, floor in ((1, 1.2), (40, 1.0)):
        generator = torch.Generator().manual_seed(batch)
        obs = torch.rand(batch, 1, policy.obs_dim, generator=generator) * 2 - 1
        state, start = obs.flatten(1), torch.randn(batch, *plain.chunk, generator=generator)
        ours = partial(policy.act, obs, noise=start)
        theirs = partial(peers.euler, plain, state, start, 10, scale)
        require_close("transformer", ours(), theirs(), 5e-5)
        sides = ("policy.act", ours), ("plain loop", theirs)
        yield compare(f"transformer, batch {batch}", *sides, floor, rounds=options.rounds)


def exported(options: argparse.Namespace) -> Iterator[Figure]:
    """Exported policies at batch 1, one thread, against a diffusers scheduler in an eager loop.

    One graph holds all steps of the small network, which is how it is fastest; the large ones are exported
    step by step, as one graph of theirs takes minutes to trace.
    """
    net, ddpm = plain_nets()[0], peers.scheduler(LEVELS)
    yield _exported(options, "MLP, exported", our_policy(net, noise_clip=None), net, ddpm, floor=9.0)
    plain, policy = small_dit(VPDiffusion(num_levels=LEVELS, prediction="eps"), DDPM(noise_clip=None))
    yield _exported(options, "transformer, exported", policy, plain, ddpm, graph="step")
    convolutional, policy = push_t()
    yield _exported(options, "U-Net, exported", policy, convolutional, peers.ddim_scheduler(), graph="step")


def _exported(
    options: argparse.Namespace,
    case: str,
    policy: DenoisingPolicy,
    plain: Any,
    schedule: Any,
    *,
    graph: str = "whole",
    floor: float = 0.0,  # 0: none is asked for
) -> Figure:
    """Compare the runner of an exported folder with the plain network in a loop, and time both."""
    is_tape = not policy.table.is_deterministic
    generator, size = torch.Generator().manual_seed(1), (1, policy.chunk.obs_steps, policy.obs_dim)
    obs = torch.rand(size, generator=generator) * 2 - 1
    state, start = obs.flatten(1), torch.randn(1, *plain.chunk, generator=generator)
    noise = tape(1, 1, last=False, chunk=plain.chunk) if is_tape else start
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(policy, folder, graph=graph, latency_batches=())
        runner = Runner(folder)

    def run(noise: np.ndarray | None = None) -> np.ndarray:
        drawn = runner.draw_noise(1) if noise is None else noise
        return runner.predict({"observation": obs.numpy(), "noise": drawn}).action

    def peer(seed: int = 2) -> Tensor:
        if is_tape:
            return peers.diffusers_sample(plain, schedule, state, torch.Generator().manual_seed(seed))
        return peers.diffusers_ddim(plain, schedule, state, start)

    require_close(case, run(noise.numpy()), peer(1), 5e-5)
    sides = ("onnxruntime", run), ("diffusers loop", peer)
    return compare(f"{case}, batch 1", *sides, floor, rounds=options.rounds)


def check_engine(chunks: int = 100) -> None:
    """Step our exact engine and gymnasium with the same seeds and actions; every bit must agree."""
    engine, generator = make_env("hopper").make_vector(3), np.random.default_rng(0)
    singles = [gymnasium.make("Hopper-v5") for _ in range(3)]
    seeds = list(range(3))
    obs = engine.reset(seeds)
    theirs = np.stack([single.reset(seed=seed)[0] for single, seed in zip(singles, seeds, strict=True)])
    for _ in range(chunks):
        if not np.array_equal(obs[:, -1], theirs):
            raise SystemExit("rollout: the engine's observations differ from gymnasium's")
        actions = generator.uniform(-1.3, 1.3, (3, *CHUNK))
        step = engine.step_chunk(actions)
        obs = step.obs.copy()
        for row, single in enumerate(singles):
            total, done = 0.0, False
            for k in range(CHUNK[0]):
                theirs[row], reward, terminated, truncated, _ = single.step(np.clip(actions[row, k], -1, 1))
                done = terminated or truncated
                if reward != step.rewards[row, k]:
                    raise SystemExit("rollout: the engine's rewards differ from gymnasium's")
                total += reward
                if done:
                    break
            if done != bool(step.terminated[row] or step.truncated[row]):
                raise SystemExit("rollout: the engine's ends differ from gymnasium's")
            if done:
                seeds[row] += 10
                obs[row] = engine.reset([seeds[row]], [row])[0]
                theirs[row] = single.reset(seed=seeds[row])[0]


def rollout(options: argparse.Namespace) -> Iterator[Figure]:
    """Experience per second on Hopper: 40 environments, chunks of 4, 20 denoising steps."""
    check_engine()
    run, steps = dppo_run(0, 1, 1), 25
    pool = RolloutPool(make_env("hopper"), num_envs=ENVS, num_workers=2)
    program = reference()
    vectors = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
    naive = {kind.__name__: peers.NaiveRollout(program, kind, "Hopper-v5", ENVS) for kind in vectors}
    variants: dict[str, Callable[[], object]] = {"ours": lambda: pool.collect(run.ratio, steps)}
    variants |= {name: lambda loop=loop: loop.collect(steps) for name, loop in naive.items()}
    times = interleave(variants, rounds=max(5, options.rounds // 2), slot_s=0.5)
    for loop in naive.values():
        loop.envs.close()
    pool.close()
    run.close()
    best = min(naive, key=lambda name: times[name])
    print(f"the faster of gymnasium's: {best}")
    yield Figure("rollout, 40 envs, chunk 4", "2 processes", "gymnasium", times["ours"], times[best], 3.2)
