"""Count the operations and the kernels of a step, by unit and phase, while it runs.

`torch.utils.flop_counter` has a formula for each operator that multiplies matrices. It counts
causal attention whole; here, the masked half is left out. Other operators count no operations.
A formula that fails counts none either, and a note names the operator: torch 2.11's formula for
attention rejects fewer key heads than query heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fsdp_inspect.recording.torch_api.dispatch import TorchDispatchMode, schema_of
from fsdp_inspect.trace.run import OperationCount

_LAUNCHES_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is active."""

    supports_higher_order_operators = True

    def __init__(self, find_place: Callable[[], tuple[int, str]]) -> None:
        """`find_place` returns the running unit (-1: none) and the phase."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._find_place = find_place
        self._failed: dict[str, str] = {}
        self._counts: defaultdict[tuple[int, str, int], list[int]] = defaultdict(lambda: [0, 0, 0])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let regions compile while operations are counted."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count it."""
        named = dict(kwargs or {})
        result = func(*args, **named)
        if not _is_kernel(func):
            return result
        unit, phase = self._find_place()
        whole = self._count_whole(func, args, named, result)
        run = whole // 2 if whole and _is_causal(func, args, named) else whole
        count = self._counts[unit, phase, _itemsize(result)]
        for place, amount in enumerate((run, whole, 1)):
            count[place] += amount
        return result

    def _count_whole(
        self, func: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any
    ) -> int:
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            return 0
        try:
            return int(formula(*args, **named, out_val=result))
        except Exception as error:  # a count is no reason to end the forecast
            self._failed.setdefault(func.overloadpacket.__name__, type(error).__name__)
            return 0

    def notes(self) -> list[str]:
        """A sentence for each operator whose operations are missing from the counts."""
        return [
            f"The operations of `{name}` are not counted: the formula of torch "
            f"{torch.__version__} failed with {error}. Its kernels are counted."
            for name, error in sorted(self._failed.items())
        ]

    def counts(self) -> Iterator[OperationCount]:
        """The counts so far, by unit, phase and width."""
        for (unit, phase, itemsize), (run, whole, kernels) in sorted(self._counts.items()):
            yield OperationCount(
                unit=unit, phase=phase, itemsize=itemsize, run=run, whole=whole, kernels=kernels
            )


def _is_kernel(func: Any) -> bool:
    """Whether an operator computes: it is no view, and no allocation."""
    schema = schema_of(func)
    if schema is None or func.overloadpacket.__name__ in _LAUNCHES_NOTHING:
        return False
    aliases = [each.alias_info for each in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def _itemsize(result: Any) -> int:
    """Bytes of an element of the first result; 0: no tensor."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    return first.dtype.itemsize if isinstance(first, torch.Tensor) else 0
