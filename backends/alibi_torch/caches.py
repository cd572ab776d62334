"""Keys and values of earlier tokens, and attention to them."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from alibi_core.backend.caches import (
    RowTokens,
    cache_summary,
    check_indices,
    check_new_gates,
    check_new_tokens,
    check_room,
    check_span,
    counts_of_rows,
    over_keys,
    plain_rules,
    read_lengths,
)
from alibi_core.backend.checks import (
    explains_keywords,
    floating_dtype,
    non_negative_int,
    one_of,
    positive_int,
)
from alibi_core.backend.horizon import KeyNorms
from alibi_torch._attention import checked, is_special, run
from alibi_torch._cpu import NEAR, NextStep, attend_last_query, is_last_query, norm_bounds, unit_strided, uses_norms
from alibi_torch._dispatch import IMPLEMENTATIONS, autocast_dtype, autocasted, has_tangent, needs_gradients
from alibi_torch._internals import in_transform, is_watched, skipped_by_compilers, version

__all__ = ["KVCache"]

BLOCK = 128  # The cache stores one upper bound of norms for each block of this many keys.

# Compilers skip what the host computes in NumPy: PyTorch 2.13 cannot guard NumPy arrays under inference mode.
_on_host = skipped_by_compilers


class KVCache:
    """A key/value cache of fixed capacity that appends in place and stores bounds of key norms for the horizon.

    Attributes:
        keys: ``[batch_size, num_kv_heads, max_length, head_dim]``; the first ``length`` positions are in use.
        values: ``[batch_size, num_kv_heads, max_length, head_dim]``, in use as ``keys``.
        log_gates: ``[batch_size, num_heads, max_length]``, float32 or float64, of tokens that have forget gates.
        length: Number of cached tokens; of the longest row, if the lengths of rows differ.
        lengths: The length of each row, ``[batch_size]`` int64 on the CPU; None while all rows have equal lengths.

    Example:
        >>> cache = KVCache(1, 2, 5, 4)
        >>> _ = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        >>> cache.attend(torch.ones(1, 2, 1, 4)).shape
        torch.Size([1, 2, 1, 4])
        >>> cache.length
        3
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (
            positive_int("batch_size", batch_size),
            positive_int("num_kv_heads", num_kv_heads),
            positive_int("max_length", max_length),
            positive_int("head_dim", head_dim),
        )
        if dtype is not None:
            floating_dtype(xp, "dtype", dtype)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        statistics = torch.promote_types(self.keys.dtype, torch.float32)
        # A number of blocks would limit the lengths of an exported program, which computes all keys without norms.
        blocks = 0 if torch.compiler.is_exporting() else -(-shape[2] // BLOCK)
        self._norms_by_block = torch.zeros(*shape[:2], blocks, device=device, dtype=statistics)
        self.log_gates: Tensor | None = None
        self._measured = 0  # the number of tokens whose norms are included
        self.length = 0
        self.lengths: Tensor | None = None
        self._next_step: NextStep | None = None

    @property
    def max_length(self) -> int:
        """Capacity, in tokens."""
        return self.keys.shape[2]

    def _norms(self, near: int) -> KeyNorms:
        """Return bounds of the norms of all cached keys, except possibly the last ``near``."""
        if self.length - self._measured > near:
            _ = self.key_norms
        return KeyNorms(self._norms_by_block[:, :, : max(1, -(-self._measured // BLOCK))], BLOCK)

    @property
    def key_norms(self) -> Tensor:
        """``[batch_size, num_kv_heads, blocks]``, float32: an upper bound of the norms of each block of 128 keys."""
        if self._measured < self.length:  # lazily: short caches are never measured
            some = slice(self._measured, self.length)
            norms = norm_bounds(self.keys[:, :, some].detach())
            # A shift, because Inductor of PyTorch 2.13 on CPUs leaves out the rest of n % BLOCK numbers of
            # `arange(n) // BLOCK` where n is symbolic.
            blocks = torch.arange(some.start, some.stop, device=norms.device) >> BLOCK.bit_length() - 1
            self._norms_by_block.scatter_reduce_(2, blocks.expand_as(norms), norms, "amax")
            self._measured = self.length
        return self._norms_by_block

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_next_step": None}  # it names a module; a copy checks its own first step

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, unused capacity included."""
        return self.keys.nbytes + self.values.nbytes

    def __repr__(self) -> str:
        batch_size, num_kv_heads, _, head_dim = self.keys.shape
        sizes = batch_size, num_kv_heads, head_dim
        return cache_summary(type(self).__name__, sizes, self.length, self.max_length, self.nbytes)

    def append(
        self, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, log_gates: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens and return those of all tokens so far.

        Args:
            key: ``[batch_size, num_kv_heads, new, head_dim]``.
            value: ``[batch_size, num_kv_heads, new, head_dim]``.
            lengths: ``[batch_size]`` integers: the number of new tokens in each row, for prompts of different lengths
                with padding at the end. Later tokens follow them directly. Default: all ``new`` tokens.
            log_gates: ``[batch_size, num_heads, new]``, of all tokens of a cache or of none; :meth:`attend` uses them.

        Returns:
            Views of the cache, ``[batch_size, num_kv_heads, length, head_dim]`` each. For gradients they are valid
            until the next :meth:`append`; decode under ``torch.no_grad()``.

        Raises:
            TypeError: If an argument is no floating tensor of four axes.
            ValueError: If the cache is full, or has another batch size, dtype or device.
        """
        if self.keys.is_meta and isinstance(key, Tensor) and not key.is_meta:  # made while weights were offloaded
            held = self.keys, self.values, self._norms_by_block
            self.keys, self.values, self._norms_by_block = (torch.zeros_like(x, device=key.device) for x in held)
        key, value = self._cast(key), self._cast(value)
        _check_appended(key, value, self.keys)
        new = key.shape[2]
        gates = None if self.length == 0 else self.log_gates
        held_heads = None if gates is None else gates.shape[1]
        check_new_gates(xp, log_gates, (*key.shape[:2], new), held_heads, is_empty=self.length == 0)
        if log_gates is not None and gates is None:
            shape = *log_gates.shape[:2], self.max_length
            gates = log_gates.new_zeros(shape, dtype=self._norms_by_block.dtype)
        self.log_gates = gates
        if lengths is not None or self.lengths is not None:
            self._append_by_row(key, value, lengths, log_gates)
        else:
            check_room(new, self.max_length, self.length)
            self.keys.narrow(2, self.length, new).copy_(key)
            self.values.narrow(2, self.length, new).copy_(value)
            if self.log_gates is not None:
                self.log_gates.narrow(2, self.length, new).copy_(log_gates)
            self.length += new
        return self._held_tensors()

    def _cast(self, tensor: Any) -> Any:
        """Return a tensor in the dtype of a cache that has autocast's, as autocast casts it for attention."""
        own = self.keys
        is_other = isinstance(tensor, Tensor) and tensor.dtype != own.dtype
        return autocasted(tensor)[0] if is_other and autocast_dtype(own.device.type) == own.dtype else tensor

    def _held_tensors(self) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of all cached tokens."""
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def _held(self) -> np.ndarray[Any, Any]:
        """Return the number of cached tokens in each row, ``[batch_size]``."""
        return np.full(self.keys.shape[0], self.length) if self.lengths is None else self.lengths.numpy()

    @_on_host
    def _hold(self, lengths: np.ndarray[Any, Any]) -> None:
        self.lengths, self.length = torch.from_numpy(lengths), int(lengths.max())

    @_on_host
    def _offsets(self, lengths: Tensor | None, new: int) -> Tensor:
        """Return the position of the first of the last ``new`` tokens in each row, ``[batch_size]``."""
        offsets = self._held() - counts_of_rows(xp, lengths, self.keys.shape[0], new)
        check_span(self.length, self.length - int(offsets.min()))
        return torch.from_numpy(offsets).to(self.keys.device)

    @_on_host
    def _append_by_row(self, key: Tensor, value: Tensor, lengths: Tensor | None, log_gates: Tensor | None) -> None:
        counts = counts_of_rows(xp, lengths, self.keys.shape[0], key.shape[2])
        tokens = RowTokens.of(self._held(), counts)
        end = int(tokens.ends.max())
        check_room(end - self.length, self.max_length, self.length)
        rows, columns, slots, ends, new = (
            torch.from_numpy(x).to(key.device)
            for x in (tokens.rows, tokens.columns, tokens.slots, tokens.ends[:, None], counts[:, None])
        )
        for held, given in ((self.keys, key), (self.values, value), (self.log_gates, log_gates)):
            if held is None or given is None:
                continue
            held[:, :, self.length : end] = 0.0  # padding of shorter rows is read with weight 0, and 0 * NaN is NaN
            held[rows, :, slots] = given[rows, :, columns].to(held.dtype)
        places = torch.arange(key.shape[2], device=key.device)
        # Padding has norm 0, which changes no maximum: [batch_size, num_kv_heads, new].
        norms = torch.where((places < new)[:, None], norm_bounds(key.detach()), 0.0)
        blocks = ((ends - new + places) // BLOCK).clamp(max=self._norms_by_block.shape[2] - 1)[:, None]
        self.key_norms.scatter_reduce_(2, blocks.expand_as(norms), norms, "amax")
        self._hold(tokens.ends)
        self._measured = self.length

    @explains_keywords
    def attend(
        self,
        query: Tensor,
        slopes: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        segment_ids: tuple[Tensor, Tensor] | None = None,
        window_size: int | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
        implementation: str | None = None,
        lengths: Tensor | None = None,
        law: str = "linear",
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the causal attention of the last cached tokens over all cached tokens.

        It equals :func:`alibi_torch.attention` on the tensors that :meth:`append` returned, but uses the cached norms,
        so it need not read all keys to measure them.

        Arguments that are not listed are those of :func:`alibi_torch.attention`.

        - ``query``: ``[batch_size, num_heads, q_len, head_dim]``, the queries of the last ``q_len`` tokens.
        - ``mask``: Booleans over all cached tokens; ``segment_ids``: a pair, for the queries and for all cached tokens.
          Both may go on over unused slots.
        - ``lengths``: ``[batch_size]`` integers: the number of queries in each row, as given to :meth:`append`; results
          of the padding are undefined. Default: all ``q_len`` queries.

        Returns:
            ``[batch_size, num_heads, q_len, head_dim]``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If there are more queries than cached tokens, or a value or a shape is wrong.
        """
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        arguments = None
        is_plain = mask is segment_ids is sinks is lengths is self.lengths is self.log_gates is None
        if is_plain and implementation in (None, "tiled"):
            arguments = self._arguments(query, slopes, window_size, scale, tolerance, law)
            step = self._next_step
            if step is not None and step.arguments == arguments and 0 < self.length <= step.biases.shape[-1]:
                return self._attend_next(step, query)
        given = over_keys(lambda array: array[..., : self.length], mask, segment_ids)
        given |= {"window_size": window_size, "scale": scale, "sinks": sinks}
        given |= {"tolerance": tolerance, "law": None if law == "linear" else law}
        given["log_gates"] = None if self.log_gates is None else self.log_gates.narrow(2, 0, self.length)
        rules: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        if lengths is not None or self.lengths is not None:
            rules["q_offset"] = self._offsets(lengths, query.shape[2])
        else:
            check_span(self.length, query.shape[2] if query.ndim == 4 else self.length)
        query = self._cast(query)
        call = checked(query, self.keys, self.values, slopes, used=self.length, **rules)
        if arguments is not None and is_last_query(call) and not call.is_empty:
            step = self._next_step = NextStep.of(arguments, call, min(2 * self.length, self.max_length))
            return self._attend_next(step, query)
        key, value = self._held_tensors()
        norms = None
        # uses_norms reads Python settings, so a compiler cannot trace it.
        is_traced = torch.compiler.is_compiling()
        if not torch.compiler.is_exporting() and (self.keys.device.type != "cpu" or is_traced or uses_norms(call)):
            norms = self._norms(0)
        return _guarded(run(call, query, key, value, implementation, norms), self.keys)

    def _arguments(self, query: Any, slopes: Any, *rules: Any) -> tuple[Any, ...] | None:
        """Return what decides about a step of one query, apart from its tokens; None if it may be anything but plain.

        Plain steps are those without gradients, autocast, compilers and transforms, on the CPU.
        """
        own = self.keys
        tensors = (query, own, self.values) if slopes is None else (query, own, self.values, slopes)
        if not own.is_cpu or is_watched(*tensors) or any(is_special(x, own.device) for x in (query, *tensors[3:])):
            return None
        if needs_gradients(*tensors) or has_tangent(*tensors) or autocast_dtype("cpu") is not None:
            return None
        plain = plain_rules(*rules)
        if plain is None:
            return None
        rates = None if slopes is None else (slopes.dtype, slopes.tolist())
        return plain, rates, query.shape, query.dtype, own.shape, own.dtype

    def _attend_next(self, step: NextStep, query: Tensor) -> Tensor:
        """Return the result of a step whose arguments have been checked."""
        call = step.call.having(kv_len=self.length, q_offset=self.length - 1)
        norms = self._norms(NEAR) if uses_norms(call) else None
        tensors = unit_strided(query, *self._held_tensors())
        result, _ = attend_last_query(call, *tensors, norms, step.biases)
        return result.to(call.dtype)

    def truncate(self, length: int | Tensor) -> None:
        """Remove all tokens after the first ``length`` of each row: a number, or ``[batch_size]`` integers.

        Speculative decoding uses it to remove rejected tokens, whose number differs between rows.

        Raises:
            TypeError: If ``length`` is of the wrong kind.
            ValueError: If ``length`` is negative or has the wrong shape.
        """
        if isinstance(length, Tensor):
            self._truncate_by_row(length)
            return
        self.length = min(self.length, non_negative_int("length", length))
        if self.lengths is not None:
            self._hold(np.minimum(self._held(), self.length))
        self._measured = min(self._measured, self.length)

    @_on_host
    def _truncate_by_row(self, length: Tensor) -> None:
        held, most = self._held(), read_lengths(xp, "length", length, self.keys.shape[0])
        kept = np.minimum(held, most)
        forgotten = RowTokens.of(kept, held - kept)
        rows, slots = (torch.from_numpy(x).to(self.keys.device) for x in (forgotten.rows, forgotten.slots))
        for tensor in (self.keys, self.values, self.log_gates):
            if tensor is not None:
                tensor[rows, :, slots] = 0.0  # 0 * NaN is NaN, as in _append_by_row
        self._hold(kept)

    def select_batch(self, indices: Tensor) -> None:
        """Replace the batch by the sequences at ``indices``, in that order; indices may repeat.

        Beam search uses it to drop and to duplicate candidates.

        Args:
            indices: ``[new batch_size]`` integers.

        Raises:
            TypeError: If ``indices`` is no integer tensor.
            IndexError: If an index is out of range.
        """
        indices = check_indices(xp, indices, self.keys.shape[0]).to(self.keys.device, torch.long)
        # index_select rejects negative indices.
        indices = torch.where(indices < 0, indices + self.keys.shape[0], indices)
        self.keys, self.values = (x.index_select(0, indices) for x in (self.keys, self.values))
        self._norms_by_block = self._norms_by_block.index_select(0, indices)
        if self.log_gates is not None:
            self.log_gates = self.log_gates.index_select(0, indices)
        if self.lengths is not None:
            self._hold(self._held()[indices.cpu().numpy()])


def _guarded(result: Tensor, key: Tensor) -> Tensor:
    """Return the result with a hook that raises in the backward pass if the cache's keys have changed since."""
    if not result.requires_grad or torch.compiler.is_compiling() or in_transform():  # no hooks there
        return result
    # In-place writes increase the version counter of a tensor.
    before = version(key)

    def check(gradient: Tensor) -> None:
        if version(key) != before:
            raise RuntimeError(
                "a backward pass through a cache must come before further tokens are appended to it, which changes in "
                "place what the pass needs; decode under torch.no_grad(), and train on whole sequences, without a cache"
            )

    result.register_hook(check)
    return result


def _check_appended(key: Tensor, value: Tensor, like: Tensor) -> None:
    """Check that new keys and values have the shape (except the length), dtype and device of the cache."""
    batch_size, num_kv_heads, _, head_dim = like.shape
    if type(key) is type(value) is Tensor and key.shape == value.shape and key.ndim == 4:
        fits = key.dtype == value.dtype == like.dtype and key.device == value.device == like.device
        if fits and (*key.shape[:2], key.shape[3]) == (batch_size, num_kv_heads, head_dim):
            return  # skip the checks below: they take as long as a decoding step
    if isinstance(key, Tensor) and key.dtype != like.dtype and key.dtype == autocast_dtype(like.device.type):
        raise ValueError(
            f"cache must be made under the autocast that it is used in, where make_cache gives it {key.dtype}, got one "
            f"of {like.dtype}"
        )
    check_new_tokens(xp, key, value, (batch_size, num_kv_heads, head_dim, head_dim), like.dtype)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != like.device:
            raise ValueError(f"{name} must be on {like.device} as the cache is, got {tensor.device}")
