"""What XLA's compiler makes of repeated numbers in products, which `alibi_jax._tiled.materialised` works around."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from alibi_jax._tiled.materialised import materialised  # noqa: E402

FIRST_WRONG = (0, 10, 2)

# In a process of its own, as it reads beyond an array. What is there decides what comes out, so several lengths.
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


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library's kernels differ by processor")
def test_the_compiler_still_needs_the_workaround() -> None:
    run = subprocess.run([sys.executable, "-c", REDUCED], capture_output=True, text=True, check=True)
    plain, behind_barrier = json.loads(run.stdout)
    if jax.__version_info__ < FIRST_WRONG:
        assert not plain
        return
    assert plain, (
        f"JAX {jax.__version__} computes the reduced program right: name the versions that do not in "
        "alibi_jax/_tiled/materialised.py, and when none of them is supported any more, the workaround there can go"
    )
    assert behind_barrier, "a barrier would do in place of the selection in alibi_jax/_tiled/materialised.py"


@pytest.mark.parametrize("kind", ["ones", "zeros", "a traced number", "a number for each head"])
def test_a_materialised_operand_is_right_beside_a_sum(kind: str) -> None:
    numbers = jnp.asarray([0.5, 2.0, -3.0])

    def operand(numbers: jax.Array) -> jax.Array:
        whole = (3, 32, 64)
        return {
            "ones": jnp.ones(whole),
            "zeros": jnp.zeros(whole),
            "a traced number": jnp.broadcast_to(numbers[2], whole),
            "a number for each head": jnp.broadcast_to(numbers[:, None, None], whole),
        }[kind]

    rows = np.random.default_rng(0).standard_normal((3, 64, 32), np.float32)
    found = jax.jit(lambda x, numbers: (x @ materialised(operand(numbers))).sum(1))(rows, numbers)
    expected = (rows.astype(np.float64) @ np.asarray(operand(numbers))).sum(1)
    np.testing.assert_allclose(found, expected, atol=3 * 2.0**-24 * 64 * 32 * 4)  # of 64 * 32 numbers up to 4 or so


def test_materialised_is_the_identity_with_its_derivatives() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3), np.float32))
    x = x.at[0, 0].set(jnp.nan).at[1, 1].set(-jnp.inf)
    for compiled in (materialised, jax.jit(materialised), jax.vmap(materialised), jax.jit(jax.vmap(materialised))):
        np.testing.assert_array_equal(compiled(x), x)
    _, tangent = jax.jit(lambda x: jax.jvp(materialised, (x,), (2 * x,)))(x)
    np.testing.assert_array_equal(tangent, 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: jax.vjp(materialised, x)[1](x))(x)[0], x)
