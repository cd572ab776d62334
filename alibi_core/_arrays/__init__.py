"""One interface to the arrays of every library, and the checks of arguments.

Takes arrays, dtypes and numbers as a user gave them. Returns a namespace of the array API standard and validated
values, or raises an error that tells the fix.
"""

from alibi_core._arrays import checks as checks
from alibi_core._arrays.keywords import check_keywords as check_keywords
from alibi_core._arrays.keywords import explains_keywords as explains_keywords
from alibi_core._arrays.namespace import *  # noqa: F403
