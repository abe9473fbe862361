"""`python -m quantkit.cli`: the command line without its script."""

from quantkit.cli import main

main()
