"""Tasks, one file or folder per simulator family, each with its expert and figures.

A task is a frozen dataclass with `@register("env", name)` that fulfils `envs.spec.EnvConfig`: what it is
(`spec`), and simulators of it, which `envs.engine` makes a vector. A file here is found by its registration
alone. `avoid/task.py` is a whole one; docs/extending.md says how to write one elsewhere.
"""
