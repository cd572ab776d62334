"""Arrays of any library behind one face, and the checks of arguments.

In go arrays, dtypes and numbers as a user gave them. Out come a namespace of the array API standard, and values that
are known to be right, or an error that tells the fix.
"""

from alibi_core._arrays import checks as checks
from alibi_core._arrays.checks import MAX_POSITION as MAX_POSITION
from alibi_core._arrays.checks import array as array
from alibi_core._arrays.checks import boolean as boolean
from alibi_core._arrays.checks import broadcastable as broadcastable
from alibi_core._arrays.checks import broadcasts as broadcasts
from alibi_core._arrays.checks import floating_dtype as floating_dtype
from alibi_core._arrays.checks import is_int as is_int
from alibi_core._arrays.checks import non_negative_int as non_negative_int
from alibi_core._arrays.checks import non_negative_number as non_negative_number
from alibi_core._arrays.checks import one_of as one_of
from alibi_core._arrays.checks import positive_int as positive_int
from alibi_core._arrays.checks import positive_number as positive_number
from alibi_core._arrays.keywords import check_keywords as check_keywords
from alibi_core._arrays.keywords import explains_keywords as explains_keywords
from alibi_core._arrays.namespace import adopted as adopted
from alibi_core._arrays.namespace import along_axis as along_axis
from alibi_core._arrays.namespace import arange as arange
from alibi_core._arrays.namespace import asarray as asarray
from alibi_core._arrays.namespace import astype as astype
from alibi_core._arrays.namespace import brief as brief
from alibi_core._arrays.namespace import computes_eagerly_without_gradients as computes_eagerly_without_gradients
from alibi_core._arrays.namespace import device_of as device_of
from alibi_core._arrays.namespace import floating_name as floating_name
from alibi_core._arrays.namespace import host_values as host_values
from alibi_core._arrays.namespace import is_exporting as is_exporting
from alibi_core._arrays.namespace import is_kind as is_kind
from alibi_core._arrays.namespace import is_numpy as is_numpy
from alibi_core._arrays.namespace import known_device as known_device
from alibi_core._arrays.namespace import lacks_64_bits as lacks_64_bits
from alibi_core._arrays.namespace import library_name as library_name
from alibi_core._arrays.namespace import namespace_of as namespace_of
from alibi_core._arrays.namespace import narrowed as narrowed
from alibi_core._arrays.namespace import on_host as on_host
from alibi_core._arrays.namespace import running_max as running_max
from alibi_core._arrays.namespace import running_sum as running_sum
from alibi_core._arrays.namespace import signed as signed
from alibi_core._arrays.namespace import times as times
from alibi_core._arrays.typing import Array as Array
from alibi_core._arrays.typing import Device as Device
from alibi_core._arrays.typing import DType as DType
from alibi_core._arrays.typing import Namespace as Namespace
