"""`burnish rank`: make a policy that executes the best of several chunks, by its own score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burnish.config.overrides import RunContext
from burnish.console import output
from burnish.runs.locate import check_folder_to_fill, locate
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.paths import path_field
from policies.storage.policy_folder import save_policy
from policies.wrappers.candidates import SCORES, with_candidates


@dataclass(frozen=True)
class RankConfig(Checked):
    """Configuration of `burnish rank`."""

    policy: str | None = path_field()  # a run (last checkpoint), a checkpoint, or a policy directory
    score: str = bounded("density", choices=SCORES)  # what ranks: the policy's density, energy or critics
    num_candidates: int = bounded(16, ge=1)  # N, sampled chunks per decision
    score_draws: int = bounded(8, ge=1)  # draws of noise and time per density of a policy that denoises
    out: str | None = path_field()  # directory; null: ranked-<policy>
    overwrite: bool = False  # replace the policy in an existing directory

    def unused(self) -> dict[str, str]:
        return {} if self.score == "density" else {"score_draws": "without score=density"}


def run(config: RankConfig, context: RunContext) -> None:
    """Write the policy directory and print its path."""
    output().print(f"written: {rank(config)}", markup=False, soft_wrap=True)


def rank(config: RankConfig) -> Path:
    """Wrap a policy and write it as a policy directory; returns the directory."""
    if config.policy is None:
        raise ConfigError("rank needs policy=<run or policy directory>.")
    found = locate(config.policy)
    target = Path(config.out if config.out is not None else f"ranked-{found.label}")
    check_folder_to_fill(target, config.overwrite)
    policy = with_candidates(
        found.load(), config.score, config.num_candidates, score_draws=config.score_draws
    )
    return save_policy(policy, target, provenance={**found.provenance(), "ranked": found.label})
