"""List the frameworks of the matrix, each with its driver and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Entry:
    """One framework, or one kind of hand-written loop."""

    name: str
    """The name of the framework and of its driver: `NAME_driver.py`."""
    title: str
    packages: tuple[str, ...]
    """The packages whose versions the matrix shows."""
    callback: str
    """The callback or object that records it from inside the script."""
    limits: str
    """The parts that the fixture replaces or a recording does not show; empty if there are none."""
    ends: tuple[int, int] = (0, 1)
    """The optimizer step that ends the first recorded step, and the distance to the next, when an
    unmodified script is recorded."""
    callback_ends: tuple[int, int] = (0, 1)
    """The same with the callback."""
    scalars: frozenset[str] = frozenset()
    """The numbers that the callback records."""
    first_compared: int = 1
    """The first step of an unmodified script whose collectives are compared. With several
    optimizers it is 2: the recorder learns them in the steps before."""
    script: str = ""
    """The name of a driver of several entries; empty: the entry's own."""
    arguments: tuple[str, ...] = ()
    """The arguments of the driver."""
    is_simulated: bool = True
    """Whether plans are simulated; else only settings of the sharder are, or a command states why
    not."""
    is_plan_checked: bool = True
    """Whether the run is checked against its plan; else `summary` states the reason."""

    @property
    def driver(self) -> Path:
        """The training script."""
        return FOLDER / f"{self.script or self.name}_driver.py"


ENTRIES = (
    Entry(
        "transformers",
        "Transformers Trainer",
        ("transformers",),
        "`integrations.transformers.FsdpInspectCallback`",
        "Transformers shards the model while it loads it (`distributed_config`), also on CPU. Its "
        "other setting, `fsdp_config`, uses Accelerate.",
        scalars=frozenset({"loss", "grad_norm", "learning_rate", "eval_loss"}),
    ),
    *(
        Entry(
            f"trainer_fsdp{version}",
            f"Transformers Trainer `--fsdp`, FSDP{version}: Transformers, Accelerate",
            ("transformers", "accelerate"),
            "`integrations.transformers.FsdpInspectCallback`",
            '`--fsdp "full_shard auto_wrap"` with `fsdp_config` '
            f'`{{"version": {version}}}`: {sharder}. Accelerate ignores the option on CPU and '
            "wraps the model with DDP, so the test sets the state that an accelerator would set.",
            scalars=frozenset({"loss", "grad_norm", "learning_rate", "eval_loss"}),
            script="fsdp_option",
            arguments=(str(version),),
        )
        for version, sharder in ((1, "`FullyShardedDataParallel`"), (2, "`fully_shard`"))
    ),
    *(
        Entry(
            f"accelerate_fsdp{version}",
            f"Accelerate, FSDP{version}",
            ("accelerate",),
            "`integrations.accelerate.accelerate_recorder`",
            f"Accelerate does not support FSDP{version} on CPU. The test sets the state that an "
            "accelerator would set. `prepare` and the loop are Accelerate's own.",
            scalars=frozenset({"loss"}),
            script="accelerate",
            arguments=(str(version),),
        )
        for version in (2, 1)
    ),
    Entry(
        "lightning",
        "Lightning `ModelParallelStrategy`",
        ("lightning",),
        "`integrations.lightning.FsdpInspectCallback`",
        "",
        scalars=frozenset({"loss"}),
    ),
    Entry(
        "lightning_fsdp1",
        "Lightning `FSDPStrategy`, FSDP1",
        ("lightning",),
        "`integrations.lightning.FsdpInspectCallback`",
        "Lightning rejects `FSDPStrategy` on CPU. The test uses a class derived from it, which "
        "passes the CPU as `device_id`.",
        scalars=frozenset({"loss"}),
        script="lightning",
        arguments=("fsdp1",),
    ),
    Entry(
        "torchtitan",
        "torchtitan, `llama3_debugmodel`",
        ("torchtitan",),
        "`--override.imports` with `integrations.torchtitan.record`",
        "On CPU, the test replaces the device module, FlexAttention (by SDPA) and PREMUL_SUM "
        "(by SUM), and sets `--parallelism.spmd-backend partial_dtensor`. torch 2.13 lacks "
        "`set_timeout`, so the test adds one that does nothing. Sequences are short, and the data "
        "are random tokens. Its chunked loss calls `unshard()` on the head, so the plan check does "
        "not compare the all-gathers of that unit, and the step is simulated on CPU only.",
        scalars=frozenset({"loss", "grad_norm", "validation_loss"}),
    ),
    Entry(
        "trl",
        "TRL `SFTTrainer`",
        ("trl",),
        "`integrations.trl.FsdpInspectCallback`",
        "Transformers shards the model, as in the first row.",
        scalars=frozenset(
            {
                "loss",
                "grad_norm",
                "learning_rate",
                "eval_loss",
                "entropy",
                "mean_token_accuracy",
                "num_tokens",
            }
        ),
    ),
    Entry(
        "peft",
        "peft LoRA",
        ("peft",),
        "`Recorder` in the script",
        "peft has no training loop. The script calls `fully_shard` on each layer of the model with "
        "adapters.",
    ),
    Entry(
        "float8",
        "torchao float8",
        ("torchao",),
        "`Recorder` in the script",
        "The matrix products are emulated, because they need a GPU. FSDP gathers the weights in "
        "float8.",
    ),
    Entry(
        "ppo",
        "PPO, hand-written",
        ("torch",),
        "`Recorder({'actor': actor, ...})`",
        "One recording has actor, critic and reference. In the unmodified script, a step is "
        "a round of both optimizers, so one PPO iteration has two steps.",
        ends=(1, 2),
        callback_ends=(3, 4),
        first_compared=2,
    ),
    Entry(
        "gan",
        "GAN, hand-written",
        ("torch",),
        "`Recorder([generator, discriminator], optimizer=[...])`",
        "One recording has both models. A step is a round of both optimizers.",
        ends=(1, 2),
        callback_ends=(1, 2),
        first_compared=2,
    ),
    *(
        Entry(
            f"zero{stage}",
            f"DeepSpeed ZeRO-{stage}",
            ("deepspeed",),
            "`Recorder(engine)`",
            "The optimizer is torch's AdamW, with its state offloaded to the CPU. Plans are "
            "neither checked nor simulated; the settings of the engine are simulated.",
            script="deepspeed",
            arguments=(str(stage),),
            is_simulated=False,
            is_plan_checked=False,
        )
        for stage in (1, 2, 3)
    ),
)
