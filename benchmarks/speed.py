"""Hot paths against their peers, on two cores, DPPO's Hopper sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.speed [case ...] [--rounds 9] [--json FILE] [--gate]

Every case first checks that ours and the peer compute the same thing, then times them in turns and prints
the ratio of medians with its floor. `--gate` exits with 1 if a ratio misses its floor. Times of one run are
comparable with each other only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from torch import Tensor, nn

from algos.base import Setup
from algos.bc import BcConfig
from algos.dppo import DppoConfig
from benchmarks import peers
from benchmarks.timing import Figure, interleave
from envs.datasets.episodes import EpisodeDataset
from envs.make import env as make_env
from envs.rollout import RolloutPool
from policies.denoising import DenoisingPolicy
from policies.export import export_onnx
from policies.export_graph import open_session
from policies.policy import PolicyConfig, build_policy
from policies.processes.diffusion import VPDiffusion
from policies.protocols import ChunkSpec
from policies.samplers import DDPM

OBS, CHUNK, LEVELS, FT, ENVS = 11, (4, 3), 20, 10, 40
BLOCK = 25  # gradient steps per report of behaviour cloning
CASES: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {}


def case(run: Callable[[argparse.Namespace], Iterator[Figure]]) -> Callable[..., Iterator[Figure]]:
    """Add a case under its function's name."""
    CASES[run.__name__] = run
    return run


# -- the same weights on both sides ---------------------------------------------------------------------


@cache
def plain_nets() -> tuple[peers.PlainMlp, peers.PlainMlp, peers.PlainCritic]:
    """Return frozen actor, tuned actor and critic of the peer; the two actors differ slightly."""
    torch.manual_seed(0)
    frozen, critic = peers.PlainMlp(CHUNK, OBS), peers.PlainCritic(OBS)
    tuned = peers.PlainMlp(CHUNK, OBS)
    with torch.no_grad():
        for p, q in zip(tuned.parameters(), frozen.parameters(), strict=True):
            p.copy_(q + 1e-3 * torch.randn_like(q))
    return frozen, tuned, critic


def copy_trunk(source: nn.Module, target: nn.Module) -> None:
    """Copy a plain residual network's weights into ours."""
    names = {"inp": "inlet", "hidden1": "blocks.0.linear1", "hidden2": "blocks.0.linear2", "out": "outlet"}
    state = {
        f"trunk.{ours}.{k}": getattr(getattr(source, theirs), k)
        for theirs, ours in names.items()
        for k in ("weight", "bias")
    }
    if isinstance(source, peers.PlainMlp):
        for index, ours in ((1, "linear1"), (3, "linear2")):
            for k in ("weight", "bias"):
                state[f"time_embedding.{ours}.{k}"] = getattr(source.time[index], k)
    target.load_state_dict(state)


def unit_statistics() -> dict[str, dict[str, Tensor]]:
    """Return statistics that make normalisation the identity."""

    def of(dim: int) -> dict[str, Tensor]:
        one = torch.ones(dim)
        return {"min": -one, "max": one, "mean": 0 * one, "std": one}

    return {"state": of(OBS), "action": of(CHUNK[1])}


def our_policy(net: nn.Module, **sampler: Any) -> DenoisingPolicy:
    """Return our policy with the peer's weights."""
    config = PolicyConfig(process=VPDiffusion(num_levels=LEVELS), sampler=DDPM(**sampler))
    policy = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    assert isinstance(policy, DenoisingPolicy)
    copy_trunk(net, policy.field)
    return policy.eval()


def tape(batch: int, seed: int, *, last: bool) -> Tensor:
    """Return the noise that a peer draws from a generator with this seed, as a tape (B, K+1, Th, Da)."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn((batch, *CHUNK), generator=generator) for _ in range(LEVELS + last)]
    return torch.stack(draws if last else [*draws, torch.zeros(batch, *CHUNK)], dim=1)


def require_close(what: str, ours: Any, theirs: Any, tolerance: float) -> None:
    """Stop if ours and the peer do not agree."""
    difference = float((torch.as_tensor(ours) - torch.as_tensor(theirs)).abs().max())
    if not difference <= tolerance:
        raise SystemExit(f"{what}: ours and the peer differ by {difference:.2e} (tolerance {tolerance:.0e})")


# -- sampling -------------------------------------------------------------------------------------------


@case
def sampling(options: argparse.Namespace) -> Iterator[Figure]:
    """Twenty DDPM steps, one thread, against a diffusers scheduler in the loop."""
    net, schedule = plain_nets()[0], peers.scheduler(LEVELS)
    policy = our_policy(net, noise_clip=None)
    for batch, floor in ((1, 5.0), (40, 2.4), (500, 1.7)):
        state = torch.randn(batch, OBS, generator=torch.Generator().manual_seed(batch))
        obs = state.unsqueeze(1)
        expected = peers.diffusers_sample(net, schedule, state, torch.Generator().manual_seed(1))
        require_close("sampling", policy.act(obs, noise=tape(batch, 1, last=False)), expected, 2e-5)
        generator = torch.Generator().manual_seed(2)
        times = interleave(
            {
                "ours": lambda obs=obs, g=generator: policy.act(obs, generator=g),
                "peer": lambda state=state, g=generator: peers.diffusers_sample(net, schedule, state, g),
            },
            rounds=options.rounds,
            slot_s=0.1,
        )
        yield Figure(
            f"sample, batch {batch}", "policy.act", "diffusers loop", times["ours"], times["peer"], floor
        )


@case
def exported(options: argparse.Namespace) -> Iterator[Figure]:
    """The exported graph at batch 1, one thread."""
    net, schedule = plain_nets()[0], peers.scheduler(LEVELS)
    policy = our_policy(net, noise_clip=None)
    state = torch.randn(1, OBS, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(policy, folder, latency_batches=())
        session = open_session(Path(folder) / "policy.onnx")
    rng = np.random.default_rng(0)
    obs = state.unsqueeze(1).numpy()

    def run() -> np.ndarray:
        noise = rng.standard_normal((1, LEVELS + 1, *CHUNK), dtype=np.float32)
        return session.run(None, {"observation": obs, "noise": noise})[0]

    expected = peers.diffusers_sample(net, schedule, state, torch.Generator().manual_seed(1))
    feed = {"observation": obs, "noise": tape(1, 1, last=False).numpy()}
    require_close("exported", session.run(None, feed)[0], expected, 2e-5)
    generator = torch.Generator().manual_seed(2)
    peer = lambda: peers.diffusers_sample(net, schedule, state, generator)  # noqa: E731
    times = interleave({"ours": run, "peer": peer}, rounds=options.rounds, slot_s=0.1)
    yield Figure(
        "sample, batch 1, exported", "onnxruntime", "diffusers loop", times["ours"], times["peer"], 9.0
    )


# -- updates --------------------------------------------------------------------------------------------


def dppo_run(num_workers: int, num_threads: int, steps: int) -> Any:
    """Return our DPPO on Hopper with the peer's weights, tuned network included."""
    frozen, tuned, critic = plain_nets()
    init = our_policy(frozen)
    config = DppoConfig(num_envs=ENVS, steps_per_iteration=steps, batch_size=50_000, update_epochs=5)
    setup = Setup(env=make_env("hopper"), init=init, num_workers=num_workers, num_threads=num_threads)
    run = config.build(setup)
    copy_trunk(tuned, run.policy.scored_net)
    copy_trunk(critic, run.learner.critic)
    return run


def reference() -> peers.ReferenceStyle:
    """Return the reference-style program with its own copies of the weights."""
    import copy

    return peers.ReferenceStyle(*copy.deepcopy(plain_nets()), levels=LEVELS, ft=FT)


def synthetic_experience(run: Any, rows: int) -> Any:
    """Record chains on random observations; advantages and targets are random."""
    from algos.buffers import Experience

    generator = torch.Generator().manual_seed(3)
    state = 0.5 * torch.randn(rows, 1, OBS, generator=generator)
    with torch.no_grad():
        _, record = run.ratio.act({"state": state}, generator)
    cond = run.policy.encode({"state": state})
    columns = (torch.randn(rows, generator=generator) for _ in range(3))
    return Experience(cond, record, *columns)


def peer_batch(experience: Any, index: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    """Lay the same minibatch out for the peer."""
    state, step = index // FT, index % FT
    chain = experience.record["chain"]
    return (
        experience.cond.vec[state], chain[state, step], chain[state, step + 1], step, old[state, step],
        experience.advantage[state], experience.target[state],
    )  # fmt: skip


@case
def update(options: argparse.Namespace) -> Iterator[Figure]:
    """One DPPO minibatch of 50,000 (environment step, denoising step) rows."""
    run = dppo_run(0, options.threads, 1)
    experience = synthetic_experience(run, 20_000)
    peer = reference()
    index = torch.randperm(20_000 * FT, generator=torch.Generator().manual_seed(4))[:50_000]
    old = peer.chain_log_prob(experience.cond.vec, experience.record["chain"])
    batch = peer_batch(experience, index, old)
    grads, _ = run.learner.actor_gradient(experience, index, draws=run.draws)
    critic_grads, _ = run.learner.critic_gradient(experience, index)
    peer.loss(*batch).backward()
    check_gradients(run, peer, grads, critic_grads)
    peer.actor_optimizer.zero_grad(), peer.critic_optimizer.zero_grad()
    torch.set_num_threads(options.threads)
    times = interleave(
        {
            "ours": lambda: run.learner.step(experience, index, draws=run.draws, train_actor=True),
            "peer": lambda: peer.update(*batch),
        },
        rounds=max(3, options.rounds // 2),
        slot_s=0.1,
    )
    torch.set_num_threads(1)
    run.close()
    yield Figure(
        "DPPO update, 50,000 rows",
        f"{options.threads} threads",
        "reference style",
        times["ours"],
        times["peer"],
        3.0,
    )


def check_gradients(run: Any, peer: peers.ReferenceStyle, actor: list[Tensor], critic: list[Tensor]) -> None:
    """Compare our gradient with the peer's: norm of the difference relative to the norm, per network."""
    for source, target, grads in (
        (peer.tuned, run.policy.scored_net, actor),
        (peer.critic, run.learner.critic, critic),
    ):
        shadow = type(source)(CHUNK, OBS) if isinstance(source, peers.PlainMlp) else type(source)(OBS)
        for p, q in zip(shadow.parameters(), source.parameters(), strict=True):
            p.data = q.grad
        expected = {name: torch.zeros_like(p) for name, p in target.named_parameters()}
        holder = _Holder(expected)
        copy_trunk(shadow, holder)  # type: ignore[arg-type]
        theirs = torch.cat([holder.state[name].flatten() for name in expected])
        ours = torch.cat([grad.flatten() for grad in grads])
        require_close(
            f"gradient of {type(source).__name__}", (ours - theirs).norm() / theirs.norm(), 0.0, 1e-5
        )


class _Holder:
    """Receives what `copy_trunk` would load."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state.update({k: v.detach() for k, v in state.items()})


@case
def cloning(options: argparse.Namespace) -> Iterator[Figure]:
    """One behaviour-cloning step at batch 256: gather, loss, optimiser, average of the weights."""
    rows, batch = 100_000, 256
    generator = torch.Generator().manual_seed(5)
    states = torch.rand(rows, OBS, generator=generator) * 2 - 1
    actions = torch.rand(rows, CHUNK[1], generator=generator) * 2 - 1
    starts = torch.arange(0, rows + 1, 1000)
    ours, peer = _our_cloning(states, actions, starts, batch), _peer_cloning(states, actions, batch)
    blocks = {"ours": ours, "peer": lambda: [peer() for _ in range(BLOCK)]}
    times = {name: t / BLOCK for name, t in interleave(blocks, rounds=options.rounds, slot_s=0.1).items()}
    yield Figure(
        "BC step, batch 256", "Bc.advance", "DataLoader + diffusers", times["ours"], times["peer"], 1.7
    )


def _our_cloning(states: Tensor, actions: Tensor, starts: Tensor, batch: int) -> Callable[[], None]:
    flags = torch.zeros(len(states), dtype=torch.bool)
    ends = flags.clone()
    ends[starts[1:] - 1] = True
    data = EpisodeDataset(states, actions, torch.zeros(len(states)), flags, ends, starts)
    config = BcConfig(
        steps=10**9, batch_size=batch, block_steps=BLOCK, validation_fraction=0.0, validation_every=0
    )
    run = config.build(Setup(policy=PolicyConfig(process=VPDiffusion(num_levels=LEVELS)), dataset=data))
    copy_trunk(plain_nets()[0], run.policy.field)
    return lambda: run.advance()  # type: ignore[return-value]


def _peer_cloning(states: Tensor, actions: Tensor, batch: int) -> Callable[[], None]:
    import copy

    net, schedule = copy.deepcopy(plain_nets()[0]), peers.scheduler(LEVELS)
    average = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-6)
    usable = [i for i in range(len(states)) if i % 1000 <= 1000 - CHUNK[0]]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from peers.chunk_loader(states, actions, usable, CHUNK[0], batch)

    stream = batches()

    def step() -> None:
        state, chunk = next(stream)
        noise, tau = torch.randn_like(chunk), torch.randint(0, LEVELS, (len(chunk),))
        loss = nn.functional.mse_loss(net(schedule.add_noise(chunk, noise, tau), tau, state), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
                slow.mul_(0.995).add_(0.005 * fast)

    return step


@case
def gather(options: argparse.Namespace) -> Iterator[Figure]:
    """A batch of 256 windows against a per-item DataLoader."""
    rows, batch = 100_000, 256
    states, actions = torch.randn(rows, OBS), torch.randn(rows, CHUNK[1])
    flags, starts = torch.zeros(rows, dtype=torch.bool), torch.arange(0, rows + 1, 1000)
    ends = flags.clone()
    ends[starts[1:] - 1] = True
    data = EpisodeDataset(states, actions, torch.zeros(rows), flags, ends, starts)
    windows = data.windows(ChunkSpec(CHUNK[1], *CHUNK[:1], act_steps=CHUNK[0]), pad=False)
    usable = [i for i in range(rows) if i % 1000 <= 1000 - CHUNK[0]]
    items = peers.ChunkDataset(states, actions, usable, CHUNK[0])
    picked = windows.gather(torch.arange(0, windows.num, 997))
    same = [items[i] for i in range(0, windows.num, 997)]
    require_close("gather", picked.action, torch.stack([a for _, a in same]), 0.0)
    require_close("gather", picked.obs[:, 0], torch.stack([s for s, _ in same]), 0.0)
    stream = _endless(states, actions, usable, batch)
    generator = torch.Generator().manual_seed(6)
    times = interleave(
        {"ours": lambda: windows.sample(batch, generator=generator), "peer": lambda: next(stream)},
        rounds=options.rounds,
    )
    yield Figure("gather 256 windows", "Windows.sample", "DataLoader", times["ours"], times["peer"], 30.0)


def _endless(states: Tensor, actions: Tensor, usable: list[int], batch: int) -> Iterator[Any]:
    while True:
        yield from peers.chunk_loader(states, actions, usable, CHUNK[0], batch)


# -- rollout and whole iteration ------------------------------------------------------------------------


class NaiveRollout:
    """Forty gymnasium environments behind a chunk wrapper, policy and physics taking turns."""

    def __init__(self, program: peers.ReferenceStyle, kind: type) -> None:
        makers = [peers.chunked_env("Hopper-v5", CHUNK[0]) for _ in range(ENVS)]
        self.envs, self.program = kind(makers), program
        self.obs, _ = self.envs.reset(seed=0)
        self.generator = torch.Generator().manual_seed(0)

    def collect(self, steps: int) -> dict[str, Tensor]:
        """Run chunk steps in every environment and store what an update needs."""
        states, chains, rewards, ended = [], [], [], []
        for _ in range(steps):
            state = torch.from_numpy(self.obs).float()
            action, chain = self.program.sample(state, self.generator)
            self.obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            states.append(state)
            chains.append(chain)
            rewards.append(torch.from_numpy(reward))
            ended.append(torch.from_numpy(terminated | truncated))
        columns = {"state": states, "chain": chains, "reward": rewards, "ended": ended}
        return {name: torch.stack(column) for name, column in columns.items()}


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


@case
def rollout(options: argparse.Namespace) -> Iterator[Figure]:
    """Experience per second on Hopper: 40 environments, chunks of 4, 20 denoising steps."""
    check_engine()
    run, steps = dppo_run(0, 1, 1), 25
    pool = RolloutPool(make_env("hopper"), num_envs=ENVS, num_workers=2)
    program = reference()
    vectors = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
    naive = {kind.__name__: NaiveRollout(program, kind) for kind in vectors}
    variants: dict[str, Callable[[], object]] = {"ours": lambda: pool.collect(run.ratio, steps)}
    variants |= {name: lambda loop=loop: loop.collect(steps) for name, loop in naive.items()}
    times = interleave(variants, rounds=max(5, options.rounds // 2), slot_s=0.5)
    for loop in naive.values():
        loop.envs.close()
    pool.close()
    run.close()
    best = min(naive, key=lambda name: times[name])
    yield Figure("rollout, 40 envs, chunk 4", "2 processes", best, times["ours"], times[best], 3.2)


@case
def iteration(options: argparse.Namespace) -> Iterator[Figure]:
    """One whole DPPO iteration: 125 chunk steps of 40 environments, 5 epochs of one 50,000-row minibatch."""
    steps = 125
    run, program = dppo_run(2, options.threads, steps), reference()
    naive = NaiveRollout(program, gymnasium.vector.SyncVectorEnv)

    def peer() -> None:
        data = naive.collect(steps)
        torch.set_num_threads(options.threads)
        state, chain = data["state"].flatten(0, 1), data["chain"].flatten(0, 1)
        with torch.no_grad():
            value = program.critic(state)
        old = program.chain_log_prob(state, chain)
        returns = data["reward"].flatten().float() + 0.99 * value
        for _ in range(5):
            index = torch.randperm(len(state) * FT)[:50_000]
            row, step = index // FT, index % FT
            program.update(
                state[row], chain[row, step], chain[row, step + 1], step, old[row, step],
                (returns - value)[row], returns[row],
            )  # fmt: skip
        torch.set_num_threads(1)

    times = interleave({"ours": lambda: run.advance(), "peer": peer}, rounds=3, slot_s=0.1)
    naive.envs.close()
    run.close()
    yield Figure(
        "whole DPPO iteration",
        f"2 processes, {options.threads} threads",
        "reference style",
        times["ours"],
        times["peer"],
        3.5,
    )


# -- command --------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """Describe where the figures come from."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "mujoco": mujoco.__version__,
        "gymnasium": gymnasium.__version__,
    }


def main() -> int:
    """Run the chosen cases and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="gradient threads of both sides")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{'case':<28}{'ours':>12}{'peer':>12}{'ratio':>8}{'floor':>7}  against", flush=True)
    figures: list[Figure] = []
    for name in options.cases or CASES:
        for figure in CASES[name](options):
            figures.append(figure)
            verdict = "" if figure.ok else "  MISSED"
            print(
                f"{figure.case:<28}{1e3 * figure.ours_s:>9.3f} ms{1e3 * figure.peer_s:>9.3f} ms"
                f"{figure.ratio:>8.2f}{figure.floor:>7.1f}  {figure.peer}{verdict}",
                flush=True,
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "figures": [figure.row() for figure in figures]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(options.gate and not all(figure.ok for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
