"""Exported folder as an actor for evaluation and serving; runs the package's runner, not the folder's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.errors import BurnishError, ConfigError, ExportError
from policies.export.folder import MODELS
from policies.export.onnx_graph import arrays_of
from policies.export.signature import Signature, read_signature
from policies.runner import Array, Runner
from policies.storage.strict_json import own_file


class ExportedPolicy:
    """Act by the exported graph, with the same noise as the policy.

    Raises:
        CheckpointError: If it is no exported folder.
        ExportError: If signature and graph disagree, or the graph cannot be run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.description = read_signature(self.folder)
        self.signature: Mapping[str, Any] = self.description.facts
        self.chunk, self.noise_shape = self.description.chunk, self.description.noise_shape
        self.obs_dim, self.goal_dim = self.description.obs_dim, self.description.goal_dim
        self.images = self.description.images
        kinds = ("is_deterministic", "chooses")  # exports of earlier versions lack them
        self.is_deterministic, self.chooses = (self.signature.get(name) is True for name in kinds)
        try:
            for name in MODELS:
                own_file(self.folder / name)
            self._runner = Runner(self.folder)
            found = self._run(_example(self.description))[0]
        except BurnishError:
            raise
        except Exception as error:  # runtimes raise their own classes
            raise ExportError(f"{self.folder} cannot be run: {str(error)[:500]}") from None
        if found.shape != (1, *self.description.action.shape):
            expected = f"(1, *{self.description.action.shape}) by its signature"
            raise ExportError(
                f"{self.folder} must give actions {expected}; got {found.shape}. Export it again."
            )

    def __reduce__(self) -> tuple[type[ExportedPolicy], tuple[Path]]:
        return ExportedPolicy, (self.folder,)  # workers open the files themselves

    def _run(self, inputs: Mapping[str, Tensor]) -> list[Array]:
        return list(self._runner.predict(arrays_of(inputs)))

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn((n, *self.noise_shape), generator=generator)

    def act(
        self, obs: Any, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return actions (B, Ta, Da), not clipped; see `Policy.act`."""
        items = dict(obs) if isinstance(obs, Mapping) else {"state": obs}
        if "state" not in items:
            raise ConfigError(f"an observation needs 'state', (B, To, Do); got {sorted(items)}.")
        inputs = {name: _as_sent(torch.as_tensor(value)) for name, value in items.items()}
        inputs["observation"] = inputs.pop("state").float()
        if noise is None:
            noise = self.sample_noise(len(inputs["observation"]), generator=generator)
        return torch.from_numpy(self._run({"noise": noise.float(), **inputs})[0])


def _as_sent(value: Tensor) -> Tensor:
    """Convert float images in [0, 1], (B, To, H, W, C), to uint8; other tensors are unchanged."""
    is_image = value.dim() == 5 and value.is_floating_point()
    return (255 * value).round().clamp(0, 255).to(torch.uint8) if is_image else value


def _example(signature: Signature) -> dict[str, Tensor]:
    rows = {name: np.zeros((1, *one.shape), one.dtype) for name, one in signature.inputs.items()}
    noise = np.zeros((1, *signature.noise_shape), np.float32)
    return {name: torch.from_numpy(value) for name, value in {**rows, "noise": noise}.items()}
