"""Denoising backbones: networks that map (noisy chunk, network time, condition) to a chunk.

They are independent of noise schedules. One file per architecture registers its configuration in the group
`backbone`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from policies.protocols import BoundField, Cond, Features


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
            cond_row, time_row: (M,) integer row of `cond` and of `time` for each row of x; shared rows are
                projected or embedded once.
            second_time: as `time`: end or length of the step, for processes that learn average velocities;
                given exactly if the backbone was built with a second time.
        """

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        """Precompute all that depends only on the condition (B rows, or one for all) and the times (K,).

        Results are cached by the identity of the time tensors; pass the same tensors in every call.

        Returns:
            `bound(k, x)`, equal to the network at x (B, Th, Da) and time `times[k]`; valid until the weights
            change. A backbone may also have `bind_packed`, with the same arguments, for the loop in C: it
            returns a list of `policies.networks.packed.PackedSteps`, or None where `bind` has to serve. A
            subclass that overrides one of the two overrides both.
        """

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        """Return embedded times (K, T) and conditions (B, C'), e.g. for the noise network of ReinFlow."""

    def parameters(self) -> Iterator[Any]: ...


class BackboneConfig(Protocol):
    """Configuration of a backbone: a registered dataclass."""

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> Backbone:
        """Build a backbone for chunks (Th, Da), `Cond.vec` (B, C) and `Cond.tokens` (B, N, Ct), 0: none.

        Raises:
            CapabilityError: If tokens or a second time are requested and unsupported.
        """
