"""Methods by name: `make_method("fesem", **{"clusters": 3, "local-steps": 20})`, with settings as users type them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import cleandoc
from typing import Any, cast

from coordinator.strategies.additive.cam import CAM, CAMWeCFL
from coordinator.strategies.additive.femam import FeMAM
from coordinator.strategies.base import Strategy
from coordinator.strategies.baselines.ditto import Ditto
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.baselines.fedavg_late import FedAvgLate
from coordinator.strategies.baselines.fedavg_plus import FedAvgPlus, FedProxPlus
from coordinator.strategies.baselines.feddane import FedDANE
from coordinator.strategies.baselines.feddist import FedDist, FedDWS
from coordinator.strategies.baselines.fedprox import FedProx
from coordinator.strategies.baselines.fedsgd import FedSGD
from coordinator.strategies.baselines.nonfed import NonFed
from coordinator.strategies.baselines.pfedme import PFedMe
from coordinator.strategies.clove import CLoVE
from coordinator.strategies.common.method_value import forgotten_decorator
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.common.setting_checks import KINDS
from coordinator.strategies.documentation import method_doc, settings_doc
from coordinator.strategies.fedem import FedEM, FedRC
from coordinator.strategies.fedsoft import FedSoft
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.fesem_ma import FeSEMMA
from coordinator.strategies.held_out.fedcenters import FedCenters
from coordinator.strategies.ifca import IFCA, HypCluster
from coordinator.strategies.robust_tkm import TKM
from coordinator.strategies.similarity.cfl import CFL
from coordinator.strategies.similarity.fedgroup import FedGroup
from coordinator.strategies.similarity.flhc import FLHC
from coordinator.strategies.wecfl import WeCFL
from edge_client.errors import ConfigError, UsageError
from export.plugins import find_by_name, nearest_name_hint

METHODS: dict[str, type[Any]] = {
    "cam": CAM,
    "cam-wecfl": CAMWeCFL,
    "cfl": CFL,
    "clove": CLoVE,
    "ditto": Ditto,
    "fedavg": FedAvg,
    "fedavg-late": FedAvgLate,
    "fedavg-plus": FedAvgPlus,
    "fedcenters": FedCenters,
    "feddane": FedDANE,
    "feddist": FedDist,
    "feddws": FedDWS,
    "fedem": FedEM,
    "fedgroup": FedGroup,
    "fedrc": FedRC,
    "fedprox": FedProx,
    "fedprox-plus": FedProxPlus,
    "fedsgd": FedSGD,
    "femam": FeMAM,
    "fesem": FeSEM,
    "fesem-ma": FeSEMMA,
    "flhc": FLHC,
    "fedsoft": FedSoft,
    "hypcluster": HypCluster,
    "ifca": IFCA,
    "nonfed": NonFed,
    "pfedme": PFedMe,
    "tkm": TKM,
    "wecfl": WeCFL,
}
for _name, _kind in METHODS.items():
    _kind.__doc__ = method_doc(_name, _kind)
ServerOptions.__doc__ = f"{cleandoc(ServerOptions.__doc__ or '')}\n\n{settings_doc(ServerOptions)}\n"
METHOD_PARTS = ("begin", "round", "predictor")
Setting = int | float | str
_TYPES: dict[str, Callable[[Setting], Setting]] = {"int": int, "float": float, "str": str}


class UnknownSetting(ConfigError):
    """A setting that the method does not have; `key` is its name."""

    def __init__(self, method: str, key: str, hint: str) -> None:
        super().__init__(f"{method} has no setting {key!r}", hint=hint)
        self.key = key


def make_method(name: str, **settings: Setting) -> Strategy:
    """The method `name` with `settings` in kebab-case; texts are read as the setting's own type.

    A method that is not built in is named by its import path, or by the name it is registered under
    (export/plugins.py). Raises UsageError for an unknown method, ConfigError for an unknown setting or a value that
    does not fit.

    >>> method = make_method("fesem", **{"clusters": 4, "local-steps": "10", "reduce": "median"})
    >>> method_name(method), method_settings(method)["reduce"]
    ('fesem', 'median')
    """
    method = find_by_name("methods", name, METHODS)
    if not isinstance(method, type) or not is_dataclass(method):
        raise UsageError(f"{name} is no method", hint="a method is a frozen dataclass with begin, round and predictor")
    if lacking := [part for part in METHOD_PARTS if not callable(getattr(method, part, None))]:
        hint = "a method has begin, round and predictor; extend fc.LocalSgd, or one of ours, and write `round`"
        raise UsageError(f"{name} is no method: it has no {' and no '.join(lacking)}", hint=hint)
    types, values = setting_types(method), dict[str, Any]()
    for key, value in settings.items():
        if key not in types:
            raise UnknownSetting(name, key, forgotten_decorator(method) or nearest_name_hint(key, types))
        values[key.replace("-", "_")] = _read(key, value, types[key])
    for group, default in _groups(method).items():
        given = {f.name: values.pop(f.name) for f in fields(default) if f.name in values}
        values[group] = replace(default, **given)
    return cast("Strategy", method(**values))


def method_name(strategy: Strategy) -> str:
    """The method's name in METHODS; for another class its own name in lower case."""
    return next((name for name, kind in METHODS.items() if kind is type(strategy)), type(strategy).__name__.lower())


def method_path(strategy: Strategy) -> str:
    """The name by which `make_method` finds the class: of METHODS, or its import path."""
    kind = type(strategy)
    known = next((name for name, ours in METHODS.items() if ours is kind), None)
    return known or f"{kind.__module__}:{kind.__qualname__}"


def summed_members(method: str) -> int:
    """Of how many models the method serves the sum; 1 for a class that cannot be imported here."""
    try:
        return int(getattr(find_by_name("methods", method, METHODS), "members", 1))
    except UsageError:
        return 1


def method_settings(strategy: Any) -> dict[str, Setting]:  # noqa: ANN401 - any dataclass of settings
    """Every setting of a method in kebab-case, defaults included, for the record of a run.

    >>> method_settings(make_method("fedsgd"))
    {'learning-rate': 0.1, 'batch-size': 16, 'fraction-train': 1.0}
    """
    groups = [getattr(strategy, group) for group in _groups(strategy)]
    owner = {name: group for group in groups for name in setting_types(group)}
    return {name: _kept(getattr(owner.get(name, strategy), name.replace("-", "_"))) for name in setting_types(strategy)}


def batch_size(strategy: Strategy) -> int:
    """How many samples a device reads in a step of training, and at a time where it evaluates.

    Raises UsageError for a method that has no such setting.
    """
    settings = method_settings(strategy)
    if "batch-size" not in settings:
        hint = "extend fc.LocalSgd, which has it, or give the method a field, batch_size: int = 16"
        raise UsageError(f"{method_name(strategy)} has no setting batch-size", hint=hint)
    return int(settings["batch-size"])


def kept_settings(method: str, strategy: Any) -> dict[str, Setting]:  # noqa: ANN401 - any dataclass of settings
    """The settings of `strategy`, named `method`, as a file has them: one that is None has no value there.

    Raises UsageError for one that a file cannot hold, as None where it is not the default.
    """
    settings, defaults = method_settings(strategy), _defaults(strategy)
    if lost := [key for key, value in settings.items() if value is None and defaults[key] is not None]:
        told = f"{lost[0]} of {method} is None, which the file of a run cannot hold: it would be its default there"
        raise UsageError(told, hint="give a value that stands for it, or make None the default")
    if wrong := [key for key, value in settings.items() if value is not None and not _fits_file(value)]:
        hint = "a setting is a number, a text, True or False, or a list of these: name what it stands for by a text"
        if hasattr(settings[wrong[0]], "tolist"):
            hint = "give a list in its place, array.tolist()"
        told = f"{wrong[0]} of {method} is {settings[wrong[0]]!r:.80}, which the file of a run cannot hold"
        raise UsageError(told, hint=hint)
    return {key: value for key, value in settings.items() if value is not None}


def _fits_file(value: object) -> bool:
    """Whether TOML and JSON have such a value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _fits_file(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_fits_file, value))
    return isinstance(value, (bool, int, float, str))


def _kept(value: Any) -> Any:  # noqa: ANN401 - a setting
    """A setting as the file of a run has it, where a tuple is a list."""
    return [*map(_kept, value)] if isinstance(value, (list, tuple)) else value


def setting_types(method: Any) -> dict[str, str]:  # noqa: ANN401 - a dataclass or an object of one
    """The settings that a user may give, in kebab-case, with their types "int", "float", "str" or "bool"."""
    found, groups = dict[str, str](), _groups(method)
    for f in fields(method):
        if f.name in groups:
            found |= setting_types(groups[f.name])
        elif f.metadata.get("setting", True):
            found[f.name.replace("_", "-")] = f.type.__name__ if isinstance(f.type, type) else str(f.type)
    return found


def _defaults(method: Any) -> dict[str, Any]:  # noqa: ANN401
    """The default of each setting; `dataclasses.MISSING` where it has none, or makes one each time."""
    found = {f.name.replace("_", "-"): f.default for f in fields(method)}
    for group in _groups(method).values():
        found |= {key: getattr(group, key.replace("-", "_")) for key in setting_types(group)}
    return found


def _groups(method: Any) -> dict[str, Any]:  # noqa: ANN401
    """The fields that stand for several settings, such as `server`, with their defaults, which are dataclasses."""
    return {f.name: f.default for f in fields(method) if is_dataclass(f.default)}


def _read(key: str, value: Any, kind: str) -> Any:  # noqa: ANN401 - a Setting, or of a user's own type
    """The value in the setting's own type; a text is parsed, a number never becomes a text, and no digit is dropped.

    A setting of a user's method may be of another type than those four: a list is then read as one, or as a tuple.
    """
    if kind.endswith(" | None") and value is None:
        return None
    kind = kind.removesuffix(" | None")
    if kind not in KINDS:
        return _read_other(key, value, kind)
    wrong = ConfigError(f"{key} is {value!r}", hint=f"use {KINDS[kind][1]}")
    if kind == "bool":
        if value not in ("true", "false") and not isinstance(value, bool):
            raise wrong
        return value in (True, "true")
    try:
        read: Setting = _TYPES[kind](value)
    except (ValueError, OverflowError, TypeError):
        raise wrong from None
    if isinstance(value, bool) or (not isinstance(value, str) and read != value):
        raise wrong
    return read


def _read_other(key: str, value: Any, kind: str) -> Any:  # noqa: ANN401 - of a type that only the user's method knows
    if kind.startswith(("tuple", "list")) and not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key} is {value!r}", hint=f"write a list, in a file: {key} = [...]")
    return tuple(value) if kind.startswith("tuple") else value
