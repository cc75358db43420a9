"""A torch.fx module's forward that calls torch's operators themselves.

To look up each by its name, and torch's Python function around it, is a good part of a step of small tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from types import MethodType
from typing import Any


def direct_forward(module: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch is not imported here
    """The forward of a GraphModule, with the same results."""
    code = module.graph.python_code("self")
    known = dict(code.globals)

    def direct(call: re.Match[str]) -> str:
        name = call[0].replace(".", "_")
        known[name] = attrgetter(call[1])(known["torch"].ops)._op  # noqa: SLF001 - what its __call__ calls
        return name

    source = re.sub(r"\btorch\.ops\.(\w+\.\w+\.\w+)(?=\()", direct, code.src)
    exec(source, known)  # noqa: S102 - torch does so with the same source
    return MethodType(known["forward"], module)
