"""Exports at work: the same success as the policy, and a closed loop with the policy in another process.

    python -m benchmarks.studies.exported avoid=runs/a/policy cube-single=runs/b/policy
    python -m benchmarks.studies.exported --clone avoid --steps 3000    one of every process, cloned briefly
    python -m benchmarks.studies.exported --report                      the page from what is there

The policy and its exports (one graph, and step by step) play the same episodes with the same noise. Then the
exported folder is run by its own runner.py in a process that cannot import PyTorch and talks through a pipe
to the simulator, whose loop keeps the task's control rate in real time. The page is docs/results/exported.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import families
from burnish.commands.export import surroundings_of
from burnish.runs.locate import Located, locate
from burnish.runs.tasks import task_of
from envs.evaluation.comparison import compare
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.intervals import paired_difference
from envs.evaluation.settings import EvaluationSettings
from envs.spec import EnvConfig
from policies import registry
from policies.errors import ExportError
from policies.export.export import GRAPHS, export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.runner import Limits, Track, run_at_rate

AGENT = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "policies", "envs", "algos", "burnish"):
            raise ImportError(name)

sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, sys.argv[1])
import numpy as np
from runner import Runner

runner = Runner(sys.argv[1], seed=0)
shape = runner.inputs["observation"]["shape"][1:]
while len(data := sys.stdin.buffer.read(4 * int(np.prod(shape)))):
    history = np.frombuffer(data, np.float32).reshape(1, *shape)
    plan = runner.predict({"observation": history, "noise": runner.draw_noise(1)}).plan
    sys.stdout.buffer.write(np.ascontiguousarray(plan).tobytes())
    sys.stdout.buffer.flush()
"""
"""A policy's process: histories come in, plans go out, both as float32."""

INTERPRETER = """
import importlib.metadata, importlib.util, json, platform
names = ("numpy", "onnxruntime")
print(json.dumps({
    "python": f"{platform.python_implementation()} {platform.python_version()}",
    "packages": {name: importlib.metadata.version(name) for name in names},
    "has_torch": importlib.util.find_spec("torch") is not None,
}))
"""
"""What the environment of a policy's process holds, before anything is barred there."""


def interpreter_facts(python: str) -> dict[str, Any]:
    """Return which interpreter runs a policy, and whether PyTorch could be imported there."""
    command = [python, "-I", "-c", INTERPRETER]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    facts: dict[str, Any] = json.loads(told)
    return facts


class Elsewhere:
    """An exported policy in a process of its own.

    Args:
        folder: What was exported.
        python: Interpreter that runs it; its environment needs numpy and onnxruntime.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.exported = ExportedPolicy(folder)
        command = [python, "-I", "-c", AGENT, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, history: np.ndarray) -> np.ndarray:
        """Decide for a history (To, Do); the plan (R, Da)."""
        there, back = self._process.stdin, self._process.stdout
        assert there is not None and back is not None
        there.write(np.ascontiguousarray(history, np.float32).tobytes())
        there.flush()
        rows, width = self.exported.signature["outputs"]["plan"]["shape"][1:]
        data = back.read(4 * rows * width)
        if len(data) != 4 * rows * width:
            raise SystemExit("the policy's process ended before it answered")
        return np.frombuffer(data, np.float32).reshape(rows, width)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Robot:
    """One simulated robot: the loop at a rate reads and sends here.

    Args:
        env: The task.
        obs_steps: To.
        seed: Of the episode.
    """

    def __init__(self, env: EnvConfig, obs_steps: int, seed: int) -> None:
        self._vector = env.make_vector(1, obs_steps=obs_steps)
        self._obs = self._vector.reset([seed])[0]
        self.success = False

    def read(self) -> np.ndarray:
        """Return the history (To, Do)."""
        return self._obs

    def send(self, command: np.ndarray) -> bool:
        """Execute a command; tells whether the episode goes on."""
        step = self._vector.step_chunk(command[None, None])
        self._obs = step.obs[0].copy()
        self.success |= bool(step.success[0])
        return not step.done[0]

    def close(self) -> None:
        """Release the simulator."""
        self._vector.close()


def act(env: EnvConfig, folder: Path, episodes: int, python: str) -> dict[str, Any]:
    """Act in real time, at the task's rate, with the policy in another process; returns what was counted."""
    decide, spec = Elsewhere(folder, python), env.spec
    limits = Limits(np.array(spec.action_low), np.array(spec.action_high))
    chunk = decide.exported.chunk
    interval = max(1, min(chunk.act_steps, chunk.horizon - chunk.action_start - 1))
    counted = {"steps": 0, "late": 0, "starved": 0, "not_finite": 0}
    totals: dict[str, Any] = {"success": [], **counted, "decision_s": []}
    decide(np.zeros((chunk.obs_steps, spec.obs_dim)))  # the first answer includes loading the graph
    for episode in range(episodes):
        robot = Robot(env, chunk.obs_steps, episode)
        track = Track(interval, limits=limits)
        report = run_at_rate(decide, robot.read, robot.send, track, hz=spec.control_hz)
        totals["success"].append(robot.success)
        for name, value in asdict(report).items():
            totals[name] = totals[name] + value
        robot.close()
    decide.close()
    return totals | {"decision_waits": False, "interpreter": interpreter_facts(python)}


def measure(found: Located, options: argparse.Namespace, *, title: str = "", live: int = 0) -> dict[str, Any]:
    """Compare a policy with its exports and act for some episodes in real time; returns what is kept."""
    policy, env = found.load(), task_of(found)
    settings = EvaluationSettings(episodes=options.episodes, num_envs=25)
    own = evaluate(policy, env, settings)
    content: dict[str, Any] = {
        "task": env.spec.name,
        "what": title or pages.describe(policy),
        "label": found.label,
        "control_hz": env.spec.control_hz,
        "quantity": env.spec.quantity,
        "policy": _numbers(own),
        "exports": {},
    }
    with tempfile.TemporaryDirectory() as place:
        facts: dict[str, Any] = {"surroundings": surroundings_of(found, policy)}
        for graph in GRAPHS:
            folder = Path(place) / graph
            try:
                report = export_onnx(policy, folder, graph=graph, **facts)
            except ExportError as error:
                content["exports"][graph] = {"refused": str(error)}
                continue
            played = evaluate(ExportedPolicy(folder), env, settings)
            content["exports"][graph] = {
                **_numbers(played),
                "worst": report.worst,
                "latency": report.latency,
            }
            print(f"{content['what']}, graph={graph}: {compare(own, played)}", flush=True)
        if live:
            content["act"] = act(env, Path(place) / GRAPHS[0], live, options.python)
    return content


def clone_all(task: str, options: argparse.Namespace) -> None:
    """Clone a policy with every process, briefly, and compare each with its exports."""
    demos, recipe = families.demonstrations(task, 0, options.root), families.TASKS[task]
    for process in options.processes:
        own = {family.process: family.lr for family in families.FAMILIES.values()}
        lr = own.get((f"process={process}",)) or recipe.lr
        budget = {"steps": options.steps, "lr": lr, "batch_size": families.BATCH, "validation_fraction": 0.0}
        place = options.root / task / process
        families.clone(task, (f"process={process}",), demos, place, seed=0, budget=budget)
        content = measure(locate(str(place)), options, title=process)
        print(f"written: {pages.keep('exported', f'{task}-{process}', content)}", flush=True)


def _numbers(evaluation: Evaluation) -> dict[str, Any]:
    return {name: evaluation.values(name).tolist() for name in ("success", "return", "length")}


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.studies.exported` lets policies and their exports play the same
episodes with the same noise ([formats](../export.md)): a given policy (`avoid=<policy>`), or one of every
process, cloned briefly (`--clone avoid`). *Equal* counts the episodes of the same length and return:
rounding differs in the last bits, and where a task or a policy amplifies it episodes part, in either
direction. The difference is that of success, or of the return where a task has no success, with its 95 %
interval over episodes. Where few episodes part it is too narrow: four in one direction, and none in the
other, exclude 0, which happens to equal sides once in eight times. The largest difference of an action is
that on random inputs, in physical units. Times are those of one decision for one observation, on one
thread."""

LIVE = """Then the exported folder acts in real time, in another process that cannot import PyTorch. The next
plan is asked for when the rows that are executed end, and at least one control step before all rows end: a
plan is used from the tick after its observation on. Late ticks are missed deadlines, of a machine that
others use."""


def report() -> Path:
    """Write the page."""
    found = pages.kept("exported")
    lines = ["# Exports at work", "", INTRODUCTION]
    for task in sorted({one["task"] for one in found}):
        lines += ["", f"## {task}", "", *_section([one for one in found if one["task"] == task])]
    lines += ["", "## In real time", "", LIVE, "", *_live([one for one in found if "act" in one])]
    return pages.write("exported", lines + pages.origin("exported", found[0]))


def _section(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what was found on a task: a row per policy and graph."""
    columns = ("policy", "graph", found[0]["quantity"], "exported", "difference", "equal episodes")
    rows, refused = [], {}
    for one in found:
        for graph, export in one["exports"].items():
            if "refused" in export:
                refused[one["what"], graph] = export["refused"]
            else:
                rows.append((one["what"], graph, *_cells(one, export)))
    yield from pages.table((*columns, "largest, random inputs", "decision", "exported"), rows)
    if refused:
        yield ""
        yield "Not exported, for the reason that is given:"
        yield ""
    for (what, graph), reason in refused.items():
        yield f"- {what}, graph={graph}: {reason}"


def _cells(one: Mapping[str, Any], export: Mapping[str, Any]) -> Iterator[str]:
    own, quantity = one["policy"], one["quantity"]
    scale, unit = (100, " %") if quantity == "success" else (1, "")
    for side in (own, export):
        yield f"{scale * float(np.mean(side[quantity])):.4g}{unit}"
    change = paired_difference(*(np.array([side[quantity]]) * scale for side in (own, export)))
    yield pages.estimate(change, ".3g")
    pairs = [list(zip(side["return"], side["length"], strict=True)) for side in (own, export)]
    equal = [abs(a - b) <= 1e-9 and m == n for (a, m), (b, n) in zip(*pairs, strict=True)]
    yield f"{sum(equal)} of {len(equal)}"
    yield f"{export['worst']:.1e}"
    times = export["latency"][0]
    yield f"{times['eager_ms']:.2f} ms"
    yield f"{times['onnx_ms']:.2f} ms"


def _live(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how acting in real time went."""
    rows = []
    for one in found:
        acted = one["act"]
        times = 1e3 * np.percentile(acted["decision_s"], (50, 99))
        solved = f"{sum(acted['success']):.0f} of {len(acted['success'])} solved"
        rows.append(
            (
                *(one["task"], one["what"], f"{one['control_hz']:g} Hz"),
                *(
                    solved if one["quantity"] == "success" else f"{len(acted['success'])} played",
                    acted["steps"],
                ),
                *(acted["late"], acted["starved"], f"{times[0]:.1f} ms", f"{times[1]:.1f} ms"),
            )
        )
    columns = ("task", "policy", "rate", "episodes", "steps", "late", "without a plan")
    yield from pages.table((*columns, "decision, median", "99 %"), rows)
    yield ""
    waits = any(one["act"].get("decision_waits", True) for one in found)  # earlier records
    yield f"A decision includes the pipe{' and the wait for the next tick' if waits else ''}."
    yield from _interpreters(found)


def _interpreters(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield in which environment the policies ran, where that was written down."""
    for one in found:
        if (facts := one["act"].get("interpreter")) is None:
            continue
        packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
        torch_is = "installed there, but barred" if facts["has_torch"] else "not installed there"
        yield ""
        yield f"{one['task']}, {one['what']}: {facts['python']} with {packages}; PyTorch is {torch_is}."


def main() -> None:
    """Measure what is asked for and write the page."""
    parser = study_parser(__doc__, root="runs/exported")
    parser.add_argument("tasks", nargs="*", help="task=<policy>")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--live", type=int, default=0, help="episodes in real time, of the policies given")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the exported folder")
    parser.add_argument("--clone", nargs="*", default=[], choices=families.TASKS, help="tasks")
    parser.add_argument("--processes", nargs="*", default=sorted(registry.parts("process")), help="to clone")
    parser.add_argument("--steps", type=int, default=3000, help="gradient steps of every clone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for text in () if options.report else options.tasks:
        task, _, path = text.partition("=")
        content = measure(locate(path), options, live=options.live)
        print(f"written: {pages.keep('exported', task, content)}", flush=True)
    for task in () if options.report else options.clone:
        clone_all(task, options)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
