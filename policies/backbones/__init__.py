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
        """Evaluate the network.

        Shapes:
            x: (M, Th, Da). time: (M,), or (K,) with `time_row`. cond: M rows, or any number with `cond_row`.
            cond_row, time_row: (M,) integer row of `cond` and of `time` that belongs to each row of x.
            second_time: as `time`.

        Args:
            x: Noisy chunks.
            time: Network times.
            cond: Encoded observations.
            cond_row: Given when many rows share a condition: it is projected once per distinct row.
            time_row: Given when many rows share a time: it is embedded once per distinct value.
            second_time: Where a step ends or how long it is, for processes that learn whole steps; given
                exactly if the backbone was built with one.

        Returns:
            (M, Th, Da)
        """
        ...

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        """Precompute all that depends on the condition (B rows, or one for all) and the times (K,) only.

        Returns:
            `bound(k, x)`, equal to the network at x (B, Th, Da) and time `times[k]`; valid as long as the
            weights stay as they are.
        """
        ...

    def features(
        self, cond: Cond, times: Tensor, second_times: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of times and conditions, which do not depend on a chunk.

        Networks beside it may start from these (the exploration noise of ReinFlow does).

        Returns:
            Embedded times (K, T) and embedded conditions (B, C').
        """
        ...

    def parameters(self) -> Iterator[Any]: ...


class BackboneConfig(Protocol):
    """Configuration of a backbone: a registered dataclass."""

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> Backbone:
        """Build a backbone.

        Args:
            chunk_shape: (Th, Da).
            cond_dim: Width C of `Cond.vec`.
            token_dim: Width Ct of `Cond.tokens`; 0: there are none.
            second_time: Whether the network receives a second time.

        Raises:
            CapabilityError: If it cannot attend to tokens or take a second time, and should.
        """
        ...
