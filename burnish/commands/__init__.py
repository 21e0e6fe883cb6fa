"""The commands, one module each; a module is imported when its command is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
