"""A context in which torch's tracers and the converters take less time, with the same files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from edge_client.rare_collection import rare_collection


@contextmanager
def quick_conversion() -> Iterator[None]:
    """With rare garbage collection, and one reading of torch's list of composite operators.

    torch reads the list again for each of its 34 namespaces and each of its tables of decompositions: a fifth of a
    second every time (torch 2.13).
    """
    with rare_collection():
        from torch._export import utils

        once = cache(utils._materialize_cpp_cia_ops)  # noqa: SLF001 - torch has no setting
        with patch.object(utils, "_materialize_cpp_cia_ops", once), _known_keys_not_tried():
            yield


def _known_keys_not_tried() -> AbstractContextManager[object]:
    """With one trial for each set of dispatch keys of results that torch's fake tensors remember.

    Before torch remembers the shape of an operator's result, it makes a second such tensor, to see whether that has
    the dispatch keys of the first. A tensor made from a shape always has the keys of its kind, so the first trial of a
    set that succeeds serves the others.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    own, known = FakeTensorMode._get_output_info_for_cache_entry, set[str]()  # noqa: SLF001 - torch has no setting

    def remember(mode: Any, *given: Any) -> Any:  # noqa: ANN401 - torch's own
        output = given[-1]
        keys = torch._C._dispatch_key_set(output) if isinstance(output, torch.Tensor) else ""  # noqa: SLF001 - no public name
        maker: Any = SimpleNamespace(_output_from_cache_entry=lambda *_: output) if keys in known else mode
        found = own(maker, *given)
        if found.metadata is not None:  # else the result is an argument or a number, and nothing was made
            known.add(keys)
        return found

    return patch.object(FakeTensorMode, "_get_output_info_for_cache_entry", remember)
