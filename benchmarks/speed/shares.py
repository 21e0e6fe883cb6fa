"""Where the processor time of an iteration goes: of PPO with small networks, of DPPO, and of DPPO on images.

Also that of an evaluation of 20 episodes on Hopper, by a policy that is cloned from a file first, and of
steps of PRDC near the data of a file, which are those of TD3+BC and a search.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.shares [ppo] [dppo] [images] [--rounds 3]
    OMP_NUM_THREADS=1 python -m benchmarks.speed.shares evaluation prdc --dataset FILE

writes docs/results/speed/shares.json, and tables in docs/speed.md and docs/scale.md. Time is processor time
(user and system) of the learner and its workers together. A part is counted without the parts inside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from algos import optim
from algos.base import Setup
from algos.offline import td3_update
from algos.offline.neighbors import ListSearch
from algos.onpolicy import advantages, ppo_update
from algos.onpolicy.loop import OnPolicy
from algos.prdc import PrdcConfig
from algos.training.memory import keep_freed_memory
from algos.training.provenance import describe_environment
from algos.transitions import TransitionTable
from benchmarks.options import parser
from benchmarks.pages import keep, processor, record, replace_block, table
from benchmarks.speed.cases_evaluating import EPISODES, SEED, cloned
from benchmarks.speed.cases_offline import BLOCK, POOL, list_search_of, near_the_data, ours_of, stand_still
from benchmarks.speed.cases_peers import ENVS, ppo_run
from benchmarks.speed.sides import dppo_run, our_policy, unit_statistics
from envs.datasets import read_dataset
from envs.engine import workers
from envs.engine.vector import ChunkVector
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.make import env as make_env
from envs.rollouts import rollout
from envs.rollouts.collector import Collector
from envs.rollouts.player import EpisodeRunner
from policies.build import build_policy
from policies.networks.native import Stack

WORKERS, DPPO_STEPS = 2, 125
OF_FILE = {"evaluation": "an evaluation", "prdc": "1,000 steps"}
PAGES = {case: "docs/speed.md" for case in ("ppo", "dppo", *OF_FILE)} | {"images": "docs/scale.md"}
REST = "the rest"


class Stopwatch:
    """Processor time of this process by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inside, self._since = [REST], time.process_time()

    def times(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of a function of a module or an object as a part."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self._inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self._inside.pop()

        if isinstance(owner, type):
            setattr(owner, name, timed)
        else:
            owner.__dict__[name] = timed

    def turn(self) -> None:
        """Add the time since the last turn to the part that runs."""
        now = time.process_time()
        self.spent[self._inside[-1]] = self.spent.get(self._inside[-1], 0.0) + now - self._since
        self._since = now

    def read(self) -> dict[str, float]:
        """Return the seconds since the last reading by part."""
        self.turn()
        read, self.spent = self.spent, {}
        return read


class TimedCollector(Collector):
    """A collector that knows what its time was spent on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch, self._actor = Stopwatch(), None
        self._watch.times(self._vector, "images", "drawing images")
        self._watch.times(self._vector, "step_chunk", "simulation")
        self._watch.times(workers, "send", "pipes")

    def collect(self, actor: Any, num_steps: int, reset: bool) -> dict[str, Any]:
        """Collect as ever, with the parts of acting."""
        self._watch.times(actor.policy, "encode", "encoding to act")
        self._watch.times(actor, "act", "acting, without encoding")
        return super().collect(actor, num_steps, reset)

    def shares(self) -> dict[str, float]:
        """Return the seconds of this process by part."""
        return self._watch.read()


def image_run() -> OnPolicy:
    """Return DPPO on avoid by sight, 8 environments in 2 workers, from a policy that knows nothing."""
    from burnish.config.schema import compose_config  # the other case needs no configuration

    cloning = compose_config("train", ["experiment=avoid_moved_bc", "dataset=demonstrations"])
    tuning = compose_config("train", ["experiment=avoid_moved_dppo", "init=policy"])
    sizes = {"obs_dim": cloning.env.spec.obs_dim, "action_dim": cloning.env.spec.action_dim}
    policy = build_policy(
        cloning.policy_config(), **sizes, images=cloning.env.images, statistics=unit_statistics(**sizes)
    )
    setup = Setup(env=tuning.env, init=policy, num_workers=WORKERS, num_threads=1)
    run: OnPolicy = replace(tuning.algo, num_envs=ENVS).build(setup)
    return run


def watched(run: OnPolicy, in_workers: bool) -> Stopwatch:
    """Return a stopwatch of the parts of a run in this process."""
    watch, learner = Stopwatch(), run.learner
    watch.times(learner, "update", "update, rest")
    watch.times(learner, "actor_gradient", "gradient of the actor")
    watch.times(learner, "critic_gradient", "gradient of the critic")
    watch.times(ppo_update, "take_step", "optimisers, clipping")
    watch.times(ppo_update, "clipped", "optimisers, clipping")
    watch.times(run, "experience", "advantages")
    watch.times(advantages, "encode", "encoding for the update")
    watch.times(workers, "send", "pipes")
    watch.times(workers, "receive", "pipes")
    if not in_workers:
        (collector,) = run.pool._workers._objects  # type: ignore[attr-defined]
        watch.times(run, "collect", "collecting, rest")
        watch.times(run.ratio, "act", "acting")
        watch.times(collector._vector, "step_chunk", "simulation")
    return watch


def iterations(case: str, rounds: int) -> Iterator[Mapping[str, float]]:
    """Yield the seconds of iterations by part, after one that warms up."""
    from benchmarks.speed import shares  # workers import classes by their names

    if by_workers := case != "ppo":
        rollout.Collector = shares.TimedCollector  # type: ignore[misc]
    make = {"ppo": ppo_run, "dppo": lambda: dppo_run(WORKERS, 1, DPPO_STEPS), "images": image_run}[case]
    run = make()
    watch, calls = watched(run, by_workers), [()] * len(run.pool._workers)
    for turn in range(rounds + 1):
        run.advance()
        spent = watch.read()
        for part in run.pool._workers.call("shares", calls) if by_workers else []:
            for name, seconds in part.items():
                spent[name] = spent.get(name, 0.0) + seconds
        watch.read()
        if turn:
            yield spent
    run.close()


def rounds_of(watch: Stopwatch, work: Callable[[], object], rounds: int) -> Iterator[Mapping[str, float]]:
    """Yield the seconds of each round of some work by part, after one that warms up."""
    for turn in range(rounds + 1):
        watch.read()
        work()
        if turn:
            yield watch.read()


def evaluations(dataset: Path, rounds: int) -> Iterator[Mapping[str, float]]:
    """Return the seconds of evaluations by part."""
    net, task = cloned(dataset), make_env("hopper")
    policy = our_policy(net, noise_clip=None)
    watch = Stopwatch()
    watch.times(policy, "act", "deciding")
    watch.times(EpisodeRunner, "noise", "drawing noise")
    watch.times(ChunkVector, "step_chunk", "simulation")
    settings = EvaluationSettings(episodes=EPISODES, first_seed=SEED, num_envs=EPISODES)
    return rounds_of(watch, lambda: evaluate(policy, task, settings), rounds)


def offline_steps(dataset: Path, rounds: int) -> Iterator[Mapping[str, float]]:
    """Return the seconds of steps of PRDC by part, near the data and with all lists made."""
    run = PrdcConfig().build(Setup(dataset=read_dataset(dataset), seed=0))
    pool = torch.randperm(len(run.table), generator=torch.Generator().manual_seed(5))[:POOL]
    list_search_of(run).make_lists(pool)
    near_the_data(run)
    stand_still(run.learner)
    block, watch = ours_of(run, pool), Stopwatch()
    watch.times(Stack, "run", "networks, forwards")
    watch.times(Stack, "gradients", "networks, backwards")
    watch.times(optim, "take_step", "optimisers")
    watch.times(td3_update, "polyak", "target copies")
    watch.times(ListSearch, "nearest", "search")
    watch.times(TransitionTable, "gather", "gathering")
    watch.times(run.learner, "draw", "drawing")

    def steps() -> None:
        for _ in range(1000 // BLOCK):
            block()

    return rounds_of(watch, steps, rounds)


def main() -> None:
    """Measure the cases and write their tables."""
    asked = parser(__doc__)
    asked.add_argument("cases", nargs="*", choices=[*PAGES, []])
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--dataset", type=Path, help="of Hopper, for the evaluation and prdc")
    options = asked.parse_args()
    cases = options.cases or [case for case in PAGES if case not in OF_FILE or options.dataset]
    if options.dataset is None and (given := [case for case in cases if case in OF_FILE]):
        asked.error(f"{' and '.join(given)} needs --dataset FILE")
    torch.set_num_threads(1)
    keep_freed_memory()
    content = record("speed", "shares")
    for case in cases:
        if case in OF_FILE:
            measure = {"evaluation": evaluations, "prdc": offline_steps}[case]
            rows = list(measure(options.dataset, options.rounds))
        else:
            rows = list(iterations(case, options.rounds))
        medians = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[0]}
        where = processor(describe_environment())
        content[case] = {"seconds": medians, "processor": where, "rounds": options.rounds}
        ranked, total = sorted(medians.items(), key=lambda item: -item[1]), sum(medians.values())
        told = table(
            ("part", "ms", "share"),
            [(name, f"{1e3 * s:.0f}", f"{100 * s / total:.1f} %") for name, s in ranked if s > 0],
        )
        given, unit = " --dataset FILE" if case in OF_FILE else "", OF_FILE.get(case, "an iteration")
        command = f"`python -m benchmarks.speed.shares {case}{given} --rounds {options.rounds}`"
        head = f"{command}, {where}, {unit} of {1e3 * total:.0f} ms:"
        replace_block(PAGES[case], f"shares of {case}", [head, "", *told])
        print(*told, sep="\n", flush=True)
    keep("speed", "shares", content)


if __name__ == "__main__":
    main()
