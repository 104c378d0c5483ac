"""The model that a transformers config describes, without weights. A config is data: no code of its author runs.

A config comes with a checkpoint, so it is not trusted. Keys that name code or a place on a hub are removed, the class
is one that transformers itself lists for the model type, numbers have a limit, and so has the number of modules.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from rekindle.extras import install
from rekindle.spelling import advice

# Far more than any published model has (the largest has a few thousand), and built in seconds.
MOST_MODULES = 20_000
MODULES_PER_TENSOR = 20
LARGEST_COUNT = 100_000  # the largest default of a family in transformers 5.22 is 16,384 (experts of doge)
LARGEST_SIZE = 1 << 40
MOST_LEVELS = 32
# Names of code to import, of kernels and weights to download, and of the place where they are.
_CODE = re.compile(r"auto_map|_?name_or_path|\w*_implementation\w*|quantization_config|use_pretrained_backbone")
_CODE_TOO = re.compile(r"trust_remote_code|custom_\w+|use_kernels|kernel_config|_commit_hash|code_revision|\w*_file")
# A number under any other name may be how often something is made.
_SIZE = re.compile(
    r"vocab|position|len|theta|base|(^|_)ids?($|_)|window|token|size|dim|seed|sampl|inner|rate|ctx|ffn|seq"
    r"|label|class|bucket|hash|max_|channel|feature|width|height|pixel"
)


class ConfigError(ValueError):
    """A config that is no description of a model, or of one that is out of proportion."""


def meta_model(config: Any, tensors: int = 0) -> nn.Module:
    """The model that a transformers config describes, on the meta device: shapes and classes, no weights.

    Args:
        config: a config object, its dict, or the path of a config.json or of the folder that holds it.
        tensors: how many tensors the checkpoint has; a model of many more modules is refused.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"reading a config needs transformers: {install('transformers')}") from error
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    # What transformers prints would end up in the middle of a command's JSON.
    with redirect_stdout(sys.stderr), _at_most(max(MOST_MODULES, MODULES_PER_TENSOR * tensors)), torch.device("meta"):
        if isinstance(config, Mapping):
            fields = data_only(config)
            kind = fields.pop("model_type", None)
            if kind is None:
                how = advice("meta model", "pass the model on the meta device as config= instead")
                raise ConfigError(f"the config has no model_type; {how}")
            if kind not in transformers.CONFIG_MAPPING:
                raise ConfigError(f"transformers has no model_type {kind!r:.100}")
            config = transformers.AutoConfig.for_model(kind, **fields)
        named = (getattr(config, "architectures", None) or [None])[0]
        if isinstance(named, str) and named in _listed(str(config.model_type)):
            model: nn.Module = getattr(transformers, named)(config)
        else:
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    return model


def data_only(config: Mapping[str, Any], level: int = 0) -> dict[str, Any]:
    """A config without the keys that name code or downloads; numbers out of proportion are a `ConfigError`.

    >>> data_only({"model_type": "bert", "auto_map": {"AutoModel": "evil.Evil"}, "num_hidden_layers": 2})
    {'model_type': 'bert', 'num_hidden_layers': 2}
    >>> data_only({"text_config": {"num_hidden_layers": 10**9}})
    Traceback (most recent call last):
    rekindle.blocks.configs.ConfigError: num_hidden_layers=1000000000 is out of proportion (at most 100000)
    """
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r:.100} of the config is not a text")
        if not (_CODE.fullmatch(key) or _CODE_TOO.fullmatch(key)):
            kept[key] = _plain(key, value, level)
    return kept


def _plain(key: str, value: object, level: int) -> object:
    if level > MOST_LEVELS:
        raise ConfigError("the config is nested too deeply")
    if key in ("id2label", "label2id"):
        return value
    if isinstance(value, Mapping):
        return data_only(value, level + 1)
    if isinstance(value, list | tuple):
        if len(value) > LARGEST_COUNT and not _SIZE.search(key):
            raise ConfigError(f"{key} has {len(value)} entries, which is out of proportion")
        return [_plain(key, item, level + 1) for item in value]
    largest = LARGEST_SIZE if _SIZE.search(key) else LARGEST_COUNT
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > largest:
        raise ConfigError(f"{key}={value!r:.40} is out of proportion (at most {largest})")
    if key == "backbone" and isinstance(value, str) and set(value) & {"/", ":", "\\"}:
        raise ConfigError(f"backbone={value!r:.100} would be downloaded: refused")
    return value


def _listed(kind: str) -> set[str]:
    """The classes that transformers lists for a model type: no other attribute of it is ever called."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for title, table in vars(modeling_auto).items():
        if title.endswith("_MAPPING_NAMES") and isinstance(table, Mapping) and kind in table:
            listed = table[kind]
            names |= {listed} if isinstance(listed, str) else set(listed)
    return names


@contextmanager
def _at_most(limit: int) -> Iterator[None]:
    """Stop building a model that has more modules than this."""
    count, thread = 0, threading.get_ident()

    def one_more(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > limit:
                raise ConfigError(f"the config describes a model of more than {limit} modules: out of proportion")

    hook = register_module_module_registration_hook(one_more)
    try:
        yield
    finally:
        hook.remove()


def _special_float(fields: dict[str, Any]) -> object:
    """transformers writes infinities and NaN as {"__float__": "Infinity"}."""
    return float(fields["__float__"]) if set(fields) == {"__float__"} else fields
