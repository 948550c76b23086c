"""`python -m sage_patch` is the command `sage-patch`."""

from sage_patch.cli import main

main()
