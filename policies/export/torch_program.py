"""A policy as a program of `torch.export`, and compiled ahead of time where there is a C++ compiler."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.errors import ExportError
from policies.export.onnx_graph import (
    SYMBOLIC_BATCH,
    SampledPolicy,
    dynamic_shapes,
    parity_of,
    quiet_tracing,
    ready_to_trace,
    spell_out,
    unlike,
    worst_of,
)

_COMPILERS = ("g++", "clang++", "c++")


class Program:
    """A loaded program, called as a graph is: inputs by name to arrays.

    Args:
        call: The program; takes all inputs by name.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
        """Return actions (B, Ta, Da) and plan (B, R, Da)."""
        return [output.numpy() for output in self._call(dict(inputs))]


def write_checked_program(
    model: SampledPolicy, path: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> tuple[Program, list[dict[str, float]]]:
    """Write a program that reproduces the model at every batch size; return it with its parity table.

    Raises:
        ExportError: If the model cannot be traced, or the program does not reproduce it.
    """
    try:
        with quiet_tracing():
            torch.export.save(_traced(ready_to_trace(model, seed), seed), path)
    except Exception as error:
        raise ExportError(f"the policy could not be traced by torch.export: {error}") from error
    program = load_program(path)
    return program, _checked(model, program, batch_sizes, tolerance, seed)


def load_program(path: Path) -> Program:
    """Load what `write_checked_program` wrote."""
    return Program(torch.export.load(path).module())


def write_checked_package(
    model: SampledPolicy, program: Path, path: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> tuple[Program, list[dict[str, float]]]:
    """Compile a program ahead of time and check the result; see `write_checked_program`.

    Raises:
        ExportError: If it cannot be compiled or does not reproduce the model.
    """
    try:
        with quiet_tracing():
            torch._inductor.aoti_compile_and_package(torch.export.load(program), package_path=str(path))
    except Exception as error:
        raise ExportError(f"the program could not be compiled ahead of time: {error}") from error
    package = Program(torch._inductor.aoti_load_package(str(path)))
    return package, _checked(model, package, batch_sizes, tolerance, seed)


def missing_compiler() -> str | None:
    """Say why nothing can be compiled here; None: it can."""
    if any(shutil.which(name) for name in _COMPILERS):
        return None
    return (
        f"No C++ compiler ({', '.join(_COMPILERS)}) was found, so the program was not compiled ahead of time."
    )


def _traced(model: Any, seed: int) -> torch.export.ExportedProgram:
    """Trace a model with a symbolic batch."""
    inputs = model.example(SYMBOLIC_BATCH, torch.Generator().manual_seed(seed))
    shapes = dynamic_shapes(model, inputs)
    if model.has_gradients:
        model = _ByName(spell_out(model, inputs), list(inputs))
    return torch.export.export(model, (inputs,), dynamic_shapes=({**shapes},))


class _ByName(torch.nn.Module):
    """A function of values, called with a mapping."""

    def __init__(self, function: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.function, self.names = function, tuple(names)

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """Call the function with the values in their order."""
        return self.function(*(inputs[name] for name in self.names))


def _checked(
    model: SampledPolicy, run: Program, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> list[dict[str, float]]:
    """Return the parity table of a program that reproduces the model.

    Raises:
        ExportError: If it does not.
    """
    parity = parity_of(model, run, batch_sizes, seed)
    if not worst_of(parity) <= tolerance:
        raise unlike(model, worst_of(parity), batch_sizes, tolerance, seed)
    return parity
