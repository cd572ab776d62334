"""The code that XLA makes of repeated numbers in products, which `alibi_jax._compatible.materialised` works around."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")

FIRST_WRONG = (0, 10, 2)

# In a process of its own, because it reads beyond an array. Results depend on the memory there, so several lengths.
REDUCED = """
import json
import jax, jax.numpy as jnp

def wrong(length, barrier):
    ones = lambda: barrier(jnp.ones((32, length)))
    found = jax.jit(lambda x: (x @ ones()).sum(0))(jnp.ones((length, 32)))
    return bool(abs(found - 32 * length).max() > 1)

print(json.dumps([any(wrong(length, barrier) for length in (64, 96, 128, 192))
                  for barrier in (lambda x: x, jax.lax.optimization_barrier)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library's kernels differ by processor")
def test_the_compiler_still_needs_the_workaround() -> None:
    run = subprocess.run([sys.executable, "-c", REDUCED], capture_output=True, text=True, check=True)
    plain, behind_barrier = json.loads(run.stdout)
    if jax.__version_info__ < FIRST_WRONG:
        assert not plain
        return
    assert plain, (
        f"JAX {jax.__version__} computes the reduced program right: name the versions that do not in "
        "alibi_jax/_compatible.py, and when none of them is supported any more, the workaround there can go"
    )
    assert behind_barrier, "a barrier would do in place of the selection in alibi_jax/_compatible.py"
