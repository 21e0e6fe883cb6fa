"""Weights of other programs: what a checkpoint holds, and which policy of ours it is.

One file per program registers a source in the group `source`; `importing.py` builds the policy. A
`ForeignSource` names a denoiser on states, whose sizes are read here; a `PolicySource` describes all parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.encoders import ImageShape
from policies.errors import CheckpointError, ConfigError
from policies.importing.files import Files, Tensors
from policies.policy_config import PolicyConfig

AffineMap = tuple[Tensor, Tensor]
"""(scale, offset), each (D,): physical x becomes scale x + offset."""


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint, by what they belong to."""

    network: Mapping[str, Tensor]  # of the denoiser, by released name
    tuned: Mapping[str, Tensor] | None = None  # of its copy for the last denoising steps; None: there is none
    tuned_steps: int | None = None  # how many steps use that copy
    maps: Mapping[str, AffineMap] = field(default_factory=dict)  # of `state` and `action`, where stored
    skipped: Mapping[str, str] = field(default_factory=dict)  # name of every tensor that is left out, and why


@dataclass(frozen=True)
class Network:
    """A released network: our configuration, and the sizes in its tensors; None: in no tensor."""

    backbone: Any
    keys: Mapping[str, str]  # released parameter names to ours
    cond_dim: int  # C, width of the condition, To times Do
    chunk_size: int | None = None  # numbers in a chunk, Th times Da
    action_dim: int | None = None  # Da
    horizon: int | None = None  # Th
    obs_steps: int | None = None  # To
    constants: Mapping[str, Tensor] = field(default_factory=dict)  # no weights: values that ours implies

    def placed(self, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Return released weights by our names; a CheckpointError lists what is missing or unexpected."""
        missing, unexpected = sorted(set(self.keys) - set(weights)), sorted(set(weights) - set(self.keys))
        if missing or unexpected:
            raise CheckpointError(
                f"the tensors are not those of this network: missing {', '.join(missing[:12]) or 'none'}; "
                f"unexpected {', '.join(unexpected[:12]) or 'none'}."
            )
        return {f"{prefix}{ours}": weights[theirs] for theirs, ours in self.keys.items()}


@dataclass(frozen=True)
class ForeignSource(Checked, ABC):
    """A program whose weights can be read; its fields are what no tensor holds.

    Attributes:
        obs_steps: Observations that the policy sees; null: as many as the tensors show.
        act_steps: Actions that are executed before it decides again; null: all from the first executed one
            (Diffusion Policy published 8 of 16, DPPO and ReinFlow the whole chunk).
    """

    obs_steps: int | None = bounded(None, ge=1)
    action_dim: int | None = bounded(None, ge=1)  # width of an action; null: from the tensors
    horizon: int | None = bounded(None, ge=1)  # actions that the policy predicts; null: from the tensors
    act_steps: int | None = bounded(None, ge=1)

    @abstractmethod
    def contents(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Separate the tensors of a checkpoint."""

    @abstractmethod
    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        """Read the network's sizes from its tensors, with the width of an action where it is known."""

    @abstractmethod
    def parts(self) -> tuple[Any, Any]:
        """Return the process, and the sampler that the program evaluates with."""

    def first_row(self, obs_steps: int) -> int:
        """Return the first executed row of a chunk."""
        return 0

    def maps(self, statistics: Mapping[str, np.ndarray]) -> Mapping[str, AffineMap]:
        """Return the normalisation that a file beside the checkpoint describes."""
        raise ConfigError(f"{type(self).__name__} reads no statistics beside the checkpoint.")


@dataclass(frozen=True)
class Description:
    """A policy of ours, and the weights that another program gave it."""

    config: PolicyConfig  # all parts; normalisation follows from `maps`
    obs_dim: int
    action_dim: int
    weights: Mapping[str, Tensor]  # every weight of the policy, by our name
    tensors: Tensors  # of the checkpoint, all taken or skipped
    maps: Mapping[str, AffineMap] = field(default_factory=dict)  # of `state`, `action` and `goal`, if known
    images: Mapping[str, ImageShape] = field(default_factory=dict)
    entry: str = ""  # name of the weights in the checkpoint
    state: tuple[str, ...] = ()  # what the program calls the parts of `state`, in order; empty: one part
    fixed: tuple[str, ...] = ()  # features whose map is the identity by construction of the program
    beside: tuple[str, ...] = ("state", "action")  # read from a file of statistics; empty: none is read
    interface: Mapping[str, Any] = field(default_factory=dict)  # as of a dataset: rate and kind of actions
    goal_dim: int = 0
    wrapper: Any = None  # around the policy of `config`, whose sizes the others are; null: none


@dataclass(frozen=True)
class PolicySource(Checked, ABC):
    """A program whose checkpoint describes a whole policy; its fields are what no file holds."""

    @abstractmethod
    def read(self, files: Files) -> Description:
        """Describe the policy of a checkpoint."""
