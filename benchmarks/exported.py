"""Exports at work: the same success as the policy, and a closed loop with the policy in another process.

    python -m benchmarks.exported avoid=runs/a/policy cube-single=runs/b/policy
    python -m benchmarks.exported --report                      the page from what is there

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algos.provenance import describe_environment
from burnish.commands.evaluate import task_of
from burnish.commands.export import surroundings_of
from burnish.config import register_configs
from burnish.locate import locate
from envs.evaluation import Evaluation, compare, evaluate
from envs.spec import EnvConfig
from policies.export import GRAPHS, export_onnx
from policies.exported import ExportedPolicy
from policies.runner import Limits, Track, run_at_rate

RESULTS = Path("docs/results")

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


class Elsewhere:
    """An exported policy in a process of its own.

    Args:
        folder: What was exported.
    """

    def __init__(self, folder: Path) -> None:
        self.exported = ExportedPolicy(folder)
        command = [sys.executable, "-I", "-c", AGENT, str(folder)]
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


def act(env: EnvConfig, folder: Path, episodes: int) -> dict[str, Any]:
    """Act in real time, at the task's rate, with the policy in another process; returns what was counted."""
    decide, spec = Elsewhere(folder), env.spec
    limits = Limits(np.array(spec.action_low), np.array(spec.action_high))
    chunk = decide.exported.chunk
    totals: dict[str, Any] = {"success": [], "steps": 0, "late": 0, "starved": 0, "decision_s": []}
    decide(np.zeros((chunk.obs_steps, spec.obs_dim)))  # the first answer includes loading the graph
    for episode in range(episodes):
        robot = Robot(env, chunk.obs_steps, episode)
        track = Track(chunk.act_steps, limits=limits)
        report = run_at_rate(decide, robot.read, robot.send, track, hz=spec.control_hz)
        totals["success"].append(robot.success)
        for name, value in asdict(report).items():
            totals[name] = totals[name] + value
        robot.close()
    decide.close()
    return totals


def measure(task: str, path: str, options: argparse.Namespace) -> Path:
    """Compare a policy with its exports and act with one of them; returns the JSON file."""
    found = locate(path)
    policy, env = found.load(), task_of(found)
    settings = {"episodes": options.episodes, "num_envs": 25}
    own = evaluate(policy, env, **settings)
    content: dict[str, Any] = {
        "task": task,
        "label": found.label,
        "control_hz": env.spec.control_hz,
        "policy": _numbers(own),
        "environment": describe_environment(),
        "exports": {},
    }
    with tempfile.TemporaryDirectory() as place:
        for graph in GRAPHS:
            folder = Path(place) / graph
            report = export_onnx(policy, folder, graph=graph, surroundings=surroundings_of(found))
            played = evaluate(ExportedPolicy(folder), env, **settings)
            content["exports"][graph] = {
                **_numbers(played),
                "worst": report.worst,
                "latency": report.latency,
                "comparison": str(compare(own, played)),
            }
            print(f"{task}, graph={graph}: {content['exports'][graph]['comparison']}", flush=True)
        content["act"] = act(env, Path(place) / GRAPHS[0], options.live)
    target = RESULTS / "exported" / f"{task}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content) + "\n")
    return target


def _numbers(evaluation: Evaluation) -> dict[str, Any]:
    return {name: evaluation.values(name).tolist() for name in ("success", "return", "length")}


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`{command}`: policies and their exports play the same episodes with the same noise
([formats](../export.md)). *Equal* counts the episodes of the same length and return: rounding differs in the
last bits, and where a task amplifies it episodes part, without one side being better.

In real time a plan is used from the tick after its observation on. A policy whose plans have no rows beyond
those that are executed leaves a step without a plan at every decision; the last row is held there. Late ticks
are those of the machine, whatever else it did."""


def report() -> Path:
    """Write the page."""
    found = [json.loads(path.read_text()) for path in sorted((RESULTS / "exported").glob("*.json"))]
    if not found:
        raise SystemExit(f"{RESULTS / 'exported'} holds no results; give task=<policy> first.")
    command = " ".join(("python -m benchmarks.exported", *(f"{one['task']}=<policy>" for one in found)))
    lines = ["# Exports at work", "", INTRODUCTION.format(command=command)]
    for one in found:
        lines += ["", f"## {one['task']}", "", *_section(one)]
    packages = found[0]["environment"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "mujoco"))
    lines += ["", f"Measured with {versions}. Per-episode numbers are in `exported/`."]
    path = RESULTS / "exported.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _section(one: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was found on a task."""
    own = one["policy"]
    yield "| | success | return | equal episodes | largest difference on random inputs | decision, batch 1 |"
    yield "|---|---|---|---|---|---|"
    eager = one["exports"]["whole"]["latency"][0]["eager_ms"]
    yield f"| policy | {_share(own['success'])} | {np.mean(own['return']):.5g} | | | {eager:.2f} ms |"
    for graph, export in one["exports"].items():
        equal = [
            abs(a - b) <= 1e-9 and c == d
            for a, b, c, d in zip(
                own["return"], export["return"], own["length"], export["length"], strict=True
            )
        ]
        yield (
            f"| graph={graph} | {_share(export['success'])} | {np.mean(export['return']):.5g} | "
            f"{sum(equal)} of {len(equal)} | "
            f"{export['worst']:.1e} | {export['latency'][0]['onnx_ms']:.2f} ms |"
        )
    yield ""
    for graph, export in one["exports"].items():
        yield f"graph={graph}: {export['comparison']}"
    acted = one["act"]
    times = 1e3 * np.percentile(acted["decision_s"], (50, 99))
    yield ""
    yield (
        f"In another process without PyTorch, at {one['control_hz']:g} Hz in real time: "
        f"{len(acted['success'])} episodes, success {_share(acted['success'])}, {acted['steps']} steps, of "
        f"which {acted['late']} were late and {acted['starved']} had no plan; decisions took {times[0]:.1f} "
        f"ms (median) and {times[1]:.1f} ms (99 %), the pipe and the wait for the next tick included."
    )


def _share(success: list[float]) -> str:
    return f"{100 * float(np.mean(success)):.0f} %"


def main() -> int:
    """Measure what is asked for and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help="task=<policy>")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--live", type=int, default=10, help="episodes in real time")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    register_configs()
    torch.set_num_threads(1)
    for text in () if options.report else options.tasks:
        task, _, path = text.partition("=")
        print(f"written: {measure(task, path, options)}", flush=True)
    print(f"written: {report()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
