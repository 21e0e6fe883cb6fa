"""The commands, one module each; a module is imported when its command is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Command:
    """A command: its line on the front page, and its module.

    A name of two words, such as `data inspect`, is typed as two words.

    A command with a `schema` is a Hydra application: its module defines `run(config, context)`. The schema is
    a dataclass of that module, or of another one (`module:Class`). Other commands take plain arguments: their
    module defines `main(arguments)`.
    """

    name: str
    summary: str
    example: str
    module: str
    schema: str | None = None
    main_key: str = ""  # key suggested for a bare word in error messages
    takes_bare: bool = False  # a bare first word is the value of the main key

    @property
    def config_name(self) -> str:
        """Name of the yaml file and, with `_schema`, of the dataclass in Hydra's store."""
        return self.name.replace(" ", "_")

    def load(self) -> ModuleType:
        """Import the module of the command."""
        return importlib.import_module(f"burnish.commands.{self.module}")

    def config_class(self) -> type:
        """Return the configuration dataclass; imports its module only."""
        home, _, name = str(self.schema).rpartition(":")
        found: type = getattr(importlib.import_module(home) if home else self.load(), name)
        return found


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "collect",
            "record demonstrations of a scripted expert",
            "burnish collect env=avoid episodes=50 out=avoid.hdf5",
            "collect",
            "CollectConfig",
            "env",
        ),
        Command(
            "train",
            "clone a policy from demonstrations, or fine-tune one by reinforcement",
            "burnish train experiment=avoid_dppo init=<run or policy directory>",
            "train",
            "burnish.config.train:TrainConfig",
            "dataset",
        ),
        Command(
            "eval",
            "evaluate a policy on seeded episodes, alone or against another one",
            "burnish eval policy=<run> baseline=<other run> episodes=100",
            "evaluate",
            "burnish.config.evaluate:EvalConfig",
            "policy",
        ),
        Command(
            "report",
            "draw the learning curve and the rollouts of runs into one page",
            "burnish report run=<run>",
            "report",
            "ReportConfig",
            "run",
        ),
        Command(
            "export",
            "write a policy for a machine without PyTorch, with a parity report",
            "burnish export policy=<run> format=onnx out=exported",
            "export",
            "ExportConfig",
            "policy",
        ),
        Command(
            "serve",
            "let robots ask a policy over the network",
            "burnish serve policy=<run or exported folder>",
            "serve",
            "ServeConfig",
            "policy",
        ),
        Command(
            "import",
            "make a policy of a checkpoint of Diffusion Policy, DPPO or ReinFlow",
            "burnish import weights=state_3000.pt source=dppo normalization=normalization.npz out=imported",
            "importing",
            "ImportConfig",
            "weights",
        ),
        Command(
            "data inspect",
            "describe a file of demonstrations: episodes, ranges, defects, what can be learned",
            "burnish data inspect avoid.hdf5",
            "data_inspect",
            "DataInspectConfig",
            "dataset",
            takes_bare=True,
        ),
        Command(
            "data download",
            "fetch a public dataset (D4RL, OGBench, robomimic, Minari), or list their names",
            "burnish data download name=hopper-medium-v2",
            "data_download",
            "DataDownloadConfig",
            "name",
            takes_bare=True,
        ),
        Command(
            "list",
            "list algos, envs, processes, encoders, backbones, samplers, sources, datasets or experiments",
            "burnish list envs",
            "list",
        ),
        Command(
            "new",
            "begin a task, algo, process, sampler or reader of your own: a file, its test, its page section",
            "burnish new task my_task",
            "new",
        ),
        Command("doctor", "check the installation", "burnish doctor", "doctor"),
    )
}
