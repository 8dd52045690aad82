"""`python -m tools.mtp_checkpoint`."""

import sys

from tools.mtp_checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
