"""Denoising backbones: networks that map (noisy chunk, network time, condition) to a chunk.

A backbone knows nothing about noise schedules. One file per architecture; each registers its
configuration in the group `backbone`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from policies.protocols import BoundField, Cond


@runtime_checkable
class Backbone(Protocol):
    """Interface of a backbone (an `nn.Module`) for processes, samplers and algorithms."""

    def __call__(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        """Evaluate the network at noisy chunks x and network times; (M, Th, Da) -> (M, Th, Da).

        Shapes:
            time: (M,), or (K,) with `time_row`. cond: M rows, or any number with `cond_row`.
            cond_row, time_row: (M,) integer row of `cond` and of `time` for each row of x: what rows share is
                projected or embedded once.
            second_time: as `time`: where a step ends or how long it is, for processes that learn whole steps;
                given exactly if the backbone was built with one.
        """
        ...

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        """Precompute all that depends on the condition (B rows, or one for all) and the times (K,) only.

        Pass the same tensors of times every time: what depends on them is kept.

        Returns:
            `bound(k, x)`, equal to the network at x (B, Th, Da) and time `times[k]`; valid as long as the
            weights stay as they are.
        """
        ...

    def features(
        self, cond: Cond, times: Tensor, second_times: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return embedded times (K, T) and conditions (B, C'), e.g. for the noise network of ReinFlow."""
        ...

    def parameters(self) -> Iterator[Any]: ...


class BackboneConfig(Protocol):
    """Configuration of a backbone: a registered dataclass."""

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> Backbone:
        """Build a backbone for chunks (Th, Da), `Cond.vec` (B, C) and `Cond.tokens` (B, N, Ct), 0: none.

        Raises:
            CapabilityError: If it cannot attend to tokens or take a second time, and should.
        """
        ...
