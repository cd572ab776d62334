"""Train short, test long: which position methods keep their loss on inputs longer than they were trained on?

Small byte-level language models that differ only in their position method are trained on short pieces of text, and
evaluated on held-out text at 1, 2, 4, 8 and 16 times that length, by the two protocols of the paper (Press, Smith,
Lewis 2022, arXiv 2108.12409, section 4 and appendix B):

  non-overlapping   adjacent segments; all tokens are scored. Longer segments have fewer tokens with little context
                    before them, so the loss falls even for a model that gains nothing from distant tokens.
  sliding           windows that move by a quarter of the training length; only the new tokens of each window are
                    scored, so every scored token has nearly the full length before it.
"""

from benchmarks.extrapolation.models import build as build
from benchmarks.extrapolation.training import QUICK as QUICK
from benchmarks.extrapolation.training import standard_library as standard_library
from benchmarks.extrapolation.training import train as train
