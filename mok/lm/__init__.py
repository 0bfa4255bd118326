"""The small MoE language model, its data, trainer and checkpoints."""
