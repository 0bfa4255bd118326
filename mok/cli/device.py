"""The --device argument, the same in every command."""
from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from ..arguments import kind_of

if TYPE_CHECKING:
    import torch

    from ..lm.ranks import Ranks


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add --device: cpu, cuda or cuda:N; without it a GPU if there is one."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda if torch sees a GPU, else cpu)")


def choose_device(name: str | None) -> torch.device:
    """The torch device called `name`; ValueError naming `device` for one that does not exist here."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):         # torch itself wraps a large index around to another one
        raise ValueError(f"device={kind_of(name)} must be cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"device={name!r} is not there: torch {torch.__version__} sees {gpus} GPU(s)")
    return device


def device_of(ranks: Ranks, device: torch.device) -> torch.device:
    """This process's device: of several ranks its own, else the one that was asked for."""
    return device if ranks.placement is None else ranks.placement.device
