"""Reference returns of the D4RL tasks and normalised scores.

Score = 100 (R - min) / (max - min): 0 is the mean return of a uniformly random policy, 100 that of the
reference expert; R is the undiscounted return of an episode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from policies.errors import DatasetError


@dataclass(frozen=True)
class Reference:
    """Returns of a random and an expert policy."""

    min_return: float
    max_return: float

    @property
    def returns(self) -> tuple[float, float]:
        """Those of a random and an expert policy, as `EnvSpec.reference_scores`."""
        return self.min_return, self.max_return


_GYM = "{random,medium,expert,medium-expert,medium-replay}-v{0,1,2}|{name}-full-replay-v{1,2}"
_BULLET = "{random,medium,expert,medium-expert,medium-replay}-v0"
_HAND = "{human,cloned,expert,human-longhorizon}-v{0,1}"

# name pattern (braces: alternatives, `|`: another pattern) -> min, max.
# As in the official table, `maze2d-eval-large-dense` has the minimum of `maze2d-eval-umaze-dense`.
_TABLE: dict[str, tuple[float, float]] = {
    "halfcheetah-" + _GYM: (-280.178953, 12135.0),
    "hopper-" + _GYM: (-20.272305, 3234.3),
    "walker2d-" + _GYM: (1.629008, 4592.3),
    "ant-" + _GYM + "|ant-random-expert-v0": (-325.6, 3879.7),
    "antmaze-{umaze,umaze-diverse}-v{0,1,2}|antmaze-eval-{umaze,umaze-diverse}-v0": (0.0, 1.0),
    "antmaze-{medium,large}-{play,diverse}-v{0,1,2}": (0.0, 1.0),
    "antmaze-eval-{medium,large}-{play,diverse}-v0": (0.0, 1.0),
    "maze2d-open-v0": (0.01, 20.66),
    "maze2d-umaze-v0": (0.94, 62.6),
    "maze2d-medium-v0": (5.77, 85.14),
    "maze2d-large-v0": (4.83, 191.99),
    "maze2d-umaze-v1": (23.85, 161.86),
    "maze2d-medium-v1": (13.13, 277.39),
    "maze2d-large-v1": (6.7, 273.99),
    "maze2d-eval-umaze-v1": (36.63, 141.4),
    "maze2d-eval-medium-v1": (13.07, 204.93),
    "maze2d-eval-large-v1": (16.4, 302.22),
    "maze2d-open-dense-v0": (11.17817, 27.166538620695782),
    "maze2d-umaze-dense-v0": (23.249793, 81.78995240126592),
    "maze2d-medium-dense-v0": (19.47762, 96.03474232952358),
    "maze2d-large-dense-v0": (27.38831, 215.09965671563742),
    "maze2d-umaze-dense-v1": (68.537689, 193.66285642381482),
    "maze2d-medium-dense-v1": (44.264742, 297.4552547777125),
    "maze2d-large-dense-v1": (30.569041, 303.4857382709002),
    "maze2d-eval-umaze-dense-v1": (56.95455, 178.21373133248397),
    "maze2d-eval-medium-dense-v1": (42.28578, 235.5658957482388),
    "maze2d-eval-large-dense-v1": (56.95455, 326.09647655082637),
    "kitchen-{complete,partial,mixed}-v0": (0.0, 4.0),
    "pen-" + _HAND: (96.262799, 3076.8331017826877),
    "hammer-" + _HAND: (-274.856578, 12794.134825156867),
    "door-" + _HAND: (-56.512833, 2880.5693087298737),
    "relocate-" + _HAND: (-6.425911, 4233.877797728884),
    "minigrid-{fourrooms,fourrooms-random}-v0": (0.01442, 2.89685),
    "bullet-halfcheetah-" + _BULLET: (-1275.766996, 2381.6725),
    "bullet-hopper-" + _BULLET: (20.058972, 1441.8059623430963),
    "bullet-ant-" + _BULLET: (373.705955, 2650.495),
    "bullet-walker2d-" + _BULLET: (16.523877, 1623.6476303317536),
    "bullet-maze2d-open-v0": (8.75, 64.15),
    "bullet-maze2d-umaze-v0": (32.46, 153.99),
    "bullet-maze2d-medium-v0": (14.87, 238.05),
    "bullet-maze2d-large-v0": (1.82, 285.92),
    "carla-{lane,lane-render}-v0": (-0.8503839912088142, 1023.5784385429523),
    "carla-{town,town-full}-v0": (-114.81579500772153, 2440.1772022247314),
    "flow-ring-v0|flow-ring-{random,controller,render}-v0": (-165.22, 24.42),
    "flow-merge-v0|flow-merge-{random,controller,render}-v0": (118.67993, 330.03179),
}


@cache
def references() -> dict[str, Reference]:
    """Return the references of every D4RL task by its full name."""
    table = {}
    for patterns, values in _TABLE.items():
        first = patterns.split("-")[0]
        for pattern in patterns.replace("{name}", first).split("|"):
            table.update(dict.fromkeys(expand(pattern), Reference(*values)))
    return dict(sorted(table.items()))


def reference(name: str) -> Reference:
    """Return the reference of a task's full name, or of a prefix whose names share one (`hopper`)."""
    table = references()
    if name in table:
        return table[name]
    shared = {value for key, value in table.items() if key.startswith(name + "-")}
    if len(shared) == 1:
        return shared.pop()
    near = [key for key in table if key.startswith(name + "-")][:4] or get_close_matches(name, table, n=3)
    raise DatasetError(
        f"expected the name of one D4RL task; got '{name}'. Try {', '.join(near) or 'e.g. hopper-medium-v2'}."
    )


def normalized_score(name: str, returns: ArrayLike) -> np.ndarray:
    """Return D4RL scores of episode returns, in percent (0 random, 100 expert), float64, same shape."""
    known = reference(name)
    spread = known.max_return - known.min_return
    return 100.0 * (np.asarray(returns, dtype=np.float64) - known.min_return) / spread


def expand(pattern: str) -> list[str]:
    """Expand the braces of a pattern: `a-{b,c}-v{0,1}` -> a-b-v0, a-b-v1, a-c-v0, a-c-v1."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]
