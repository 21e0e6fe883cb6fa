"""Processes: what a denoiser's output means, and how training data is corrupted."""

from policies.processes.diffusion import VPDiffusion
from policies.processes.edm import Edm
from policies.processes.flow import RectifiedFlow
from policies.processes.path import GaussianPath, Process

__all__ = ["Edm", "GaussianPath", "Process", "RectifiedFlow", "VPDiffusion"]
