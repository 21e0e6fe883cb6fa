"""An exported folder as something that an evaluation can play: the runner's numbers, not the policy's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.errors import CheckpointError
from policies.export_folder import PROGRAM
from policies.export_graph import arrays_of
from policies.export_torch import load_program
from policies.protocols import ChunkSpec
from policies.runner import SIGNATURE, Runner


class ExportedPolicy:
    """Acts as the exported graph or program does, with the noise that the policy would be given.

    Args:
        folder: What `burnish export` wrote.

    Raises:
        CheckpointError: If it did not.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not is_exported(self.folder):
            raise CheckpointError(f"{folder} is no exported policy: it holds no {SIGNATURE}.")
        self.signature: dict[str, Any] = json.loads((self.folder / SIGNATURE).read_text())
        facts, inputs = self.signature, self.signature["inputs"]
        width = facts["outputs"]["action"]["shape"][-1]
        sizes = (facts["horizon"], facts["act_steps"], facts["obs_steps"], facts["action_start"])
        self.chunk = ChunkSpec(width, *sizes)
        self.obs_dim: int = inputs["observation"]["shape"][-1]
        self.goal_dim: int = inputs["goal"]["shape"][-1] if "goal" in inputs else 0
        self.noise_shape = tuple(inputs["noise"]["shape"][1:])
        self._open()

    def __reduce__(self) -> tuple[type[ExportedPolicy], tuple[Path]]:
        """Send the place, not the opened files: workers open them themselves."""
        return ExportedPolicy, (self.folder,)

    def _open(self) -> None:
        self._program: Any = None
        self._runner: Any = None
        if self.signature["format"] == "torch":
            self._program = load_program(self.folder / PROGRAM)
        else:
            self._runner = Runner(self.folder)

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise (n, *noise_shape), the same that the policy draws."""
        return torch.randn((n, *self.noise_shape), generator=generator)

    def act(
        self, obs: Any, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Choose actions (B, Ta, Da); see `Policy.act`. They are not clipped, as a policy's are not."""
        items = dict(obs) if isinstance(obs, Mapping) else {"state": obs}
        inputs = {name: torch.as_tensor(value) for name, value in items.items()}
        inputs["observation"] = inputs.pop("state").float()
        if noise is None:
            noise = self.sample_noise(len(inputs["observation"]), generator=generator)
        inputs = {"noise": noise.float(), **inputs}
        found = self._program(inputs) if self._program else self._runner.predict(arrays_of(inputs))
        return torch.from_numpy(found[0])


def is_exported(folder: Path) -> bool:
    """Tell whether a folder is one that `burnish export` wrote."""
    return (folder / SIGNATURE).is_file()
