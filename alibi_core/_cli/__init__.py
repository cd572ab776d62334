"""The command ``alibi-core``.

Takes the arguments of a command line, prints text and returns an exit status. Each command imports its requirements
when it runs: tables and ``explain`` of a checkpoint need the core alone, the conformance kit needs its extra.
"""

from alibi_core._cli.command import main as main
