"""Normalisation: the only conversion between physical and model units.

Every feature has a mode and statistics, saved with the policy. Missing statistics are an error; mode
`identity` keeps a feature unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from policies.errors import ConfigError

_log = logging.getLogger(__name__)

MODES = ("limits", "gaussian", "identity")
SMALLEST_RANGE = 1e-4  # below it (or below this deviation) a feature is constant and keeps scale 1
_ROUNDING = 1e-6  # ranges below it are errors of rounding
_COARSE = 1e-5  # float32 has less than a hundred steps in a range below this share of the numbers

Statistics = Mapping[str, Mapping[str, Tensor]]
"""Per feature: `min`, `max`, `mean`, `std`, each (D,), in physical units."""


def box_statistics(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return statistics of a box, each (D,); both modes map the box to [-1, 1]."""
    return {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 2}


def affine(mode: str, stats: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (scale, offset), each (D,) float32, of `y = scale * x + offset`.

    `limits` maps [min, max] to [-1, 1]; `gaussian` maps to zero mean and unit (unbiased) deviation. Constant
    features keep scale 1 and are only shifted. Source: Diffusion Policy (arXiv 2303.04137), its normaliser.
    """
    low, high = stats["min"].double(), stats["max"].double()
    if mode == "identity":
        scale, offset = torch.ones_like(low), torch.zeros_like(low)
    elif mode == "limits":
        constant = (high - low) < SMALLEST_RANGE
        scale = torch.where(constant, 1.0, 2.0 / (high - low).clamp(min=SMALLEST_RANGE))
        offset = torch.where(constant, -low, -1.0 - scale * low)
    elif mode == "gaussian":
        mean, std = stats["mean"].double(), stats["std"].double()
        scale = torch.where(std < SMALLEST_RANGE, 1.0, 1.0 / std.clamp(min=SMALLEST_RANGE))
        offset = -mean * scale
    else:
        raise ConfigError(f"normalizer mode must be one of {', '.join(MODES)}; got '{mode}'.")
    return scale.float(), offset.float()


class Normalizer(nn.Module):
    """Affine maps of named features; scale and offset are buffers.

    Args:
        modes: Mode of each feature.
        dims: Width D of each feature.
        clips: Bound, at least 1, on the magnitude of encoded values by feature; none of mode `identity`.
    """

    def __init__(
        self, modes: Mapping[str, str], dims: Mapping[str, int], clips: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.modes = dict(modes)
        self.clips = {name: one for name, one in (clips or {}).items() if self.modes.get(name) != "identity"}
        for name, mode in self.modes.items():
            if mode not in MODES:
                raise ConfigError(
                    f"normalizer mode of '{name}' must be one of {', '.join(MODES)}; got '{mode}'."
                )
            self.register_buffer(f"{name}_scale", torch.ones(dims[name]))
            self.register_buffer(f"{name}_offset", torch.zeros(dims[name]))

    def fit(self, statistics: Statistics) -> Normalizer:
        """Set the maps from statistics of all features and return self."""
        for name, mode in self.modes.items():
            if mode == "identity":
                continue
            if name not in statistics:
                known = ", ".join(sorted(statistics)) or "none"
                raise ConfigError(
                    f"feature '{name}' has no statistics (there are: {known}). Fit them or use mode identity."
                )
            self.refit(name, statistics[name])
            _warn_of_lost_entries(name, mode, statistics[name])
        return self

    def refit(self, name: str, moments: Mapping[str, Tensor]) -> None:
        """Set the map of one feature from its statistics."""
        scale_buffer, offset_buffer = self._buffers_of(name)
        scale, offset = affine(self.modes[name], moments)
        if scale.shape != scale_buffer.shape:
            expected, got = tuple(scale_buffer.shape), tuple(scale.shape)
            raise ConfigError(f"statistics of '{name}' must have shape {expected}; got {got}.")
        if not (scale.isfinite().all() and offset.isfinite().all() and scale.all()):
            raise ConfigError(f"statistics of '{name}' are not finite. Check the dataset for NaN or inf.")
        with torch.no_grad():
            scale_buffer.copy_(scale)
            offset_buffer.copy_(offset)

    def encode(self, name: str, x: Tensor) -> Tensor:
        """Physical -> normalised, clipped where the feature has a clip; x is (..., D)."""
        y = self._map(name, x)
        return y.clamp(-self.clips[name], self.clips[name]) if name in self.clips else y

    def decode(self, name: str, y: Tensor) -> Tensor:
        """Normalised -> physical; y is (..., D)."""
        scale, offset = self._buffers_of(name)
        return (y - offset) / scale

    def _map(self, name: str, x: Tensor) -> Tensor:
        scale, offset = self._buffers_of(name)
        return torch.addcmul(offset, x, scale)

    def _buffers_of(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self.modes:
            raise ConfigError(f"this policy has no feature '{name}' (it has: {', '.join(self.modes)}).")
        return getattr(self, f"{name}_scale"), getattr(self, f"{name}_offset")


def _warn_of_lost_entries(name: str, mode: str, stats: Mapping[str, Tensor]) -> None:
    """Log entries whose variation is lost: too small for their unit, or beside numbers that are too large."""
    low, high = stats["min"].double(), stats["max"].double()
    varies, size = high - low, torch.maximum(low.abs(), high.abs())
    measured = stats["std"].double() if mode == "gaussian" else varies
    coarse = (varies > 0) & (varies < _COARSE * size)
    small = (varies > _ROUNDING) & (measured < SMALLEST_RANGE) & ~coarse
    gone = (varies == 0) & (size * torch.finfo(torch.float32).eps > SMALLEST_RANGE)
    for entries, why, advice in (
        (gone, "nothing in float32, whose steps are coarse at their size", "numbers around 0, if they vary"),
        (small, f"less than {SMALLEST_RANGE:g} and count as constant", "a smaller unit (mm for m)"),
        (coarse, "little beside their size, of which float32 keeps few steps", "numbers around 0"),
    ):
        if entries.any():
            found = entries.nonzero().flatten().tolist()
            _log.warning("entries %s of '%s' vary by %s. Record them in %s.", found, name, why, advice)


class CentredNormalizer(Normalizer):
    """Maps of a normaliser as `y = scale (x - centre) + rest`, for runtimes without fused multiply-add.

    For a feature that varies by thousandths around a value of order one, `scale x` and `offset` are hundreds
    and cancel. PyTorch rounds once after the addition; a graph rounds in between, which costs five of seven
    digits. The difference `x - centre` is exact, and `rest` is small.
    """

    def __init__(self, plain: Normalizer) -> None:
        widths = {name: plain.get_buffer(f"{name}_scale").numel() for name in plain.modes}
        super().__init__(plain.modes, widths, plain.clips)
        self.load_state_dict(plain.state_dict())
        for name in self.modes:
            scale, offset = (part.double() for part in self._buffers_of(name))
            centre = (-offset / scale).float()
            self.register_buffer(f"{name}_centre", centre)
            self.register_buffer(f"{name}_rest", (offset + scale * centre.double()).float())

    def _map(self, name: str, x: Tensor) -> Tensor:
        scale, _ = self._buffers_of(name)
        return (x - self.get_buffer(f"{name}_centre")) * scale + self.get_buffer(f"{name}_rest")
