"""Mixture-of-Kittens: the mixture-of-experts training layer as one kernel launch a pass. Importing it touches no GPU, Triton or process group."""
