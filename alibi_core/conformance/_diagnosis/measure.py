"""Measurements: what weights a probe reveals, and what numbers follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Values
from alibi_core.conformance._diagnosis._departures import Departure
from alibi_core.conformance._diagnosis._observations import Observation
from alibi_core.conformance._diagnosis._readings import Reading

LARGEST = 88.0  # of scores whose exponentials float32 holds
LEAST = 1e-30  # weights below this are not relied upon


def measured_weights(observation: Observation) -> Values | None:
    """Return the weights ``[num_heads, q_len, kv_len]`` that a probe with one-hot values reveals, of batch entry 0.

    Where keys outnumber features, each batch entry reveals those of its own keys.
    """
    inputs = observation.inputs
    value, output = inputs.value, observation.results.get("output")
    is_one_hot = set(np.unique(value)) <= {0.0, 1.0} and value.any(axis=-1).sum() >= inputs.kv_len * inputs.num_kv_heads
    if output is None or not is_one_hot or inputs.kv_len == 0:
        return None
    shown = [output[batch, :, :, : inputs.kv_len - batch * inputs.head_dim] for batch in range(inputs.batch)]
    if inputs.kv_len <= inputs.head_dim:
        shown = shown[:1]
    weights = np.concatenate(shown, axis=-1)[..., : inputs.kv_len]
    return weights if weights.shape[-1] == inputs.kv_len else None


def estimates(observation: Observation, current: Any) -> Iterator[Departure]:
    """Yield departures with numbers that follow from the weights."""
    weights = measured_weights(observation)
    if weights is None:
        return
    inputs = observation.inputs
    if np.any(inputs.query):
        yield from _of_scale(weights, observation, current)
        return
    positions = inputs.q_positions("given")[0, 0]
    ahead = np.arange(inputs.kv_len) - positions  # [q_len, kv_len]
    yield from _of_factors(weights, inputs.slopes[0], np.abs(ahead))
    yield from _of_reach(weights, inputs.slopes[0], np.abs(ahead), ahead)
    yield from _of_restarts(weights)


def _of_scale(weights: Values, observation: Observation, current: Any) -> Iterator[Departure]:
    """Yield what products of query and key are multiplied by."""
    inputs = observation.inputs
    products, bias = inputs.scale * inputs.products[0, :, -1], current.bias(inputs)[0, :, -1]
    row = weights[:, -1]
    seen = row > LEAST
    with np.errstate(all="ignore"):
        logs = np.where(seen, np.log(row) - bias, 0)
    logs, products = (np.where(seen, x - _mean(x, seen), 0) for x in (logs, products))
    scale = float((logs * products).sum() / (products * products).sum())
    for value in (_plain(scale), scale):
        sentence = f"Products of query and key are multiplied by {value:.6g}, beside the scale."
        yield Departure("scores multiplied", sentence, {"scale": value})


def _mean(values: Values, seen: Values) -> Values:
    count = np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    return np.asarray(np.where(seen, values, 0).sum(axis=-1, keepdims=True) / count)


def _of_restarts(weights: Values) -> Iterator[Departure]:
    """Yield after how many keys positions start again: where weights, which grow towards the query, fall."""
    row = weights[np.argmax((weights[:, -1] > LEAST).sum(axis=-1)), -1]
    with np.errstate(all="ignore"):
        falls = np.flatnonzero(np.diff(np.log(np.maximum(row, LEAST))) < -0.01)
    if falls.size:
        n = int(falls[0]) + 1
        for whose, who in (("key positions", "keys"), ("positions", "keys and queries")):
            key, sentence = (
                f"{whose} restart",
                f"Positions of {who} restart every {n}: the start of the block is missing.",
            )
            yield Departure(key, sentence, {"distance": (key, n)})


def _of_factors(weights: Values, slopes: Values, distances: Values) -> Iterator[Departure]:
    """Yield what the bias, or each head's, is multiplied by; and the power of the distance by which it grows."""
    factors, powers = [], []
    for w, slope in zip(weights, slopes, strict=True):
        row = w[-1]
        seen = (row > LEAST) & (distances[-1] > 0)
        own = np.argmin(distances[-1])
        if seen.sum() < 2 or row[own] <= LEAST or slope == 0:
            return
        falls, far = np.log(row[own]) - np.log(row[seen]), distances[-1][seen]
        factors.append(float((falls @ far) / (far @ far) / slope))
        if np.all(falls > 0):
            powers.append(np.polyfit(np.log(far), np.log(falls), 1)[0])
    factor = float(np.median(factors))
    for value in (_plain(factor), factor):
        number = f"{value:.6g}"
        yield Departure("bias multiplied", f"The bias is {number} times what it should be.", {"factor": value})
    each = tuple(_plain(x) for x in factors)
    listed = ", ".join(f"{x:.4g}" for x in np.asarray(factors) * slopes)
    asked = ", ".join(f"{x:.4g}" for x in slopes)
    sentence = f"Heads have other slopes than they are given: {listed} instead of {asked}."
    yield Departure("other slopes", sentence, {"head_factors": each})
    yield Departure("other slopes", sentence, {"head_factors": tuple(factors)})
    if powers:
        power = _plain(float(np.median(powers)))
        sentence = f"The bias grows with the distance to the power of {power:.4g}."
        yield Departure("power of distance", sentence, {"distance": ("power", power)})


def _of_reach(weights: Values, slopes: Values, distances: Values, ahead: Values) -> Iterator[Departure]:
    """Yield how far keys are seen, and beyond which distance they are penalised no more."""
    row, far = weights[:, -1], distances[-1]
    is_past = ahead[-1] <= 0
    gone = is_past & (row == 0).all(axis=0)
    if gone.any() and (far[gone].min() > far[is_past & ~gone].max(initial=-1)):
        reach = int(far[gone].min())
        sentence = f"Keys {reach} tokens away or farther weigh nothing: the horizon is too short."
        yield Departure("horizon too short", sentence, {"keys": ("horizon too short", reach)})
    if gone.any():
        first = int(np.argmin(gone))
        yield Departure(
            "first keys missing", f"The first {first} keys weigh nothing.", {"keys": ("first block dropped", first)}
        )
        last = int(np.argmin(gone[::-1]))
        yield Departure(
            "last keys missing", f"The last {last} keys weigh nothing.", {"keys": ("last block dropped", last)}
        )
    falls = [slope * far[is_past & (w == 0)].min(initial=np.inf) for w, slope in zip(row, slopes, strict=True)]
    kept = [slope * far[is_past & (w > 0)].max(initial=0) for w, slope in zip(row, slopes, strict=True)]
    if np.isfinite(min(falls)) and max(kept) < min(falls):
        limit = _between(max(kept), min(falls))
        sentence = f"Keys with a penalty beyond about {limit:.3g} weigh nothing: the horizon is too short."
        yield Departure("threshold too low", sentence, {"keys": ("threshold", limit)})
    flat = np.argmax(slopes * (row[:, is_past] > LEAST).all(axis=-1))
    logs = np.log(np.maximum(row[flat], LEAST))
    same = is_past & (np.abs(logs - logs[0]) < 1e-4) & (row[flat] > LEAST)
    if same.sum() > 1 and far[same].max() > far[same].min():
        limit = int(far[same].min())
        sentence = f"Distances are clipped at {limit}: keys farther away are penalised no more."
        yield Departure("distance clipped", sentence, {"distance": ("distance clipped", limit)})
    yield from _of_clipped_penalties(row, slopes, far)


def _of_clipped_penalties(row: Values, slopes: Values, far: Values) -> Iterator[Departure]:
    """Yield the largest penalty, where far keys of steep heads all have one."""
    steep, own = int(np.argmax(slopes)), int(np.argmin(far))
    ends = np.sort(np.flatnonzero(row[steep] > LEAST))[:2]
    if ends.size == 2 and row[steep, own] > 0:
        logs = np.log(row[steep, own]) - np.log(row[steep, ends])
        if abs(logs[0] - logs[1]) < slopes[steep] / 10:
            limit = _plain(float(logs[0]))
            sentence = f"Penalties are clipped at {limit:g}: keys beyond that are penalised no more."
            yield Departure("penalty clipped", sentence, {"distance": ("penalty clipped", limit)})


def _between(low: float, high: float) -> float:
    """Return the number of fewest digits from ``low`` to ``high``."""
    for digits in range(1, 12):
        for number in (float(f"{x:.{digits}g}") for x in (low, (low + high) / 2, high)):
            if low <= number < high:
                return number
    return (low + high) / 2


def _plain(value: float, digits: int = 4) -> float:
    """Return a nearby number that somebody may have written down, if there is one."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else 1.0


def described(observation: Observation, reading: Reading) -> list[str]:
    """Say where, and by how much, an observation departs from its reading."""
    sentences: list[str] = []
    answers = observation.answers(reading)
    for name, actual in observation.results.items():
        if name in answers:
            answer = answers[name]
            error = np.where(actual == answer.value, 0, np.abs(actual - answer.value))
            bad = ~(error <= answer.budget + observation.leeway.get(name, 0.0))
            if bad.any():
                sentences.append(_where(name, bad, error, answer.value, observation))
    weights = measured_weights(observation)
    if weights is not None and not np.any(observation.inputs.query):
        sentences += _about_weights(weights, observation, reading)
    return sentences


def _where(name: str, bad: Values, error: Values, value: Values, observation: Observation) -> str:
    finite = error[np.isfinite(error)]
    parts = []
    axes = (("batch entry", "batch entries"), ("head", "heads"), ("query", "queries"))
    if name in ("key", "value"):
        axes = (*axes[:1], ("key/value head", "key/value heads"), ("key", "keys"))
    for axis, (one, many) in enumerate(axes[: bad.ndim]):
        places = np.flatnonzero(bad.any(axis=tuple(x for x in range(bad.ndim) if x != axis)))
        if places.size < bad.shape[axis]:
            parts.append(f"{one if places.size == 1 else many} {_listed(places)} of {bad.shape[axis]}")
    where = " of " + ", ".join(parts) if parts else ""
    what = f"The {name}" if name in ("output", "bias") else f"The gradient of {name}"
    if np.isnan(error[bad]).any() or not finite.size:
        overflows = np.abs(observation.inputs.scale * observation.inputs.products).max(initial=0) > LARGEST
        why = ": exponentials of large scores overflow, for the row's maximum is not subtracted" if overflows else ""
        return f"{what}{where} is NaN where it should be a number{why}."
    largest = float(finite.max())
    share = largest / max(float(np.abs(value).max(initial=0)), 1e-300)
    dtype = like_rounding(share)
    q_len, kv_len = observation.case.sizes.lengths
    return (
        f"{what}{where} is off by up to {largest:.3g}, {share:.2g} of its largest number{dtype}, with {q_len} queries "
        f"and {kv_len} keys{_circumstances(observation)}."
    )


def like_rounding(share: float) -> str:
    """Say what rounding is of that size."""
    if share < 2.0**-13:
        return ", more than rounding in float32 can do"
    if share < 2.0**-10:
        return ", as much as rounding in float16 would do"
    return ", as much as rounding in bfloat16 would do" if share < 2.0**-7 else ""


def _circumstances(observation: Observation) -> str:
    words = sorted(observation.conditions - {"lengths", "long"})
    return f" ({', '.join(words)})" if words else ""


def _about_weights(weights: Values, observation: Observation, reading: Any) -> list[str]:
    """Say what is odd about the weights of a probe whose queries are zero."""
    with np.errstate(all="ignore"):
        expected = reading.weights(observation.inputs)[0]
        sums = weights.sum(axis=-1)
    result = []
    if observation.inputs.kv_len <= observation.inputs.head_dim and np.any(np.abs(sums - 1) > 1e-2):
        result.append(f"Weights sum to {sums.min():.3g} to {sums.max():.3g} instead of 1.")
    lost, gained = (expected > 1e-6) & (weights == 0), (expected == 0) & (weights > 1e-6)
    for odd, words in ((lost, "weigh nothing though they should"), (gained, "weigh something though they should not")):
        if odd.any():
            head, query = (int(x) for x in np.argwhere(odd.any(axis=-1))[-1])
            keys = np.flatnonzero(odd[head, query])
            result.append(f"Keys {_listed(keys)} {words}, for query {query} of head {head}.")
    both = (expected > LEAST) & (weights > LEAST)
    if both.any() and not lost.any() and not gained.any():
        result += _effective_bias(weights, observation)
    return result


def _effective_bias(weights: Values, observation: Observation) -> list[str]:
    with np.errstate(all="ignore"):
        row = np.log(weights[:, -1])
    shown = np.flatnonzero(np.isfinite(row[0]))[-5:]
    numbers = ", ".join(f"{x:.4g}" for x in row[0, shown] - row[0, shown[-1]])
    slope = observation.inputs.slopes[0, 0]
    return [
        f"The last query of head 0, slope {slope:.3g}, has an effective bias of {numbers} on keys {_listed(shown)}."
    ]


def _listed(places: Values) -> str:
    numbers = [int(x) for x in places]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
