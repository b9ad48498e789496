"""`hetero-ee config show`: which value each setting has, and which source it comes from."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.options.common import Json, with_options
from hetero_ee_cli.options.engine import EngineOptions, ModelOption
from hetero_ee_cli.terminal.output import printable

if TYPE_CHECKING:
    from hetero_ee.config.settings import Resolved, Settings

JSON_SCHEMA = 1


@with_options(without=["revision"])
def show(engine: EngineOptions, model: ModelOption = None, as_json: Json = False) -> None:
    """Show every setting with its source, and where files are kept.

    An option overrides a HETERO_EE_ variable, which overrides the configuration file, which overrides the default. The
    options of the other commands given here show which value would apply.
    """
    from hetero_ee.config.settings import SETTINGS, read_settings

    flags = asdict(engine) | {"model": model}
    settings = read_settings()
    resolved = [settings.resolve(setting.name, flags.get(setting.name)) for setting in SETTINGS]
    places = _places(settings)
    print(json.dumps(_document(resolved, places)) if as_json else _table(resolved, settings, places))


def _places(settings: "Settings") -> dict[str, Path]:
    from huggingface_hub import constants

    from hetero_ee.config import cache_folder, data_folder
    from hetero_ee.runtime.kernel_cache import kernel_cache_folder

    cache = cache_folder(settings)
    return {
        "config_file": settings.file,
        "cache": cache,
        "stores": cache / "stores",
        "kernels": kernel_cache_folder(cache),
        "profiles": data_folder(settings) / "profiles",
        "hugging_face_cache": Path(constants.HF_HUB_CACHE),
    }


def _document(resolved: "list[Resolved]", places: dict[str, Path]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    return {
        "schema": JSON_SCHEMA,
        "settings": {found.setting.name: {"value": plain(found.value), "source": found.source} for found in resolved},
        "paths": {name: str(place) for name, place in places.items()},
    }


def _table(resolved: "list[Resolved]", settings: "Settings", places: dict[str, Path]) -> str:
    rows = [("setting", "value", "source")]
    rows += [(found.setting.name, _shown(found), found.source) for found in resolved]
    rows += [("", "", ""), ("path", "", "")]
    missing = "" if settings.file.exists() else "not there"
    rows += [(name, printable(str(place)), missing if name == "config_file" else "") for name, place in places.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}".rstrip() for name, value, source in rows)


def _shown(found: "Resolved") -> str:
    if isinstance(found.value, bool):
        return str(found.value).lower()
    return found.setting.default_text if found.value is None else printable(str(found.value))
