"""Mixture-of-Kittens: the mixture-of-experts training layer as one kernel launch a pass. Importing it touches no GPU, Triton or process group."""
from .clip import clip_grad_norm_
from .config import MoEConfig, Overlap
from .engines.protocol import SharedExpert
from .fabric.process_group import FabricError, FabricTimeout, PeerLost
from .function import check, engine_for, moe
from .group import ExpertGroup
from .layer import MoE
from .router import checkpoint_policy

__version__ = "0.1.0"
__all__ = [
    "ExpertGroup", "FabricError", "FabricTimeout", "MoE", "MoEConfig", "Overlap", "PeerLost", "SharedExpert",
    "check", "checkpoint_policy", "clip_grad_norm_", "engine_for", "moe",
]
