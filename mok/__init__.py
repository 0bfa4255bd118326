"""Mixture-of-Kittens: the mixture-of-experts training layer as one kernel launch a pass. Importing it touches no GPU, Triton or process group."""
from .config import MoEConfig, Overlap
from .function import check, engine_for, moe

__version__ = "0.1.0"
__all__ = ["MoEConfig", "Overlap", "check", "engine_for", "moe"]
