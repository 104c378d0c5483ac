"""What there is to choose from: settings, arms, groups and data sets; and changing a field of a setting by text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rekindle.lab.settings import Setting


def catalogue() -> dict[str, Any]:
    """Everything by name, ready for JSON."""
    from rekindle.lab.arms import ARMS, GROUPS
    from rekindle.lab.data import where
    from rekindle.lab.settings import SETTINGS

    return {
        "settings": {
            name: {
                "about": setting.about,
                "stream": setting.stream,
                "network": setting.network,
                "optimizer": setting.optimizer,
                "lr": setting.lr,
                "headline": setting.headline,
            }
            for name, setting in SETTINGS.items()
        },
        "arms": {
            name: {
                "method": arm.method,
                "options": {**arm.options, **({"optimizer": arm.optimizer} if arm.optimizer else {})},
                "about": arm.about,
            }
            for name, arm in ARMS.items()
        },
        "groups": {name: list(members) for name, members in GROUPS.items()},
        "data": where(),
    }


def listed(found: Mapping[str, Any], width: int) -> str:
    """The catalogue as text."""
    from rekindle.lab.results.wording import measure

    lines = ["Settings (rekindle lab run NAME)"]
    lines += _columns(
        [
            (name, f"{each['network']} on {each['stream']}, {measure(each['headline']).name}", each["about"])
            for name, each in found["settings"].items()
        ],
        width,
    )
    lines += ["", "Arms (--methods NAME,NAME)"]
    lines += _columns([(name, _method(each), each["about"]) for name, each in found["arms"].items()], width)
    lines += ["", "Groups (--methods GROUP)"]
    lines += _columns([(name, ", ".join(members), "") for name, members in found["groups"].items()], width)
    lines += ["", "Data"]
    lines += _columns([(name, path, "") for name, path in found["data"].items()], width)
    return "\n".join(lines)


def altered(setting: Setting, changes: Iterable[str]) -> Setting:
    """The setting with fields changed by text such as "lr=0.01" or "stream_options.tasks=5".

    >>> altered(Setting("a", "random-labels", "mlp"), ["lr=0.01", "stream_options.tasks=5"]).stream_options
    {'tasks': 5}
    """
    for change in changes:
        path, found, value = change.partition("=")
        name, _, key = path.strip().partition(".")
        if not found or name not in setting.to_dict() or name in ("name", "source"):
            known = [each for each in setting.to_dict() if each not in ("name", "source")]
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


def _value(words: str) -> Any:
    try:
        return json.loads(words)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(words, words)


def _method(arm: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in arm["options"].items())
    return f"{arm['method'] or ''}{f'({options})' if options else ''}"


def _columns(rows: list[tuple[str, str, str]], width: int) -> list[str]:
    if not rows:
        return ["  none"]
    first = max(len(row[0]) for row in rows) + 2
    second = max((len(row[1]) for row in rows if row[2]), default=0) + 2
    lines = []
    for name, what, about in rows:
        text = f"{what:<{second}}{about}".rstrip() if about else what
        lines += _wrapped(f"  {name:<{first}}", text, width)
    return lines


def _wrapped(head: str, text: str, width: int) -> list[str]:
    import textwrap

    # Paths and commands are copied from here: they are never broken in the middle.
    inside = textwrap.wrap(text, max(30, width - len(head)), break_long_words=False, break_on_hyphens=False) or [""]
    return [head + inside[0], *(" " * len(head) + line for line in inside[1:])]
