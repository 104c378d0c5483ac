"""What there is to choose from: settings, arms, groups and data sets; and changing a field of a setting by text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rekindle.lab.arms import ARMS, GROUPS
from rekindle.lab.data import where
from rekindle.lab.results.wording import measure
from rekindle.lab.settings import SETTINGS, Setting

_SHOWN = ("about", "stream", "network", "optimizer", "lr", "headline")


def catalog() -> dict[str, Any]:
    """Everything by name, ready for JSON."""
    settings = {name: {field: getattr(setting, field) for field in _SHOWN} for name, setting in SETTINGS.items()}
    arms = {}
    for name, arm in ARMS.items():
        optimizer = {"optimizer": arm.optimizer} if arm.optimizer else {}
        arms[name] = {"method": arm.method, "options": {**arm.options, **optimizer}, "about": arm.about}
    groups = {name: list(members) for name, members in GROUPS.items()}
    return {"settings": settings, "arms": arms, "groups": groups, "data": where()}


def listed(found: Mapping[str, Any], width: int) -> str:
    """The catalog as text."""
    settings = [
        (name, f"{each['network']} on {each['stream']}, {measure(each['headline']).name}", each["about"])
        for name, each in found["settings"].items()
    ]
    parts = {
        "Settings (rekindle lab run NAME)": settings,
        "Arms (--methods NAME,NAME)": [(n, _method(each), each["about"]) for n, each in found["arms"].items()],
        "Groups (--methods GROUP)": [(name, ", ".join(members), "") for name, members in found["groups"].items()],
        "Data": [(name, path, "") for name, path in found["data"].items()],
    }
    return "\n\n".join("\n".join([title, *_columns(rows, width)]) for title, rows in parts.items())


def altered(setting: Setting, changes: Iterable[str]) -> Setting:
    """The setting with fields changed by text such as "lr=0.01" or "stream_options.tasks=5".

    >>> altered(Setting("a", "random-labels", "mlp"), ["lr=0.01", "stream_options.tasks=5"]).stream_options
    {'tasks': 5}
    """
    for change in changes:
        path, found, value = change.partition("=")
        name, _, key = path.strip().partition(".")
        known = [each for each in setting.to_dict() if each not in ("name", "source")]
        if not found or name not in known:
            raise ValueError(f"--set {change!r}: write FIELD=VALUE; the fields are {', '.join(known)}")
        old = getattr(setting, name)
        if bool(key) != isinstance(old, Mapping):
            raise ValueError(f"--set {change!r}: {name} {'holds no' if key else 'is a group of'} options")
        new = _value(value.strip())
        field: dict[str, Any] = {name: {**old, key: new} if key else new}
        try:
            setting = replace(setting, **field)
        except TypeError as error:
            raise ValueError(f"--set {change!r}: {error}") from error
    return setting


def _value(words: str) -> object:
    try:
        return json.loads(words)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(words, words)


def _method(arm: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in arm["options"].items())
    return f"{arm['method'] or ''}{f'({options})' if options else ''}"


def _columns(rows: list[tuple[str, str, str]], width: int) -> list[str]:
    first = max(len(row[0]) for row in rows) + 2
    second = max((len(row[1]) for row in rows if row[2]), default=0) + 2
    lines = []
    for name, what, about in rows:
        # Paths and commands are copied from here: they are never broken in the middle.
        text = f"{what:<{second}}{about}".rstrip() if about else what
        inside = textwrap.wrap(text, max(30, width - first - 2), break_long_words=False, break_on_hyphens=False)
        lines += [f"  {'' if at else name:<{first}}{line}".rstrip() for at, line in enumerate(inside or [""])]
    return lines
