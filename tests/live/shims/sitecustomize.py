"""Lets vLLM and SGLang run beside a CPU build of torch and on few cores, their files unchanged.

Python imports this first in each of their processes (`stack.py` puts this folder on PYTHONPATH).
Three modules are met half-way when they are imported:

- torchvision's wheel is built for CUDA and cannot register its operators beside a CPU torch, yet
  declares what they return: the two operators it speaks of are declared here.
- SGLang's Mooncake sender copies page numbers through pinned memory and CUDA events unless it is
  told that it cannot; then it takes SGLang's own synchronous way.
- NIXL's progress thread asks for work without a pause: P's and D's keep a core busy each while
  there is nothing to do. Here it pauses for about a millisecond.
"""
# ruff: noqa: INP001 - no package: the folder itself is on the path

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PAUSE_US = 1000


def _torch() -> Any:
    return importlib.import_module("torch")


def _declare_operators() -> Any:
    """The library that declared them, with which torch would forget them."""
    library = _torch().library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _send_synchronously(sender: Any) -> None:
    if not _torch().cuda.is_available():
        sender.MooncakeKVSender.supports_host_tensor_indices = False


def _pause(bindings: Any) -> None:
    class PausingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
        """NIXL's own, whatever pause it is told to take."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = PausingConfig


_AFTER: dict[str, Callable[[Any], None]] = {
    "sglang.srt.disaggregation.mooncake.conn": _send_synchronously,
    "nixl_cu13._bindings": _pause,
}


class _HalfWay:
    """A finder that finds nothing itself, but sees each module before it is imported."""

    def __init__(self) -> None:
        self._operators: Any = None
        self._looking_for: set[str] = set()

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self._operators is None:
            self._operators = _declare_operators()
        if name not in _AFTER or name in self._looking_for:
            return None
        self._looking_for.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking_for.remove(name)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, _AFTER[name])
        return spec


def _run_after(loader: Any, step: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def execute_and_step(module: Any) -> None:
        execute(module)
        step(module)

    loader.exec_module = execute_and_step


sys.meta_path.insert(0, _HalfWay())
