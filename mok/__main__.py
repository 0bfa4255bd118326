"""`python -m mok`: the command line."""
from .cli.main import command

command()
