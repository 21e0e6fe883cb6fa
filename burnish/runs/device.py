"""The device that the key `device` of a command names."""

from __future__ import annotations

from contextlib import suppress

import torch

from policies.errors import ConfigError


def device_of(name: str) -> torch.device:
    """Return the device of a name.

    Raises:
        ConfigError: If it is of another kind, or not there.
    """
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or cuda:<n>; got '{name}'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} is not available on this machine. Use device=cpu.")
    return device
