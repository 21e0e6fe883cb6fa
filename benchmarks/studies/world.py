"""How far a learned world is from its task: errors by horizon, judgement of policies, speed.

    python -m benchmarks.studies.world avoid=runs/world                             errors, speed, a strip
    python -m benchmarks.studies.world avoid=runs/world runs/tuned/checkpoints/*    imagined against real
    python -m benchmarks.studies.world --report                                     only the page

Errors are those on the episodes that the run held out. Policies of the second line play as many episodes in
the world as in the task. Every line leaves one JSON file in docs/results/world/; the page
docs/results/world.md is made of these. A strip shows a held-out episode beside what the world imagines under
its actions; it is written alone by `--strip`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from algos.cloning.frames import with_latents
from algos.cloning.validation import held_out
from algos.cloning.world import errors_by_horizon, frame_errors, starts_of
from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.options import study_parser
from burnish.reports.figures import new_figure
from burnish.runs.locate import load_policy, locate
from envs.datasets import EpisodeDataset, read_dataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.intervals import paired_difference
from envs.evaluation.settings import EvaluationSettings
from envs.spec import EnvConfig
from envs.tasks.world import LearnedTask

HORIZONS = (1, 5, 10, 20, 35, 50)
NUM_ENVS = (1, 64)
STRIP = 50  # actions of a strip
_FEWEST = 6  # policies below which no correlation is printed


def errors(run: RunDirectory) -> dict[str, Any]:
    """Return the number of episodes and the errors of states after 1 … 50 recorded actions, and of frames."""
    episodes = _held_out(run)
    world: Any = load_policy(run.policy_path())
    found = {"episodes": episodes.num_episodes, "errors": errors_by_horizon(world, episodes, max(HORIZONS))}
    if world.coder is None:
        return found
    told = frame_errors(world, episodes, HORIZONS)
    kept = kept_errors(episodes, list(told))
    return {**found, "frames": [{"after": h, "imagined": told[h], "kept": kept[h]} for h in told]}


def kept_errors(episodes: EpisodeDataset, horizons: Sequence[int]) -> dict[int, float]:
    """Return the errors of frames, as `frame_errors`, of a world in which nothing moves."""
    starts, errors = starts_of(episodes, max(HORIZONS), 128), {}
    for h in horizons:
        pairs = [(images[starts], images[starts + h]) for images in episodes.images.values()]
        gaps = torch.stack([before.float() - after.float() for before, after in pairs])
        errors[h] = float((gaps / 255).square().mean().sqrt())
    return errors


def _held_out(run: RunDirectory) -> EpisodeDataset:
    """Return the episodes that a run has not learned from."""
    config = run.config
    dataset = read_dataset(config["dataset"], **config["reader"])
    _, episodes = held_out(dataset, config["algo"]["validation_fraction"], config["seed"])
    if episodes is None:
        raise SystemExit(f"{run.path} held out no episodes.")
    return episodes


def speed(env: EnvConfig, num_envs: int, *, seconds: float = 5.0) -> float:
    """Return control steps per second of processor time, resets included, under a constant slow action.

    Images, if any, are drawn once per chunk of four steps, where a policy would decide.
    """
    vector = env.make_vector(num_envs)
    vector.reset(range(num_envs))
    vector.images()
    low, high = np.asarray(env.spec.action_low), np.asarray(env.spec.action_high)
    actions = np.broadcast_to((low + high) / 2 + 0.2 * (high - low) / 2, (num_envs, 4, len(low)))
    began, steps = time.process_time(), 0
    while (used := time.process_time() - began) < seconds:
        step = vector.step_chunk(actions)
        steps += int(step.length.sum())
        ended = np.flatnonzero(step.done)
        if ended.size:
            vector.reset(range(steps, steps + len(ended)), ended)
        vector.images()
    vector.close()
    return steps / used


# -- strip ----------------------------------------------------------------------------------------------


def strip(name: str, task: LearnedTask, run: RunDirectory) -> Path:
    """Draw a held-out episode, its states and frames, and what every member imagines under its actions."""
    world: Any = load_policy(run.policy_path())
    episodes, coder = _held_out(run), world.coder
    length = min(STRIP, int(episodes.lengths.max()) - 1)
    number = int((episodes.lengths > length).nonzero()[0])
    episode = episodes.select([number])
    real = with_latents(episode, coder).observations[: length + 1]
    told = imagined_states(world, real[0], episode.actions[:length])
    figure = new_figure(9, 5.6)
    shown = list(range(0, length + 1, length // 5))
    if coder is None:
        sides = {"real": real[shown], "imagined": told[0, shown]}
        drawn = {side: frames(task.imagined, states) for side, states in sides.items()}
    else:
        camera = coder.cameras[0]
        recorded = episode.images[camera][torch.tensor(shown)]
        drawn = {"real": recorded, "imagined": coder.draw(told[0, shown, world.task_dim :])[camera]}
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.3, 1])
    for row, (side, pictures) in zip(upper.subplots(2, len(shown)), drawn.items(), strict=True):
        row[0].set_ylabel(side)
        for ax, k, frame in zip(row, shown, pictures, strict=True):
            ax.imshow(frame)
            ax.set(xticks=[], yticks=[], title=f"after {k} actions" if side == "real" else "")
    for i, ax in enumerate(lower.subplots(-(-min(world.task_dim, 4) // 2), 2).flat):
        ax.plot(told[:, :, i].T, color="#e4572e", linewidth=0.8)
        ax.plot(real[:, i], color="#2f3640", linewidth=1.2)
        ax.set_title(task.imagined.spec.obs_names[i], fontsize=8, loc="left")
        ax.tick_params(labelsize=7)
    path = pages.RESULTS / f"world-{name}.png"
    figure.savefig(path, dpi=75)
    return path


def imagined_states(world: Any, start: Tensor, actions: Tensor) -> Tensor:
    """Return the states (G, T + 1, Do) that G members imagine from a state under actions (T, Da)."""
    members = len(world.members)
    states = [start.expand(members, 1, -1)]
    generator = torch.Generator().manual_seed(0)
    for action in actions[:, None]:
        noise = world.sample_noise(1, generator=generator)
        told = [world.answer(states[-1][g], action, noise).states[g] for g in range(members)]
        states.append(torch.stack(told))
    return torch.cat(states, dim=1)


def frames(env: EnvConfig, states: Tensor) -> list[np.ndarray]:
    """Return pictures of states (n, Do) of a task that `can_be_drawn`."""
    from envs.engine.rendering import OffscreenRenderer

    stepper: Any = env.make_vector(1).stepper
    pictures = []
    with OffscreenRenderer(stepper.model, width=160, height=160, camera=_camera(stepper.model)) as renderer:
        for state in states.double().numpy():
            put(stepper, state)
            pictures.append(renderer.frame(stepper.datas[0]))
    return pictures


def put(stepper: Any, state: np.ndarray) -> None:
    """Put the first simulator into a state (Do,) of a task that `can_be_drawn`."""
    import mujoco

    model, data = stepper.model, stepper.datas[0]
    free = model.nq + model.nv - len(state)
    data.qpos[free:], data.qvel[:] = state[: model.nq - free], state[model.nq - free :]
    mujoco.mj_forward(model, data)


def can_be_drawn(env: EnvConfig) -> bool:
    """Whether states are the simulator's positions and speeds, but for a place along a track."""
    model = getattr(env.make_vector(1).stepper, "model", None)
    return model is not None and model.nq + model.nv - env.spec.obs_dim in (0, 1)


def _camera(model: Any) -> str | None:
    """Return the first camera of a model, if it has one."""
    return model.camera(0).name if model.ncam else None


def played(policy: Any, env: EnvConfig, episodes: int) -> dict[str, Any]:
    """Return what came of the episodes 0 to E - 1, in their order."""
    found = evaluate(policy, env, EvaluationSettings(episodes=episodes))
    values = [float(row.success if env.spec.success_rule else row.return_) for row in found.rows]
    return {"values": values, "length": [row.length for row in found.rows]}


# -- agreement ------------------------------------------------------------------------------------------


def rank_violation(imagined: np.ndarray, real: np.ndarray) -> float:
    """Return the mean over policies of the largest real gap to a policy that is ranked the other way."""
    gap = np.abs(real[:, None] - real)
    swapped = np.sign(imagined[:, None] - imagined) != np.sign(real[:, None] - real)
    return float((gap * swapped).max(axis=1).mean())


def pearson(imagined: np.ndarray, real: np.ndarray) -> float:
    """Return the linear correlation."""
    return float(np.corrcoef(imagined, real)[0, 1])


MEASURES: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "Pearson": pearson,
    "Spearman": lambda imagined, real: pearson(rankdata(imagined), rankdata(real)),
    "rank violation (MMRV)": rank_violation,
    "imagined − real": lambda imagined, real: float((imagined - real).mean()),
}


def agreement(
    imagined: np.ndarray, real: np.ndarray, *, draws: int = 1000
) -> dict[str, tuple[float, float, float]]:
    """Return every measure with its 95 % interval, by bootstrap over policies and, in them, episodes.

    Shapes:
        imagined, real: (n, E), results of the episodes of n policies.
    """
    generator, (n, episodes) = np.random.default_rng(0), real.shape
    drawn: dict[str, list[float]] = {name: [] for name in MEASURES}
    for _ in range(draws):
        some = generator.integers(n, size=n)[:, None]
        means = [
            rows[some, generator.integers(episodes, size=(n, episodes))].mean(axis=1)
            for rows in (imagined, real)
        ]
        if min(np.ptp(mean) for mean in means) > 0:
            for name, measure in MEASURES.items():
                drawn[name].append(measure(*means))
    found = {}
    for name, measure in MEASURES.items():
        low, high = np.quantile(drawn[name], [0.025, 0.975])
        found[name] = (measure(imagined.mean(axis=1), real.mean(axis=1)), float(low), float(high))
    return found


def ceiling(real: np.ndarray) -> dict[str, float]:
    """Return the measures between the even and the odd real episodes: what noise alone leaves."""
    one, two = (real[:, i::2].mean(axis=1) for i in (0, 1))
    return {name: measure(one, two) for name, measure in MEASURES.items()}


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.studies.world`: [learned worlds](../algorithms/world.md) against the
tasks that they were learned of."""


def report() -> Path:
    """Write the page."""
    found = pages.kept("world", advice="give name=<run of a world> first")
    lines = ["# Learned worlds against their tasks", "", INTRODUCTION]
    for one in found:
        lines += ["", *(_judged(one) if "policies" in one else _measured(one))]
    return pages.write("world", lines + pages.origin("world", found[0]))


def _measured(one: Mapping[str, Any]) -> Iterator[str]:
    given = one["configuration"]
    algo = given["algo"]
    yield f"## {one['task']}: errors and speed"
    yield ""
    yield (
        "Error of the state after recorded actions, without reading states in between, in deviations of the "
        f"state, on {one['episodes']} episodes of {given['dataset']} that were held out; "
        f"{algo['members']} members, {algo['steps']:,} steps each, process={given['process']['name']}."
    )
    yield ""
    shown = [h for h in HORIZONS if h <= len(one["errors"])]
    yield from pages.table(
        ("recorded actions", *map(str, shown)),
        [("error", *(f"{one['errors'][h - 1]:.3f}" for h in shown))],
    )
    yield ""
    if seen := one.get("frames"):
        yield (
            "Root mean square error of frames, 1 being the range of a pixel; after 0 actions that of the "
            "autoencoder. The other row keeps the first frame."
        )
        yield ""
        yield from pages.table(
            ("recorded actions", *(str(row["after"]) for row in seen)),
            [
                (words, *(f"{row[kind]:.3f}" for row in seen))
                for words, kind in (("imagined frame", "imagined"), ("first frame", "kept"))
            ],
        )
        yield ""
    rows = [
        (n, *(f"{one['speed'][kind][i]:,.0f}" for kind in ("world", "task"))) for i, n in enumerate(NUM_ENVS)
    ]
    yield from pages.table(("environments", "steps per s of processor time, world", "task"), rows)
    if (picture := pages.RESULTS / f"world-{one['task']}.png").exists():
        yield ""
        yield (
            "A held-out episode (black) and what the members imagine under its actions (orange), from its "
            "first state on; frames below are those of the first member"
            + ("." if one.get("frames") else ", and all are drawn from states.")
        )
        yield ""
        yield f"![imagined against real]({picture.name})"


def _judged(one: Mapping[str, Any]) -> Iterator[str]:
    policies = in_order(one["policies"])
    imagined, real = (np.array([row[kind]["values"] for row in policies]) for kind in ("imagined", "real"))
    yield f"## {one['task']}: judged by imagination, {one['rules']} rules"
    yield ""
    yield f"{real.shape[1]} episodes per policy and side; differences are paired, with 95 % intervals."
    yield ""
    rows = [
        (row["label"], row["algo"], f"{said.mean():.2f}", f"{true.mean():.2f}", _difference(real[0], true))
        for row, said, true in zip(policies, imagined, real, strict=True)
    ]
    first = policies[0]["label"]
    yield from pages.table(("policy", "made by", "imagined", "real", f"real − real of {first}"), rows)
    if len(real) >= _FEWEST:
        least = ceiling(real)
        yield ""
        yield from pages.table(
            ("measure", "value (95 %)", "between halves of the real episodes"),
            [
                (name, f"{value:.2f} ({low:.2f} to {high:.2f})", f"{least[name]:.2f}")
                for name, (value, low, high) in agreement(imagined, real).items()
            ],
        )


def in_order(policies: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the judged policies by run, as first given, and step."""
    runs = list(dict.fromkeys(row["run"] for row in policies))
    return sorted(policies, key=lambda row: (runs.index(row["run"]), row["step"] or 0))


def _difference(before: np.ndarray, after: np.ndarray) -> str:
    return pages.estimate(paired_difference(before, after), "+.2f")


def measure(name: str, task: LearnedTask, options: argparse.Namespace) -> Path:
    """Measure what is asked for; returns the JSON file."""
    run = RunDirectory.open(str(task.model))
    if options.strip:
        return strip(name, task, run)
    about = {"task": name, "configuration": pages.configuration(run)}
    if not options.policies:
        found, cameras = errors(run), getattr(task.imagined, "cameras", ())
        sides = {"world": replace(task, doubt=None, cameras=cameras), "task": task.imagined}
        if cameras or can_be_drawn(task.imagined):
            strip(name, task, run)
        speeds = {side: [speed(env, n) for n in NUM_ENVS] for side, env in sides.items()}
        return pages.keep("world", f"{name}-errors", {**about, **found, "speed": speeds})
    rows, sides = [], {"imagined": task, "real": task.imagined}
    for path in options.policies:
        one = locate(path)
        policy = one.load().eval()
        results = {side: played(policy, env, options.episodes) for side, env in sides.items()}
        facts = {"label": one.label, "run": (one.run or one.path).name, "step": one.step}
        rows.append({**facts, "algo": one.provenance().get("algo"), **results})
        means = ", ".join(f"{side} {np.mean(result['values']):.3f}" for side, result in results.items())
        print(f"{name}: {one.label}: {means}", flush=True)
    rules = "known" if task.judge is not None else "learned"
    return pages.keep("world", f"{name}-judged-{rules}", {**about, "rules": rules, "policies": rows})


def main() -> None:
    """Measure what is asked for and write the page."""
    parser = study_parser(__doc__)
    parser.add_argument("world", nargs="?", help="name=<run of a world>")
    parser.add_argument("policies", nargs="*", help="policies to judge")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--learned-rules", action="store_true", help="rewards and ends as learned")
    parser.add_argument("--strip", action="store_true", help="only draw imagined against real states")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.report:
        name, _, path = options.world.partition("=")
        task = LearnedTask(model=path, known_rules=not options.learned_rules)
        print(f"written: {measure(name, task, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
