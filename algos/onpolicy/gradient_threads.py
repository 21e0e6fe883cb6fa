"""Multi-threaded gradients of large minibatches on a CPU, with a fixed order of summation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.threads import torch_threads


@dataclass(frozen=True)
class Task:
    """Part of a minibatch's loss: `loss()` returns (scalar loss, metrics (n,)) for `params`."""

    params: Sequence[nn.Parameter]
    loss: Callable[[], tuple[Tensor, Tensor]]

    def run(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the gradients and the metrics."""
        with torch.enable_grad():
            loss, metrics = self.loss()
            grads = torch.autograd.grad(loss, self.params, allow_unused=True, materialize_grads=True)
        return grads, metrics.detach()


class GradientThreads:
    """Runs tasks on several threads with one torch thread each; sums follow the order of the tasks.

    Results are bitwise equal for any number of threads, and of torch's own threads. With one thread, tasks
    run in the caller.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = (
            ThreadPoolExecutor(num_threads, "gradient", torch.set_num_threads, (1,))
            if num_threads > 1
            else None
        )

    def sum(self, tasks: Sequence[Task]) -> tuple[list[Tensor], Tensor]:
        """Return summed gradients and metrics of tasks that share their parameters."""
        with torch_threads(1):
            results = map(Task.run, tasks) if self._pool is None else self._pool.map(Task.run, tasks)
            first, metrics = next(results)
            grads = [grad.clone() for grad in first]
            for more, part in results:
                torch._foreach_add_(grads, list(more))
                metrics = metrics + part
        return grads, metrics

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
