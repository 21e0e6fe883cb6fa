"""Evaluate policies by a protocol: seeded episodes, stored rows, intervals, paired comparison.

Episode i starts from seed `first_seed + i` and draws its sampling noise from its own generator. Its row is
identical, bit for bit on a CPU, for any number of environments and workers (see `envs.rollouts.player`).

Legend: E episodes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from torch import nn

from envs.evaluation.intervals import (
    RISK_SHARE,
    bootstrap_mean,
    conditional_value_at_risk,
    stated,
    value_at_risk,
    wilson,
)
from envs.evaluation.protocol import describe_protocol, prepare_eval, with_settings
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.fleet import LOCAL, Fleet
from envs.rollouts.player import NETWORK_CALLS, EpisodeRunner, EvaluatedPolicy, Evaluator
from envs.spec import Array, EnvConfig, judged_by
from policies.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFailure,
    TrainingError,
    WorkerError,
)
from policies.policy import Policy
from policies.wrappers.best_of_n import BestOfN

_USUAL = EvaluationSettings()


@dataclass(frozen=True)
class Evaluation:
    """Per-episode rows in order, and the protocol: all but the policy that determines the numbers."""

    rows: tuple[EpisodeRow, ...]
    protocol: dict[str, Any]

    @property
    def protocol_hash(self) -> str:
        """SHA-256 of the canonical JSON of the protocol."""
        text = json.dumps(self.protocol, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def quantity(self) -> str:
        return judged_by(self.protocol["env"]["success_rule"])

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
        """Return means with 95 % intervals, and the worst returns; success and score only if defined.

        One episode alone has an interval of its success (Wilson's), and none of its numbers.
        """
        out: dict[str, Any] = {
            "env": self.protocol["env"]["name"],
            "episodes": len(self.rows),
            "protocol_hash": self.protocol_hash,
        }
        for quantity in ("return", "length"):
            out[quantity] = stated(bootstrap_mean(self.values(quantity)), len(self.rows))
        if self.protocol["env"]["success_rule"]:
            out["success"] = asdict(wilson(int(self.values("success").sum()), len(self.rows)))
        if self.protocol["env"]["reference_scores"]:
            out["d4rl_score"] = stated(bootstrap_mean(self.d4rl_scores()), len(self.rows))
        returns, share = self.values("return"), {"share": RISK_SHARE}
        out["return_value_at_risk"] = {"value": value_at_risk(returns)} | share
        out["return_var"] = out["return_value_at_risk"]  # former name, for one version
        out["return_cvar"] = stated(conditional_value_at_risk(returns), len(self.rows)) | share
        if self.rows and NETWORK_CALLS in self.rows[0].metrics:
            out[NETWORK_CALLS] = stated(bootstrap_mean(self.values(NETWORK_CALLS)), len(self.rows))
        return out

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
    def from_json(cls, content: str | Mapping[str, Any]) -> Evaluation:
        """Deserialise the output of `to_json`, as text or parsed.

        Raises:
            CheckpointError: If the content is no evaluation or its protocol was modified.
        """
        try:
            data = json.loads(content) if isinstance(content, str) else content
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
    settings: EvaluationSettings = _USUAL,
    *,
    num_workers: int = 0,
    fleet: Fleet = LOCAL,
    keep_observations: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    noise_span: int | None = None,
) -> Evaluation:
    """Evaluate a policy on seeded episodes.

    Args:
        policy: The policy; unchanged.
        env: The task.
        settings: The protocol, of at least one episode; fields of a subclass are no part of it.
        num_workers: Processes on the CPU; 0: this one, as for a task that is an object of this process. Does
            not affect the results of a policy on the CPU.
        fleet: Where they run.
        keep_observations: Store `observations`, `actions` and `rewards` of every control step in the rows.
        on_progress: Called with (finished episodes, E).
        noise_span: Episodes of one root of noise; the next ones have the next root. None: all.

    Raises:
        ConfigError: If an argument is out of range or the policy does not fit the task, images included.
        CapabilityError: If the settings have `steps` and the sampler has no number of steps, or they have
            `act_steps`, `warm_start` or `steer` and the policy does not plan, or the policy requires images
            of a task that cannot be rendered.
        MissingExtraError: If the policy requires images and rendering is unavailable.
        TrainingError: If an action is not finite; the error tells how the episodes before it ended.
        EnvironmentFailure, WorkerError: If the simulator or a process fails; likewise.
    """
    settings = EvaluationSettings(**{f.name: getattr(settings, f.name) for f in fields(EvaluationSettings)})
    episodes, noises = settings.episodes, (settings.start_noise, settings.sampling_noise)
    if episodes < 1 or num_workers < 0:
        raise ConfigError(
            f"episodes must be at least 1 and num_workers at least 0; got {episodes} and {num_workers}."
        )
    task = prepare_eval(env, policy)
    if getattr(task, "is_local", False):
        num_workers = 0
    runner = EpisodeRunner(
        with_settings(policy, settings), settings.first_seed, settings.noise_seed, *noises,
        keep=keep_observations, warm_start=settings.warm_start, noise_span=noise_span,
    )  # fmt: skip
    finished: list[EpisodeRow] = []

    def count(ended: list[EpisodeRow]) -> None:
        finished.extend(ended)
        if on_progress is not None:
            on_progress(len(finished), episodes)

    described = describe_protocol(env, settings, task)
    try:
        rows = _run_episodes(runner, task, episodes, settings.num_envs, num_workers, fleet, count)
    except (TrainingError, EnvironmentFailure, WorkerError) as error:
        raise type(error)(
            f"{error} {_unfinished(Evaluation(tuple(finished), described), episodes)}"
        ) from error
    return Evaluation(tuple(sorted(rows, key=lambda row: row.episode)), described)


def _unfinished(played: Evaluation, episodes: int) -> str:
    """Return what is known of an evaluation that an error ended."""
    if not played.rows:
        return f"None of {episodes} episodes had ended."
    mean = f"their mean {played.quantity} is {played.values(played.quantity).mean():.4g}"
    return (
        f"{len(played.rows)} of {episodes} episodes had ended; {mean}, and nothing is stored. Episodes "
        "follow from their seeds: others can be played without those of this error."
    )


def _run_episodes(
    runner: EpisodeRunner,
    env: EnvConfig,
    episodes: int,
    num_envs: int,
    num_workers: int,
    fleet: Fleet,
    on_message: Callable[[list[EpisodeRow]], None],
) -> list[EpisodeRow]:
    count = min(max(1, num_workers), episodes, num_envs)
    shares = [part.tolist() for part in np.array_split(np.arange(episodes), count)]
    widths = [len(part) for part in np.array_split(np.arange(num_envs), count)]
    with _in_evaluation_mode(runner.policy):
        sent = _on_cpu(runner) if num_workers else runner
        arguments = [(env, sent, share, width) for share, width in zip(shares, widths, strict=True)]
        workers = fleet.start(Evaluator, arguments, processes=num_workers > 0)
        try:
            return [row for rows in workers.call("run", [()] * count, on_message=on_message) for row in rows]
        finally:
            workers.close()


@contextmanager
def _in_evaluation_mode(policy: EvaluatedPolicy) -> Iterator[None]:
    """Set every module of a policy to evaluation mode; restores modes on exit."""
    if not isinstance(policy, nn.Module):
        yield
        return
    modes = [(part, part.training) for part in policy.modules()]
    policy.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _on_cpu(runner: EpisodeRunner) -> EpisodeRunner:
    policy = runner.policy
    return replace(runner, policy=policy.on_cpu() if isinstance(policy, Policy | BestOfN) else policy)


def _row_to_json(row: EpisodeRow) -> dict[str, Any]:
    data = {f.name: getattr(row, f.name) for f in fields(row) if f.compare}
    data["metrics"] = {name: value if math.isfinite(value) else None for name, value in row.metrics.items()}
    return data


def _row_from_json(data: Mapping[str, Any]) -> EpisodeRow:
    metrics = {name: math.nan if value is None else value for name, value in data["metrics"].items()}
    return EpisodeRow(**{**data, "metrics": metrics})
