"""The frame of a call, from its tensors: library, sizes, dtypes and device, and the checks of what must fit them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from alibi_core._arrays import (
    Device,
    DType,
    Namespace,
    adopted,
    astype,
    checks,
    device_of,
    divided_along,
    host_values,
    is_constant,
    is_kind,
    is_numpy,
    signed,
)
from alibi_core._bias import place_slopes, working_dtype
from alibi_core._distance import check_dims, points_of_call
from alibi_core._gates import checked_gates
from alibi_core._mask import with_score_axes

HEADS_FIRST = ("heads", "length", "head_dim")
LENGTH_FIRST = ("length", "heads", "head_dim")
TENSORS = ("query", "key", "value")
SLOPES = ("slopes", "future_slopes")
MAY_BE_INT = (*SLOPES, "q_offset")
FARTHEST = 2**30  # tokens; offsets in arrays are clipped to this size, so that positions fit int32

Layout = tuple[str, str, str]


class Frame(NamedTuple):
    """The library, sizes, dtypes and device of a call, which its arguments must fit; fields of AttentionCall."""

    xp: Namespace
    batch: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType
    working_dtype: DType
    device: Device | None

    @classmethod
    def of(cls, xp: Namespace, device: Device | None, query: Any, key: Any, value: Any, layout: Layout) -> Frame:
        """Check that the tensors fit each other, and return their frame."""
        tensors = {"query": query, "key": key, "value": value}
        shapes = {name: tuple(checks.tensor(xp, name, tensor).shape) for name, tensor in tensors.items()}
        axes = axes_of(layout)
        for name, shape in shapes.items():
            if len(shape) < 3:
                raise ValueError(f"{name} must have axes {axes}, got shape {shape}")
        if len({str(tensor.dtype) for tensor in tensors.values()}) > 1:
            listed = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
            raise TypeError(f"query, key and value must have one dtype, got {listed}")
        if shapes["key"] != shapes["value"]:
            raise ValueError(f"value must have the shape of key, {shapes['key']} {axes}, got {shapes['value']}")
        q, kv = (dict(zip(layout, shapes[name][-3:], strict=True)) for name in ("query", "key"))
        batch = shapes["query"][:-3]
        if shapes["key"][:-3] != batch:
            raise ValueError(f"key must have the batch axes of query, {batch}, got {shapes['key'][:-3]}")
        # Sizes are compared by axis name, whatever the layout.
        if kv["head_dim"] != q["head_dim"]:
            raise ValueError(f"key must have the head_dim of query, {q['head_dim']}, got {kv['head_dim']}")
        if q["head_dim"] < 1:
            raise ValueError(f"head_dim must be at least 1, got query of shape {shapes['query']} {axes}")
        for count, name, side in (("num_heads", "query", q), ("num_kv_heads", "key", kv)):
            if side["heads"] < 1:
                raise ValueError(f"{count} must be at least 1, got {name} of shape {shapes[name]} {axes}")
        if q["heads"] % kv["heads"]:
            heads = f"{kv['heads']} (key) and {q['heads']} (query)"
            raise ValueError(f"num_kv_heads must divide num_heads, got {heads}; their axes are {axes}")
        sizes = q["heads"], kv["heads"], q["length"], kv["length"], q["head_dim"]
        return cls(xp, batch, *sizes, query.dtype, working_dtype(xp, query.dtype), device)

    def scores(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the sizes of the scores' axes, by name: the batch axes, and the last three axes."""
        batch = dict(zip(batch_axes(self.batch), self.batch, strict=True))
        return batch, {"num_heads": self.num_heads, "q_len": self.q_len, "kv_len": self.kv_len}

    def placed_slopes(self, name: str, slopes: Any, query: Any, layout: Layout, *, allow_negative: bool) -> Any:
        """Return slopes, or that many canonical ones, in the working dtype; None for None."""
        if slopes is None:
            return None
        slopes = adopted(self.xp, slopes, self.device)
        if checks.is_int(slopes):
            checks.slopes_count(name, slopes, self.num_heads, axes_of(layout), divided_along(self.xp, query))
        else:
            checks.floating_array(self.xp, name, slopes)
            checks.slopes_shape(name, slopes, self.num_heads, self.batch, axes_of(layout))
            checks.slopes_values(name, slopes, allow_negative=allow_negative, working=self.working_dtype)
        return place_slopes(self.xp, slopes, self.working_dtype, self.device)

    def gates(self, gates: Any, layout: Layout, mask: Any | None) -> Any:
        """Return gates, ``[*batch, num_heads, kv_len]`` or ``[*batch, kv_len, num_heads]``, heads-first."""
        xp, axes = self.xp, {"heads": self.num_heads, "length": self.kv_len}
        shape = (*self.batch, *(axes[axis] for axis in layout if axis in axes))
        if tuple(checks.floating_array(xp, "log_gates", gates).shape) != shape:
            names = {"heads": "num_heads", "length": "kv_len"}
            listed = ", ".join([*batch_axes(self.batch), *(names[axis] for axis in layout if axis in names)])
            raise ValueError(f"log_gates must have shape {shape} ({listed}), got {tuple(gates.shape)}")
        gates = checked_gates(xp, astype(xp, gates, self.working_dtype))
        gates = gates if layout == HEADS_FIRST else xp.matrix_transpose(gates)
        if mask is None or (mask.ndim > 1 and mask.shape[-2] != 1):
            return gates
        # The gates of tokens that a mask of keys hides count for nobody.
        return xp.where(mask if mask.ndim == 1 else mask[..., 0, :], gates, 0.0)

    def placed_sinks(self, sinks: Any) -> Any:
        """Return sinks, ``[num_heads]``, with an axis for queries, in the working dtype."""
        if tuple(checks.floating_array(self.xp, "sinks", sinks).shape) != (self.num_heads,):
            raise ValueError(f"sinks must have shape ({self.num_heads},) (num_heads), got {tuple(sinks.shape)}")
        sinks = astype(self.xp, sinks, self.working_dtype)
        is_right = host_values(self.xp.all(sinks < math.inf))
        if is_right is not None and not is_right:
            raise ValueError("sinks must be numbers below inf (-inf is no sink), got NaN or inf")
        return sinks[:, None]

    def segment_ids(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the ids of queries and keys, ``[..., length]``, which broadcast to ``[*batch, length]``."""
        for name, ids, length in zip(("q_len", "kv_len"), pair, (self.q_len, self.kv_len), strict=True):
            shape = tuple(checks.integer_array(self.xp, "segment_ids", ids).shape)
            checks.by_token("segment_ids", shape, (*self.batch, length), ", ".join([*batch_axes(self.batch), name]))
        if not any("uint" in str(ids.dtype) for ids in pair):
            return pair
        # PyTorch neither compares nor casts most unsigned integers.
        return signed(self.xp, pair[0]), signed(self.xp, pair[1])

    def points(self, pair: tuple[Any, Any], is_causal: bool, future_slopes: Any | None) -> tuple[Any, Any]:
        """Return the points of queries and keys, ``[..., length, dims]``."""
        q_points = points_of_call(self.xp, pair[0], self.batch, "q_len", self.q_len)
        kv_points = points_of_call(self.xp, pair[1], self.batch, "kv_len", self.kv_len)
        check_dims(q_points, kv_points, is_causal, future_slopes)
        return q_points, kv_points

    def offset(self, q_offset: Any) -> Any:
        """Return the position of the first query: an int, or int32, ``[]`` or ``[*batch]``."""
        xp, q_offset = self.xp, self.kv_len - self.q_len if q_offset is None else q_offset
        if checks.is_int(q_offset):
            q_offset = checks.integer("q_offset", q_offset)
            checks.positions_fit(q_offset, self.q_len, self.kv_len)
            return q_offset
        shape = tuple(checks.integer_array(xp, "q_offset", q_offset).shape)
        if shape not in ((), self.batch):
            batch = f" or {self.batch} (batch)" if self.batch else ""
            raise ValueError(f"q_offset must have shape (){batch}, got {shape}")
        checks.positions_fit(FARTHEST, self.q_len, self.kv_len)
        # Clip offsets instead of raising: an error would have to wait for the values. Clipping moves all keys of a row
        # by the same distance, which softmax ignores. Only a window of more than 2**30 tokens would see other keys.
        offset = signed(xp, q_offset)
        if "uint" in str(q_offset.dtype):
            # A negative number here is an unsigned offset that wrapped around.
            offset = xp.where(offset < 0, FARTHEST, offset)
        return astype(xp, xp.clip(offset, -FARTHEST, FARTHEST), xp.int32)

    def addition(self, added_bias: Any, mask: Any | None) -> tuple[Any, Any]:
        """Return a bias to add, finite, and the mask, of which its -inf become a part."""
        xp = self.xp
        if is_kind(xp, added_bias.dtype, "bool"):
            raise TypeError(f"added_bias must be floating, got {added_bias.dtype}; booleans are a mask")
        checks.floating_array(xp, "added_bias", added_bias)
        added_bias = astype(xp, with_score_axes(xp, "added_bias", added_bias, *self.scores()), self.working_dtype)
        shown: Any = added_bias != -math.inf
        return xp.where(shown, added_bias, 0.0), shown if mask is None else xp.logical_and(mask, shown)


def batch_axes(batch: tuple[int, ...]) -> list[str]:
    """Return the names of batch axes."""
    return ["batch"] if len(batch) == 1 else [f"batch{axis}" for axis in range(len(batch))]


def pair_of(name: str, value: Any) -> tuple[Any, Any]:
    """Return an argument as a pair (queries, keys); one array serves both."""
    if not isinstance(value, (tuple, list)):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one array or a pair (queries, keys), got {len(value)} arrays")
    return value[0], value[1]


def arrays_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are arrays, by name, having checked their kinds.

    NumPy's slopes are left out: they are accepted with any library; with JAX, so is any array but the tensors.
    """
    arrays, q_offset = {}, arguments["q_offset"]
    if isinstance(q_offset, (bool, float)):
        raise TypeError(f"q_offset must be an integer or an integer array, got {q_offset}")
    for name, value in arguments.items():
        is_tensor = name in TENSORS
        if (value is None and not is_tensor) or (name in MAY_BE_INT and checks.is_int(value)):
            continue
        array = checks.array(name, value)
        if is_tensor or not (is_numpy(array) and (name in SLOPES or is_constant(array, arguments["query"]))):
            arrays[name] = array
    return arrays


def common_device(xp: Namespace, arrays: dict[str, Any]) -> Device | None:
    """Return the device of all arrays, the query's, having checked that it is one."""
    devices = {name: device_of(xp, array) for name, array in arrays.items()}
    for name, device in devices.items():
        if device != devices["query"]:
            raise ValueError(f"{name} must be on the device of query, {devices['query']}, got {device}")
    return devices["query"]


def axes_of(layout: Layout) -> str:
    """Return the axes of the tensors, in words."""
    return f"[..., {', '.join(layout)}]"
