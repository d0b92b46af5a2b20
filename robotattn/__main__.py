"""`python -m robotattn` is the command `robotattn`."""

import sys

from robotattn.cli import main

if __name__ == "__main__":  # recording and evaluation spawn processes, which import this module again
    sys.exit(main())
