"""``python -m gpt_fast``: the same as the command ``gpt-fast``."""

import sys

from gpt_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
