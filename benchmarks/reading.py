"""How many of our files and functions a reader goes through to follow a call, counted by following it.

    python -m benchmarks.reading

runs short walks at tiny sizes and prints how many files and functions of the four packages each one enters.
Not counted: what happens while a module is imported, other libraries, and methods that dataclasses generate.
A cached result counts in the first walk that computes it, so the walk from a typed option comes before any
other use of `burnish`. It ends where `algo.build` is called; what that builds is a walk of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from algos.base import Setup
from algos.bc import BcConfig
from algos.dppo import DppoConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.layout import PACKAGES, REPOSITORY
from benchmarks.options import parser
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from envs.rollouts.collect import collect
from envs.tasks.avoid.task import Avoid
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig
from policies.registry import lookup

NOT_FUNCTIONS = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


@dataclass
class Walk:
    """What a stretch of a program enters.

    Attributes:
        ends_with: Name of the function whose first call ends the walk; it counts, what it calls does not.
            Empty: the end of the `with` block.
        code: Code of every function entered.
        is_over: Whether that function was called.
    """

    ends_with: str = ""
    code: set[CodeType] = field(default_factory=set)
    is_over: bool = False
    _importing: int = 0  # modules that are being imported inside each other

    @property
    def files(self) -> list[str]:
        """Files entered, from the root of the repository."""
        return sorted({str(Path(code.co_filename).relative_to(REPOSITORY)) for code in self.code})

    @property
    def functions(self) -> list[str]:
        """Functions entered, `file:function`, comprehensions left out."""
        named = (code for code in self.code if code.co_name not in NOT_FUNCTIONS)
        return sorted(
            f"{Path(code.co_filename).relative_to(REPOSITORY)}:{code.co_qualname}" for code in named
        )

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Follow the interpreter; see `sys.setprofile`."""
        code = frame.f_code
        if self.is_over or event not in ("call", "return") or not code.co_filename.startswith(_OURS):
            return
        if code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif event == "call" and not self._importing:
            self.code.add(code)
            self.is_over = code.co_qualname == self.ends_with


_OURS = tuple(f"{REPOSITORY / package}{os.sep}" for package in PACKAGES)


@contextmanager
def walking(ends_with: str = "") -> Iterator[Walk]:
    """Record what the block enters, in all threads that it starts."""
    walk = Walk(ends_with)
    threading.setprofile(walk.note)
    sys.setprofile(walk.note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _policy() -> Policy:
    config = PolicyConfig(process=lookup("process", "diffusion")(), backbone=lookup("backbone", "mlp")())
    return build_policy(config, obs_dim=4, action_dim=2)


def acting() -> Walk:
    """One observation becomes a chunk of actions in 20 denoising steps."""
    policy = _policy()
    with walking() as walk:
        policy.act(torch.zeros(1, 1, 4), generator=torch.Generator().manual_seed(0))
    return walk


def _advancing(config: Any, **setup: Any) -> Walk:
    algo = config.build(Setup(num_workers=0, num_threads=1, **setup))
    try:
        with walking() as walk:
            algo.advance()
    finally:
        algo.close()
    return walk


def cloning(dataset: EpisodeDataset) -> Walk:
    """One gradient step of behaviour cloning."""
    config = BcConfig(steps=1, batch_size=8, warmup_steps=0, validation_fraction=0.0)
    return _advancing(config, dataset=dataset)


def offline(dataset: EpisodeDataset) -> Walk:
    """Two steps of the critics and one of the actor of TD3+BC."""
    one = PolicyConfig(process=lookup("process", "regression")(), horizon=1, act_steps=1)
    return _advancing(Td3BcConfig(steps=2, batch_size=8), dataset=dataset, policy=one)


def fine_tuning() -> Walk:
    """One iteration of DPPO: a rollout, advantages, one update."""
    config = DppoConfig(
        num_envs=2, steps_per_iteration=2, iterations=1, update_epochs=1, tuned_steps=2, batch_size=8
    )
    return _advancing(config, init=_policy(), env=Avoid())


def _command(*words: str, ends_with: str = "") -> Walk:
    """Follow a command line in this process, quietly."""
    from burnish.cli import main

    typed = sys.argv
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(out),
            contextlib.suppress(SystemExit),
            walking(ends_with) as walk,
        ):
            main(words)
    finally:
        sys.argv = typed
    if ends_with and not walk.is_over:
        raise RuntimeError(f"burnish {' '.join(words)} never came to {ends_with}:\n{out.getvalue()}")
    return walk


def typed_option(dataset: Path, run: Path) -> Walk:
    """From `burnish train key=value` to the call of `algo.build`; leaves a finished run."""
    return _command(
        *("train", "algo=bc", "env=avoid", f"dataset={dataset}", f"hydra.run.dir={run}"),
        *("algo.steps=1", "algo.warmup_steps=0", "algo.batch_size=8"),
        ends_with="BcConfig.build",
    )


def building(dataset: Path) -> Walk:
    """`algo.build` of behaviour cloning: read the dataset, build policy, batches and optimiser."""
    with walking() as walk:
        BcConfig(steps=1, batch_size=8, warmup_steps=0).build(
            Setup(dataset=partial(read_dataset, dataset), num_threads=1)  # type: ignore[arg-type]
        )
    return walk


def evaluating(run: Path) -> Walk:
    """`burnish.evaluate` on two episodes."""
    import burnish

    with contextlib.redirect_stdout(io.StringIO()), walking() as walk:
        burnish.evaluate(run, episodes=2, num_envs=2, num_workers=0)
    return walk


def walks() -> Iterator[tuple[str, Walk]]:
    """Yield every walk with its title."""
    dataset = collect(Avoid(), episodes=2)
    # First: acting loads the weight cache, whose hook then runs in the steps of every optimiser.
    yield "two TD3+BC steps", offline(dataset)
    yield "observation → Policy.act, 20 steps", acting()
    yield "one BC gradient step", cloning(dataset)
    yield "one DPPO iteration", fine_tuning()
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "avoid.hdf5", Path(folder) / "run"
        write_dataset(path, dataset, Avoid())
        yield "typed option → algo.build", typed_option(path, run)
        yield "algo.build of behaviour cloning", building(path)
        yield "burnish.evaluate, 2 episodes", evaluating(run)


def main() -> None:
    """Print the table, and the names where they are asked for."""
    asked = parser(__doc__)
    asked.add_argument("--names", choices=("files", "functions"), help="list what every walk enters")
    names = asked.parse_args().names
    console, table = Console(highlight=False), Table("walk", "files", "functions")
    for title, walk in walks():
        table.add_row(title, str(len(walk.files)), str(len(walk.functions)))
        if names:
            console.print(title, *(f"  {name}" for name in getattr(walk, names)), sep="\n")
    console.print(table)


if __name__ == "__main__":
    main()
