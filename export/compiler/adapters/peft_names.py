"""The adapter of a peft model: its settings, and what peft calls its tensors, so that a bundle can be loaded by peft.

peft is not imported: a model of its classes has imported it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn

from edge_client.protocol.program import Adapter
from edge_client.protocol.task import Schema


def adapter_of(module: nn.Module, schema: Schema) -> Adapter | None:
    """Of the first `PeftModel` in the module; None without one, or where peft stores what nobody trains."""
    peft = sys.modules.get("peft")
    model = next((m for m in module.modules() if peft is not None and isinstance(m, peft.PeftModel)), None)
    if peft is None or model is None:
        return None
    name = model.active_adapter
    ours = {p.data_ptr(): path for path, p in module.named_parameters()}
    stored = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {key: ours.get(value.data_ptr(), "") for key, value in stored.items()}
    if not set(tensors.values()) <= {t.name for t in schema.tensors if t.role == "p"}:
        return None
    return Adapter(config=_plain({**model.peft_config[name].to_dict(), "inference_mode": True}), tensors=tensors)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON: peft's settings hold sets."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=lambda value: sorted(map(str, value))))
    return plain
