"""Command-line arguments of a DeepSpeed script, and what of its set-up has no effect here."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from offload.errors import ConfigError

_LOG = logging.getLogger(__name__)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config and their older names; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration, read by offload.initialize")
    for name, shown in (("deepspeed", True), ("deepscale", False)):
        group.add_argument(
            f"--{name}", action="store_true", default=False,
            help="The script's own switch; nothing here reads it." if shown else argparse.SUPPRESS,
        )  # fmt: skip
        group.add_argument(
            f"--{name}_config", type=str, default=None, metavar="FILE",
            help="DeepSpeed configuration file." if shown else argparse.SUPPRESS,
        )  # fmt: skip
    return parser


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Do nothing but say so: one process exchanges nothing.  Raises ConfigError for several."""
    check_alone()
    _LOG.info("init_distributed: one process, nothing to set up.")


def check_alone() -> None:
    """Raise ConfigError where a launcher has started several processes."""
    found = os.environ.get("WORLD_SIZE", "1")
    if found != "1":
        raise ConfigError(
            f"WORLD_SIZE: expected 1 process, got {found}. Start the script once, without a"
            " launcher: there is no data parallelism yet."
        )


def config_of(args: Any, config: Any, config_params: Any) -> Any:
    """The configuration that is meant: an argument, or a file that `args` names; None: neither.

    Raises ConfigError where there are two.
    """
    named = {
        name: getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")
    } | {"config": config, "config_params": config_params}
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(
            f"initialize: expected one configuration, got {' and '.join(given)}. Pass one of them."
        )
    return next(iter(given.values()), None)
