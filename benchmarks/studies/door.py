"""The Adroit door from 25 human demonstrations: clones, beside what replaying the demonstrations achieves.

    python -m benchmarks.studies.door --dataset door-human.hdf5              clones what is not there first
    python -m benchmarks.studies.door --report                               the page from what is there

The file is a D4RL file with the starts of its episodes (docs/environments.md#adroit). Demonstrations are
replayed open loop from their own starts; every clone plays 100 episodes from starts that the task draws, and
100 from those of the demonstrations. Every clone leaves one JSON file in docs/results/door/; a clone whose
file is there is not repeated. The page docs/results/door.md is made of them.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from benchmarks.studies.rows import describe_dataset, episode_columns
from envs.datasets import read_dataset
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.tasks.adroit.tasks import AdroitDoor

PAGE, EPISODES, LIMIT = "door", 100, 300  # control steps, as long as the longest demonstration
STEPS, BATCH = (4_000, 11_000), 128  # gradient steps: few, and as `experiment=auto` chooses; windows
RECIPE = (
    *("algo=bc", "env=adroit-door", f"env.max_episode_steps={LIMIT}"),
    *("process=diffusion", "process.prediction=x0", "policy.horizon=8", "policy.act_steps=8"),
    *("backbone.width=512", f"algo.batch_size={BATCH}", "algo.validation_fraction=0.0"),
)
"""How policies are cloned: what `experiment=auto` chooses, but for the gradient steps and the clip."""


def replay(data: EpisodeDataset, dataset: str) -> list[bool]:
    """Execute the actions of every demonstration from its own start; returns where the door was opened."""
    vector = AdroitDoor(max_episode_steps=LIMIT, starts=dataset).make_vector(1)
    solved = []
    for i in range(data.num_episodes):
        first, end = data.episode_start[i : i + 2].tolist()
        vector.reset([i])
        solved.append(bool(vector.step_chunk(data.actions[None, first:end].numpy()).success[0]))
    return solved


def run_one(steps: int, seed: int, *, dataset: str, root: Path, workers: int) -> Path:
    """Clone and evaluate; returns the JSON file."""
    name = f"steps{steps}-seed{seed}"
    if (target := pages.RESULTS / PAGE / f"{name}.json").exists():
        return target
    run = once.trained(root / name, *RECIPE, f"algo.steps={steps}", dataset=dataset, seed=seed)
    policy, data = run.load_policy(), read_dataset(dataset)
    content: dict[str, Any] = {
        "steps": steps, "seed": seed, "dataset": describe_dataset(Path(dataset)),
        "configuration": pages.configuration(run.directory),
        "replay": replay(data, dataset), "beyond": float((data.actions.abs() > 1).float().mean()),
    }  # fmt: skip
    for starts, file in (("drawn", None), ("recorded", dataset)):
        task = AdroitDoor(max_episode_steps=LIMIT, starts=file)
        found = evaluate(policy, task, EvaluationSettings(episodes=EPISODES), num_workers=workers)
        content[starts] = episode_columns(found)
        print(f"{name}, {starts}: {found.values('success').mean():.2f}", flush=True)
    return pages.keep(PAGE, name, content)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = f"""`python -m benchmarks.studies.door --dataset door-human.hdf5`: 25 demonstrations of people
who opened the Adroit door, cloned by diffusion with x0 prediction on chunks of 8 steps
(`{" ".join(RECIPE)}`), with few gradient steps and with as many as `experiment=auto` chooses (`algo.steps`).
[What follows](../new_task.md#few-demonstrations-of-people). The recipe was chosen with training seeds 0 to 2,
on the first 50 episodes from drawn starts.

- *replay*: the recorded actions, open loop, each demonstration from its own start. They were recorded with an
  older simulator.
- *drawn starts*: the clone where the task draws the place of the door and the hand starts at rest.
  Demonstrations begin otherwise: the arm has moved, and some doors stand where the task never puts one.
- *recorded starts*: the clone where the demonstrations began, each start four times (`env.starts`).

{pages.INTERVALS}"""

COLUMNS = ("steps", "passes", "seed", "drawn starts", "mean return", "recorded starts", "mean return")


def row(steps: int, clones: list[Any], seed: str) -> list[str]:
    """Return the cells of one clone, or of all seeds of one length."""
    cells = [f"{steps:,}", f"{steps * BATCH / clones[0]['dataset']['steps']:.0f}", seed]
    for starts in ("drawn", "recorded"):
        found = {name: np.array([one[starts][name] for one in clones]) for name in ("success", "return")}
        cells += [pages.success(found["success"]), f"{found['return'].mean():.0f}"]
    return cells


def report() -> Path:
    """Write the page."""
    found, rows = pages.kept(PAGE, advice="give --dataset first"), []
    for steps, clones in sorted(pages.grouped(found, lambda one: one["steps"]).items()):
        clones.sort(key=lambda one: one["seed"])
        rows += [row(steps, [one], str(one["seed"])) for one in clones]
        if len(clones) > 1:
            rows.append([f"**{cell}**" for cell in row(steps, clones, "all")])
    first = found[0]
    data, replayed = first["dataset"], first["replay"]
    lines = ["# Adroit door", "", INTRODUCTION, "", *pages.table(COLUMNS, rows), ""]
    lines += [
        f"Replay opens the door in {pages.success(replayed)} of the {len(replayed)} demonstrations. "
        f"A clone plays {EPISODES} episodes per kind of start, of {LIMIT} steps at most. "
        f"The file has {data['steps']:,} steps; {100 * first['beyond']:.1f} % of its action entries exceed "
        "±1 and are clipped when executed.",
        "",
        f"Commits: {pages.commits(found)}.",
    ]
    return pages.write(PAGE, lines + pages.origin(PAGE, first))


def main() -> None:
    """Run the study."""
    parser = study_parser(__doc__, seeds="3,4,5", root="runs/door", workers=1)
    parser.add_argument("--dataset", help="door-human.hdf5")
    options = parser.parse_args()
    if not options.report:
        if options.dataset is None:
            parser.error("give --dataset=<door-human.hdf5>, or --report.")
        values = {"dataset": options.dataset, "root": options.root, "workers": options.workers}
        for seed, steps in product(options.seeds, STEPS):
            run_one(steps, seed, **values)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
