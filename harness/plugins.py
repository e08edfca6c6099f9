"""Building what the configuration names: Hydra's `_target_`, with errors a person can act on."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness.errors import ConfigError, HarnessError, InstallError


def build(config: DictConfig, where: str, *, without: Iterable[str] = (), **more: Any) -> Any:
    """What stands at `where` in the whole configuration, less the keys `without`, and `more`.

    Raises `ConfigError` for a setting that is missing, unknown or refused, `InstallError` where
    the target's package is not the one that was meant, and the target's own `HarnessError`.

    Built from a copy of it all: Hydra resolves what an interpolation points at where it stands,
    and in the original that would put what the environment says, secrets too, into the
    configuration that is written down.
    """
    try:
        part = OmegaConf.select(copy.deepcopy(config), where)
        if not isinstance(part, DictConfig):
            raise ConfigError(f"{where} is {part!r}: it must name a _target_")
        with open_dict(part):
            for key in without:
                part.pop(key, None)
            part.update(more)
        for key in sorted(OmegaConf.missing_keys(part)):
            raise ConfigError(f"{key} has no value: add {key}=...")
        return instantiate(part, _convert_="all")
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {error}") from error
    except InstantiationException as error:
        raise _explain(error, OmegaConf.select(config, f"{where}._target_"), where) from error


def apply(made: Callable[..., Any], argument: Any, where: str) -> Any:
    """`made(argument)`, where `made` was built with settings that only now meet their function."""
    try:
        return made(argument)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _explain(error: InstantiationException, target: Any, where: str) -> HarnessError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HarnessError):
            return cause
        if isinstance(cause, OmegaConfBaseException | TypeError):
            return ConfigError(f"{where}: {cause}")
        cause = cause.__cause__
    package = str(target).split(".", maxsplit=1)[0]
    owners = importlib.metadata.packages_distributions().get(package, [])
    if len(set(owners)) > 1:
        return InstallError(
            f"{where}: {target} cannot be found, and two installed packages own '{package}': "
            f"{', '.join(sorted(set(owners)))}. Install relaybench in an environment of its own"
        )
    return ConfigError(f"{where}: {error}")
