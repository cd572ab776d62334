"""Checks of the arguments of public functions: "{argument} must {rule}, got {value}; {fix}"."""

from alibi_core._arrays import check_keywords as check_keywords
from alibi_core._arrays import checks as _checks
from alibi_core._arrays import explains_keywords as explains_keywords
from alibi_core._arrays import host_values as host_values
from alibi_core._arrays import is_dimension as is_dimension
from alibi_core._arrays import is_int as is_int
from alibi_core._arrays import namespace_of as namespace_of
from alibi_core._mask import boolean_mask as boolean_mask

MAX_POSITION = _checks.MAX_POSITION
array, boolean, broadcastable, one_of = _checks.array, _checks.boolean, _checks.broadcastable, _checks.one_of
known = _checks.known
floating_array, floating_dtype, integer_array = _checks.floating_array, _checks.floating_dtype, _checks.integer_array
install_hint, non_negative_int, positive_int = _checks.install_hint, _checks.non_negative_int, _checks.positive_int
non_negative_number, slopes_values = _checks.non_negative_number, _checks.slopes_values
