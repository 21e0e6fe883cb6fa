"""Rollout workers as Ray actors: how fast they are beside processes, and what a kill changes.

    python -m benchmarks.fleet [--rounds 7] [--kills 20]

needs the extra `cluster`; it writes docs/results/scale/fleet.json and its lines in docs/scale.md. The two
kinds of workers collect the same rollouts in turns. Then runs of DPPO on `avoid`, each with one worker killed
by SIGKILL in the middle of a ticket, are compared with an undisturbed one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algos.base import Setup
from algos.dppo import DppoConfig
from algos.training.ranks import digest
from algos.training.serialization import to_plain
from benchmarks.pages import keep, kept, replace_block
from benchmarks.speed.sides import dppo_run
from envs.make import env as make_env
from envs.rollouts.fleet import LOCAL, Fleet, RayFleet
from envs.rollouts.rollout import RolloutPool
from policies.build import build_policy
from policies.normalizer import box_statistics
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion

PAGE = "docs/scale.md"
STEPS, ENVS, ITERATIONS = 25, 40, 3


class Deadly:
    """Acts as another actor does, unless there is a file: then it removes it and kills its process."""

    def __init__(self, actor: Any, file: Path) -> None:
        self.actor, self.file = actor, file

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """See `envs.rollouts.rollout.Actor`."""
        found = self.actor.act(obs, generator)
        if self.file.exists():
            self.file.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def speed(rounds: int) -> dict[str, float]:
    """Return median seconds of a collection on Hopper, by kind of workers; rollouts are equal."""
    actor = dppo_run(0, 1, 1).ratio.on_cpu()
    fleets: dict[str, Fleet] = {"local": LOCAL, "ray": RayFleet()}
    pools = {
        name: RolloutPool(make_env("hopper"), num_envs=ENVS, num_workers=2, fleet=fleet)
        for name, fleet in fleets.items()
    }
    times: dict[str, list[float]] = {name: [] for name in pools}
    for number in range(rounds + 1):
        found = {}
        for name, pool in pools.items():
            start = time.perf_counter()
            found[name] = pool.collect(actor, STEPS)
            if number:  # the first starts the actors
                times[name].append(time.perf_counter() - start)
        if not torch.equal(found["local"].obs["state"], found["ray"].obs["state"]):
            raise SystemExit("the two kinds of workers collected different rollouts")
    for pool in pools.values():
        pool.close()
    return {name: statistics.median(values) for name, values in times.items()}


def final_state(kill_at: int | None, file: Path) -> str:
    """Return the digest of a run's state after a few iterations, in one of which a worker is killed."""
    spec = make_env("avoid").spec
    one, low, high = torch.ones(spec.obs_dim), torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    policy = build_policy(
        PolicyConfig(process=VPDiffusion(num_levels=5), horizon=4, act_steps=4),
        obs_dim=spec.obs_dim,
        action_dim=spec.action_dim,
        statistics={"state": box_statistics(-one, one), "action": box_statistics(low, high)},
    )
    config = DppoConfig(num_envs=4, steps_per_iteration=10, tuned_steps=3, batch_size=60, update_epochs=2)
    run = config.build(Setup(env=make_env("avoid"), init=policy, num_workers=2, fleet=RayFleet()))
    collect = run.pool.collect
    run.pool.collect = lambda actor, *rest, **options: collect(Deadly(actor, file), *rest, **options)
    for iteration in range(ITERATIONS):
        if iteration == kill_at:
            file.touch()
        run.advance()
    if file.exists():
        raise SystemExit("nobody was killed")
    state = digest(to_plain(run.state_dict()))
    run.close()
    return state


def kills(count: int) -> dict[str, int]:
    """Return how many runs with a killed worker end in the state of the run without."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kill"
        expected = final_state(None, file)
        same = [final_state(number % ITERATIONS, file) == expected for number in range(count)]
    return {"kills": count, "equal": sum(same)}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the text of the page."""
    took, end = found["seconds"], found["kills"]
    command = f"`python -m benchmarks.fleet --rounds {found['rounds']} --kills {end['kills']}`"
    return [
        f"{command}, {os.cpu_count()} cores, load {found['load']:.1f}, two workers:",
        "",
        f"- {STEPS} chunks in each of {ENVS} Hopper environments: {1000 * took['local']:.0f} ms with "
        f"`fleet=local`, {1000 * took['ray']:.0f} ms with `fleet=ray`, ratio "
        f"**{took['ray'] / took['local']:.2f}** (medians of turns; rollouts equal bit for bit);",
        f"- **{end['equal']} of {end['kills']}** runs of DPPO in which a worker was killed in the middle of "
        "a ticket end in the same state as the run without, bit for bit.",
    ]


def main() -> None:
    """Measure, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = {"rounds": options.rounds, "load": load, "seconds": speed(options.rounds)}
    keep("scale", "fleet", found | {"kills": kills(options.kills)}, indent=1)
    replace_block(PAGE, "fleet", lines(kept("scale", "fleet.json")[0]))


if __name__ == "__main__":
    from benchmarks import fleet as importable  # processes get its classes by this name

    importable.main()
