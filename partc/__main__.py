"""The command line: python -m partc."""

import sys

from partc.compiler.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
