"""The Adroit door from 25 human demonstrations: a clone, beside what replaying the demonstrations achieves.

    python -m benchmarks.studies.door --dataset door-human.hdf5              clones a policy first
    python -m benchmarks.studies.door --dataset door-human.hdf5 --policy runs/door
    python -m benchmarks.studies.door --report                               the page from what is there

The file is a D4RL file with the starts of its episodes (docs/environments.md#adroit). Demonstrations are
replayed open loop from their own starts; the clone plays 100 episodes from starts that the task draws, and
100 from those of the demonstrations. The numbers are written to docs/results/door/door.json, and the page
docs/results/door.md is made of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from burnish.runs.locate import locate
from envs.datasets import read_dataset
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.tasks.adroit.tasks import AdroitDoor

EPISODES, LIMIT = 100, 300  # of an evaluation; control steps, as long as the longest demonstration
RECIPE = (
    *("algo=bc", "env=adroit-door", f"env.max_episode_steps={LIMIT}"),
    *("process=diffusion", "process.prediction=x0", "policy.horizon=16", "policy.act_steps=8"),
    *("backbone.width=256", "algo.steps=15000", "algo.batch_size=128", "algo.validation_fraction=0.0"),
)
"""How the policy is cloned: chunks of 0.16 s, of which half is executed."""


def replay(data: EpisodeDataset, dataset: str) -> list[bool]:
    """Execute the actions of every demonstration from its own start; returns where the door was opened."""
    vector = AdroitDoor(max_episode_steps=LIMIT, starts=dataset).make_vector(1)
    solved = []
    for i in range(data.num_episodes):
        first, end = data.episode_start[i : i + 2].tolist()
        vector.reset([i])
        solved.append(bool(vector.step_chunk(data.actions[None, first:end].numpy()).success[0]))
    return solved


def measure(options: argparse.Namespace) -> Path:
    """Replay, clone and evaluate; returns the JSON file."""
    data = read_dataset(options.dataset)
    run = options.policy or options.root / "cloned"
    if not options.policy:
        once.trained(run, *RECIPE, dataset=options.dataset)
    policy = locate(run, "policy").load()
    results: dict[str, Any] = {"replay": replay(data, options.dataset)}
    for name, starts in (("drawn", None), ("recorded", options.dataset)):
        task = AdroitDoor(max_episode_steps=LIMIT, starts=starts)
        found = evaluate(policy, task, EvaluationSettings(episodes=EPISODES), num_workers=options.workers)
        results[name] = {key: [float(v) for v in found.values(key)] for key in ("success", "return")}
        print(f"{name}: {np.mean(results[name]['success']):.2f}", flush=True)
    content = {
        "frames": data.num_frames,
        "beyond": float((data.actions.abs() > 1).float().mean()),
        "results": results,
    }
    return pages.keep("door", "door", content)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = f"""`python -m benchmarks.studies.door --dataset door-human.hdf5`: 25 demonstrations of people
who opened the Adroit door, cloned by diffusion with x0 prediction on chunks of 16 steps, of which 8 are
executed (`{" ".join(RECIPE)}`).

- *replay*: the recorded actions, open loop, each demonstration from its own start. They were recorded with an
  older simulator.
- *drawn starts*: the clone where the task draws the place of the door and the hand starts at rest.
  Demonstrations begin otherwise: the arm has moved, and some doors stand where the task never puts one.
- *recorded starts*: the clone where the demonstrations began, each start four times (`env.starts`); the
  interval is over episodes, and does not speak of other starts.

One policy, cloned with one seed."""


def report() -> Path:
    """Write the page."""
    content = pages.kept("door", advice="give --dataset first")[0]
    results = content["results"]
    rows = [("replay", len(results["replay"]), pages.success(results["replay"]), "")]
    for name in ("drawn", "recorded"):
        found, mean = results[name]["success"], f"{np.mean(results[name]['return']):.0f}"
        rows.append((f"clone, {name} starts", len(found), pages.success(found), mean))
    lines = ["# Adroit door", "", INTRODUCTION, ""]
    lines += pages.table(("what", "episodes", "success", "mean return"), rows)
    lines += [
        "",
        f"95 % Wilson intervals; {LIMIT} steps at most. The file has {content['frames']:,} steps; "
        f"{100 * content['beyond']:.1f} % of its action entries exceed ±1 and are clipped when executed.",
    ]
    return pages.write("door", lines + pages.origin("door", content))


def main() -> None:
    """Run the study."""
    parser = study_parser(__doc__, root="runs/door", workers=1)
    parser.add_argument("--dataset", help="door-human.hdf5")
    parser.add_argument("--policy", help="a run or policy directory to evaluate; default: cloned first")
    options = parser.parse_args()
    if not options.report:
        if options.dataset is None:
            parser.error("give --dataset=<door-human.hdf5>, or --report.")
        measure(options)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
