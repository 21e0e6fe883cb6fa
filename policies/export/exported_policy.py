"""An exported folder as something that an evaluation can play: the runner's numbers, not the policy's.

A folder of ONNX graphs executes no code of its maker. A program of `torch.export` does: PyTorch reads parts
of a .pt2 file as pickles. So a folder of `format=torch` is opened only where its maker is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.errors import BurnishError, ExportError
from policies.export.folder import MODELS, PROGRAM
from policies.export.onnx_graph import arrays_of
from policies.export.signature import Signature, read_signature
from policies.export.torch_program import load_program
from policies.runner import Array, Runner
from policies.storage.strict_json import own_file


class ExportedPolicy:
    """Acts as the exported graph or program does, with the noise that the policy would be given.

    Args:
        folder: What `burnish export` wrote.
        trust: Whether a file that may hold code, `format=torch`, is opened.

    Raises:
        CheckpointError: If it is no exported folder.
        ExportError: If its signature lies, it needs trust, or it cannot be run.
    """

    def __init__(self, folder: str | Path, trust: bool = False) -> None:
        self.folder, self.trust = Path(folder), trust
        self.description = read_signature(self.folder)
        self.signature: Mapping[str, Any] = self.description.facts
        self.chunk, self.noise_shape = self.description.chunk, self.description.noise_shape
        self.obs_dim, self.goal_dim = self.description.obs_dim, self.description.goal_dim
        refuse_to_run_code(self.folder, self.description, trust=trust)
        try:
            for name in MODELS:
                own_file(self.folder / name)
            self._open()
            found = self._run(_example(self.description))[0]
        except BurnishError:
            raise
        except Exception as error:  # runtimes raise classes of their own
            raise ExportError(f"{self.folder} cannot be run: {str(error)[:500]}") from None
        if found.shape != (1, *self.description.action.shape):
            raise ExportError(
                f"{self.folder} must give actions (1, *{self.description.action.shape}) by its signature; it "
                f"gives {found.shape}. Export the policy again."
            )

    def __reduce__(self) -> tuple[type[ExportedPolicy], tuple[Path, bool]]:
        """Send the place, not the opened files: workers open them themselves."""
        return ExportedPolicy, (self.folder, self.trust)

    def _open(self) -> None:
        self._program: Any = None
        self._runner: Any = None
        if self.description.format == "torch":
            self._program = load_program(self.folder / PROGRAM)
        else:
            self._runner = Runner(self.folder)

    def _run(self, inputs: Mapping[str, Tensor]) -> list[Array]:
        found: list[Array] = (
            self._program(inputs) if self._program else list(self._runner.predict(arrays_of(inputs)))
        )
        return found

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise (n, *noise_shape), the same that the policy draws."""
        return torch.randn((n, *self.noise_shape), generator=generator)

    def act(
        self, obs: Any, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Choose actions (B, Ta, Da); see `Policy.act`. They are not clipped, as a policy's are not."""
        items = dict(obs) if isinstance(obs, Mapping) else {"state": obs}
        inputs = {name: _as_sent(torch.as_tensor(value)) for name, value in items.items()}
        inputs["observation"] = inputs.pop("state").float()
        if noise is None:
            noise = self.sample_noise(len(inputs["observation"]), generator=generator)
        return torch.from_numpy(self._run({"noise": noise.float(), **inputs})[0])


def refuse_to_run_code(folder: Path, signature: Signature, *, trust: bool) -> None:
    """Refuse a folder that can execute what its maker likes, unless told to.

    Raises:
        ExportError: If it is one, and not trusted.
    """
    if signature.format == "torch" and not trust:
        raise ExportError(
            f"{folder / PROGRAM} is not opened: files of format=torch can execute code of whoever made them, "
            "and policy folders are expected not to; got trust=false. Say trust=true if you made it or trust "
            "who did; otherwise ask for format=onnx, which executes nothing."
        )


def _as_sent(value: Tensor) -> Tensor:
    """Return images in [0, 1], (B, To, H, W, C), as the bytes that an export takes; others as they are."""
    is_image = value.dim() == 5 and value.is_floating_point()
    return (255 * value).round().clamp(0, 255).to(torch.uint8) if is_image else value


def _example(signature: Signature) -> dict[str, Tensor]:
    """Return inputs of a batch of one, of zeros."""
    rows = {name: np.zeros((1, *one.shape), one.dtype) for name, one in signature.inputs.items()}
    noise = np.zeros((1, *signature.noise_shape), np.float32)
    return {name: torch.from_numpy(value) for name, value in {**rows, "noise": noise}.items()}
