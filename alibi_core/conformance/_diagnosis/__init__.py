"""Diagnosis: what an implementation does in place of ALiBi, in words.

A *reading* says how an implementation may read ALiBi, and computes what comes of it; a *departure* is one change of a
reading, with its name. The diagnosis calls the adapter on probes and searches for the fewest departures that explain
all that it sees. The catalogue can be run, too: an adapter that makes the mistakes of these names.
"""

from alibi_core.conformance._diagnosis.diagnosis import diagnose as diagnose
from alibi_core.conformance._diagnosis.mistaken import MISTAKES as MISTAKES
from alibi_core.conformance._diagnosis.mistaken import Mistaken as Mistaken
