"""The problems that implementations are held to, and their answers.

In goes a seed. Out come small frozen cases, the float64 oracle's answers to them, and the budget of rounding for each.
"""

from alibi_core.conformance._cases.case import COTANGENTS as COTANGENTS
from alibi_core.conformance._cases.case import FAR as FAR
from alibi_core.conformance._cases.case import FORMS as FORMS
from alibi_core.conformance._cases.case import LONGER as LONGER
from alibi_core.conformance._cases.case import PER_BATCH as PER_BATCH
from alibi_core.conformance._cases.case import Case as Case
from alibi_core.conformance._cases.case import Sizes as Sizes
from alibi_core.conformance._cases.case import smaller_cases as smaller_cases
from alibi_core.conformance._cases.data import DATA as DATA
from alibi_core.conformance._cases.family import SEEDS as SEEDS
from alibi_core.conformance._cases.family import Family as Family
from alibi_core.conformance._cases.oracle import SMALLEST as SMALLEST
from alibi_core.conformance._cases.oracle import U32 as U32
from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF as UNIT_ROUNDOFF
from alibi_core.conformance._cases.oracle import Answer as Answer
from alibi_core.conformance._cases.oracle import Attention as Attention
from alibi_core.conformance._cases.oracle import Rules as Rules
from alibi_core.conformance._cases.oracle import Values as Values
from alibi_core.conformance._cases.oracle import excess as excess
from alibi_core.conformance._cases.oracle import penalties as penalties
from alibi_core.conformance._cases.oracle import rounded as rounded
from alibi_core.conformance._cases.oracle import summed_over_batch as summed_over_batch
