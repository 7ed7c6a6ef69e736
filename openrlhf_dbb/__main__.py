"""``python -m openrlhf_dbb`` is the command ``openrlhf-dbb``."""

import sys

from openrlhf_dbb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
