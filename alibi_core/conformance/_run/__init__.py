"""Running all laws: in this process, or in one of its own that may crash or hang.

In go adapters. Out come reports, and the table that the command prints.
"""

from alibi_core.conformance._run.run import check as check
from alibi_core.conformance._run.supervisor import Outcome as Outcome
from alibi_core.conformance._run.supervisor import Settings as Settings
from alibi_core.conformance._run.supervisor import supervised as supervised
from alibi_core.conformance._run.table import details as details
from alibi_core.conformance._run.table import summary as summary
