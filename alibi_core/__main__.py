"""``python -m alibi_core`` is the command ``alibi-core``."""

import sys

from alibi_core._cli import main

if __name__ == "__main__":
    sys.exit(main())
