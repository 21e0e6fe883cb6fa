"""Run an exported policy with numpy and onnxruntime; this file is copied into every export.

    runner = Runner("exported", seed=0)
    for _ in range(steps):                                # at signature["control_hz"]
        action = runner.act({"observation": newest})      # (Do,) -> (Da,), physical units
    runner.reset(seed=1)                                  # a new episode

    python runner.py                                      checks the folder that it lies in on this machine

Legend: B batch, K denoising steps, To observation history, Th predicted horizon, Ta executed steps, R rows of
a plan (its first row belongs to the newest observation), Do and Da widths.

A folder holds one graph (`graph=whole`, the sampler inside), or one of an observation and one of a single
evaluation of the network (`graph=step`), around which the loop of `loop.json` runs here:

    x0, eps = linear in (x, prediction), clipped        x' = to_x0 x0 + to_eps eps + to_memory m + std noise
    x', v', slope = one step down an energy             until the slope is small, and one step more

In this order: commands and plans over time, of any policy, and a loop at a rate; history, noise and the
exported policy; the loop of `graph=step`; the opening of files; the check.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray

MODEL, ENCODER, STEP, LOOP = "policy.onnx", "encoder.onnx", "step.onnx", "loop.json"
SIGNATURE, SAMPLE = "signature.json", "sample.npz"
_MOST_BYTES, _MOST_STEPS = 2**26, 10_000
NOT_HISTORIES = ("goal", "noise")
_FACTS = ("format", "graph", "inputs", "outputs", "act_steps", "obs_steps")
_LOOP_FACTS = ("action_offset", "action_scale", "action_start", "act_steps")


@dataclass(frozen=True)
class Limits:
    """Bounds on commands; None: no limit."""

    low: Array | None = None  # smallest action, (Da,)
    high: Array | None = None  # largest action, (Da,)
    max_jump: float | None = None  # largest change between control steps, per action entry, in its units

    def __post_init__(self) -> None:
        if self.max_jump is not None and not self.max_jump > 0:
            raise ValueError(f"max_jump must be positive, or None; got {self.max_jump}.")

    def apply(self, action: Array, last: Array | None) -> Array:
        """Return the command (Da,) for an action and the previous command (None: it is the first).

        An action that is not finite repeats the previous command; as the first one it raises ValueError.
        """
        if not np.isfinite(action).all():
            if last is None:
                raise ValueError(
                    f"the first action of an episode must be finite; got {action}. Nothing was commanded; "
                    "check observation and policy."
                )
            return last
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        if self.max_jump is not None and last is not None:
            low, high = (np.clip(last + jump, low, high) for jump in (-self.max_jump, self.max_jump))
        clipped: Array = np.clip(action, low, high)
        return clipped


class Track:
    """The plans of one robot over time: when to decide, and which row of which plan is executed.

    A plan begins at the control step of its observation, and may arrive steps later; until then the previous
    plans are executed. `begin` marks the start of a decision, `deliver` its plan.

    Args:
        act_steps: Control steps between decisions, at most the rows of a plan; None: all of them.
        compensate: Skip rows that are past when a plan arrives; otherwise it starts with its first row.
        ensemble: Average all plans that cover a step, with weights exp(-ensemble i), i = 0 the oldest one
            (ACT, arXiv 2304.13705); None: the newest plan alone.
        limits: Bounds on commands.

    Attributes:
        step: Control steps so far.
        starved: Steps beyond the last row of every plan: that row was held.
        limited: Steps whose action the limits changed.
        not_finite: Steps whose action was NaN or infinite: the last command was held.
    """

    def __init__(
        self,
        act_steps: int | None,
        *,
        compensate: bool = True,
        ensemble: float | None = None,
        limits: Limits | None = None,
    ) -> None:
        if act_steps is not None and act_steps < 1:
            raise ValueError(f"act_steps must be at least 1; got {act_steps}.")
        if ensemble is not None and not ensemble >= 0:
            raise ValueError(f"ensemble must be 0 or more, or None; got {ensemble}.")
        self.act_steps, self.compensate, self.ensemble = act_steps, compensate, ensemble
        self.limits = limits or Limits()
        self.reset()

    def reset(self) -> None:
        """Begin an episode."""
        self.step = self.starved = self.limited = self.not_finite = 0
        self.begun: int | None = None
        self.is_pending = False
        self._lasts = 0  # steps from the observation of the newest plan to the next decision
        self._plans: list[tuple[int, Array]] = []  # first step and rows, oldest first
        self._last: Array | None = None

    @property
    def has_plan(self) -> bool:
        return bool(self._plans)

    @property
    def is_due(self) -> bool:
        """Whether a decision should begin at this step."""
        return not self.is_pending and self.left == 0

    @property
    def left(self) -> int:
        """Steps until the next decision should begin."""
        return 0 if self.begun is None else max(0, self.begun + self._lasts - self.step)

    @property
    def spare(self) -> int:
        """Rows of the newest plan after the start of the next decision."""
        return len(self._plans[-1][1]) - self._lasts if self._plans else 0

    def begin(self) -> None:
        """Start a decision for the observation of this step."""
        self.begun, self.is_pending = self.step, True

    def deliver(self, plan: Array) -> None:
        """Add the plan (R, Da) of the decision that began."""
        if not self.is_pending or self.begun is None:
            raise ValueError("a plan was delivered, but no decision had begun; call begin() first.")
        start = self.begun if self.compensate else self.step
        self._plans.append((start, np.asarray(plan)))
        self._lasts = min(len(plan), self.act_steps or len(plan))
        self.is_pending = False

    def next(self) -> Array:
        """Return the command (Da,) of this step and advance; ValueError without a plan."""
        if not self._plans:
            raise ValueError("there is no plan to execute yet; deliver one before the first step.")
        wanted = self._row()
        command = self.limits.apply(wanted, self._last)
        is_finite = bool(np.isfinite(wanted).all())
        self.not_finite += not is_finite
        self.limited += is_finite and bool((command != wanted).any())
        self._last = command
        self.step += 1
        return command

    def _row(self) -> Array:
        alive = [(start, plan) for start, plan in self._plans if self.step - start < len(plan)]
        if not alive:
            self.starved += 1
            self._plans = self._plans[-1:]
            return np.asarray(self._plans[-1][1][-1])
        self._plans = alive if self.ensemble is not None else alive[-1:]
        rows = np.stack([plan[self.step - start] for start, plan in self._plans])
        if len(rows) == 1 or self.ensemble is None:
            return np.asarray(rows[-1])
        weights = np.exp(-self.ensemble * np.arange(len(rows)))
        return np.asarray(np.tensordot(weights / weights.sum(), rows, axes=1), dtype=rows.dtype)


@dataclass
class RateReport:
    """Counts and times of a loop at a rate."""

    steps: int = 0  # ticks at which a command was sent
    late: int = 0  # ticks that began more than a tenth of a period after their time
    starved: int = 0  # ticks beyond the last row of every plan
    not_finite: int = 0  # ticks whose action was NaN or infinite: the last command was sent again
    decision_s: list[float] = field(default_factory=list)  # what each decision took, without waits for ticks

    def __str__(self) -> str:
        times = 1e3 * np.percentile(self.decision_s or [0.0], (50, 99, 100))
        return (
            f"{self.steps} steps, {self.late} late, {self.starved} without a plan, {self.not_finite} without "
            f"finite numbers; decisions took {times[0]:.1f} ms (median), {times[1]:.1f} ms (99 %), "
            f"{times[2]:.1f} ms (longest)"
        )


def run_at_rate(
    decide: Callable[[Any], Array],
    read: Callable[[], Any],
    send: Callable[[Array], bool],
    track: Track,
    *,
    hz: float,
    submit: Callable[..., Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> RateReport:
    """Act at a rate until `send` returns false; decisions run in parallel to the loop.

    Until a plan arrives, the remaining rows of the previous one are executed: a decision of d ticks must
    begin d ticks before they end. Beyond them the last row is held and counted as starved.

    Args:
        decide: Observation -> plan (R, Da); it may take longer than a tick.
        read: Returns the observation of this tick.
        send: Executes a command (Da,); returns whether to continue.
        track: Schedules decisions and holds the plans.
        hz: Ticks per second.
        submit: Calls a function with an observation elsewhere and returns a future; None: in a thread.
        clock: Returns the time [s].
        sleep: Waits [s].
    """
    if not hz > 0:
        raise ValueError(f"hz must be positive; got {hz}.")
    with contextlib.ExitStack() as stack:
        if submit is None:
            submit = stack.enter_context(ThreadPoolExecutor(1)).submit
        report, pending, timed = RateReport(), None, partial(_timed, decide, clock)
        start, goes_on = None, True
        while goes_on:
            observation = read()
            if track.is_due:
                track.begin()
                pending = submit(timed, observation)
            if pending is not None and (pending.done() or not track.has_plan):
                plan, took_s = pending.result()
                track.deliver(plan)
                report.decision_s.append(took_s)
                pending = None
                if len(report.decision_s) == 1 and not track.spare:
                    _warn_of_gaps(track)
            start = clock() if start is None else start  # time runs from the first command on
            goes_on = send(track.next())
            report.steps += 1
            late_s = clock() - (start + report.steps / hz)
            report.late += late_s > 0.1 / hz
            wait_s = min(max(0.0, -late_s), 1 / hz)
            if abs(late_s) > 1 / hz:  # the clock was set, or the loop stood still: ticks are not made up for
                start += late_s + wait_s
            sleep(wait_s)
    report.starved, report.not_finite = track.starved, track.not_finite
    return report


def _timed(
    decide: Callable[[Any], Array], clock: Callable[[], float], observation: Any
) -> tuple[Array, float]:
    start = clock()
    return decide(observation), clock() - start


def _warn_of_gaps(track: Track) -> None:
    warnings.warn(
        f"every decision begins after the last row of the previous plan (act_steps={track.act_steps}); until "
        "its plan arrives the last command is held. Give Track fewer act_steps than a plan has rows, by the "
        "control steps of a decision (at least 1), or train with a horizon longer than act_steps.",
        RuntimeWarning,
        stacklevel=3,
    )


class History:
    """The last `obs_steps` observations, the first one repeated; `latest_only` entries have no history."""

    def __init__(self, obs_steps: int, latest_only: Sequence[str] = ("goal",)) -> None:
        if obs_steps < 1:
            raise ValueError(f"obs_steps must be at least 1; got {obs_steps}.")
        self._latest_only = frozenset(latest_only)
        self._seen: deque[dict[str, Array]] = deque(maxlen=obs_steps)

    def reset(self) -> None:
        self._seen.clear()

    def push(self, obs: Mapping[str, Any]) -> None:
        """Add the observation of one control step; its entries must be those of the previous steps."""
        now = {name: np.array(value) for name, value in obs.items()}  # a copy: simulators reuse theirs
        if self._seen and set(now) != set(self._seen[-1]):
            raise ValueError(
                f"an observation must have the entries of the previous one, {sorted(self._seen[-1])}; got "
                f"{sorted(now)}. Call reset() at the start of an episode."
            )
        self._seen.extend([now] * (1 if self._seen else self._seen.maxlen or 1))

    def stacked(self) -> dict[str, Array]:
        """Return the observations by name, (To, ...) each, oldest first."""
        if not self._seen:
            raise ValueError("there is no observation yet; push one first.")
        newest = self._seen[-1]
        return {
            name: newest[name] if name in self._latest_only else np.stack([one[name] for one in self._seen])
            for name in newest
        }


def draw_noise(key: Sequence[int], shape: Sequence[int]) -> Array:
    """Draw float32 standard normals that depend only on shape and key (seed, episode, decision)."""
    seed, *place = key
    sequence = np.random.SeedSequence(seed, spawn_key=tuple(place))
    return np.random.default_rng(sequence).standard_normal(tuple(shape), dtype=np.float32)


class Actions(NamedTuple):
    """Decisions for B observations, in physical units, not clipped."""

    action: Array  # (B, Ta, Da), to be executed
    plan: Array  # (B, R, Da), all rows from the newest observation on


class Runner:
    """An exported policy with its observation history and plans.

    Args:
        folder: Output of `burnish export`.
        seed: Seed of the noise.
        is_noisy: False: zeros instead of noise, the deterministic variant.
        threads: Threads inside an operation.
        max_jump: See `Limits`; the action limits are those of the signature.
        ensemble: See `Track`.

    Attributes:
        signature: Names, shapes, units, rate and horizons; see the folder's README.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        seed: int = 0,
        is_noisy: bool = True,
        threads: int = 1,
        max_jump: float | None = None,
        ensemble: float | None = None,
    ) -> None:
        place = Path(folder)
        if not (place / SIGNATURE).is_file():
            raise ValueError(f"{place} is no exported policy: it holds no {SIGNATURE}.")
        self.signature: dict[str, Any] = _read_facts(place / SIGNATURE, _FACTS)
        if self.signature["format"] != "onnx" or self.signature["graph"] not in ("whole", "step"):
            raise ValueError(f"{place} is no export of this version. Export the policy again.")
        self.inputs: dict[str, Any] = self.signature["inputs"]
        self._is_noisy = is_noisy
        self._predict: Callable[[Mapping[str, Array]], Actions]
        if self.signature["graph"] == "whole":
            session = open_session(place / MODEL, threads=threads)
            self._predict = lambda inputs: Actions(*run(session, inputs))
        else:
            self._predict = _Stepwise(place, threads).predict
        limits = self.signature["outputs"]["action"]
        self.limits = Limits(_array(limits["low"]), _array(limits["high"]), max_jump)
        self.track = Track(self.signature["act_steps"], ensemble=ensemble, limits=self.limits)
        self._history = History(self.signature["obs_steps"], NOT_HISTORIES)
        self._seed, self._episode, self._decisions = seed, 0, 0

    def reset(self, *, seed: int | None = None) -> None:
        """Start an episode: clears observations and plans; `seed` restarts the noise, None continues it."""
        if seed is None:
            self._episode += 1
        else:
            self._seed, self._episode = seed, 0
        self._decisions = 0
        self._history.reset()
        self.track.reset()

    def act(self, newest: Mapping[str, Any] | Array, *, noise: Array | None = None) -> Array:
        """Return the next command (Da,), within the limits; decides when due.

        Args:
            newest: `observation` (Do,), images (H, W, 3) by camera, `goal` (Dg,); or the observation alone.
            noise: Noise of a decision, without batch; None: drawn.
        """
        self.see(newest if isinstance(newest, Mapping) else {"observation": newest})
        if self.track.is_due:
            plan = self.plan(noise=noise)  # a failed decision is repeated at the next step
            self.track.begin()
            self.track.deliver(plan)
        return self.track.next()

    def see(self, newest: Mapping[str, Any]) -> dict[str, Array]:
        """Add the observation of a control step; returns the histories for `plan`."""
        if missing := self.inputs.keys() - {"noise"} - newest.keys():
            raise ValueError(f"an observation needs {sorted(missing)} as well; got {sorted(newest)}.")
        seen = {}
        for name in sorted(self.inputs.keys() - {"noise"}):
            facts = self.inputs[name]
            value = _typed(name, newest[name], facts["dtype"])
            shape = facts["shape"][1 if name in NOT_HISTORIES else 2 :]
            if list(value.shape) != shape:
                raise ValueError(f"{name} must have shape {tuple(shape)}; got {value.shape}.")
            seen[name] = value
        self._history.push(seen)
        return self._history.stacked()

    def plan(self, seen: Mapping[str, Array] | None = None, *, noise: Array | None = None) -> Array:
        """Return a plan (R, Da), not clipped, for histories of `see`, by default the last; see `act`."""
        seen, decisions = self._history.stacked() if seen is None else seen, self._decisions
        drawn = self.draw_noise(1) if noise is None else np.asarray(noise, np.float32)[None]
        inputs = {name: value[None] for name, value in seen.items()} | {"noise": drawn}
        try:
            return self.predict(inputs).plan[0]
        except BaseException:
            self._decisions = decisions  # the noise is that of the decision that replaces the failed one
            raise

    def draw_noise(self, batch: int) -> Array:
        """Draw the noise (B, ...) of the next decision, or zeros."""
        shape = (batch, *self.inputs["noise"]["shape"][1:])
        if not self._is_noisy:
            return np.zeros(shape, np.float32)
        self._decisions += 1
        return draw_noise((self._seed, self._episode, self._decisions - 1), shape)

    def predict(self, inputs: Mapping[str, Array]) -> Actions:
        """Decide for B histories at once; `inputs` are those of the signature, `noise` included."""
        if wrong := self.inputs.keys() ^ inputs.keys():
            got = f"got {sorted(inputs)}; wrong or missing: {sorted(wrong)}"
            raise ValueError(f"inputs must be {sorted(self.inputs)}; {got}.")
        typed = {name: _typed(name, value, self.inputs[name]["dtype"]) for name, value in inputs.items()}
        for name, value in typed.items():
            if not value.ndim or list(value.shape[1:]) != self.inputs[name]["shape"][1:]:
                expected = ", ".join(map(str, self.inputs[name]["shape"]))
                raise ValueError(f"{name} must have shape ({expected}); got {value.shape}.")
        if len(set(batches := {name: len(value) for name, value in typed.items()}.values())) > 1:
            raise ValueError(f"inputs must be of one batch; got {dict(zip(typed, batches, strict=True))}.")
        return self._predict(typed)


def _typed(name: str, value: Any, dtype: str) -> Array:
    """Return an input in its type; refuses numbers that are not finite, and float images (0.9: black)."""
    given = _numbers(name, value)
    if dtype == "uint8" and not _are_bytes(given):
        fix = "Use np.rint(255 * x).astype(np.uint8)"
        raise ValueError(f"{name} must be bytes, 0 to 255; got {given.dtype}. {fix}.")
    typed = given.astype(dtype, copy=False)
    _require_finite(name, typed, given)
    return typed


def _numbers(name: str, value: Any) -> Array:
    try:
        given = np.asarray(value)
        if given.dtype.kind in "biuf":
            return given
        if given.dtype.kind == "O":  # None, or numbers of other programs
            return given.astype(np.float64)
    except (TypeError, ValueError):  # lists of different lengths, objects
        raise ValueError(f"{name} must be an array of numbers; got {str(value)[:80]}.") from None
    raise ValueError(f"{name} must be real numbers; got {given.dtype}.")


def _are_bytes(given: Array) -> bool:
    if given.dtype == np.uint8:
        return True
    return given.dtype.kind in "iu" and bool(((given >= 0) & (given <= 255)).all())


def _require_finite(name: str, value: Array, given: Array) -> None:
    if value.dtype.kind == "f" and not (is_finite := np.isfinite(value)).all():
        place = np.argwhere(~is_finite)[0].tolist()
        raise ValueError(f"{name} must be finite; got {given[tuple(place)]} at {place}.")


def _array(values: Any) -> Array | None:
    return None if values is None else np.asarray(values, np.float32)


class _Stepwise:
    """A graph of the observation, one of the network, and the loop between noise and action."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._encoder = open_session(folder / ENCODER, threads=threads)
        self._network = open_session(folder / STEP, threads=threads)
        self._conditions = [node.name for node in self._encoder.get_outputs()]
        self._loop: dict[str, Any] = _read_facts(folder / LOOP, _LOOP_FACTS)
        if not self._loop.get("walk", {}).get("steps", 1) <= _MOST_STEPS:
            raise ValueError(f"{folder / LOOP}: a walk must have at most {_MOST_STEPS} steps.")
        self._rows = [
            {name: np.asarray(value, np.float64) for name, value in row.items()}
            for row in self._loop.get("rows", ())
        ]

    def predict(self, inputs: Mapping[str, Array]) -> Actions:
        cond = dict(zip(self._conditions, run(self._encoder, inputs), strict=True))
        loop = self._loop
        find = self._descend if "walk" in loop else self._denoise
        chunk = find(cond, np.asarray(inputs["noise"], np.float64))
        plan = (chunk - np.asarray(loop["action_offset"])) / np.asarray(loop["action_scale"])
        plan = plan[:, loop["action_start"] :].astype(np.float32)
        return Actions(plan[:, : loop["act_steps"]], plan)

    def _descend(self, cond: Mapping[str, Array], noise: Array) -> Array:
        """Descend an energy from noise (B, Th, Da); rows stop where it is flat, after one step more."""
        walk, x = self._loop["walk"], noise.astype(np.float32)
        v, walks = np.zeros_like(x), np.ones(len(x), bool)
        for _ in range(walk["steps"] - 1):
            x_next, v_next, slope = run(self._network, {"x": x, "v": v, **cond})
            moves = walks[:, None, None]
            x, v = np.where(moves, x_next, x), np.where(moves, v_next, v)
            walks = walks & (slope > walk["min_slope"])
            if not walks.any():
                break
        return run(self._network, {"x": x, "v": v, **cond})[0]

    def _denoise(self, cond: Mapping[str, Array], noise: Array) -> Array:
        """Return normalised chunks (B, Th, Da)."""
        loop, memory = self._loop, None
        has_step_noise = not loop["is_deterministic"]
        x = loop["start_std"] * (noise[:, 0] if has_step_noise else noise)
        draws = _clip(noise[:, 1:], loop["noise_clip"]) if has_step_noise else None
        for k, row in enumerate(self._rows):
            times = {name: row[name].astype(np.float32) for name in ("time", "second_time") if name in row}
            (prediction,) = run(self._network, {"x": x.astype(np.float32), **times, **cond})
            x, memory = self._step(row, x, prediction, memory)
            if draws is not None:
                x = x + row["std"] * draws[:, k]
            x = _clip(x, loop["clip_state"])
        return _clip(x, loop["clip_action"])

    def _step(
        self, row: Mapping[str, Array], x: Array, prediction: Array, memory: Array | None
    ) -> tuple[Array, Array | None]:
        """Return the mean of the next state, and the memory of multistep methods."""
        loop = self._loop
        if not loop["is_spelled_out"]:
            mean = row["mean_x"] * x + row["mean_pred"] * prediction
            if loop["clip_x0"] is not None:
                y = prediction if loop["predicts_x0"] else x + row["ratio"] * prediction
                mean = mean + row["mean_y"] * np.clip(y, -row["limit"], row["limit"])
            return mean, None
        x0 = row["x0_x"] * x + row["x0_pred"] * prediction
        eps = row["eps_x"] * x + row["eps_pred"] * prediction
        clipped = _clip(x0, loop["clip_x0"])
        x0, eps = clipped, _clip(eps + row["slope"] * (x0 - clipped), loop["eps_clip"])
        mean = row["to_x0"] * x0 + row["to_eps"] * eps
        if "to_memory" not in row:
            return mean, None
        mean = mean + row["to_memory"] * (x0 if memory is None else memory)
        return mean, row["keep_x0"] * x0 + row["keep_eps"] * eps


def _clip(x: Array, limit: float | None) -> Array:
    return x if limit is None else np.clip(x, -limit, limit)


def run(session: Any, inputs: Mapping[str, Array]) -> list[Array]:
    """Run a graph on those of the inputs that it uses."""
    used = {node.name for node in session.get_inputs()}
    outputs: list[Array] = session.run(None, {name: v for name, v in inputs.items() if name in used})
    return outputs


def open_session(path: str | Path, *, threads: int = 1) -> Any:
    """Open an ONNX file with onnxruntime on the CPU; ValueError if it holds more than a plain graph."""
    with open(path, "rb") as file:
        if not file.seek(0, 2):
            raise ValueError(f"{path} is no ONNX graph: it is empty.")
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    _refuse_more_than_a_graph(content, "model", path)
    try:
        import onnxruntime
    except ImportError:
        raise ImportError("running an exported policy needs onnxruntime: pip install onnxruntime.") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, not printed as well
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


_INSIDE = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 10: "tensor", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Messages of ONNX that are searched: number of the field -> what it holds (onnx.proto3)."""
_REFUSED = {
    ("model", 25): "functions",
    ("attribute", 6): "a loop or a branch",
    ("attribute", 11): "a loop or a branch",
    ("tensor", 13): "numbers in other files",
}


def _refuse_more_than_a_graph(content: memoryview, kind: str, path: str | Path) -> None:
    """Refuse loops, branches and external data, which an export never holds."""
    inside = _INSIDE[kind]
    for number, value in _fields(content, path):
        if (kind, number) in _REFUSED:
            held = f"{_REFUSED[kind, number]}, which exported policies never do"
            raise ValueError(f"{path} holds {held}: it is not opened. Export the policy again.")
        if number in inside and value is not None:
            _refuse_more_than_a_graph(value, inside[number], path)


def _fields(content: memoryview, path: str | Path) -> Iterator[tuple[int, memoryview | None]]:
    """Yield number and content of a protobuf message's fields; None: a number."""
    place, end = 0, len(content)
    while place < end:
        key, place = _varint(content, place, path)
        number, form = key >> 3, key & 7
        size, value = {1: 8, 5: 4}.get(form, 0), None
        if form == 0:
            _, place = _varint(content, place, path)
        elif form == 2:
            size, place = _varint(content, place, path)
            value = content[place : place + size]
        elif form not in (1, 5):
            raise ValueError(f"{path} is no ONNX graph.")
        place += size
        if place > end:
            raise ValueError(f"{path} is no ONNX graph: it ends too early.")
        yield number, value


def _varint(content: memoryview, place: int, path: str | Path) -> tuple[int, int]:
    """Read a number; returns it and the place behind it."""
    value = 0
    for count, byte in enumerate(content[place : place + 10]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise ValueError(f"{path} is no ONNX graph.")


def _read_facts(path: Path, needed: Sequence[str]) -> dict[str, Any]:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} must have at most {_MOST_BYTES} bytes; got {path.stat().st_size}.")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file ({error}). Export the policy again.") from None
    if missing := set(needed) - set(facts if isinstance(facts, dict) else ()):
        raise ValueError(f"{path} lacks {sorted(missing)}: it is damaged, or of another version.")
    return dict(facts)


def check(folder: str | Path) -> float:
    """Return the largest difference between the folder's sample and what is computed here."""
    sample = dict(np.load(Path(folder) / SAMPLE))
    action = sample.pop("action")
    found = Runner(folder).predict(sample).action
    return float(np.abs(found - action).max() / max(1.0, np.abs(action).max()))


if __name__ == "__main__":
    difference = check(Path(__file__).parent)
    sys.stdout.write(f"largest difference to the sample: {difference:.1e}\n")
    sys.exit(int(not difference <= 1e-4))
