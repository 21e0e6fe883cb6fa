"""Control steps per second of DPPO with MuJoCo's worlds on processor cores and mujoco-warp's on a device.

    python -m benchmarks.worlds [--init DIR] [--rounds 3] [--workers 16] [--from FILE]
    python -m benchmarks.worlds --run DIR BEFORE AFTER

needs the extra `warp`; it writes docs/results/scale/worlds.json and the table in docs/images.md; with
`--from`, from the file of a run on another machine. Each case is a run of DPPO by a policy that acts on the
device. `--init` is a policy of hopper; others are untrained. `--run` records a directory with a run's
config.yaml, environment.json and metrics.jsonl, and the files of evaluations before and after it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from algos.base import Setup
from algos.dppo import DppoConfig
from benchmarks.options import parser
from benchmarks.pages import RESULTS, estimate, keep, record, replace_block, table, versions, without_folders
from benchmarks.speed.sides import unit_statistics
from envs.evaluation.intervals import Interval
from envs.make import env as make_env
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.storage.policy_folder import load_policy

PAGE = "docs/images.md"
PACKAGES = ("mujoco", "mujoco-warp", "warp-lang", "torch")
CHUNKS = 32_768  # of an iteration
TASKS: dict[str, tuple[int, ...]] = {"hopper": (256, 1024, 4096), "halfcheetah": (1024,), "avoid": (1024,)}


def untrained(task: str) -> Policy:
    """Return a policy of a task with the settings of its clones."""
    spec, config = make_env(task).spec, PolicyConfig(process=VPDiffusion(num_levels=20), horizon=4)
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim}
    return build_policy(config, **sizes, statistics=unit_statistics(**sizes))


def iterations(
    task: str, engine: str, num_envs: int, workers: int, init: Policy, rounds: int
) -> dict[str, float]:
    """Return seconds of collection and update, and control steps, of an iteration: medians."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = Setup(env=make_env(task, engine=engine), init=init, num_workers=workers, device=device)
    config = DppoConfig(num_envs=num_envs, steps_per_iteration=CHUNKS // num_envs, target_kl=None)
    run = config.build(given)
    seen = []
    for _ in range(1 + rounds):
        before = run.progress
        metrics = run.advance()
        seen.append([metrics["time/rollout_s"], metrics["time/update_s"], float(run.progress - before)])
    run.close()
    columns = zip(*seen[1:], strict=True)
    return dict(zip(("rollout_s", "update_s", "steps"), map(statistics.median, columns), strict=True))


def measure(init: Path | None, rounds: int, workers: int) -> None:
    """Measure every case; each is kept as it ends."""
    rows = []
    for task, widths in TASKS.items():
        policy = load_policy(init) if init and task == "hopper" else untrained(task)
        for num_envs in widths:
            for engine, processes in (("exact", workers), ("warp", 0)):
                found = iterations(task, engine, num_envs, processes, policy, rounds)
                rows.append({"task": task, "num_envs": num_envs, "engine": engine, **found})
                sys.stdout.write(f"{rows[-1]}\n")
                sys.stdout.flush()
                keep("scale", "worlds", {"rounds": rounds, "workers": workers, "rows": rows}, indent=1)


def lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    machine = found["environment"]
    command = f"python -m benchmarks.worlds --init <clone> --rounds {found['rounds']}"
    title = (
        f"`{command} --workers {found['workers']}`: {machine['accelerator']} beside "
        f"{machine['cpu_count']} CPU cores, {versions(found, PACKAGES)}."
    )
    head = ["task", "`num_envs`", "`env.engine`", "steps per second, collection", "the same, whole iteration"]
    cells = []
    for row in found["rows"]:
        rollout = row["steps"] / row["rollout_s"]
        whole = row["steps"] / (row["rollout_s"] + row["update_s"])
        cells.append(
            [f"`{row['task']}`", str(row["num_envs"]), row["engine"], f"{rollout:,.0f}", f"{whole:,.0f}"]
        )
    return [title, "", *table(head, cells)]


def keep_run(run: Path, before: Path, after: Path) -> None:
    """Keep the curve of a run, (seconds, steps, mean return of ended episodes), and its evaluations."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("time/elapsed_s", "step", "rollout/return")
    found = {
        "curve": [[row[name] for name in names] for row in rows],
        "config": without_folders(OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))),  # type: ignore[arg-type]
        "environment": json.loads((run / "environment.json").read_text()),
        **{name: json.loads(file.read_text()) for name, file in (("before", before), ("after", after))},
    }
    (RESULTS / "scale" / "worlds_run.json").write_text(json.dumps(found) + "\n")


def run_lines(found: dict[str, Any]) -> list[str]:
    """Return the sentence and the table of a recorded run."""
    curve = found["curve"]
    returns = [found[name]["summary"]["return"] for name in ("before", "after")]
    old, new = (estimate(Interval(**one), ",.0f", to="–") for one in returns)
    seconds, steps, _ = curve[-1]
    accelerator, episodes = found["environment"]["accelerator"], found["after"]["summary"]["episodes"]
    sentence = (
        f"That command on one {accelerator}, one seed, {steps / 1e6:.1f} million steps in {seconds:.0f} "
        f"seconds: return {old} → {new} over {episodes} episodes of MuJoCo itself."
    )
    marks = [m for m in range(15, int(seconds) + 1, 15)]
    at = [max((row for row in curve if row[0] <= mark), key=lambda row: row[0]) for mark in marks]
    return [
        sentence,
        "",
        *table(["seconds", *map(str, marks)], [["return in training", *(f"{row[2]:,.0f}" for row in at)]]),
    ]


def main() -> None:
    """Measure, keep, write."""
    asked = parser(__doc__)
    asked.add_argument("--init", type=Path, help="directory of a policy of hopper")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked.add_argument("--from", dest="file", help="measurement of another machine")
    asked.add_argument("--run", type=Path, nargs=3, help="record a run: its directory, two evaluations")
    options = asked.parse_args()
    if options.run:
        keep_run(*options.run)
    elif options.file:
        shutil.copy(options.file, RESULTS / "scale" / "worlds.json")
    else:
        measure(options.init, options.rounds, options.workers)
    replace_block(PAGE, "worlds", lines(record("scale", "worlds")))
    replace_block(PAGE, "worlds run", run_lines(record("scale", "worlds_run")))


if __name__ == "__main__":
    main()
