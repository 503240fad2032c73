"""Pause the recording while a CUDA graph is captured.

An event recorded on a capturing stream becomes part of the graph and has no time. A query of any
event may end the capture with an error. Every hook therefore only calls the original until the
capture ends, and the run contains a note about it. Replays of the graph run no Python code: their
steps have a duration but no units.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session


def pause_during_capture(session: Session, patches: Patches) -> None:
    """Stop recording at each `capture_begin` and resume after its `capture_end`.

    torch 2.13, `torch/cuda/graphs.py`: `torch.cuda.graph` and CUDA graph trees both call these two
    methods of `torch.cuda.CUDAGraph`.
    """
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.pause(
            f"A CUDA graph was captured in step {session.step}. The recorder sees nothing inside a "
            "graph: steps that replay it show only their duration."
        )
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            session.resume()
            raise

    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            session.resume()

    patches.set_attribute(graph, "capture_begin", capture_begin)
    patches.set_attribute(graph, "capture_end", capture_end)
