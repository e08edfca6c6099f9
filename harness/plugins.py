"""Building what the configuration names: Hydra's `_target_`, with errors a person can act on."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from harness.errors import ConfigError, HarnessError, InstallError


def build(config: DictConfig, where: str) -> Any:
    """What `config` describes; `where` is its place in the configuration, for messages.

    Raises `ConfigError` for a setting that is missing, unknown or refused, `InstallError` where
    the target's package is not the one that was meant, and the target's own `HarnessError`.
    """
    try:
        return instantiate(config, _convert_="all")
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: add {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {error}") from error
    except InstantiationException as error:
        raise _explain(error, config, where) from error


def _explain(error: InstantiationException, config: DictConfig, where: str) -> HarnessError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HarnessError):
            return cause
        if isinstance(cause, OmegaConfBaseException | TypeError):
            return ConfigError(f"{where}: {cause}")
        cause = cause.__cause__
    target = str(OmegaConf.select(config, "_target_") or "")
    package = target.split(".", maxsplit=1)[0]
    owners = importlib.metadata.packages_distributions().get(package, [])
    if len(set(owners)) > 1:
        return InstallError(
            f"{where}: {target} cannot be found, and two installed packages own '{package}': "
            f"{', '.join(sorted(set(owners)))}. Install relaybench in an environment of its own"
        )
    return ConfigError(f"{where}: {error}")
