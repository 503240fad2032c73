"""Import all modules that a forked rank uses, in the server that ranks are forked from.

torch loads `torch._dynamo` at the first call of an optimizer or a module, which takes 1.2 s on
every rank. A model of Transformers does the same. Garbage collection is off meanwhile, because it
took half of the time. The objects are then frozen: a rank neither collects them nor copies their
pages.
"""

# ruff: noqa: E402
import gc

gc.disable()

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor.parallel
import torch.onnx
import torch.profiler
import torch.testing._internal.distributed.fake_pg
import torch.utils.checkpoint
import transformers.models.llama.modeling_llama

import fsdp_inspect.cli.application
import fsdp_inspect.forecast.forecast
import fsdp_inspect.recording.discovery
import fsdp_inspect.recording.launcher
import fsdp_inspect.recording.recorder
import fsdp_inspect.recording.verdict
import fsdp_inspect.report.diagnosis
import fsdp_inspect.run
import fsdp_inspect.store.reader
import instrumented_trainer.command_line
import instrumented_trainer.forecasting
import instrumented_trainer.trainer

__all__ = ["fsdp_inspect", "instrumented_trainer", "torch", "transformers"]

gc.collect()
gc.freeze()
gc.enable()
