"""One interface to the arrays of every library, and the checks of arguments, whose errors tell the fix."""

from alibi_core._arrays import checks as checks
from alibi_core._arrays.dtypes import *  # noqa: F403
from alibi_core._arrays.keywords import *  # noqa: F403
from alibi_core._arrays.libraries import *  # noqa: F403
from alibi_core._arrays.operations import *  # noqa: F403
