"""Processes: meaning of a denoiser's output and corruption of training data."""

from policies.processes.base import GaussianPath
from policies.processes.consistency import Consistency
from policies.processes.diffusion import VPDiffusion
from policies.processes.edm import Edm
from policies.processes.flow import RectifiedFlow
from policies.processes.flow_map import FlowMap, MeanFlow
from policies.processes.regression import Mip, Regression
from policies.processes.shortcut import Shortcut

__all__ = [
    "Consistency",
    "Edm",
    "FlowMap",
    "GaussianPath",
    "MeanFlow",
    "Mip",
    "RectifiedFlow",
    "Regression",
    "Shortcut",
    "VPDiffusion",
]
