"""Import all modules that a forked rank uses, in the server that ranks are forked from.

The recorder waits longer in these ranks than it does for users: see the end of this file.

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
import fsdp_inspect.emulation.forecast.forecast
import fsdp_inspect.recording.attachment
import fsdp_inspect.recording.devices
import fsdp_inspect.recording.discovery
import fsdp_inspect.recording.launcher
import fsdp_inspect.recording.order_check
import fsdp_inspect.recording.recorder
import fsdp_inspect.recording.storage_tracker
import fsdp_inspect.recording.torch_api.process_groups
import fsdp_inspect.recording.verdict
import fsdp_inspect.report.diagnosis
import fsdp_inspect.run
import fsdp_inspect.store.reader
import fsdp_inspect.store.writer
import instrumented_trainer.command_line
import instrumented_trainer.forecasting
import instrumented_trainer.trainer

# A busy machine stalls processes for some seconds. The recorder must not take this for a disk or a
# rank that does not respond. Tests of these limits set their own.
fsdp_inspect.recording.attachment._SETTLE_S = 60.0
fsdp_inspect.recording.attachment._FAILED_END_S = 60.0
fsdp_inspect.recording.devices._STOP_TIMEOUT_S = 60.0
fsdp_inspect.recording.order_check._EXCHANGE_S = 60.0
fsdp_inspect.recording.storage_tracker._LONGEST_RELEASE_S = 20.0
fsdp_inspect.recording.torch_api.process_groups.ANSWER_S = 60.0
fsdp_inspect.recording.verdict._TIMEOUT_S = 60.0
fsdp_inspect.store.writer.STALL_TIMEOUT_S = 60.0
fsdp_inspect.store.writer._FLUSH_TIMEOUT_S = 60.0

__all__ = ["fsdp_inspect", "instrumented_trainer", "torch", "transformers"]

gc.collect()
gc.freeze()
gc.enable()
