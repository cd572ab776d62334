"""One interface to the arrays of every library, and the checks of arguments, whose errors tell the fix."""

from alibi_core._arrays import checks as checks
from alibi_core._arrays.keywords import check_keywords as check_keywords
from alibi_core._arrays.keywords import explains_keywords as explains_keywords
from alibi_core._arrays.namespace import *  # noqa: F403
