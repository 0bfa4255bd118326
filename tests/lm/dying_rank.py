"""`python -m tests.lm.dying_rank ARGUMENTS`: `mok ARGUMENTS`, one of whose ranks kills itself at a point that the environment names.

DYING_RANK, DYING_STEP (steps done), DYING_WHERE: "forward", "backward" or "between". The moment is written to the file DYING_NOTE.
"""
from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mok.cli.main import main
from mok.lm import trainer as lm_trainer

WHERE = os.environ["DYING_WHERE"]


class DyingTrainer(lm_trainer.Trainer):
    """Dies between two handshakes of the layers, on the way there or back, or after a step."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if str(self.ranks.rank) == os.environ["DYING_RANK"]:
            block = self.model.blocks[1]
            if WHERE == "forward":
                block.register_forward_pre_hook(lambda module, inputs: self._strike())
            elif WHERE == "backward":
                block.register_forward_pre_hook(lambda module, inputs: inputs[0].register_hook(lambda grad: self._strike()) and None)

    def _strike(self) -> None:
        if self.model.training and str(self.step) == os.environ["DYING_STEP"]:
            Path(os.environ["DYING_NOTE"]).write_text(f"{os.getpid()} {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def train_step(self):
        metrics = super().train_step()
        if WHERE == "between" and str(self.ranks.rank) == os.environ["DYING_RANK"]:
            self._strike()
        return metrics


lm_trainer.Trainer = DyingTrainer          # type: ignore[misc]  (the ranks import this module too, as their main one)

if __name__ == "__main__":
    sys.exit(main())
