"""What a golden set says about itself."""

from __future__ import annotations

FORMAT = """\
# Golden vectors for ALiBi

This directory holds problems of ALiBi (Attention with Linear Biases), their exact results, and how far a computation
in float64, float32, float16 or bfloat16 may be off. A program in any language is tested by computing the results and
comparing. All files have the same bytes on every machine.

## Files

- `index.json`: everything below, for machines. `format` is "alibi-golden", `version` a whole number that changes
  whenever any number does, `files` lists the name, size in bytes and SHA-256 of every other file, `cases` the cases.
- `slopes.safetensors`, `bias.safetensors`, `attention.safetensors`, `decode.safetensors`: the tensors. A safetensors
  file is an unsigned 64-bit little-endian length, a JSON object of that length, and data. The object says of every
  tensor its `dtype` (F64, F32; I32 for offsets and segment ids; BOOL, a byte each, for masks), `shape` and
  `data_offsets`, counted from the first byte of data. Numbers are little-endian; those along the last axis are
  neighbours.
- `FORMAT.md`: this text, which is also `about` in `index.json`, line by line.

## A case

- `id`: "KIND/NAME", where KIND is one of slopes, bias, attention, decode. `description`: what it is, in words.
- `features`: what a program must offer to be held to it, beyond causal rows of as many queries as keys: lengths
  (q_len other than kv_len), offset (q_offset other than kv_len - q_len), batch_offsets (q_offset as an array), far
  (positions a million tokens away), symmetric (is_causal false), asymmetric (future_slopes), grouped (fewer key/value
  heads than query heads), window, segments, mask, batch_slopes (slopes [batch, num_heads]), scale (other than
  the default), nowhere (queries that may look at no key), empty (no queries or no keys).
- `default_slopes`: true if the slopes are those that so many heads have by default (for a bias of a contract: those
  of the contract), so that a program that takes no slopes can be held to it.
- `arguments`: numbers and booleans; null for none. `file`: where its tensors are.
- `inputs`: by argument, the name, dtype and shape of a tensor. Floating inputs are float32, with values that float16
  and bfloat16 hold exactly; slopes and future_slopes may need float32 and are to be used in float32 or better.
- `expected`: by result, the name and shape of a float64 tensor, and `budgets`: by dtype of the computation, the name of
  a tensor of the same shape, or two numbers.

A result passes if every element is finite and `|result - expected| <= budget`. Where a budget is two numbers, it is
`relative * |expected| + absolute`. Where -inf is expected, -inf passes, and so does any number not above -30000.

## What is computed

Position of query i: `q_offset + i`; of key j: `j`. `ahead = j - (q_offset + i)`. Query head h reads key/value head
`h / (num_heads / num_kv_heads)`, rounded down. Shapes: query, grad_output and output [batch, num_heads, q_len,
head_dim]; key and value [batch, num_kv_heads, kv_len, head_dim]; slopes and future_slopes [num_heads] or [batch,
num_heads]; q_offset [batch]; q_segment_ids [batch, q_len]; kv_segment_ids [batch, kv_len]; mask broadcasts to [batch,
num_heads, q_len, kv_len].

- A query sees a key if all of these hold: `ahead <= 0` or is_causal is false; `|ahead| <= window_size` or there is
  none; the segment ids are equal or there are none; the mask is true or there is none.
- `bias = -slope * |ahead|` if it sees it, else -inf. If there are future_slopes, these count where `ahead > 0`.
  Shape [batch, num_heads, q_len, kv_len].
- `output = softmax(scale * query . key + bias) . value`. A query that sees no key gives zeros.
- `gradient/NAME` is the gradient of `sum(output * grad_output)` by the input NAME, of its shape.
- kind slopes: element h of n heads is, with p the largest power of two not above n: scheme canonical,
  `2^(-8 (h + 1) / p)` for h < p, then `2^(-8 (2 (h - p) + 1) / (2 p))`; scheme geometric (the contract geometric, too),
  `2^(-8 (h + 1) / n)`; scheme linear, n evenly spaced numbers from 0.05 to 0.5 (0.05 for n = 1). Contracts bloom,
  falcon and mpt are those of trained models, each step rounded to float32. bloom: the powers 1, 2, ... of
  `2^(-8 / p)`, then the odd powers of `2^(-8 / (2 p))`. falcon: these, rounded to bfloat16. mpt: with m the smallest
  power of two not below n, `1 / 2^(8 (h + 1) / m)`, those with odd h first unless n = m, and of these the first n.
- kind bias of a contract, where a query sees a key: bloom, `slope * j` in float32; falcon, `slope * j` with j and the
  product rounded to bfloat16; mpt, `slope * (j - (kv_len - 1))` in float32.
- kind decode: `steps` are numbers of tokens. At each step so many tokens' queries, keys and values are given, and all
  keys and values before them are in the cache. The result is the outputs of all steps, joined along q_len: causal
  attention.

## Results

A program writes a directory with `results.json` and safetensors files beside it. Tensors have the names and shapes of
the expected ones, and any of the dtypes F64, F32, F16, BF16. What a program does not offer it leaves out.

    {"format": "alibi-golden-results", "version": 1, "golden_version": 1, "program": "its name", "dtype": "float32",
     "files": ["results.safetensors"], "failures": {"attention/window": "what went wrong"}}

`dtype` says whose budgets count: float64, float32, float16 or bfloat16. `failures`, which may be left out, has the
cases that the program offers but could not compute. `alibi_core.conformance.check_golden` compares.

## Where the budgets come from

From the standard model of rounding, for scores and sums in float32 (float64 for float64) and tensors in the dtype. The
bias may be counted from any token of the row, except where positions are far: there only from near the query's keys.
Where sums are float16's or bfloat16's own, results miss these budgets.
"""
