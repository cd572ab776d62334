"""Golden vectors: inputs, exact results and error budgets in files, for implementations in any language."""

from alibi_core.conformance._golden.check import check_golden
from alibi_core.conformance._golden.files import GoldenError
from alibi_core.conformance._golden.report import GoldenReport
from alibi_core.conformance._golden.results import golden_results
from alibi_core.conformance._golden.set import read_golden, write_golden

__all__ = ["GoldenError", "GoldenReport", "check_golden", "golden_results", "read_golden", "write_golden"]
