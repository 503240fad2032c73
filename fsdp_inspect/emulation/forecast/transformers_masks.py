"""Make Transformers build the attention masks of a training on fake tensors.

With SDPA, Transformers leaves out a mask that hides nothing: a padding mask of ones, and packed
sequences of which each row has only one. It does not look at the values of fake tensors, so the
mask would stay, take memory and exclude flash attention.
"""

import sys
from contextlib import ExitStack
from typing import Any

from fsdp_inspect.emulation.forecast.fake_values import ValuelessTensors
from fsdp_inspect.recording.torch_api.attributes import replace_everywhere
from fsdp_inspect.recording.torch_api.dispatch import FakeTensor

NOTE = (
    "Each row of a batch is assumed to be one sequence. If the training packs several sequences "
    "into a row, its attention masks need more memory."
)


def mask_as_in_training(undo: ExitStack, tensors: ValuelessTensors, notes: list[str]) -> None:
    """Let Transformers leave out masks that hide nothing, until `undo` is closed.

    Args:
        undo: Restores the functions of Transformers.
        tensors: The mode of the fake tensors.
        notes: Receives `NOTE` when the model depends on the assumption.
    """
    masks, imports = map(
        sys.modules.get, ("transformers.masking_utils", "transformers.utils.import_utils")
    )
    find_packed = getattr(masks, "find_packed_sequence_indices", None)
    is_fake = getattr(imports, "is_fake_tensor", None)
    if find_packed is None or is_fake is None:  # Transformers is not loaded, or has another version
        return

    def find_none(position_ids: Any) -> Any:
        if not isinstance(position_ids, FakeTensor):
            return find_packed(position_ids)
        if NOTE not in notes:
            notes.append(NOTE)
        return None

    def is_unknown(tensor: Any) -> bool:
        return isinstance(tensor, FakeTensor) and tensors.values.find(tensor) is None

    replace_everywhere(undo, {find_packed: find_none, is_fake: is_unknown})
