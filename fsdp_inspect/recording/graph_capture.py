"""Record nothing while a CUDA graph is being captured.

An event that is recorded on a capturing stream becomes part of the graph and has no time of its
own. A query of any event may end the capture with an error. So every hook only calls through
until the capture has ended, and the run says so. Replays of the graph run no Python code: their
steps have a length and no units.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session


def pause_during_capture(session: Session, patches: Patches) -> None:
    """Stop recording at each `capture_begin` and go on after its `capture_end`.

    torch 2.13, `torch/cuda/graphs.py`: `torch.cuda.graph` and CUDA graph trees both call these two
    methods of `torch.cuda.CUDAGraph`.
    """
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.pause(
            f"A CUDA graph was captured in step {session.step}. Nothing inside a graph is "
            "recorded: steps that replay it show their length only."
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
