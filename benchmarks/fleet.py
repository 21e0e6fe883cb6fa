"""Rollout workers as Ray actors: how fast they are beside processes, and what a kill changes.

    python -m benchmarks.fleet [--rounds 7] [--kills 20] [--sleepers 64]

needs the extra `cluster`; it writes docs/results/scale/fleet.json and its lines in docs/scale.md. The two
kinds of workers collect the same rollouts in turns. Then runs of DPPO on `avoid`, each with one worker killed
by SIGKILL in the middle of a ticket, are compared with an undisturbed one. Last, many workers that only sleep
show what a large fleet costs who leads it: tickets per second, how old answers are, what a kill costs.
"""

from __future__ import annotations

import os
import random
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
from benchmarks.options import parser
from benchmarks.pages import keep, record, replace_block
from benchmarks.speed.sides import dppo_run, unit_statistics
from envs.make import env as make_env
from envs.rollouts.fleet import LOCAL, Fleet, RayFleet
from envs.rollouts.rollout import RolloutPool
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion

PAGE = "docs/scale.md"
STEPS, ENVS, ITERATIONS = 25, 40, 3
NAP_S, SECONDS = 0.5, 20.0  # longest nap of a sleeping worker; time that they are led


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
    config = PolicyConfig(process=VPDiffusion(num_levels=5), horizon=4, act_steps=4)
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim}
    policy = build_policy(config, **sizes, statistics=unit_statistics(**sizes))
    algo = DppoConfig(num_envs=4, steps_per_iteration=10, tuned_steps=3, batch_size=60, update_epochs=2)
    run = algo.build(Setup(env=make_env("avoid"), init=policy, num_workers=2, fleet=RayFleet()))
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


class Sleeper:
    """A worker that costs no processor time; its answers are its process and whether it was started anew."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.notify: Any = None

    def nap(self, least_s: float, most_s: float) -> int:
        """Sleep; returns the process."""
        time.sleep(self._random.uniform(least_s, most_s))
        return os.getpid()

    def close(self) -> None:
        """There is nothing to close."""


def sleepers(count: int, seconds: float) -> dict[str, float]:
    """Return how a fleet of sleeping workers is led: free-running tickets, then one killed worker."""
    workers = RayFleet().start(Sleeper, [(seed,) for seed in range(count)], processes=True)
    workers.call("nap", [(0.0, 0.1)] * count)  # all are there
    stored = workers.store((0.1, NAP_S))
    sent = [0] * count  # answers so far, when the ticket was issued
    answers, lags, processes = 0, [], [0] * count

    def issue(index: int) -> None:
        sent[index] = answers
        workers.submit(index, "nap", stored)

    def answered() -> int:
        nonlocal answers
        index, processes[index] = workers.next()
        answers += 1
        lags.append(answers - sent[index])
        return int(index)

    used, start = time.process_time(), time.perf_counter()
    for index in range(count):
        issue(index)
    while time.perf_counter() - start < seconds:
        issue(answered())
    took, used = time.perf_counter() - start, time.process_time() - used
    found = {
        "count": count,
        "nap_s": 0.5 * (0.1 + NAP_S),
        "tickets_per_s": answers / took,
        "lag_median": statistics.median(lags),
        "lag_max": max(lags),
        "leader_share": used / took,
    }
    os.kill(processes[0], signal.SIGKILL)
    killed, others = time.perf_counter(), 0
    while (index := answered()) != 0:
        issue(index)
        others += 1
    found |= {"recovery_s": time.perf_counter() - killed, "meanwhile": others}
    workers.close()
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Return the text of the page."""
    took, end, asleep = found["seconds"], found["kills"], found["sleepers"]
    options = f"--rounds {found['rounds']} --kills {end['kills']} --sleepers {asleep['count']:.0f}"
    command = f"`python -m benchmarks.fleet {options}`"
    return [
        f"{command}, {os.cpu_count()} cores, load {found['load']:.1f}, two workers:",
        "",
        f"- {STEPS} chunks in each of {ENVS} Hopper environments: {1000 * took['local']:.0f} ms with "
        f"`fleet=local`, {1000 * took['ray']:.0f} ms with `fleet=ray`, ratio "
        f"**{took['ray'] / took['local']:.2f}** (medians of turns; rollouts equal bit for bit);",
        f"- **{end['equal']} of {end['kills']}** runs of DPPO in which a worker was killed in the middle of "
        "a ticket end in the same state as the run without, bit for bit;",
        f"- {asleep['count']:.0f} workers that sleep {asleep['nap_s']:.2f} s a ticket on average: "
        f"**{asleep['tickets_per_s']:.0f} tickets per second** of {asleep['count'] / asleep['nap_s']:.0f} "
        f"that they can answer, for {100 * asleep['leader_share']:.0f} % of one core of who leads them; "
        f"between ticket and answer {asleep['lag_median']:.0f} others answer (median; "
        f"{asleep['lag_max']:.0f} at most). The ticket of a killed worker is answered by a new one, "
        f"{asleep['recovery_s']:.1f} s and {asleep['meanwhile']:.0f} answers of the others after the kill.",
    ]


def main() -> None:
    """Measure, keep, write."""
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--kills", type=int, default=20)
    asked.add_argument("--sleepers", type=int, default=64)
    options = asked.parse_args()
    load = os.getloadavg()[0]
    found = {"rounds": options.rounds, "load": load, "seconds": speed(options.rounds)}
    found |= {"kills": kills(options.kills), "sleepers": sleepers(options.sleepers, SECONDS)}
    keep("scale", "fleet", found, indent=1)
    replace_block(PAGE, "fleet", lines(record("scale", "fleet")))


if __name__ == "__main__":
    from benchmarks import fleet as importable  # processes get its classes by this name

    importable.main()
