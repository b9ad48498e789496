"""Checks the settings: the configuration file, HETERO_EE_ variables, and those of huggingface_hub."""

import difflib
from pathlib import Path

from hetero_ee.config.settings import Settings
from hetero_ee.config.toml_file import CONFIG_VARIABLE, is_in_sight
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import SETTINGS
from hetero_ee.options.option import ENVIRONMENT_PREFIX
from hetero_ee_cli.checks.finding import Finding, fail, ok, warn

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def configuration(settings: Settings, problem: UsageError | None) -> Finding:
    """Check the configuration file. `problem` is the reason why it can't be used, or None."""
    try:
        if problem:
            raise problem
        resolved = [settings.resolve(name) for name in SETTINGS]
    except UsageError as error:
        return fail(str(error), "Correct it; no other command runs until then.")
    if settings.file is None:
        return ok(f"no file, since there is no home folder; {CONFIG_VARIABLE} may name one")
    n_set = sum(found.setting.setting in settings.in_file for found in resolved)
    there = f"{n_set} {'setting' if n_set == 1 else 'settings'}" if is_in_sight(settings.file) else "no such file"
    return ok(f"{settings.file}: {there}")


def variables(settings: Settings) -> Finding:
    known = [CONFIG_VARIABLE, *(setting.variable for setting in SETTINGS.values())]
    unknown = settings.unknown_variables()
    if unknown:
        names = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in known}
        near = difflib.get_close_matches(unknown[0].removeprefix(ENVIRONMENT_PREFIX), names, n=1)
        advice = f"Did you mean {names[near[0]]}?" if near else f"Known are {', '.join(known)}."
        return warn(f"unknown: {', '.join(unknown)}", advice)
    given = [name for name in known if settings.environment.get(name)]
    return ok(f"set: {', '.join(given)}" if given else "no HETERO_EE_ variable is set")


def hugging_face(settings: Settings) -> Finding:
    """Report whether a token exists, without reading it, and whether downloads are allowed."""
    from huggingface_hub import constants

    has_token = any(settings.environment.get(name) for name in TOKEN_VARIABLES)
    has_token = has_token or Path(constants.HF_TOKEN_PATH).is_file()
    offline = constants.HF_HUB_OFFLINE or settings.value("offline")
    network = "offline: nothing is downloaded" if offline else "downloads allowed"
    return ok(f"{'a' if has_token else 'no'} token, {network}, cache {constants.HF_HUB_CACHE}")
