"""Record training with Hugging Face Trainer, TRL, Accelerate, Lightning or torchtitan.

Hugging Face Trainer, with FSDP2 (`fsdp_version: 2`, or a model sharded when it was loaded), FSDP1
or DDP:

    from transformers import Trainer
    from fsdp_inspect.recording.integrations.transformers import FsdpInspectCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[FsdpInspectCallback()])
    trainer.train()

TRL, for `SFTTrainer` and the other trainers:

    from trl import SFTTrainer
    from fsdp_inspect.recording.integrations.trl import FsdpInspectCallback

    SFTTrainer(model, args, train_dataset=data, callbacks=[FsdpInspectCallback()]).train()

Lightning (`lightning` or `pytorch_lightning`), with `fully_shard` in `configure_model`:

    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from fsdp_inspect.recording.integrations.lightning import FsdpInspectCallback

    Trainer(strategy=ModelParallelStrategy(), callbacks=[FsdpInspectCallback()]).fit(module)

Accelerate, with `fsdp_version: 2`:

    from fsdp_inspect.recording.integrations.accelerate import accelerate_recorder

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerate_recorder(accelerator, model, optimizer) as recorder:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(loss=loss)

torchtitan needs no code, only an option of its command line:

    --override.imports 'fsdp_inspect.recording.integrations.torchtitan.record={"path": "run"}'

All accept the keyword arguments of `fsdp_inspect.Recorder`: `path`, `name`, `warmup_steps`,
`memory_steps` and so on. Each module imports only its own library.
"""
