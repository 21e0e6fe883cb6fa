"""One table: every method under one protocol, from the same cloned policies or on the same data.

    python -m benchmarks.studies.table avoid                            every method, five seeds
    python -m benchmarks.studies.table avoid --methods dppo,dsrl --seeds 100,101 --jobs 2
    python -m benchmarks.studies.table hopper-medium --dataset FILE     learning from a fixed dataset
    python -m benchmarks.studies.table --report                         the page from what is there

Settings were chosen in other studies (`learning` and `offline` beside this file), on seeds 0 to 9 and their
episodes. Here every training seed is new, and so are the episodes and the noise of evaluations. Methods of a
seed begin with the same clones under one root; where rows were given clones or data that were made anew, the
page says which. Those that learn an actor from data alone are compared with a clone of that actor. One
process and one thread train a run, without evaluations on the way; checkpoints are played afterwards. Each
run leaves one JSON file in docs/results/table/; a run whose file is there is not repeated, one that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import resource
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import burnish
from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from assets import path as asset_path
from benchmarks import pages
from benchmarks.options import numbers, study_parser, words
from benchmarks.studies import once, table_page
from benchmarks.studies.definitions import STUDIES
from benchmarks.studies.learning import demonstrations, reads_data, recipe
from benchmarks.studies.offline_data import BASES, DATA, dataset_of, settings_of
from benchmarks.studies.rows import beside_baseline, describe_dataset, episode_columns
from burnish.commands.evaluate import Result
from burnish.config.schema import compose_config
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.spec import EnvConfig
from policies.processes.gaussian import GaussianPolicy
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
    """How a row is trained: overrides of the commands."""

    base: tuple[str, ...]  # of the clone it begins with, or is compared with
    tuned: tuple[str, ...]
    has_init: bool = True  # whether it begins with the clone
    has_data: bool = False  # whether it learns from the data too

    @property
    def budget(self) -> int:
        """Steps in the task, or gradient steps of a method that learns from data alone."""
        algo = compose_config("train", self.tuned).algo
        names = ("env_steps", "total_steps", "online_steps", "steps")
        return next(int(steps) for name in names if (steps := getattr(algo, name, None)))


CHOSEN = {
    "avoid": (
        "dppo", "reinflow-r", "reinflow-ddim", "reinflow-mip", "fpo++", "awm", "policyflow", "ppo",
        "ppo-mixture", "gorl", "dsrl", "dsrl-diffusion", "rlpd", "idql", "dqc", "trqam", "fql", "residual",
        "fpo", "qam", "expo", "qc", "pa_rl", "famo2o",
    ),
    "lift-varied": (
        "dppo", "dsrl", "rlpd", "gorl", "dqc", "famo2o", "fql", "idql", "qam", "trqam", "qc", "expo",
        "residual", "pa_rl",
    ),
    "hopper-medium": (
        "td3_bc", "rebrac", "iql", "prdc", "a2pr", "study_td3_bc", "study_prdc", "study_a2pr",
        "flow+iql", "flow+td3_bc", "flow+prdc", "flow+a2pr", "diffusion+iql", "diffusion+srpo",
    ),
    "walker2d-expert": ("td3_bc", "study_td3_bc", "iql", "prdc", "study_prdc"),
}  # fmt: skip
"""The methods of a task: of `learning`, or of a dataset of `offline`."""


def methods_of(task: str) -> dict[str, Method]:
    """Return the methods of a task, with the settings of its study."""
    return {name: (offline_method if task in DATA else method)(task, name) for name in CHOSEN[task]}


def method(task: str, name: str) -> Method:
    """Return a method of a study of learning."""
    study = STUDIES[task]
    base = tuple(recipe(study.bases.get(name, study.bases["dsrl"])))
    tuned, is_tuned = tuple(recipe(study.tuned[name])), name in study.bases
    return Method(base, tuned, is_tuned, reads_data(study.tuned[name]))


def offline_method(task: str, name: str) -> Method:
    """Return a method of the study of offline learning; new actors are compared with a cloned one."""
    base, _, algo = name.rpartition("+")
    options = argparse.Namespace(steps=None, autocast=None, set=[])
    clone = [f"experiment={DATA[task].task}_{BASES[base]}"] if base else settings_of(task, "", "bc", options)
    tuned = settings_of(task, base, algo, options)
    return Method(tuple(clone), tuple(tuned), bool(base), has_data=True)


def run_one(task: str, name: str, seed: int, root: Path, dataset: str | None) -> Path:
    """Train one method from the clone of a seed, and play its checkpoints; returns its file."""
    target = pages.RESULTS / PAGE / f"{task}-{name}-seed{seed}.json"
    if target.exists():
        return target
    chosen, quantity = methods_of(task)[name], "return" if task in DATA else "success"
    data, base = clone_of(task, chosen.base, seed, root, dataset)
    place, budget = root / task / f"{name}-seed{seed}", chosen.budget
    values: dict[str, Any] = {"seed": seed, **ONE_PROCESS, "trainer.checkpoint_every": budget // INTERVALS}
    values |= {"init": str(base)} if chosen.has_init else {}
    values |= {"dataset": str(data)} if chosen.has_data else {}
    run = once.trained(place, *chosen.tuned, **values)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    marks = points(run.directory, budget, is_offline=task in DATA)
    for mark in marks:
        checkpoint = place / "checkpoints" / str(mark.pop("checkpoint"))
        mark[quantity] = episode_columns(played(task, checkpoint).evaluation)[quantity]
    result = played(task, place, baseline=str(base))
    content: dict[str, Any] = {
        "study": PAGE, "task": task, "algo": name, "seed": seed, "settings": chosen.tuned,
        "base": chosen.base, "is_init": chosen.has_init,
        "base_sha256": sha256(locate(str(base)).path / WEIGHTS),
        "dataset": describe_dataset(data), "task_sha256": task_digest(task_of(locate(str(run)))),
        **beside_baseline(result), "quantity": quantity, "budget": budget, "points": marks,
        "gradient_steps": gradient_steps(run.directory), "peak_mb": peak, "decision_ms": decision_ms(place),
        "configuration": {"clone": configuration(base), "tune": configuration(place)},
    }  # fmt: skip
    content["settings_sha256"] = table_page.settings_digest(content["configuration"]["tune"])
    return pages.keep(PAGE, target.stem, content)


ONE_PROCESS: dict[str, Any] = {"num_workers": 0, "num_threads": 1}


def clone_of(
    task: str, overrides: Sequence[str], seed: int, root: Path, dataset: str | None
) -> tuple[Path, Path]:
    """Return the data of a task, or the demonstrations of a seed, and a clone; what is missing is made."""
    folder = root / task
    if task in DATA:
        data = dataset_of(task, dataset, root)
    else:
        data = demonstrations(STUDIES[task], seed, dataset, folder)
    is_plain = not overrides[0].startswith("experiment=")
    name = "plain" if is_plain else "-".join((overrides[0].partition("=")[2], *overrides[1:]))
    place = folder / f"{name}-seed{seed}"
    once.trained(place, *overrides, dataset=str(data), seed=seed, **ONE_PROCESS)
    return data, place


def points(run: RunDirectory, budget: int, *, is_offline: bool) -> list[dict[str, Any]]:
    """Return the checkpoints nearest to the shares of a budget: steps, and seconds of processor time.

    Gradient steps on data, before the task, count as time and not as steps in the task.
    """
    rows = list(read_jsonl(run.metrics_path))
    on_data = [] if is_offline else [row["step"] for row in rows if "time/steps_per_s" in row]
    before, found = max(on_data, default=0), []
    for share in SHARES:
        step = min(run.checkpoints(), key=lambda step: abs(step - before - share * budget))
        cpu_s = [row["time/cpu_s"] for row in rows if row["step"] <= step][-1]
        found.append(
            {"share": round(share, 4), "checkpoint": step, "step": step - before, "cpu_s": round(cpu_s, 2)}
        )
    return found


def played(task: str, policy: Path, **values: Any) -> Result:
    """Play the episodes of the table with a run or checkpoint; offline, Gaussians act by their mean."""
    if task in DATA and isinstance(burnish.load_policy(policy), GaussianPolicy):
        values["sampling_noise"] = "zero"
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "eval.json")
        return burnish.evaluate(str(policy), out=out, num_workers=0, **PROTOCOL, **values)


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
    files = [source] if source.parent.name == "tasks" else sorted(source.parent.glob("*.py"))
    files += sorted(asset_path(".").glob(f"{env.spec.name}*.xml"))
    for file in files:
        seen.update(file.read_bytes())
    return seen.hexdigest()


def configuration(run: Path) -> dict[str, Any]:
    """Return the composed configuration of a run."""
    return pages.configuration(RunDirectory(run))


# -- commands -------------------------------------------------------------------------------------------


def missing(task: str, methods: Iterable[str], seeds: Iterable[int]) -> list[tuple[str, int]]:
    """Return methods and seeds without a file, seed after seed."""
    return [
        (name, seed)
        for seed in seeds
        for name in methods
        if not (pages.RESULTS / PAGE / f"{task}-{name}-seed{seed}.json").exists()
    ]


def run_all(
    task: str, methods: list[str], seeds: list[int], root: Path, jobs: int, dataset: str | None
) -> None:
    """Make the clones, then every row, each in a process of its own."""
    todo, known = missing(task, methods, seeds), methods_of(task)
    clones = sorted({(seed, known[name].base) for name, seed in todo})
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        made = [pool.submit(clone_of, task, base, seed, root, dataset) for seed, base in clones]
        for one in made:
            one.result()
        rows = [pool.submit(run_one, task, name, seed, root, dataset) for name, seed in todo]
        for row in rows:
            print(f"written: {row.result()}", flush=True)


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, root="runs/table")
    parser.add_argument("task", nargs="?", choices=list(CHOSEN))
    parser.add_argument("--methods", type=words, help="names by commas; without: all of the task")
    parser.add_argument("--seeds", type=numbers, default=[*SEEDS])
    parser.add_argument("--dataset", help="file of a dataset that cannot be recorded")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    if not options.report:
        if options.task is None:
            parser.error(f"name a task: {', '.join(CHOSEN)}")
        known = list(CHOSEN[options.task])
        if unknown := set(options.methods or known) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        methods = options.methods or known
        run_all(options.task, methods, options.seeds, options.root, options.jobs, options.dataset)
    print(f"written: {table_page.report(PAGE)}")


if __name__ == "__main__":
    main()
