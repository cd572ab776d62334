"""Running all laws: in this process, or in one of its own that may crash or hang.

In go adapters. Out come reports, and the table that the command prints.
"""

from alibi_core.conformance._run.run import check
from alibi_core.conformance._run.supervisor import Outcome, Settings, supervised
from alibi_core.conformance._run.table import details, summary

__all__ = ["Outcome", "Settings", "check", "details", "summary", "supervised"]
