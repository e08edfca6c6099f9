"""Stands in for SGLang's package of CUDA and AMX kernels: every operation says no if it is called.

SGLang imports many of them on a CPU too, and on the paths that these tests take calls none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.10"


def _missing(name: str) -> Callable[..., NoReturn]:
    def operation(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return operation


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
