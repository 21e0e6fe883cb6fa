"""The Hydra application behind each command that takes `key=value`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, flag_override

from burnish.config.commands import COMMANDS
from burnish.config.errors import USER_ERRORS, error_message
from burnish.config.hydra_sources import register_configs
from burnish.config.overrides import (
    Overrides,
    RunContext,
    check_arguments,
    quoted,
    readable,
    with_home,
    with_no_option,
)
from burnish.config.schema import refuse_unused, to_command
from policies.errors import ConfigError
from policies.extras import require

EXIT_USER_ERROR = 2
_LAUNCHERS = {  # plug-in, extra
    **dict.fromkeys(("joblib", "processes"), ("joblib", "joblib")),
    **dict.fromkeys(("slurm", "slurm_local", "submitit_local", "submitit_slurm"), ("submitit", "slurm")),
}


@dataclass(frozen=True)
class Task:
    """Hydra task function of one command; picklable, for launchers."""

    command: str

    def __call__(self, node: DictConfig) -> float | None:
        hydra_config = HydraConfig.get()
        context = RunContext(
            Path(hydra_config.runtime.output_dir), Overrides.parse(hydra_config.overrides.task)
        )
        try:
            config = to_command(node)
            if self.command != "train":  # which chooses keys first, or continues a run
                refuse_unused(config, context.overrides)
            if hydra_config.mode == RunMode.MULTIRUN and self.command == "train":
                config, context = _requeued(config, context)
            result: float | None = COMMANDS[self.command].load().run(config, context)
        except USER_ERRORS as error:
            NewFolders.remove_unused()
            if wants_traceback() or hydra_config.mode != RunMode.RUN:
                raise
            raise SystemExit(print_error(error)) from None
        except (Exception, KeyboardInterrupt, SystemExit):  # formatted by `main`
            NewFolders.remove_unused()
            raise
        return result


def _requeued(config: Any, context: RunContext) -> tuple[Any, RunContext]:
    """Continue the run in the folder of a sweep's job, if an earlier attempt of the same job began it."""
    from algos.training.run_directory import RunDirectory

    run = RunDirectory(context.directory)
    if not (run.path / "config.yaml").is_file() or run.overrides != context.overrides.texts:
        return config, context
    return replace(config, resume=str(run.path)), RunContext(context.directory)


def run_app(command: str, arguments: Sequence[str]) -> None:
    """Run a command line with Hydra, including its options (`--multirun`, `--cfg job`, …).

    Raises:
        ConfigError: If an argument is refused before Hydra starts.
    """
    register_configs()
    given = [readable(with_home(text)) for text in with_main_key(command, arguments)]
    words = with_no_option(command, given)
    typed = check_arguments(command, words)
    launcher = str(typed.value("hydra/launcher"))
    if launcher in _LAUNCHERS:
        plug_in, extra = _LAUNCHERS[launcher]
        module = f"hydra_plugins.hydra_{plug_in}_launcher"
        require(module, extra=extra, what=f"hydra/launcher={launcher}")
    if command == "train" and "WORLD_SIZE" in os.environ:
        _join(words)
    logging.raiseExceptions = False  # a full disk must not stop a run or print a traceback of logging
    os.environ["HYDRA_FULL_ERROR"] = "1"  # `main` formats errors in one line
    sys.argv = [sys.argv[0], *_continuing(command, words, typed)]
    GlobalHydra.instance().clear()
    name = COMMANDS[command].config_name
    app: Any = hydra.main(version_base="1.3", config_path="pkg://configs", config_name=name)(Task(command))
    app()


def _join(words: Sequence[str]) -> None:
    """Meet the other processes of `torchrun`, if any."""
    from algos.training.ranks import join

    if join().world > 1 and any(word in ("-m", "--multirun") for word in words):
        raise ConfigError("--multirun starts runs of one process each; leave torchrun or --multirun out.")


def with_main_key(command: str, arguments: Sequence[str]) -> list[str]:
    """Convert a bare first word to the main key, for commands that accept one."""
    known, words = COMMANDS[command], list(arguments)
    if known.takes_bare and words and "=" not in words[0] and not words[0].startswith(("-", "~")):
        words[0] = f"{known.main_key}={quoted(words[0])}"
    return words


class NewFolders(Callback):
    """Hydra callback before the creation of a job folder: appends a number to a generated name if taken.

    Records the missing parent folders.
    """

    noted: ClassVar[list[Path]] = []  # innermost first

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        HydraConfig.instance().set_config(config)  # as Hydra does next; the folder name may refer to it
        if _follows(config):
            return
        folder = Path(config.hydra.run.dir).absolute()
        self.noted[:] = [place for place in (folder, *folder.parents) if not place.exists()]
        if (made := _numbered(config, "run")) is not None:
            self.noted[:] = [made.absolute(), *(place for place in self.noted if place != folder)]
        _tell_followers(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Give two sweeps that start in the same second separate folders."""
        HydraConfig.instance().set_config(config)
        if (made := _numbered(config, "sweep")) is not None:
            with flag_override(config.hydra, "readonly", False):  # every job of the sweep composes from these
                config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(made))}")

    @classmethod
    def remove_unused(cls) -> None:
        """Remove folders and logs of a job that did not start."""
        if cls.noted:
            _close_logs_in(cls.noted[0])
        with contextlib.suppress(OSError):  # not empty
            inside = list(cls.noted[0].iterdir()) if cls.noted else []
            if all(item.suffix == ".log" for item in inside):
                for item in inside:
                    item.unlink()
            for folder in cls.noted:
                folder.rmdir()


def _tell_followers(config: DictConfig) -> None:
    from algos.training.ranks import current

    current().share(str(config.hydra.run.dir))


def _follows(config: DictConfig) -> bool:
    """Return whether this process follows another one: it gets its folder, and logs errors only."""
    from algos.training.ranks import current

    if current().rank == 0:
        return False
    silent = {"version": 1, "root": {"level": "ERROR"}, "disable_existing_loggers": True}
    with flag_override(config.hydra, ["readonly", "struct"], False):
        config.hydra.run.dir, config.hydra.job_logging = current().share(""), silent
    return True


def _numbered(config: DictConfig, kind: str) -> Path | None:
    """Create the folder of a run or sweep with a generated name, and store it in the configuration."""
    folder, key = Path(config.hydra[kind].dir), f"hydra.{kind}.dir"
    is_typed = any(text.lstrip("+").startswith(f"{key}=") for text in config.hydra.overrides.hydra)
    if is_typed or folder == Path():
        return None
    from algos.training.run_directory import new_folder

    try:
        made = new_folder(folder)
    except OSError:  # Hydra reports it
        return None
    with flag_override(config.hydra, "readonly", False):
        config.hydra[kind].dir = str(made)
    return made


def _close_logs_in(folder: Path) -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == folder:
            root.removeHandler(handler)
            handler.close()


def _continuing(command: str, words: list[str], typed: Overrides) -> list[str]:
    """Compose with the parts of the resumed run, and use its directory as the job folder."""
    resumed = typed.value("resume")
    if command != "train" or resumed in (None, ""):
        return words
    from burnish.runs.resolve import resume_directory_error, resumed_parts

    run, chosen = Path(str(resumed)).expanduser(), typed.value("hydra.run.dir")
    if chosen is not None and Path(str(chosen)).expanduser().absolute() != run.absolute():
        raise resume_directory_error(run, f"hydra.run.dir={chosen}")
    return [*resumed_parts(typed).texts, *words, f"hydra.run.dir={quoted(str(run))}"]


def wants_traceback() -> bool:
    """Return whether errors keep their traceback: `BURNISH_TRACEBACK=1` or `hydra.verbose=…`."""
    verbose = any(a.startswith("hydra.verbose=") and not a.endswith("=false") for a in sys.argv)
    return verbose or os.environ.get("BURNISH_TRACEBACK", "") == "1"


def print_error(error: BaseException) -> int:
    """Write one line to standard error and return the exit code."""
    sys.stderr.write(f"burnish: error: {error_message(error)}\n")
    return EXIT_USER_ERROR
