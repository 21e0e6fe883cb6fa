"""Train the actors whose walking `burnish collect` records, and put the chosen checkpoints into `assets`.

    python -m benchmarks.studies.actors                       # hopper, walker2d and halfcheetah
    python -m benchmarks.studies.actors hopper --run runs/x   # choose from a run of experiment=hopper_actor

A run evaluates every checkpoint on the same episodes. The expert is the one with the highest mean return;
medium is the one before it whose mean return is nearest to a third of that. A table of both is printed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from algos.training.run_directory import RunDirectory
from benchmarks.options import parser
from burnish.commands.train import train
from burnish.config.overrides import RunContext
from burnish.config.schema import compose_config
from burnish.console import output, table
from envs.evaluation.evaluate import Evaluation
from policies.storage.policy_folder import load_policy, read_config, save_policy

TASKS = ("hopper", "walker2d", "halfcheetah")
MEDIUM = 1 / 3
ACTORS = Path(__file__).resolve().parents[2] / "assets" / "actors"


def main() -> None:
    """Train or take runs, choose, save, tell."""
    asked = parser(__doc__)
    asked.add_argument("tasks", nargs="*", default=TASKS, help="which of them; all by default")
    asked.add_argument("--run", type=Path, help="choose from this run instead of training (one task)")
    options = asked.parse_args()
    if options.run and len(options.tasks) != 1:
        asked.error("--run needs exactly one task, whose run it is.")
    rows = []
    for task in options.tasks:
        run = options.run or trained(task)
        returns = evaluated(run)
        for tier, step in choose(returns).items():
            keep(run, step, ACTORS / task / tier, returns[step])
            values = returns[step]
            rows.append((task, tier, step, f"{values.mean():.0f}", f"{values.std():.0f}"))
    output().print(table("", ("task", "tier", "env steps", "mean return", "deviation"), rows))


def trained(task: str) -> Path:
    """Run the experiment of a task, or continue the run that is there; returns its directory."""
    place = Path("runs") / "actors" / task
    where = [f"resume={place}"] if (place / "config.yaml").exists() else [f"experiment={task}_actor"]
    train(compose_config("train", where), RunContext(place))
    return place


def evaluated(run: Path) -> dict[int, np.ndarray]:
    """Return the returns of every checkpoint by its step, from the evaluations that the run made of them."""
    directory = RunDirectory.open(run)
    files = {one.step: one.path for one in directory.evals() if one.is_of_training}
    return {
        step: Evaluation.from_json(files[step].read_text()).values("return")
        for step in directory.checkpoints()
        if step in files  # a run that was stopped leaves a checkpoint that it did not evaluate
    }


def choose(returns: dict[int, np.ndarray]) -> dict[str, int]:
    """Return the steps of expert and medium.

    Raises:
        SystemExit: If there is no checkpoint, or none before the best.
    """
    if not returns:
        raise SystemExit("the run has no evaluated checkpoint: train it with evaluation.episodes > 0.")
    means = {step: float(values.mean()) for step, values in returns.items()}
    expert = max(means, key=lambda step: means[step])
    goal = MEDIUM * means[expert]
    if expert == min(means):
        raise SystemExit(f"the best checkpoint ({expert}) is the first: train longer, or keep more of them.")
    medium = min((step for step in means if step < expert), key=lambda step: abs(means[step] - goal))
    return {"expert": expert, "medium": medium}


def keep(run: Path, step: int, place: Path, returns: np.ndarray) -> None:
    """Copy the policy of a checkpoint, with the experiment and its mean return in the model card."""
    source = RunDirectory.open(run).policy_path(step)
    facts = {"run": f"{place.parent.name}_actor", "mean_return": round(float(returns.mean()))}
    save_policy(load_policy(source), place, provenance=read_config(source)["provenance"] | facts)


if __name__ == "__main__":
    main()
