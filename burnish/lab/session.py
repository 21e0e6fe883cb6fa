"""One visitor's episode: the task, the policy with the visitor's controls, and what is drawn of both.

Legend: N plans, Th horizon, Ta executed steps, R rows of a plan that lie ahead, F frames of a film, M chunks
in it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.lab.controls import MOST_PLANS, START_SEED, STARTS, Controls, Subject, strengths
from burnish.lab.views import rounded, view_of
from envs.evaluation.evaluate import evaluate
from envs.evaluation.protocol import prepare_eval
from envs.evaluation.settings import EvaluationSettings, check_seeds
from envs.rollouts.observations import observe, to_tensors
from envs.spec import Array, ChunkStep
from envs.tasks.plane import Plane, PlaneStepper, SlidingStepper
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.protocols import Hook, Observation, Step
from policies.registry import name_of
from policies.storage.strict_json import fits
from policies.wrappers.best_of_n import BestOfN

_PATH_POINTS = 120  # most, of an episode that is sent


class Recorded(Hook):
    """Keeps the states of the denoising loop: the inputs of all steps, and the last result."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        self.states.append(x)
        return x0, eps

    def on_state(self, step: Step, x: Tensor) -> Tensor:
        if step.k == step.num_steps - 1:
            self.states.append(x)
        return x


class Session:
    """An episode of a subject under changing controls.

    Args:
        subject: Policy and task.

    Raises:
        ConfigError: If policy and task do not fit.
        CapabilityError: If the task cannot be drawn.
        MissingExtraError: If the task is drawn by MuJoCo, and no GL context can be made.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.controls = subject, Controls()
        self.actions = {
            "seed": self.reset,
            "controls": self.control,
            "move": self.move,
            "slide": self.slide,
        }
        task = prepare_eval(subject.env, subject.base)
        self._vector: Any = task.make_vector(1, obs_steps=subject.base.chunk.obs_steps)
        try:
            self.view = view_of(task, self._vector)
        except CapabilityError:
            self._vector.close()
            raise
        self._queue = np.zeros((0, subject.env.spec.action_dim))  # actions that are left of the chunk
        self._ahead = slice(subject.base.chunk.action_start, None)
        self.reset(0)

    def close(self) -> None:
        """End the task."""
        self.view.close()
        self._vector.close()

    @property
    def plane(self) -> Plane | None:
        """The scene from above; None: the task is seen through a camera."""
        return self.view.plane

    def facts(self) -> dict[str, Any]:
        """Return what the page needs once: the controls that the policy has, and the task."""
        base, spec = self.subject.base, self.subject.env.spec
        denoises = isinstance(base, DenoisingPolicy)
        own = name_of("sampler", base.sampler) if denoises else None
        sliders = strengths(base.chunk) if denoises else {}
        samplers = {
            name: {"steps": base.with_sampler(part).table.num_steps, "is_free": hasattr(part, "steps")}
            for name, part in self.subject.samplers.items()
        }
        return {
            "policies": [one.label for one in self.subject.found],
            "task": spec.name,
            "rule": spec.success_rule,
            "quantity": spec.quantity,
            "hz": spec.control_hz,
            "sampler": own,
            "samplers": samplers,
            "strengths": {name: one._asdict() for name, one in sliders.items()},
            "most_plans": MOST_PLANS,
            "starts": STARTS,
        }

    # -- what a visitor does --------------------------------------------------------------------------

    def reset(self, seed: Any) -> dict[str, Any]:
        """Begin the episode of a seed; returns the scene and the first frame.

        Raises:
            ConfigError: If the seed is no whole number, or beyond those of simulators.
        """
        if not fits(seed, int):
            raise ConfigError("seed must be a whole number.")
        check_seeds("seed", seed)
        self._obs, self.seed, self._decisions, self._steps = self._vector.reset([seed]), seed, 0, 0
        self._end = ""
        return {"scene": self.view.scene(), "seed": seed, **self.plan()}

    def control(self, values: Any) -> dict[str, Any]:
        """Take other controls, and plan again from where the robot is.

        Raises:
            ConfigError: If they are none, or do not fit the policy; the ones before stay.
            CapabilityError: If the policy has no such control.
        """
        before, self.controls = self.controls, Controls.read(values)
        try:
            return self.plan()
        except Exception:
            self.controls = before
            raise

    def move(self, place: Any) -> dict[str, Any]:
        """Put the robot somewhere else, and plan again from there.

        Raises:
            ConfigError: If this is no place.
            CapabilityError: If the task is not seen from above.
        """
        if not fits(place, tuple[float, float]):
            raise ConfigError("move must be a place: two numbers.")
        stepper, plane = self._vector.stepper, self.plane
        if plane is None or not isinstance(stepper, PlaneStepper):
            raise CapabilityError("a robot can be moved where it is seen from above.")
        if self._end:
            return self.frame()
        position = np.clip(np.array(place, np.float64), plane.low, plane.high)
        self._obs = self._vector.observe_again(0, stepper.place(0, position))
        return self.plan()

    def slide(self, pillar: Any) -> dict[str, Any]:
        """Move a pillar, given by its number and x [m], sideways, and plan again; returns the scene too.

        Raises:
            ConfigError: If there is no such pillar.
            CapabilityError: If pillars do not move in this task.
        """
        stepper, plane = self._vector.stepper, self.plane
        if plane is None or not plane.slides or not isinstance(stepper, SlidingStepper):
            raise CapabilityError("pillars can be moved under env.rows=moved of avoid.")
        if not fits(pillar, tuple[int, float]) or not 0 <= pillar[0] < len(plane.pillars):
            raise ConfigError("slide must be the number of a pillar and a place x.")
        if self._end:
            return self.frame()
        self._obs = self._vector.observe_again(0, stepper.slide(0, *pillar))
        return {"scene": self.view.scene(), **self.plan()}

    def step(self) -> dict[str, Any]:
        """Advance by one control step; where a chunk is used up, plan first.

        An episode that has ended is followed by that of the next seed.
        """
        if self._end:
            return self.reset((self.seed + 1) % 2**32)
        new = {}
        if not len(self._queue):
            self._decisions += 1
            new = self.plan()
        action, self._queue = self._queue[0], self._queue[1:]
        step = self._vector.step_chunk(action[None, None])
        self._obs = step.obs
        self._steps += 1
        if step.done[0]:
            self._end = _end_of(step, bool(self.subject.env.spec.success_rule))
        return new | self.frame()

    # -- what is computed -----------------------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        """Compute plans from where the robot is; the first one is executed from now on.

        Raises:
            ConfigError: If they are not finite.
        """
        started, controls, plane = time.perf_counter(), self.controls, self.plane
        policy = self.subject.view(controls, plane)
        obs = self._observation()
        chunks, film = planned(policy, obs, controls, self._noise_seed)
        actions, *states = (policy.physical(one).numpy() for one in (chunks, *film))
        if not all(np.isfinite(one).all() for one in (actions, *states)):
            raise ConfigError("plans with these controls are not finite: choose others, or another policy.")
        self._queue = actions[0, policy.chunk.executed]
        drawn = [self._drawn(one) for one in (actions, *states)]
        took = time.perf_counter() - started
        return {
            **self.frame(),
            "plans": drawn[0],
            "executed": len(self._queue),
            "film": drawn[1:],
            "took_ms": round(1e3 * took, 1),
            "calls": getattr(policy, "calls", policy.table.num_steps if hasattr(policy, "table") else 1),
            "command": self.subject.command(controls, plane),
            "python": self.subject.python(controls, plane, obs, self._noise_seed),
        }

    def _observation(self) -> Observation:
        return to_tensors(observe(self._vector, self._obs))

    def _drawn(self, actions: Array) -> Any:
        return self.view.drawn(self._obs, actions[:, self._ahead])

    @property
    def _noise_seed(self) -> int:
        return 1000 * self.seed + self._decisions

    def frame(self) -> dict[str, Any]:
        """Return what is seen now."""
        return {**self.view.frame(self._obs), "step": self._steps, "end": self._end}


def planned(view: Any, obs: Observation, controls: Controls, noise_seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return plans (N, Th, Da), and the states of their denoising, F of (M, Th, Da) each; normalised.

    Of plans that are chosen among candidates, the film shows candidates.
    """
    seen = {name: one.expand(controls.plans, *one.shape[1:]) for name, one in obs.items()}
    generator = torch.Generator().manual_seed(noise_seed)
    noise = controls.noise * view.sample_noise(controls.plans, generator=generator)
    inner = view.policy if isinstance(view, BestOfN) else view
    if not controls.film or not isinstance(inner, DenoisingPolicy):
        with torch.inference_mode():
            return view.plan(seen, noise), []
    recorded = Recorded()
    with torch.inference_mode():
        if isinstance(view, BestOfN):
            chunks = view.plan(seen, noise, hooks=[recorded])
        else:
            chunks = view.decode(view.encode(seen), noise, hooks=[recorded])
    return chunks, [state[:MOST_PLANS] for state in recorded.states]


def compared(
    subject: Subject, plane: Plane | None, controls: Controls, left: Event | None = None
) -> dict[str, Any]:
    """Play the compared starts with these controls, and without steering; the numbers are those of `eval`.

    Once the visitor has `left`, what is not finished is left out.

    Returns:
        By `steered` and `plain`: the mean success or return, the mean distance of the paths from the sketch
        [m], paths and outcomes. Without a sketch only `plain`, and no distance; paths only from above.

    Raises:
        ConfigError: If the noise is neither as it is nor zero.
    """
    if controls.noise not in (0.0, 1.0):
        raise ConfigError(f"starts are compared with noise x 0 or x 1; got {controls.noise:g}.")
    kind, found = "random" if controls.noise else "zero", {}
    both = {"steered": controls} if controls.is_steered else {}
    line = plane.sketch(controls.sketch) if plane is not None and controls.is_steered else None
    for name, one in (both | {"plain": replace(controls, strategy="off")}).items():
        settings = EvaluationSettings(
            episodes=STARTS, first_seed=START_SEED, start_noise=kind, sampling_noise=kind
        )
        view = subject.view(one, plane).clone()
        if left is not None:
            for part in view.modules():
                part.register_forward_pre_hook(partial(_stop_if, left))
        try:
            evaluation = evaluate(view, subject.env, settings, keep_observations=plane is not None)
        except _LeftError:
            break
        kept = [row.observations for row in evaluation.rows if row.observations is not None]
        paths = [] if plane is None else [one[:, list(plane.observed)] for one in kept]
        found[name] = {
            "value": float(np.mean(evaluation.values(evaluation.quantity))),
            "off_m": None if line is None else round(float(np.mean([_distance(line, p) for p in paths])), 5),
            "paths": [rounded(path[:: -(-len(path) // _PATH_POINTS)]) for path in paths],
            "won": [row.success for row in evaluation.rows],
        }
    return found


class _LeftError(Exception):
    """Nobody waits for the comparison."""


def _stop_if(left: Event, *_: Any) -> None:
    if left.is_set():
        raise _LeftError


def _distance(sketch: Any, path: Array) -> float:
    """Return the mean distance of a path (L, 2) from a sketch [m]."""
    line = getattr(sketch, "path", sketch)
    return float(line.distance(torch.from_numpy(path)).mean())


def _end_of(step: ChunkStep, has_success: bool) -> str:
    if has_success and step.success[0]:
        return "success"
    return "failure" if step.terminated[0] else "time limit"
