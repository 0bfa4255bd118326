"""Argument parsing and printing of the `mok` command."""
