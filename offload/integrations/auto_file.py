"""A DeepSpeed file beside `--auto`: the script has a training loop of its own.

scheduler             left out: the script's alone sets the rates
gradient_clipping     the file's own value; its default clips nothing here
the rest              as it is
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.deepspeed_config.recipe import CLIPPING, Recipe, recipe_of


def without_schedule(source: Any) -> Recipe | None:
    """What `source`, a file or None, asks of an engine under a script that steps by itself.

    What is left out is among the notes, which the engine logs.  Raises ConfigError.
    """
    if source is None:
        return None
    recipe = recipe_of(source)
    notes, settings = dict(recipe.notes), dict(recipe.settings)
    if CLIPPING in notes:  # the file does not give it
        settings[CLIPPING] = 0.0
        notes[CLIPPING] = f"{CLIPPING} is not given: --auto clips what the script clips"
    if recipe.scheduler is not None:
        notes["scheduler"] = "the scheduler is left out: --auto leaves rates to the script"
    return replace(recipe, scheduler=None, settings=settings, notes=notes)
