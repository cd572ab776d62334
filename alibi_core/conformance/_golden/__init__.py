"""Golden vectors: inputs, exact results and error budgets in files, for implementations in any language."""

from alibi_core.conformance._golden.check import check_golden as check_golden
from alibi_core.conformance._golden.files import GoldenError as GoldenError
from alibi_core.conformance._golden.report import GoldenReport as GoldenReport
from alibi_core.conformance._golden.results import golden_results as golden_results
from alibi_core.conformance._golden.set import read_golden as read_golden
from alibi_core.conformance._golden.set import write_golden as write_golden
