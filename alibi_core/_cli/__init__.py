"""The command ``alibi-core``.

In go the arguments of a command line, out come text and an exit status. Each command imports what it needs when it
runs: the tables need the core alone, and so does a look at a checkpoint; the conformance kit needs its extra.
"""

from alibi_core._cli.command import main as main
