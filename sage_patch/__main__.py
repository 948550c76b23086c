"""`python -m sage_patch` is the command `sage-patch`, which begins here too: its own packages may be missing."""

import sys

from sage_patch.extras import MissingPackage, needed_for


def main() -> None:
    try:
        with needed_for("the command sage-patch"):
            from sage_patch import cli
    except MissingPackage as error:
        sys.exit(f"error: {error}")
    cli.main()


if __name__ == "__main__":
    main()
