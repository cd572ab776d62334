"""One interface to the arrays of every library, and the checks of arguments.

Takes arrays, dtypes and numbers as a user gave them. Returns a namespace of the array API standard and validated
values, or raises an error that tells the fix.
"""

from alibi_core._arrays import checks as checks
from alibi_core._arrays.keywords import check_keywords as check_keywords
from alibi_core._arrays.keywords import explains_keywords as explains_keywords
from alibi_core._arrays.namespace import Array as Array
from alibi_core._arrays.namespace import Device as Device
from alibi_core._arrays.namespace import DType as DType
from alibi_core._arrays.namespace import Namespace as Namespace
from alibi_core._arrays.namespace import adopted as adopted
from alibi_core._arrays.namespace import along_axis as along_axis
from alibi_core._arrays.namespace import arange as arange
from alibi_core._arrays.namespace import asarray as asarray
from alibi_core._arrays.namespace import astype as astype
from alibi_core._arrays.namespace import at_least as at_least
from alibi_core._arrays.namespace import at_most as at_most
from alibi_core._arrays.namespace import brief as brief
from alibi_core._arrays.namespace import computes_eagerly_without_gradients as computes_eagerly_without_gradients
from alibi_core._arrays.namespace import constant_when_traced as constant_when_traced
from alibi_core._arrays.namespace import device_of as device_of
from alibi_core._arrays.namespace import extended as extended
from alibi_core._arrays.namespace import floating_name as floating_name
from alibi_core._arrays.namespace import has_float64 as has_float64
from alibi_core._arrays.namespace import host_values as host_values
from alibi_core._arrays.namespace import is_exporting as is_exporting
from alibi_core._arrays.namespace import is_int as is_int
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
