"""`python -m dflash_hf`: the command line, for launchers that take a module."""

from .cli import main


main()
