"""Calls in threads that share modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import alibi_torch


def check_threads(calls: list[Callable[[], Tensor]]) -> None:
    """Check that each call gives the bits that it gives alone, if another thread makes another call before any line.

    Each line of this library is interrupted once a call, so the result does not depend on chance.
    """
    expected = [call() for call in calls]
    folder = str(alibi_torch.__path__[0])
    with ThreadPoolExecutor(1) as thread:
        for index, call in enumerate(calls):
            other, seen = (index + 1) % len(calls), set()

            def trace(frame: Any, event: str, _: Any, other: int = other, seen: set[Any] = seen) -> Any:
                line = frame.f_code, frame.f_lineno
                if not frame.f_code.co_filename.startswith(folder) or frame.f_code.co_name == "count":  # it has a lock
                    return None
                if event == "line" and line not in seen:
                    seen.add(line)
                    assert torch.equal(thread.submit(calls[other]).result(), expected[other])
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                result = call()
            finally:
                sys.settrace(before)
            assert torch.equal(result, expected[index])
