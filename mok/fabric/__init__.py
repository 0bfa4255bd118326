"""Buffers and flags that peers can reach; knows nothing about MoE."""
