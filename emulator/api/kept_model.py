"""The user's own module in a run's folder, so that `fc.load` needs no code of the user's.

model/model.json has name, shapes, loss (of the user's own: its name) and the tensors of a center in order;
model/model.pt2 is the module traced in inference mode, with its first weights, where it can be traced.
newcomers/guide.json is what the devices taught `Result.nearest` (protocol/nearest/router_file.py), where their samples
are the user's own, which no folder has.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from coordinator.models.registry import Model
from edge_client.errors import ConfigError, Malformed, ProgramRefused
from edge_client.protocol.nearest.router import NEED_LABELS, Router
from edge_client.protocol.nearest.router_file import read_router, write_router
from edge_client.protocol.samples.input_parts import InputPart
from edge_client.protocol.task import Schema, TensorSpec
from edge_client.transport.blobs import write_atomically
from emulator.config import GUIDE_FILE
from export.bundle.center_files import export_center
from export.compiler.adapters.frozen import travels
from export.compiler.forward_pass import tracing_context
from export.compiler.losses.sample_losses import loss_name
from export.compiler.program import schema_of
from export.compiler.signatures.module_copies import copied
from export.containers.write_pt2 import read_pt2
from export.diagnostics import quiet_warnings
from export.silence import suppress_output

log = logging.getLogger(__name__)
FACTS_FILE, GRAPH_FILE = "model/model.json", "model/model.pt2"


def keep_parts(
    folder: Path, *, named: bool, model: Model | None, schema: Schema, guide: Callable[[], Router | None]
) -> None:
    """Write what only this process has: the user's own module, and what devices teach newcomers.

    Those of a fleet that is `named` can be made again, and teach then.
    """
    for name in (FACTS_FILE, GRAPH_FILE):
        (folder / name).unlink(missing_ok=True)
    if model is not None:
        _keep_model(folder, model, schema)
    if not named and (taught := guide()) is not None:
        (folder / GUIDE_FILE).parent.mkdir(exist_ok=True)
        write_atomically(folder / GUIDE_FILE, write_router(taught))


def _keep_model(folder: Path, model: Model, schema: Schema) -> None:
    (folder / FACTS_FILE).parent.mkdir(exist_ok=True)
    facts = {
        "name": model.name,
        "input": model.input,
        "parts": [part.to_json() for part in model.parts],
        "classes": model.classes,
        "target": model.target,
        "loss": model.loss,
        "own_loss": None if model.own_loss is None else loss_name(model.own_loss),
        "own_targets": model.own_targets,
        "schema": [[t.name, t.role, list(t.shape)] for t in schema.tensors],
        "classifier": list(schema.classifier),
        "tied": _tied_places(model.module),
    }
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    try:
        with tracing_context():  # so that the graph can be compiled for any batch size, as the module can
            graph = export_center(copied(model.module).cpu().float(), model.input, "pt2")
    except ProgramRefused as wrong:
        log.warning("fc.load will need model=... for this run: %s", wrong.message)
    else:
        (folder / GRAPH_FILE).write_bytes(graph)


def read_facts(folder: Path) -> tuple[dict[str, Any], Schema, str | None] | None:
    """-> the fields of the `Model` without its module, its schema, and what the user's own loss is called.

    None where the run had no module of the user's.
    """
    path = folder / FACTS_FILE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        tensors = tuple(TensorSpec(name=n, role=r, shape=tuple(s)) for n, r, s in told.pop("schema"))
        schema = Schema(tensors, tuple(told.pop("classifier")))
        parts = tuple(InputPart.from_json(row) for row in told.get("parts", ()))
        own_loss, own_targets = told.pop("own_loss", None), told.get("own_targets")
        told.pop("tied", None)
        facts = {
            **told,
            "input": tuple(told["input"]),
            "target": tuple(told["target"]),
            "own_targets": None if own_targets is None else tuple(own_targets),
            "parts": parts,
        }
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(f"{path} cannot be read: {wrong}", hint="save the run again") from wrong
    return facts, schema, own_loss


def read_kept_model(folder: Path, facts: Mapping[str, Any], schema: Schema) -> Model | None:
    """The traced module, with the run's schema, which cannot be trained; None where none was kept."""
    path = folder / GRAPH_FILE
    if not path.is_file():
        return None
    tied = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8")).get("tied", {})
    try:
        graph = _read_graph(path.read_bytes(), str(path), schema, tied)
    except Exception as wrong:  # torch raises many kinds for a damaged archive
        told = wrong.message if isinstance(wrong, ProgramRefused) else f"{path} cannot be read: {wrong}"
        raise ConfigError(told, hint="give the module: fc.load(folder, model=...)") from wrong
    return Model(module=graph, **facts)


def _read_graph(
    archive: bytes,
    name: str,
    schema: Schema,
    tied: Mapping[str, str],
    values: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """The module of an archive, with its own values or with these; it can be copied and pickled."""
    with suppress_output():
        graph: nn.Module = read_pt2(archive, name).module(check_guards=False)
    for switch in ("train", "eval"):  # an exported graph refuses both; a flag that it ignores does no harm
        graph.__dict__.pop(switch, None)
    _restore_places(graph, schema, tied)
    if values is not None:
        graph.load_state_dict(values)
    _copy_and_pickle(type(graph), partial(_read_graph, archive, name, schema, tied))
    return graph


def _tied_places(module: nn.Module) -> dict[str, str]:
    """Each further name of a tensor in several places, or of a layer in several -> its first one."""
    first: dict[int, str] = {}
    members = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    known = {name: first.setdefault(id(value), name) for name, value in members}
    return {name: one for name, one in known.items() if name != one}


def _restore_places(graph: nn.Module, schema: Schema, tied: Mapping[str, str]) -> None:
    """What an archive loses: a tensor in several places is one, and a buffer beside the schema is not trained.

    Such a buffer, or plain tensor, becomes a frozen parameter, as a copy of a graph saves every buffer.
    """
    held = dict([*graph.named_parameters(), *graph.named_buffers()])
    for name in tied.keys() & held.keys():
        _put(graph, name, held[tied[name]])
    known = {tensor.name for tensor in schema.tensors} | tied.keys()
    nodes = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
    for name in sorted({str(node.target) for node in nodes if node.op == "get_attr"} - known):
        value = attrgetter(name)(graph)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if plain and value.is_floating_point() and travels(value):
            _put(graph, name, nn.Parameter(value, requires_grad=False))


def _put(graph: nn.Module, name: str, value: torch.Tensor) -> None:
    layer, _, own = name.rpartition(".")
    delattr(graph.get_submodule(layer), own)
    setattr(graph.get_submodule(layer), own, value)


def _copy_and_pickle(kind: Any, again: Callable[..., nn.Module]) -> None:  # noqa: ANN401 - torch makes a class of its own for each graph
    """Silence torch, which warns of its own internals when a graph is copied; pickle what it is read `again` from."""
    copied = kind.__deepcopy__

    def quiet_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with quiet_warnings():
            made: nn.Module = copied(self, memo)
        _copy_and_pickle(type(made), again)
        return made

    kind.__deepcopy__ = quiet_copy
    kind.__reduce__ = lambda self: (again, (self.state_dict(),))


def read_guide(folder: Path, *, traced: bool, own_loss: bool) -> Router | None:
    """What the devices taught.

    A traced module does not count batches, so that "norms" cannot be measured with it. `own_loss`: whether the loss of
    the user's own is here that the run had; without it another one would be compared with the devices' losses.
    """
    path = folder / GUIDE_FILE
    if not path.is_file():
        return None
    try:
        guide = read_router(path.read_bytes())
    except (OSError, Malformed) as wrong:
        raise ConfigError(f"{path} cannot be read: {wrong}", hint="save the run again") from wrong
    facts = read_facts(folder)
    if facts is not None and facts[2] is not None and not own_loss:
        guide = guide.without(NEED_LABELS)
    return guide.without({"norms"}) if traced else guide


def check_module(module: nn.Module, schema: Schema, kept: nn.Module | None) -> None:
    """Raise ConfigError for a module whose tensors are not those of the run, with the first that differs.

    `kept`: the run's own, which has the values of the frozen ones.
    """
    hint = "give the run's own module, or leave out model= where the folder has it"
    mine, theirs = ({t.name: t for t in each.tensors} for each in (schema_of(module), schema))
    for name, tensor in theirs.items():
        if name not in mine:
            raise ConfigError(f"this module has no {name!r} {list(tensor.shape)}, which that of the run has", hint=hint)
        if mine[name].shape != tensor.shape:
            told = f"{name!r} of this module is {list(mine[name].shape)}, that of the run {list(tensor.shape)}"
            raise ConfigError(told, hint=hint)
    if more := sorted(mine.keys() - theirs.keys()):
        raise ConfigError(f"this module has {more[0]!r}, which that of the run has not", hint=hint)
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    held = {} if kept is None else kept.state_dict()
    for name, value in frozen.items():
        if name in held and not torch.equal(held[name].cpu(), value.detach().cpu().to(held[name].dtype)):
            raise ConfigError(f"the frozen {name!r} of this module has other values than that of the run", hint=hint)
