"""One table: every method under one protocol, from the same cloned policies.

    python -m benchmarks.studies.table avoid                            every method, five seeds
    python -m benchmarks.studies.table avoid --methods dppo,dsrl --seeds 100,101 --jobs 2
    python -m benchmarks.studies.table --report                         the page from what is there

Settings were chosen in other studies (`benchmarks.studies.learning`), on seeds 0 to 9 and their episodes.
Here every training seed is new, and so are the episodes and the noise of evaluations. Methods of a seed begin
with the same clones. One process and one thread train a run, without evaluations on the way; checkpoints are
played afterwards. Each run leaves one JSON file in docs/results/table/; a run whose file is there is not
repeated, one that was stopped goes on. A working copy with changes is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import logging
import resource
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import burnish
from algos.training.metrics import read_jsonl
from algos.training.provenance import describe_environment
from algos.training.run_directory import RunDirectory
from assets import path as asset_path
from benchmarks import pages
from benchmarks.studies import once, table_page
from benchmarks.studies.definitions import STUDIES
from benchmarks.studies.learning import FROM_DATA, OFF_POLICY, describe_dataset, episode_columns, recipe
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.spec import EnvConfig
from policies.storage.checksums import sha256
from policies.storage.policy_folder import WEIGHTS

PAGE = "table"
SEEDS = range(100, 105)
PROTOCOL = {"episodes": 100, "first_seed": 5_000_000, "noise_seed": 1}
"""Of every evaluation: episodes and noise that no setting was chosen on."""
INTERVALS = 30  # of the budget, with a checkpoint after each
SHARES = (2 / 30, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the budget: checkpoints that are played."""


@dataclass(frozen=True)
class Method:
    """How a row is trained."""

    base: str  # experiment of the clone it begins with, or is compared with; overrides after blanks
    tuned: str  # experiment that trains it; overrides after blanks
    budget: int  # environment steps
    has_init: bool = True  # whether it begins with the clone
    has_data: bool = False  # whether it learns from the demonstrations too


def methods_of(study: str) -> dict[str, Method]:
    """Return the methods of a study, with its settings."""
    found, budgets = STUDIES[study], BUDGETS[study]
    return {
        name: Method(
            found.bases.get(name, found.bases["dsrl"]), found.tuned[name], budgets[name in OFF_POLICY],
            name in found.bases, name in FROM_DATA or name not in found.bases,
        )
        for name in CHOSEN[study]
    }  # fmt: skip


BUDGETS = {"avoid": (450_000, 30_000)}
"""Environment steps of a task: of methods that learn from what they just did, and from all they have."""
CHOSEN = {
    "avoid": (
        "dppo", "reinflow-r", "reinflow-ddim", "reinflow-mip", "fpo++", "awm", "policyflow", "ppo",
        "ppo-mixture", "gorl", "dsrl", "dsrl-diffusion", "rlpd", "idql",
    )
}  # fmt: skip
"""The methods of a task."""


def run_one(study: str, name: str, seed: int, root: Path) -> Path:
    """Train one method from the clone of a seed, and play its checkpoints; returns its file."""
    target = pages.RESULTS / PAGE / f"{study}-{name}-seed{seed}.json"
    if target.exists():
        return target
    method = methods_of(study)[name]
    demos, base = clone_of(study, method.base, seed, root)
    place = root / study / f"{name}-seed{seed}"
    values: dict[str, Any] = {
        "seed": seed,
        **ONE_PROCESS,
        "trainer.checkpoint_every": method.budget // INTERVALS,
    }
    values |= {"init": str(base)} if method.has_init else {}
    values |= {"dataset": str(demos)} if method.has_data else {}
    run = once.trained(place, *recipe(method.tuned), **values)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    marks = points(run.directory, method.budget)
    for mark in marks:
        mark["success"] = played(place / "checkpoints" / str(mark.pop("checkpoint")))["success"]
    result = burnish.evaluate(run, baseline=str(base), out=str(place / "eval.json"), **PROTOCOL, **ONE_ENV)
    assert result.baseline is not None and result.comparison is not None
    content = {
        "study": PAGE, "task": study, "algo": name, "seed": seed, "experiment": method.tuned,
        "base": method.base, "is_init": method.has_init, "base_sha256": sha256(policy_of(base) / WEIGHTS),
        "dataset": describe_dataset(demos), "task_sha256": task_digest(task_of(locate(str(run)))),
        "protocol": result.evaluation.protocol,
        "budget": method.budget, "points": marks, "gradient_steps": gradient_steps(run.directory),
        "before": episode_columns(result.baseline), "after": episode_columns(result.evaluation),
        "difference": asdict(result.comparison), "peak_mb": peak, "decision_ms": decision_ms(place),
        "configuration": {"clone": configuration(base), "tune": configuration(place)},
    }  # fmt: skip
    content["settings_sha256"] = table_page.settings_digest(content["configuration"]["tune"])
    return pages.keep(PAGE, target.stem, content)


ONE_PROCESS = {"num_workers": 0, "num_threads": 1}
ONE_ENV = {"num_workers": 0}


def clone_of(study: str, experiment: str, seed: int, root: Path) -> tuple[Path, Path]:
    """Return the demonstrations of a seed and the clone of them, made if they are not there."""
    found, folder = STUDIES[study], root / study
    assert found.demonstrations is not None
    demos = once.demonstrations(
        folder / f"demonstrations-seed{seed}.hdf5", found.env, found.demonstrations, *found.options,
        first=once.first_seed(seed), noise=found.noise,
    )  # fmt: skip
    place = folder / f"{experiment.replace(' ', '-')}-seed{seed}"
    once.trained(place, *recipe(experiment), dataset=str(demos), seed=seed, **ONE_PROCESS)
    return demos, place


def points(run: RunDirectory, budget: int) -> list[dict[str, Any]]:
    """Return the checkpoints nearest to the shares of a budget: steps in the task, seconds of processor time.

    Gradient steps on data, before the task, count as time and not as steps in the task.
    """
    rows = list(read_jsonl(run.metrics_path))
    on_data = max((row["step"] for row in rows if "time/steps_per_s" in row), default=0)
    found = []
    for share in SHARES:
        step = min(run.checkpoints(), key=lambda step: abs(step - on_data - share * budget))
        cpu_s = [row["time/cpu_s"] for row in rows if row["step"] <= step][-1]
        found.append(
            {"share": round(share, 4), "checkpoint": step, "step": step - on_data, "cpu_s": round(cpu_s, 2)}
        )
    return found


def played(checkpoint: Path) -> dict[str, list[float]]:
    """Return the numbers of the episodes of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "eval.json")
        return episode_columns(burnish.evaluate(str(checkpoint), out=out, **PROTOCOL, **ONE_ENV).evaluation)


def gradient_steps(run: RunDirectory) -> dict[str, int]:
    """Return the steps that every optimiser of a run has taken, by its place in the training state."""
    return dict(_optimisers(run.load_training_state()["algorithm"], ""))


def _optimisers(state: Any, name: str) -> Iterator[tuple[str, int]]:
    if not isinstance(state, Mapping):
        return
    if {"state", "param_groups"} <= set(state):
        yield name, max((int(one["step"]) for one in state["state"].values() if "step" in one), default=0)
        return
    for key, value in state.items():
        yield from _optimisers(value, f"{name}.{key}".lstrip("."))


def decision_ms(run: Path) -> float:
    """Return the median time [ms] of one decision of the exported policy, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        report = burnish.export(str(run), out=str(Path(folder) / "exported"))
    return round(report.latency[0]["onnx_ms"], 4)


def task_digest(env: EnvConfig) -> str:
    """Return the digest of what decides an episode: options, the task's code and its models."""
    seen = hashlib.sha256(repr(env).encode())
    source = Path(inspect.getfile(type(env)))
    files = sorted(source.parent.glob("*.py")) if source.name == "__init__.py" else [source]
    files += sorted(asset_path(".").glob(f"{env.spec.name}*.xml"))
    for file in files:
        seen.update(file.read_bytes())
    return seen.hexdigest()


def policy_of(run: Path) -> Path:
    """Return the policy directory of the last checkpoint of a run."""
    return locate(str(run)).path


def configuration(run: Path) -> dict[str, Any]:
    """Return the composed configuration of a run."""
    return pages.configuration(RunDirectory(run))


# -- commands -------------------------------------------------------------------------------------------


def missing(study: str, methods: Iterable[str], seeds: Iterable[int]) -> list[tuple[str, int]]:
    """Return methods and seeds without a file, seed after seed."""
    return [
        (name, seed)
        for seed in seeds
        for name in methods
        if not (pages.RESULTS / PAGE / f"{study}-{name}-seed{seed}.json").exists()
    ]


def run_all(study: str, methods: list[str], seeds: list[int], root: Path, jobs: int) -> None:
    """Make the clones, then every row, each in a process of its own."""
    todo, known = missing(study, methods, seeds), methods_of(study)
    clones = sorted({(seed, known[name].base) for name, seed in todo})
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        made = [pool.submit(clone_of, study, base, seed, root) for seed, base in clones]
        for one in made:
            one.result()
        rows = [pool.submit(partial(run_one, study, name, seed, root)) for name, seed in todo]
        for one in rows:
            print(f"written: {one.result()}", flush=True)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", nargs="?", choices=list(CHOSEN))
    parser.add_argument("--methods", help="names by commas; without: all of the task")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--root", type=Path, default=Path("runs/table"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--report", action="store_true", help="write the page from what is there")
    options = parser.parse_args(None if arguments is None else list(arguments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not options.report:
        if options.task is None:
            parser.error(f"name a task: {', '.join(CHOSEN)}")
        methods = options.methods.split(",") if options.methods else list(CHOSEN[options.task])
        if unknown := set(methods) - set(CHOSEN[options.task]):
            parser.error(
                f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CHOSEN[options.task])}"
            )
        if str(commit := describe_environment()["commit"]).endswith("-dirty"):
            raise SystemExit(f"rows name a commit; this working copy has changes on top of {commit}")
        run_all(
            options.task,
            methods,
            [int(seed) for seed in options.seeds.split(",")],
            options.root,
            options.jobs,
        )
    print(f"written: {table_page.report(PAGE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
