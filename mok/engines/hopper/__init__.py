"""The Hopper engine: one persistent Gluon kernel a pass, for compute capability 9.0."""
