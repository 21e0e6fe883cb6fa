"""Evaluate policies by a written protocol: seeded episodes, rows that are kept, intervals, paired comparison.

Episode i starts from seed `first_seed + i` and draws its sampling noise from a generator of its own; its
row is the same, bit for bit on a CPU, for any number of environments and workers (see `envs.player`).

Legend: E episodes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from envs.episodes import EpisodeRow
from envs.fit import require_fit
from envs.pixels import PICTURE_OPTIONS, seen_by
from envs.player import BLOCK_ROWS, NETWORK_CALLS, EvaluatedPolicy, Evaluator, Player
from envs.spec import EnvConfig
from envs.statistics import (
    RISK_SHARE,
    Interval,
    bootstrap_mean,
    conditional_value_at_risk,
    paired_difference,
    value_at_risk,
    wilson,
)
from envs.vector import Array
from envs.workers import start_workers
from policies.encoders import ImageShape
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.executor import Replanner, WarmStart, with_act_steps
from policies.policy import Policy
from policies.selection import BestOfN
from policies.steering import Steering, steered

NOISES = ("random", "zero")
SEEDS = 2**32  # what every simulator takes: 0 to SEEDS - 1
_VERSIONS = ("mujoco", "gymnasium", "burnish")


def check_seeds(name: str, first: int, count: int = 1) -> None:
    """Refuse seeds that a simulator would not take.

    Args:
        name: Configuration key of the first seed.
        first: The first seed.
        count: How many consecutive seeds are used.

    Raises:
        ConfigError: If one of them is negative or too large.
    """
    if first < 0 or first + max(count, 1) > SEEDS:
        largest = SEEDS - max(count, 1)
        raise ConfigError(f"{name} must be from 0 to {largest}; got {first}.")


@dataclass
class EvaluationSettings:
    """The protocol of an evaluation, the only home of its defaults; hashed and stored with the numbers."""

    episodes: int = (
        100  # episode i starts from seed first_seed + i; at least 100 for numbers that are reported
    )
    first_seed: int = 0  # seed of the first episode
    noise_seed: int = 0  # root of the episodes' sampling noise
    start_noise: str = "random"  # random | zero: where denoising starts from
    sampling_noise: str = "random"  # random | zero: the steps of a stochastic sampler
    steps: int | None = None  # denoising steps; null: the policy's own
    num_envs: int = 16  # episodes side by side; never changes a number
    act_steps: int | None = None  # actions executed before the policy decides again; null: the policy's own
    warm_start: WarmStart = field(default_factory=WarmStart)
    steer: Steering = field(default_factory=Steering)

    def __post_init__(self) -> None:
        """Check the values."""
        for name, least in (("episodes", 0), ("num_envs", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        check_seeds("first_seed", self.first_seed, self.episodes)
        check_seeds("noise_seed", self.noise_seed)
        for name in ("steps", "act_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, or null; got {getattr(self, name)}.")
        for name in ("start_noise", "sampling_noise"):
            if getattr(self, name) not in NOISES:
                raise ConfigError(f"{name} must be random or zero; got '{getattr(self, name)}'.")
            if self.steer.is_on and getattr(self, name) == "zero":
                raise ConfigError(f"{name}=zero and steer exclude each other. Leave one of them out.")
        if self.steer.is_on and self.warm_start.is_on:
            raise ConfigError("steer and warm_start both say where a plan begins. Give one of them.")


@dataclass(frozen=True)
class Evaluation:
    """Per-episode rows and the protocol that they were made by.

    Attributes:
        rows: One per episode, in order.
        protocol: Everything the numbers depend on but the policy; JSON values.
    """

    rows: tuple[EpisodeRow, ...]
    protocol: dict[str, Any]

    @property
    def protocol_hash(self) -> str:
        """SHA-256 of the canonical JSON of the protocol."""
        text = json.dumps(self.protocol, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def values(self, quantity: str) -> Array:
        """Return one number per episode (E,): `success`, `return`, `length`, or a metric of the task."""
        if quantity == "return":
            return np.array([row.return_ for row in self.rows])
        if quantity in ("success", "length"):
            return np.array([float(getattr(row, quantity)) for row in self.rows])
        if self.rows and quantity in self.rows[0].metrics:
            return np.array([row.metrics[quantity] for row in self.rows])
        known = ["success", "return", "length", *(self.rows[0].metrics if self.rows else ())]
        raise ConfigError(f"episodes have no quantity '{quantity}'; choose one of {known}.")

    def summary(self) -> dict[str, Any]:
        """Return means with 95 % intervals; others than return and length only where defined."""
        out: dict[str, Any] = {
            "env": self.protocol["env"]["name"],
            "episodes": len(self.rows),
            "protocol_hash": self.protocol_hash,
        }
        for quantity in ("return", "length"):
            out[quantity] = asdict(bootstrap_mean(self.values(quantity)))
        if self.protocol["env"]["success_rule"]:
            out["success"] = asdict(wilson(int(self.values("success").sum()), len(self.rows)))
        if self.protocol["env"]["reference_scores"]:
            out["d4rl_score"] = asdict(bootstrap_mean(self.d4rl_scores()))
        if not self.protocol["env"]["success_rule"]:
            out |= self._risk()
        if self.rows and NETWORK_CALLS in self.rows[0].metrics:
            out[NETWORK_CALLS] = asdict(bootstrap_mean(self.values(NETWORK_CALLS)))
        return out

    def _risk(self) -> dict[str, Any]:
        """Return how bad the worst episodes are, of a task that is judged by its return."""
        returns, share = self.values("return"), {"share": RISK_SHARE}
        return {
            "return_var": {"value": value_at_risk(returns)} | share,
            "return_cvar": asdict(conditional_value_at_risk(returns)) | share,
        }

    def d4rl_scores(self) -> Array:
        """Return (E,) scores in points: 0 for the random and 100 for the expert reference return.

        Raises:
            ConfigError: If the task has no reference returns.
        """
        reference = self.protocol["env"]["reference_scores"]
        if not reference:
            raise ConfigError(f"env={self.protocol['env']['name']} has no D4RL reference returns.")
        random, expert = reference
        return 100.0 * (self.values("return") - random) / (expert - random)

    def to_json(self) -> str:
        """Return protocol, hash, summary and rows as JSON (without recorded trajectories)."""
        data = {
            "protocol": self.protocol,
            "protocol_hash": self.protocol_hash,
            "summary": self.summary(),
            "rows": [_row_to_json(row) for row in self.rows],
        }
        return json.dumps(data, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """Read `to_json`.

        Raises:
            CheckpointError: If the text is no evaluation or its protocol was changed.
        """
        try:
            data = json.loads(text)
            out = cls(tuple(_row_from_json(row) for row in data["rows"]), data["protocol"])
            expected = data["protocol_hash"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"this is not the JSON of an evaluation ({error!r}).") from error
        if out.protocol_hash != expected:
            raise CheckpointError(
                f"the protocol of this evaluation does not have the hash stored with it "
                f"({out.protocol_hash[:12]} instead of {expected[:12]}): the file was edited. Evaluate again."
            )
        return out


def evaluate(
    policy: EvaluatedPolicy,
    env: EnvConfig,
    *,
    episodes: int = EvaluationSettings.episodes,
    first_seed: int = EvaluationSettings.first_seed,
    num_envs: int = EvaluationSettings.num_envs,
    num_workers: int = 0,
    start_noise: str = EvaluationSettings.start_noise,
    sampling_noise: str = EvaluationSettings.sampling_noise,
    steps: int | None = EvaluationSettings.steps,
    noise_seed: int = EvaluationSettings.noise_seed,
    act_steps: int | None = EvaluationSettings.act_steps,
    warm_start: WarmStart | None = None,
    steer: Steering | None = None,
    keep_observations: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run a policy for a number of seeded episodes.

    Args:
        policy: The policy; left as it is.
        env: The task.
        episodes: E, at least 1. This and what follows: see `EvaluationSettings`.
        first_seed: Seed of episode 0; episode i has `first_seed + i`.
        num_envs: Environments in all; does not change the result.
        num_workers: Processes, which compute on the CPU; 0 stays in this one. Does not change the result
            of a policy on the CPU.
        start_noise: `random` or `zero`: the noise that denoising starts from.
        sampling_noise: `random` or `zero`: the noise of a stochastic sampler's steps.
        steps: Denoising steps; None: the policy's own.
        noise_seed: Root of the episodes' noise generators.
        act_steps: Actions executed before the policy decides again; None: the policy's own.
        warm_start: How a decision begins from the one before; None: every decision is on its own.
        steer: How the policy follows a sketch; None: it does not.
        keep_observations: Keep `observations` and `actions` of every control step in the rows.
        on_progress: Called with (episodes done, E).

    Raises:
        ConfigError: If an argument is out of range or the policy does not fit the task, images included.
        CapabilityError: If `steps` is given and the policy's sampler has no number of steps, or `act_steps`,
            `warm_start` or `steer` and the policy does not plan, or it looks at images of a task that cannot
            be drawn.
        MissingExtraError: If it looks at images and nothing can be drawn here.
    """
    short_run, sketched = warm_start or WarmStart(), steer or Steering()
    settings = EvaluationSettings(
        *(episodes, first_seed, noise_seed, start_noise, sampling_noise),
        *(steps, num_envs, act_steps, short_run, sketched),
    )
    if episodes < 1 or num_workers < 0:
        raise ConfigError(
            f"episodes must be at least 1 and num_workers at least 0; got {episodes} and {num_workers}."
        )
    task = staged(env, policy)
    numbers = json.loads(json.dumps({**asdict(settings), "steer": sketched.describe()}))
    del numbers["num_envs"]  # changes no number
    protocol = {
        "env": _describe(env),
        **numbers,
        **_describe_images(task),
        "block_rows": BLOCK_ROWS,
        "engine": "exact",
        "versions": {name: _version(name) for name in _VERSIONS},
    }
    player = Player(
        policy=as_evaluated(policy, settings),
        first_seed=first_seed,
        noise_seed=noise_seed,
        start_noise=start_noise,
        sampling_noise=sampling_noise,
        keep=keep_observations,
        warm_start=short_run,
    )
    counter = _Counter(episodes, on_progress)
    rows = _play(player, task, episodes, num_envs, num_workers, counter)
    return Evaluation(tuple(sorted(rows, key=lambda row: row.episode)), protocol)


@dataclass(frozen=True)
class Comparison:
    """A paired difference `after - before` on common episodes."""

    quantity: str
    before: float
    after: float
    difference: Interval
    episodes: int
    same_protocol: bool

    def __str__(self) -> str:
        """Say in one sentence whether the policies differ."""
        mean, interval = format_interval(self.quantity, asdict(self.difference))
        verdict = "clearly different" if self.difference.excludes_zero else "within noise"
        return (
            f"paired difference of {self.quantity}: {mean} (95 % interval {interval}) on "
            f"{self.episodes} episodes: {verdict}."
        )


def format_interval(quantity: str, interval: Mapping[str, float]) -> tuple[str, str]:
    """Format mean and interval: success in percent, everything else with three significant digits.

    Args:
        quantity: What was measured; see `Evaluation.values`.
        interval: `Interval` as a dict.

    Example:
        >>> format_interval("return", {"value": 0.01, "low": 0.0, "high": 0.03})
        ('0.0100', '0.0000 to 0.0300')
    """
    scale, unit = (100.0, " %") if quantity == "success" else (1.0, "")
    value, low, high = (scale * interval[key] for key in ("value", "low", "high"))
    largest = max(abs(value), abs(low), abs(high))
    digits = 1
    if quantity != "success" and 0 < largest < math.inf:
        digits = min(max(2 - math.floor(math.log10(largest)), 1), 6)
    return f"{value:.{digits}f}{unit}", f"{low:.{digits}f} to {high:.{digits}f}{unit}"


def compare(
    before: Evaluation | Sequence[Evaluation],
    after: Evaluation | Sequence[Evaluation],
    *,
    quantity: str | None = None,
) -> Comparison:
    """Compare two policies on the episodes that both have played.

    Args:
        before: One evaluation, or one per training seed.
        after: As many.
        quantity: See `Evaluation.values`; None: success where the task has it, else the return.

    Raises:
        ConfigError: If tasks or numbers of evaluations differ, or no episode is common to all.
    """
    left = [before] if isinstance(before, Evaluation) else list(before)
    right = [after] if isinstance(after, Evaluation) else list(after)
    if len(left) != len(right) or not left:
        raise ConfigError(
            f"compare needs as many evaluations before as after; got {len(left)} and {len(right)}."
        )
    tasks = [evaluation.protocol["env"] for evaluation in (*left, *right)]
    if any(task != tasks[0] for task in tasks):
        raise ConfigError(
            f"compare needs one task; got {[(task['name'], task['options']) for task in tasks]}."
        )
    quantity = quantity or ("success" if tasks[0]["success_rule"] else "return")
    seeds = sorted(set.intersection(*({row.seed for row in e.rows} for e in (*left, *right))))
    if not seeds:
        raise ConfigError(
            "the evaluations have no episode seed in common; evaluate with the same first_seed."
        )
    a, b = (np.stack([_by_seed(e, quantity, seeds) for e in side]) for side in (left, right))
    return Comparison(
        quantity,
        float(a.mean()),
        float(b.mean()),
        paired_difference(a, b),
        a.size,
        len({evaluation.protocol_hash for evaluation in (*left, *right)}) == 1,
    )


def staged(env: EnvConfig, policy: Any) -> EnvConfig:
    """Return the task with the cameras that a policy looks through.

    Raises:
        ConfigError: If observations, actions or goals of the two differ in width.
        ConfigError, CapabilityError: If it cannot show what the policy was trained on; see `seen_by`.
        MissingExtraError: If nothing can be drawn here.
    """
    spec, advice = env.spec, "Evaluate it on the task it was made for."
    require_fit(f"env={spec.name}", spec, "the policy", policy, advice=advice)
    images: Mapping[str, ImageShape] = getattr(policy, "images", {})
    task = seen_by(env, images)
    if images:
        from envs.rendering import require_gl

        require_gl()
    return task


def as_evaluated(policy: EvaluatedPolicy, settings: EvaluationSettings) -> EvaluatedPolicy:
    """Return the policy with the steps that the settings give it, along their sketch.

    Raises:
        ConfigError: If a number of steps, a short run or a sketch does not fit it.
        CapabilityError: If it has no such switch.
    """
    view = with_act_steps(with_steps(policy, settings.steps), settings.act_steps)
    if settings.warm_start.is_on:
        Replanner(view, settings.warm_start)
    return steered(view, settings.steer)


def with_steps(policy: EvaluatedPolicy, steps: int | None) -> EvaluatedPolicy:
    """Return the policy, denoising in a given number of steps; None leaves it as it is.

    Raises:
        CapabilityError: If its sampler has no number of steps.
    """
    if steps is None:
        return policy
    sampler = getattr(policy, "sampler", None)
    has_steps = is_dataclass(sampler) and any(f.name == "steps" for f in fields(sampler))
    if not has_steps or not hasattr(policy, "with_sampler"):
        raise CapabilityError(
            f"steps={steps} needs a policy whose sampler has a number of steps; {type(policy).__name__} has "
            f"none. Leave steps out."
        )
    view: EvaluatedPolicy = policy.with_sampler(replace(sampler, steps=steps))  # type: ignore[type-var]
    return view


class _Counter:
    """Adds up the episodes that workers report."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def __call__(self, ended: int) -> None:
        """Count some more."""
        self._done += ended
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


def _play(
    player: Player, env: EnvConfig, episodes: int, num_envs: int, num_workers: int, counter: _Counter
) -> list[EpisodeRow]:
    """Divide the episodes over workers and collect their rows."""
    count = min(max(1, num_workers), episodes, num_envs)
    shares = [part.tolist() for part in np.array_split(np.arange(episodes), count)]
    widths = [len(part) for part in np.array_split(np.arange(num_envs), count)]
    policy: Any = player.policy
    was_training = getattr(policy, "training", False)
    if was_training:
        policy.eval()
    try:
        sent = _on_cpu(player) if num_workers else player
        arguments = [(env, sent, share, width) for share, width in zip(shares, widths, strict=True)]
        workers = start_workers(Evaluator, arguments, processes=num_workers > 0)
        try:
            return [row for rows in workers.call("run", [()] * count, on_message=counter) for row in rows]
        finally:
            workers.close()
    finally:
        if was_training:
            policy.train()


def _on_cpu(player: Player) -> Player:
    """Return a player for worker processes, its policy on the CPU."""
    policy = player.policy
    return replace(player, policy=policy.on_cpu() if isinstance(policy, Policy | BestOfN) else policy)


def _describe(env: EnvConfig) -> dict[str, Any]:
    """Describe a task by JSON values."""
    spec = env.spec
    options: dict[str, Any] = asdict(env) if is_dataclass(env) and not isinstance(env, type) else {}
    for name in ("demonstrator", *PICTURE_OPTIONS):  # no part of the task that is evaluated
        options.pop(name, None)
    description: dict[str, Any] = json.loads(
        json.dumps(
            {
                "name": spec.name,
                "options": options,
                "max_episode_steps": spec.max_episode_steps,
                "success_rule": spec.success_rule,
                "reference_scores": spec.reference_scores,
            }
        )
    )
    return description


def _describe_images(task: Any) -> dict[str, Any]:
    """Describe what the policy looks at, if it does; cameras are a matter of the policy, not of the task."""
    if not getattr(task, "cameras", ()):
        return {}
    shapes = {camera: list(shape) for camera, shape in task.images.items()}
    return {"images": {"cameras": shapes, "shadows": task.image_shadows}}


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _by_seed(evaluation: Evaluation, quantity: str, seeds: Sequence[int]) -> Array:
    """Return a quantity (len(seeds),) in the order of the seeds."""
    values = dict(zip((row.seed for row in evaluation.rows), evaluation.values(quantity), strict=True))
    return np.array([values[seed] for seed in seeds])


def _row_to_json(row: EpisodeRow) -> dict[str, Any]:
    data = {f.name: getattr(row, f.name) for f in fields(row) if f.compare}
    data["metrics"] = {name: value if math.isfinite(value) else None for name, value in row.metrics.items()}
    return data


def _row_from_json(data: Mapping[str, Any]) -> EpisodeRow:
    metrics = {name: math.nan if value is None else value for name, value in data["metrics"].items()}
    return EpisodeRow(**{**data, "metrics": metrics})
