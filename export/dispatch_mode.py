"""The base of our modes that see the operators torch calls."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """A mode that torch.compile never meets."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports all of torch._dynamo, 1.4 s, to tell it to leave the mode alone."""
        return False
